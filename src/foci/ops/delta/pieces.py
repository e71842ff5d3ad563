"""How sequences are cut into pieces of whole chunks, so that few heads fill a GPU."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from foci.core.tune import Target, stored
from foci.ops.delta.call import Call
from foci.ops.gpu import CHUNK
from foci.ops.stretches import Cut, cut_into

WIDEST = 128  # channels of a key: a piece's map has their square
SHORTEST = 4  # chunks of a piece
MOST = 64  # pieces of a sequence


class Pieces(NamedTuple):
    """A Cut, and room for the maps of its pieces, which only kernels read."""

    tokens: int
    programs: int
    slots: int
    M: Tensor | None  # [slots,H,K,K]; in bfloat16 two of them [slots,H,2,K,K]
    N: Tensor | None  # [slots,H,K,V]


def pieces(call: Call, target: Target, programs: int) -> Pieces:
    """The pieces of a call that so many programs would walk whole."""
    B, T, _, H, K, V, N = call.sizes
    tokens, programs, slots = cut(N, B, T, call.offsets is not None, K, V, target, programs)
    if not tokens:
        return Pieces(0, programs, 0, None, None)
    dtype, device = stored(call.v.dtype), call.v.device
    M = torch.empty(slots, H, *((2,) if dtype == torch.bfloat16 else ()), K, K, dtype=dtype, device=device)
    return Pieces(tokens, programs, slots, M, torch.empty(slots, H, K, V, dtype=torch.float32, device=device))


@functools.lru_cache(512)
def cut(N: int, B: int, T: int, packed: bool, K: int, V: int, target: Target, programs: int) -> Cut:
    """The Cut of N sequences in B rows of T tokens, which so many programs would walk whole.

    A piece is S -> M S + N, with M the K columns that the walk makes of the unit matrix and N the V that it makes of
    zeros and values. M and N come by a launch without outputs (`MAPS` of the work of a walk's columns, V of each piece
    but the last, K of each but the first and last); then each piece joins those before it, one product M S after the
    other (`JOIN`), and walks. In the time that one program takes for one chunk, whole sequences of c chunks take c, and

        MAPS c/P max(1, ((P-1) + (P-2) K/V) programs / processors) + JOIN (P-2) + LAUNCH + c/P max(1, P programs / ..)

    cut into P. The P with the least is taken where that is less than `WORTH` c: half as wide a block of V, which gives
    whole sequences twice the programs, is worth as much. All four are reckoned from the forward's products and not
    measured; the backward's maps cost a little more.
    Of shapes alone: of packed documents, whose lengths only the GPU knows, the mean length counts.
    """
    chunks = -(-(B * T) // (N * CHUNK))
    tokens, least = 0, WORTH * chunks
    if K <= WIDEST and programs < target.processors:
        for P in range(2, min(MOST, chunks // SHORTEST) + 1):
            time = _steps(chunks, P, K / V, programs / target.processors)
            if time < least:
                tokens, least = CHUNK * -(-chunks // P), time
    return cut_into(tokens if tokens < T else 0, N, T, packed)


MAPS, JOIN, LAUNCH, WORTH = 0.6, 0.5, 3.0, 0.7


def _steps(chunks: int, P: int, wide: float, filled: float) -> float:
    """The time of a cut walk, in that of one chunk; `filled`: programs a processor, `wide`: K / V."""
    piece = -(-chunks // P)
    maps = MAPS * piece * max(1.0, (P - 1 + (P - 2) * wide) * filled)
    return maps + JOIN * (P - 2) + LAUNCH + piece * max(1.0, P * filled)
