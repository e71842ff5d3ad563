"""Other people's signatures of a recurrence: what each keyword gets, what is refused, and what is listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core.spec import WrongReturn
from foci.ops import conventions
from foci.ops.conventions import Place
from foci.ops.decay.api import linear_attention
from foci.ops.decay.cases import CASES as LINEAR
from foci.ops.decay.conventions import adapt as adapt_linear
from foci.ops.delta.api import delta_rule
from foci.ops.delta.cases import CASES as DELTA
from foci.ops.delta.conventions import adapt as adapt_delta

BY_NAME = {"linear": {case.name: case for case in LINEAR}, "delta": {case.name: case for case in DELTA}}


def given(name: str, operator: str = "linear") -> dict[str, Any]:
    return BY_NAME[operator][name].make(torch.float64, torch.device("cpu"), 0)


def refused(candidate, operator: str = "linear") -> set[str]:
    return {name for name, case in BY_NAME[operator].items() if candidate.refuses(case)}


def fla_gla(q, k, v, gk, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    """A decay per channel, which it always wants."""
    assert gk.shape == (*v.shape[:3], q.shape[-1]) and q.shape[2] == v.shape[2]
    return linear_attention(
        q, k, v, log_decay=gk, scale=scale, state=initial_state, offsets=cu_seqlens, return_state=output_final_state
    )


def fla_gdn(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    """A decay per token, before beta."""
    assert g.dim() == 3
    return delta_rule(
        q, k, v, beta, log_decay=g, scale=scale, state=initial_state, offsets=cu_seqlens,
        return_state=output_final_state,
    )  # fmt: skip


@pytest.mark.parametrize(("operator", "adapt", "function"), [
    ("linear", adapt_linear, linear_attention), ("delta", adapt_delta, delta_rule),
    ("linear", adapt_linear, fla_gla), ("delta", adapt_delta, fla_gdn),
])  # fmt: skip
def test_every_case_that_is_not_refused_is_right(operator: str, adapt, function) -> None:
    candidate, right = adapt(function), {"linear": linear_attention, "delta": delta_rule}[operator]
    assert candidate.outputs == ("out", "state")
    ran = 0
    for name, case in BY_NAME[operator].items():
        if not candidate.refuses(case):
            inputs = given(name, operator)
            torch.testing.assert_close(candidate.call(inputs), right(**inputs, return_state=True), rtol=1e-9, atol=1e-9)
            ran += 1
    assert ran >= 9


def test_ours_are_asked_everything_and_held_to_their_errors() -> None:
    for operator, adapt, function in (("linear", adapt_linear, linear_attention), ("delta", adapt_delta, delta_rule)):
        candidate = adapt(function, name="ours")
        assert candidate.strict and candidate.not_tested == () and candidate.name == "ours"
        assert not refused(candidate, operator)


def test_a_decay_that_is_always_wanted_is_open_where_there_is_none() -> None:
    candidate = adapt_linear(fla_gla)
    assert not candidate.strict and not candidate.refuses(BY_NAME["linear"]["plain"])
    assert candidate.not_tested == ("decay per head, decay per token, bonus, causal: its signature names none of them",)
    assert {"decay per head", "decay per token", "grouped heads", "bonus", "not causal"} <= refused(candidate)
    assert candidate.refuses(BY_NAME["linear"]["one key head"]) == ["grouped heads (H != G): it raises AssertionError"]


def test_a_word_for_several_ranks_is_tried() -> None:
    candidate = adapt_delta(fla_gdn)
    reasons = {name: candidate.refuses(BY_NAME["delta"][name]) for name in ("decay per head", "decay per channel")}
    assert reasons == {name: [f"{name}: it raises AssertionError"] for name in reasons}
    assert not candidate.refuses(BY_NAME["delta"]["decay per token"])


def test_beta_is_fourth_where_it_has_no_name() -> None:
    def unnamed(q, k, v, b):
        return delta_rule(q, k, v, b)[0]

    inputs = given("plain", "delta")
    torch.testing.assert_close(adapt_delta(unnamed).call(inputs)[0], delta_rule(**inputs)[0])


def test_layouts() -> None:
    def heads_first(q, k, v, g):
        out, state = linear_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), log_decay=g.transpose(1, 2), return_state=True
        )
        return out.transpose(1, 2), state

    inputs = given("decay per token")
    found = adapt_linear(heads_first, layout="bhtd").call(inputs)
    torch.testing.assert_close(found, linear_attention(**inputs, return_state=True))
    with pytest.raises(ValueError, match="layout must be 'bthd' or 'bhtd', got 'tbhd'"):
        adapt_linear(heads_first, layout="tbhd")


def test_what_comes_back_without_being_asked() -> None:
    def alone(q, k, v):
        return linear_attention(q, k, v)[0]

    def with_none(q, k, v):
        return linear_attention(q, k, v)

    def with_state(q, k, v):
        return linear_attention(q, k, v, return_state=True)

    outputs = [adapt_linear(function).outputs for function in (alone, with_none, with_state)]
    assert outputs == [("out",), ("out",), ("out", "state")]
    assert adapt_linear(alone).not_tested[-1] == "the final state: it gives none"
    assert len(adapt_linear(with_none).call(given("plain"))) == 1


def test_what_is_broken_is_for_the_laws() -> None:
    def wrong(q, k, v):
        return linear_attention(q, k, v)[0].tolist()

    candidate = adapt_linear(wrong)
    assert not candidate.refuses(BY_NAME["linear"]["plain"])
    with pytest.raises(WrongReturn, match="where one tensor is expected"):
        candidate.call(given("plain"))


def test_what_refuses_the_cpu_is_tried_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel for GPUs does: here it refuses float32 and narrow heads, as those do the CPU."""
    gpu = Place(torch.device("cpu"), torch.bfloat16, 64)
    monkeypatch.setattr(conventions, "places", lambda: iter((Place(torch.device("cpu")), gpu)))

    def on_a_gpu(q, k, v, g):
        assert q.dtype == torch.bfloat16 and q.shape[-1] == 64 and g.dim() == 3 and q.shape[2] == v.shape[2]
        return linear_attention(q, k, v, log_decay=g)[0]

    candidate = adapt_linear(on_a_gpu)
    assert "decay per channel: it raises AssertionError" in candidate.refuses(BY_NAME["linear"]["decay per channel"])
    assert "grouped heads (H != G): it raises AssertionError" in candidate.refuses(BY_NAME["linear"]["grouped heads"])
    assert not candidate.refuses(BY_NAME["linear"]["value width"])


def test_what_ends_the_process_of_a_tiny_call_is_for_the_laws() -> None:
    def gated(q, k, v, g):
        return linear_attention(q, k, v, log_decay=g)[0]

    asked = []

    def ask(call):
        asked.append(call())
        return asked[-1] if "TypeError" in asked[-1] else None

    candidate = adapt_linear(gated, aside=lambda work: work(ask))
    assert asked == ["it raises TypeError", "it raises TypeError", ""]  # without gates, then with them
    assert not candidate.refuses(BY_NAME["linear"]["plain"]) and candidate.call(given("plain"))

    def alike(q, k, v):
        assert q.shape[2] == v.shape[2] and q.shape[3] == v.shape[3]
        return linear_attention(q, k, v)[0]

    answers = iter(("plain", None, "V != K"))
    candidate = adapt_linear(alike, aside=lambda work: work(lambda call: next(answers) and call()))
    reasons = candidate.refuses(BY_NAME["linear"]["value width"])
    assert any("V != K" in reason for reason in reasons) and not any("grouped" in r for r in reasons)
    assert not any("grouped" in reason for reason in candidate.refuses(BY_NAME["linear"]["grouped heads"]))


def test_a_fork_of_a_process_that_has_used_its_gpu_is_asked_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert list(conventions.places()) == [Place(torch.device("cpu"))]


def test_a_kind_that_is_answered_in_the_wrong_shape_is_refused() -> None:
    def narrow(q, k, v):
        out = linear_attention(q, k, v)[0]
        return out[..., :4] if v.shape[-1] > 4 and q.shape[-1] == 4 else out

    assert adapt_linear(narrow).refuses(BY_NAME["linear"]["value width"]) == [
        "V != K: it answers with the shape [1, 3, 2, 4]"
    ]


def test_a_module_is_asked_what_its_forward_names() -> None:
    class Retention(torch.nn.Module):
        def forward(self, q, k, v, *, g_gamma=None, initial_state=None):
            return linear_attention(q, k, v, log_decay=g_gamma, state=initial_state)[0]

    for module in (Retention(), torch.compile(Retention(), backend="eager")):
        candidate = adapt_linear(module)
        told = candidate.not_tested[0].split(":")[0]
        assert told == "decay per token, decay per channel, scale, offsets, bonus, causal"
        inputs = given("decay per head")
        torch.testing.assert_close(candidate.call(inputs)[0], linear_attention(**inputs)[0])
