"""Triton kernels of the backward: gradients of a bias, of any shape that broadcasts, and sums of parts."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, launch
from foci.tiles.softmax import between, keys_of
from foci.tiles.softmax_backward import bias_of, load_rows, probabilities, stays


@triton.jit
def _of_pairs(  # type: ignore[no-untyped-def]
    b, h, t0, s0, low, high, bias, heads, strides, rows, pairs, seed_ptr, scale, softcap, threshold, grow,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr, PLACED: tl.constexpr, NEAR: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dz of a tile of queries and keys of one head; bias: None, and it is read, or what `bias_of` gave."""
    q_ptr, k_ptr, v_ptr, dout_ptr = heads
    q_strides, k_strides, v_strides, dout_strides = strides
    steady_ptr, pull_ptr, length = rows
    T, S = pairs[4], pairs[5]
    t, s = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
    real, there = t < T - t0, s < S - s0
    q = load_rows(q_ptr + b * q_strides[0] + h * q_strides[2], t0, real, q_strides, K, NEAR, BLOCK_T, BLOCK_K)
    k = load_rows(k_ptr + b * k_strides[0] + (h // R) * k_strides[2], s0, there, k_strides, K, NEAR, BLOCK_S, BLOCK_K)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.zeros_like(products)
    if dout_ptr is not None:
        dout_ptr += b * dout_strides[0] + h * dout_strides[2]
        do = load_rows(dout_ptr, t0, real, dout_strides, V, NEAR, BLOCK_T, BLOCK_V)
        v_ptr += b * v_strides[0] + (h // R) * v_strides[2]
        v = load_rows(v_ptr, s0, there, v_strides, V, NEAR, BLOCK_S, BLOCK_V)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    row = (b * pairs[6] + h) * length + t0
    p, _ = probabilities(
        products, tl.load(steady_ptr + row + t)[:, None], t0, s0, t[:, None], s[None, :], pairs, b, h, scale, softcap,
        NEAR, q.dtype == tl.float32, bias,
    )  # fmt: skip
    if seed_ptr is not None:
        kept = stays(seed_ptr, b, h, (t0 + t)[:, None], (s0 + s)[None, :], threshold, PLACED)
        dp = tl.where(kept, dp * grow, 0.0)
    dz = p * (dp - tl.load(pull_ptr + row + t)[:, None])
    if MASKED:  # what the mask hides may be NaN: it is left out of dz, not multiplied by 0
        dz = tl.where(between((s0 + s)[None, :], low[:, None], high[:, None]), dz, 0.0)
    return dz


@triton.jit
def bias_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, dout_ptr, steady_ptr, pull_ptr, bias_ptr, dense_ptr, seed_ptr,
    q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr, low_ptr, step_low, high_ptr, step_high,
    dbias_ptr, q_strides, k_strides, v_strides, dout_strides, bias_strides, dense_strides, dbias_strides, part_stride,
    bias_B, bias_H, bias_T, bias_S, parts,
    B, T, S, H, rows, scale, softcap, left, right, threshold, grow,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, END: tl.constexpr, START: tl.constexpr,
    PLACED: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
    OVER_T: tl.constexpr, OVER_S: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One part of a tile of dbias [bias_B, bias_H, bias_T, bias_S]: dz summed over what the tile is broadcast over.

    The tiles of queries and keys that it stands for are numbered; each part takes a run of them, in order.
    """
    mask = (
        q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr, low_ptr, step_low, high_ptr, step_high,
        END, START, left, right,
    )  # fmt: skip
    OWN: tl.constexpr = (
        q_offsets_ptr is not None or kv_lengths_ptr is not None or low_ptr is not None or high_ptr is not None
    )
    MASKED: tl.constexpr = OWN or END or START or left is not None or right is not None or OVER_S
    t_blocks, s_blocks = (T + BLOCK_T - 1) // BLOCK_T, (S + BLOCK_S - 1) // BLOCK_S
    # Of the bias: its tiles. Of each tile: how often it is used along each dimension.
    t_tiles, s_tiles = (bias_T + BLOCK_T - 1) // BLOCK_T, (bias_S + BLOCK_S - 1) // BLOCK_S
    part, tile = tl.program_id(0) % parts, tl.program_id(0) // parts
    s_tile, tile = tile % s_tiles, tile // s_tiles
    t_tile, tile = tile % t_tiles, tile // t_tiles
    h_tile, b_tile = (tile % bias_H).to(tl.int64), (tile // bias_H).to(tl.int64)
    s_uses, t_uses, h_uses = s_blocks // s_tiles, t_blocks // t_tiles, H // bias_H
    uses = s_uses * t_uses * h_uses * (B // bias_B)
    run = (uses + parts - 1) // parts
    first, last = part * run, tl.minimum(part * run + run, uses)
    total = tl.zeros([BLOCK_T, BLOCK_S], tl.float32) + tl.program_id(1).to(tl.float32)
    heads, strides = (q_ptr, k_ptr, v_ptr, dout_ptr), (q_strides, k_strides, v_strides, dout_strides)
    lines, pairs = (steady_ptr, pull_ptr, rows), (bias_ptr, bias_strides, dense_ptr, dense_strides, T, S, H)
    t, s = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
    if OVER_T or OVER_S or OWN:
        for use in range(first, last):
            s0, rest = (s_tile + use % s_uses) * BLOCK_S, use // s_uses
            t0, rest = (t_tile + rest % t_uses) * BLOCK_T, rest // t_uses
            h, b = h_tile + rest % h_uses, b_tile + rest // h_uses
            low, high = keys_of(mask, b, tl.minimum(t0 + t, T - 1), T, S)
            if (tl.max(high, 0) > s0) & (tl.min(low, 0) < s0 + BLOCK_S):
                total += _of_pairs(
                    b, h, t0, s0, low, high, None, heads, strides, lines, pairs, seed_ptr, scale, softcap, threshold,
                    grow, R, K, V, MASKED, PLACED, NEAR, PRECISION, BLOCK_T, BLOCK_S, BLOCK_K, BLOCK_V,
                )  # fmt: skip
    else:  # one tile of pairs, one of the bias, and nothing in the loop that depends on what was found
        s0, t0 = s_tile * BLOCK_S, t_tile * BLOCK_T
        low, high = keys_of(mask, b_tile, tl.minimum(t0 + t, T - 1), T, S)
        if MASKED:
            last = tl.where((tl.max(high, 0) > s0) & (tl.min(low, 0) < s0 + BLOCK_S), last, first)
        bias = bias_of(
            t0, s0, t[:, None], s[None, :], pairs, b_tile, h_tile, NEAR, q_ptr.dtype.element_ty == tl.float32
        )
        for use in range(first, last):
            total += _of_pairs(
                b_tile + use // h_uses, h_tile + use % h_uses, t0, s0, low, high, bias, heads, strides, lines, pairs,
                seed_ptr, scale, softcap, threshold, grow, R, K, V, MASKED, PLACED, NEAR, PRECISION, BLOCK_T, BLOCK_S,
                BLOCK_K, BLOCK_V,
            )  # fmt: skip
    if OVER_T:
        total = tl.sum(total, 0)[None, :]
    if OVER_S:
        total = tl.sum(total, 1)[:, None]
    t, s = t_tile * BLOCK_T + tl.arange(0, total.shape[0]), s_tile * BLOCK_S + tl.arange(0, total.shape[1])
    inside = (t < bias_T)[:, None] & (s < bias_S)[None, :]
    dbias_ptr += part * part_stride + b_tile * dbias_strides[0] + h_tile * dbias_strides[1]
    places = dbias_ptr + t.to(tl.int64)[:, None] * dbias_strides[2] + s.to(tl.int64)[None, :] * dbias_strides[3]
    if ADD:
        total += tl.load(places, mask=inside, other=0.0)
    tl.store(places, total.to(dbias_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(parts_ptr, sum_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """sum over p of parts [P, N], always in the same order."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for p0 in range(0, P, BLOCK_P):
        p = p0 + tl.arange(0, BLOCK_P)
        inside = (p < P)[:, None] & (n < N)[None, :]
        total += tl.load(parts_ptr + p.to(tl.int64)[:, None] * N + n[None, :], mask=inside, other=0.0)
    tl.store(sum_ptr + n, tl.sum(total, 0).to(sum_ptr.dtype.element_ty), mask=n < N)


def total(parts: Tensor, like: Tensor) -> Tensor:
    """The sum of parts [P, N] over the first dimension, in the shape and dtype of `like`."""
    found = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    P, N = parts.shape
    launch(sum_kernel, (-(-N // 64),), parts, found, P, N, config=Config({"BLOCK_P": 16, "BLOCK_N": 64}))
    return found


def of_bias(it: Any, strides: Any, into: Tensor | None = None) -> Tensor:
    """dbias, of the bias's own shape, or added to `into`; `it` is a Problem whose lse and pull are there.

    Tiles that stand for much share their work among parts, which are added up after.
    """
    call, bias = it.call, it.call.bias
    config = it.configure("bias", "BLOCK_T", "BLOCK_S")
    sizes = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    rows, columns = config["BLOCK_T"], config["BLOCK_S"]
    tiles = sizes[0] * sizes[1] * (-(-sizes[2] // rows)) * (-(-sizes[3] // columns))
    uses = it.B * it.H * (-(-it.T // rows)) * (-(-it.S // columns)) // tiles
    parts = max(1, min(uses, 4 * it.target.processors // tiles))
    if parts > 1:
        found = torch.empty(parts, *sizes, dtype=torch.float32, device=bias.device)
    else:
        found = (torch.empty(bias.shape, dtype=bias.dtype, device=bias.device) if into is None else into)[None]
    places = found[0][(None,) * (4 - found[0].dim())]
    launch(
        bias_kernel, (tiles * parts,),
        call.q, call.k, call.v, it.dout, it.steady, it.pull, it.bias, it.dense, call.seed, *it.hidden, found,
        *map(strides, (call.q, call.k, call.v, it.dout, it.bias, it.dense, places)), found.stride(0), *sizes, parts,
        it.B, it.T, it.S, it.H, it.rows, *it.numbers,
        config=config, OVER_T=sizes[2] != it.T, OVER_S=sizes[3] != it.S,
        **(it.constants | {"ADD": into is not None and parts == 1}),
    )  # fmt: skip
    if parts == 1:
        return found[0]
    found = total(found.view(parts, -1), bias) if into is None else found.sum(0).view(bias.shape)
    return found if into is None else into.add_(found)
