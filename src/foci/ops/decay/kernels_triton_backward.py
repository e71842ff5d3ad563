"""Backward of linear attention in Triton: gradients of the states at every chunk's end, then those of the values.

With dA = scale do v^T, S the state at a chunk's start and dS the gradient of that at its end, which goes to the chunk
before as  total dS + scale (rise q)^T do:

    dq = pairs(dA) k + scale rise (do S^T)    dk = pairs(dA)^T q + fall (v dS^T)    dv = scale A^T do + (fall k) dS

Those of queries, keys and gates are in kernels_triton_keys.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, float_precision, launch, side, state_dtype, strides, target_of
from foci.tiles.gates import load_gates, scaled, total
from foci.tiles.memory import awaited, load_row, load_tile, store_tile
from foci.tiles.near import ends, store_powers, weights
from foci.tiles.state import chunk_at, sequence, working
from foci.tiles.stretches import join_states, stretch

CHUNK = 64


@triton.jit
def dstates_kernel(  # type: ignore[no-untyped-def]
    q_ptr, do_ptr, g_ptr, d_final_ptr, offsets_ptr, ends_ptr, d_initial_ptr, decays_ptr, starts_ptr, sums_ptr,
    q_strides, do_strides, g_strides, d_final_strides, scale, T, N, H, R, K, V, walks,
    CAUSAL: tl.constexpr, OWN: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    STRETCH: tl.constexpr, MAP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One block of the gradient of one head's state, from a sequence's end, or a stretch's, to its start.

    Kept at each chunk's end; not causal, all tokens read the last state, whose gradient is kept alone. MAP: the map
    that the stretch is, of the gradient behind it to that at its start; a sequence's first stretch is needed by none.
    Sums of gates behind `walks` programs as in the forward.
    """
    NEAR: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
    if sums_ptr is not None:  # noqa: SIM102  a constant and a number
        if tl.program_id(0) >= walks:
            store_powers(sums_ptr, g_ptr, g_strides, offsets_ptr, tl.program_id(0) - walks, T, N, H, CHUNK, BLOCK_H)
            return
    v0 = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * BLOCK_V
    rest = tl.program_id(0) // tl.cdiv(V, BLOCK_V)
    k0 = rest % tl.cdiv(K, BLOCK_K) * BLOCK_K
    rest = rest // tl.cdiv(K, BLOCK_K)
    h, n = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    if STRETCH > 0:
        n, _, start, _, first, end, piece = stretch(offsets_ptr, rest // H, T, N, STRETCH)
        if n < 0 or (MAP and first == start):
            return
    n = tl.cast(n, tl.int64)
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    q_ptr += b * q_strides[0] + h // R * q_strides[2]
    do_ptr += b * do_strides[0] + h * do_strides[2]
    dS = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    decay = tl.full([BLOCK_K], 1.0, tl.float32)
    if d_final_ptr is not None:
        d_final_ptr += n * d_final_strides[0] + h * d_final_strides[1]
        dS = load_tile(d_final_ptr, k0, K, d_final_strides[2], v0, V, d_final_strides[3], BLOCK_K, BLOCK_V).to(
            tl.float32
        )
    if STRETCH == 0:
        first, end = start, stop
    elif not MAP:
        behind = tl.cdiv(stop - end, STRETCH)
        dS = join_states(dS, decays_ptr, starts_ptr, piece + behind, behind, h, H, k0, K, v0, V, -1)
    count = tl.cdiv(end - first, CHUNK)
    for i in range(count):
        t0 = first + (count - 1 - i) * CHUNK
        if CAUSAL and not MAP and ends_ptr is not None:
            there = (slot + (t0 - start) // CHUNK) * H + h
            store_tile(ends_ptr + there * K * V, dS, k0, K, V, v0, V, 1)
        q = working(load_tile(q_ptr, t0, end, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
        do = working(load_tile(do_ptr, t0, end, do_strides[1], v0, V, do_strides[3], CHUNK, BLOCK_V))
        if g_ptr is not None:
            if PER_CHANNEL:
                w = load_row(g_ptr + ((slot + (t0 - start) // CHUNK) * H + h) * K, k0, K, BLOCK_K)
                dS *= w[:, None]
            else:
                g = load_gates(g_ptr + b * g_strides[0] + h * g_strides[2], t0, end, g_strides[1], CHUNK)
                do = scaled(do, ends(g, OWN, NEAR)[0][:, None])
                w = total(g)
                dS *= w
            if MAP:
                decay *= w
        dS += scale * tl.dot(tl.trans(q), do, input_precision=PRECISION)
    if MAP:
        store_tile(starts_ptr + (tl.cast(piece, tl.int64) * H + h) * K * V, dS, k0, K, V, v0, V, 1)
        if v0 == 0:
            store_tile(decays_ptr + (tl.cast(piece, tl.int64) * H + h) * K, decay[None, :], 0, 1, 0, k0, K, 1)
    elif first == start:
        if not CAUSAL and ends_ptr is not None:
            store_tile(ends_ptr + (n * H + h) * K * V, dS, k0, K, V, v0, V, 1)
        if d_initial_ptr is not None:
            store_tile(d_initial_ptr + (n * H + h) * K * V, dS, k0, K, V, v0, V, 1)


@triton.jit
def values_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, g_ptr, bonus_ptr, offsets_ptr, ends_ptr, pairs_ptr, do_ptr, dv_ptr,
    q_strides, k_strides, g_strides, bonus_strides, do_strides, scale, T, N, H, R, K, V,
    CAUSAL: tl.constexpr, PER_CHANNEL: tl.constexpr, AWAIT: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dv = scale A^T do + (fall k) dS of one chunk and head, BLOCK_V of its columns; not causal: k dS alone."""
    OWN: tl.constexpr = bonus_ptr is None
    NEAR: tl.constexpr = k_ptr.dtype.element_ty != tl.float32
    v0 = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * BLOCK_V
    rest = tl.program_id(0) // tl.cdiv(V, BLOCK_V)
    h = (rest % H).to(tl.int64)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, rest // H, N, T, CHUNK)
    if n < 0:
        return
    row = tl.cast(b, tl.int64)
    q_ptr += row * q_strides[0] + h // R * q_strides[2]
    k_ptr += row * k_strides[0] + h // R * k_strides[2]
    ends_ptr += ((slot if CAUSAL else n) * H + h) * K * V
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    dv = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = working(load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
        dS = load_tile(ends_ptr, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V).to(k.dtype)
        if CAUSAL and not PER_CHANNEL:
            q = working(load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
            A = tl.dot(q, tl.trans(k), A, input_precision=PRECISION)
            if not OWN:
                u_ptr = bonus_ptr + h * bonus_strides[0]
                u = load_tile(u_ptr, 0, 1, 0, k0, K, bonus_strides[1], 1, BLOCK_K).to(tl.float32)
                own += tl.sum(q * u * k, 1)
        dv = tl.dot(k, dS, dv, input_precision=PRECISION)
        if AWAIT and not OWN and not PER_CHANNEL:
            dv = awaited(dv, k0 < K)
    if CAUSAL:
        do_ptr += row * do_strides[0] + h * do_strides[2]
        do = working(load_tile(do_ptr, t0, stop, do_strides[1], v0, V, do_strides[3], CHUNK, BLOCK_V))
        if PER_CHANNEL:
            A = load_tile(pairs_ptr + (row * T * H + h) * CHUNK, t0, stop, H * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK)
            do = scaled(do, scale)
        else:
            t = t0 + tl.arange(0, CHUNK)
            if g_ptr is None:
                A = tl.where(t[:, None] >= t[None, :] if OWN else t[:, None] > t[None, :], A, 0.0)
            else:
                g = load_gates(g_ptr + row * g_strides[0] + h * g_strides[2], t0, stop, g_strides[1], CHUNK)
                A *= weights(g, OWN, NEAR)
                dv *= ends(g, True, NEAR)[1][:, None]
            if not OWN:
                A = tl.where(t[:, None] == t[None, :], own[:, None], A)
            A *= scale
        dv = tl.dot(tl.trans(A.to(do.dtype)), do, dv, input_precision=PRECISION)
    store_tile(dv_ptr + (row * T * H + h) * V, dv, t0, stop, H * V, v0, V, 1)


def backward(
    call: Any, made: Any, like: Tensor, do: Tensor, d_final: Tensor | None, dv: Tensor | None, needs: Sequence[bool],
    slots: int, walk: Any, read: Config,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of the states at the chunks' ends, as many as `like`, and of the first state; None if not needed.

    `dv`, if given, is filled. `made`: the Pairs of gates per channel (kernels_triton_pairs.py). `walk`, `read`: as
    rules.py has them.
    """
    _, of_k, of_v, of_g, _, of_state = needs
    ends = d_state = None
    if of_k or of_v or of_g:
        ends = torch.empty(like.shape, dtype=state_dtype(call.v.dtype), device=like.device)
    if of_state:
        d_state = torch.empty_like(call.state, memory_format=torch.contiguous_format)
    if ends is not None or d_state is not None:
        _dstates(call, made, do, d_final, ends, d_state, walk, maps(call, made, do, walk), False)
    if dv is not None:
        _values(call, made, ends, do, dv, slots, read)
    return ends, d_state


def maps(
    call: Any, made: Any, do: Tensor, walk: Any, sums: Tensor | None = None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """What each stretch of a `walk` does to the gradient of the state behind it, as the forward's `maps` have it."""
    *_, H, K, V, _ = call.sizes
    slots = walk.cut.slots
    if not walk.cut.tokens:
        return None, None
    decays = torch.empty(slots, H, K, dtype=torch.float32, device=do.device)
    starts = torch.empty(slots, H, K, V, dtype=torch.float32, device=do.device)
    _dstates(call, made, do, None, None, None, walk, (decays, starts), True, sums)
    return decays, starts


def _dstates(
    call: Any, made: Any, do: Tensor, d_final: Tensor | None, ends: Tensor | None, d_state: Tensor | None, walk: Any,
    maps: tuple[Any, Any], MAP: bool, sums: Tensor | None = None,
) -> None:  # fmt: skip
    _, T, G, H, K, V, N = call.sizes
    q, g, R = (call.q, call.log_decay, H // G) if made is None else (made.risen, made.totals, 1)
    target = target_of(do.device)
    config, blocks, cut = walk
    walks, heads = (cut.slots if MAP else cut.programs) * blocks, side(H, 16)
    launch(
        dstates_kernel,
        (walks + (0 if sums is None else sums.shape[0] * -(-H // heads)),),
        q, do, g, d_final, call.offsets, ends, d_state, *maps, sums,
        q.stride(), do.stride(), strides(g), strides(d_final), call.scale, T, N, H, R, K, V, walks,
        config=config, CAUSAL=call.causal, OWN=call.bonus is None, PER_CHANNEL=made is not None,
        PRECISION=float_precision(do.dtype, target), CHUNK=CHUNK, STRETCH=cut.tokens, MAP=MAP, BLOCK_H=heads,
    )  # fmt: skip


def _values(call: Any, made: Any, ends: Tensor | None, do: Tensor, dv: Tensor, slots: int, config: Config) -> None:
    _, T, G, H, K, V, N = call.sizes
    q, k, R = (call.q, call.k, H // G) if made is None else (made.risen, made.fallen, 1)
    g, target = call.log_decay, target_of(do.device)
    launch(
        values_kernel,
        (slots * H * -(-V // config["BLOCK_V"]),),
        q, k, g, call.bonus, call.offsets, ends, None if made is None else made.pairs, do, dv,
        q.stride(), k.stride(), strides(g), strides(call.bonus), do.stride(), call.scale, T, N, H, R, K, V,
        config=config, CAUSAL=call.causal, PER_CHANNEL=made is not None, AWAIT=target.arch == 90,
        PRECISION=float_precision(do.dtype, target), CHUNK=CHUNK,
    )  # fmt: skip
