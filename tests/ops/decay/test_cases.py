"""The cases: named once, and they cover what the operator promises."""

from __future__ import annotations

import pytest
import torch

from foci.ops.decay.cases import CASES, PROBLEMS, Linear

CPU = torch.device("cpu")


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_features_are_what_the_arguments_say(problem: Linear) -> None:
    inputs = problem.case.make(torch.float32, CPU, 0)
    said = {"bonus": "bonus" in inputs, "not causal": not inputs.get("causal", True)}
    for feature, present in said.items():
        assert (feature in problem.case.features) == present, feature
    if "bonus" in inputs:
        assert inputs["bonus"].shape == (problem.H, problem.K)


def test_some_documents_without_a_state_are_longer_than_a_chunk() -> None:
    packed = [case.make(torch.float32, CPU, 0) for case in CASES if "packed" in case.features]
    assert any("state" not in inputs and inputs["offsets"].diff().max() > 64 for inputs in packed)


def test_every_argument_is_exercised() -> None:
    features = set().union(*(case.features for case in CASES))
    assert features == {
        "decay per head", "decay per token", "decay per channel", "extreme", "gqa", "value width", "state", "packed",
        "scale", "strided", "bonus", "not causal",
    }  # fmt: skip
