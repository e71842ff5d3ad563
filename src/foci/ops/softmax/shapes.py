"""The problems of softmax attention as they occur in models: what is timed, and what a GPU is tuned for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from foci.core.spec import Case
from foci.ops.draw import Draw, OnDevice
from foci.ops.masks import Causal, Packed, Window
from foci.ops.softmax.cases import case

_shape: Callable[..., Case] = partial(case, by=OnDevice)


def _causal(draw: Draw) -> dict[str, Any]:
    return {"mask": Causal()}


def _near(draw: Draw) -> dict[str, Any]:
    return {"mask": Causal() & Window(1024, 0)}


def _capped(draw: Draw) -> dict[str, Any]:
    return {"mask": Causal(), "softcap": 50.0}


def _sink(draw: Draw) -> dict[str, Any]:
    return {"mask": Causal() & Window(128, 0), "sink": draw.normal(64)}


def _bias(draw: Draw) -> dict[str, Any]:
    return {"bias": draw.normal(1, 16, 1024, 1024)}


def _packed(draw: Draw, lengths: tuple[int, ...]) -> dict[str, Any]:
    return {"mask": Packed(torch.tensor([0, *accumulate(lengths)], device=draw.device, dtype=torch.int32)) & Causal()}


_even = partial(_packed, lengths=(2048,) * 8)
_uneven = partial(_packed, lengths=(9000, 5000, 1500, 700, 150, 33, 1))


# 16k tokens and 2048 channels in all, as FlashAttention-3 is measured (arXiv 2407.08608, section 4).
_PLAIN = tuple(
    _shape(f"{16384 // T}x{T}x{2048 // K}x{K}{word}", *said, extra=extra, B=16384 // T, T=T, H=2048 // K, K=K)
    for K in (64, 128, 256)
    for T in (512, 1024, 2048, 4096, 8192, 16384)
    for word, said, extra in (("", (), lambda draw: {}), (" causal", ("causal",), _causal))
)
_FEATURES = (
    _shape("softcap 2x4096x16:8x256", "causal", "softcap", "gqa", extra=_capped, B=2, T=4096, H=16, G=8, K=256),
    _shape("window 2x8192x32:8x128", "causal", "window", "gqa", extra=_near, B=2, T=8192, H=32, G=8, K=128),
    _shape("sink 2x8192x64:8x64", "causal", "window", "sink", "gqa", extra=_sink, B=2, T=8192, H=64, G=8, K=64),
    _shape("bias 4x1024x16x64", "bias", extra=_bias, B=4, T=1024, H=16, K=64),
    _shape("dlse 2x4096x16x128", "causal", "dlse", extra=_causal, B=2, T=4096, H=16, K=128),
    _shape("packed 8x2048 32:8x128", "causal", "packed", "gqa", extra=_even, B=1, T=16384, H=32, G=8, K=128),
    _shape("packed uneven 32:8x128", "causal", "packed", "gqa", extra=_uneven, B=1, T=16384, H=32, G=8, K=128),
)
_DIFFUSION = (
    _shape("Flux 1x4608x24x128", B=1, T=4608, H=24, K=128),
    _shape("Wan 1x32760x12x128", B=1, T=32760, H=12, K=128),
)
_DECODE = tuple(
    _shape(f"decode {B}x{S}x32:8x128", "decode", "gqa", B=B, T=1, S=S, H=32, G=8, K=128)
    for B, S in ((1, 4096), (1, 65536), (16, 4096), (64, 8192))
)
_SMALL = (
    _shape("small 1x128x8x64", "small", "causal", extra=_causal, B=1, T=128, H=8, K=64),
    _shape("small 2x256x4x32", "small", B=2, T=256, H=4, K=32),
)
SHAPES = (*_PLAIN, *_FEATURES, *_DIFFUSION, *_DECODE, *_SMALL)
