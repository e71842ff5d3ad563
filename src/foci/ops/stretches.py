"""How sequences are cut into stretches, so that few of them fill a GPU."""

from __future__ import annotations

from typing import NamedTuple

from foci.core.tune import Target

SHORTEST = 128


class Cut(NamedTuple):
    """Tokens of a stretch (0: sequences are walked whole), programs that walk one block of channels, slots of maps."""

    tokens: int
    programs: int
    slots: int


def cut(N: int, B: int, T: int, packed: bool, target: Target, warps: int) -> Cut:
    """The Cut of N sequences in B rows of T tokens where all channels of one sequence make so many warps.

    What is cut is read twice, so as few stretches are made as keep eight warps a processor busy: of 128 tokens or 4, 16
    ... times as many. Short sequences are not cut, as one launch more takes as long; nor enough to fill the GPU.

    A document ends within a stretch, so there is room for one more each; and a program for each that has no token.
    """
    tokens = 0
    if T >= 4 * SHORTEST and N * warps < 4 * target.processors:
        tokens = SHORTEST
        while 4 * tokens * 8 * target.processors <= B * T * warps:
            tokens *= 4
    if not 0 < tokens < T:
        return Cut(0, N, 0)
    slots = T // tokens + N if packed else N * -(-T // tokens)
    return Cut(tokens, slots + N * packed, slots)
