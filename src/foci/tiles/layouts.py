"""How tiles lie where Gluon's kernels multiply on Hopper: in the registers of four warps, and in shared memory.

A product's sums lie as the next one's left operand does, so what goes from one to the other moves nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BY_TOKEN: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # sums of 64 columns
BY_KEY: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # of 128
OF_TOKENS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, BY_TOKEN.value, 2))  # what multiplies to such sums
OF_KEYS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, BY_KEY.value, 2))
OF_TILES: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # rows of 64 or 128 bfloat16, by TMA too
OF_SUMS: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # rows of float32
OF_LINES: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(0, 32, 2))  # one number a token, float32


@gluon.jit
def plus(a, b):  # type: ignore[no-untyped-def]
    """By which scans add."""
    return a + b
