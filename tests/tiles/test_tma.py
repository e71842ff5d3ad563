"""Gluon's copies are there whatever Triton calls them; that kernels compile by each, `make tritons` asks."""

from __future__ import annotations

import inspect

from triton.experimental.gluon.language.nvidia import hopper

from foci.tiles import tma


def test_they_take_what_the_kernels_give_them() -> None:
    assert [*inspect.signature(tma.async_load).parameters][:5] == ["tensor_desc", "coord", "barrier", "result", "pred"]
    assert [*inspect.signature(tma.async_store).parameters][:3] == ["tensor_desc", "coord", "src"]
    assert tma.async_load in vars(hopper.tma).values() and tma.async_store in vars(hopper.tma).values()
