"""What pieces of a sequence are told of those before them: their maps, and what is no number any more.

Where gates forget too slowly for a piece to warm up, it begins by maps, for few heads. Which pieces these are only the
GPU knows. So the walk of kernels_triton_token_walks.py is launched once more before: it finds out, and makes maps
S -> M S + N (tiles/affine.py) of all pieces before one of those; mostly it has nothing to do. Then each slow piece
joins them, one product M S after the other; before the walk of kernels_gluon.py a launch here does. What is before a
piece decides, and nothing later; in a backward what is behind it, but not what is behind all gradients: of those no bit
may know what comes later. Where too few heads are short (ops/delta/pieces.py), all pieces begin by maps, but for what
kernels_gluon.py walks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, side, target_of
from foci.tiles.affine import mapped_turned, turned_maps
from foci.tiles.memory import load_tile, present, store_tile
from foci.tiles.pieces import FAR, share
from foci.tiles.state import sequence

CHUNK = 64


@triton.jit
def join_kernel(  # type: ignore[no-untyped-def]
    slow_ptr, M_ptr, N_ptr, first_ptr, H, V, pieces, PIECES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    """BLOCK_V columns of one head's state at the first chunk of each piece of a sequence, up to the last slow one."""
    K: tl.constexpr = BLOCK_K
    v0, head = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * BLOCK_V, tl.program_id(0) // tl.cdiv(V, BLOCK_V)
    at, piece = (tl.cast(head, tl.int64) // H * pieces) * H + head % H, tl.arange(0, PIECES)
    slow = tl.load(slow_ptr + at + piece * H, mask=piece < pieces, other=0)
    last = tl.max(tl.where(slow > 0, piece, 0), 0)
    if last == 0:
        return
    there = turned_maps(M_ptr, at, H, last, K, 1)
    S = load_tile(N_ptr + at * K * V, v0, V, K, 0, K, 1, BLOCK_V, K)
    for i in tl.range(1, last):
        store_tile(first_ptr + (at + i * H) * K * V, S, v0, V, K, 0, K, 1)
        S = mapped_turned(S, there, N_ptr, at, H, i, v0, V)
    store_tile(first_ptr + (at + last * H) * K * V, S, v0, V, K, 0, K, 1)


@triton.jit
def lost_kernel(  # type: ignore[no-untyped-def]
    lost_ptr, offsets_ptr, out_ptr, final_ptr, errors_ptr, states_ptr, T, H, K, V, apart, pieces,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """NaN in those columns of all that a piece has made of which a piece before it has `lost` the state."""
    piece, rest = tl.program_id(0) % (pieces - 1) + 1, tl.program_id(0) // (pieces - 1)
    h, n = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    v, chunks = tl.arange(0, BLOCK_V), tl.cdiv(stop - start, CHUNK)
    lost = tl.zeros([BLOCK_V], tl.int32)
    for before in range(piece):
        ahead, behind = share(before, pieces, chunks)
        lost |= tl.load(lost_ptr + ((n * pieces + before) * H + h) * V + v, mask=(v < V) & (ahead < behind), other=0)
    if tl.max(lost, 0) == 0:
        return
    nothing = tl.full([BLOCK_V], float("nan"), tl.float32)
    ahead, behind = share(piece, pieces, chunks)
    for t in range(start + ahead * CHUNK, tl.minimum(start + behind * CHUNK, stop)):
        token = ((tl.cast(b, tl.int64) * T + t) * H + h) * V + v
        tl.store(out_ptr + token, nothing, mask=lost > 0)
        if errors_ptr is not None:
            tl.store(errors_ptr + token, nothing, mask=lost > 0)
            tl.store(errors_ptr + apart + token, nothing, mask=lost > 0)
    if states_ptr is not None:
        for i in range(ahead * K, behind * K):
            state = ((tl.cast(slot, tl.int64) + i // K) * H + h) * K + i % K
            tl.store(states_ptr + state * V + v, nothing, mask=lost > 0)
    if (piece == pieces - 1) & present(final_ptr):
        for i in range(K):
            tl.store(final_ptr + ((n * H + h) * K + i) * V + v, nothing, mask=lost > 0)


def few(call: Any, target: Target, pieces: int) -> bool:
    """Whether whole sequences, if cut into `pieces`, would fill a quarter of the processors or less.

    There is room then for twice the work. Not of more than four documents, or short ones: each has as many pieces, and
    those of one that is longer than all others are as long.
    """
    *_, H, _, V, N = call.sizes
    return pieces > 1 and _long(call) and target.processors >= 4 * N * H * -(-V // 64)


def _long(call: Any) -> bool:
    """Whether all sequences are as long as the others, or few documents whose pieces are long in the mean."""
    B, T, *_, N = call.sizes
    return call.offsets is None or (N <= 4 and 2 * int(FAR) * CHUNK * N <= B * T)


def by_maps(call: Any, target: Target, pieces: int) -> bool:
    """Whether pieces of `few` heads that warm up too slowly are told from others, and joined by maps.

    In sequences that are longer than what may warm a piece up.
    """
    return call.sizes[1] > int(FAR) * CHUNK and few(call, target, pieces)


def reaches_far(call: Any) -> bool:
    """Whether documents have more than FAR chunks in the mean, for a piece to warm up over, and `few` has no maps."""
    B, T, *_, N = call.sizes
    return not _long(call) and int(FAR) * CHUNK * N < B * T


def twice(call: Any, target: Target, pieces: int, keep: bool) -> bool:
    """Whether kernels_gluon.py, by 64 columns, walks each sequence by two programs, one of which reads the end alone.

    Where there are processors for both, and chunks that it pays, in place of whole sequences, or of two `pieces` of
    less than FAR chunks, which warm up over most of what is before them. `keep`: a backward is to come, and sequences
    that would be walked by less than a fifth of the processors are cut by maps (ops/delta/pieces.py).
    """
    B, T, _, H, K, V, N = call.sizes
    programs, chunks, least = N * H * (V // 64), B * T // (N * CHUNK), 10
    if keep or (K == 64 and call.offsets is None):
        least = 8
    room = 2 * programs <= target.processors and not (keep and 5 * programs < target.processors)
    return room and chunks >= least and (pieces == 1 or (pieces == 2 and chunks < int(FAR)))


def starts(
    call: Any, pieces: int, make: Callable[..., None], each: bool, at_once: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Which pieces are slow [N,pieces,H], if above 0, and maps turned over: N [N,pieces,H,V,K], M [N,pieces,H,2,K,K].

    `each` is slow, which nobody needs to be told: slow is None. `at_once`: where the walk does not join maps itself; in
    place of N the states with which slow pieces begin, M is None. A launch, or two, without much to do where none is
    slow; none, and nothing, where neither `each` nor `by_maps` says so. `make` fills (slow, N, M).
    """
    *_, H, K, V, N = call.sizes
    device, target = call.v.device, target_of(call.v.device)
    if not (each or by_maps(call, target, pieces)):
        return None, None, None
    slow = None if each else torch.empty(N, pieces, H, dtype=torch.int32, device=device)
    M = torch.empty(N, pieces, H, 2, K, K, dtype=torch.bfloat16, device=device)
    states = torch.empty(N, pieces, H, V, K, dtype=torch.float32, device=device)
    make(slow, states, M)
    if not at_once:
        return slow, states, M
    first = torch.empty_like(states)
    config = configure("delta_token_join", (K, V), partial(_join_rule, V), target)
    launch(
        join_kernel, (N * H * -(-V // config["BLOCK_V"]),), slow, M, states, first, H, V, pieces,
        config=config, PIECES=side(pieces, 1 << 20), BLOCK_K=K,
    )  # fmt: skip
    return slow, first, None


def _join_rule(V: int, target: Target) -> Config:
    """Few columns a program: products follow each other, and there are few heads."""
    return Config({"BLOCK_V": side(V, 16)}, warps=4, stages=2)


def losses(call: Any, gated: Any, pieces: int) -> Tensor | None:
    """Room for the columns of a state that each piece has lost, where there are pieces."""
    *_, H, _, V, N = call.sizes
    if gated.reach is None or pieces == 1:
        return None
    return torch.empty(N, pieces, H, V, dtype=torch.int32, device=call.v.device)


def spread(call: Any, parts: Any, pieces: int, lost: Tensor, out: Tensor, final: Tensor) -> None:
    """NaN to the columns of all pieces behind one that has `lost` them."""
    B, T, _, H, K, V, N = call.sizes
    launch(
        lost_kernel, (N * H * (pieces - 1),),
        lost, call.offsets, out, final, *((None, None) if parts is None else (parts.errors, parts.states)),
        T, H, K, V, B * T * H * V, pieces, config=Config(), CHUNK=CHUNK, BLOCK_V=side(V, 1 << 20),
    )  # fmt: skip
