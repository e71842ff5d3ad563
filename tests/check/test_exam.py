"""Exam: each answer once, inputs never spoiled, faults and refusals told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from foci.check.exam import ROOM, Exam, cast
from foci.core.errors import Unsupported
from foci.core.spec import WrongReturn
from tests.check import toy

CPU, F32 = torch.device("cpu"), torch.float32


def exam(function=toy.reference, **options) -> Exam:
    return Exam(toy.SPEC, toy.candidate(function, **options), CPU, (F32,))


def test_the_candidate_is_called_once_for_an_answer() -> None:
    calls = []

    def counts(x, gate):
        calls.append(1)
        return toy.reference(x, gate)

    found = exam(counts)
    case = toy.SPEC.cases[0]
    assert found.forward(case, F32) is found.forward(case, F32)
    assert len(calls) == 1


def test_inputs_survive_a_call_that_spoils_them() -> None:
    def spoils(x, gate):
        result = toy.reference(x, gate)
        x.zero_()
        return result

    found = exam(spoils)
    case = toy.SPEC.cases[0]
    found.forward(case, F32)
    assert found.inputs(case, F32)["x"].any()


def test_the_truth_is_float64_of_the_rounded_inputs() -> None:
    found, case = exam(), toy.SPEC.cases[0]
    assert found.truth(case, torch.bfloat16)[0].dtype == torch.float64
    assert found.declared(case, torch.bfloat16)[0].dtype == torch.bfloat16
    rounded = found.inputs(case, torch.bfloat16)
    assert torch.equal(found.truth(case, torch.bfloat16)[0], toy.reference(*(v.double() for v in rounded.values()))[0])


def test_the_generator_is_put_back() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    exam(lambda x, gate: toy.reference(x + 0 * torch.rand(1), gate)).forward(toy.SPEC.cases[0], F32)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("error", "fault", "refused"),
    [
        (Unsupported("toy", ["no such shape", "nor dtype"]), None, "no such shape; nor dtype"),
        (NotImplementedError("not on CPU"), None, "not on CPU"),
        (RuntimeError("size mismatch\nlong tail"), "forward raised RuntimeError: size mismatch", None),
        (WrongReturn("it returns nonsense"), "it returns nonsense", None),
    ],
)
def test_faults_and_refusals(error: Exception, fault: str | None, refused: str | None) -> None:
    def raises(x, gate):
        raise error

    found = exam(raises)
    forward = found.forward(toy.SPEC.cases[0], F32)
    assert (forward.outputs, forward.fault, forward.refused) == (None, fault, refused)
    assert found.refused.get("plain") == refused


def test_too_few_outputs() -> None:
    assert "1 outputs where 2" in str(exam(lambda x, gate: (x,)).forward(toy.SPEC.cases[0], F32).fault)


def test_gradients_by_leaf_and_through_chosen_outputs() -> None:
    found, case = exam(), toy.SPEC.cases[0]
    assert found.true_gradients(case, F32, ("total",))["x"] is None
    assert set(found.gradients(case, F32, ("out",)).gradients or {}) == {"x", "gate"}


def test_the_candidate_is_differentiated_by_the_same_numbers_as_the_truth() -> None:
    case = toy.SPEC.cases[0]
    for dtype in (torch.bfloat16, torch.float16, F32):
        for weight in exam().cotangents(case, dtype):
            assert weight.dtype == torch.float64 and torch.equal(weight, weight.to(dtype).double())
            assert weight.abs().max() > 0 and len(weight.unique()) > weight.numel() / 2


def test_modules_are_leaves_too_and_are_cast() -> None:
    linear = nn.Linear(2, 2)
    assert set(exam().leaves({"site": linear, "x": torch.ones(2)})) == {"site.weight", "site.bias", "x"}
    nested = cast({"a": (torch.ones(1), torch.ones(1, dtype=torch.int32)), "m": nn.Linear(1, 1)}, torch.float64)
    assert nested["a"][0].dtype == torch.float64 and nested["a"][1].dtype == torch.int32
    assert nested["m"].weight.dtype == torch.float64


def test_few_cases_show_every_feature_the_smallest_first() -> None:
    cases = (
        toy.case("long", "a", B=1, T=40), toy.case("short", "a", B=5, T=4), toy.case("again", "a", B=6, T=4),
        toy.case("other", "b", B=1, T=30), toy.case("both", "a", "b", B=1, T=50),
    )  # fmt: skip
    found = Exam(replace(toy.SPEC, cases=cases), toy.candidate(), CPU, (F32,))
    assert [case.name for case in found.few(lambda case: True)] == ["short", "other"]
    assert [case.name for case in found.few(lambda case: case.name != "short")] == ["again", "other"]
    assert [case.name for case in found.few(lambda case: case.name == "both")] == ["both"]


def test_a_yardstick_is_computed_only_where_it_is_the_budget() -> None:
    calls = []

    def plain(x, gate):
        calls.append(x.dtype)
        return toy.plain(x, gate)

    case, half = toy.SPEC.cases[0], torch.bfloat16
    for recurrent, expected in ((True, []), (False, [half, half])):
        found = Exam(replace(toy.SPEC, plain=plain, recurrent=recurrent), toy.candidate(), CPU, (F32,))
        for dtype in (F32, half):
            got = found.forward(case, dtype).outputs
            assert found.error(case, dtype, "out", got[0]).size < 1e-2
            truth = found.true_gradients(case, dtype, ("out",))["x"]
            assert found.gradient_error(case, dtype, ("out",), "x", truth, truth).ok
        assert calls == expected


def test_a_gradient_that_cancels_is_measured_on_what_is_not_0_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key of many that a single query sees: all other keys' and values' gradients say nothing of sizes."""
    found, case, beside = exam(), toy.SPEC.cases[0], torch.zeros(10_000, dtype=torch.float64)
    beside[0] = 1.0
    zero = torch.zeros(8, dtype=torch.float64)
    monkeypatch.setattr(found, "true_gradients", lambda *_: {"x": zero, "gate": beside})
    assert found.gradient_error(case, F32, ("out",), "x", zero + 1e-6, zero).ok
    assert not found.gradient_error(case, F32, ("out",), "x", zero + 2e-5, zero).ok


@pytest.mark.parametrize(("free", "large"), [(ROOM, True), (ROOM - 1, False)])
def test_large_cases_are_asked_on_a_gpu_with_room(monkeypatch: pytest.MonkeyPatch, free: int, large: bool) -> None:
    case = replace(toy.SPEC.cases[0], name="wide")
    found = replace(exam(), spec=replace(toy.SPEC, large=(case,)))
    assert found.problems == toy.SPEC.cases  # a CPU is not asked
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    found = replace(found, device=torch.device("cuda"))
    assert found.problems == toy.SPEC.cases + (case,) * large
    assert ("10 GiB" in found.refused.get("wide", "")) is not large
