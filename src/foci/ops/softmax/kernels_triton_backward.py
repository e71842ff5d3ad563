"""Triton kernels of the backward: gradients of the queries first, then of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, precision, side, target_of
from foci.tiles.softmax import LOG2E, between, border, borders, keys_of, queries_of, stretches
from foci.tiles.softmax_backward import bias_of, load_rows, probabilities, stays, unit

# tiles/softmax_backward.py has the equations.


@triton.jit
def _put(ptr, tile, row0, rows, strides, cols: tl.constexpr, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a tile of float32 sums of one head, or ADD it to what is there."""
    r, c = row0 + tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    places = ptr + r.to(tl.int64)[:, None] * strides[1] + c.to(tl.int64)[None, :] * strides[3]
    if ADD:
        tile += tl.load(places, mask=inside, other=0.0)
    tl.store(places, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _of_queries(  # type: ignore[no-untyped-def]
    dq, mass, excess, q, do, lse, pull, t0, low, high, s0, stop, k_ptr, v_ptr, k_strides, v_strides, pairs,
    seed_ptr, b, h, scale, softcap, threshold, grow, MASKED: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, NEEDS_DQ: tl.constexpr, EXACT: tl.constexpr, GAPS: tl.constexpr,
    PLACED: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One block of keys joins the sums of a block of queries: dq, sum p and sum dz. MASKED: not every pair is seen."""
    s = s0 + tl.arange(0, BLOCK_S)
    alive = None
    if MASKED:
        alive = s < stop
        if GAPS:  # keys between two documents may hold anything
            alive &= tl.max(between(s[None, :], low, high).to(tl.int32), 0) != 0
    k = load_rows(k_ptr, s0, alive, k_strides, K, NEAR, BLOCK_S, BLOCK_K)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    # The next product is begun before this one is waited for.
    dp = tl.zeros_like(products)
    if do is not None:
        v = load_rows(v_ptr, s0, alive, v_strides, V, NEAR, BLOCK_S, BLOCK_V)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    p, y = probabilities(
        products, lse[:, None], t0, s0, tl.arange(0, q.shape[0])[:, None], tl.arange(0, BLOCK_S)[None, :], pairs, b, h,
        scale, softcap, NEAR, q.dtype == tl.float32,
    )  # fmt: skip
    if MASKED:
        p = tl.where(between(s[None, :], low, high), p, 0.0)
    if seed_ptr is not None:
        t = t0 + tl.arange(0, q.shape[0])
        dp = tl.where(stays(seed_ptr, b, h, t[:, None], s[None, :], threshold, PLACED), dp * grow, 0.0)
    dz = p * (dp - pull[:, None])
    if EXACT:
        mass += tl.sum(p, 1)
        excess += tl.sum(dz, 1)
    if NEEDS_DQ:
        if softcap is not None:
            dz *= 1.0 - y * y
        dq = tl.dot(dz.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, mass, excess


@triton.jit
def queries_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, given_ptr, bias_ptr, dense_ptr, sink_ptr, seed_ptr,
    q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr, low_ptr, step_low, high_ptr, step_high,
    steady_ptr, pull_ptr, dq_ptr, dsink_ptr,
    q_strides, k_strides, v_strides, out_strides, lse_strides, dout_strides, dlse_strides, given_strides, bias_strides,
    dense_strides, dq_strides, sink_stride,
    T, S, H, blocks, rows, scale, softcap, left, right, threshold, grow,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, END: tl.constexpr, START: tl.constexpr, GAPS: tl.constexpr,
    PLACED: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, ADD: tl.constexpr,
    ALIKE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: their lse and pull [B, H, T] for the kernels after it, dq, a part of dsink.

    pull is what is `given`, or comes from out. EXACT: it is made up to sum_s p dp by sum dz and sum p of the same pass,
    where out is half and its rounding would show; by 1 in place of a sum that lse, rounded, has left of it.
    """
    mask = (
        q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr, low_ptr, step_low, high_ptr, step_high,
        END, START, left, right,
    )  # fmt: skip
    # Under a causal mask the last block has most to do: it begins first.
    place, bh = blocks - 1 - tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    t0 = place * BLOCK_T
    t = t0 + tl.arange(0, BLOCK_T)
    low, high = keys_of(mask, b, tl.minimum(t, T - 1), T, S)
    start, inner, outer, stop = stretches(low, high, BLOCK_S)
    alive = (t < T) & (low < high)  # queries that are not real may hold anything
    low, high = low[:, None], high[:, None]

    PRECISE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    lse_ptr += b * lse_strides[0] + h * lse_strides[2]
    lse = tl.load(lse_ptr + t.to(tl.int64) * lse_strides[1], mask=t < T, other=-float("inf"))
    empty = lse == -float("inf")
    steady = tl.where(empty, float("inf"), lse * unit(PRECISE))
    pull, of_lse, do = tl.zeros_like(lse), tl.zeros_like(lse), None
    if dout_ptr is not None:
        dout_ptr += b * dout_strides[0] + h * dout_strides[2]
        do = load_rows(dout_ptr, t0, alive, dout_strides, V, NEAR, BLOCK_T, BLOCK_V)
    if given_ptr is not None:
        given_ptr += b * given_strides[0] + h * given_strides[2]
        pull = tl.load(given_ptr + t.to(tl.int64) * given_strides[1], mask=t < T, other=0.0)
    elif do is not None:
        out_ptr += b * out_strides[0] + h * out_strides[2]
        out = load_rows(out_ptr, t0, t < T, out_strides, V, NEAR, BLOCK_T, BLOCK_V)
        pull = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if dlse_ptr is not None:
        dlse_ptr += b * dlse_strides[0] + h * dlse_strides[2]
        of_lse = tl.load(dlse_ptr + t.to(tl.int64) * dlse_strides[1], mask=t < T, other=0.0)
    pull = tl.where(empty, 0.0, pull - of_lse)

    if EXACT or dq_ptr is not None:
        q_ptr += b * q_strides[0] + h * q_strides[2]
        q = load_rows(q_ptr, t0, alive, q_strides, K, NEAR, BLOCK_T, BLOCK_K)
        k_ptr += b * k_strides[0] + (h // R) * k_strides[2]
        v_ptr += b * v_strides[0] + (h // R) * v_strides[2]
        pairs = (bias_ptr, bias_strides, dense_ptr, dense_strides, T, S)
        if ALIKE:  # places are reckoned once
            v_strides = k_strides
        dq = tl.zeros([BLOCK_T, BLOCK_K], tl.float32) + tl.program_id(1).to(tl.float32)  # as in keys_kernel
        mass, excess = tl.zeros_like(lse), tl.zeros_like(lse)
        # Two loops: a branch within one would have every product waited for.
        for i in range(borders(start, inner, outer, stop, BLOCK_S)):
            dq, mass, excess = _of_queries(
                dq, mass, excess, q, do, steady, pull, t0, low, high, border(i, start, inner, outer, BLOCK_S), stop,
                k_ptr, v_ptr, k_strides, v_strides, pairs, seed_ptr, b, h, scale, softcap, threshold, grow, True,
                K, V, dq_ptr is not None, EXACT, GAPS, PLACED, NEAR, PRECISION, BLOCK_S, BLOCK_K, BLOCK_V,
            )  # fmt: skip
        for i in range((outer - inner) // BLOCK_S):
            s0 = tl.multiple_of(inner + i * BLOCK_S, BLOCK_S)  # so that a bias is read eight at a time
            dq, mass, excess = _of_queries(
                dq, mass, excess, q, do, steady, pull, t0, low, high, s0, stop,
                k_ptr, v_ptr, k_strides, v_strides, pairs, seed_ptr, b, h, scale, softcap, threshold, grow, False,
                K, V, dq_ptr is not None, EXACT, GAPS, PLACED, NEAR, PRECISION, BLOCK_S, BLOCK_K, BLOCK_V,
            )  # fmt: skip
        if dq_ptr is not None:
            _put(dq_ptr + b * dq_strides[0] + h * dq_strides[2], dq * scale, t0, T, dq_strides, K, ADD)
    of_sink = tl.zeros_like(lse)
    if sink_ptr is not None:
        above = tl.load(sink_ptr + h * sink_stride).to(tl.float32) * unit(PRECISE) - steady
        of_sink = tl.exp2(above * (LOG2E / unit(PRECISE)))
    if EXACT:
        whole = tl.where(mass == 0.0, 1.0, mass + of_sink)
        pull = tl.where(empty, 0.0, (excess + pull * mass) / whole - of_lse)

    row = bh.to(tl.int64) * rows
    tl.store(steady_ptr + row + t, steady)
    tl.store(pull_ptr + row + t, pull)
    if dsink_ptr is not None:
        tl.store(dsink_ptr + (b * blocks + place) * H + h, -tl.sum(of_sink * pull, 0))


@triton.jit
def _of_keys(  # type: ignore[no-untyped-def]
    dk, dv, k, v, t0, stop, s0, low, high, given, pairs, seed_ptr, b, h, H, scale, softcap, threshold, grow,
    MASKED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NEEDS_DK: tl.constexpr, NEEDS_DV: tl.constexpr,
    GAPS: tl.constexpr, PLACED: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head joins the sums of a block of keys, in tiles [keys, queries]; as above."""
    q_ptr, dout_ptr, steady_ptr, pull_ptr, q_strides, dout_strides, rows = given
    near, row = tl.arange(0, BLOCK_T), (b * H + h) * rows + tl.multiple_of(t0.to(tl.int64), BLOCK_T)
    t = t0 + near
    alive = None
    if MASKED:
        alive = t < stop
        if GAPS:  # queries between two documents may hold anything
            alive &= tl.max(between(t[None, :], low, high).to(tl.int32), 0) != 0
    q_head = q_ptr + b * q_strides[0] + h * q_strides[2]
    q = load_rows(q_head, t0, alive, q_strides, K, NEAR, BLOCK_T, BLOCK_K)
    products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    # The next product is begun before this one is waited for.
    dp = tl.zeros_like(products)
    if dout_ptr is not None:
        dout_head = dout_ptr + b * dout_strides[0] + h * dout_strides[2]
        do = load_rows(dout_head, t0, alive, dout_strides, V, NEAR, BLOCK_T, BLOCK_V)
        if NEEDS_DK:
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    # lse and pull are read where they are needed: a thread holds a quarter of each.
    steady = tl.load(steady_ptr + row + near)
    bias = None
    if pairs[0] is not None:  # read as it lies, a query a row
        s = tl.arange(0, k.shape[0])
        bias = tl.trans(bias_of(t0, s0, near[:, None], s[None, :], pairs, b, h, NEAR, q.dtype == tl.float32))
    p, y = probabilities(
        products, steady[None, :], t0, s0, near[None, :], tl.arange(0, k.shape[0])[:, None], pairs, b,
        h, scale, softcap, NEAR, q.dtype == tl.float32, bias,
    )  # fmt: skip
    if MASKED:
        p = tl.where(between(t[None, :], low, high), p, 0.0)
    share = p
    if seed_ptr is not None:
        s = s0 + tl.arange(0, k.shape[0])
        kept = stays(seed_ptr, b, h, t[None, :], s[:, None], threshold, PLACED)
        share, dp = tl.where(kept, p * grow, 0.0), tl.where(kept, dp * grow, 0.0)
    if NEEDS_DV:
        dv = tl.dot(share.to(do.dtype), do, dv, input_precision=PRECISION)
    if NEEDS_DK:
        if softcap is not None:  # here rather than in dz: tanh need not be held any longer
            p *= 1.0 - y * y
        pull = tl.load(pull_ptr + row + near)
        dz = p * (dp - pull[None, :])
        dk = tl.dot(dz.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _next(h, step, steps, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """The step after this one: of the same head, or the first of the next one."""
    step += 1
    if R > 1:
        h += (step == steps).to(tl.int64)
        step = tl.where(step == steps, 0, step)
    return h, step


@triton.jit
def keys_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, dout_ptr, steady_ptr, pull_ptr, bias_ptr, dense_ptr, seed_ptr,
    q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr, low_ptr, step_low, high_ptr, step_high,
    dk_ptr, dv_ptr, q_strides, k_strides, v_strides, dout_strides, bias_strides, dense_strides, dk_strides, dv_strides,
    T, S, G, blocks, rows, scale, softcap, left, right, threshold, grow,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, END: tl.constexpr, START: tl.constexpr, GAPS: tl.constexpr,
    PLACED: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr, ALIKE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A block of keys of one key head: dk and dv, over all queries that see it, of all heads that share it."""
    mask = (
        q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr, low_ptr, step_low, high_ptr, step_high,
        END, START, left, right,
    )  # fmt: skip
    place, bg = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    s0 = place * BLOCK_S
    s = s0 + tl.arange(0, BLOCK_S)
    low, high = queries_of(mask, b, tl.minimum(s, S - 1), T, S)
    start, inner, outer, stop = stretches(low, high, BLOCK_T)
    k_ptr += b * k_strides[0] + g * k_strides[2]
    v_ptr += b * v_strides[0] + g * v_strides[2]
    alive = (s < S) & (low < high)  # keys that are not real may hold anything
    low, high = low[:, None], high[:, None]
    k = load_rows(k_ptr, s0, alive, k_strides, K, NEAR, BLOCK_S, BLOCK_K)
    v = load_rows(v_ptr, s0, alive, v_strides, V, NEAR, BLOCK_S, BLOCK_V)
    # A zero that the compiler cannot see: else it sets sums to 0 where Hopper's products have begun to add to them, and
    # the assembler has each product wait for the one before it (its note C7515).
    zero = tl.program_id(1).to(tl.float32)
    dk, dv = tl.zeros([BLOCK_S, BLOCK_K], tl.float32) + zero, tl.zeros([BLOCK_S, BLOCK_V], tl.float32) + zero
    given = (q_ptr, dout_ptr, steady_ptr, pull_ptr, q_strides, q_strides if ALIKE else dout_strides, rows)
    pairs = (bias_ptr, bias_strides, dense_ptr, dense_strides, T, S)
    # Loops over heads and queries in one: they need fewer registers, and their loads never pause.
    steps = borders(start, inner, outer, stop, BLOCK_T)
    h, step = g * R, steps * 0
    for _ in range(R * steps):
        dk, dv = _of_keys(
            dk, dv, k, v, border(step, start, inner, outer, BLOCK_T), stop, s0, low, high, given, pairs, seed_ptr, b, h,
            G * R, scale, softcap, threshold, grow, True, K, V, dk_ptr is not None, dv_ptr is not None, GAPS, PLACED,
            NEAR, PRECISION, BLOCK_T, BLOCK_K, BLOCK_V,
        )  # fmt: skip
        h, step = _next(h, step, steps, R)
    steps = (outer - inner) // BLOCK_T
    h, step = g * R, steps * 0
    for _ in range(R * steps):
        dk, dv = _of_keys(
            dk, dv, k, v, inner + step * BLOCK_T, stop, s0, low, high, given, pairs, seed_ptr, b, h, G * R,
            scale, softcap, threshold, grow, False, K, V, dk_ptr is not None, dv_ptr is not None, GAPS, PLACED,
            NEAR, PRECISION, BLOCK_T, BLOCK_K, BLOCK_V,
        )  # fmt: skip
        h, step = _next(h, step, steps, R)
    if dk_ptr is not None:
        _put(dk_ptr + b * dk_strides[0] + g * dk_strides[2], dk * scale, s0, S, dk_strides, K, ADD)
    if dv_ptr is not None:
        _put(dv_ptr + b * dv_strides[0] + g * dv_strides[2], dv, s0, S, dv_strides, V, ADD)


@functools.cache
def _rule(
    kernel: str, names: tuple[str, str], widths: tuple[int, int], size: int, heavy: bool, pairs: int, target: Target
) -> Config:
    """Tiles whose sums stay in registers: the wider a head, the fewer rows a block has. heavy: more is held a pair.

    pairs: bytes that are read for each pair.
    """
    place = next(i for i, most in enumerate((64, 128, 256, 512)) if max(widths) <= most)
    kind = "float32" if size == 4 else "large" if target.kind == "cuda" and target.arch in (90, 100, 103) else "small"
    if _on_hopper(target, size, widths):
        rows, columns, warps, stages = _ON_HOPPER[kernel, heavy][place]
        # A row of k and v, but of k alone for dv; rows of q and dout, and what lies beside pairs, in each stage.
        kept = size * rows * (widths[0] if kernel == "dv" else sum(widths))
        passing = columns * (size * sum(widths) + pairs * rows)
        stages = max(1, min(stages, (target.shared - 1024 - kept) // passing))
        return Config({names[0]: rows, names[1]: columns}, warps, stages)
    rows, columns, warps, stages = _TILES[kind, names[0]][place]
    if heavy:
        columns = max(16, columns // 2)
    # Wide heads of keys alone, or of values, are not among what was measured: queries' tiles would spill 20 KB.
    known = kernel != "queries" or max(widths) <= 128 or widths[0] == widths[1]
    if size == 4 and target.kind == "cuda" and target.arch == 90 and known:
        rows, columns, warps, stages = _FLOAT32_ON_HOPPER[kernel][place]

    def held() -> int:
        # Two tiles of rows all along, two of columns in each stage, one of pairs between two layouts.
        return size * sum(widths) * (rows + stages * columns) + 4 * rows * columns

    while held() > target.shared and (stages > 1 or rows > 16 or columns > 16):
        if stages > 1:
            stages -= 1
        elif rows > columns:
            rows //= 2
        else:
            columns //= 2
    return Config({names[0]: rows, names[1]: columns}, warps, stages)


def _on_hopper(target: Target, size: int, widths: tuple[int, int]) -> bool:
    """Whether tiles are as measured there."""
    return target.kind == "cuda" and target.arch == 90 and size == 2 and max(widths) <= 256


# Rows that a program keeps, rows of a step, warps and stages for heads of up to 64, 128, 256 and 512 numbers. By the
# block that is kept, queries or keys; large: where products read from shared memory, which leaves registers for sums.
_TILES = {
    ("large", "BLOCK_T"): ((128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
    ("large", "BLOCK_S"): ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2), (32, 16, 8, 2)),
    ("small", "BLOCK_T"): ((64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 2), (16, 16, 8, 2)),
    ("small", "BLOCK_S"): ((64, 32, 4, 2), (64, 32, 8, 2), (32, 16, 8, 2), (16, 16, 8, 2)),
    ("float32", "BLOCK_T"): ((64, 32, 8, 2), (32, 16, 4, 2), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("float32", "BLOCK_S"): ((64, 32, 4, 2), (32, 16, 8, 2), (16, 16, 8, 1), (16, 16, 8, 1)),
}  # fmt: skip

# As measured on an H100 in float32, spills and all; the last of each was not measured.
_FLOAT32_ON_HOPPER = {
    "queries": ((64, 64, 4, 1), (32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 8, 1)),
    "keys": ((32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    "bias": ((64, 64, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (16, 16, 8, 1)),
}  # fmt: skip

# The same as measured on an H200 in bfloat16, for heads of up to 64, 128 and 256 numbers, by kernel and heavy.
_ON_HOPPER = {
    ("queries", False): ((64, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 1)),
    ("queries", True): ((64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 8, 2)),
    ("keys", False): ((64, 64, 4, 2), (128, 64, 8, 3), (64, 32, 8, 2)),
    ("keys", True): ((64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
    ("dk", False): ((128, 32, 8, 3),) * 3,
    ("dk", True): ((128, 32, 8, 3),) * 3,
    ("dv", False): ((128, 64, 8, 2),) * 3,
    ("dv", True): ((128, 64, 8, 2),) * 3,
    ("bias", True): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2)),
}


WIDEST = 512
_WIDEST_BLOCK = 128  # rows of a tile


class Problem:
    """One call as the kernels of its backward take it: what all of them are told, and what they hand on."""

    def __init__(self, call: Any, dout: Tensor | None, add: bool = False) -> None:
        self.call, self.dout, self.add, device = call, dout, add, call.q.device
        self.B, self.T, self.S, self.H, self.G, K, V = self.sizes = call.sizes
        self.target = target_of(device)
        # A bias or mask [B, H, T, S]; what it is broadcast over has stride 0.
        pairs = self.B, self.H, self.T, self.S
        self.bias, self.dense = (None if x is None else x.expand(pairs) for x in (call.bias, call.dense))
        low, high, offsets = call.band_low, call.band_high, call.q_offsets
        self.hidden = (
            offsets, call.kv_offsets, 0 if offsets is None else offsets.shape[0] - 1, call.kv_lengths, call.q_lengths,
            low, int(low is not None and low.shape[0] > 1), high, int(high is not None and high.shape[0] > 1),
        )  # fmt: skip
        # Documents may have room for more than they hold, and keys without a query: what lies between may be NaN.
        self.gaps = offsets is not None
        rate = call.dropout
        self.numbers = call.scale, call.softcap, call.left, call.right, int(rate * 2**53), 1 / (1 - rate)
        self.widths = side(K, WIDEST), side(V, WIDEST)
        self.constants = {
            "R": self.H // self.G, "K": K, "V": V, "END": call.causal_end, "START": call.causal_start,
            "PLACED": call.seed is not None and call.seed.dim() > 0,
            "PRECISION": precision(call.q.dtype, self.target), "ADD": add, "NEAR": self._near(),
            "BLOCK_K": self.widths[0], "BLOCK_V": self.widths[1],
        }  # fmt: skip
        # On Hopper sums of wide heads fill the registers each alone: dk and dv are made one after the other.
        size = call.q.dtype.itemsize
        self.apart = _on_hopper(self.target, size, self.widths) and max(self.widths) > 128
        # Rows of lse and pull are whole blocks, filled to the last: they are read without a mask.
        self.rows = -(-self.T // _WIDEST_BLOCK) * _WIDEST_BLOCK
        self.steady, self.pull = torch.empty(2, self.B, self.H, self.rows, dtype=torch.float32, device=device).unbind()

    def _near(self) -> bool:
        """Whether places within a tile fit into 32 bits (any that are not those of tensors that are very far apart)."""
        rows = (x.stride() for x in (*self.call[:3], self.dout) if x is not None)
        pairs = (x.stride() for x in (self.bias, self.dense) if x is not None)
        farthest = [_WIDEST_BLOCK * s[1] + WIDEST * s[3] for s in rows] + [_WIDEST_BLOCK * (s[2] + s[3]) for s in pairs]
        return max(farthest) < 2**31

    def configure(self, kernel: str, kept: str, other: str) -> Config:
        """`kept` is the block that a program holds all along."""
        call = self.call
        heavy = call.softcap is not None or self.bias is not None or call.seed is not None or self.gaps
        pairs = sum(x.dtype.itemsize for x in (self.bias, self.dense) if x is not None)
        rule = functools.partial(_rule, kernel, (kept, other), self.widths, call.q.dtype.itemsize, heavy, pairs)
        return configure(f"softmax_backward_{kernel}", (*self.widths, call.q.dtype, heavy), rule, self.target)


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Those of nothing are never used."""
    return (0, 0, 0, 0) if x is None else x.stride()


def launch_queries(
    it: Problem, out: Tensor | None, lse: Tensor, dlse: Tensor | None, given: Tensor | None, dq: Tensor | None,
    exact: bool, of_sink: bool,
) -> Tensor | None:  # fmt: skip
    """Fills steady, pull and dq; gives the parts of dsink [parts, H], `of_sink`."""
    call = it.call
    sink = call.sink if exact or of_sink else None
    config = it.configure("queries", "BLOCK_T", "BLOCK_S")
    blocks = it.rows // config["BLOCK_T"]
    parts = torch.empty(it.B * blocks, it.H, dtype=torch.float32, device=lse.device) if of_sink else None
    launch(
        queries_kernel, (blocks * it.B * it.H,),
        call.q, call.k, call.v, out, lse, it.dout, dlse, given, it.bias, it.dense, sink, call.seed, *it.hidden,
        it.steady, it.pull, dq, parts,
        *map(strides, (call.q, call.k, call.v, out, lse, it.dout, dlse, given, it.bias, it.dense, dq)),
        0 if sink is None else sink.stride(0), it.T, it.S, it.H, blocks, it.rows, *it.numbers,
        config=config, GAPS=it.gaps, EXACT=exact, ALIKE=call.k.stride() == call.v.stride(), **it.constants,
    )  # fmt: skip
    return parts


def launch_keys(it: Problem, dk: Tensor | None, dv: Tensor | None) -> None:
    """Fills dk and dv."""
    if it.apart and dk is not None and dv is not None:
        launch_keys(it, None, dv)
        dv = None
    call = it.call
    config = it.configure("keys" if not it.apart else "dv" if dk is None else "dk", "BLOCK_S", "BLOCK_T")
    blocks = -(-it.S // config["BLOCK_S"])
    launch(
        keys_kernel, (blocks * it.B * it.G,),
        call.q, call.k, call.v, it.dout, it.steady, it.pull, it.bias, it.dense, call.seed, *it.hidden, dk, dv,
        *map(strides, (call.q, call.k, call.v, it.dout, it.bias, it.dense, dk, dv)),
        it.T, it.S, it.G, blocks, it.rows, *it.numbers,
        config=config, GAPS=it.gaps, ALIKE=strides(it.dout) == call.q.stride(), **it.constants,
    )  # fmt: skip


def backward(
    call: Any, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], needs: Sequence[bool]
) -> tuple[Problem, list[Tensor | None], Tensor | None]:
    """The problem, dq, dk and dv where needed, and the parts of dsink [parts, H].

    Two launches at most, on Hopper three where heads are wider than 128.

    The gradient of a bias comes after (kernels_triton_bias.py), from what these leave in the problem.
    """
    (out, lse), (dout, dlse) = outputs, grads
    it = Problem(call, dout)
    of_sink = call.sink is not None and needs[4]
    # Summed over many pairs, what the rounding of out leaves in pull would show: of a half one in dsink, too.
    of_bias = call.bias is not None and needs[3]
    exact = of_bias or (of_sink and call.q.dtype != torch.float32)
    found = [x.new_empty(x.shape) if need else None for x, need in zip(call[:3], needs[:3], strict=True)]
    dq, dk, dv = found
    parts = launch_queries(it, out, lse, dlse, None, dq, exact, of_sink)
    if dout is None and dv is not None:
        dv = dv.zero_()
    if dk is not None or (dv is not None and dout is not None):
        launch_keys(it, dk, None if dout is None else dv)
    return it, found, parts


def backward_part(call: Any, rows: Any, into: Any) -> Problem:
    """Adds what these keys give to sums of float32; rows and into as in ops/softmax/call.py: Rows, Gradients."""
    it = Problem(call, rows.dout.to(call.q.dtype), add=True)
    launch_queries(it, None, rows.lse, None, rows.delta, into.dq, False, False)
    launch_keys(it, into.dk, into.dv)
    return it
