"""foci.accelerate.ways: what becomes of the ranks that nobody asked a way for."""

from __future__ import annotations

import re

import pytest

from foci.accelerate.ways import Ways


@pytest.mark.parametrize(
    ("asked", "world", "heads", "found"),
    [
        (Ways(), 4, 4, "ulysses 4"),
        (Ways(), 4, 6, "ulysses 2 x ring 2"),
        (Ways(), 4, 3, "ring 4"),
        (Ways(), 1, 4, "one rank"),
        (Ways(ulysses=2), 4, 4, "ulysses 2 x ring 2"),
        (Ways(ring=2), 6, 4, "ulysses 3 x ring 2"),
        (Ways(cfg=2), 4, 4, "cfg 2 x ulysses 2"),
        (Ways(cfg=2, data=2, pipe=2), 8, 4, "data 2 x cfg 2 x pipe 2"),
        (Ways(ulysses=2, ring=2), 4, 3, "ulysses 2 x ring 2"),
    ],
)
def test_what_is_left_goes_to_ulysses_and_the_ring(asked: Ways, world: int, heads: int, found: str) -> None:
    ways = asked.over(world, heads)
    assert (str(ways), ways.size) == (found, world)


@pytest.mark.parametrize(
    ("asked", "world", "sentence"),
    [
        (Ways(ulysses=2, ring=2), 8, "ulysses 2 x ring 2 is 4 ranks, but there are 8"),
        (Ways(ulysses=3), 4, "ulysses 3 is 3 ranks, but there are 4"),
        (Ways(cfg=2, ring=4), 4, "cfg 2 x ring 4 is 8 ranks, but there are 4"),
    ],
)
def test_degrees_that_miss_the_world_are_refused(asked: Ways, world: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        asked.over(world, heads=4)


@pytest.mark.parametrize("degree", [0, -2])
def test_a_degree_is_at_least_one(degree: int) -> None:
    with pytest.raises(ValueError, match=f"--ring must be at least 1, got {degree}"):
        Ways(ring=degree)


def test_guidance_has_two_branches() -> None:
    assert Ways(cfg=1).size == 1 and Ways(cfg=2).size == 2
    with pytest.raises(ValueError, match="--cfg must be 1 or 2, as guidance has two branches, got 3"):
        Ways(cfg=3)
