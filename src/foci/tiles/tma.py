"""Gluon's copies by TMA, by the names that they have since Triton 3.9, until then they had others; and its maps."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from foci.tiles.maps import matrix

NEW = hasattr(tma, "async_load")
async_load = tma.async_load if NEW else tma.async_copy_global_to_shared
async_store = tma.async_store if NEW else tma.async_copy_shared_to_global


def map_of(x: Any, step: int, width: int, tile: tuple[int, int], layout: Any) -> TensorDescriptor:
    """Of a tensor as rows so wide, a `step` apart (tiles/maps.py), for tiles that lie so in shared memory."""
    return TensorDescriptor(x, *matrix(x, step, width), list(tile), layout.value)
