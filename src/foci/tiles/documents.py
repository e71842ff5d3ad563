"""Whose document a chunk is, for warps of Gluon's kernels that have work of their own."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def document_of(offsets_ptr, slot, N, T, CHUNK: gl.constexpr):  # type: ignore[no-untyped-def]
    """`document` of tiles/state.py, by every warp for itself."""
    i = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    n = gl.to_tensor(0)
    if N > 1:  # of one, a constant, Triton 3.6 cannot compile a loop that never runs
        left = gl.to_tensor(N)
        while left > 1:
            step = (left + 31) // 32
            inside = i * step < left
            start = gl.load(offsets_ptr + n + i * step, mask=inside, other=0)
            start = gl.minimum(gl.maximum(start, 0), T).to(gl.int32)
            passed = inside & (start // CHUNK + n + i * step <= slot)
            skipped = gl.maximum(gl.sum(passed.to(gl.int32), 0) - 1, 0) * step
            n, left = n + skipped, gl.minimum(step, left - skipped)
    return n
