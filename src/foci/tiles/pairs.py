"""Pairs of two operands of rows with one of columns, gates per channel: tiles/near.py for the delta rule's A and E.

Operands are float32, their products TF32 where inputs are of half precision: next to what halving gives, exp(c[t])
exp(-c[s]) adds an error of 1e-5 of an entry to one of 5e-4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.gates import diagonal, diagonal_of, gates_of_level, of_level, summed
from foci.tiles.near import far_level, far_levels, lift, seen
from foci.tiles.state import rounded


@triton.jit
def pairs_of_two(A, E, x, e, y, rise, c, near, FAR: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """`pairs_of_two` of tiles/gates.py, with c and near as `exponents` gives them, and rise = exp(c).

    Without FAR the pairs of near rows alone: those of far ones cost registers, even where no row is far.
    """
    columns = tl.trans(rounded(y * lift(c), PRECISION))
    A += tl.where(seen(near, True), tl.dot(rounded(x * rise, PRECISION), columns, input_precision=PRECISION), 0.0)
    E += tl.where(seen(near, False), tl.dot(rounded(e * rise, PRECISION), columns, input_precision=PRECISION), 0.0)
    if FAR:
        for i in tl.range(far_levels(near), disable_licm=True):
            w = far_level(c, c, i)
            columns = tl.trans(y * w)
            found = of_level(tl.dot(x * w, columns, input_precision=PRECISION), i)
            A += tl.where(near[:, None], 0.0, found + tl.where(i == 0, diagonal(x, y), 0.0))
            found = of_level(tl.dot(e * w, columns, input_precision=PRECISION), i)
            E += tl.where(near[:, None], 0.0, found)
    return A, E


@triton.jit
def near_backward(by_x, to_y, dA, x, down, c, near, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(dx, to_y, by_token) of near pairs below the diagonal, `down` = y exp(-c) in TF32's digits, as dA has them.

    dx is that of `by_x` exp(c) too, of the state before; dy = exp(-c) to_y, added to what is there. Gate r has the sum
    of by_token - down to_y over t >= r: what pairs behind r give is there with both signs, and cancels to the last
    digits, for products take all factors as they are.
    """
    up = rounded(x * tl.exp(c), PRECISION)
    to_x = by_x + tl.where(near[:, None], tl.dot(dA, down, input_precision=PRECISION), 0.0)
    to_y = tl.dot(tl.trans(dA), tl.where(near[:, None], up, 0.0), to_y, input_precision=PRECISION)
    return tl.exp(c) * to_x, to_y, up * to_x


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
