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
def probabilities(products, lse, t, s, pairs, scale, softcap, PRECISE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(p, tanh if softcap) of q k, with Dense but not the rest of a mask.

    pairs = (bias_ptr or None, its strides, dense_ptr or None, its strides, b, h, T, S); both are [B, H, T, S].
    """
    bias_ptr, bias_strides, dense_ptr, dense_strides, b, h, T, S = pairs
    y = products
    if softcap is None:
        z = products * (scale * unit(PRECISE)) - lse
    else:
        y = tanh(products * (scale / softcap), PRECISE)
        z = y * (softcap * unit(PRECISE)) - lse
    if bias_ptr is not None:
        places = places_of(bias_strides, b, h, t, s)
        z += unit(PRECISE) * tl.load(bias_ptr + places, mask=(t < T) & (s < S), other=0.0).to(tl.float32)
    p = tl.exp2(z * LOG2E) if PRECISE else tl.exp2(z)
    if dense_ptr is not None:
        places = places_of(dense_strides, b, h, t, s)
        p = tl.where(tl.load(dense_ptr + places, mask=(t < T) & (s < S), other=0) != 0, p, 0.0)
    return p, y


@triton.jit
def stays(seed_ptr, b, h, t, s, threshold, PLACED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which probabilities of a tile dropout keeps."""
    return kept(row_coins(seed_ptr, b, h, t, PLACED), seed_ptr, s, threshold, PLACED)


@triton.jit
def places_of(strides, b, h, t, s):  # type: ignore[no-untyped-def]
    """Where the pairs t, s of one head lie in a bias or mask [B, H, T, S]."""
    return b * strides[0] + h * strides[1] + (t.to(tl.int64) * strides[2] + s.to(tl.int64) * strides[3])


@triton.jit
def load_rows(ptr, rows, alive, strides, cols: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows [n, BLOCK_C] of one head (strides of four dimensions) that are alive; zeros for the others."""
    c = tl.arange(0, BLOCK_C)
    places = rows.to(tl.int64)[:, None] * strides[1] + c.to(tl.int64)[None, :] * strides[3]
    return tl.load(ptr + places, mask=alive[:, None] & (c < cols)[None, :], other=0.0)
