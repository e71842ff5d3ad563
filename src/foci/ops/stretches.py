"""How sequences are cut into stretches, so that few of them fill a GPU."""

from __future__ import annotations

from typing import NamedTuple

from foci.core.tune import Target


class Cut(NamedTuple):
    """Tokens of a stretch (0: sequences are walked whole), programs that walk one block of channels, slots of maps."""

    tokens: int
    programs: int
    slots: int


class Rule(NamedTuple):
    """When sequences that threads walk token by token are cut, and into how many stretches."""

    shortest: int  # tokens of a stretch; there are four of a sequence at least
    few: float  # sequences that give each processor so many warps are walked whole
    most: int  # stretches give each processor fewer warps than these
    joined: float = 0.0  # of a sequence there are no more than their tokens / joined, as each joins those before it


def cut(rule: Rule, N: int, B: int, T: int, packed: bool, target: Target, warps: int) -> Cut:
    """The Cut of N sequences in B rows of T tokens where all channels of one sequence make so many warps.

    Of `shortest` tokens each or 2, 4 ... times as many: the shortest that give each processor fewer than `most` warps
    and of which none has too many to join. Of packed documents the mean length counts.
    """
    shortest, few, most, joined = rule
    tokens = 0
    if 4 * shortest <= T and N * warps < few * target.processors:
        tokens = shortest
        while most * tokens * target.processors <= B * T * warps or N * tokens * tokens < joined * B * T:
            tokens *= 2
    return cut_into(tokens if tokens < T else 0, N, T, packed)


class Costs(NamedTuple):
    """What a walk is taken to cost, microseconds, a chunk of 64 tokens and a block of 64 channels of one head.

    Fitted to the times that cuts of many lengths took, so that the least is found: none of these is a time by itself.
    `alone` and `shared`: of a program that has a processor for itself, of two that share one. `mapped`: of what makes
    maps. `joined`: of a map, whoever is behind it. `started`: of what stretches take besides, in all.
    """

    alone: float
    shared: float
    mapped: float
    joined: float
    started: float


LEAST = 256  # tokens of a stretch


def cheapest(N: int, B: int, T: int, packed: bool, blocks: int, costs: Costs, target: Target) -> Cut:
    """The Cut of N sequences in B rows of T tokens, each of so many blocks, that is estimated to take least.

    Stretches are of LEAST tokens or 2, 4 ... times as many. Of packed documents the mean length counts.
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
    """The Cut into stretches of so many tokens, or none.

    A document ends within a stretch, so there is room for one more each; and a program for each that has no token.
    """
    if not tokens:
        return Cut(0, N, 0)
    slots = T // tokens + N if packed else N * -(-T // tokens)
    return Cut(tokens, slots + N * packed, slots)
