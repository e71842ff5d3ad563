"""Exam: each answer once, inputs never spoiled, faults and refusals told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from foci.check.exam import LARGE_CASE_BYTES, Exam, ReferenceTooLarge, cast
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


def test_outputs_survive_the_next_call_with_their_strides() -> None:
    memory = torch.zeros(2, 9, 6)[..., ::2]

    def reuses(x, gate):
        out, total = toy.reference(x, gate)
        return memory.copy_(out) if out.shape == memory.shape else out, total

    found, case = exam(reuses), toy.SPEC.cases[0]
    out = found.forward(case, F32).outputs[0]
    before = out.clone()
    found.forward(toy.SPEC.cases[2], F32)
    assert torch.equal(out, before) and not torch.equal(memory, before) and out.stride() == memory.stride()


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


def test_another_form_of_the_candidate_is_asked_in_its_place() -> None:
    found, case = exam(), toy.SPEC.cases[0]
    doubled = found.attempt(
        found.fresh(case, F32), lambda inputs: tuple(2 * o for o in toy.reference(**inputs))
    ).outputs
    assert doubled is not None and torch.equal(doubled[0], 2 * toy.reference(**found.inputs(case, F32))[0])


def test_too_few_outputs() -> None:
    assert "1 outputs where 2" in str(exam(lambda x, gate: (x,)).forward(toy.SPEC.cases[0], F32).fault)


def test_gradients_by_leaf_and_through_chosen_outputs() -> None:
    found, case = exam(), toy.SPEC.cases[0]
    assert found.true_gradients(case, F32, ("total",))["x"] is None
    assert set(found.gradients(case, F32, ("out",)).gradients or {}) == {"x", "gate"}
    for ask in (found.gradients, found.attempt_gradients):
        assert (ask(case, F32, ("total",)).gradients or {"x": 0})["x"] is None
    zeros = found.gradients(case, F32, ("total",), zeros=True).gradients
    assert zeros is not None and zeros["x"] is not None and not zeros["x"].any()


def test_the_candidate_is_differentiated_by_the_same_numbers_as_the_truth() -> None:
    case = toy.SPEC.cases[0]
    for dtype in (torch.bfloat16, torch.float16, F32):
        for weight in exam().cotangents(case, dtype):
            assert weight.dtype == torch.float64 and torch.equal(weight, weight.to(dtype).double())
            assert weight.abs().max() > 0 and len(weight.unique()) > weight.numel() / 2


def test_the_candidate_is_differentiated_in_the_dtype_and_the_truth_in_float64() -> None:
    seen: list[tuple[torch.dtype, ...]] = []

    def noted(x, gate):
        seen.append((x.dtype, gate.dtype))
        return toy.reference(x, gate)

    found, case, half = exam(noted), toy.SPEC.cases[0], torch.bfloat16
    assert found.gradients(case, half, ("out",)).gradients is not None and seen == [(half, half)]
    truth = found.true_gradients(case, half, ("out",))["x"]
    plain = found.plain_gradients(case, half, ("out",))["x"]
    assert truth is not None and truth.dtype == torch.float64 and plain is not None and plain.dtype == half


def test_memory_for_the_loss_is_not_the_candidate_s_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own is: a fault of it. That of the truth, which the loss is made from, leaves out the case."""

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    found, case = exam(full), toy.SPEC.cases[0]
    assert "OutOfMemoryError" in str(found.gradients(case, F32, ("out",)).fault)
    found = replace(exam(), spec=replace(toy.SPEC, reference=full))
    with pytest.raises(ReferenceTooLarge) as told:
        found.gradients(case, F32, ("out",))
    assert told.value.case == case


def test_gradients_that_are_refused_are_told_unless_the_case_was() -> None:
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            raise NotImplementedError("no backward")

    found, case = exam(lambda x, gate: toy.reference(Refuses.apply(x), gate)), toy.SPEC.cases[0]
    assert found.gradients(case, F32, ("out",)).refused == "no backward"
    assert found.refused == {"gradients of plain": "no backward"}
    found = replace(exam(lambda x, gate: toy.reference(Refuses.apply(x), gate)), refused={"plain": "not at all"})
    assert found.gradients(case, F32, ("out",)).refused and found.refused == {"plain": "not at all"}


def test_one_leaf_alone_and_none_at_all() -> None:
    wants = []

    def noted(x, gate):
        wants.append((x.requires_grad, gate.requires_grad))
        return toy.reference(x, gate)

    found, case = exam(noted), toy.SPEC.cases[0]
    assert set(found.attempt_gradients(case, F32, ("out",), alone="gate").gradients or {}) == {"gate"}
    assert wants == [(False, True)]
    untrained = replace(exam(), spec=replace(toy.SPEC, differentiable=()))
    assert untrained.gradients(case, F32, ("out",)).gradients == {}
    weight = torch.ones((), requires_grad=True)  # its own, of which nobody asks
    own = exam(lambda x, gate: tuple(weight * o for o in toy.reference(x, gate)))
    assert replace(own, spec=untrained.spec).gradients(case, F32, ("out",)).gradients == {}
    detached = exam(lambda x, gate: tuple(o.detach() for o in toy.reference(x, gate)))
    assert detached.gradients(case, F32, ("out",)).gradients == {"x": None, "gate": None}


def test_leaves_are_what_the_spec_differentiates_where_it_is_given() -> None:
    given = {"x": torch.ones(2), "gate": None, "weights": torch.ones(2), "places": torch.ones(2, dtype=torch.int64)}
    assert set(exam().leaves(given)) == {"x"} and not given["weights"].requires_grad


def test_an_lse_of_nothing_has_no_cotangent() -> None:
    case = toy.SPEC.cases[0]
    found = replace(exam(), spec=replace(toy.SPEC, reference=lambda x, gate: toy.reference(x, gate - torch.inf)))
    assert not found.cotangents(case, F32)[1].any() and found.cotangents(case, F32)[0].all()


def test_an_error_is_relative_to_the_truth_and_gradients_too() -> None:
    found, case = exam(), toy.SPEC.cases[0]
    out = found.truth(case, F32)[0]
    assert found.error(case, F32, "out", 0 * out).size == pytest.approx(1.0)
    assert found.error(case, F32, "out", 3 * out).size == pytest.approx(2.0)
    x = found.true_gradients(case, F32, ("out",))["x"]
    assert x is not None and found.gradient_error(case, F32, ("out",), "x", 3 * x, x).size == pytest.approx(2.0)


def test_an_output_of_another_shape_is_a_fault_and_nan_is_not_sound() -> None:
    case = toy.SPEC.cases[0]
    short = exam(lambda x, gate: (toy.reference(x, gate)[0][:, 1:], toy.reference(x, gate)[1]))
    assert "[2, 8, 3]" in (said := str(short.forward(case, F32).fault)) and said.index("[2, 8, 3]") < said.index("9")
    assert short.outputs_without_nan(case, F32) is None
    spoiled = exam(lambda x, gate: (toy.reference(x, gate)[0] * torch.nan, toy.reference(x, gate)[1]))
    assert spoiled.forward(case, F32).outputs is not None and spoiled.outputs_without_nan(case, F32) is None
    assert exam().outputs_without_nan(case, F32) is not None


def test_a_detective_is_asked_of_outputs_and_gradients_and_else_of_the_place() -> None:
    class Knows:
        def output(self, exam, case, dtype, name, got):
            return ("its cause" if name == "out" else ""), f"at {name}, {case.name}"

        def gradient(self, exam, case, dtype, through, leaf, got):
            return f"through {through[0]} to {leaf}", ""

        def with_place(self, sentence, place):
            return f"{sentence} ({place})"

    found, case, got = replace(exam(), locator=Knows()), toy.SPEC.cases[0], torch.ones(1)
    assert found.explain(case, F32, "out", got, lambda: "wrong") == "its cause"
    assert found.explain(case, F32, "total", got, lambda: "wrong") == "wrong (at total, plain)"
    assert found.explain(case, F32, "x", got, lambda: "wrong", ("out",)) == "through out to x"
    assert found.explain(case, F32, "out", None, lambda: "absent") == "absent"
    assert exam().explain(case, F32, "out", got, lambda: "wrong") == "wrong"


def test_true_gradients_of_another_loss() -> None:
    found, case = exam(), toy.SPEC.cases[0]
    weights = dict(zip(found.names, found.cotangents(case, F32), strict=True))
    got, expected = found.weighted(case, F32, weights), found.true_gradients(case, F32, ("out", "total"))
    assert all(torch.equal(got[leaf], expected[leaf]) for leaf in ("x", "gate"))
    assert found.weighted(case, F32, {"total": weights["total"]})["x"] is None
    spec = replace(toy.SPEC, reference=lambda x, gate: (toy.reference(x, gate)[0], toy.reference(x, gate)[1].detach()))
    assert torch.equal(replace(exam(), spec=spec).weighted(case, F32, weights)["x"], expected["x"])


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
    assert [case.name for case in found.covering_cases(lambda case: True)] == ["short", "other"]
    assert [case.name for case in found.covering_cases(lambda case: case.name != "short")] == ["again", "other"]
    assert [case.name for case in found.covering_cases(lambda case: case.name == "both")] == ["both"]
    bare = Exam(replace(toy.SPEC, cases=(toy.case("bare"), toy.case("as bare"))), toy.candidate(), CPU, (F32,))
    assert [case.name for case in bare.covering_cases(lambda case: True)] == ["bare"]


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


@pytest.mark.parametrize(("free", "large"), [(LARGE_CASE_BYTES, True), (LARGE_CASE_BYTES - 1, False)])
def test_large_cases_are_asked_on_a_gpu_with_room(monkeypatch: pytest.MonkeyPatch, free: int, large: bool) -> None:
    case = replace(toy.SPEC.cases[0], name="wide")
    found = replace(exam(), spec=replace(toy.SPEC, large=(case,)))
    assert found.problems == toy.SPEC.cases  # a CPU is not asked
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    found = replace(found, device=torch.device("cuda"))
    assert found.problems == toy.SPEC.cases + (case,) * large
    assert ("10 GiB" in found.refused.get("wide", "")) is not large
