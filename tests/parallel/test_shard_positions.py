"""Positions of ranks in groups within groups: those that `held_by` gives for a mesh, and runs of any lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import foci
from foci.parallel.balance import held_by, length
from foci.parallel.exchange import gather_counts
from foci.parallel.group import Group
from foci.parallel.shard_positions import groups_of, order_of, pieces_by_rank, positions_of, shard_index
from foci.parallel.ulysses import ulysses, usp


def group(size: int) -> Group:
    return Group(None, size, 0, tuple(range(size)), True, frozenset())  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [(3, 0, 2), (1, 1, 1)])
def test_plain_runs_have_any_lengths(lengths: tuple[int, ...]) -> None:
    found = [positions_of(each).tolist() for each in pieces_by_rank([group(3)], "plain", lengths)]
    assert [len(each) for each in found] == list(lengths)
    assert [place for each in found for place in each] == list(range(sum(lengths)))


def on_mesh(order: Any, T: int) -> Any:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    wrapped = usp(foci.attention, mesh, order)
    groups = groups_of(wrapped)
    mine = held_by(mesh, order, T)[dist.get_rank()]
    counts = gather_counts("test", groups, [length(mine), 7])
    held = pieces_by_rank(groups, order_of(wrapped), [row[0] for row in counts])
    positions = torch.cat([positions_of(each) for each in held])
    return mine == held[shard_index(groups)], positions.sort()[0].tolist(), counts


@pytest.mark.parametrize("order", ["plain", "zigzag", "stripe"])
def test_a_mesh_is_read_from_its_wrapper(worlds: Any, order: str) -> None:
    for same, everywhere, counts in worlds(4).run(on_mesh, order, 11):
        assert same and everywhere == list(range(11)) and all(row[1] == 7 for row in counts)


def test_counts_of_another_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the ranks hold \[1, 4\] tokens; order 'zigzag' of 5 gives 3 to rank 0"):
        pieces_by_rank([group(2)], "zigzag", [1, 4])


def test_an_operator_in_one_process_has_no_groups() -> None:
    operator = ulysses(foci.attention, group(1)).inner
    assert groups_of(operator) == [] and order_of(operator) == "plain" and shard_index([]) == 0
    assert gather_counts("test", [], [3, 4]) == [[3, 4]]
