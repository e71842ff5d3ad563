"""How sequences are split into pieces of whole chunks that run in parallel, so that few heads fill a GPU."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.core.tune import Target, stored, target_of
from foci.ops.delta.call import Call
from foci.ops.gpu import CHUNK
from foci.ops.stretches import Cut, cut_into

WIDEST = 128  # channels of a key: a piece's map has their square
SHORTEST = 4  # chunks of a piece
MOST = 64  # pieces of a sequence


class Pieces(NamedTuple):
    """A Cut, and memory for the affine maps of its pieces, which only kernels use."""

    tokens: int
    programs: int
    slots: int
    M: Tensor | None  # [slots,H,K,K]; in bfloat16 two of them [slots,H,2,K,K]
    N: Tensor | None  # [slots,H,K,V]


class Costs(NamedTuple):
    """A cost model of pieces, in units of one program's time for one chunk. As measured on an H100, in bfloat16."""

    chunk: float  # that time, in microseconds
    map: float  # one chunk of a map, by a program with a processor to itself
    shared: float | None  # the same if two programs share a processor; None: two do not fit
    join: float  # combining one map of 128 channels
    launch: float = 3.0  # one more launch, and each further round of its programs over the processors
    whole: float = 0.0  # overhead of a walk over whole sequences
    fill: float = 0.0  # share of processors: below it, whole walks are slower than cut ones per chunk


FORWARD = Costs(1.65, 0.8, 1.25, 3.0, whole=2.0)
BACKWARD = Costs(2.5, 1.0, 1.25, 2.2, whole=1.0)
TURNED = Costs(2.4, 0.62, 1.0, 1.5, 1.45, fill=0.4)  # twice as many columns a program (kernels_triton_token_walks.py)
TURNED_BACK = Costs(2.9, 0.8, None, 1.0, 2.8)
WORTH = 0.92  # of the time of whole sequences, from which on a launch more is worth it
UNGATED = 3.4  # microseconds: a chunk backwards, not turned over, where no gates forget what roundings leave


class Way(NamedTuple):
    """How a call's sequences are processed: transposed states or not, and in which pieces."""

    turned: bool  # states turned over (kernels_triton_token_walks.py)
    pieces: int  # of a sequence that is turned
    maps: bool  # whether each of these begins by maps; else after a warm-up, where there are several
    cut: Pieces  # of those that are not


def way(
    call: Call, back: bool, token_walks: Any, joins: Any, shares: int, blocks: int, operands: Any | None
) -> Way:  # fmt: skip
    """In so many `shares` where states are turned and warm up.

    `blocks`: programs that a head has of those that are not; `operands`: what is read of those that are, None where
    none can be.
    """
    *_, H, K, V, N = call.sizes
    target, whole = target_of(call.v.device), Pieces(0, N, 0, None, None)
    turned = operands is not None and token_walks.suits(N * H * shares, K, V, target, *operands)
    if turned and joins.few(call, target, shares):
        return Way(True, shares, False, whole)
    if operands is not None and not turned and token_walks.fits(K, V, target, *operands):
        several = _turned(call, back, target, N * H * blocks)
        if several > 1:
            return Way(True, several, True, whole)
    found = pieces(call, back, target, N * H * blocks)
    return Way(turned and not found.tokens, shares, False, found)


def _turned(call: Call, back: bool, target: Target, programs: int) -> int:
    """Pieces by maps of each sequence that is turned over, of 64 columns a program; 1 where that would take longer.

    Than by so many `programs` that are not turned, whole or in `pieces`. Documents are not cut, as each would have as
    many.
    """
    _, T, _, H, K, V, N = call.sizes
    if call.offsets is not None or not N:
        return 1
    costs, others, chunks = _costs(call, back), TURNED_BACK if back else TURNED, -(-T // CHUNK)
    if call.erase is not None:
        others = others._replace(shared=None)
    turned = N * H * -(-V // 64)
    several, time = _least(chunks, turned, K, V, others, target.processors)
    cuts, other = _worth(chunks, programs, K, V, costs, target.processors)
    if cuts > 1 and several * turned <= others.fill * target.processors:
        return 1
    return several if time * others.chunk < other * costs.chunk else 1


def pieces(call: Call, back: bool, target: Target, programs: int) -> Pieces:
    """The pieces of a call that `programs` programs would walk whole; `back`: in the backward."""
    B, T, _, H, K, V, N = call.sizes
    dtype, device = stored(call.v.dtype), call.v.device
    costs = _costs(call, back)
    tokens, programs, slots = cut(N, B, T, call.offsets is not None, K, V, costs, target, programs)
    if not tokens:
        return Pieces(0, programs, 0, None, None)
    M = torch.empty(slots, H, *((2,) if dtype == torch.bfloat16 else ()), K, K, dtype=dtype, device=device)
    return Pieces(tokens, programs, slots, M, torch.empty(slots, H, K, V, dtype=torch.float32, device=device))


def _costs(call: Call, back: bool) -> Costs:
    """The Costs of pieces whose states are not turned over (transposed)."""
    costs, K = BACKWARD if back else FORWARD, call.sizes[4]
    if back and call.log_decay is None:
        costs = costs._replace(chunk=UNGATED)
    if stored(call.v.dtype) != torch.bfloat16 or K * call.tiles > (128 if back else 256):
        return costs._replace(shared=None)
    return costs


@functools.lru_cache(512)
def cut(N: int, B: int, T: int, packed: bool, K: int, V: int, costs: Costs, target: Target, programs: int) -> Cut:
    """The Cut of N sequences in B rows of T tokens, which so many programs would walk whole.

    A piece is S -> M S + N, with M the K columns that the walk makes of the unit matrix and N the V that it makes of
    zeros and values. M and N come by a launch without outputs (V columns of each piece but the last, K of each but the
    first and last); then each piece joins those before it, one product M S after the other, and walks. In the time
    that one program takes for one chunk, whole sequences of c chunks take c, and cut into P

        (map c/P + launch) rounds((P-1 + (P-2) K/V) programs) + join (P-1) K/128 + c/P rounds(P programs)

    with `rounds` the times that programs fill the processors; more maps than those, where two have room, are `shared`
    in place of `map`, and rounds are of twice as many. The P with the least is taken where that is less than WORTH c.
    Of shapes alone: of packed documents, whose lengths only the GPU knows, the mean length counts.
    """
    chunks = -(-(B * T) // (N * CHUNK))
    several, _ = _worth(chunks, programs, K, V, costs, target.processors)
    tokens = CHUNK * -(-chunks // several) if several > 1 else 0
    return cut_into(tokens if tokens < T else 0, N, T, packed)


def _worth(chunks: int, programs: int, K: int, V: int, costs: Costs, processors: int) -> tuple[int, float]:
    """(number of pieces of states that are not turned over, 1 if another launch does not pay; the time)."""
    several, time = _least(chunks, programs, K, V, costs, processors)
    return (several, time) if time < WORTH * chunks else (1, chunks + costs.whole)


@functools.lru_cache(512)
def _least(chunks: int, programs: int, K: int, V: int, costs: Costs, processors: int) -> tuple[int, float]:
    """(number of pieces, at least two, with the least estimated time; that time). (1, inf) if none is possible."""
    pieces, least = 1, math.inf
    if K <= WIDEST and programs < processors:
        for P in range(2, min(MOST, chunks // SHORTEST) + 1):
            time = _time(chunks, P, programs, K, V, costs, processors)
            if time < least:
                pieces, least = P, time
    return pieces, least


def _time(chunks: int, P: int, programs: int, K: int, V: int, costs: Costs, processors: int) -> float:
    """The time of a walk cut into P pieces, in units of one chunk's."""
    piece, maps = -(-chunks // P), programs * (P - 1 + (P - 2) * K / V)
    mapped, rounds = costs.map, math.ceil(maps / processors)
    if costs.shared is not None and maps > processors:
        mapped, rounds = costs.shared, math.ceil(maps / (2 * processors))
    walked = math.ceil(P * programs / processors)
    return piece * (mapped * rounds + walked) + costs.join * (P - 1) * K / 128 + costs.launch * rounds
