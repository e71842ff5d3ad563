"""Problems say what they are; their parts are cases of their own, with which the reference keeps every law."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foci.core.spec import Spec, slices_of
from foci.merge.affine import Affine
from foci.merge.algebra import fold
from foci.ops import SPECS
from foci.ops.decay.cases import PROBLEMS as LINEAR
from foci.ops.decay.spec import SPEC as LINEAR_SPEC
from foci.ops.delta.cases import PROBLEMS as DELTA
from foci.ops.delta.spec import SPEC as DELTA_SPEC
from foci.ops.recurrent import Problem, cut, documents, future, rows, sequences, transition

CPU = torch.device("cpu")
EACH = [*((LINEAR_SPEC, problem) for problem in LINEAR), *((DELTA_SPEC, problem) for problem in DELTA)]
IDS = [f"{spec.name} {problem.name}" for spec, problem in EACH]
each_problem = pytest.mark.parametrize(("spec", "problem"), EACH, ids=IDS)
RANKS = {1: "decay per head", 3: "decay per token", 4: "decay per channel"}


class Counting(TorchDispatchMode):
    """How many numbers all results have together; views have none of their own."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numbers += result.numel() if isinstance(result, Tensor) and result._base is None else 0
        return result


@each_problem
def test_features_are_what_the_arguments_say(spec: Spec, problem: Problem) -> None:
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


@each_problem
def test_a_seed_is_a_problem_and_a_dtype_rounds_it(spec: Spec, problem: Problem) -> None:
    first, again, other = (problem.case.make(torch.float32, CPU, seed) for seed in (0, 0, 1))
    assert torch.equal(first["v"], again["v"]) and not torch.equal(first["v"], other["v"])
    exact, half = problem.case.make(torch.float64, CPU, 0), problem.case.make(torch.bfloat16, CPU, 0)
    for name, value in exact.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            wide = name == "state" or (name == "log_decay" and not problem.narrow)
            assert half[name].dtype == (torch.float32 if wide else torch.bfloat16), name
    assert torch.equal(half["v"], exact["v"].to(torch.bfloat16))


@each_problem
def test_parts_make_the_whole(spec: Spec, problem: Problem) -> None:
    case = problem.case
    inputs = case.make(torch.float64, CPU, 0)
    whole = dict(zip(spec.output_names, spec.reference(**inputs), strict=True))
    for take in (cut, documents, rows):
        before: dict[str, Tensor] = {}
        covered = torch.zeros(whole["out"].shape[:2])
        parts = take(case, inputs)
        for part in parts:
            made = part.case.make(torch.float64, CPU, 0) | {name: before[name] for name in part.resumes}
            before = dict(zip(spec.output_names, spec.reference(**made), strict=True))
            for name, alone in before.items():
                if (place := slices_of(part.place, name)) is not None:
                    torch.testing.assert_close(alone, whole[name][place])
                    covered[place] += name == "out"
        assert not parts or "not causal" in case.features or bool((covered == 1).all())
    assert bool(cut(case, inputs)) == (problem.T > 2)
    assert len(documents(case, inputs)) == sum(
        a < b for a, b in zip(problem.offsets, problem.offsets[1:], strict=False)
    )
    assert len(rows(case, inputs)) == (problem.B if problem.B > 1 else 0)


@each_problem
def test_maps_of_the_parts_make_the_map_of_the_whole(spec: Spec, problem: Problem) -> None:
    inputs = problem.case.make(torch.float64, CPU, 0)
    maps = []
    for part in cut(problem.case, inputs):
        made = {n: x for n, x in part.case.make(torch.float64, CPU, 0).items() if n != "state"}
        maps.append(Affine(spec.reference(**transition(made))[1], spec.reference(**made)[1]))
    if maps:
        whole = fold(maps)
        start = inputs.get("state", torch.zeros_like(whole.offset))
        torch.testing.assert_close(whole.apply(start), spec.reference(**inputs)[1])


@each_problem
def test_the_future_is_changed_and_does_not_matter(spec: Spec, problem: Problem) -> None:
    inputs = problem.case.make(torch.float64, CPU, 0)
    found = future(problem.case, inputs)
    assert (found is None) == (problem.T < 2 or "not causal" in problem.case.features)
    if found is not None:
        assert set(found.place) == {"out"}
        for name in sequences(inputs):
            changed = (found.inputs[name] != inputs[name]).flatten(2).any(-1).any(0)
            assert not changed[: problem.T // 2].any() and changed[problem.T // 2 :].float().mean() > 0.5, name
        before, after = spec.reference(**inputs)[0], spec.reference(**found.inputs)[0]
        assert torch.equal(before[found.place["out"]], after[found.place["out"]])
        assert torch.equal(before, after) == (problem.scale == 0)


@pytest.mark.parametrize("name", ["linear", "delta", "scan", "selective_scan"])
def test_the_gradient_of_a_reference_is_not_of_tokens_squared(name: str) -> None:
    """What its backward makes, in numbers: a slice a token had a gradient as long as the sequence, T of them."""
    spec = SPECS[name]
    sized = spec.probes.sized
    assert sized is not None

    def made(tokens: int) -> int:
        inputs = sized(tokens).make(torch.float64, CPU, 0)
        leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, Tensor) and x.is_floating_point()]
        loss = sum(output.sum() for output in spec.reference(**inputs))
        with Counting() as count:
            torch.autograd.grad(loss, leaves, allow_unused=True)
        return count.numbers

    few, more, most = (made(tokens) for tokens in (100, 200, 300))
    assert most - more == more - few
