"""Pairs of two operands of rows with one of columns, gates per channel: tiles/near.py for the delta rule's A and E.

Operands are float32. Their products are those of two bfloat16 each where inputs are bfloat16, which keeps 2^-16 of each
number and takes operands as they lie, and TF32 where these are float16; next to that exp(c[t]) exp(-c[s]) adds an error
of 1e-5 of an entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles import near
from foci.tiles.gates import diagonal, diagonal_of, gates_of_level, of_level, summed
from foci.tiles.near import far_level
from foci.tiles.state import halves, in_two, rounded


@triton.jit
def pairs_in_two(A, E, up_x, up_e, x, e, y, c, FAR: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """A and E with pairs added, also those above the diagonal: for `up_x` and `up_e`, x and e times exp(c), float32.

    c times log2 e (`sums_in_two` of tiles/near.py). Without FAR all rows are taken as near.
    """
    close = tl.min(c, 1) >= near.FAR * near.LOG2E
    columns, columns_low = parted(y * near.lift_in_two(c), dtype, PRECISION)
    columns, columns_low = tl.trans(columns), tl.trans(columns_low)
    if FAR:
        up_x, up_e = tl.where(close[:, None], up_x, 0.0), tl.where(close[:, None], up_e, 0.0)
    rows, rows_low = parted(up_x, dtype, PRECISION)
    A = of_two(rows, rows_low, columns, columns_low, A, PRECISION)
    rows, rows_low = parted(up_e, dtype, PRECISION)
    E = of_two(rows, rows_low, columns, columns_low, E, PRECISION)
    if FAR:
        A, E = of_far_rows(A, E, x, e, y, c, near.FAR * near.LOG2E, PRECISION)
    return A, E


@triton.jit
def of_far_rows(A, E, x, e, y, c, least, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """A and E with the pairs added of the rows of which a sum is less than `least`; c times log2 e."""
    close, count, c = tl.min(c, 1) >= least, near.levels_of(c, least), c / near.LOG2E
    for i in tl.range(count, disable_licm=True):
        w = near.far_level(c, c, i)
        down = tl.trans(y * w)
        found = of_level(tl.dot(x * w, down, input_precision=PRECISION), i)
        A += tl.where(close[:, None], 0.0, found + tl.where(i == 0, diagonal(x, y), 0.0))
        found = of_level(tl.dot(e * w, down, input_precision=PRECISION), i)
        E += tl.where(close[:, None], 0.0, found)
    return A, E


@triton.jit
def sums_behind(x, onto, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """onto + the sums of x [T,C] over all t >= r; for inputs in bfloat16 by products, x as two of them.

    What pairs behind r give has cancelled to 2^-16 of one token's sum then, in a scan to 2^-24 of it.
    """
    if dtype == tl.bfloat16:
        r, t = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[0])[None, :]
        behind, high = tl.where(t >= r, 1.0, 0.0).to(tl.bfloat16), x.to(tl.bfloat16)
        onto = tl.dot(behind, high, tl.dot(behind, (x - high.to(tl.float32)).to(tl.bfloat16), onto))
    else:
        onto += tl.cumsum(x, 0, reverse=True)
    return onto


@triton.jit
def parted(x, dtype: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Operands that stand for x float32: if `dtype` is bfloat16 `in_two` of tiles/state.py, else TF32's, twice."""
    if dtype == tl.bfloat16:
        return in_two(x)
    else:
        x = rounded(x, PRECISION)
        return x, x


@triton.jit
def of_two(x, x_low, y, y_low, z, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x y + z of what `parted` gave: in bfloat16 three products, 2^-16 of each number right."""
    if x.dtype == tl.bfloat16:
        return halves(x, x_low, y, y_low, z)
    else:
        return tl.dot(x, y, z, input_precision=PRECISION)


@triton.jit
def below(A):  # type: ignore[no-untyped-def]
    """A [T,T], 0 on and above its diagonal."""
    return tl.where(tl.arange(0, A.shape[0])[:, None] > tl.arange(0, A.shape[1])[None, :], A, 0.0)


@triton.jit
def on_diagonal(A):  # type: ignore[no-untyped-def]
    """[T]: A's diagonal."""
    return tl.sum(tl.where(diagonal_of(A), A, 0.0), 1)


@triton.jit
def far_backward(dy, dg, dA, x, y, c, near, i, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(dx, dy, dg) of far rows' pairs on level i, dy and dg onto what is there."""
    w, block = far_level(c, c, i), tl.where(near[:, None], 0.0, of_level(dA, i))
    dx = w * tl.dot(block, y * w, input_precision=PRECISION)
    to_y = w * tl.dot(tl.trans(block), x * w, input_precision=PRECISION)
    return dx, dy + to_y, summed(gates_of_level(dA, i, True), x * dx + y * to_y, dg, PRECISION)
