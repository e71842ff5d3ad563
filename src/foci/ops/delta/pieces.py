"""How sequences are split into pieces of whole chunks that run in parallel, so that few heads fill a GPU."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.core.tune import Target, state_dtype, target_of
from foci.ops.delta.call import Call
from foci.ops.gpu import CHUNK
from foci.ops.stretches import Cut, cut_into

WIDEST = 128  # key channels at most: a piece's map is K x K
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
    fill: float = 0.0  # of turned states: not used if their programs fill at most this share of the processors


FORWARD = Costs(1.65, 0.8, 1.25, 3.0, whole=2.0)
BACKWARD = Costs(2.5, 1.0, 1.25, 2.2, whole=1.0)
TURNED = Costs(2.4, 0.62, 1.0, 1.5, 1.45, fill=0.4)  # twice as many columns a program (kernels_triton_token_walks.py)
TURNED_BACK = Costs(2.9, 0.8, None, 1.0, 2.8)
WORTH = 0.92  # splitting, with its additional launch, must take less than this share of the time of whole sequences
UNGATED = 3.4  # microseconds of a chunk in the backward, not turned, without gates, where rounding errors do not decay


class Way(NamedTuple):
    """How a call's sequences are processed: transposed states or not, and in which pieces."""

    turned: bool  # states turned over (kernels_triton_token_walks.py)
    pieces: int  # of a sequence that is turned
    maps: bool  # whether each of these begins by maps; else after a warm-up, where there are several
    cut: Pieces  # of those that are not


def way(
    call: Call, back: bool, token_walks: Any, joins: Any, shares: int, blocks: int, operands: Any | None,
    by_warps: bool = False,
) -> Way:  # fmt: skip
    """The Way of a call; `shares`: pieces of a sequence if states are turned and begin with a warm-up.

    `blocks`: programs per head if states are not turned; `operands`: what is read if they are, None if they cannot be.
    `by_warps`: by those of kernels_gluon.py, which nothing here is faster than where gates forget as models' do.
    """
    *_, H, K, V, N = call.sizes
    target, whole = target_of(call.v.device), Pieces(0, N, 0, None, None)
    if by_warps:
        return Way(True, shares, False, whole)
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
    """The number of pieces, with maps, per sequence with turned states of 64 columns a program; 1 if that is slower.

    Slower than `programs` programs without turned states, whole or in `pieces`. Packed documents are not split, as all
    would get the same number of pieces.
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
    dtype, device = state_dtype(call.v.dtype), call.v.device
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
    if state_dtype(call.v.dtype) != torch.bfloat16 or K * call.tiles > (128 if back else 256):
        return costs._replace(shared=None)
    return costs


@functools.lru_cache(512)
def cut(N: int, B: int, T: int, packed: bool, K: int, V: int, costs: Costs, target: Target, programs: int) -> Cut:
    """The Cut of N sequences in B rows of T tokens, which take `programs` programs if they are not split.

    A piece maps S -> M S + N: M is the walk's result for the identity as state (K columns) and no values, N its result
    for a zero state and the values (V columns). A first launch, without outputs, computes N of each piece but the last
    and M of each but the first and last; then each piece combines those before it, one product M S after another, and
    walks its own chunks. In units of one program's time for one chunk, whole sequences of c chunks take c, and P pieces

        (map c/P + launch) rounds((P-1 + (P-2) K/V) programs) + join (P-1) K/128 + c/P rounds(P programs)

    where rounds(n) is how often n programs fill the processors; if maps exceed the processors and two fit on one,
    `shared` replaces `map`, with rounds of twice as many. The best P is taken if its time is less than WORTH c. Depends
    on shapes only: for packed documents, whose lengths are on the GPU, the mean length counts.
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
