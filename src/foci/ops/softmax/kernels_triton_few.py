"""Triton kernels of the backward where queries are few, as in decoding: one pass over the keys, many programs wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, launch
from foci.tiles.softmax import between, keys_of
from foci.tiles.softmax_backward import load_rows, probabilities, stays, unit

# tiles/softmax_backward.py has the equations.
ROWS = 16  # queries of all heads that share a key head, at most (Call.few): as many as a product has at least


@triton.jit
def _rows(ptr, strides, b, t, h, real, cols: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows t, h of [B, T, H, cols] that are real, zeros for others."""
    c = tl.arange(0, BLOCK_C)
    places = ptr + b * strides[0] + (t * strides[1] + h * strides[2])[:, None] + c[None, :].to(tl.int64) * strides[3]
    return tl.load(places, mask=real[:, None] & (c < cols)[None, :], other=0.0)


@triton.jit
def few_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, bias_ptr, dense_ptr, seed_ptr,
    q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr, low_ptr, step_low, high_ptr, step_high,
    parts_ptr, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, out_strides, lse_strides, dout_strides, dlse_strides, bias_strides, dense_strides,
    dk_strides, dv_strides,
    B, T, S, G, blocks, scale, softcap, left, right, threshold, grow,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, END: tl.constexpr, START: tl.constexpr, PLACED: tl.constexpr,
    NEAR: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A block of keys of one key head and all queries: dk, dv, and what the block gives to dq [blocks, B, T, H, K]."""
    mask = (
        q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr, low_ptr, step_low, high_ptr, step_high,
        END, START, left, right,
    )  # fmt: skip
    place, bg = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    i, s = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
    real, t, h = i < T * R, tl.minimum(i // R, T - 1), g * R + i % R
    t0, s0, t_far = tl.program_id(1), place * BLOCK_S, t.to(tl.int64)
    PRECISE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32

    low, high = keys_of(mask, b, t, T, S)
    seeing = real & (low < high)  # queries that are not real may hold anything
    lse = tl.load(lse_ptr + b * lse_strides[0] + t_far * lse_strides[1] + h * lse_strides[2], mask=real, other=0.0)
    empty = (lse == -float("inf")) | (i >= T * R)
    steady = tl.where(empty, float("inf"), lse * unit(PRECISE))
    do = _rows(dout_ptr, dout_strides, b, t_far, h, seeing, V, BLOCK_V)
    out = _rows(out_ptr, out_strides, b, t_far, h, real, V, BLOCK_V)
    pull = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if dlse_ptr is not None:
        dlse_ptr += b * dlse_strides[0]
        pull -= tl.load(dlse_ptr + t_far * dlse_strides[1] + h * dlse_strides[2], mask=real, other=0.0)
    pull = tl.where(empty, 0.0, pull)

    seen = between((s0 + s)[:, None], low[None, :], high[None, :])
    alive = tl.max(seen.to(tl.int32), 1) > 0  # keys that are not real may hold anything
    q = _rows(q_ptr, q_strides, b, t_far, h, seeing, K, BLOCK_K)
    k = load_rows(k_ptr + b * k_strides[0] + g * k_strides[2], s0, alive, k_strides, K, NEAR, BLOCK_S, BLOCK_K)
    v = load_rows(v_ptr + b * v_strides[0] + g * v_strides[2], s0, alive, v_strides, V, NEAR, BLOCK_S, BLOCK_V)
    products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    pairs = (bias_ptr, bias_strides, dense_ptr, dense_strides, T, S)
    p, y = probabilities(
        products, steady[None, :], t0, s0, t[None, :], s[:, None], pairs, b, h[None, :], scale, softcap, NEAR, PRECISE
    )
    p = tl.where(seen, p, 0.0)
    share = p
    if seed_ptr is not None:
        kept = stays(seed_ptr, b, h[None, :], t[None, :], (s0 + s)[:, None], threshold, PLACED)
        share, dp = tl.where(kept, p * grow, 0.0), tl.where(kept, dp * grow, 0.0)
    if dv_ptr is not None:
        dv = tl.dot(share.to(do.dtype), do, input_precision=PRECISION)
        _put(dv_ptr + b * dv_strides[0] + g * dv_strides[2], dv, s0, S, dv_strides, V)
    if softcap is not None:
        p *= 1.0 - y * y
    dz = (p * (dp - pull[None, :])).to(q.dtype)
    if dk_ptr is not None:
        dk = tl.dot(dz, q, input_precision=PRECISION)
        _put(dk_ptr + b * dk_strides[0] + g * dk_strides[2], dk * scale, s0, S, dk_strides, K)
    if parts_ptr is not None:
        dq = tl.dot(tl.trans(k), dz, input_precision=PRECISION)
        c = tl.arange(0, BLOCK_K)
        rows = ((place.to(tl.int64) * B + b) * T + t_far) * (G * R) + h
        tl.store(parts_ptr + rows[None, :] * K + c[:, None], dq * scale, mask=real[None, :] & (c < K)[:, None])


@triton.jit
def _put(ptr, tile, row0, rows, strides, cols: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a tile of one head."""
    r, c = row0 + tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
    places = ptr + r.to(tl.int64)[:, None] * strides[1] + c.to(tl.int64)[None, :] * strides[3]
    tl.store(places, tile.to(ptr.dtype.element_ty), mask=(r < rows)[:, None] & (c < cols)[None, :])


def suits(call: Any, grads: tuple[Tensor | None, Tensor | None], needs: Sequence[bool]) -> bool:
    """Few queries next to the keys. Gradients of bias and sink, and packed rows, are left to the kernels for many."""
    plain = grads[0] is not None and call.q_offsets is None and call.sink is None and not needs[3]
    return plain and bool(call.few)


def backward(
    it: Any, outputs: tuple[Tensor, Tensor], dlse: Tensor | None, needs: Sequence[bool],
    strides: Callable[[Any], Any], total: Callable[[Tensor, Tensor], Tensor],
) -> list[Tensor | None]:  # fmt: skip
    """dq, dk and dv where needed; `it` is a Problem. Two launches, the second sums what blocks of keys give to dq."""
    call, (out, lse) = it.call, outputs
    wide = call.q.dtype.itemsize * max(it.widths) > 256
    config = Config({"BLOCK_T": ROWS, "BLOCK_S": 32 if wide else 64}, 4, 1)
    blocks = -(-it.S // config["BLOCK_S"])
    dk, dv = (x.new_empty(x.shape) if need else None for x, need in zip(call[1:3], needs[1:3], strict=True))
    parts = call.q.new_empty(blocks, call.q.numel(), dtype=torch.float32) if needs[0] else None
    launch(
        few_kernel, (blocks * it.B * it.G,),
        call.q, call.k, call.v, out, lse, it.dout, dlse, it.bias, it.dense, call.seed, *it.hidden, parts, dk, dv,
        *map(strides, (call.q, call.k, call.v, out, lse, it.dout, dlse, it.bias, it.dense, dk, dv)),
        it.B, it.T, it.S, it.G, blocks, *it.numbers,
        config=config, **it.constants,
    )  # fmt: skip
    return [None if parts is None else total(parts, call.q), dk, dv]
