"""Where the chunks of a recurrence and their states lie, and in which dtype it multiplies."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence(offsets_ptr, n, T, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sequence n: (row of the batch, start, stop, slot of its first chunk). Packed, it is document n of the one row.

    Chunk i of document n has slot start // CHUNK + n + i: no two share one, T // CHUNK + N are enough, and nothing has
    to be counted over the documents before it. Values outside 0..T are moved inside: nothing is read from elsewhere.
    """
    if offsets_ptr is None:
        b, start, stop, slot = n, 0, T, n * tl.cdiv(T, CHUNK)
    else:
        start = tl.minimum(tl.maximum(tl.load(offsets_ptr + n), 0), T).to(tl.int32)
        stop = tl.minimum(tl.maximum(tl.load(offsets_ptr + n + 1), start), T).to(tl.int32)
        b, slot = 0, start // CHUNK + n
    return b, start, stop, slot


@triton.jit
def document(offsets_ptr, slot, N, T, CHUNK: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last of N documents whose own slots are not past this one, which grow with them; the first if all are.

    Of WIDE at once, or of each WIDEth part of them: a warp alone finds it, and waits for no other.
    """
    n, i = tl.full((), 0, tl.int32), tl.arange(0, WIDE)
    left = n + N
    if N > 1:  # of one, a constant, Triton 3.6 cannot compile a loop that never runs
        while left > 1:
            step = tl.cdiv(left, WIDE)
            inside = i * step < left
            start = tl.load(offsets_ptr + n + i * step, mask=inside, other=0)
            start = tl.minimum(tl.maximum(start, 0), T).to(tl.int32)
            passed = inside & (start // CHUNK + n + i * step <= slot)
            skipped = tl.maximum(tl.sum(passed.to(tl.int32), 0) - 1, 0) * step
            n, left = n + skipped, tl.minimum(step, left - skipped)
    return n


@triton.jit
def chunk_at(offsets_ptr, slot, N, T, CHUNK: tl.constexpr, WIDE: tl.constexpr = 32):  # type: ignore[no-untyped-def]
    """The chunk that has a slot: (sequence, row of the batch, first token, its sequence's stop, the slot).

    -1 as sequence: none has it.
    """
    if offsets_ptr is None:
        count = tl.cdiv(T, CHUNK)
        n, first, stop = slot // count, slot % count * CHUNK, T
        b = n
    else:
        n = document(offsets_ptr, slot, N, T, CHUNK, WIDE)
        b, start, stop, own = sequence(offsets_ptr, n, T, CHUNK)
        first = start + (slot - own) * CHUNK
        n = tl.where((slot >= own) & (first < stop), n, -1)
    return n, b, first, stop, slot


@triton.jit
def working(x):  # type: ignore[no-untyped-def]
    """float16 as float32: its range holds neither decays nor sums over tokens."""
    return x.to(tl.float32) if x.dtype == tl.float16 else x


@triton.jit
def rounded(x, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest float32 of TF32's digits, for products by it: left to them they cut digits off, all the same way.

    x (1 + 2^13) has its last digit where TF32 has; less 2^13 x, which is exact, it is x with that digit the last. Past
    2^114 that is infinite.
    """
    if PRECISION == "tf32" and x.dtype == tl.float32:
        x = tl.fma(x, -8192.0, x * 8193.0)
    return x


@triton.jit
def in_two(x):  # type: ignore[no-untyped-def]
    """float32 as the sum of two bfloat16: its first 8 digits, cut off, and the rounding of the others.

    To round the first costs a conversion of each number alone, which is slow, and is worth one digit of 17.
    """
    bits = x.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, (x - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)


@triton.jit
def nearest_in_two(x):  # type: ignore[no-untyped-def]
    """`in_two` whose first is the nearest bfloat16, for who reads no more of it; half goes away from 0.

    By integers: the conversion of each number alone, and back, takes several times as long. The NaN of a GPU's
    arithmetic is the largest integer: without the minimum it would become -0.
    """
    bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFF7FFF) + 32768
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, (x - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)


@triton.jit
def halves(high, low, above, below, z):  # type: ignore[no-untyped-def]
    """(high + low) (above + below) + z of bfloat16 tiles, low by below left out: nearly as of float32."""
    return tl.dot(high, above, tl.dot(high, below, tl.dot(low, above, z)))


@triton.jit
def covered(offsets_ptr, N, T):  # type: ignore[no-untyped-def]
    """(the first token that one of N documents has, the one behind the last): no other token is in any."""
    return sequence(offsets_ptr, 0, T, 1)[1], sequence(offsets_ptr, N - 1, T, 1)[2]
