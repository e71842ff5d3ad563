"""Backward of linear attention in Triton: gradients of the states at every chunk's end, then those of each token.

With dA = scale do v^T, S the state at a chunk's start and dS the gradient of that at its end, which goes to the chunk
before as  total dS + scale (rise q)^T do:

    dq = pairs(dA) k + scale rise (do S^T)    dk = pairs(dA)^T q + fall (v dS^T)    dv = scale A^T do + (fall k) dS

and a gate takes what it weighs of dA A, of both second terms, and of total (S dS) (tiles/gates.py: by_pairs, by_ends).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, float_precision, launch, side, stored, strides, target_of
from foci.tiles import near
from foci.tiles.gates import load_gates, pairs, pairs_backward_onto, scaled, total
from foci.tiles.memory import load_tile, store_tile
from foci.tiles.near import by_chunk, ends, weights
from foci.tiles.state import chunk_at, sequence, working
from foci.tiles.stretches import join_states, stretch

CHUNK = 64
WIDTHS = {"BLOCK_K": (16, 32, 64, 128), "BLOCK_V": (16, 32, 64, 128)}  # what `foci tune` may try


@triton.jit
def dstates_kernel(  # type: ignore[no-untyped-def]
    q_ptr, do_ptr, g_ptr, d_final_ptr, offsets_ptr, ends_ptr, d_initial_ptr, decays_ptr, starts_ptr,
    q_strides, do_strides, g_strides, d_final_strides, scale, T, N, H, R, K, V,
    CAUSAL: tl.constexpr, OWN: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    STRETCH: tl.constexpr, MAP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One block of the gradient of one head's state, from a sequence's end, or a stretch's, to its start.

    Kept at each chunk's end; not causal, all tokens read the last state, whose gradient is kept alone. MAP: the map
    that the stretch is, of the gradient behind it to that at its start; a sequence's first stretch is needed by none.
    """
    NEAR: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
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
            here = g_ptr + b * g_strides[0] + h * g_strides[2]
            if PER_CHANNEL:
                g = load_tile(here, t0, end, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K).to(tl.float32)
                q = scaled(q, ends(g, OWN, NEAR)[0])
                dS *= total(g)[:, None]
            else:
                g = load_gates(here, t0, end, g_strides[1], CHUNK)
                do = scaled(do, ends(g, OWN, NEAR)[0][:, None])
                dS *= total(g)
            if MAP:
                decay *= total(g)
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
def gradients_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, bonus_ptr, offsets_ptr, states_ptr, ends_ptr, do_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, d_bonus_ptr,
    q_strides, k_strides, v_strides, g_strides, bonus_strides, do_strides, scale, keys, T, N, H, R, K, V, part,
    share, size, CAUSAL: tl.constexpr, PER_CHANNEL: tl.constexpr, CONSTANT: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The first `keys` programs: dq, dk, dg of a chunk, `share` heads and a block of K; the others: dv of one of V."""
    if tl.program_id(0) < keys:
        _of_keys(
            tl.program_id(0), q_ptr, k_ptr, v_ptr, g_ptr, bonus_ptr, offsets_ptr, states_ptr, ends_ptr, do_ptr,
            dq_ptr, dk_ptr, dg_ptr, d_bonus_ptr,
            q_strides, k_strides, v_strides, g_strides, bonus_strides, do_strides, scale, T, N, H, R, K, V, part,
            share, size, CAUSAL, PER_CHANNEL, CONSTANT, SPLIT, PRECISION, CHUNK, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    elif dv_ptr is not None:
        _of_values(
            tl.program_id(0) - keys, q_ptr, k_ptr, g_ptr, bonus_ptr, offsets_ptr, ends_ptr, do_ptr, dv_ptr,
            q_strides, k_strides, g_strides, bonus_strides, do_strides, scale, T, N, H, R, K, V,
            CAUSAL, PER_CHANNEL, PRECISION, CHUNK, BLOCK_K, BLOCK_V,
        )  # fmt: skip


@triton.jit
def _of_values(  # type: ignore[no-untyped-def]
    program, q_ptr, k_ptr, g_ptr, bonus_ptr, offsets_ptr, ends_ptr, do_ptr, dv_ptr,
    q_strides, k_strides, g_strides, bonus_strides, do_strides, scale, T, N, H, R, K, V,
    CAUSAL: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dv = scale A^T do + (fall k) dS of one chunk and head; not causal: k dS alone."""
    OWN: tl.constexpr = bonus_ptr is None
    NEAR: tl.constexpr = k_ptr.dtype.element_ty != tl.float32
    v0 = program % tl.cdiv(V, BLOCK_V) * BLOCK_V
    rest = program // tl.cdiv(V, BLOCK_V)
    h = (rest % H).to(tl.int64)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, rest // H, N, T, CHUNK)
    if n >= 0:
        row = tl.cast(b, tl.int64)
        q_ptr += row * q_strides[0] + h // R * q_strides[2]
        k_ptr += row * k_strides[0] + h // R * k_strides[2]
        ends_ptr += ((slot if CAUSAL else n) * H + h) * K * V
        if g_ptr is not None:
            g_ptr += row * g_strides[0] + h * g_strides[2]
        A = tl.zeros([CHUNK, CHUNK], tl.float32)
        dv = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        own = tl.zeros([CHUNK], tl.float32)
        for k0 in range(0, K, BLOCK_K):
            k = working(load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
            dS = load_tile(ends_ptr, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V).to(k.dtype)
            fallen = k
            if CAUSAL:
                q = working(load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
                if PER_CHANNEL:
                    g = load_tile(g_ptr, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K).to(tl.float32)
                    if NEAR:
                        risen, c, close = near.exponents(g, OWN)
                        A = near.pairs(A, scaled(q, tl.exp(risen)), q, k, risen, c, close, OWN, PRECISION)
                    else:
                        A = pairs(A, q, k, g, OWN, PRECISION)
                    fallen = scaled(k, ends(g, True, NEAR)[1])
                else:
                    A = tl.dot(q, tl.trans(k), A, input_precision=PRECISION)
                if not OWN:
                    u_ptr = bonus_ptr + h * bonus_strides[0]
                    u = load_tile(u_ptr, 0, 1, 0, k0, K, bonus_strides[1], 1, BLOCK_K).to(tl.float32)
                    own += tl.sum(q * u * k, 1)
            dv = tl.dot(fallen, dS, dv, input_precision=PRECISION)
        if CAUSAL:
            t = t0 + tl.arange(0, CHUNK)
            if g_ptr is None:
                A = tl.where(t[:, None] >= t[None, :] if OWN else t[:, None] > t[None, :], A, 0.0)
            elif not PER_CHANNEL:
                g = load_gates(g_ptr, t0, stop, g_strides[1], CHUNK)
                A *= weights(g, OWN, NEAR)
                dv *= ends(g, True, NEAR)[1][:, None]
            if not OWN:
                A = tl.where(t[:, None] == t[None, :], own[:, None], A)
            do_ptr += row * do_strides[0] + h * do_strides[2]
            do = working(load_tile(do_ptr, t0, stop, do_strides[1], v0, V, do_strides[3], CHUNK, BLOCK_V))
            dv = tl.dot(tl.trans((scale * A).to(do.dtype)), do, dv, input_precision=PRECISION)
        store_tile(dv_ptr + (row * T * H + h) * V, dv, t0, stop, H * V, v0, V, 1)


@triton.jit
def _of_keys(  # type: ignore[no-untyped-def]
    program, q_ptr, k_ptr, v_ptr, g_ptr, bonus_ptr, offsets_ptr, states_ptr, ends_ptr, do_ptr,
    dq_ptr, dk_ptr, dg_ptr, d_bonus_ptr,
    q_strides, k_strides, v_strides, g_strides, bonus_strides, do_strides, scale, T, N, H, R, K, V, part,
    share, size, CAUSAL: tl.constexpr, PER_CHANNEL: tl.constexpr, CONSTANT: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dq, dk, summed over `share` of the R heads that read one head of keys, and dg, of one chunk's BLOCK_K channels.

    What is left to sum goes to parts: dq and dk to that of their share of heads, `size` entries apart; dg of a gate per
    token to that of its block of K, `part` entries apart; constant gates' and the bonus' to that of its chunk.
    """
    OWN: tl.constexpr = bonus_ptr is None
    NEAR: tl.constexpr = k_ptr.dtype.element_ty != tl.float32
    PER_TOKEN: tl.constexpr = (g_ptr is not None) and not PER_CHANNEL
    ROWS: tl.constexpr = (dq_ptr is not None) or (dg_ptr is not None)
    block = program % tl.cdiv(K, BLOCK_K)
    k0 = block * BLOCK_K
    rest = program // tl.cdiv(K, BLOCK_K)
    G, r0, heads = H // R, 0, R
    if SPLIT:
        r0 = rest % tl.cdiv(R, share) * share
        rest, heads = rest // tl.cdiv(R, share), tl.minimum(R, r0 + share)
    first, chunk = (rest % G).to(tl.int64), (rest // G).to(tl.int64)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, rest // G, N, T, CHUNK)
    row = tl.cast(b, tl.int64)
    if offsets_ptr is not None:  # noqa: SIM102  known before n is
        if n < 0:  # no such chunk: its parts are 0, of slots that may hold anything
            n, stop, slot, t0 = 0, 0, 0, 0
            if not CONSTANT and d_bonus_ptr is None:
                heads = 0
    t = tl.arange(0, CHUNK)
    q_ptr += row * q_strides[0] + first * q_strides[2]
    k_ptr += row * k_strides[0] + first * k_strides[2]
    dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    pairs_of_all = tl.zeros([CHUNK, CHUNK], tl.float32)
    by_q, by_k = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for r in tl.range(r0, heads, disable_licm=True):
        h = first * R + r
        dA = tl.zeros([CHUNK, CHUNK], tl.float32)
        by_rows = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        by_columns = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        by_state = tl.zeros([BLOCK_K], tl.float32)
        if PER_TOKEN:
            g = load_gates(g_ptr + row * g_strides[0] + h * g_strides[2], t0, stop, g_strides[1], CHUNK)
            rise, fall = ends(g, OWN, NEAR)
        place = ((slot if CAUSAL else n) * H + h) * K * V
        for v0 in range(0, V, BLOCK_V):
            here = v_ptr + row * v_strides[0] + h * v_strides[2]
            v = working(load_tile(here, t0, stop, v_strides[1], v0, V, v_strides[3], CHUNK, BLOCK_V))
            here = do_ptr + row * do_strides[0] + h * do_strides[2]
            do = working(load_tile(here, t0, stop, do_strides[1], v0, V, do_strides[3], CHUNK, BLOCK_V))
            if CAUSAL:
                dA = tl.dot(do, tl.trans(v), dA, input_precision=PRECISION)
            if ROWS:
                S = load_tile(states_ptr + place, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V)
                if PER_CHANNEL:
                    by_rows = tl.dot(do, tl.trans(S.to(do.dtype)), by_rows, input_precision=PRECISION)
                else:
                    do = scaled(do, (scale * rise)[:, None] if PER_TOKEN else scale)
                    dq = tl.dot(do, tl.trans(S.to(do.dtype)), dq, input_precision=PRECISION)
            if ends_ptr is not None:
                dS = load_tile(ends_ptr + place, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V)
                if PER_CHANNEL:
                    by_columns = tl.dot(v, tl.trans(dS.to(v.dtype)), by_columns, input_precision=PRECISION)
                else:
                    v = scaled(v, fall[:, None]) if PER_TOKEN else v
                    dk = tl.dot(v, tl.trans(dS.to(v.dtype)), dk, input_precision=PRECISION)
                if dg_ptr is not None:
                    by_state += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        # Only now, and again for each head: through the loop above they would not fit into registers.
        q = working(load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
        k = working(load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
        dA *= scale
        if PER_CHANNEL:
            here = g_ptr + row * g_strides[0] + h * g_strides[2]
            g = load_tile(here, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K).to(tl.float32)
            by_rows *= scale
            by_columns *= ends(g, True, NEAR)[1]
            dg = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            if dg_ptr is not None:  # by_ends as products: sums along the tokens of a tile so wide spill
                dg += (by_state * total(g))[None, :]
                of_fall = t[:, None] > t[None, :]
                dg = tl.dot(of_fall.to(k.dtype), (k * by_columns).to(k.dtype), dg, input_precision=PRECISION)
            dk += by_columns
            if NEAR:
                risen, c, close = near.exponents(g, OWN)
                by_rows, dk, dg = near.pairs_backward(by_rows, dk, dg, dA, q, k, risen, c, close, OWN, PRECISION)
                dq, dk, dg = near.far_backward_onto(dq + by_rows, dk, dg, dA, q, k, risen, c, close, OWN, PRECISION)
            else:
                by_rows *= ends(g, OWN, NEAR)[0]
                if dg_ptr is not None:
                    of_rise = t[:, None] <= t[None, :] if OWN else t[:, None] < t[None, :]
                    dg = tl.dot(of_rise.to(q.dtype), (q * by_rows).to(q.dtype), dg, input_precision=PRECISION)
                dq, dk, dg = pairs_backward_onto(dq + by_rows, dk, dg, dA, q, k, g, OWN, PRECISION)
            if dg_ptr is not None:
                store_tile(dg_ptr + (row * T * H + h) * K, dg, t0, stop, H * K, k0, K, 1)
        elif CAUSAL:
            if g_ptr is None:
                W = tl.where(t[:, None] >= t[None, :] if OWN else t[:, None] > t[None, :], 1.0, 0.0)
            else:
                W = weights(g, OWN, NEAR)
                if dg_ptr is not None:
                    P = dA * W * tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    # This head's part of what q dq and k dk sum to.
                    rise, fall = tl.sum(q * dq, 1) - by_q, tl.sum(k * dk, 1) - by_k
                    dg = by_chunk(P, rise, fall, tl.sum(by_state) * total(g), OWN, NEAR)
                    if CONSTANT:
                        dg = tl.sum(tl.where(t0 + t < stop, dg, 0.0))
                        tl.store(dg_ptr + (chunk * tl.cdiv(K, BLOCK_K) + block) * H + h, dg)
                    else:
                        to = dg_ptr + tl.cast(block, tl.int64) * part + row * T * H + h
                        tl.store(to + (t0 + t) * H, dg.to(dg_ptr.dtype.element_ty), mask=t0 + t < stop)
            pairs_of_all += dA * W
        if not OWN:
            own = tl.sum(tl.where(t[:, None] == t[None, :], dA, 0.0), 1)[:, None]
            here = bonus_ptr + h * bonus_strides[0]
            u = load_tile(here, 0, 1, 0, k0, K, bonus_strides[1], 1, BLOCK_K).to(tl.float32)
            dq += own * u * k
            dk += own * u * q
            if d_bonus_ptr is not None:
                du = tl.sum(own * q * k, 0)
                store_tile(d_bonus_ptr + (chunk * H + h) * K, du[None, :], 0, 1, 0, k0, K, 1)
        if PER_TOKEN and dg_ptr is not None:
            by_q, by_k = tl.sum(q * dq, 1), tl.sum(k * dk, 1)
    if CAUSAL and not PER_CHANNEL:  # heads that read the same keys and queries: one product of the sum
        q = working(load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
        k = working(load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
        P = pairs_of_all.to(k.dtype)
        dq = tl.dot(P, k, dq, input_precision=PRECISION)
        dk = tl.dot(tl.trans(P), q, dk, input_precision=PRECISION)
    into = tl.cast(r0 // share, tl.int64) * size
    if dq_ptr is not None:
        store_tile(dq_ptr + into + (row * T * G + first) * K, dq, t0, stop, G * K, k0, K, 1)
    if dk_ptr is not None:
        store_tile(dk_ptr + into + (row * T * G + first) * K, dk, t0, stop, G * K, k0, K, 1)


@triton.jit
def sums_kernel(  # type: ignore[no-untyped-def]
    g_ptr, dg_ptr, bonus_ptr, d_bonus_ptr, q_ptr, dq_ptr, k_ptr, dk_ptr, g_parts, g_size, bonus_parts, bonus_size,
    parts, q_size, k_size, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums over parts [parts, size] of what gradients have them, in a fixed order; where not, the size is 0."""
    block = tl.program_id(0)
    if g_ptr is not None:
        _sum(block, g_ptr, dg_ptr, g_parts, g_size, BLOCK_P, BLOCK)
        block -= tl.cdiv(g_size, BLOCK)
    if bonus_ptr is not None:
        _sum(block, bonus_ptr, d_bonus_ptr, bonus_parts, bonus_size, BLOCK_P, BLOCK)
        block -= tl.cdiv(bonus_size, BLOCK)
    if q_ptr is not None:
        _sum(block, q_ptr, dq_ptr, parts, q_size, BLOCK_P, BLOCK)
        block -= tl.cdiv(q_size, BLOCK)
    if k_ptr is not None:
        _sum(block, k_ptr, dk_ptr, parts, k_size, BLOCK_P, BLOCK)


@triton.jit
def _sum(block, ptr, out_ptr, parts, size, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block `block` of the sum, if there is one."""
    if (block >= 0) & (block < tl.cdiv(size, BLOCK)):
        x = tl.zeros([BLOCK_P, BLOCK], tl.float32)
        for p in range(0, parts, BLOCK_P):
            x += load_tile(ptr, p, parts, size, block * BLOCK, size, 1, BLOCK_P, BLOCK)
        store_tile(out_ptr, tl.sum(x, 0)[None, :], 0, 1, 0, block * BLOCK, size, 1)


def dstates_rule(dtype: torch.dtype, K: int, V: int, heads: int, target: Target) -> Config:
    """As the forward's walk (kernels_triton_forward.py)."""
    k, v = side(K, 64), side(V, 64)
    if heads * -(-K // k) * -(-V // v) < target.processors:
        v = min(v, 32)
    half = dtype == torch.bfloat16
    return Config({"BLOCK_K": k, "BLOCK_V": v}, warps=8 if dtype == torch.float32 else 4, stages=3 if half else 2)


def gradients_rule(
    dtype: torch.dtype, K: int, V: int, by_channel: bool, bonus: bool, groups: bool, target: Target
) -> Config:
    """All channels that registers hold, because every block of them makes dA again."""
    more, bf16 = bonus or groups, dtype == torch.bfloat16
    if by_channel:
        k = 16 if dtype == torch.float32 or (more and not bf16) else 32
    elif more or dtype == torch.float32:
        k = 16 if dtype == torch.float32 and more else 32
    else:
        k = 128 if bf16 and target.shared > 120_000 else 64
    v = 64 if bf16 and not more and target.shared > 80_000 else 32
    blocks = {"BLOCK_K": side(K, k), "BLOCK_V": side(V, v)}
    return Config(blocks, warps=8, stages=1 if by_channel and groups else 2)


def _share(heads: int, others: int, target: Target) -> int:
    """How many of the heads that read one head of keys a program takes: as many as leave enough programs to all."""
    parts = min(heads, -(-16 * target.processors // others))
    return -(-heads // parts)


def sums_rule(parts: int, target: Target) -> Config:
    """Few parts are long, and many are short."""
    return Config({"BLOCK_P": 16, "BLOCK": 64} if parts > 64 else {"BLOCK_P": 4, "BLOCK": 512})


def backward(
    call: Any, states: Tensor, grads: Sequence[Tensor | None], needs: Sequence[bool], chunks: int,
    cut: Callable[[Target, int], Any],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v, log_decay, bonus and state, None where not needed.

    `states`: what the forward kept, or the last ones where it is not causal. `chunks`: at most so many (ops/gpu.py).
    `cut` is that of ops/stretches.py.
    """
    d_out, d_final = grads
    do = call.v.new_zeros(()).expand(call.v.shape) if d_out is None else d_out
    room = _room(call)
    wanted = (call.q, call.k, call.v, call.log_decay, call.bonus, call.state)
    dq, dk, dv, dg, d_bonus, d_state = (
        room(x.shape, dtype=x.dtype, device=x.device) if need else None for x, need in zip(wanted, needs, strict=True)
    )
    ends = None
    if any(x is not None for x in (dk, dv, dg)):
        ends = torch.empty(states.shape, dtype=stored(call.v.dtype), device=states.device)
    if ends is not None or d_state is not None:
        _dstates(call, do, d_final, ends, d_state, cut)
    if any(x is not None for x in (dq, dk, dv, dg, d_bonus)):
        _gradients(call, states, ends, do, (dq, dk, dv, dg, d_bonus), chunks)
    return dq, dk, dv, dg, d_bonus, d_state


def _room(call: Any) -> Callable[..., Tensor]:
    """Memory for what tokens have; those behind the last document belong to no chunk."""
    return torch.empty if call.offsets is None else torch.zeros


def _dstates(
    call: Any, do: Tensor, d_final: Tensor | None, ends: Tensor | None, d_state: Tensor | None,
    cut: Callable[[Target, int], Any],
) -> None:  # fmt: skip
    _, T, G, H, K, V, N = call.sizes
    g, target = call.log_decay, target_of(do.device)
    walk = configure("linear_dstates", (do.dtype, K, V), partial(dstates_rule, do.dtype, K, V, N * H), target, WIDTHS)
    blocks = H * -(-K // walk["BLOCK_K"]) * -(-V // walk["BLOCK_V"])
    STRETCH, programs, maps = cut(target, blocks * walk.warps)
    decays = torch.empty(maps, H, K, dtype=torch.float32, device=do.device) if STRETCH else None
    starts = torch.empty(maps, H, K, V, dtype=torch.float32, device=do.device) if STRETCH else None
    for MAP in (True, False) if STRETCH else (False,):
        launch(
            dstates_kernel,
            ((maps if MAP else programs) * blocks,),
            call.q, do, g, None if MAP else d_final, call.offsets, ends, d_state, decays, starts,
            call.q.stride(), do.stride(), strides(g), strides(d_final), call.scale, T, N, H, H // G, K, V,
            config=walk, CAUSAL=call.causal, OWN=call.bonus is None, PER_CHANNEL=g is not None and g.shape[3] > 1,
            PRECISION=float_precision(do.dtype, target), CHUNK=CHUNK, STRETCH=STRETCH, MAP=MAP,
        )  # fmt: skip


def _gradients(
    call: Any, states: Tensor, ends: Tensor | None, do: Tensor, into: Sequence[Tensor | None], chunks: int
) -> None:
    B, T, G, H, K, V, N = call.sizes
    g, target = call.log_decay, target_of(do.device)
    dq, dk, dv, dg, d_bonus = into
    room = _room(call)
    by_channel = g is not None and g.shape[3] > 1
    constant = g is not None and g.shape[0] * g.shape[1] < B * T
    key = do.dtype, K, V, by_channel, call.bonus is not None, H > G
    config = configure("linear_gradients", key, partial(gradients_rule, *key), target, WIDTHS)
    blocks = -(-K // config["BLOCK_K"])
    g_parts = chunks * blocks if constant else 1 if by_channel else blocks
    g_size = H if constant else B * T * H
    dg_parts = bonus_parts = None
    if dg is not None and (constant or g_parts > 1):
        dg_parts = room(g_parts, g_size, dtype=torch.float32, device=do.device)
    if d_bonus is not None:
        bonus_parts = torch.empty(chunks, H, K, dtype=torch.float32, device=do.device)
    share = _share(H // G, chunks * G * blocks, target)
    parts = -(-H // G // share)
    dq_parts, dk_parts = (
        room(parts, *x.shape, dtype=torch.float32, device=do.device) if x is not None and parts > 1 else None
        for x in (dq, dk)
    )
    keys = chunks * G * parts * blocks if any(x is not None for x in (dq, dk, dg, d_bonus)) else 0
    values = chunks * H * -(-V // config["BLOCK_V"]) if dv is not None else 0
    launch(
        gradients_kernel,
        (keys + values,),
        call.q, call.k, call.v, g, call.bonus, call.offsets, states, ends, do,
        dq if dq_parts is None else dq_parts, dk if dk_parts is None else dk_parts, dv,
        dg if dg_parts is None else dg_parts, bonus_parts,
        call.q.stride(), call.k.stride(), call.v.stride(), strides(g), strides(call.bonus), do.stride(),
        call.scale, keys, T, N, H, H // G, K, V, g_size,
        share, call.q.numel(),
        config=config, CAUSAL=call.causal, PER_CHANNEL=by_channel, CONSTANT=constant, SPLIT=parts > 1,
        PRECISION=float_precision(do.dtype, target), CHUNK=CHUNK,
    )  # fmt: skip
    left = (dg_parts, dg), (bonus_parts, d_bonus), (dq_parts, dq), (dk_parts, dk)
    sizes = [0 if one is None or into is None else into.numel() for one, into in left]
    if any(sizes):
        most = max(g_parts if sizes[0] else 0, chunks if sizes[1] else 0)
        sums = configure("linear_sums", (most > 64,), partial(sums_rule, most), target)
        launch(
            sums_kernel,
            (sum(-(-size // sums["BLOCK"]) for size in sizes),),
            *left[0], *left[1], *left[2], *left[3], g_parts, sizes[0], chunks, sizes[1], parts, *sizes[2:],
            config=sums,
        )  # fmt: skip
