"""Gluon's copies by TMA, by the names that they have since Triton 3.9; until then they had others."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

NEW = hasattr(tma, "async_load")
async_load = tma.async_load if NEW else tma.async_copy_global_to_shared
async_store = tma.async_store if NEW else tma.async_copy_shared_to_global
