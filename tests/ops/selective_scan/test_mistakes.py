"""Every mistake is wrong somewhere, and none is wrong where it does not apply."""

from __future__ import annotations

import pytest
import torch

from foci.core.spec import Mistake
from foci.ops.selective_scan.cases import CASES
from foci.ops.selective_scan.mistakes import MISTAKES, forward
from tests.ops.recurrences import CPU
from tests.ops.test_faults import differs

INPUTS = {case.name: case.make(torch.float64, CPU, 0) for case in CASES}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_it_is_wrong_in_some_case_and_says_so(mistake: Mistake) -> None:
    assert any(differs(mistake, inputs, forward) for inputs in INPUTS.values())
    assert len(mistake.sentence) < 160 and "\n" not in mistake.sentence


def test_names_are_unique() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


def test_few_apply_to_a_plain_case() -> None:
    silent = {mistake.name for mistake in MISTAKES if not differs(mistake, INPUTS["plain"], forward)}
    assert silent == {"state ignored", "documents ignored", "skip ignored", "skip of 1"}
