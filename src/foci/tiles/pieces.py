"""How a sequence whose gates forget is cut into pieces that are walked at once, and where each of them begins.

A piece begins with the state at its first chunk. What was some chunks before has a factor of all that happened to a
state since then: where that is less than float32 has with all digits, it is taken as 0, and the piece warms up from
there on, by states alone. Where that would be most of what is before it, it warms up from the sequence's start on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.memory import load_tile, loaded

FORGOTTEN: tl.constexpr = tl.constexpr(-126.0)  # of powers of 2: the least factor that float32 has with all digits
FAR: tl.constexpr = tl.constexpr(32)  # chunks that warm a piece up at most, where maps can tell it what is before it
WARM: tl.constexpr = tl.constexpr(8)  # chunks that take as long as those 15 that warm up a piece, by models' gates


@triton.jit
def share(piece, pieces, chunks, WARMS: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """(first chunk, end) of a piece. Where it WARMS up, but the first: that is longer by WARM, or a 7th of all."""
    more = tl.minimum(chunks // 7, WARM) if WARMS else 0
    first = tl.where(piece == 0, 0, more + (chunks - more) * piece // pieces)
    return first, more + (chunks - more) * (piece + 1) // pieces


@triton.jit
def thirds(piece, chunks):  # type: ignore[no-untyped-def]
    """(first chunk, end) of two pieces, if both begin with the sequence: what the second does not read costs it less.

    Whatever gates are, and with the bits of one walk.
    """
    second = tl.cdiv(2 * chunks, 3)
    return tl.where(piece == 0, 0, second), tl.where(piece == 0, second, chunks)


@triton.jit
def remembered(reach_ptr, step, count, MOST: tl.constexpr, BLOCK: tl.constexpr = 128):  # type: ignore[no-untyped-def]
    """(from which of `count` chunks on something is left, 0): NaN in place of 0 where one reaches further than MOST.

    What was before chunk i is left with 2 to the sum of what they reach, i and those behind it (`reach` of
    ops/delta/kernels_triton_chunks.py), `step` apart.
    """
    begin, reaches, worst = 0, 0.0, 0.0
    for i in tl.range(0, count, BLOCK):
        at = count - 1 - i - tl.arange(0, BLOCK)
        reach = tl.load(reach_ptr + at.to(tl.int64) * step, mask=at >= 0, other=0.0)
        begin = tl.maximum(begin, tl.max(tl.where(reaches + tl.cumsum(reach, 0) <= FORGOTTEN, at, 0), 0))
        reaches, worst = reaches + tl.sum(reach, 0), tl.maximum(worst, tl.max(reach, 0))
    return begin, tl.where(worst > MOST, float("nan"), 0.0)


@triton.jit
def slow_pieces(  # type: ignore[no-untyped-def]
    reach_ptr, step, piece, pieces, chunks, still, FAR: tl.constexpr, BLOCK: tl.constexpr = 32
):
    """(1 where more than FAR chunks, a power of 2, before a piece are not forgotten, 1 where so before a later one).

    Of its own only chunks before a piece tell, and the first that are `silent` as if they were none. A piece's sum has
    the same bits whoever makes it, one row of a block: some wait for others by it (tiles/told.py).
    """
    own, later = 0, 0
    for i in tl.range(piece, pieces, BLOCK):
        each = i + tl.arange(0, BLOCK)
        ahead, _ = share(each, pieces, chunks)
        at = ahead[:, None] - 1 - tl.arange(0, FAR)[None, :]
        ours = (each < pieces) & (ahead - still > FAR)
        reach = tl.load(reach_ptr + at.to(tl.int64) * step, mask=ours[:, None], other=0.0)
        slow = (ours & (tl.sum(reach, 1) > FORGOTTEN)).to(tl.int32)
        own = tl.maximum(own, tl.max(tl.where(each == piece, slow, 0), 0))
        later = tl.maximum(later, tl.max(tl.where(each > piece, slow, 0), 0))
    return own, later


@triton.jit
def forgotten(there, t1, t2, v0, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is left of columns v0.. of tokens t1..t2, whole chunks, by a factor of 0: 0, or NaN of what is no number.

    Of gradients, of which what is left is wanted at once.
    """
    left = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for t0 in tl.range(t1, t2, CHUNK, num_stages=8):
        left += loaded(there, t0, v0).to(tl.float32) * 0.0
    return tl.sum(left, 0)


@triton.jit
def silent(ptr, start, stop, stride_row, cols, stride_col, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many chunks of the rows from start to stop, from the last one on, hold nothing but 0."""
    n, count = 0, tl.cdiv(stop - start, CHUNK)
    still = count > 0
    while still:
        t0, found = start + (count - 1 - n) * CHUNK, tl.zeros([CHUNK], tl.int32)
        for col0 in range(0, cols, BLOCK_C):
            x = load_tile(ptr, t0, stop, stride_row, col0, cols, stride_col, CHUNK, BLOCK_C)
            found |= tl.max((x != 0.0).to(tl.int32), 1)
        nothing = tl.max(found, 0) == 0
        n += nothing.to(tl.int32)
        still = nothing & (n < count)
    return n
