"""Every mistake is wrong somewhere, and none is wrong where it does not apply."""

from __future__ import annotations

import pytest
import torch

from foci.core.spec import Mistake
from foci.ops.softmax.cases import CASES
from foci.ops.softmax.mistakes import MISTAKES
from foci.ops.softmax.spec import SPEC

INPUTS = {case.name: case.make(torch.float64, torch.device("cpu"), 0) for case in CASES}
IDS = {"ids": lambda mistake: mistake.name}


def differs(mistake: Mistake, name: str) -> bool:
    torch.manual_seed(0)
    truth = SPEC.reference(**INPUTS[name])
    torch.manual_seed(0)
    made = mistake.compute(INPUTS[name], 0.01) if mistake.fits else mistake.compute(INPUTS[name])
    if made is None:
        return False
    assert [tuple(m.shape) for m in made] == [tuple(t.shape) for t in truth]
    return any(not torch.allclose(m, t, rtol=1e-6, atol=1e-6, equal_nan=True) for m, t in zip(made, truth, strict=True))


@pytest.mark.parametrize("mistake", MISTAKES, **IDS)
def test_it_is_wrong_in_some_case(mistake: Mistake) -> None:
    assert any(differs(mistake, name) for name in INPUTS)


@pytest.mark.parametrize("mistake", MISTAKES, **IDS)
def test_its_sentence_says_what_and_why(mistake: Mistake) -> None:
    assert len(mistake.sentence) < 160 and "\n" not in mistake.sentence
    assert ("{" in mistake.sentence) == mistake.fits


def test_names_are_unique() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("name", ["plain", "cross", "value width"])
def test_few_apply_to_a_plain_case(name: str) -> None:
    wrong = {mistake.name for mistake in MISTAKES if differs(mistake, name)}
    assert wrong <= {"unscaled", "scaled twice", "lse in log2", "lse zeros", "lse exponentiated", "scale off"}


def test_a_fitted_mistake_is_right_at_zero() -> None:
    (scale,) = [mistake for mistake in MISTAKES if mistake.fits]
    torch.testing.assert_close(scale.compute(INPUTS["plain"], 0.0), SPEC.reference(**INPUTS["plain"]))
