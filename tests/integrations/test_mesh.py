"""The mesh with five names: who stands where, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from foci.core.world import World
from foci.integrations.mesh import degrees_of, make_mesh


@pytest.mark.parametrize("degree", [0, -1, 1.5])
def test_a_degree_must_be_a_number_of_ranks(degree: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ring is {degree!r}; expected a whole number of ranks")):
        make_mesh(ring=degree)


def test_without_a_group_it_says_how_to_start_one() -> None:
    with pytest.raises(ValueError, match="no process group has been started; run under torchrun"):
        make_mesh()


def shape_elsewhere() -> dict[str, int]:
    with torch.device("meta"):
        return degrees_of(make_mesh(ulysses=2))


def test_a_program_may_have_another_default_device(worlds: Callable[[int], World]) -> None:
    """DeviceMesh takes ranks on the CPU only."""
    expected = {"data": 1, "cfg": 1, "pipe": 1, "ulysses": 2, "ring": 1}
    assert worlds(2).run(shape_elsewhere) == [expected, expected]
