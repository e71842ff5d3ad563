"""The inverse of I + E, E strictly lower triangular: substitution block by block, never a power series.

The inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']], A' and D' the inverses of the diagonal blocks. So with X
the inverses of all blocks of M rows side by side, and B what lies below them within blocks of 2M, the inverses of those
are X - X B X: nothing that is multiplied is larger than the answer. (A power series of E sums terms that grow like
2^64, and cancel, where keys are alike.) All blocks of a size are one product of whole tiles, half of them zeros, which
is cheaper than to take a tile apart. The backward needs no more: where X (I + E) = I and d = X b, d_b = X^T d_d and
d_E = -d_b d^T below the diagonal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.state import rounded


@triton.jit
def inverse(E, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + E)^-1 [64,64] in float32; only what is below the diagonal of E is read."""
    t, s = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    apart = tl.where(t > s, t ^ s, 0)  # its highest bit says among which blocks a pair of rows meets
    X = tl.where(t == s, 1.0, tl.where(apart == 1, -E, 0.0))
    E = rounded(E, PRECISION)
    for i in tl.range(1, 6, disable_licm=True):
        B, Y = tl.where((apart >> i) == 1, E, 0.0), rounded(X, PRECISION)
        C = rounded(tl.dot(B, Y, input_precision=PRECISION), PRECISION)
        X -= tl.dot(Y, C, input_precision=PRECISION)
    return X
