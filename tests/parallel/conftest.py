"""Worlds of ranks, started once: `worlds(3).run(function, *args)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from foci.core.world import World


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World]]:
    """A World of so many ranks, the same one for every test of the session. Few live at once: memory is shared."""
    living: dict[int, World] = {}

    def world(size: int) -> World:
        if size not in living:
            living[size] = World(size, timeout=20.0, limit=120.0, preload=("foci.parallel", "pytest"))
        return living[size]

    yield world
    for each in living.values():
        each.close()
