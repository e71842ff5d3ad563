"""Ranks agree, or all say the same about what they disagree on."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import foci
import foci.parallel.group as group_file
from foci.core.errors import Disagreement
from foci.core.world import Raised, World
from foci.parallel.group import Group
from foci.parallel.ring import ring


def agree(facts: list[dict[str, object]], count: int) -> list[list[int]]:
    group = Group.of(dist.group.WORLD)
    return group.agree("attention", facts[group.rank], [group.rank * 1000 + i for i in range(count)])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 60, 300])
def test_agreement_brings_every_ranks_numbers(worlds: Callable[[int], World], size: int, count: int) -> None:
    facts = {"dtype": torch.float32, "offsets": torch.arange(3)}
    for found in worlds(size).run(agree, [facts] * size, count):
        assert found == [[rank * 1000 + i for i in range(count)] for rank in range(size)]


def test_disagreement_is_the_same_on_all_ranks(worlds: Callable[[int], World]) -> None:
    facts = [{"dtype": torch.float32, "offsets": torch.arange(3)} for _ in range(3)]
    facts[1]["dtype"] = torch.bfloat16
    facts[2]["offsets"] = torch.tensor([0, 1, 3])
    outcomes = worlds(3).outcomes(agree, facts, 1)
    assert all(isinstance(each, Raised) and isinstance(each.error, Disagreement) for each in outcomes)
    (message,) = {str(each.error) for each in outcomes}
    assert "dtype: torch.float32 on ranks 0, 2; torch.bfloat16 on rank 1" in message
    assert "on ranks 0, 1; torch.int64 [3] of values" in message


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(TypeError, match="group must be a ProcessGroup or a one-dimensional DeviceMesh, got None"):
        Group.of(None)


def call_after_a_mistake() -> list[bool]:
    """Whether a note of a mistake that all ranks know of is in the store: after it, and after a call that is right."""
    attend, q = ring(foci.attention, dist.group.WORLD), torch.zeros(1, 1 + dist.get_rank(), 1, 4)
    key, store = attend.group._key(dist.get_rank()), group_file._store()
    assert store is not None
    with pytest.raises(ValueError, match="order 'zigzag' of 6 gives"):
        attend(q, q, q)
    left = store.check([key])
    attend(q[:, :1], q[:, :1], q[:, :1])
    with pytest.raises(ValueError, match="unknown backend"):
        attend(q[:, :1], q[:, :1], q[:, :1], backend="none")
    return [left, store.check([key])]


def test_a_mistake_of_before_is_no_later_cause(worlds: Callable[[int], World]) -> None:
    assert worlds(3).run(call_after_a_mistake) == [[True, False]] * 3


def copied() -> bool:
    group = Group.of(dist.group.WORLD)
    return copy.deepcopy({"group": group})["group"] is group


def test_a_copy_of_a_model_has_the_same_group(worlds: Callable[[int], World]) -> None:
    assert all(worlds(2).run(copied))
