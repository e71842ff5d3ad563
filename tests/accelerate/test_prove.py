"""Proof: a right backend passes, a planted wrong one is caught in outputs and gradients; padding is no result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from foci import Causal, Dense, Lengths, attention
from foci.accelerate import prove, zoo
from foci.accelerate.calls import arguments, one_head
from foci.accelerate.prove import (
    Problem,
    Result,
    Row,
    compare_results,
    differentiate,
    evaluating,
    max_error,
    max_gradient_error,
    prove_model,
    prove_site,
    settled,
    worst,
)
from foci.accelerate.run import Refused, accelerate
from foci.accelerate.sites import Site
from foci.integrations.diffusers import install
from foci.nn import Cache, DeltaNet
from foci.nn.parts import l2norm
from foci.ops.delta import call as delta
from foci.ops.softmax import aten
from foci.ops.softmax.call import Call, bind


def site(dtype: torch.dtype = torch.float32, **given: object) -> Site:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 4, 8, generator=generator).to(dtype) for _ in range(3))
    return Site("attn", "Attention", "Block", "softmax", ((bind(q, k, v, **given), 1),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["aten", "chunked"])
def test_right_backend_passes(dtype: torch.dtype, backend: str) -> None:
    rows = prove_site(site(dtype), backend)
    assert [row.what for row in rows] == ["out", "lse", *(f"gradient of {name}" for name in "qkv")]
    assert all(row.ok for row in rows), rows
    most = 2e-2 if dtype == torch.bfloat16 else 2e-4
    assert all(row.budget <= most for row in rows), rows


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mask": Causal() & Lengths(torch.tensor([5, 9]))},
        {"bias": torch.randn(2, 4, 9, 9), "sink": torch.randn(4)},
        {"bias": torch.randn(4, 1, 9), "mask": Dense(torch.rand(2, 1, 9, 9) > 0.2)},
    ],
)
def test_a_large_call_is_proved_on_one_head(given: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    call = site(**given).calls[0][0]
    whole = attention(**arguments(call), backend="reference")
    part = attention(**arguments(one_head(call)), backend="reference")
    torch.testing.assert_close(part, whole[:1, :, :1])
    monkeypatch.setattr(prove, "_MOST_ENTRIES", 10)
    rows = prove_site(site(**given), "chunked")
    assert {row.against for row in rows} == {"float64, one head"} and all(row.ok for row in rows)


@pytest.mark.parametrize("returned", [False, True])
def test_gradients_are_those_of_what_a_call_returns(returned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a state, too, if it is returned. Where gates forget all, the last token's would be all of beta's."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 8, generator=generator).bfloat16() for _ in range(3))
    beta, gates = torch.rand(1, 9, 2).bfloat16(), torch.full((1, 9, 2), -30.0)
    call = delta.bind(q, l2norm(k), v, beta, log_decay=gates, return_state=returned)
    seen: list[torch.Tensor] = []
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda outs, dys: seen.extend(dys) or backward(outs, dys))
    rows = prove_site(Site("delta", "Net", "Block", "delta_rule", ((call, 1),)), "chunked")
    assert all(row.ok for row in rows) and {"out", "state", "gradient of beta"} < {row.what for row in rows}
    assert len(seen) == 3 * (1 + returned)
    assert all(torch.equal(dy, dy.bfloat16().to(dy)) for dy in seen)


def test_a_log_sum_exp_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is -inf where a query sees no key."""
    seen: list[torch.Tensor] = []
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda outs, dys: seen.extend(outs) or backward(outs, dys))
    rows = prove_site(site(mask=Lengths(torch.tensor([0, 9]))), "chunked")
    assert all(row.ok for row in rows) and [out.shape for out in seen] == [(2, 9, 4, 8)] * 3


def wrong_forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = right_forward(call._replace(scale=call.scale * 1.001))
    return out, lse


def wrong_backward(*args: object) -> tuple[torch.Tensor | None, ...]:
    dq, dk, dv, *rest = right_backward(*args)
    return dq, None if dk is None else dk * 1.001, dv, *rest


right_forward, right_backward = aten.forward, aten.backward


def test_a_planted_scale_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "forward", wrong_forward)
    missed = {row.what for row in prove_site(site(), "aten") if not row.ok}
    assert {"out", "lse"} <= missed


@pytest.mark.parametrize("name", ["bert", "pixart"])
def test_a_planted_gradient_refuses_the_plan_and_restores_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = zoo.load(name)
    with torch.no_grad():
        before = subject.model(**subject.inputs)[0]
    owned = [getattr(m, "processor", None) or getattr(m, "config", None) for m in subject.model.modules()]
    monkeypatch.setattr(aten, "backward", wrong_backward)
    with pytest.raises(Refused, match=r"is refused and the model restored") as refused:
        accelerate(subject.model, subject.inputs, compile="off", name=name)
    monkeypatch.undo()
    assert {row.what for row in refused.value.rows if not row.ok} >= {"gradient of k", "gradients"}
    now = [getattr(m, "processor", None) or getattr(m, "config", None) for m in subject.model.modules()]
    assert all(a is b for a, b in zip(owned, now, strict=True))
    assert not any(parameter.grad is not None for parameter in subject.model.parameters())
    with torch.no_grad():
        assert torch.equal(subject.model(**subject.inputs)[0], before)


def test_gradients_that_are_missing_or_zero_but_for_rounding() -> None:
    one, tiny = torch.ones(4), torch.full((4,), 1e-17)
    exact = {"a": one, "b": tiny}
    assert max_gradient_error({"a": one, "b": -tiny}, exact, exact) < 1e-15
    assert max_gradient_error({"a": one, "b": one * 1e-4}, {"a": one, "b": one * 2e-4}, exact) == pytest.approx(1e-4)
    assert max_gradient_error({"a": one, "b": None}, {"a": one, "b": one}, exact) == float("inf")
    assert max_gradient_error({"a": one * 1.1}, {"a": one}, {"a": one}) == pytest.approx(0.1, rel=1e-5)
    assert max_error([one], [one, one]) == float("inf")
    assert not Row("a", "out", "float64", float("nan"), 1.0).ok


def test_what_is_not_a_number_is_never_equal() -> None:
    one, nan = torch.ones(4), torch.full((4,), float("nan"))
    assert (
        max_error([one, nan], [one, nan])
        == max_error([one, one], [one, nan])
        == max_error([one, nan], [one, one])
        == float("inf")
    )
    for ours, truth in ((one, nan), (nan, nan), (nan, one)):
        assert max_gradient_error({"a": one, "b": ours}, {"a": one, "b": truth}, {"a": one, "b": truth}) == float("inf")


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_an_original_that_is_not_finite_forgives_nothing(broken: float) -> None:
    truth = Result([torch.ones(4)], {"a": torch.ones(4)}, "float64")
    original = Result([torch.tensor([1.0, 1.0, 1.0, broken])], {"a": torch.tensor([broken, 1.0, 1.0, 1.0])})
    ours = Result([torch.zeros(4)], {"a": torch.zeros(4)})
    assert not any(row.ok for row in compare_results(ours, original, truth, "original"))
    assert truth.finite and not original.finite


@pytest.mark.parametrize("kind", ["outputs", "gradients"])
def test_what_is_not_finite_in_the_original_is_left_out_and_counted(kind: str) -> None:
    right = torch.arange(1.0, 5.0)
    half = right.clone()
    half[0] = torch.inf

    def result(x: torch.Tensor) -> Result:
        return Result([x], {"w": right}) if kind == "outputs" else Result([right], {"w": x, "gone": None})

    rows = compare_results(result(half), result(half), result(right), "original")
    assert all(row.ok and row.budget < 1 for row in rows)
    assert [row.left_out for row in rows] == ([1, 1, 0, 0] if kind == "outputs" else [0, 0, 1, 1])
    assert rows[0 if kind == "outputs" else 2].text.endswith("but 1 numbers, not finite in the original")
    for place, value in ((1, 2.5), (1, torch.nan), (0, 7.0)):
        ours = half.clone()
        ours[place] = value
        found = compare_results(result(ours), result(half), result(right), "original")
        assert all(row.ok for row in found) is (place == 0)
    assert not all(row.ok for row in compare_results(result(half), result(right), result(right), "original"))


@pytest.mark.parametrize("kind", ["output", "gradients"])
def test_where_no_number_of_the_original_is_finite_nothing_is_proved(kind: str) -> None:
    right, lost = torch.ones(4), torch.full((4,), torch.nan)
    original = Result([lost], {"w": right}) if kind == "output" else Result([right], {"w": lost, "gone": None})
    truth = Result([right], {"w": right, "gone": None}, "float64")
    ours = Result(original.outputs, {"w": original.gradients["w"], "gone": None})
    rows = compare_results(ours, original, truth, "original")
    assert [row.what for row in rows if not row.ok] == [kind, kind]
    assert "is inf from original, budget 1e-05 but 4 numbers, not finite in the original" in str(Refused("it", rows))


def test_each_row_is_held_against_what_it_names() -> None:
    """Ours is the original to the last bit, which is 1 in 1000 from the truth; ours may be thrice, or twice, as far."""
    right = torch.ones(4, dtype=torch.float64)
    truth, near = Result([right], {"a": right, "b": 2 * right}, "float64"), right * 1.001
    same = Result([near], {"a": near, "b": 2 * near})
    for trained in (True, False):
        rows = compare_results(same, same, truth, "original", trained=trained)
        named = [(row.what, row.against) for row in rows]
        assert named == [
            (what, name) for what in ("output", "gradients")[: 1 + trained] for name in ("original", "float64")
        ]
        for row in rows:
            assert row.error == pytest.approx(0.0 if row.against == "original" else 1e-3)
            assert row.budget == pytest.approx(3e-3 if row.against == "original" else 2e-3)
    assert all(
        row.budget == 1e-5 and row.against == "original" for row in compare_results(same, same, None, "original")
    )


def test_another_shape_is_infinitely_far_also_where_the_original_overflows() -> None:
    right = torch.arange(1.0, 5.0)
    lost = right.clone()
    lost[0] = torch.inf
    truth, original = (Result([x], {"a": x}, name) for x, name in ((right, "float64"), (lost, "")))
    for ours in (right[:3], right[:1], right[None].expand(2, 4)):
        rows = compare_results(Result([ours], {"a": lost}), original, truth, "original")
        assert [row.error for row in rows if row.what == "output"] == [torch.inf] * 2


def test_a_gradient_must_be_there_and_only_an_ill_conditioned_output_is_forgiven() -> None:
    """At most twice what the plain computation misses by, where ours missed its own budget; no log-sum-exp ever."""
    truth = torch.ones(4, dtype=torch.float64)

    def judge(*given: torch.Tensor | None, log: bool = False) -> tuple[float, float]:
        error = prove._judge(*given, torch.float32, log=log, recurrent=False)
        return error.size, error.budget

    assert judge(None, None, None) == judge(None, None, truth) == (0.0, 1e-5)
    for missing in ((None, truth, truth), (truth, None, truth), (truth.clone(), truth, None)):
        assert judge(*missing) == (float("inf"), 1e-5)
    assert judge(truth * 1.001, truth, truth * 1.002) == pytest.approx((1e-3, 4e-3))
    assert judge(truth, truth, truth * 1.002) == pytest.approx((0.0, 1e-5))
    assert judge(truth * 1.001, truth, truth * torch.nan) == pytest.approx((1e-3, 1e-5))
    assert judge(truth * 1.001, truth, truth * 1.002, log=True)[1] < 1e-3
    half = prove._judge(truth * 1.004, truth, truth * 1.003, torch.bfloat16, log=False, recurrent=False)
    assert not half.ok and half.budget == pytest.approx(3e-3)


def test_the_worst_row_is_the_nearest_to_its_budget() -> None:
    rows = [Row("a", "out", "float64", error, budget) for error, budget in ((1e-6, 1e-5), (5e-3, 1.0), (0.0, 1e-9))]
    assert worst(rows, "out") is rows[0] and worst(rows, "gradient") is None
    unclear = Row("a", "out", "float64", float("nan"), 1.0)
    assert worst([*rows, unclear], "out") is unclear


def test_a_plain_computation_that_is_not_finite_forgives_nothing() -> None:
    truth, plain = torch.arange(1.0, 5.0).double(), torch.tensor([1.0, 2.0, 3.0, torch.nan])
    for ours, right in ((truth.float(), True), (truth.float() + 1, False), (plain, False)):
        assert prove._judge(ours, truth, plain, torch.float32, log=False, recurrent=False).ok is right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "LlamaForCausalLM"])
def test_what_has_no_float64_is_held_against_float32_in_half_precision(name: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2} if name.startswith("Mixtral") else {}
    config = cls.config_class(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, **experts,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = cls(config).eval()
    zoo.randomize(model)
    ids = torch.arange(14).view(2, 7)
    inputs = {"input_ids": ids} if experts else {"input_ids": ids, "attention_mask": (ids != 0).long()}
    accelerated = accelerate(model.to(dtype), inputs, compile="off")
    accelerated.restore()
    whole = [row["against"] for row in accelerated.plan.proof if row["where"] == "whole model"]
    alone = "float32" if experts else "float64"  # eager's gradients alone are NaN there
    assert whole == [*["original", "float32"] * 2, "original", alone]


def test_a_mask_of_floats_is_proved_on_the_backend_of_the_plan() -> None:
    subject = zoo.load("unet")
    text = subject.inputs["encoder_hidden_states"]
    masked = {
        **subject.inputs,
        "encoder_attention_mask": (torch.arange(text.shape[1]) < 5).float().expand(text.shape[:2]),
    }
    names = [name.removesuffix(".processor") for name in subject.model.attn_processors]
    rows = prove_model(Problem(subject.model, masked), lambda: install(subject.model, dict.fromkeys(names, "aten")))
    assert all(row.ok for row in rows), rows
    gradients = differentiate(Problem(subject.model, masked)).gradients
    assert "input encoder_hidden_states" in gradients and "input encoder_attention_mask" not in gradients


@pytest.mark.parametrize("trained", [False, True])
def test_a_mask_that_requires_a_gradient_has_it_proved(trained: bool) -> None:
    """It was passed by as one that nobody trains, whatever foci made of it."""
    subject = zoo.load("bert")
    B, T = subject.inputs["input_ids"].shape
    mask = torch.randn(B, 1, T, T).requires_grad_(trained)
    gradients = differentiate(Problem(subject.model, subject.inputs | {"attention_mask": mask})).gradients
    assert ("input attention_mask" in gradients) == trained
    assert not trained or gradients["input attention_mask"].any()
    assert mask.grad is None


@pytest.mark.parametrize("name", ["llama", "bytes-lm"])
def test_a_cache_among_the_inputs_is_the_same_for_every_call(name: str) -> None:
    subject = zoo.load(name)
    ids = subject.inputs["input_ids"]
    with torch.no_grad():
        cache = subject.model(ids[:, :-3], use_cache=True).past_key_values
    seen = cache.get_seq_length()
    step = {"input_ids": ids[:, -3:], "past_key_values": cache}
    accelerate(subject.model, step, compile="off").restore()
    assert cache.get_seq_length() == seen == ids.shape[1] - 3


def test_so_is_one_of_foci_s_own_layers() -> None:
    cache, inputs = Cache(), {"hidden": torch.randn(1, 3, 16)}
    problem = Problem(DeltaNet(16, 2), inputs | {"cache": cache})
    first, again = problem.run(), problem.run()
    assert torch.equal(first, again) and cache.seen == 0
    assert problem.run(inputs=inputs).equal(first)


def test_so_is_a_cache_in_a_mapping_among_the_inputs() -> None:
    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, options: dict[str, Any]) -> Any:
            return self.model(input_ids, **options)

    subject = zoo.load("llama")
    ids = subject.inputs["input_ids"]
    with torch.no_grad():
        cache = subject.model(ids[:, :-3], use_cache=True).past_key_values
    seen = cache.get_seq_length()
    accelerate(
        Wrapped(subject.model), {"input_ids": ids[:, -3:], "options": {"past_key_values": cache}}, compile="off"
    ).restore()
    assert cache.get_seq_length() == seen


def test_a_cache_that_holds_a_graph_is_refused() -> None:
    subject = zoo.load("llama")
    ids = subject.inputs["input_ids"]
    step = {"input_ids": ids[:, -3:], "past_key_values": subject.model(ids[:, :-3]).past_key_values}
    with pytest.raises(ValueError, match=r"past_key_values of example_inputs is a DynamicCache that cannot be copied"):
        accelerate(subject.model, step, compile="off")


def test_padding_is_no_result() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    problem = Problem(nn.Identity(), {"attention_mask": mask})
    (kept,) = problem.results({"last_hidden_state": torch.randn(2, 3, 5)})
    assert kept.shape == (4, 5)
    pooled, hidden = torch.randn(2, 3), torch.randn(2, 3, 5)  # as many channels as there are tokens
    assert [x.shape for x in problem.results((hidden, pooled))] == [(4, 5), (2, 3)]


def test_what_is_no_number_of_the_output_is_no_result() -> None:
    """A cache in transformers' old form, and numbers of tokens."""
    x = torch.randn(2, 3)
    output = {"logits": x, "past_key_values": ((x, x), (x, x)), "states": (x, [x]), "lengths": torch.tensor([3, 1])}
    assert len(prove.tensors_of(output)) == 3


def test_a_recurrence_counts_the_states_that_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    x = l2norm(torch.rand(2, 9, 4, 8))
    call = delta.bind(x, x, x, torch.rand(2, 9, 4))
    for entries, against in ((8, "float64"), (7, "float64, one head")):
        monkeypatch.setattr(prove, "_MOST_ENTRIES", entries * 2 * 9 * 4 * 8 * 8)
        rows = prove_site(Site("delta", "Net", "Block", "delta_rule", ((call, 1),)), "chunked")
        assert {row.against for row in rows} == {against}


def test_what_must_be_zero_is_allowed_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of values of zero the output is zero."""
    call = site().calls[0][0]
    zeros = Site("attn", "Attention", "Block", "softmax", ((call._replace(v=torch.zeros_like(call.v)), 1),))
    assert all(row.ok for row in prove_site(zeros, "aten"))
    monkeypatch.setattr(aten, "forward", lambda call: tuple(x + 1e-9 for x in right_forward(call)))
    missed = next(row for row in prove_site(zeros, "aten") if row.what == "out")
    assert not missed.ok and missed.budget == 0


def test_a_log_sum_exp_and_a_recurrence_have_budgets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    judge = prove._judge

    def watched(*given: Any, log: bool, recurrent: bool) -> Any:
        seen.append((log, recurrent))
        return judge(*given, log=log, recurrent=recurrent)

    monkeypatch.setattr(prove, "_judge", watched)
    rows = prove_site(site(), "aten")
    assert seen == [(row.what == "lse", False) for row in rows]
    seen.clear()
    x = l2norm(torch.rand(1, 9, 2, 8))
    prove_site(Site("delta", "Net", "Block", "delta_rule", ((delta.bind(x, x, x, torch.rand(1, 9, 2)), 1),)), "chunked")
    assert {*seen} == {(False, True)}


def test_what_does_not_learn_has_no_gradient_and_what_does_has_one_anywhere() -> None:
    """Without grad mode, too; nor is an input left out that lies in a mapping: the reference has it in float64."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, options: dict[str, torch.Tensor]) -> torch.Tensor:
            assert options["by"].dtype == x.dtype
            return x * self.w * self.frozen * options["by"]

    problem = Problem(Scaled(), {"x": torch.ones(2, 4), "options": {"by": torch.ones(4)}})
    with torch.no_grad():
        found = differentiate(problem)
    assert found.gradients.keys() == {"input x", "w", "unused"} and found.gradients["unused"] is None
    assert all(found.gradients[name] is not None for name in ("input x", "w"))
    assert differentiate(problem, problem.model.double(), torch.float64).outputs[0].dtype == torch.float64


def test_what_has_no_gradient_is_proved_without() -> None:
    model = nn.Embedding(5, 4).requires_grad_(False)
    rows = prove_model(Problem(model, {"input": torch.arange(5)}), nullcontext)
    assert all(row.ok for row in rows) and {row.what for row in rows} == {"output", "output without gradients"}


def test_a_truth_that_is_not_finite_forgives_nothing() -> None:
    lost = torch.tensor([1.0, 1.0, 1.0, torch.nan])
    original, truth = Result([lost], {"a": None}), Result([lost.double()], {"a": lost.double()}, "float64")
    for x in (torch.zeros(4), lost):
        rows = compare_results(Result([x], {"a": x}), original, truth, "original")
        assert len(rows) == 4 and not any(row.ok or row.left_out for row in rows)


def test_a_model_may_keep_tensors_of_its_last_run() -> None:
    """With their graph, of which nobody can make a copy."""

    class Keeps(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(input)
            return self.last

    rows = prove_model(Problem(Keeps(4, 4), {"input": torch.randn(3, 4)}), nullcontext)
    assert all(row.ok for row in rows) and [row.against for row in rows] == ["original", "float64"] * 3


def test_an_output_too_many_is_infinitely_far() -> None:
    one = torch.ones(4)
    original, truth = Result([one], {}), Result([one.double()], {}, "float64")
    rows = compare_results(Result([one, one], {}), original, truth, "original", trained=False)
    assert [row.error for row in rows] == [torch.inf] * 2


def test_evaluating_puts_every_module_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, False]
    for without in (torch.inference_mode, torch.no_grad):
        with without():
            with evaluating(model):
                assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            assert not torch.is_grad_enabled()


def test_whole_model_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from foci.accelerate.apply import route

    subject = zoo.load("llama")
    rows = prove_model(Problem(subject.model, subject.inputs), lambda: route(subject.model))
    assert [(row.what, row.against) for row in rows] == [
        ("output", "original"), ("output", "float64"), ("gradients", "original"), ("gradients", "float64"),
        ("output without gradients", "original"), ("output without gradients", "float64"),
    ]  # fmt: skip
    assert all(row.ok for row in rows)


class Otherwise(nn.Module):
    """Gives another output more without gradients, and another first one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * self.w
        return (y,) if torch.is_grad_enabled() else (y.relu(), 2 * y)


def test_outputs_without_gradients_are_compared_with_such_outputs_of_the_original() -> None:
    rows = prove_model(Problem(Otherwise(), {"x": torch.randn(2, 3, 4)}), nullcontext)
    assert all(row.ok for row in rows) and len(rows) == 6


class Large(nn.Module):
    """y = x w in float16: its gradient is the sum of 512 tokens, each up to 1e4, too many for float16."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.wrong = nn.Parameter(torch.ones(4, dtype=torch.float16)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * (1.1 if self.wrong and not torch.is_grad_enabled() else 1.0)


def test_a_loss_is_scaled_where_float16s_gradients_would_overflow() -> None:
    model, x = Large(), 1e4 * torch.ones(512, 4, dtype=torch.float16)
    problem = Problem(model, {"x": x})
    assert not differentiate(problem).finite
    scaled, found = settled(problem)
    assert scaled.loss_scale == 2.0**-6 and found.finite
    rows = prove_model(problem, nullcontext)
    assert all(row.ok and not row.left_out for row in rows) and len(rows) == 6
    assert settled(Problem(model, {"x": x / 1e3}))[0].loss_scale == 1
    assert settled(Problem(model, {"x": 6 * x.repeat(256, 1)}))[0].loss_scale == 2.0**-12
    overflowing = Problem(model.float(), {"x": 1e38 * torch.ones(512, 4)})
    assert settled(overflowing)[0] is overflowing  # float32, whose losses nobody scales


def test_so_it_is_where_outputs_overflow_too() -> None:
    """Those gradients were left out then, though a scaled loss has them."""

    class Overflowing(Large):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return super().forward(x), (100 * x).detach()

    problem = Problem(Overflowing(), {"x": 1e4 * torch.ones(512, 4, dtype=torch.float16)})
    scaled, found = settled(problem)
    assert scaled.loss_scale == 2.0**-6 and found.differentiable and not found.finite
    rows = prove_model(problem, nullcontext)
    # All of one output is lost, but gradients are proved.
    assert [row.left_out for row in rows if row.what == "gradients"] == [0, 0]


class Uneven(Large):
    """Large, beside a gradient that goes through a millionth, so that of a scaled loss nothing arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.ones(4, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = 2 * self.v.detach() - self.v if self.wrong else self.v
        return super().forward(x) + 1e-6 * (100 * (100 * v)).expand_as(x)


def test_a_loss_is_not_scaled_where_gradients_would_vanish() -> None:
    """Else the original's own error would be 1, and a gradient of the wrong sign within the budget."""
    model = Uneven()
    problem = Problem(model, {"x": 1e4 * torch.ones(512, 4, dtype=torch.float16)})

    @contextmanager
    def routed() -> Iterator[None]:
        model.wrong = True
        yield
        model.wrong = False

    before = differentiate(problem)
    assert before.gradients["v"].isfinite().all() and not before.gradients["w"].isfinite().all()
    assert settled(problem)[0].loss_scale == 1
    missed = {row.what for row in prove_model(problem, routed) if not row.ok}
    assert "gradients" in missed


def test_what_computes_otherwise_without_gradients_is_proved_there_too() -> None:
    model = Large()

    @contextmanager
    def routed() -> Iterator[None]:
        model.wrong = True
        yield
        model.wrong = False

    rows = prove_model(Problem(model, {"x": torch.randn(3, 4, dtype=torch.float16)}), routed)
    assert {row.what for row in rows if not row.ok} == {"output without gradients"}
