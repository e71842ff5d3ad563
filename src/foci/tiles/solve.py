"""The inverse of I + E, E strictly lower triangular: substitution block by block, never a power series.

The inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']], A' and D' the inverses of the diagonal blocks. So with X
the inverses of all blocks of M rows side by side, and B what lies below them within blocks of 2M, the inverses of those
are X - X B X: nothing that is multiplied is larger than the answer. (A power series of E sums terms that grow like
2^64, and cancel, where keys are alike.) All blocks of a size are one product of whole tiles: X has blocks on its
diagonal alone, so of X E X those parts are taken that belong to the size, which is cheaper than to take a tile apart.
The backward needs no more: where X (I + E) = I and d = X b, d_b = X^T d_d and d_E = -d_b d^T below the diagonal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.state import halves, in_two, rounded


@triton.jit
def inverse(E, PRECISION: tl.constexpr, HALVES: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """(I + E)^-1 [64,64] in float32; only what is below the diagonal of E is read.

    HALVES: by products of bfloat16 in two, with 16 digits where TF32 has 11: where keys are alike, these are what the
    results of half precision miss.
    """
    E = -E
    if HALVES:
        X = beside(inverse_of_16(blocks_of_16(E)))
        high, low = in_two(E)
        for i in tl.static_range(4, 6):
            above, below = in_two(X)
            up, under = in_two(halves(high, low, above, below, tl.zeros_like(X)))
            X = tl.where(meeting(i), halves(above, below, up, under, tl.zeros_like(X)), X)
    else:
        t, s = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
        # The highest bit in which t and s differ says among which blocks this pair meets; below the diagonal only.
        meets = tl.where(t > s, ((t ^ s).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, -1)
        X = tl.where(t == s, 1.0, tl.where(meets == 0, E, 0.0))
        E = across(rounded(E, PRECISION))
        for i in tl.range(1, 6):
            Y = rounded(X, PRECISION)
            C = rounded(tl.dot(E, down(Y), input_precision=PRECISION), PRECISION)
            X = tl.where(meets == i, tl.dot(across(Y), down(C), input_precision=PRECISION), X)
    return X


@triton.jit
def meeting(i, SIZE: tl.constexpr = 64):  # type: ignore[no-untyped-def]
    """Which pairs of rows are in one block of 2^(i+1), the first in its lower half, the second in its upper."""
    t, s = tl.arange(0, SIZE) >> i, tl.arange(0, SIZE) >> i
    return tl.where(t % 2 == 1, t, -1)[:, None] == (s + 1)[None, :]


@triton.jit
def inverse_of_16(E):  # type: ignore[no-untyped-def]
    """(I - E)^-1 of four blocks [4,16,16], each of which one warp makes alone."""
    t = tl.arange(0, 16)
    X = tl.where((t[:, None] == t[None, :])[None, :, :], 1.0, tl.where(meeting(0, 16)[None, :, :], E, 0.0))
    high, low = in_two(E)
    for i in tl.static_range(1, 4):
        above, below = in_two(X)
        up, under = in_two(halves(high, low, above, below, tl.zeros_like(X)))
        X = tl.where(meeting(i, 16)[None, :, :], halves(above, below, up, under, tl.zeros_like(X)), X)
    return X


@triton.jit
def _same():  # type: ignore[no-untyped-def]
    t = tl.arange(0, 4)
    return t[:, None, None, None] == t[None, None, :, None]


@triton.jit
def blocks_of_16(x):  # type: ignore[no-untyped-def]
    """The four blocks [4,16,16] on the diagonal of [64,64]."""
    return tl.sum(tl.where(_same(), tl.reshape(x, [4, 16, 4, 16]), 0.0), 2)


@triton.jit
def beside(x):  # type: ignore[no-untyped-def]
    """The way back, zeros beside them."""
    return tl.reshape(tl.where(_same(), x[:, :, None, :], 0.0), [64, 64])


@triton.jit
def across(x):  # type: ignore[no-untyped-def]
    """The columns of x [64,64] in the order in which a product's left operand has them where x was one's result.

    Within eight the even ones come first: threads that hold two neighbours of a result hold column c and c + 4 of an
    operand, and so nothing moves between them. With the rows of the right operand by `down` the product is the same.
    """
    return tl.reshape(tl.permute(tl.reshape(x, [64, 8, 4, 2]), (0, 1, 3, 2)), [64, 64])


@triton.jit
def down(x):  # type: ignore[no-untyped-def]
    """The rows of x [64,64] in the order of the columns of `across`."""
    return tl.reshape(tl.permute(tl.reshape(x, [8, 4, 2, 64]), (0, 2, 1, 3)), [64, 64])
