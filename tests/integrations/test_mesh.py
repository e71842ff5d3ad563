"""The mesh with five names: who stands where, and what it refuses."""

from __future__ import annotations

import re

import pytest

from foci.integrations.mesh import make_mesh


@pytest.mark.parametrize("degree", [0, -1, 1.5])
def test_a_degree_must_be_a_number_of_ranks(degree: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ring is {degree!r}; expected a whole number of ranks")):
        make_mesh(ring=degree)


def test_without_a_group_it_says_how_to_start_one() -> None:
    with pytest.raises(ValueError, match="no process group has been started; run under torchrun"):
        make_mesh()
