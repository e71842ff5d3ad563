"""Triton kernels of the gradients: of queries first, then of keys and values, of a bias and of a sink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, precision, target_of
from foci.tiles.memory import load_tile, store_tile
from foci.tiles.random import kept, row_coins
from foci.tiles.softmax import LOG2E, between, keys_of, queries_of, stretches, tanh

FAR = 1 << 29  # an open side of a mask (tiles/softmax.py)

# With z the logits and p = exp(z - lse):
#   dp = dout v^T;  pull[t] = sum_s p dp - dlse = sum_v dout out - dlse;  dz = p (dp - pull)
#   dq = scale slope dz k;  dk = scale (slope dz)^T q;  dv = p^T dout;  dbias = dz;  dsink = -sum_t exp(sink - lse) pull
# slope = 1 - tanh^2 under a softcap. Dropout multiplies p by kept / (1 - rate) in dv, and dp in dz.
# lse is held in units of log 2, +inf for a row that saw nothing, whose p is then 0. In float32 it stays a natural
# logarithm: the difference z - lse then loses nothing to the change of base.


@triton.jit
def _pairs(products, dp, lse, pull, t, s, index, low, high, T, S, terms, coins, scale, softcap, MASKED: tl.constexpr, PRECISE: tl.constexpr, PLACED: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """(p, p kept, dz, slope dz) of a tile of q k and dout v, [queries, keys] or [keys, queries].

    t, s, lse, pull, low, high broadcast over it: tokens, rows' numbers, and the bounds low <= index < high of the mask.
    """
    bias_ptr, bias_t, bias_s, dense_ptr, dense_t, dense_s = terms
    row_coin, seed_ptr, threshold, grow = coins
    unit: tl.constexpr = 1.0 if PRECISE else LOG2E
    if softcap is None:
        z = products * (scale * unit)
    else:
        y = tanh(products * (scale / softcap), PRECISE)
        z = y * (softcap * unit)
    there = (t < T) & (s < S)
    if bias_ptr is not None:
        z += unit * tl.load(bias_ptr + t.to(tl.int64) * bias_t + s.to(tl.int64) * bias_s, mask=there, other=0.0).to(tl.float32)  # fmt: skip
    z -= lse
    p = tl.exp2(z * LOG2E if PRECISE else z)
    if dense_ptr is not None:
        shown = tl.load(dense_ptr + t.to(tl.int64) * dense_t + s.to(tl.int64) * dense_s, mask=there, other=0)
        p = tl.where(shown != 0, p, 0.0)
    if MASKED:
        p = tl.where(between(index, low, high), p, 0.0)
    share = p
    if row_coin is not None:
        stays = kept(row_coin, seed_ptr, s, threshold, PLACED)
        share, dp = tl.where(stays, p * grow, 0.0), tl.where(stays, dp * grow, 0.0)
    dz = p * (dp - pull)
    if MASKED:  # dp may come from what nobody may read: 0 * NaN is NaN
        dz = tl.where(between(index, low, high), dz, 0.0)
    inner = dz
    if softcap is not None:
        inner = dz * (1.0 - y * y)
    return p, share, dz, inner


@triton.jit
def _terms(bias_ptr, dense_ptr, bias_strides, dense_strides, b, h):  # type: ignore[no-untyped-def]
    """Where the bias and the dense mask of one head lie: (pointer or None, stride of queries, of keys) of each."""
    if bias_ptr is not None:
        bias_ptr += b * bias_strides[0] + h * bias_strides[1]
    if dense_ptr is not None:
        dense_ptr += b * dense_strides[0] + h * dense_strides[1]
    return bias_ptr, bias_strides[2], bias_strides[3], dense_ptr, dense_strides[2], dense_strides[3]


@triton.jit
def _of_queries(dq, mass, excess, q, do, lse, pull, t, low, high, s0, stop, k_ptr, v_ptr, k_strides, v_strides, T, S, terms, coins, scale, softcap, K: tl.constexpr, V: tl.constexpr, NEEDS_DQ: tl.constexpr, EXACT: tl.constexpr, GAPS: tl.constexpr, MASKED: tl.constexpr, PLACED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """One block of keys joins the sums of a block of queries: dq, sum p and sum dz."""
    s = s0 + tl.arange(0, BLOCK_S)
    k = load_tile(k_ptr, s0, stop, k_strides[1], 0, K, k_strides[3], BLOCK_S, BLOCK_K)
    if GAPS and MASKED:  # keys between two documents may hold anything
        alive = tl.max(between(s[None, :], low, high).to(tl.int32), 0) != 0
        k = tl.where(alive[:, None], k, 0.0)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.zeros_like(products)
    if do is not None:
        v = load_tile(v_ptr, s0, stop, v_strides[1], 0, V, v_strides[3], BLOCK_S, BLOCK_V)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    p, _, dz, inner = _pairs(
        products, dp, lse[:, None], pull[:, None], t[:, None], s[None, :], s[None, :], low, high, T, S, terms, coins,
        scale, softcap, MASKED, q.dtype == tl.float32, PLACED,
    )  # fmt: skip
    if EXACT:
        mass += tl.sum(p, 1)
        excess += tl.sum(dz, 1)
    if NEEDS_DQ:
        dq = tl.dot(inner.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, mass, excess


@triton.jit
def queries_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, bias_ptr, dense_ptr, sink_ptr, seed_ptr, hidden,
    steady_ptr, pull_ptr, dq_ptr, dsink_ptr,
    q_strides, k_strides, v_strides, out_strides, lse_strides, dout_strides, dlse_strides, bias_strides, dense_strides,
    sink_stride, T, S, H, blocks, scale, softcap, left, right, threshold, grow,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, END: tl.constexpr, START: tl.constexpr, GAPS: tl.constexpr,
    NEEDS_DQ: tl.constexpr, EXACT: tl.constexpr, PLACED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # type: ignore[no-untyped-def] # fmt: skip
    """A block of queries of one head: their lse and pull [B, H, T] for the kernels after it, dq, a part of dsink.

    EXACT: pull is sum_s p dp itself, made up from sum dz and sum p, where sum_v dout out has the rounding of a half out.
    """
    mask = hidden + (END, START, left, right)
    # Under a causal mask the last block has most to do: it begins first.
    place, bh = blocks - 1 - tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    t0 = place * BLOCK_T
    t = t0 + tl.arange(0, BLOCK_T)
    low, high = keys_of(mask, b, tl.minimum(t, T - 1), T, S)
    start, inner, outer, stop = stretches(low, high, BLOCK_S)
    low, high = low[:, None], high[:, None]

    lse = tl.load(lse_ptr + b * lse_strides[0] + t.to(tl.int64) * lse_strides[1] + h * lse_strides[2], mask=t < T, other=-float("inf"))  # fmt: skip
    empty = lse == -float("inf")
    unit: tl.constexpr = 1.0 if q_ptr.dtype.element_ty == tl.float32 else LOG2E
    steady = tl.where(empty, float("inf"), lse * unit)
    pull, of_lse = tl.zeros_like(lse), tl.zeros_like(lse)
    do = None
    if dout_ptr is not None:
        do = load_tile(dout_ptr + b * dout_strides[0] + h * dout_strides[2], t0, T, dout_strides[1], 0, V, dout_strides[3], BLOCK_T, BLOCK_V)  # fmt: skip
        out = load_tile(out_ptr + b * out_strides[0] + h * out_strides[2], t0, T, out_strides[1], 0, V, out_strides[3], BLOCK_T, BLOCK_V)  # fmt: skip
        pull = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if dlse_ptr is not None:
        of_lse = tl.load(dlse_ptr + b * dlse_strides[0] + t.to(tl.int64) * dlse_strides[1] + h * dlse_strides[2], mask=t < T, other=0.0).to(tl.float32)  # fmt: skip
    pull = tl.where(empty, 0.0, pull - of_lse)

    if NEEDS_DQ or EXACT:
        q = load_tile(q_ptr + b * q_strides[0] + h * q_strides[2], t0, T, q_strides[1], 0, K, q_strides[3], BLOCK_T, BLOCK_K)  # fmt: skip
        k_ptr += b * k_strides[0] + (h // R) * k_strides[2]
        v_ptr += b * v_strides[0] + (h // R) * v_strides[2]
        terms = _terms(bias_ptr, dense_ptr, bias_strides, dense_strides, b, h)
        coins = (None, None, threshold, grow)
        if seed_ptr is not None:
            coins = (row_coins(seed_ptr, b, h, t[:, None], PLACED), seed_ptr, threshold, grow)
        dq = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        mass, excess = tl.zeros_like(lse), tl.zeros_like(lse)
        for s0 in range(inner, outer, BLOCK_S):
            dq, mass, excess = _of_queries(
                dq, mass, excess, q, do, steady, pull, t, low, high, s0, stop, k_ptr, v_ptr, k_strides, v_strides, T, S,
                terms, coins, scale, softcap, K, V, NEEDS_DQ, EXACT, GAPS, False, PLACED, PRECISION, BLOCK_S, BLOCK_K, BLOCK_V,
            )  # fmt: skip
        # The blocks before those and the ones behind them, in one loop.
        for turn in range(0, inner - start + tl.maximum(stop - outer, 0), BLOCK_S):
            s0 = tl.where(turn < inner - start, start + turn, outer + turn - (inner - start))
            dq, mass, excess = _of_queries(
                dq, mass, excess, q, do, steady, pull, t, low, high, s0, stop, k_ptr, v_ptr, k_strides, v_strides, T, S,
                terms, coins, scale, softcap, K, V, NEEDS_DQ, EXACT, GAPS, True, PLACED, PRECISION, BLOCK_S, BLOCK_K, BLOCK_V,
            )  # fmt: skip
        if NEEDS_DQ:
            dq_ptr += (b * T * H + h) * K
            store_tile(dq_ptr, dq * scale, t0, T, H * K, 0, K, 1)
        if EXACT:
            pull = tl.where(empty, 0.0, excess + pull * mass - of_lse)

    row = bh.to(tl.int64) * T
    tl.store(steady_ptr + row + t, steady, mask=t < T)
    tl.store(pull_ptr + row + t, pull, mask=t < T)
    if dsink_ptr is not None:
        sink = tl.load(sink_ptr + h * sink_stride).to(tl.float32) * unit
        share = tl.exp2((sink - steady) * (LOG2E / unit))
        tl.store(dsink_ptr + (b * blocks + place) * H + h, -tl.sum(share * pull, 0))


@triton.jit
def _of_keys(dk, dv, k, v, t0, stop, s, low, high, q_ptr, dout_ptr, steady_ptr, pull_ptr, q_strides, dout_strides, b, h, T, S, terms, seed_ptr, scale, softcap, threshold, grow, K: tl.constexpr, V: tl.constexpr, NEEDS_DK: tl.constexpr, NEEDS_DV: tl.constexpr, GAPS: tl.constexpr, MASKED: tl.constexpr, PLACED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """One block of queries joins the sums of a block of keys, in tiles [keys, queries]."""
    t = t0 + tl.arange(0, BLOCK_T)
    q = load_tile(q_ptr, t0, stop, q_strides[1], 0, K, q_strides[3], BLOCK_T, BLOCK_K)
    if GAPS and MASKED:  # queries between two documents may hold anything
        alive = tl.max(between(t[None, :], low, high).to(tl.int32), 0) != 0
        q = tl.where(alive[:, None], q, 0.0)
    steady = tl.load(steady_ptr + t, mask=t < T, other=float("inf"))
    pull = tl.load(pull_ptr + t, mask=t < T, other=0.0)
    products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    dp = tl.zeros_like(products)
    if dout_ptr is not None:
        do = load_tile(dout_ptr, t0, stop, dout_strides[1], 0, V, dout_strides[3], BLOCK_T, BLOCK_V)
        if NEEDS_DK:
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    coins = (None, None, threshold, grow)
    if seed_ptr is not None:
        coins = (row_coins(seed_ptr, b, h, t[None, :], PLACED), seed_ptr, threshold, grow)
    _, share, _, inner = _pairs(
        products, dp, steady[None, :], pull[None, :], t[None, :], s[:, None], t[None, :], low, high, T, S, terms, coins,
        scale, softcap, MASKED, q.dtype == tl.float32, PLACED,
    )  # fmt: skip
    if NEEDS_DV:
        dv = tl.dot(share.to(do.dtype), do, dv, input_precision=PRECISION)
    if NEEDS_DK:
        dk = tl.dot(inner.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, steady_ptr, pull_ptr, bias_ptr, dense_ptr, seed_ptr, hidden, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, dout_strides, bias_strides, dense_strides,
    T, S, G, blocks, scale, softcap, left, right, threshold, grow,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, END: tl.constexpr, START: tl.constexpr, GAPS: tl.constexpr,
    NEEDS_DK: tl.constexpr, NEEDS_DV: tl.constexpr, PLACED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # type: ignore[no-untyped-def] # fmt: skip
    """A block of keys of one key head: dk and dv, over all queries that see it, of all heads that share it."""
    mask = hidden + (END, START, left, right)
    place, bg = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    s0 = place * BLOCK_S
    s = s0 + tl.arange(0, BLOCK_S)
    low, high = queries_of(mask, b, tl.minimum(s, S - 1), T, S)
    start, inner, outer, stop = stretches(low, high, BLOCK_T)
    low, high = low[:, None], high[:, None]
    k = load_tile(k_ptr + b * k_strides[0] + g * k_strides[2], s0, S, k_strides[1], 0, K, k_strides[3], BLOCK_S, BLOCK_K)  # fmt: skip
    v = load_tile(v_ptr + b * v_strides[0] + g * v_strides[2], s0, S, v_strides[1], 0, V, v_strides[3], BLOCK_S, BLOCK_V)  # fmt: skip
    dk, dv = tl.zeros([BLOCK_S, BLOCK_K], tl.float32), tl.zeros([BLOCK_S, BLOCK_V], tl.float32)
    for r in range(R):
        h = g * R + r
        row = (b * G * R + h) * T
        q_head, dout_head = q_ptr + b * q_strides[0] + h * q_strides[2], None
        if dout_ptr is not None:
            dout_head = dout_ptr + b * dout_strides[0] + h * dout_strides[2]
        terms = _terms(bias_ptr, dense_ptr, bias_strides, dense_strides, b, h)
        for t0 in range(inner, outer, BLOCK_T):
            dk, dv = _of_keys(
                dk, dv, k, v, t0, stop, s, low, high, q_head, dout_head, steady_ptr + row, pull_ptr + row,
                q_strides, dout_strides, b, h, T, S, terms, seed_ptr, scale, softcap, threshold, grow,
                K, V, NEEDS_DK, NEEDS_DV, GAPS, False, PLACED, PRECISION, BLOCK_T, BLOCK_K, BLOCK_V,
            )  # fmt: skip
        for turn in range(0, inner - start + tl.maximum(stop - outer, 0), BLOCK_T):
            t0 = tl.where(turn < inner - start, start + turn, outer + turn - (inner - start))
            dk, dv = _of_keys(
                dk, dv, k, v, t0, stop, s, low, high, q_head, dout_head, steady_ptr + row, pull_ptr + row,
                q_strides, dout_strides, b, h, T, S, terms, seed_ptr, scale, softcap, threshold, grow,
                K, V, NEEDS_DK, NEEDS_DV, GAPS, True, PLACED, PRECISION, BLOCK_T, BLOCK_K, BLOCK_V,
            )  # fmt: skip
    if NEEDS_DK:
        store_tile(dk_ptr + (b * S * G + g) * K, dk * scale, s0, S, G * K, 0, K, 1)
    if NEEDS_DV:
        store_tile(dv_ptr + (b * S * G + g) * V, dv, s0, S, G * V, 0, V, 1)


@triton.jit
def bias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, steady_ptr, pull_ptr, bias_ptr, dense_ptr, seed_ptr, hidden, dbias_ptr,
    q_strides, k_strides, v_strides, dout_strides, bias_strides, dense_strides,
    B, T, S, H, scale, softcap, left, right, threshold, grow, bias_B, bias_H, bias_T, bias_S, parts,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, END: tl.constexpr, START: tl.constexpr,
    OVER_T: tl.constexpr, OVER_S: tl.constexpr, PLACED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # type: ignore[no-untyped-def] # fmt: skip
    """One part of a tile of dbias [bias_B, bias_H, bias_T, bias_S]: dz summed over what the tile is broadcast over.

    The tiles of queries and keys that it stands for are numbered; each part takes a run of them, in order.
    """
    mask = hidden + (END, START, left, right)
    t_blocks, s_blocks = (T + BLOCK_T - 1) // BLOCK_T, (S + BLOCK_S - 1) // BLOCK_S
    # Of the bias: its tiles. Of each tile: how often it is used along each dimension.
    t_tiles, s_tiles = (bias_T + BLOCK_T - 1) // BLOCK_T, (bias_S + BLOCK_S - 1) // BLOCK_S
    part, tile = tl.program_id(0) % parts, tl.program_id(0) // parts
    s_tile, rest = tile % s_tiles, tile // s_tiles
    t_tile, rest = rest % t_tiles, rest // t_tiles
    h_tile, b_tile = rest % bias_H, rest // bias_H
    s_uses, t_uses, h_uses = s_blocks // s_tiles, t_blocks // t_tiles, H // bias_H
    uses = s_uses * t_uses * h_uses * (B // bias_B)
    total = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    run = (uses + parts - 1) // parts
    for use in range(part * run, tl.minimum(part * run + run, uses)):
        s0, rest = (s_tile + use % s_uses) * BLOCK_S, use // s_uses
        t0, rest = (t_tile + rest % t_uses) * BLOCK_T, rest // t_uses
        h, b = (h_tile + rest % h_uses).to(tl.int64), (b_tile + rest // h_uses).to(tl.int64)
        t, s = t0 + tl.arange(0, BLOCK_T), s0 + tl.arange(0, BLOCK_S)
        low, high = keys_of(mask, b, tl.minimum(t, T - 1), T, S)
        if (tl.max(high, 0) > s0) & (tl.min(low, 0) < s0 + BLOCK_S):
            row = (b * H + h) * T
            steady = tl.load(steady_ptr + row + t, mask=t < T, other=float("inf"))
            pull = tl.load(pull_ptr + row + t, mask=t < T, other=0.0)
            q = load_tile(q_ptr + b * q_strides[0] + h * q_strides[2], t0, T, q_strides[1], 0, K, q_strides[3], BLOCK_T, BLOCK_K)  # fmt: skip
            k = load_tile(k_ptr + b * k_strides[0] + (h // R) * k_strides[2], s0, S, k_strides[1], 0, K, k_strides[3], BLOCK_S, BLOCK_K)  # fmt: skip
            products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            dp = tl.zeros_like(products)
            if dout_ptr is not None:
                do = load_tile(dout_ptr + b * dout_strides[0] + h * dout_strides[2], t0, T, dout_strides[1], 0, V, dout_strides[3], BLOCK_T, BLOCK_V)  # fmt: skip
                v = load_tile(v_ptr + b * v_strides[0] + (h // R) * v_strides[2], s0, S, v_strides[1], 0, V, v_strides[3], BLOCK_S, BLOCK_V)  # fmt: skip
                dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            coins = (None, None, threshold, grow)
            if seed_ptr is not None:
                coins = (row_coins(seed_ptr, b, h, t[:, None], PLACED), seed_ptr, threshold, grow)
            terms = _terms(bias_ptr, dense_ptr, bias_strides, dense_strides, b, h)
            _, _, dz, _ = _pairs(
                products, dp, steady[:, None], pull[:, None], t[:, None], s[None, :], s[None, :], low[:, None],
                high[:, None], T, S, terms, coins, scale, softcap, True, q.dtype == tl.float32, PLACED,
            )  # fmt: skip
            total += dz
    if OVER_T:
        total = tl.sum(total, 0)[None, :]
    if OVER_S:
        total = tl.sum(total, 1)[:, None]
    t, s = t_tile * BLOCK_T + tl.arange(0, total.shape[0]), s_tile * BLOCK_S + tl.arange(0, total.shape[1])
    dbias_ptr += ((part.to(tl.int64) * bias_B + b_tile) * bias_H + h_tile) * bias_T * bias_S
    places = t.to(tl.int64)[:, None] * bias_S + s[None, :]
    tl.store(dbias_ptr + places, total.to(dbias_ptr.dtype.element_ty), mask=(t < bias_T)[:, None] & (s < bias_S)[None, :])  # fmt: skip


@triton.jit
def sum_kernel(parts_ptr, sum_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """sum over p of parts [P, N], always in the same order."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for p0 in range(0, P, BLOCK_P):
        p = p0 + tl.arange(0, BLOCK_P)
        there = (p < P)[:, None] & (n < N)[None, :]
        total += tl.load(parts_ptr + p.to(tl.int64)[:, None] * N + n[None, :], mask=there, other=0.0)
    tl.store(sum_ptr + n, tl.sum(total, 0).to(sum_ptr.dtype.element_ty), mask=n < N)


def _fitted(rows: int, columns: int, warps: int, stages: int, widths: tuple[int, int], size: int, shared: int) -> tuple[int, int, int, int]:  # fmt: skip
    """(rows, columns, warps, stages), made smaller until a block's operands fit into what it may share.

    Held: two tiles of `rows` all along, two of `columns` in each stage, and one of rows x columns on its way from
    one layout into another.
    """

    def held() -> int:
        return size * sum(widths) * (rows + stages * columns) + 4 * rows * columns

    while held() > shared and (stages > 1 or rows > 16 or columns > 16):
        if stages > 1:
            stages -= 1
        elif rows > columns:
            rows //= 2
        else:
            columns //= 2
    return rows, columns, warps, stages


def _rule(names: tuple[str, str], widths: tuple[int, int], size: int, target: Target) -> Config:
    """Tiles whose sums stay in registers: the wider a head, the fewer rows a block has."""
    wide = max(widths) * (2 if size == 4 else 1)
    rows, columns, warps, stages = next(
        sizes for most, sizes in (
            (64, (128, 64, 8, 2)), (128, (64, 64, 4, 2)), (256, (64, 32, 8, 2)), (512, (32, 32, 8, 2)), (1024, (16, 16, 8, 2))
        ) if wide <= most
    )  # fmt: skip
    rows, columns, warps, stages = _fitted(rows, columns, warps, stages, widths, size, target.shared)
    return Config({names[0]: rows, names[1]: columns}, warps, stages)


def _power(n: int) -> int:
    """The width of a tile that holds n numbers: a power of two that a product of tiles takes."""
    return max(16, 1 << (n - 1).bit_length())


def _vector(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(0) == 1 else x.contiguous()


class _Problem:
    """One call as the kernels take it: what is the same for all of them, and the tensors they hand on."""

    def __init__(self, call: Any, dout: Tensor | None) -> None:
        self.call, self.dout, device = call, dout, call.q.device
        self.B, self.T, self.S, self.H, self.G, self.K, self.V = call.sizes
        self.target = target_of(device)
        self.bias, self.dense = (None if x is None else self._pairs(x) for x in (call.bias, call.dense))
        if self.dense is not None:
            self.dense = self.dense.view(torch.uint8)
        offsets, kv_offsets, lengths, q_lengths = (
            _vector(x) for x in (call.q_offsets, call.kv_offsets, call.kv_lengths, call.q_lengths)
        )
        low, high = (None if x is None else x.to(device, non_blocking=True) for x in (call.band_low, call.band_high))
        self.hidden = (
            offsets, kv_offsets, 0 if offsets is None else offsets.shape[0] - 1, lengths, q_lengths,
            _vector(low), 0 if low is None or low.shape[0] == 1 else 1,
            _vector(high), 0 if high is None or high.shape[0] == 1 else 1,
        )  # fmt: skip
        self.steady, self.pull = (
            torch.empty(self.B, self.H, self.T, dtype=torch.float32, device=device) for _ in range(2)
        )
        left, right = (None if x is None else min(x, FAR) for x in (call.left, call.right))
        self.numbers = (
            call.scale, call.softcap, left, right, int(call.dropout * 2**53), 1 / (1 - call.dropout),
        )  # fmt: skip
        self.widths = _power(self.K), _power(self.V)
        self.constants = {
            "R": self.H // self.G, "K": self.K, "V": self.V, "END": call.causal_end, "START": call.causal_start,
            "PLACED": call.seed is not None and call.seed.dim() > 0,
            "PRECISION": precision(call.q.dtype, self.target),
            "BLOCK_K": self.widths[0], "BLOCK_V": self.widths[1],
        }  # fmt: skip
        self.gaps = call.q_offsets is not None and call.kv_lengths is not None

    def _pairs(self, x: Tensor) -> Tensor:
        """A bias or mask [B, H, T, S]; what it is broadcast over has stride 0."""
        return x.expand(self.B, self.H, self.T, self.S)

    def configure(self, kernel: str, names: tuple[str, str]) -> Config:
        call = self.call
        key = (*self.widths, str(call.q.dtype).removeprefix("torch."))
        size = call.q.element_size()
        return configure(
            f"softmax_backward_{kernel}", key, lambda target: _rule(names, self.widths, size, target), self.target
        )


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if x is None else x.stride()


def _launch_queries(
    it: _Problem, outputs: tuple[Tensor, Tensor], dlse: Tensor | None, dq: Tensor | None, exact: bool, sink: bool
) -> Tensor | None:  # fmt: skip
    """Fills steady, pull and dq; gives the parts of dsink [parts, H]."""
    call, (out, lse) = it.call, outputs
    config = it.configure("queries", ("BLOCK_T", "BLOCK_S"))
    blocks = triton.cdiv(it.T, config["BLOCK_T"])
    parts = torch.empty(it.B * blocks, it.H, dtype=torch.float32, device=out.device) if sink else None
    launch(
        queries_kernel, (blocks * it.B * it.H,),
        call.q, call.k, call.v, out, lse, it.dout, dlse, it.bias, it.dense, call.sink if sink else None, call.seed,
        it.hidden, it.steady, it.pull, dq, parts,
        *(_strides(x) for x in (call.q, call.k, call.v, out)), (*lse.stride(), 0), _strides(it.dout), (*_strides(dlse)[:3], 0),
        _strides(it.bias), _strides(it.dense),
        call.sink.stride(0) if sink else 0, it.T, it.S, it.H, blocks, *it.numbers,
        config=config, GAPS=it.gaps, NEEDS_DQ=dq is not None, EXACT=exact, **it.constants,
    )  # fmt: skip
    return parts


def _launch_keys(it: _Problem, dk: Tensor | None, dv: Tensor | None) -> None:
    call = it.call
    config = it.configure("keys", ("BLOCK_S", "BLOCK_T"))
    blocks = triton.cdiv(it.S, config["BLOCK_S"])
    launch(
        keys_kernel, (blocks * it.B * it.G,),
        call.q, call.k, call.v, it.dout, it.steady, it.pull, it.bias, it.dense, call.seed, it.hidden, dk, dv,
        *(_strides(x) for x in (call.q, call.k, call.v, it.dout, it.bias, it.dense)),
        it.T, it.S, it.G, blocks, *it.numbers,
        config=config, GAPS=it.gaps, NEEDS_DK=dk is not None, NEEDS_DV=dv is not None, **it.constants,
    )  # fmt: skip


def _launch_bias(it: _Problem) -> Tensor:
    """dbias in the bias's own shape. Tiles that stand for many share their work among parts, which are summed after."""
    call, bias = it.call, it.call.bias
    config = it.configure("bias", ("BLOCK_T", "BLOCK_S"))
    sizes = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    blocks = config["BLOCK_T"], config["BLOCK_S"]
    tiles = sizes[0] * sizes[1] * triton.cdiv(sizes[2], blocks[0]) * triton.cdiv(sizes[3], blocks[1])
    uses = it.B * it.H * triton.cdiv(it.T, blocks[0]) * triton.cdiv(it.S, blocks[1]) // tiles
    parts = max(1, min(uses, 4 * it.target.processors // tiles))
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    into = dbias if parts == 1 else torch.empty(parts, *sizes, dtype=torch.float32, device=bias.device)
    launch(
        bias_kernel, (tiles * parts,),
        call.q, call.k, call.v, it.dout, it.steady, it.pull, it.bias, it.dense, call.seed, it.hidden, into,
        *(_strides(x) for x in (call.q, call.k, call.v, it.dout, it.bias, it.dense)),
        it.B, it.T, it.S, it.H, *it.numbers, *sizes, parts,
        config=config, OVER_T=sizes[2] != it.T, OVER_S=sizes[3] != it.S, **it.constants,
    )  # fmt: skip
    return dbias if parts == 1 else _sum(into.view(parts, -1), dbias)


def _sum(parts: Tensor, into: Tensor) -> Tensor:
    """Their sum over the first dimension, in the shape and dtype of `into`."""
    config = Config({"BLOCK_P": 16, "BLOCK_N": 64})
    launch(sum_kernel, (triton.cdiv(parts.shape[1], 64),), parts, into, *parts.shape, config=config)
    return into


def backward(
    call: Any, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, sink: None where not needed. Two launches, one more for a sink, one or two a bias."""
    if not any(needs):
        return (None,) * 5
    q, k, v, bias, sink = call[:5]
    dout, dlse = grads
    it = _Problem(call, dout)
    of_bias, of_sink = bias is not None and needs[3], sink is not None and needs[4]
    # Summed over many rows, what the rounding of a half `out` leaves in pull would show.
    exact = q.dtype != torch.float32 and (of_bias or of_sink)
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) if n else None for x, n in zip((q, k), needs[:2]))
    parts = _launch_queries(it, outputs, dlse, dq, exact, of_sink)
    dv = None
    if needs[2]:
        dv = (torch.zeros if dout is None else torch.empty)(v.shape, dtype=v.dtype, device=v.device)
    if needs[1] or (needs[2] and dout is not None):
        _launch_keys(it, dk, None if dout is None else dv)
    dbias = _launch_bias(it) if of_bias else None
    dsink = None if parts is None else _sum(parts, torch.empty(sink.shape, dtype=sink.dtype, device=sink.device))
    return dq, dk, dv, dbias, dsink
