"""The cases: named once, the same for the same seed, and what they say of themselves is true."""

from __future__ import annotations

import pytest
import torch

from foci.ops.scan.cases import CASES
from tests.ops.recurrences import CPU


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_features_are_what_the_arguments_say(case) -> None:
    inputs, other = (case.make(torch.float32, CPU, seed) for seed in (0, 1))
    assert not torch.equal(inputs["x"], other["x"])
    said = {
        "state": "state" in inputs,
        "packed": "offsets" in inputs,
        "skip": "skip" in inputs,
        "strided": not inputs["x"].is_contiguous(),
        "extreme": bool((inputs.get("A", inputs.get("log_decay")) == -torch.inf).any()),
    }
    for feature, present in said.items():
        assert (feature in case.features) == present, feature
