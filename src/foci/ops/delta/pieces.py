"""How sequences are cut into pieces of whole chunks, so that few heads fill a GPU."""

from __future__ import annotations

import functools
import math
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


class Costs(NamedTuple):
    """Of pieces, in the time in which one program takes one chunk. As measured on an H100, in bfloat16."""

    map: float  # a chunk of a map, by a program that has a processor for itself
    shared: float | None  # the same where two programs share one; None: where two have no room
    join: float  # a map of 128 channels, whoever is behind it
    launch: float = 3.0  # one launch more


FORWARD = Costs(0.8, 1.25, 3.0)
BACKWARD = Costs(1.0, 1.25, 2.2)
WORTH = 0.92  # of the time of whole sequences, from which on a launch more is worth it


def pieces(call: Call, back: bool, target: Target, programs: int) -> Pieces:
    """The pieces of a call that so many programs would walk whole, `back` or forward."""
    B, T, _, H, K, V, N = call.sizes
    dtype, device = stored(call.v.dtype), call.v.device
    costs = BACKWARD if back else FORWARD
    if dtype != torch.bfloat16 or K * _operands(call) > (128 if back else 256):
        costs = costs._replace(shared=None)
    tokens, programs, slots = cut(N, B, T, call.offsets is not None, K, V, costs, target, programs)
    if not tokens:
        return Pieces(0, programs, 0, None, None)
    M = torch.empty(slots, H, *((2,) if dtype == torch.bfloat16 else ()), K, K, dtype=dtype, device=device)
    return Pieces(tokens, programs, slots, M, torch.empty(slots, H, K, V, dtype=torch.float32, device=device))


def _operands(call: Call) -> int:
    """How many tiles of all channels a chunk has: queries, keys, erase keys; with gates per channel keys as two."""
    return 4 if call.per_channel else 2 if call.erase is None else 3


@functools.lru_cache(512)
def cut(N: int, B: int, T: int, packed: bool, K: int, V: int, costs: Costs, target: Target, programs: int) -> Cut:
    """The Cut of N sequences in B rows of T tokens, which so many programs would walk whole.

    A piece is S -> M S + N, with M the K columns that the walk makes of the unit matrix and N the V that it makes of
    zeros and values. M and N come by a launch without outputs (V columns of each piece but the last, K of each but the
    first and last); then each piece joins those before it, one product M S after the other, and walks. In the time
    that one program takes for one chunk, whole sequences of c chunks take c, and cut into P

        map c/P rounds((P-1 + (P-2) K/V) programs) + join (P-1) K/128 + launch + c/P rounds(P programs)

    with `rounds` the times that programs fill the processors; more maps than those, where two have room, are `shared`
    in place of `map`, and rounds are of twice as many. The P with the least is taken where that is less than WORTH c.
    Of shapes alone: of packed documents, whose lengths only the GPU knows, the mean length counts.
    """
    chunks = -(-(B * T) // (N * CHUNK))
    tokens, least = 0, WORTH * chunks
    if K <= WIDEST and programs < target.processors:
        for P in range(2, min(MOST, chunks // SHORTEST) + 1):
            time = _time(chunks, P, programs, K, V, costs, target.processors)
            if time < least:
                tokens, least = CHUNK * -(-chunks // P), time
    return cut_into(tokens if tokens < T else 0, N, T, packed)


def _time(chunks: int, P: int, programs: int, K: int, V: int, costs: Costs, processors: int) -> float:
    """How long a walk cut into P takes, in the time of one chunk."""
    piece, maps = -(-chunks // P), programs * (P - 1 + (P - 2) * K / V)
    if costs.shared is None or maps <= processors:
        mapped = costs.map * math.ceil(maps / processors)
    else:
        mapped = costs.shared * math.ceil(maps / (2 * processors))
    walked = math.ceil(P * programs / processors)
    return piece * (mapped + walked) + costs.join * (P - 1) * K / 128 + costs.launch
