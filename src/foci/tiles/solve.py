"""The inverse of I + E, E strictly lower triangular [64,64]: substitution block by block, never a power series.

The inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']], A' and D' the inverses of the diagonal blocks, themselves
blocks of the whole inverse: nothing that is multiplied is larger than the answer. (A power series of E sums terms that
grow like 2^64, and cancel, where keys are alike.) The backward needs no more: where X (I + E) = I and d = X b,
d_b = X^T d_d and d_E = -d_b d^T below the diagonal.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse(E, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + E)^-1 [64,64] in float32; only what is below the diagonal of E is read."""
    X = within_sixteen(sixteens(E), PRECISION)  # [4,16,16]
    X = merged(X, lower(E, 16), PRECISION)
    X = merged(X, lower(E, 32), PRECISION)
    return tl.reshape(X, [64, 64])


@triton.jit
def sixteens(E):  # type: ignore[no-untyped-def]
    """The diagonal blocks [4,16,16] of E [64,64]."""
    block = tl.arange(0, 4)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(E, [4, 16, 4, 16]), 0.0), 2)


@triton.jit
def within_sixteen(E, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each block [n,16,16], by merging blocks of 1, 2, 4 and 8 within it."""
    t, s = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    apart = tl.where(t > s, t ^ s, 0)  # its highest bit says in which merge a pair of rows meets
    X = tl.where(t == s, 1.0, tl.where(apart == 1, -E, 0.0))
    for i in tl.static_range(1, 4):
        B = tl.where((apart >= 1 << i) & (apart < 2 << i), E, 0.0)
        C = tl.dot(X, tl.dot(B, X, input_precision=PRECISION), input_precision=PRECISION)
        X = X - C
    return X


@triton.jit
def lower(E, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The blocks [n,M,M], lower left in each diagonal block of 2M rows, n = 64 / 2M, of E [64,64]."""
    n: tl.constexpr = 32 // M
    row, column = tl.arange(0, 2 * n)[:, None], tl.arange(0, 2 * n)[None, :]
    wanted = ((row == column + 1) & (row % 2 == 1))[:, None, :, None]
    blocks = tl.sum(tl.where(wanted, tl.reshape(E, [2 * n, M, 2 * n, M]), 0.0), 2)
    return tl.sum(tl.reshape(blocks, [n, 2, M, M]), 1)


@triton.jit
def merged(X, B, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """From the inverses X [2n,M,M] of blocks, and what is below them B [n,M,M], those [n,2M,2M] of twice the size."""
    n: tl.constexpr = B.shape[0]
    M: tl.constexpr = B.shape[1]
    half = tl.arange(0, 2)[None, :, None, None]
    pair = tl.reshape(X, [n, 2, M, M])
    A, D = tl.sum(tl.where(half == 0, pair, 0.0), 1), tl.sum(tl.where(half == 1, pair, 0.0), 1)
    C = tl.dot(D, tl.dot(B, A, input_precision=PRECISION), input_precision=PRECISION)
    row, column = half[:, :, :, :, None], tl.arange(0, 2)[None, None, None, :, None]
    above = tl.where(row == column, pair[:, :, :, None, :], 0.0)
    whole = tl.where((row == 1) & (column == 0), -C[:, None, :, None, :], above)
    return tl.reshape(whole, [n, 2 * M, 2 * M])
