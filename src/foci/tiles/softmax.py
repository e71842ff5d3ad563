"""Softmax: which keys a query sees and which queries a key, logits in base 2, and their sum over blocks."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Farther than any two tokens are apart, and three of it still fit into 31 bits: an open side of a mask.
FAR = tl.constexpr(1 << 29)

# A mask without its Dense part is a tuple, made in the kernel of its arguments (ops/masks.py: Visible; what is absent
# is None, and costs nothing):
#   (q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr,
#    band_low_ptr, step_low, band_high_ptr, step_high, CAUSAL_END, CAUSAL_START, left, right)
# step_low and step_high are 0 where one bound holds for all rows, else 1; left and right are at most FAR. The mask is
# an interval of keys for every query and of queries for every key, and both ends never decrease along a row.


@triton.jit
def keys_of(mask, b, t, T, S):  # type: ignore[no-untyped-def]
    """(low, high) of each query t [n] in 0..T of batch row b: it sees the keys low <= s < high; (FAR, 0): none."""
    n, q0, q1, k0, k1 = _segment(mask, mask[0], b, t, T, S)
    low, high, keys, queries = _reach(mask, n, q1 - q0, k1 - k0)
    i = t - q0
    first, last = k0 + tl.maximum(i + low, 0), k0 + tl.minimum(i + high + 1, keys)
    sees = (i < queries) & (first < last)
    return tl.where(sees, first, FAR), tl.where(sees, last, 0)


@triton.jit
def queries_of(mask, b, s, T, S):  # type: ignore[no-untyped-def]
    """(low, high) of each key s [n] in 0..S of batch row b: the queries low <= t < high see it; (FAR, 0): none."""
    n, q0, q1, k0, k1 = _segment(mask, mask[1], b, s, T, S)
    low, high, keys, queries = _reach(mask, n, q1 - q0, k1 - k0)
    j = s - k0
    first, last = q0 + tl.maximum(j - high, 0), q0 + tl.minimum(j - low + 1, queries)
    seen = (j < keys) & (first < last)
    return tl.where(seen, first, FAR), tl.where(seen, last, 0)


@triton.jit
def stretches(low, high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(start, inner, outer, stop) of a block of `keys_of` (or `queries_of`): where to go, in steps of BLOCK.

    All that any of them sees lies in start..stop. Blocks that begin in inner..outer are seen whole by every one of
    them, and need no mask; those in start..inner and outer..stop do. start, inner and outer are multiples of BLOCK.
    Tokens behind the end of a row should repeat the last one, so that they do not count.
    """
    stop = tl.max(high, 0)
    start = tl.minimum(tl.min(low, 0) // BLOCK * BLOCK, stop)
    end = start + (stop - start + BLOCK - 1) // BLOCK * BLOCK
    inner = tl.minimum(tl.maximum((tl.max(low, 0) + BLOCK - 1) // BLOCK * BLOCK, start), end)
    outer = tl.minimum(tl.maximum(tl.min(high, 0) // BLOCK * BLOCK, inner), end)
    return start, inner, outer, stop


@triton.jit
def share(start, inner, outer, stop, part, parts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The stretches of one of several programs that go through the blocks of start..stop together."""
    each = (stop - start + BLOCK * parts - 1) // (BLOCK * parts) * BLOCK
    end = start + (stop - start + BLOCK - 1) // BLOCK * BLOCK
    first = tl.minimum(start + part * each, end)
    last = tl.minimum(first + each, end)
    inner = tl.minimum(tl.maximum(inner, first), last)
    return first, inner, tl.minimum(tl.maximum(outer, inner), last), tl.minimum(last, stop)


@triton.jit
def borders(start, inner, outer, stop, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many blocks of start..stop lie outside inner..outer; `border` says where each of them begins."""
    return (inner - start) // BLOCK + (stop - outer + BLOCK - 1) // BLOCK


@triton.jit
def border(i, start, inner, outer, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the i-th block outside inner..outer begins: one loop goes through those on both sides."""
    place = start + i * BLOCK
    return place + tl.where(place >= inner, outer - inner, 0)


@triton.jit
def between(index, low, high):  # type: ignore[no-untyped-def]
    """The mask alone (without Dense): of keys and their queries' bounds, or of queries and their keys' bounds."""
    return (index >= low) & (index < high)


@triton.jit
def _segment(mask, offsets_ptr, b, place, T, S):  # type: ignore[no-untyped-def]
    """The row or document n of each place, and the queries q0..q1 and keys k0..k1 that it has room for."""
    q_offsets_ptr, kv_offsets_ptr, documents = mask[0], mask[1], mask[2]
    if offsets_ptr is not None:
        # The last n with offsets[n] <= place, found by halving; n = documents is behind the last: of no document.
        n, size = tl.zeros_like(place), documents + 1
        while size > 1:
            middle = n + size // 2
            n = tl.where(tl.load(offsets_ptr + middle) <= place, middle, n)
            size -= size // 2
        after = tl.minimum(n + 1, documents)
        q0, k0 = _moment(q_offsets_ptr + n, 0, T), _moment(kv_offsets_ptr + n, 0, S)
        q1, k1 = _moment(q_offsets_ptr + after, q0, T), _moment(kv_offsets_ptr + after, k0, S)
        # Lengths and bounds are read of the last document instead, which is no matter where there is nothing to see.
        n = tl.minimum(n, tl.maximum(documents - 1, 0))
    else:
        n, q0, q1, k0, k1 = b, 0, T, 0, S
    return n, q0, q1, k0, k1


@triton.jit
def _reach(mask, n, queries, keys):  # type: ignore[no-untyped-def]
    """(low, high, keys, queries) of row n: query i sees key j when i + low <= j <= i + high, of those that are real."""
    _, _, _, kv_lengths_ptr, q_lengths_ptr, low_ptr, step_low, high_ptr, step_high, END, START, left, right = mask
    shift = keys - queries
    if kv_lengths_ptr is not None:
        room, keys = shift, _moment(kv_lengths_ptr + n, 0, keys)
        shift = tl.maximum(keys - queries, tl.minimum(room, 0))
        if q_lengths_ptr is not None:
            queries = _moment(q_lengths_ptr + n, 0, queries)
            shift = keys - queries
    low, high = shift * 0 - FAR, shift * 0 + FAR
    if left is not None:
        low = tl.maximum(low, shift - left)
    if right is not None:
        high = tl.minimum(high, shift + right)
    if END:
        high = tl.minimum(high, shift)
    if START:
        high = tl.minimum(high, 0)
    if low_ptr is not None:
        low = tl.maximum(low, _moment(low_ptr + n * step_low, -FAR, FAR))
    if high_ptr is not None:
        high = tl.minimum(high, _moment(high_ptr + n * step_high, -FAR, FAR))
    return low, high, keys, queries


@triton.jit
def _moment(ptr, least, most):  # type: ignore[no-untyped-def]
    """An offset, length or bound, moved inside least..most: nothing is read from elsewhere, whatever it holds."""
    return tl.minimum(tl.maximum(tl.load(ptr), least), most).to(tl.int32)


@triton.jit
def tanh(x, factor, PRECISE: tl.constexpr):  # type: ignore[no-untyped-def]
    """tanh(x factor) = 1 - 2 / (1 + e^(2 x factor)), right to 1e-6 absolute; PRECISE: to 2e-7 relative.

    A reciprocal root and its square take half the instructions of a division, which minds quotients too small to
    matter. PRECISE divides, and takes a polynomial where |x factor| < 1/4.
    """
    if PRECISE:
        x *= factor
        s = x * x
        small = x + x * s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835))))
        return tl.where(tl.abs(x) < 0.25, small, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2 * LOG2E))))
    else:
        root = tl.rsqrt(1.0 + tl.exp2(x * (factor * (2 * LOG2E))))
        return 1.0 - 2.0 * (root * root)


@triton.jit
def logits(products, scale, softcap, bias, PRECISE: tl.constexpr, ASCENDING: tl.constexpr):  # type: ignore[no-untyped-def]
    """(x, factor) of a tile of q k: x factor = log2(e) z, factor > 0; `join` multiplies as it subtracts, for nothing.

    z = cap(scale q k) + bias, bias a float32 tile or None, softcap a number or None. ASCENDING: scale > 0.
    """
    x, factor = products, scale * LOG2E
    if softcap is not None:
        x, factor = tanh(products, scale / softcap, PRECISE), softcap * LOG2E
    elif bias is not None or not ASCENDING:
        x, factor = products * scale, LOG2E
    if bias is not None:
        if softcap is not None:
            x, factor = x * softcap, LOG2E
        x += bias
    return x, factor


@triton.jit
def join(x, factor, top, mass):  # type: ignore[no-untyped-def]
    """A block of logits [queries, keys], x factor in base 2, joins the rows' largest and sum: (p, fade, top, mass).

    p = 2^(z - top);  mass = fade mass + sum p;  what was summed before is to be multiplied by fade = 2^(old top - top)
    """
    new = tl.maximum(top, tl.max(x, 1) * factor)
    steady = tl.where(new == -float("inf"), 0.0, new)  # nothing seen yet: 2^(-inf - 0) = 0, where -inf + inf is NaN
    p, fade = tl.exp2(x * factor - steady[:, None]), tl.exp2(top - steady)
    return p, fade, new, mass * fade + tl.sum(p, 1)


@triton.jit
def join_sink(sink, top, mass):  # type: ignore[no-untyped-def]
    """One more logit in natural log, without a value: (fade, top, mass)."""
    fade, _, top, mass = join_part(sink * LOG2E, 1.0, top, mass)
    return fade, top, mass


@triton.jit
def join_part(part_top, part_mass, top, mass):  # type: ignore[no-untyped-def]
    """What other keys gave joins: (fade, weight, top, mass); weight is for their sum, fade for the sum before."""
    new = tl.maximum(top, part_top)
    steady = tl.where(new == -float("inf"), 0.0, new)
    fade, weight = tl.exp2(top - steady), tl.exp2(part_top - steady)
    return fade, weight, new, mass * fade + part_mass * weight


@triton.jit
def join_parts(tops, masses, top, mass):  # type: ignore[no-untyped-def]
    """Several parts [n] of one row join at once: (fade, weights [n], top, mass)."""
    new = tl.maximum(top, tl.max(tops, 0))
    steady = tl.where(new == -float("inf"), 0.0, new)
    fade, weights = tl.exp2(top - steady), tl.exp2(tops - steady)
    return fade, weights, new, mass * fade + tl.sum(masses * weights, 0)


@triton.jit
def conclude(top, mass):  # type: ignore[no-untyped-def]
    """(share, lse): out = share * sum 2^(z - top) v, lse in natural log; (0, -inf) for a row that saw nothing."""
    empty = mass == 0.0
    mass = tl.where(empty, 1.0, mass)
    share = tl.where(empty, 0.0, 1.0 / mass)
    lse = tl.where(empty, -float("inf"), (top + tl.log2(mass)) * LN2)
    return share, lse
