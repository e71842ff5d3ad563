"""Every mistake is wrong somewhere, and none is wrong where it does not apply; the right step is the reference."""

from __future__ import annotations

import pytest
import torch

from foci.core.spec import Mistake
from foci.ops.delta.cases import CASES
from foci.ops.delta.mistakes import MISTAKES, forward, step
from foci.ops.faults import walk
from tests.ops.test_faults import differs

INPUTS = {case.name: case.make(torch.float64, torch.device("cpu"), 0) for case in CASES}
ORDERED = [case.name for case in CASES if "not causal" not in case.features]


@pytest.mark.parametrize("name", ORDERED)
def test_the_step_that_faults_are_made_of_is_right(name: str) -> None:
    for made, right in zip(walk(INPUTS[name], step), forward(INPUTS[name]), strict=True):
        torch.testing.assert_close(made, right)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_it_is_wrong_in_some_case_and_says_so(mistake: Mistake) -> None:
    assert any(differs(mistake, inputs, forward) for inputs in INPUTS.values())
    assert len(mistake.sentence) < 160 and "\n" not in mistake.sentence
    assert ("{" in mistake.sentence) == mistake.fits


def test_names_are_unique() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


def test_few_apply_to_a_plain_case() -> None:
    wrong = {mistake.name for mistake in MISTAKES if differs(mistake, INPUTS["plain"], forward)}
    assert wrong == {
        "beta ignored", "beta not on the erased", "beta not on the value", "beta through a sigmoid", "nothing erased",
        "q normalised", "read before the write", "scale off", "scaled twice", "state not handed on",
        "state transposed", "state without the last token", "unscaled",
    }  # fmt: skip
