"""Layers: projections around an operator."""

from __future__ import annotations

from foci.nn.attention import Attention
from foci.nn.cache import Cache
from foci.nn.delta import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from foci.nn.linear import (
    HGRN2,
    GatedLinearAttention,
    GatedSlotAttention,
    LinearAttention,
    MultiScaleRetention,
    SimpleGatedLinearAttention,
)
from foci.nn.mamba import Mamba2
from foci.nn.parts import GatedRMSNorm, RMSNorm, ShortConvolution, rotary
from foci.nn.rwkv import RWKV6TimeMix

__all__ = [
    "HGRN2", "Attention", "Cache", "DeltaNet", "GatedDeltaNet", "GatedLinearAttention", "GatedRMSNorm",
    "GatedSlotAttention", "KimiDeltaAttention", "LinearAttention", "Mamba2", "MultiScaleRetention", "RMSNorm",
    "RWKV6TimeMix", "ShortConvolution", "SimpleGatedLinearAttention", "rotary",
]  # fmt: skip
