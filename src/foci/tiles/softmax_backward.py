"""Softmax's backward: probabilities made again from lse, tile by tile, and what their gradient needs."""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.random import kept, row_coins
from foci.tiles.softmax import LOG2E, tanh

# With z the logits and p = exp(z - lse):
#   dp = dout v^T;  pull[t] = sum_s p dp - dlse = sum_v dout out - dlse;  dz = p (dp - pull)
#   dq = scale slope dz k;  dk = scale (slope dz)^T q;  dv = p^T dout;  dbias = dz;  dsink = -sum_t exp(sink - lse) pull
# slope = 1 - tanh^2 under a softcap. Dropout multiplies p in dv and dp in dz by kept / (1 - rate).
#
# Tiles are [queries, keys] or [keys, queries]: tokens t and s, and lse, come in a shape that broadcasts.
# lse is steady: +inf for a row that saw nothing, so that its p is 0; and in units of log 2, but PRECISE (in float32) a
# natural logarithm, as the difference z - lse then loses nothing to the change of base.


@triton.jit
def unit(PRECISE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a natural logarithm is multiplied by."""
    return 1.0 if PRECISE else LOG2E


@triton.jit
def probabilities(  # type: ignore[no-untyped-def]
    products, lse, t0, s0, t, s, pairs, b, h, scale, softcap, NEAR: tl.constexpr, PRECISE: tl.constexpr, bias=None
):
    """(p, tanh if softcap) of q k, with Dense but not the rest of a mask. t and s count from t0 and s0.

    pairs = (bias_ptr or None, its strides, dense_ptr or None, its strides, T, S); both are [B, H, T, S]. NEAR: places
    within a tile fit into 32 bits. bias: what `bias_of` gives, where it is known already.
    """
    dense_ptr, dense_strides = pairs[2], pairs[3]
    y = products
    if softcap is None:
        z = products * (scale * unit(PRECISE)) - lse
    else:
        y = tanh(products, scale / softcap, PRECISE)
        z = y * (softcap * unit(PRECISE)) - lse
    if bias is not None:
        z += bias
    elif pairs[0] is not None:
        z += bias_of(t0, s0, t, s, pairs, b, h, NEAR, PRECISE)
    p = tl.exp2(z * LOG2E) if PRECISE else tl.exp2(z)
    if dense_ptr is not None:
        p = tl.where(_pairs(dense_ptr, dense_strides, b, h, t0, s0, t, s, pairs[4], pairs[5], NEAR) != 0, p, 0.0)
    return p, y


@triton.jit
def bias_of(t0, s0, t, s, pairs, b, h, NEAR: tl.constexpr, PRECISE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of the bias as `probabilities` adds it."""
    bias = _pairs(pairs[0], pairs[1], b, h, t0, s0, t, s, pairs[4], pairs[5], NEAR)
    return bias.to(tl.float32) * unit(PRECISE)


@triton.jit
def stays(seed_ptr, b, h, t, s, threshold, PLACED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which probabilities of a tile dropout keeps."""
    return kept(row_coins(seed_ptr, b, h, t, PLACED), seed_ptr, s, threshold, PLACED)


@triton.jit
def _pairs(ptr, strides, b, h, t0, s0, t, s, T, S, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pairs t0 + t, s0 + s of a head of a bias or mask [B, H, T, S], 0 outside; tiles begin at their multiples.

    So that they, and what lies outside, are known to be so eight at a time.
    """
    t0 = tl.multiple_of(t0.to(tl.int64), t.shape[0] * t.shape[1])
    s0 = tl.multiple_of(s0.to(tl.int64), s.shape[0] * s.shape[1])
    ptr += b * strides[0] + h * strides[1] + t0 * strides[2] + s0 * strides[3]
    inside = (t < (T - t0).to(tl.int32)) & (s < (S - s0).to(tl.int32))
    if not NEAR:
        t, s = t.to(tl.int64), s.to(tl.int64)
    return tl.load(ptr + (t * strides[2] + s * strides[3]), mask=inside, other=0)


@triton.jit
def load_rows(  # type: ignore[no-untyped-def]
    ptr, row0, alive, strides, cols: tl.constexpr, NEAR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The rows [BLOCK_R, BLOCK_C] from row0 of one head (strides of four dimensions) that are alive, zeros for others.

    alive: None, all of them are. NEAR: places within a tile fit into 32 bits, which takes half the registers.
    """
    r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    if NEAR:  # unsigned: nothing is kept for a sign
        r, c = r.to(tl.uint32), c.to(tl.uint32)
    else:
        r, c = r.to(tl.int64), c.to(tl.int64)
    places = (ptr + row0.to(tl.int64) * strides[1]) + (r[:, None] * strides[1] + c[None, :] * strides[3])
    inside = tl.arange(0, BLOCK_C) < cols
    if alive is not None:
        return tl.load(places, mask=alive[:, None] & inside[None, :], other=0.0)
    elif cols % BLOCK_C == 0:
        return tl.load(places)
    else:
        return tl.load(places, mask=inside[None, :], other=0.0)
