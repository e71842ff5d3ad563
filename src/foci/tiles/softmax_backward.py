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
    products, lse, t0, s0, t, s, pairs, b, h, scale, softcap, NEAR: tl.constexpr, PRECISE: tl.constexpr
):
    """(p, tanh if softcap) of q k, with Dense but not the rest of a mask. t and s count from t0 and s0.

    pairs = (bias_ptr or None, its strides, dense_ptr or None, its strides, T, S); both are [B, H, T, S]. NEAR: places
    within a tile fit into 32 bits.
    """
    bias_ptr, bias_strides, dense_ptr, dense_strides, T, S = pairs
    y = products
    if softcap is None:
        z = products * (scale * unit(PRECISE)) - lse
    else:
        y = tanh(products * (scale / softcap), PRECISE)
        z = y * (softcap * unit(PRECISE)) - lse
    if bias_ptr is not None:
        places = _places(bias_ptr, bias_strides, b, h, t0, s0, t, s, NEAR)
        z += unit(PRECISE) * tl.load(places, mask=(t < T - t0) & (s < S - s0), other=0.0).to(tl.float32)
    p = tl.exp2(z * LOG2E) if PRECISE else tl.exp2(z)
    if dense_ptr is not None:
        places = _places(dense_ptr, dense_strides, b, h, t0, s0, t, s, NEAR)
        p = tl.where(tl.load(places, mask=(t < T - t0) & (s < S - s0), other=0) != 0, p, 0.0)
    return p, y


@triton.jit
def stays(seed_ptr, b, h, t, s, threshold, PLACED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which probabilities of a tile dropout keeps."""
    return kept(row_coins(seed_ptr, b, h, t, PLACED), seed_ptr, s, threshold, PLACED)


@triton.jit
def _places(ptr, strides, b, h, t0, s0, t, s, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the pairs t0 + t, s0 + s of one head lie in a bias or mask [B, H, T, S]; tiles begin at their multiples."""
    t0 = tl.multiple_of(t0.to(tl.int64), t.shape[0] * t.shape[1])
    s0 = tl.multiple_of(s0.to(tl.int64), s.shape[0] * s.shape[1])
    ptr += b * strides[0] + h * strides[1] + t0 * strides[2] + s0 * strides[3]
    if not NEAR:
        t, s = t.to(tl.int64), s.to(tl.int64)
    return ptr + (t * strides[2] + s * strides[3])


@triton.jit
def load_rows(  # type: ignore[no-untyped-def]
    ptr, row0, alive, strides, cols: tl.constexpr, NEAR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The rows [BLOCK_R, BLOCK_C] from row0 of one head (strides of four dimensions) that are alive, zeros for others.

    alive: None, all of them are. NEAR: places within a tile fit into 32 bits, which takes half the registers.
    """
    r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    if not NEAR:
        r, c = r.to(tl.int64), c.to(tl.int64)
    places = ptr + row0.to(tl.int64) * strides[1] + (r[:, None] * strides[1] + c[None, :] * strides[3])
    inside = tl.arange(0, BLOCK_C) < cols
    if alive is not None:
        return tl.load(places, mask=alive[:, None] & inside[None, :], other=0.0)
    elif cols % BLOCK_C == 0:
        return tl.load(places)
    else:
        return tl.load(places, mask=inside[None, :], other=0.0)
