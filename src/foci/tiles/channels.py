"""Which channels and states of a scan a program has: blocks of channels run fastest, then what they are walked in."""

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
    rates = decay_rates(A_ptr + d[:, None] * A_strides[0] + k[None, :] * A_strides[1], inside)
    return index, d, channels, k, k < K, inside, rates
