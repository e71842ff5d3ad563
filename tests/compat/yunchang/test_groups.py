"""set_seq_parallel_pg: the ranks of each group, for the length of a `with`, and nothing kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from foci.compat.yunchang.groups import current, set_seq_parallel_pg
from foci.core.world import World

Worlds = Callable[[int], World]


def members(ulysses: int, ring: int, low: bool) -> tuple[list[int], list[int]]:
    groups = set_seq_parallel_pg(ulysses, ring, dist.get_rank(), dist.get_world_size(), use_ulysses_low=low)
    return dist.get_process_group_ranks(groups.ULYSSES_PG), dist.get_process_group_ranks(groups.RING_PG)


def test_neighbours_form_the_low_groups(worlds: Worlds) -> None:
    low = worlds(4).run(members, 2, 2, True)
    assert low == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert worlds(4).run(members, 2, 2, False) == [(ring, ulysses) for ulysses, ring in low]
    # Two copies of the data, each over two ranks.
    assert worlds(4).run(members, 1, 2, True) == [([0], [0, 1]), ([1], [0, 1]), ([2], [2, 3]), ([3], [2, 3])]


def scoped() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    outer = set_seq_parallel_pg(size, 1, rank, size)
    said = []
    try:
        current(None)
    except RuntimeError as error:
        said.append(str(error))
    with outer as one:
        inner = set_seq_parallel_pg(1, size, rank, size)
        with inner, inner:
            said.append(current(None) is inner and current(outer) is outer)
        said.append(current(None) is one)
    try:
        current(None)
    except RuntimeError as error:
        said.append(str(error))
    for wrong in ((2, 2, rank, 3), (0, 1, rank, size), (size, 1, rank + 1, size)):
        try:
            set_seq_parallel_pg(*wrong)
        except ValueError as error:
            said.append(str(error))
    return said


def test_groups_are_those_of_the_with_around(worlds: Worlds) -> None:
    for before, inside, outside, after, *wrong in worlds(2).run(scoped):
        assert "make the layer within" in before and before == after and inside and outside
        assert (
            "must divide world_size=3" in wrong[0] and "must divide" in wrong[1] and "this process is rank" in wrong[2]
        )


def test_outside_of_any_with_there_is_no_group() -> None:
    with pytest.raises(RuntimeError, match="yunchang: no groups"):
        current(None)
