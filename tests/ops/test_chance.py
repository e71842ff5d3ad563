"""Chance: the same for the same name, within what it is told, and drawn cases that every law can be asked of."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from foci.check.run import examine
from foci.cli_check import FUNCTIONS, candidate_of
from foci.core.spec import Case
from foci.ops import SPECS
from foci.ops.chance import WIDTHS, Chance, told

CPU = torch.device("cpu")
ROOM = 2**16
OPERATORS = tuple(FUNCTIONS)


def drawn(operator: str, name: str, room: int = ROOM) -> Case:
    draw = SPECS[operator].drawn
    assert draw is not None
    return draw(name, room)


def test_a_name_is_its_choices() -> None:
    first, again, other = (
        [chance.size(1000) for _ in range(30)] for chance in (Chance("1", 8), Chance("1", 8), Chance("2", 8))
    )
    assert first == again != other


def test_sizes_are_within_their_bound_and_meet_edges_of_blocks() -> None:
    chance = Chance("sizes", 8)
    found = {chance.size(300) for _ in range(4000)}
    assert min(found) == 1 and max(found) == 300
    assert {63, 64, 65, 127, 128, 129} <= found
    assert {chance.size(1) for _ in range(20)} == {1}


def test_room_bounds_tokens_and_lets_in_models_widths() -> None:
    small, large = Chance("room", 2**20), Chance("room", 2**30)
    assert max(small.tokens(2**10) for _ in range(500)) <= 2**8
    assert small.tokens(2**40) == 1
    widths = [small.width() for _ in range(500)]
    assert min(widths) == 4 and max(widths) <= 40
    assert {large.width() for _ in range(200)} >= set(WIDTHS)


def test_heads_share_keys_evenly() -> None:
    chance = Chance("heads", 8)
    found = [chance.heads(48) for _ in range(500)]
    assert all(heads % groups == 0 and heads <= 48 for groups, heads in found)
    assert any(groups < heads for groups, heads in found) and any(groups == heads for groups, heads in found)


def test_documents_fill_their_tokens_and_some_are_empty() -> None:
    chance = Chance("cuts, of several", 8)
    found = [chance.cuts(50) for _ in range(300)]
    assert {len(cut) for cut in found} == {chance.documents + 1}
    assert all(cut[0] == 0 and cut[-1] == 50 and list(cut) == sorted(cut) for cut in found)
    assert any(a == b for cut in found for a, b in pairwise(cut))


def test_what_is_absent_is_not_told() -> None:
    chosen = {"T": 3, "state": False, "scale": None, "skip": True, "offsets": (0, 3)}
    assert told("7.1", chosen, ["packed"]) == "7.1: packed T=3 skip offsets=(0,3)"


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_drawn_case_is_the_same_again_and_others_are_others(operator: str) -> None:
    names = [drawn(operator, f"3.{i}").name for i in range(20)]
    assert names == [drawn(operator, f"3.{i}").name for i in range(20)] and len(set(names)) == 20
    first, again = (drawn(operator, "3.1").make(torch.float32, CPU, 0) for _ in range(2))
    assert first.keys() == again.keys()


@pytest.mark.parametrize("operator", OPERATORS)
def test_drawn_cases_show_what_the_operators_own_do(operator: str) -> None:
    spec = SPECS[operator]
    shown = set().union(*(drawn(operator, f"features {i}").features for i in range(300)))
    own = set().union(*(case.features for case in spec.cases))
    left = {"causal top-left", "empty rows", "padded queries", "dropout"}  # which are drawn but not told, but dropout
    assert own - shown <= (left if operator == "softmax" else set())


@pytest.mark.parametrize("operator", OPERATORS)
def test_laws_hold_of_drawn_cases(operator: str) -> None:
    spec = SPECS[operator]
    cases = tuple(drawn(operator, f"laws {i}") for i in range(25))
    candidate = candidate_of(spec, FUNCTIONS[operator], "chunked", "cpu")
    report = examine(replace(spec, cases=cases), candidate, only=("forward", "gradients"), isolated=False)
    assert report.ok and sum(row.cases for row in report.rows) >= 2 * 2 * 25, report.failures
