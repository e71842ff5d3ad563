"""A chunk's backward, gates per channel: its pairs' gradients, and what goes through its states."""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.chunk_backward import across
from foci.tiles.pairs import of_two, parted
from foci.tiles.state import rounded, working
from foci.tiles.whole import read


@triton.jit
def outers(  # type: ignore[no-untyped-def]
    out_ptr, out_strides, dv_ptr, d_ptr, stride, t0, stop, V, dtype: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(do d^T, dv d^T [CHUNK,CHUNK] in float32)."""
    dA = tl.zeros([CHUNK, CHUNK], tl.float32)
    dE = tl.zeros([CHUNK, CHUNK], tl.float32)
    for v0 in range(0, V, BLOCK_V):
        do = working(read(out_ptr, t0, stop, out_strides[1], v0, V, out_strides[3], CHUNK, BLOCK_V, WHOLE))
        d = read(d_ptr, t0, stop, stride, v0, V, 1, CHUNK, BLOCK_V, WHOLE)
        dv = read(dv_ptr, t0, stop, stride, v0, V, 1, CHUNK, BLOCK_V, WHOLE)
        if dtype == tl.bfloat16:
            high, low = parted(d, dtype, PRECISION)
            dA = tl.dot(do, tl.trans(high), tl.dot(do, tl.trans(low), dA))
            value_high, value_low = parted(dv, dtype, PRECISION)
            dE = of_two(value_high, value_low, tl.trans(high), tl.trans(low), dE, PRECISION)
        else:
            d = tl.trans(rounded(d, PRECISION))
            dA = tl.dot(do, d, dA, input_precision=PRECISION)
            dE = tl.dot(rounded(dv, PRECISION), d, dE, input_precision=PRECISION)
    return dA, dE


@triton.jit
def through_states(  # type: ignore[no-untyped-def]
    out_ptr, out_strides, dv_ptr, d_ptr, stride, states_ptr, ends_ptr, t0, stop, k0, K, V,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(do S^T, dv S^T, d dS^T [CHUNK,BLOCK_K], sums over V of S dS [BLOCK_K]) of a state and the gradient behind it.

    WHOLE: of all tiles (tiles/whole.py).
    """
    by_out = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    by_value = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    by_error = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    by_total = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for v0 in range(0, V, BLOCK_V):
        S = working(read(states_ptr, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V, WHOLE))
        dS = working(read(ends_ptr, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V, WHOLE))
        do = read(out_ptr, t0, stop, out_strides[1], v0, V, out_strides[3], CHUNK, BLOCK_V, WHOLE).to(S.dtype)
        dv = read(dv_ptr, t0, stop, stride, v0, V, 1, CHUNK, BLOCK_V, WHOLE).to(S.dtype)
        d, lost = parted(read(d_ptr, t0, stop, stride, v0, V, 1, CHUNK, BLOCK_V, WHOLE), S.dtype, PRECISION)
        by_out = tl.dot(do, tl.trans(S), by_out, input_precision=PRECISION)
        by_value = tl.dot(dv, tl.trans(S), by_value, input_precision=PRECISION)
        by_error = onto_end(d, lost, dS, by_error, PRECISION)
        by_total += S.to(tl.float32) * dS.to(tl.float32)
    return by_out, by_value, by_error, tl.sum(by_total, 1)


@triton.jit
def onto_end(d, lost, dS, z, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """d dS^T + z, d in two bfloat16: what is left of alike errors is small, and beta's gradient with it."""
    z = across(d, dS, z, PRECISION)
    if d.dtype == tl.bfloat16:
        z = tl.dot(lost, tl.trans(dS.to(tl.bfloat16)), z)
    return z
