"""The cases: named once, the same for the same seed, and what they say of themselves is true."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foci.core.spec import Case
from foci.ops.masks import lower
from foci.ops.softmax.cases import CASES
from foci.ops.softmax.spec import SPEC
from tests.ops.softmax.problems import CPU, evaluate


def test_names_are_unique() -> None:
    assert len({problem.name for problem in CASES}) == len(CASES)


def test_one_query_of_many_keys_has_every_option_of_a_decoding_step() -> None:
    made = [(case, case.make(torch.float32, CPU, 0)) for case in CASES]
    shown = [case.features for case, inputs in made if inputs["q"].shape[1] == 1 < inputs["k"].shape[1]]
    assert set().union(*shown) == {"cross", "causal", "gqa", "window", "padding", "bias", "sink"}
    assert {"causal", "cross"} in shown  # also for a function without any option


def test_some_documents_are_longer_than_a_block() -> None:
    offsets = [lower(case.make(torch.float32, CPU, 0).get("mask")).q_offsets for case in CASES]
    assert max(int(cuts.diff().max()) for cuts in offsets if cuts is not None) > 64


@pytest.mark.parametrize("problem", CASES, ids=lambda problem: problem.name)
def test_a_seed_is_a_problem(problem: Case) -> None:
    first, again, other = (problem.make(torch.float32, CPU, seed) for seed in (0, 0, 1))
    assert torch.equal(first["q"], again["q"]) and not torch.equal(first["q"], other["q"])
    for dtype in SPEC.dtypes:
        made = problem.make(dtype, CPU, 0)
        assert {x.dtype for x in made.values() if isinstance(x, Tensor)} == {dtype}
        # The same numbers, rounded.
        assert torch.equal(made["k"].double(), problem.make(torch.float64, CPU, 0)["k"].to(dtype).double())


@pytest.mark.parametrize("problem", CASES, ids=lambda problem: problem.name)
def test_features_are_what_the_arguments_say(problem: Case) -> None:
    inputs = problem.make(torch.float64, CPU, 0)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    mask = lower(inputs.get("mask"))
    said = {
        "gqa": q.shape[2] != k.shape[2],
        "cross": q.shape[1] != k.shape[1],
        "value width": k.shape[3] != v.shape[3],
        "causal": mask.causal_end,
        "causal top-left": mask.causal_start,
        "window": mask.left is not None or mask.right is not None,
        "packed": mask.q_offsets is not None,
        "padding": mask.kv_lengths is not None,
        "padded queries": mask.q_lengths is not None,
        "dense": mask.dense is not None,
        **{name: name in inputs for name in ("bias", "softcap", "sink", "scale", "dropout")},
    }
    for feature, present in said.items():
        assert (feature in problem.features) == present, feature
    masked = evaluate({name: x for name, x in inputs.items() if name != "sink"})["lse"] == -torch.inf
    assert ("empty rows" in problem.features) == bool(masked.any())
