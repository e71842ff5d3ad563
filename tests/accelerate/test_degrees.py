"""foci.accelerate.degrees: what becomes of the ranks that nobody asked a way for."""

from __future__ import annotations

import re

import pytest

from foci.accelerate.degrees import Degrees


@pytest.mark.parametrize(
    ("asked", "world", "heads", "found"),
    [
        (Degrees(), 4, 4, "ulysses 4"),
        (Degrees(), 4, 6, "ulysses 2 x ring 2"),
        (Degrees(), 4, 3, "ring 4"),
        (Degrees(), 1, 4, "one rank"),
        (Degrees(ulysses=2), 4, 4, "ulysses 2 x ring 2"),
        (Degrees(ring=2), 6, 4, "ulysses 3 x ring 2"),
        (Degrees(cfg=2), 4, 4, "cfg 2 x ulysses 2"),
        (Degrees(cfg=2, data=2, pipe=2), 8, 4, "data 2 x cfg 2 x pipe 2"),
        (Degrees(ulysses=2, ring=2), 4, 3, "ulysses 2 x ring 2"),
    ],
)
def test_what_is_left_goes_to_ulysses_and_the_ring(asked: Degrees, world: int, heads: int, found: str) -> None:
    degrees = asked.fill_world(world, heads)
    assert (str(degrees), degrees.size) == (found, world)


@pytest.mark.parametrize(
    ("asked", "world", "sentence"),
    [
        (Degrees(ulysses=2, ring=2), 8, "ulysses 2 x ring 2 is 4 ranks, but there are 8"),
        (Degrees(ulysses=3), 4, "ulysses 3 is 3 ranks, but there are 4"),
        (Degrees(cfg=2, ring=4), 4, "cfg 2 x ring 4 is 8 ranks, but there are 4"),
    ],
)
def test_degrees_that_miss_the_world_are_refused(asked: Degrees, world: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        asked.fill_world(world, heads=4)


@pytest.mark.parametrize("degree", [0, -2])
def test_a_degree_is_at_least_one(degree: int) -> None:
    with pytest.raises(ValueError, match=f"--ring must be at least 1, got {degree}"):
        Degrees(ring=degree)


def test_guidance_has_two_branches() -> None:
    assert Degrees(cfg=1).size == 1 and Degrees(cfg=2).size == 2
    with pytest.raises(ValueError, match="--cfg must be 1 or 2, as guidance has two branches, got 3"):
        Degrees(cfg=3)
