"""Problems: what they say of themselves is true, for the same seed in every dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foci.ops.decay.cases import PROBLEMS as LINEAR
from foci.ops.delta.cases import PROBLEMS as DELTA
from foci.ops.recurrent import Problem

CPU = torch.device("cpu")
RANKS = {1: "decay per head", 3: "decay per token", 4: "decay per channel"}


@pytest.mark.parametrize("problem", [*LINEAR, *DELTA], ids=lambda problem: f"{type(problem).__name__} {problem.name}")
def test_features_are_what_the_arguments_say(problem: Problem) -> None:
    case = problem.case
    inputs = case.make(torch.float32, CPU, 0)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    gates, state, offsets = (inputs.get(name) for name in ("log_decay", "state", "offsets"))
    rank = None if gates is None else RANKS[gates.dim()]
    said = {
        **{name: name == rank for name in RANKS.values()},
        "extreme": gates is not None and bool((gates <= -20).any()),
        "gqa": q.shape[2] != v.shape[2],
        "value width": v.shape[3] != k.shape[3],
        "state": state is not None,
        "packed": offsets is not None,
        "scale": "scale" in inputs,
        "strided": not q.is_contiguous() and q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr(),
    }
    for feature, present in said.items():
        assert (feature in case.features) == present, feature
    if offsets is not None:
        assert v.shape[0] == 1 and offsets[-1] == v.shape[1]
    if state is not None:
        assert state.shape == (v.shape[0] if offsets is None else len(offsets) - 1, v.shape[2], k.shape[3], v.shape[3])


@pytest.mark.parametrize("problem", [*LINEAR, *DELTA], ids=lambda problem: f"{type(problem).__name__} {problem.name}")
def test_a_seed_is_a_problem_and_a_dtype_rounds_it(problem: Problem) -> None:
    first, again, other = (problem.case.make(torch.float32, CPU, seed) for seed in (0, 0, 1))
    assert torch.equal(first["v"], again["v"]) and not torch.equal(first["v"], other["v"])
    exact, half = problem.case.make(torch.float64, CPU, 0), problem.case.make(torch.bfloat16, CPU, 0)
    for name, value in exact.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            wide = name == "state" or (name == "log_decay" and not problem.narrow)
            assert half[name].dtype == (torch.float32 if wide else torch.bfloat16), name
    assert torch.equal(half["v"], exact["v"].to(torch.bfloat16))
