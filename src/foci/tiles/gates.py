"""Decays within a chunk of tokens, by halving: nothing cancels, nothing is divided, no exponent is above 0.

A tile g [T] (a gate per token) or [T,C] (per channel) holds log decays <= 0, float32, -inf allowed, 0 outside the
sequence; T = 64 tokens, or another power of two. A pair t > s has the weight exp(g[s+1] + .. + g[t]); without OWN, as
RWKV's bonus wants it, t's own gate is left out. t and s lie in the two halves of just one block of 2M tokens, M = 1,
2, 4 .. (the level), t right and s left: there the exponent is rise[t] + fall[s], two sums that begin at the middle.

The levels are a loop of the kernel, not unrolled: a tenth of the code, and registers of one level only.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_gates(ptr, row0, rows, stride, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    """g [BLOCK_T], one gate per token (stride 0: the same for all), 0 outside of rows 0.. `rows`."""
    r = row0 + tl.arange(0, BLOCK_T)
    return tl.load(ptr + r.to(tl.int64) * stride, mask=(r >= 0) & (r < rows), other=0.0).to(tl.float32)


@triton.jit
def ends(g, OWN: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """(rise, fall) of g's shape, as factors: from the chunk's start through t; from behind s to the chunk's end."""
    rise, fall = tl.cumsum(g if OWN else shifted(g, -1), 0), tl.cumsum(shifted(g, 1), 0, reverse=True)
    return tl.exp(rise), tl.exp(fall)


@triton.jit
def total(g):  # type: ignore[no-untyped-def]
    """exp of the sum over all tokens: a number, or [C]."""
    return tl.exp(tl.sum(g, 0))


@triton.jit
def by_ends(by_rise, by_fall, by_total, OWN: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """Gradient of g through `ends` and `total`, each given as gradient times value: [T, ..] twice, and [..]."""
    through_rise = tl.cumsum(by_rise if OWN else shifted(by_rise, 1), 0, reverse=True)
    through_fall = tl.cumsum(shifted(by_fall, -1), 0)
    return through_rise + through_fall + (by_total if len(by_rise.shape) == 1 else by_total[None, :])


@triton.jit
def weights(g, OWN: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """W [T,T] of gates [T] per token: the pairs' weights below the diagonal, 1 on it (0 without OWN), 0 above.

    Column s sums what stands behind s: by masks, for what one column leaves out cannot be taken from another's sum.
    """
    t, s = tl.arange(0, g.shape[0])[:, None], tl.arange(0, g.shape[0])[None, :]
    if OWN:
        return tl.where(t >= s, tl.exp(tl.cumsum(tl.where(t > s, g[:, None], 0.0), 0)), 0.0)
    return tl.where(t > s, tl.exp(tl.cumsum(tl.where(t > s + 1, shifted(g, -1)[:, None], 0.0), 0)), 0.0)


@triton.jit
def by_pairs(P, OWN: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """Gradient of g [T] of P = dA A [T,T], 0 above the diagonal: in full, each entry the sum of its own pairs alone."""
    r, s = tl.arange(0, P.shape[0])[:, None], tl.arange(0, P.shape[1])[None, :]
    from_row = tl.cumsum(P if OWN else shifted(P, 1), 0, reverse=True)
    return tl.sum(tl.where(s < r, from_row, 0.0), 1)


@triton.jit
def pairs(A, x, y, g, OWN: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """A [T,T] + sum over channels of x[t] y[s] exp(g[s+1] + .. + g[t]), x, y and g [T,C], below the diagonal.

    With OWN on it too, x[t] . y[t]. Products of operands in x's dtype, of float32 by PRECISION; sums in float32.
    """
    rise, fall = start(g, OWN)
    for i in tl.range(levels(g.shape[0]), disable_licm=True):
        w = level(rise, fall, i)
        A += of_level(tl.dot(scaled(x, w), tl.trans(scaled(y, w)), input_precision=PRECISION), i)
        rise, fall = climb(g, rise, fall, i, OWN)
    return A + diagonal(x, y) if OWN else A


@triton.jit
def pairs_of_two(A, E, x, e, y, g, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """`pairs` of two rows operands at once: x into A with the diagonal, e into E below it."""
    rise, fall = start(g, True)
    for i in tl.range(levels(g.shape[0]), disable_licm=True):
        w = level(rise, fall, i)
        columns = tl.trans(scaled(y, w))
        A += of_level(tl.dot(scaled(x, w), columns, input_precision=PRECISION), i)
        E += of_level(tl.dot(scaled(e, w), columns, input_precision=PRECISION), i)
        rise, fall = climb(g, rise, fall, i, True)
    return A + diagonal(x, y), E


@triton.jit
def pairs_backward_onto(dx, dy, dg, dA, x, y, g, OWN: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """dx, dy and dg [T,C] in float32 with what dA [T,T] gives through `pairs` added; where A is 0 dA may hold anything.

    Added to what is there, since sums that wait for it in tiles of their own would cost registers.
    """
    on = tl.sum(tl.where(diagonal_of(dA), dA, 0.0), 1)[:, None] if OWN else 0.0
    rise, fall = start(g, OWN)
    dx, dy = dx + on * y, dy + on * x
    for i in tl.range(levels(g.shape[0]), disable_licm=True):
        w, block = level(rise, fall, i), of_level(dA, i).to(x.dtype)
        to_x = w * tl.dot(block, scaled(y, w), input_precision=PRECISION)
        to_y = w * tl.dot(tl.trans(block), scaled(x, w), input_precision=PRECISION)
        dx, dy, by_level = dx + to_x, dy + to_y, (x * to_x + y * to_y).to(x.dtype)
        dg = summed(gates_of_level(dA, i, OWN), by_level, dg, PRECISION)
        rise, fall = climb(g, rise, fall, i, OWN)
    return dx, dy, dg


@triton.constexpr_function
def levels(T):  # type: ignore[no-untyped-def]
    """How many there are among T tokens."""
    return T.bit_length() - 1


@triton.jit
def start(g, OWN: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rise, fall) of the lowest level, as exponents: its halves are single tokens."""
    return (g if OWN else tl.zeros_like(g)), tl.zeros_like(g)


@triton.jit
def climb(g, rise, fall, i, OWN: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rise, fall) of the level above i: they reach over the other half of their block as well."""
    half, t = rise + fall if OWN else rise + fall + g, tl.arange(0, g.shape[0])[:, None]
    other = tl.gather(half, tl.broadcast_to(t ^ (1 << i), half.shape), 0)
    is_right = (t >> i & 1) == 1
    return rise + tl.where(is_right, other, 0.0), fall + tl.where(is_right, 0.0, other)


@triton.jit
def level(rise, fall, i):  # type: ignore[no-untyped-def]
    """The factors [T,C] of level i: from the block's middle to t in right halves, from s to the middle in left ones."""
    t = tl.arange(0, rise.shape[0])[:, None]
    return tl.exp(tl.where((t >> i & 1) == 1, rise, fall))


@triton.jit
def of_level(A, i):  # type: ignore[no-untyped-def]
    """A [T,T] where t is in the right half and s in the left of one block of level i, else 0."""
    t, s = tl.arange(0, A.shape[0]), tl.arange(0, A.shape[1])
    block_t, block_s = tl.where((t >> i & 1) == 1, t >> i, -1), tl.where((s >> i & 1) == 1, -2, (s >> i) + 1)
    return tl.where(block_t[:, None] == block_s[None, :], A, 0.0)


@triton.jit
def gates_of_level(like, i, OWN: tl.constexpr):  # type: ignore[no-untyped-def]
    """L [T,T]: L[r,t] is 1 where gate r weighs the pairs that token t has on level i, else 0.

    It weighs those of rows t in its right half that are not before it, and those of columns in its left that are.
    """
    r, t = tl.arange(0, like.shape[0])[:, None], tl.arange(0, like.shape[1])[None, :]
    later = t >= r if OWN else t > r
    wanted = tl.where((r >> i & 1) == 1, later, t < r)
    return tl.where(wanted & (r >> i == t >> i), 1.0, 0.0)


@triton.jit
def summed(L, x, onto, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """onto + L x, L of zeros and ones: of float32 operands only x has a part that TF32 leaves out."""
    if (PRECISION == "tf32x3" or PRECISION == "bf16x3") and x.dtype == tl.float32:
        large = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        onto = tl.dot(L, large, onto, input_precision="tf32")
        return tl.dot(L, x - large, onto, input_precision="tf32")
    else:
        return tl.dot(L.to(x.dtype), x, onto, input_precision=PRECISION)


@triton.jit
def scaled(x, w):  # type: ignore[no-untyped-def]
    """x w in x's dtype."""
    return (x * w).to(x.dtype)


@triton.jit
def diagonal_of(A):  # type: ignore[no-untyped-def]
    """Where the diagonal of A [T,T] is."""
    return tl.arange(0, A.shape[0])[:, None] == tl.arange(0, A.shape[1])[None, :]


@triton.jit
def diagonal(x, y):  # type: ignore[no-untyped-def]
    """[T,T] with x[t] . y[t] on the diagonal, else 0."""
    products = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)[:, None]
    t = tl.arange(0, x.shape[0])
    return tl.where(t[:, None] == t[None, :], products, 0.0)


@triton.jit
def shifted(x, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Token t of x [T, ..] is what t + BY was, and 0 where there was none."""
    t = tl.arange(0, x.shape[0]) + BY
    t = tl.broadcast_to(t if len(x.shape) == 1 else t[:, None], x.shape)
    inside = (t >= 0) & (t < x.shape[0])
    return tl.where(inside, tl.gather(x, tl.where(inside, t, 0), 0), 0.0)


@triton.jit
def factors_at(rise_ptr, write_ptr, total_ptr, t0, chunk, stride, H, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where (rise, write [CHUNK], total) of a chunk of a head lie: H apart, write `stride`; any address without."""
    at = (t0 + tl.arange(0, CHUNK)).to(tl.int64)
    write = write_ptr + at * stride
    rise, gone = write, write_ptr
    if rise_ptr is not None:
        rise = rise_ptr + at * H
    if total_ptr is not None:
        gone = total_ptr + tl.cast(chunk, tl.int64) * H
    return rise, write, gone


@triton.jit
def factors(rise_ptr, total_ptr, rise_at, write_at, total_at, t0, stop, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rise, write [CHUNK], total) from there; 0 from `stop` on; write, and 1, where there is no rise, no total."""
    inside = t0 + tl.arange(0, CHUNK) < stop
    write = tl.load(write_at, mask=inside, other=0.0).to(tl.float32)
    rise, gone = write, 1.0
    if rise_ptr is not None:
        rise = tl.load(rise_at, mask=inside, other=0.0)
    if total_ptr is not None:
        gone = tl.load(total_at, mask=t0 < stop, other=0.0)
    return rise, write, gone
