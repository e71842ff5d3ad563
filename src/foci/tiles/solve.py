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
    results of half precision miss. What is above the diagonal must be finite then.
    """
    E = -E
    if HALVES:
        X = inverse_in_two(blocks_in_two(E))
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
def blocks_in_two(N, exact=None, TWO: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """What `inverse_in_two` takes of N [64,64], finite above its diagonal: half of it, so that others have room.

    The blocks of 16 on the diagonal, those left of the second and the fourth, and the left half.
    """
    t = tl.arange(0, 64)[:, None]
    i = t // 16
    left, right = parted(N)
    first, second = parted(left)
    third, fourth = parted(right)
    own = tl.where(i < 2, tl.where(i == 0, first, second), tl.where(i == 2, third, fourth))
    beside, beside_low = parts(tl.where(i < 2, first, third), t, exact, TWO)
    left, left_low = parts(left, t, exact, TWO)
    return by_16(own), by_16(beside), by_16(beside_low), in_a_row(left), in_a_row(left_low)


@triton.jit
def inverse_in_two(blocks, exact=None, TWO: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """(I - N)^-1 by products of bfloat16 in two, of N's `blocks_in_two`.

    The inverses of all blocks of a size M lie below each other in X [64,M], as left operands, and `in_a_row` as right
    ones: of each row's product those columns are taken that its own pair of blocks has made. So products are narrow,
    and a left operand is the result before it, in registers.

    `exact`: from which row on; those before, whose N is small, have the bits that all have without TWO, by products of
    one bfloat16.
    """
    own, b, b_low, left, left_low = blocks
    t, zero = tl.arange(0, 64)[:, None], tl.zeros([64, 64], tl.float32)
    i = t // 16
    X = tl.reshape(inverse_of_16(own, exact, TWO), [64, 16])
    x, x_low = parts(X, t, exact, TWO)
    m = product(by_16(x), by_16(x_low), b, b_low, tl.zeros([4, 16, 16], tl.float32), TWO)
    m, m_low = parts(tl.reshape(m, [64, 16]), t, exact, TWO)
    by_first, by_third = parted(product(m, m_low, in_a_row(x), in_a_row(x_low), zero, TWO))
    M = tl.where(i < 2, parted(by_first)[0], parted(by_third)[0])
    X = joined(tl.where(i % 2 == 1, M, X), tl.where(i % 2 == 1, X, 0.0))
    x, x_low = parts(X, t, exact, TWO)
    _, M = parted(product(x, x_low, left, left_low, zero, TWO))
    m, m_low = parts(M, t, exact, TWO)
    M, _ = parted(product(m, m_low, in_a_row(x), in_a_row(x_low), zero, TWO))
    return joined(tl.where(i < 2, X, M), tl.where(i < 2, 0.0, X))


@triton.jit
def inverse_of_16(N, exact, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I - N)^-1 of four blocks below each other, each of which one warp makes alone.

    Next to X its transpose Y: as a right operand a thread holds of a matrix what it holds of the transpose as a result,
    so that with both no product waits for numbers of another thread.
    """
    t, zero = tl.arange(0, 16), tl.zeros([4, 16, 16], tl.float32)
    block, rows = tl.arange(0, 4)[:, None, None] * 16, t[None, :, None]
    n, n_low = parts(N, rows + block, exact, TWO)
    n, n_low = turned(n), turned(n_low)
    X = tl.where((t[:, None] == t[None, :])[None, :, :], 1.0, tl.where(meeting(0)[None, :, :], N, 0.0))
    Y = turned(X)
    for i in tl.static_range(1, 4):
        x, x_low = parts(X, rows + block, exact, TWO)
        y, y_low = parts(Y, turned(rows) + block, exact, TWO)
        c, c_low = parts(
            product(y, y_low, n, n_low, zero, TWO), turned(rows) + block, exact, TWO
        )  # the transpose of N X
        X = tl.where(meeting(i)[None, :, :], product(x, x_low, turned(c), turned(c_low), zero, TWO), X)
        if i < 3:
            found = product(c, c_low, turned(x), turned(x_low), zero, TWO)
            Y = tl.where(tl.trans(meeting(i))[None, :, :], found, Y)
    return X


@triton.jit
def parts(x, t, exact, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """x as bfloat16 `in_two`; with `exact` rounded, and what that left of tokens t from there on; or rounded alone."""
    if TWO and exact is None:
        high, low = in_two(x)
    else:
        high = x.to(tl.bfloat16)
        low = high
        if TWO:
            low = tl.where(t >= exact, x - high.to(tl.float32), 0.0).to(tl.bfloat16)
    return high, low


@triton.jit
def product(high, low, above, below, z, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """`halves` of `parts`, or of the first ones alone."""
    return halves(high, low, above, below, z) if TWO else tl.dot(high, above, z)


@triton.jit
def meeting(i):  # type: ignore[no-untyped-def]
    """Which pairs of 16 rows are in one block of 2^(i+1), the first in its lower half, the second in its upper."""
    t, s = tl.arange(0, 16) >> i, tl.arange(0, 16) >> i
    return tl.where(t % 2 == 1, t, -1)[:, None] == (s + 1)[None, :]


@triton.jit
def by_16(x):  # type: ignore[no-untyped-def]
    """The blocks of x [64,16] as matrices [4,16,16]."""
    return tl.reshape(x, [4, 16, 16])


@triton.jit
def turned(x):  # type: ignore[no-untyped-def]
    """Each of the matrices x [4,16,16] transposed."""
    return tl.permute(x, (0, 2, 1))


@triton.jit
def parted(x):  # type: ignore[no-untyped-def]
    """The left and the right half of the columns of x [64,2C]; in a product's result each thread has some of both."""
    return tl.split(tl.permute(tl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def joined(left, right):  # type: ignore[no-untyped-def]
    """The way back."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [64, 2 * left.shape[1]])


@triton.jit
def in_a_row(x):  # type: ignore[no-untyped-def]
    """The blocks of x [64,C], C rows each, beside each other: [C,64]."""
    C: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [64 // C, C, C]), (1, 0, 2)), [C, 64])


@triton.jit
def across(x):  # type: ignore[no-untyped-def]
    """The columns of x [R,C] in the order in which a product's left operand has them where x was one's result.

    Within eight the even ones come first: threads that hold two neighbours of a result hold column c and c + 4 of an
    operand, and so nothing moves between them. With the rows of the right operand by `down` the product is the same.
    """
    return tl.reshape(tl.permute(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), (0, 1, 3, 2)), x.shape)


@triton.jit
def down(x):  # type: ignore[no-untyped-def]
    """The rows of x [64,64] in the order of the columns of `across`."""
    return tl.reshape(tl.permute(tl.reshape(x, [8, 4, 2, 64]), (0, 2, 1, 3)), [64, 64])
