"""Products of a chunk's backward: of float32 with bfloat16, through a state, and sums over heads that read one."""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.memory import load_rows, load_tile, store_tile
from foci.tiles.state import in_two, rounded, working


@triton.jit
def right(x, y, z, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x y + z of y in float32; with x in bfloat16 y is taken as the sum of two of them."""
    if x.dtype == tl.bfloat16:
        high, low = in_two(y)
        z = tl.dot(x, high, tl.dot(x, low, z))
    else:
        z = tl.dot(x, rounded(y, PRECISION), z, input_precision=PRECISION)
    return z


@triton.jit
def outer(  # type: ignore[no-untyped-def]
    x_ptr, x_strides, d_ptr, d_stride, t0, stop, V,
    BELOW: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """x d^T [CHUNK,CHUNK] on and below the diagonal, or BELOW it alone; d in float32."""
    found = tl.zeros([CHUNK, CHUNK], tl.float32)
    for v0 in range(0, V, BLOCK_V):
        x = working(load_tile(x_ptr, t0, stop, x_strides[1], v0, V, x_strides[3], CHUNK, BLOCK_V))
        d = load_tile(d_ptr, t0, stop, d_stride, v0, V, 1, CHUNK, BLOCK_V)
        found = right(x, tl.trans(d), found, PRECISION)
    t, s = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.where(t > s if BELOW else t >= s, found, 0.0)


@triton.jit
def through_both(  # type: ignore[no-untyped-def]
    out_ptr, out_strides, dv_ptr, d_ptr, stride, states_ptr, ends_ptr, t0, stop, k0, K, V,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """(do S^T, dv S^T, d dS^T [CHUNK,BLOCK_K], sums over V of S dS [BLOCK_K]) of a state and the gradient behind it."""
    by_out = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    by_value = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    by_error = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    by_total = tl.zeros([BLOCK_K], tl.float32)
    for v0 in range(0, V, BLOCK_V):
        S = working(load_tile(states_ptr, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V))
        dS = working(load_tile(ends_ptr, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V))
        do = load_tile(out_ptr, t0, stop, out_strides[1], v0, V, out_strides[3], CHUNK, BLOCK_V).to(S.dtype)
        dv = load_tile(dv_ptr, t0, stop, stride, v0, V, 1, CHUNK, BLOCK_V).to(S.dtype)
        d = load_tile(d_ptr, t0, stop, stride, v0, V, 1, CHUNK, BLOCK_V).to(S.dtype)
        by_out = tl.dot(do, tl.trans(S), by_out, input_precision=PRECISION)
        by_value = tl.dot(dv, tl.trans(S), by_value, input_precision=PRECISION)
        by_error = tl.dot(d, tl.trans(dS), by_error, input_precision=PRECISION)
        by_total += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    return by_out, by_value, by_error, by_total


@triton.jit
def decayed(ptr, strides, row, h, decays, t0, stop, k0, K):  # type: ignore[no-untyped-def]
    """A tile of a row's head h, each number times its decay."""
    ptr += row * strides[0] + h * strides[2]
    x = load_tile(ptr, t0, stop, strides[1], k0, K, strides[3], decays.shape[0], decays.shape[1])
    return decays * x.to(tl.float32)


@triton.jit
def store_in_two(ptr, half, tile, t0, stop, stride, k0, K):  # type: ignore[no-untyped-def]
    """A tile in float32; in bfloat16 its rounding, and `half` behind it what that left."""
    store_tile(ptr, tile, t0, stop, stride, k0, K, 1)
    if ptr.dtype.element_ty == tl.bfloat16:
        store_tile(ptr + half, tile - tile.to(tl.bfloat16).to(tl.float32), t0, stop, stride, k0, K, 1)


@triton.jit
def gather(ptr, sums_ptr, into, tile, r, R, t0, stop, stride, k0, K):  # type: ignore[no-untyped-def]
    """Head r's gradient of what R heads read, one after the other: in memory is the sum over those before it."""
    if ptr is not None:
        if sums_ptr is not None:
            there = tl.where(r > 0, stop, 0)
            tile += load_tile(sums_ptr + into, t0, there, stride, k0, K, 1, tile.shape[0], tile.shape[1])
            tl.debug_barrier()  # all have read before any writes
            store_tile(sums_ptr + into, tile, t0, stop, stride, k0, K, 1)
        store_tile(ptr + into, tile, t0, tl.where(r == R - 1, stop, 0), stride, k0, K, 1)


@triton.jit
def onto(  # type: ignore[no-untyped-def]
    z, pairs_ptr, half, stride, y_ptr, y_strides, t0, stop, k0, K, PRECISION: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """z + P y of pairs P [CHUNK,CHUNK] as `store_in_two` left them.

    One product in a loop: of two that follow each other Triton would have all warps make the same on Hopper.
    """
    PARTS: tl.constexpr = 2 if pairs_ptr.dtype.element_ty == tl.bfloat16 else 1
    for i in tl.range(PARTS, disable_licm=True):
        P = load_rows(pairs_ptr + i * half, t0, stop, stride, 0, z.shape[0], 1, z.shape[0], z.shape[0], True)
        y = working(load_rows(y_ptr, t0, stop, y_strides[1], k0, K, y_strides[3], z.shape[0], z.shape[1], EVEN))
        z = tl.dot(rounded(P, PRECISION), y, z, input_precision=PRECISION)
    return z
