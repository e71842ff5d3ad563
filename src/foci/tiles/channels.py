"""Which channels and states of a scan a program has: blocks of channels run fastest, then what they are walked in.

Sums over its states of four tokens at once, as each waits for other lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.stretches import decay_rates


@triton.jit
def channels_of(program, D, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """(index of the row or stretch that the program walks, its channels [BLOCK_D], which of them there are)."""
    blocks = tl.cdiv(D, BLOCK_D)
    d = (program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    return program // blocks, d, d < D


@triton.jit
def states_of(program, A_ptr, A_strides, D, K, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """(index, channels d, which of them there are, keys k, which there are, which states, their `decay_rates`)."""
    index, d, channels = channels_of(program, D, BLOCK_D)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    inside = channels[:, None] & (k < K)[None, :]
    return index, d, channels, k, k < K, inside, rates_of(A_ptr, A_strides, d, k, inside)


@triton.jit
def rates_of(A_ptr, A_strides, d, k, inside):  # type: ignore[no-untyped-def]
    """The states' `decay_rates`, four keys to a thread as the states have them: of half precision else eight."""
    four = tl.max_contiguous(k[None, :], (1, min(4, k.shape[0])))
    return decay_rates(A_ptr + d[:, None] * A_strides[0] + four * A_strides[1], inside)


@triton.jit
def four_sums(tiles, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over an axis of four tokens' tiles, [..,2,2]: as `four_rows` has the tokens."""
    return tl.sum(tl.join(tl.join(tiles[0], tiles[1]), tl.join(tiles[2], tiles[3])), axis)


@triton.jit
def four_rows(t0):  # type: ignore[no-untyped-def]
    """Tokens t0 to t0 + 3 as [1,2,2]."""
    half = tl.arange(0, 2)
    return t0 + half[None, :, None] + 2 * half[None, None, :]


@triton.jit
def load_four(ptr, t0, end, strides, d, channels):  # type: ignore[no-untyped-def]
    """Channels d of rows t0 to t0 + 3, 0 from `end` on."""
    t = four_rows(t0)
    there = ptr + t.to(tl.int64) * strides[1] + d[:, None, None] * strides[2]
    return tl.load(there, mask=channels[:, None, None] & (t < end), other=0.0).to(tl.float32)


@triton.jit
def store_four(ptr, x, t0, end, d, channels, D):  # type: ignore[no-untyped-def]
    """x into channels d of rows t0 to t0 + 3 of [T,D]."""
    t = four_rows(t0)
    there = ptr + t.to(tl.int64) * D + d[:, None, None]
    tl.store(there, x.to(ptr.dtype.element_ty), mask=channels[:, None, None] & (t < end))
