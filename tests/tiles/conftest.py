"""Kernels of tiles are launched by Triton itself: what a launch of ours brings, they are lent here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foci.core import tune


@pytest.fixture(autouse=True)
def _scratch() -> Iterator[None]:
    """Memory for tensor maps, which Triton asks its user for on a GPU."""
    with tune._ScratchAllocator():
        yield
