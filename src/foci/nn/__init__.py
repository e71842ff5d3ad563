"""Layers: projections round an operator."""

from __future__ import annotations

from foci.nn.attention import Attention
from foci.nn.cache import Cache
from foci.nn.delta import GatedDeltaNet
from foci.nn.parts import GatedRMSNorm, RMSNorm, ShortConvolution, rotary

__all__ = ["Attention", "Cache", "GatedDeltaNet", "GatedRMSNorm", "RMSNorm", "ShortConvolution", "rotary"]
