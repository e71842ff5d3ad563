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


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)) to float32's digits, far below 0 too: log(1 + e) = 2 atanh(s), s = e / (2 + e) <= 1/3."""
    e = tl.exp(-tl.abs(x))
    s = e / (2 + e)
    square, series = s * s, tl.zeros(x.shape, tl.float32)
    for i in tl.static_range(7):
        series = (series + 1.0 / (15 - 2 * i)) * square
    return tl.maximum(x, 0.0) + 2 * s * (1 + series)
