"""Activations by name, and their slopes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(x), sigmoid(x), or x where there is no name."""
    if NAME == "silu":
        x *= tl.sigmoid(x)
    elif NAME == "sigmoid":
        x = tl.sigmoid(x)
    return x


@triton.jit
def slope(x, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """The derivative of `activate`."""
    y = tl.full(x.shape, 1.0, tl.float32)
    if NAME == "silu":
        s = tl.sigmoid(x)
        y = s * (1 + x * (1 - s))
    elif NAME == "sigmoid":
        s = tl.sigmoid(x)
        y = s * (1 - s)
    return y
