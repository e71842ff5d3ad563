"""Pairs of two operands of rows with one of columns, gates per channel: tiles/near.py for the delta rule's A and E.

Operands are float32. Their products are those of two bfloat16 each, which keeps 2^-16 of each number; where inputs are
bfloat16 they are taken apart here, and operands as they lie, else by the compiler. Next to that exp(c[t]) exp(-c[s])
adds an error of 1e-5 of an entry, in the last of 56 bands of 7e-4, where sums of gates have no more digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles import near
from foci.tiles.gates import diagonal_of
from foci.tiles.state import halves, in_two, rounded


@triton.jit
def pairs_in_two(A, E, x, e, y, c, FAR: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """A and E with pairs of x and of e with y added, also those above the diagonal: float32, and c times log2 e.

    By bands (tiles/near.py), without FAR by the first alone.
    """
    for i in tl.range(near.bands(c) if FAR else 1, disable_licm=True):
        rise, lift = near.of_band(c, i, FAR)
        columns, columns_low = parted(y * lift, dtype, PRECISION)
        columns, columns_low = tl.trans(columns), tl.trans(columns_low)
        rows, rows_low = parted(x * rise, dtype, PRECISION)
        A = of_two(rows, rows_low, columns, columns_low, A, PRECISION)
        rows, rows_low = parted(e * rise, dtype, PRECISION)
        E = of_two(rows, rows_low, columns, columns_low, E, PRECISION)
    return A, E


@triton.jit
def band_backward(  # type: ignore[no-untyped-def]
    to_x, to_e, to_y, pairs, x, e, y, rise, lift, dtype: tl.constexpr, PRECISION: tl.constexpr
):
    """(dx, de, dy) of one band's pairs and what is `to` be added up with them, and what they give the gate of a token.

    `pairs`: A and E, gradients below the diagonal, each `parted`.
    """
    A, A_low, E, E_low = pairs
    up_x, up_e, down = x * rise, e * rise, y * lift
    if dtype != tl.bfloat16:
        up_x, up_e, down = rounded(up_x, PRECISION), rounded(up_e, PRECISION), rounded(down, PRECISION)
    high, low = parted(down, dtype, PRECISION)
    to_x = of_two(A, A_low, high, low, to_x, PRECISION)
    to_e = of_two(E, E_low, high, low, to_e, PRECISION)
    high, low = parted(up_x, dtype, PRECISION)
    to_y = of_two(tl.trans(A), tl.trans(A_low), high, low, to_y, PRECISION)
    high, low = parted(up_e, dtype, PRECISION)
    to_y = of_two(tl.trans(E), tl.trans(E_low), high, low, to_y, PRECISION)
    return rise * to_x, rise * to_e, lift * to_y, up_x * to_x + up_e * to_e - down * to_y


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
