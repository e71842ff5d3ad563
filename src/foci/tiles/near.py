"""Decays within a chunk of tokens in half precision: cheaper than tiles/gates.py, and right to what bfloat16 tells.

Let c[t] sum the gates from the chunk's start through t. A pair t >= s has the weight exp(c[t] - c[s]), which gates per
channel need as a product of factors: exp(c[t]) exp(-c[s]). That is one product of matrices instead of six, as long as
c[t] is not below FAR; the tokens behind, of chunks that forget so much, are left to the halving of tiles/gates.py.
The delta rule has bands of c instead, and a product for each (`of_band`), as wide as float32's numbers reach where
operands, and gradients, are of sizes from 2^-38 to 2^40.
Which token is near, or in which band, depends on no later one, so what comes later changes no bit.

A gate counts as LEAST at least: that is 0 as a factor, and sums of it can still be taken from each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles import gates
from foci.tiles.gates import (
    diagonal,
    gates_of_level,
    levels,
    of_level,
    scaled,
    summed,
)
from foci.tiles.memory import load_row, load_tile
from foci.tiles.state import chunk_at

FAR: tl.constexpr = tl.constexpr(-60.0)
LIFT: tl.constexpr = tl.constexpr(61.0)  # of columns: sums are rounded, so one that a near row reads may lie below FAR
CLOSE: tl.constexpr = tl.constexpr(1e-25)  # a chunk whose totals are larger has no far token, however sums are rounded
LEAST: tl.constexpr = tl.constexpr(-104.0)
UNREAD: tl.constexpr = tl.constexpr(1e38)  # what no sum of gates is, of a chunk where a query is no number
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)  # exp2 is one instruction, exp five
# Sums times log2 e are in the first band from LOW on, -121 without the log2 e. Rows' factors are 2^UP times as large
# in it, and columns' as small: a token that forgets all is in it, with others around. CLOSE is of totals 2^UP times as
# large where rows are, REACH the same of sums.
UP: tl.constexpr = tl.constexpr(88.0)
DOWN: tl.constexpr = tl.constexpr(2.0**-88)
LOW: tl.constexpr = tl.constexpr(FAR.value * LOG2E.value - UP.value)
REACH: tl.constexpr = tl.constexpr(-119.0)


@triton.jit
def bounded(g):  # type: ignore[no-untyped-def]
    """g, LEAST where it is less; NaN stays."""
    return tl.where(g < LEAST, LEAST, g)


@triton.jit
def ends(g, OWN: tl.constexpr, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rise, fall) as those of tiles/gates.py, which they are unless NEAR."""
    rise, fall, _ = ends_and_total(g, OWN, NEAR)
    return rise, fall


@triton.jit
def ends_and_total(g, OWN: tl.constexpr, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rise, fall, total): by one sum of all tokens if NEAR, for loops that wait for it."""
    if NEAR:
        g = bounded(g)
        c, whole = tl.cumsum(g, 0), tl.sum(g, 0)
        rise, gone = tl.exp(c if OWN else c - g), tl.exp(whole)
        fall = tl.exp((whole if len(g.shape) == 1 else whole[None, :]) - c)
    else:
        rise, fall = gates.ends(g, OWN)
        gone = gates.total(g)
    return rise, fall, gone


@triton.jit
def store_powers(  # type: ignore[no-untyped-def]
    ptr, g_ptr, g_strides, offsets_ptr, index, T, N, H, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Sums [slots,H,CHUNK] of gates per token from a chunk's start on, as powers of 2, of BLOCK_H heads of a slot."""
    h = index % tl.cdiv(H, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, index // tl.cdiv(H, BLOCK_H), N, T, CHUNK)
    if n >= 0:
        t = tl.arange(0, CHUNK)
        places = (t0 + t).to(tl.int64)[:, None] * g_strides[1] + h[None, :] * g_strides[2]
        inside = (t0 + t < stop)[:, None] & (h < H)[None, :]
        g = tl.load(g_ptr + tl.cast(b, tl.int64) * g_strides[0] + places, mask=inside, other=0.0)
        c = tl.cumsum(bounded(g.to(tl.float32)) * LOG2E, 0)
        tl.store(ptr + (tl.cast(slot, tl.int64) * H + h[None, :]) * CHUNK + t[:, None], c, mask=(h < H)[None, :])


@triton.jit
def weights(g, OWN: tl.constexpr, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """W [T,T] of gates [T] per token, as those of tiles/gates.py, which they are unless NEAR."""
    if NEAR:
        t, s = tl.arange(0, g.shape[0])[:, None], tl.arange(0, g.shape[0])[None, :]
        g = bounded(g)
        c = tl.cumsum(g, 0)
        rows = c if OWN else c - g
        W = tl.where(t >= s if OWN else t > s, tl.exp(rows[:, None] - c[None, :]), 0.0)
    else:
        W = gates.weights(g, OWN)
    return W


@triton.jit
def weighted(x, g, BELOW: tl.constexpr, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [T,T] times the OWN `weights` of g, 0 above the diagonal, and BELOW on it, whatever x is there."""
    t, s = tl.arange(0, g.shape[0])[:, None], tl.arange(0, g.shape[0])[None, :]
    seen = t > s if BELOW else t >= s
    if NEAR:
        c = tl.cumsum(bounded(g) * LOG2E, 0)
        x = tl.where(seen, x * tl.exp2(c[:, None] - c[None, :]), 0.0)
    else:
        x = tl.where(seen, x, 0.0) * gates.weights(g, True)
    return x


@triton.jit
def by_chunk(P, by_rise, by_fall, by_total, OWN: tl.constexpr, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of g [T]: `by_pairs` and `by_ends` of tiles/gates.py, from sums of rows and columns if NEAR.

    Below the diagonal: the pairs of all t >= r, less those with s >= r too, which are the same numbers in both sums.
    """
    if NEAR and OWN:
        t, s = tl.arange(0, P.shape[0])[:, None], tl.arange(0, P.shape[1])[None, :]
        below = tl.where(t > s, P, 0.0)
        by_rise += tl.sum(below, 1) - tl.sum(below, 0)
        dg = gates.by_ends(by_rise, by_fall, by_total, OWN)
    else:
        dg = gates.by_pairs(P, OWN) + gates.by_ends(by_rise, by_fall, by_total, OWN)
    return dg


@triton.jit
def exponents(g, OWN: tl.constexpr):  # type: ignore[no-untyped-def]
    """(risen, c [T,C], near [T]) of gates g [T,C]: what rows and columns have, exp(risen) is the rise of `ends`."""
    g = bounded(g)
    c = tl.cumsum(g, 0)
    return (c if OWN else c - g), c, tl.min(c, 1) >= FAR


@triton.jit
def in_float16(g):  # type: ignore[no-untyped-def]
    """Gates times log2 e as the sum of two float16: what that leaves of one is 6e-8 at most, or 2^-21 of it."""
    known = bounded(g) * LOG2E
    high = (known.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high.to(tl.float16), (known - high).to(tl.float16)


@triton.jit
def sums_in_two(g, FAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """(c [T,C] as `exponents` gives it, its last row in all rows), times log2 e, by products instead of scans.

    NaN reaches rows before it too, but not with FAR.
    """
    t, s = tl.arange(0, g.shape[0])[:, None], tl.arange(0, g.shape[0])[None, :]
    before, every = tl.where(s <= t, 1.0, 0.0).to(tl.float16), tl.full([g.shape[0], g.shape[0]], 1.0, tl.float16)
    known = g
    if FAR:
        known = tl.where(g == g, g, 0.0)
    high, low = in_float16(known)
    c, last = tl.dot(before, high, tl.dot(before, low)), tl.dot(every, high, tl.dot(every, low))
    if FAR:
        c += tl.cumsum(tl.where(g == g, 0.0, g), 0)
    return c, last


@triton.jit
def sums_and_total(g, up):  # type: ignore[no-untyped-def]
    """(c [T,C] of `sums_in_two`, 2^up times exp of all gates' sum in every row of [T,C], the same in [T/2,C]).

    By one product.
    """
    T: tl.constexpr = g.shape[0]
    high, low = in_float16(g)
    t, s = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    before = above_each_other(tl.where(s <= t, 1.0, 0.0).to(tl.float16), tl.full([T, T], 1.0, tl.float16))
    c, last = apart(tl.dot(before, high, tl.dot(before, low)))
    # Of rows eight apart a thread has both: one is enough.
    once, _ = tl.split(tl.permute(tl.reshape(last, [T // 16, 2, 8, g.shape[1]]), (0, 2, 3, 1)))
    once = tl.exp2(once + up)
    gone = tl.reshape(tl.permute(tl.join(once, once), (0, 3, 1, 2)), [T, g.shape[1]])
    return c, gone, tl.reshape(once, [T // 2, g.shape[1]])


@triton.jit
def nearest(x, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """`rounded` of tiles/state.py, of the largest numbers too: half of TF32's last digit is added to what is cut off.

    The NaN of a GPU's arithmetic is the largest integer: without the minimum it would become 0.
    """
    if PRECISION == "tf32":
        x = (tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFEFFF) + 4096).to(tl.float32, bitcast=True)
    return x


@triton.jit
def above_each_other(x, y):  # type: ignore[no-untyped-def]
    """[2T,C] of two [T,C], y below x."""
    return tl.reshape(tl.permute(tl.join(x, y), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@triton.jit
def apart(x):  # type: ignore[no-untyped-def]
    """The way back."""
    return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))


@triton.jit
def forgets(ptr, least, K, ALL_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 if a chunk may have far rows, or is no chunk of numbers, as its totals or its gates' sums [K] say, else 0."""
    c = tl.arange(0, ALL_K)
    return tl.max(tl.where(tl.load(ptr + c, mask=c < K, other=1.0) > least, 0, 1), 0)


@triton.jit
def lift(c):  # type: ignore[no-untyped-def]
    """exp(-c), what columns have; finite also of those that no near row reads."""
    return tl.exp(tl.minimum(-c, LIFT))


@triton.jit
def far_levels(near):  # type: ignore[no-untyped-def]
    """How many levels of halving are left: none where all are near."""
    return tl.where(tl.min(near.to(tl.int32), 0) == 1, 0, levels(near.shape[0]))


@triton.jit
def bands(c):  # type: ignore[no-untyped-def]
    """How many bands sums times log2 e reach down to; one too many at a border, where a GPU's product may be off."""
    return 1 + tl.maximum(tl.min(c) * (1.0 / LOW) + 1e-3, 0.0).to(tl.int32)


@triton.jit
def of_band(c, i, FAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rise, lift) [T,C] of band i of sums times log2 e, without FAR of the first, in which all are then.

    rise[t] lift[s], s <= t, is exp(c[t] - c[s]) where c[t] is in the band, and rise 0 where it is not: all bands'
    products together are those of all pairs.
    """
    up = c + UP
    if FAR:
        up -= LOW * i
    rise, lift = tl.exp2(up), tl.exp2(tl.minimum(-up, LIFT * LOG2E))
    if FAR:
        rise = tl.where((c < LOW * (i + 1)) | (c >= tl.where(i == 0, 1e38, LOW * i)), 0.0, rise)
    return rise, lift


@triton.jit
def seen(near, OWN: tl.constexpr):  # type: ignore[no-untyped-def]
    """[T,T]: the pairs of near rows, with the diagonal if OWN."""
    t, s = tl.arange(0, near.shape[0])[:, None], tl.arange(0, near.shape[0])[None, :]
    return (t >= s if OWN else t > s) & near[:, None]


@triton.jit
def far_level(risen, c, i):  # type: ignore[no-untyped-def]
    """The factors [T,C] of level i of tiles/gates.py: from the block's middle to t, from s to the middle."""
    t = tl.arange(0, c.shape[0])[:, None]
    is_right = (t >> i & 1) == 1
    before_middle = tl.where(is_right, t >> i << i, ((t >> i) + 1) << i) - 1
    middle = tl.gather(c, tl.broadcast_to(before_middle, c.shape), 0)
    return tl.exp(tl.where(is_right, risen - middle, middle - c))


@triton.jit
def far_pairs(A, x, y, risen, c, near, OWN: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """A [T,T] with the `pairs` of tiles/gates.py of far rows added, by halving; other rows as they are."""
    for i in tl.range(far_levels(near), disable_licm=True):
        w = far_level(risen, c, i)
        found = of_level(tl.dot(scaled(x, w), tl.trans(scaled(y, w)), input_precision=PRECISION), i)
        if OWN:
            found += tl.where(i == 0, diagonal(x, y), 0.0)
        A += tl.where(near[:, None], 0.0, found)
    return A


@triton.jit
def pairs_backward(by_rows, dy, dg, dA, x, y, risen, c, near, OWN: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(dx, dy, dg) of near pairs and the diagonal: dx with `by_rows` exp(risen), of the state before; dy and dg onto.

    Gate r takes the pairs of all rows t >= r less those of all columns s >= r, of the same rounded factors in both
    sums, so that pairs behind it cancel to the last digits; and `by_rows` of all t >= r.
    """
    t, s = tl.arange(0, dA.shape[0])[:, None], tl.arange(0, dA.shape[1])[None, :]
    up, down, block = scaled(x, tl.exp(risen)), scaled(y, lift(c)), tl.where(seen(near, False), dA, 0.0).to(x.dtype)
    to_x = tl.dot(block, down, by_rows, input_precision=PRECISION)
    to_y = tl.dot(tl.trans(block), up, input_precision=PRECISION)
    by_token = up * to_x
    dg += tl.cumsum(by_token - down * to_y, 0, reverse=True)
    on = tl.sum(tl.where(t == s, dA, 0.0), 1)[:, None] if OWN else 0.0
    return tl.exp(risen) * to_x + on * y, dy + lift(c) * to_y + on * x, dg if OWN else dg - by_token


@triton.jit
def far_backward(dA, x, y, risen, c, near, OWN: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(dx, dy, dg) of the pairs of far rows, as `pairs_backward_onto` of tiles/gates.py adds them; no diagonal."""
    dx, dy, dg = tl.zeros_like(c), tl.zeros_like(c), tl.zeros_like(c)
    far = tl.where(near[:, None], 0.0, dA).to(x.dtype)
    for i in tl.range(far_levels(near), disable_licm=True):
        w, block = far_level(risen, c, i), of_level(far, i).to(x.dtype)
        to_x = w * tl.dot(block, scaled(y, w), input_precision=PRECISION)
        to_y = w * tl.dot(tl.trans(block), scaled(x, w), input_precision=PRECISION)
        dx, dy, by_level = dx + to_x, dy + to_y, (x * to_x + y * to_y).to(x.dtype)
        dg = summed(gates_of_level(far, i, OWN), by_level, dg, PRECISION)
    return dx, dy, dg


@triton.jit
def load_sums(ptr, t0, stop, stride, k0, K, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """(c [CHUNK,BLOCK_K] from memory, its last row); tokens from `stop` on have no gates: their sums are the last."""
    end = tl.maximum(tl.minimum(stop, t0 + CHUNK) - 1, 0)  # a chunk may have no token
    last = load_row(ptr + tl.cast(end, tl.int64) * stride, k0, K, BLOCK_K)
    c = load_tile(ptr, t0, stop, stride, k0, K, 1, CHUNK, BLOCK_K)
    return tl.where((t0 + tl.arange(0, CHUNK) < stop)[:, None], c, last[None, :]), last
