"""The sum of what programs have summed each."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def total(sums_ptr, m, S, M, BLOCK_S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns m of sums [S,M], each added up, 0 from M on."""
    found = tl.zeros(m.shape, tl.float32)
    for s0 in range(0, S, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        there = sums_ptr + s[:, None].to(tl.int64) * M + m[None, :]
        found += tl.sum(tl.load(there, mask=(s < S)[:, None] & (m < M)[None, :], other=0.0), 0)
    return found
