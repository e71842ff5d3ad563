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

from foci.tiles.state import rounded


@triton.jit
def inverse(E, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + E)^-1 [64,64] in float32; only what is below the diagonal of E is read."""
    t, s = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    # The highest bit in which t and s differ says among which blocks this pair meets; below the diagonal only.
    meets = tl.where(t > s, ((t ^ s).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, -1)
    E = -E
    X = tl.where(t == s, 1.0, tl.where(meets == 0, E, 0.0))
    E = across(rounded(E, PRECISION))
    for i in tl.range(1, 6):
        Y = rounded(X, PRECISION)
        C = rounded(tl.dot(E, down(Y), input_precision=PRECISION), PRECISION)
        X = tl.where(meets == i, tl.dot(across(Y), down(C), input_precision=PRECISION), X)
    return X


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
