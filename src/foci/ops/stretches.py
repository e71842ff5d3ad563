"""How sequences are split into stretches that are processed in parallel, so that few sequences fill a GPU."""

from __future__ import annotations

from typing import NamedTuple

from foci.core.tune import Target


class Cut(NamedTuple):
    """Tokens of a stretch (0: sequences are not split), programs per block of channels, slots for affine maps."""

    tokens: int
    programs: int
    slots: int


class Rule(NamedTuple):
    """When sequences that are scanned token by token are split, and into how many stretches."""

    shortest: int  # minimum tokens of a stretch; a sequence has four at least
    few: float  # sequences with at least so many warps per processor are not split
    most: int  # stretches have fewer warps per processor than this
    joined: float = 0.0  # a sequence has at most (tokens of a stretch) / joined, as each combines all maps before it


def cut(rule: Rule, N: int, B: int, T: int, packed: bool, target: Target, warps: int) -> Cut:
    """The Cut of N sequences in B rows of T tokens, where all channels of one sequence take `warps` warps.

    Stretches have `shortest` tokens, doubled until processors have fewer than `most` warps and no stretch has too many
    before it to combine. For packed documents the mean length counts.
    """
    shortest, few, most, joined = rule
    tokens = 0
    if 4 * shortest <= T and N * warps < few * target.processors:
        tokens = shortest
        while most * tokens * target.processors <= B * T * warps or N * tokens * tokens < joined * B * T:
            tokens *= 2
    return cut_into(tokens if tokens < T else 0, N, T, packed)


class Costs(NamedTuple):
    """A cost model of a walk (a sequential pass over chunks): microseconds per chunk of 64 tokens and 64 channels.

    Fitted to measured times of many splits so that their minimum is found; no single number is a measured time.
    `alone`, `shared`: a program with a processor to itself, two that share one. `mapped`: computing maps. `joined`:
    combining one map. `started`: fixed overhead of splitting.
    """

    alone: float
    shared: float
    mapped: float
    joined: float
    started: float


LEAST = 256  # tokens of a stretch


def cheapest(N: int, B: int, T: int, packed: bool, blocks: int, costs: Costs, target: Target) -> Cut:
    """The Cut with the least estimated time, for N sequences in B rows of T tokens, each of `blocks` channel blocks.

    Stretches have LEAST tokens, or 2, 4 ... times as many. For packed documents the mean length counts.
    """
    mean = -(-B * T // N)

    def time(tokens: int) -> float:
        count, chunks = -(-mean // tokens), tokens / 64
        rounds, rest = divmod(N * blocks * count, 2 * target.processors)
        more = max(0.0, rest / target.processors - 1) * (costs.shared - costs.alone)
        walked = chunks * (rounds * costs.shared + (costs.alone + more if rest else 0))
        if count == 1:
            return walked
        crowd = max(1.0, N * blocks * (count - 1) / (1.7 * target.processors))
        return walked + costs.started + costs.mapped * chunks * crowd + costs.joined * count * (rounds + (rest > 0))

    lengths = [LEAST << i for i in range(max(0, (mean - 1) // LEAST).bit_length())]
    best = min([mean, *lengths], key=time)
    return cut_into(best if best < mean else 0, N, T, packed)


def cut_into(tokens: int, N: int, T: int, packed: bool) -> Cut:
    """The Cut into stretches of so many tokens; 0: no split.

    A document may end within a stretch, so each has room for one more; and one program for each without a token.
    """
    if not tokens:
        return Cut(0, N, 0)
    slots = T // tokens + N if packed else N * -(-T // tokens)
    return Cut(tokens, slots + N * packed, slots)
