"""Products of a chunk's backward: of float32 with bfloat16, through a state, and sums over heads that read one."""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.memory import load_tile, store_tile
from foci.tiles.state import in_two, rounded
from foci.tiles.whole import read, write


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
def across(x, y, z, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x y^T + z; beside an x in bfloat16 a y in float32 is taken as the sum of two of them."""
    if x.dtype == y.dtype:
        z = tl.dot(x, tl.trans(y), z, input_precision=PRECISION)
    else:
        z = right(x, tl.trans(y), z, PRECISION)
    return z


@triton.jit
def store_in_two(ptr, half, tile, t0, stop, stride, k0, K, WHOLE: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """A tile in float32; in bfloat16 its rounding, and `half` behind it what that left."""
    write(ptr, tile, t0, stop, stride, k0, K, WHOLE)
    if ptr.dtype.element_ty == tl.bfloat16:
        write(ptr + half, tile - tile.to(tl.bfloat16).to(tl.float32), t0, stop, stride, k0, K, WHOLE)


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
def load_in_two(ptr, half, t0, stop, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of all columns as `store_in_two` left it; twice the same where it left one."""
    high = read(ptr, t0, stop, stride, 0, COLUMNS, 1, ROWS, COLUMNS, WHOLE, True)
    low = high
    if ptr.dtype.element_ty == tl.bfloat16:
        low = read(ptr + half, t0, stop, stride, 0, COLUMNS, 1, ROWS, COLUMNS, WHOLE, True)
    return high, low


@triton.jit
def onto(z, high, low, y, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """z + (high + low) y in bfloat16, z + high y in float32."""
    if y.dtype == tl.bfloat16:
        z = tl.dot(high, y, tl.dot(low, y, z))
    else:
        z = tl.dot(high, y, z, input_precision=PRECISION)
    return z


@triton.jit
def of_beta(by_error, beta, otherwise, FAINT: tl.constexpr):  # type: ignore[no-untyped-def]
    """beta's gradient, d dv / beta, of `by_error` = d dv summed over columns, as all that dv is made of has beta in it.

    `otherwise`: its definition, for a beta of at most FAINT, which may have left dv without some of its digits.
    """
    return tl.where(tl.abs(beta) > FAINT, by_error / beta, otherwise)
