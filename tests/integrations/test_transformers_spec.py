"""The Spec of transformers attention functions: right ones pass, planted faults are told apart."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager

from foci.check.run import LAWS, examine
from foci.core.spec import Candidate, Case, WrongReturn
from foci.integrations.transformers import attend
from foci.integrations.transformers_spec import MISTAKES, SPEC, adapt
from tests.integrations.transformers_models import relative

CPU = torch.device("cpu")
BUDGET = 1e-5


def error(candidate: Candidate, case: Case, dtype: torch.dtype = torch.float32) -> float:
    inputs = case.make(dtype, CPU, 0)
    (got,), (expected,) = candidate.call(inputs), SPEC.reference(**inputs)
    return relative(got, expected) if got.shape == expected.shape else float("inf")


@pytest.mark.parametrize("case", SPEC.cases, ids=lambda case: case.name)
def test_ours_meets_every_case(case: Case) -> None:
    assert not adapt(attend).refuses(case)
    assert error(adapt(attend), case) < BUDGET
    assert error(adapt(attend), case, torch.float64) < 1e-12


@pytest.mark.parametrize("case", SPEC.cases, ids=lambda case: case.name)
def test_ours_has_every_gradient(case: Case) -> None:
    gradients: list[dict[str, Tensor]] = []
    for call in (adapt(attend).call, lambda inputs: SPEC.reference(**inputs)):
        inputs = case.make(torch.float64, CPU, 0)
        wanted = {n: inputs[n].requires_grad_() for n in SPEC.differentiable if isinstance(inputs.get(n), Tensor)}
        out = call(inputs)[0]
        probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        gradients.append(
            dict(zip(wanted, torch.autograd.grad((out * probe).sum(), list(wanted.values())), strict=True))
        )
    ours, theirs = gradients
    assert {name: relative(ours[name], theirs[name]) < 1e-10 for name in theirs} == dict.fromkeys(theirs, True)


def test_transformers_own_functions_pass_where_they_claim_to() -> None:
    for case in SPEC.cases:
        if not case.features & {"s_aux", "softcap"}:
            assert error(adapt(sdpa_attention_forward), case) < BUDGET, case.name
        inputs = case.make(torch.float32, CPU, 0)
        # Eager functions add every mask, and their models always make one.
        if not (case.features & {"s_aux", "position_bias"} or inputs["attention_mask"] is None):
            if not inputs["attention_mask"].is_floating_point():
                inputs["attention_mask"] = torch.where(inputs["attention_mask"], 0.0, -1e9)
            got, expected = adapt(gemma2_eager).call(inputs)[0], SPEC.reference(**inputs)[0]
            assert relative(got, expected) < BUDGET, case.name


def test_sdpa_of_transformers_drops_sinks_in_silence() -> None:
    """Why the case is there: models with sinks declare that sdpa is not for them, but the function is silent."""
    case = next(case for case in SPEC.cases if case.name == "sinks")
    dropped = next(mistake for mistake in MISTAKES if mistake.name == "sinks ignored")
    inputs = case.make(torch.float32, CPU, 0)
    assert error(adapt(sdpa_attention_forward), case) > 0.05
    assert relative(adapt(sdpa_attention_forward).call(inputs)[0], dropped.compute(inputs)[0]) < BUDGET


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_seen_and_is_no_other(mistake: object) -> None:
    """Some case gives it away, and there no other mistake explains the same output."""
    alone = False
    for case in SPEC.cases:
        inputs = case.make(torch.float64, CPU, 0)
        wrong = mistake.compute(inputs)
        if wrong is None:
            continue
        right = SPEC.reference(**inputs)[0]
        if wrong[0].shape == right.shape:
            assert relative(wrong[0], right) > 1e-3, case.name
        others = [other.compute(inputs) for other in MISTAKES if other is not mistake]
        alone = alone or not any(
            other is not None and other[0].shape == wrong[0].shape and torch.allclose(other[0], wrong[0])
            for other in others
        )
    assert alone


def test_a_signature_says_what_is_tested() -> None:
    def narrow(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None): ...  # type: ignore

    candidate = adapt(narrow, name="mine")
    assert candidate.name == "mine"
    assert candidate.not_tested == ("is_causal", "sliding_window", "s_aux", "position_bias", "dropout > 0")
    refused = {case.name: candidate.refuses(case) for case in SPEC.cases}
    assert refused["sinks"] == ["its signature does not name s_aux"]
    assert refused["softcap"] == []


@pytest.mark.parametrize(
    ("returned", "what"), [(torch.ones(2, 3), "one Tensor"), ((torch.ones(2, 3),), "a tuple of 1")]
)
def test_a_wrong_arity_is_named(returned: object, what: str) -> None:
    candidate = adapt(lambda module, query, key, value, attention_mask, **options: returned)
    with pytest.raises(WrongReturn, match=f"it returns {what}; models unpack"):
        candidate.call(SPEC.cases[0].make(torch.float32, CPU, 0))


@pytest.mark.parametrize("case", SPEC.cases, ids=lambda case: case.name)
def test_probes_ask_what_the_reference_answers(case: Case) -> None:
    inputs = case.make(torch.float64, CPU, 0)
    out = SPEC.reference(**inputs)[0]
    for part in SPEC.probes.rows(case, inputs):
        alone = SPEC.reference(**part.case.make(torch.float64, CPU, 0))[0]
        assert torch.allclose(alone, out[part.place])
    future = SPEC.probes.future(case, inputs)
    assert (future is None) == ("causal" not in case.features or inputs["query"].shape[2] == 1)
    if future is not None:
        later = SPEC.reference(**future.inputs)[0]
        assert torch.allclose(later[future.place], out[future.place])
        assert not torch.allclose(later, out)
        if (wrong := MISTAKES[0].compute(future.inputs)) is not None:
            assert not torch.allclose(wrong[0][future.place], MISTAKES[0].compute(inputs)[0][future.place])


def test_sized_cases_have_that_many_tokens() -> None:
    inputs = SPEC.probes.sized(17).make(torch.float32, CPU, 0)
    assert inputs["query"].shape[2] == inputs["key"].shape[2] == 17


class Planted:
    """Functions with one fault each, as people write them."""

    def no_mask_means_bidirectional(module, query, key, value, attention_mask, **options):  # type: ignore
        everything = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)[None, None]
        return attend(module, query, key, value, everything if attention_mask is None else attention_mask, **options)

    def heads_before_tokens(*tensors, **options):  # type: ignore
        return attend(*tensors, **options)[0].transpose(1, 2), None

    def heads_interleaved(module, query, key, value, attention_mask, **options):  # type: ignore
        key, value = (x.repeat(1, query.shape[1] // x.shape[1], 1, 1) for x in (key, value))
        return attend(module, query, key, value, attention_mask, **options)

    def scale_ignored(*tensors, scaling=None, **options):  # type: ignore
        return attend(*tensors, **options)

    def mask_ignored(module, query, key, value, attention_mask, **options):  # type: ignore
        inputs = {"query": query, "key": key, "value": value, "attention_mask": None}
        return SPEC.reference(module, **inputs, **options)[0], None

    def mask_ignored_by_one_query(module, query, key, value, attention_mask, **options):  # type: ignore
        return attend(module, query, key, value, None if query.shape[2] == 1 else attention_mask, **options)

    def one_tensor(*tensors, **options):  # type: ignore
        return attend(*tensors, **options)[0]

    def sinks_ignored(*tensors, s_aux=None, **options):  # type: ignore
        return attend(*tensors, **options)

    def softcap_ignored(*tensors, softcap=None, **options):  # type: ignore
        return attend(*tensors, **options)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("no_mask_means_bidirectional", "without a mask it attends to the future"),
        ("heads_before_tokens", "heads before tokens"),
        ("heads_interleaved", "reads key head h % G"),
        ("scale_ignored", r"divides by sqrt\(K\) whatever `scaling` says"),
        ("mask_ignored", "the mask is ignored"),
        ("mask_ignored_by_one_query", "the mask is ignored"),
        ("one_tensor", "it returns one Tensor; models unpack"),
        ("sinks_ignored", "`s_aux` is accepted and ignored"),
        ("softcap_ignored", "`softcap` is accepted and ignored"),
    ],
)
def test_the_checker_names_a_planted_fault(fault: str, named: str) -> None:
    report = examine(SPEC, adapt(getattr(Planted, fault)), only=["forward"], dtypes=(torch.float32,), isolated=False)
    assert report.exit_code == 1
    assert any(re.search(named, failure.sentence) for failure in report.failures)


def test_the_checker_finds_nothing_wrong_with_ours() -> None:
    slow = ("custom ops", "compiled = eager", "graphs over six lengths")
    laws = [law.name for law in LAWS if law.name not in slow]
    report = examine(SPEC, adapt(attend, name="foci"), only=laws, isolated=False)
    assert report.failures == ()
    assert report.ok
