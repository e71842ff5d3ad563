"""Each stand-in against the function of transformers it stands in for, beyond one chunk, with states and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from foci.core.errors import Unsupported
from foci.integrations import transformers_recurrences as recurrences
from foci.integrations.transformers_recurrences import (
    How,
    chunk_delta,
    chunk_mamba,
    chunk_ssd,
    step_delta,
    step_mamba,
    step_ssd,
)
from tests.integrations.transformers_models import relative

BUDGET = 1e-5
Draw = Callable[..., Tensor]


def draw() -> Draw:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def compare(theirs: Any, ours: Any, leaves: dict[str, Tensor], **others: Any) -> None:
    """Outputs and every gradient, output and state both seen by the loss."""
    found = []
    for run in (theirs, ours):
        given = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        returned = run(**given, **others)
        outputs = [out for out in (returned if isinstance(returned, tuple) else (returned,)) if out is not None]
        loss = sum((out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outputs)
        gradients = torch.autograd.grad(loss, list(given.values()))
        found.append([*(out.detach() for out in outputs), *gradients])
    assert max(relative(b, a) for a, b in zip(*found, strict=True)) < BUDGET


def refused(*given: Any, **keywords: Any) -> Tensor:
    raise AssertionError("theirs ran")


def delta_inputs(T: int, per_channel: bool) -> dict[str, Tensor]:
    normal = draw()
    groups = 4 if per_channel else 2
    g = normal(2, T, 4, 6) if per_channel else normal(2, T, 4)
    return {
        "query": normal(2, T, groups, 6),
        "key": normal(2, T, groups, 6),
        "value": normal(2, T, 4, 10),
        "g": -g.exp(),
        "beta": normal(2, T, 4).sigmoid(),
        "initial_state": normal(2, 4, 6, 10),
    }


DELTA = ("query", "key", "value", "g", "beta", "initial_state")


class TestDelta:
    CHUNKS = pytest.mark.parametrize(
        ("theirs", "per_channel"),
        [(qwen.torch_chunk_gated_delta_rule, False), (kimi.chunk_kimi_delta_attention, True)],
    )

    @CHUNKS
    def test_many_tokens_after_a_state(self, theirs: Any, per_channel: bool) -> None:
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        compare(theirs, chunk_delta(How(), theirs), delta_inputs(70, per_channel), **options)

    @CHUNKS
    @torch.no_grad()
    def test_documents_and_no_state_asked_for(self, theirs: Any, per_channel: bool) -> None:
        inputs = {name: x[:1] for name, x in delta_inputs(20, per_channel).items() if name != "initial_state"}
        apart = [
            theirs(**{name: x[:, part] for name, x in inputs.items()})[0] for part in (slice(0, 13), slice(13, 20))
        ]
        out, state = chunk_delta(How(), theirs)(**inputs, cu_seqlens=torch.tensor([0, 13, 20]))
        assert state is None
        assert relative(out, torch.cat(apart, 1)) < BUDGET

    @pytest.mark.parametrize(
        ("theirs", "per_channel"),
        [(qwen.torch_recurrent_gated_delta_rule, False), (kimi.recurrent_kimi_delta_attention, True)],
    )
    def test_one_token(self, theirs: Any, per_channel: bool) -> None:
        options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        inputs, ours = delta_inputs(1, per_channel), step_delta(How(), theirs)
        compare(theirs, ours, inputs, **options)
        expected = theirs(**inputs, **options)
        with torch.no_grad():
            out, state = ours(**inputs, **options)
        assert state is inputs["initial_state"]
        assert max(relative(out, expected[0]), relative(state, expected[1])) < BUDGET

    @pytest.mark.parametrize("kind", ["several tokens", "no state is asked for", "a half-precision state", *DELTA])
    def test_what_is_not_one_token_behind_a_state_leaves_the_state_alone(self, kind: str) -> None:
        """Several tokens, or one where the state is not returned, is of another dtype, or a gradient will read it."""
        inputs = delta_inputs(3 if kind == "several tokens" else 1, False)
        if kind == "a half-precision state":
            inputs["initial_state"] = inputs["initial_state"].half()
        if kind in inputs:
            inputs[kind].requires_grad_()
        options = {"output_final_state": kind != "no state is asked for", "use_qk_l2norm_in_kernel": True}
        before = inputs["initial_state"].clone()
        found, right = (make(How(), refused)(**inputs, **options) for make in (step_delta, chunk_delta))
        assert torch.equal(inputs["initial_state"], before)
        assert relative(found[0].detach(), right[0].detach()) < BUDGET
        assert (found[1] is None) == (right[1] is None) == (kind == "no state is asked for")
        if found[1] is not None:
            assert relative(found[1].detach(), right[1].detach()) < BUDGET
        if kind in inputs:
            gradients = [torch.autograd.grad(x[0].sum() + x[1].sum(), inputs[kind])[0] for x in (found, right)]
            assert relative(*gradients) < BUDGET

    @torch.no_grad()
    def test_documents_stay_apart_in_the_function_for_one_token_too(self) -> None:
        inputs = {name: x[:1] for name, x in delta_inputs(5, False).items() if name != "initial_state"}
        found, right = (
            make(How(), refused)(**inputs, cu_seqlens=torch.tensor([0, 2, 5]))[0] for make in (step_delta, chunk_delta)
        )
        assert torch.equal(found, right)


HEADS = {"A": (4, 10, 6), "D": (4, 10), "dt_bias": (4, 10)}


class TestStateSpaceDuality:
    @staticmethod
    def inputs(T: int) -> dict[str, Tensor]:
        normal = draw()
        return {
            "hidden_states": normal(2, T, 4, 10),
            "dt": normal(2, T, 4),
            "A": -normal(4).exp(),
            "D": normal(4),
            "B": normal(2, T, 2, 6),
            "C": normal(2, T, 2, 6),
            "dt_bias": normal(4),
            "initial_states": normal(2, 4, 10, 6),
        }

    @pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 1.0)])
    def test_many_tokens_after_a_state(self, limit: tuple[float, float]) -> None:
        theirs = mamba2.mamba2_chunk_scan
        options = {"chunk_size": 16, "dt_softplus": True, "dt_limit": limit, "return_final_states": True}
        compare(theirs, chunk_ssd(How(), theirs), self.inputs(70), **options)

    @classmethod
    def token(cls) -> tuple[Tensor, dict[str, Tensor]]:
        """A state, and what a token has: each number of a head is repeated."""
        one = {name: x if name in HEADS else x[:, 0] for name, x in cls.inputs(1).items() if name != "initial_states"}
        one |= {name: one[name].view(-1, *[1] * (len(s) - 1)).expand(s) for name, s in HEADS.items()}
        return cls.inputs(1)["initial_states"], one | {"dt": one["dt"][..., None].expand(2, 4, 10)}

    @pytest.mark.parametrize("name", ["hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "state"])
    def test_one_token_that_needs_a_gradient_has_that_of_many(self, name: str) -> None:
        """Its state is changed all the same, when the backward is yet to come."""
        state, inputs = self.token()
        leaf = (inputs | {"state": state})[name].requires_grad_()
        many = {key: x if key == "A" else x[:, 0] if key in HEADS else x[:, None] for key, x in inputs.items()}
        many |= {"A": inputs["A"][:, 0, 0], "dt": inputs["dt"][:, None, :, 0], "initial_states": state}
        options = {"chunk_size": 16, "return_final_states": True, "dt_softplus": True}
        right, last = chunk_ssd(How(), refused)(**many, **options)
        held = state.clone()
        out = step_ssd(How(), refused)(held, **inputs, dt_softplus=True)
        assert max(relative(out.detach(), right[:, 0].detach()), relative(held.detach(), last.detach())) < BUDGET
        gradients = [torch.autograd.grad(y.square().sum(), leaf)[0] for y in (out, right)]
        assert relative(*gradients) < BUDGET

    @torch.no_grad()
    def test_one_token_behind_a_half_precision_state(self) -> None:
        state, inputs = self.token()
        held, wide = state.half(), state.half().float()
        out, right = (step_ssd(How(), refused)(S, **inputs, dt_softplus=True) for S in (held, wide))
        assert relative(out, right) < BUDGET and torch.equal(held, wide.half())

    def test_one_token_is_not_several_documents(self) -> None:
        state, inputs = self.token()
        with pytest.raises(Unsupported, match="one token is not several documents"):
            step_ssd(How(), refused)(state, **inputs, cu_seqlens=torch.tensor([0, 1, 2]))

    def test_one_token_changes_the_state_in_place(self) -> None:
        theirs, normal = mamba2.mamba2_selective_state_update, draw()
        inputs = {name: normal(4).view(-1, *[1] * (len(s) - 1)).expand(s) for name, s in HEADS.items()}
        inputs |= {"hidden_states": normal(2, 4, 10), "dt": normal(2, 4, 1).expand(2, 4, 10)}
        inputs |= {"B": normal(2, 2, 6), "C": normal(2, 2, 6), "z": normal(2, 4, 10)}
        inputs["A"] = -inputs["A"].exp()
        for wanted in (False, True):
            inputs["hidden_states"].requires_grad_(wanted)  # a gradient takes the way that is not in place
            states = [x.clone() for x in 2 * [normal(2, 4, 10, 6)]]
            outs = [
                run(state, **inputs, dt_softplus=True)
                for run, state in zip((theirs, step_ssd(How(), theirs)), states, strict=True)
            ]
            assert max(relative(b, a) for a, b in (outs, states)) < BUDGET


class TestMamba:
    def test_many_tokens(self) -> None:
        theirs, normal = mamba.mamba_selective_scan, draw()
        inputs = {"hidden_states": normal(2, 8, 40), "dt": normal(2, 8, 40), "A": -normal(8, 5).exp(), "D": normal(8)}
        inputs |= {"B": normal(2, 5, 40), "C": normal(2, 5, 40), "z": normal(2, 8, 40), "delta_bias": normal(8)}
        compare(theirs, chunk_mamba(How(), theirs), inputs, delta_softplus=True, return_last_state=True)

    @torch.no_grad()
    def test_one_token_changes_the_state_in_place(self) -> None:
        theirs, normal = mamba.mamba_selective_state_update, draw()
        inputs = {"hidden_states": normal(2, 8), "dt": normal(2, 8), "A": -normal(8, 5).exp(), "D": normal(8)}
        inputs |= {"B": normal(2, 5), "C": normal(2, 5), "z": normal(2, 8), "dt_bias": normal(8)}
        states = [x.clone() for x in 2 * [normal(2, 8, 5)]]
        outs = [
            run(state, **inputs, dt_softplus=True)
            for run, state in zip((theirs, step_mamba(How(), theirs)), states, strict=True)
        ]
        assert max(relative(b, a) for a, b in (outs, states)) < BUDGET

    @staticmethod
    def token() -> dict[str, Tensor]:
        normal = draw()
        inputs = {"hidden_states": normal(2, 8), "dt": normal(2, 8), "A": -normal(8, 5).exp(), "D": normal(8)}
        return inputs | {"B": normal(2, 5), "C": normal(2, 5), "dt_bias": normal(8), "state": normal(2, 8, 5)}

    @pytest.mark.parametrize("name", ["hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "state"])
    def test_one_token_that_needs_a_gradient_is_theirs(self, name: str) -> None:
        inputs = self.token()
        inputs[name].requires_grad_()
        assert step_mamba(How(), lambda *given, **rest: "theirs")(**inputs) == "theirs"

    def test_one_token_behind_a_half_precision_state_is_theirs(self) -> None:
        inputs = self.token()
        inputs["state"] = inputs["state"].half()
        assert step_mamba(How(), lambda *given, **rest: "theirs")(**inputs) == "theirs"

    def test_documents_are_refused(self) -> None:
        """The models pass none, and here they would be mixed."""
        inputs, offsets = self.token(), torch.tensor([0, 1, 2])
        with pytest.raises(Unsupported, match=r"cu_seqlens=\.\.\. may change the result"):
            step_mamba(How(), refused)(**inputs, cu_seqlens=offsets)
        del inputs["state"], inputs["dt_bias"]
        tokens = {name: x if name in ("A", "D") else x[..., None] for name, x in inputs.items()}
        with pytest.raises(Unsupported, match=r"cu_seqlens=\.\.\. may change the result"):
            chunk_mamba(How(), refused)(**tokens, cu_seqlens=offsets)


def many_inputs(kind: str) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]:
    """A stand-in for many tokens, what may learn, and the other arguments."""
    if kind == "delta":
        return chunk_delta, delta_inputs(7, False), {"output_final_state": True}
    if kind == "ssd":
        return chunk_ssd, TestStateSpaceDuality.inputs(7), {"chunk_size": 16, "return_final_states": True}
    inputs = {name: x[..., None] for name, x in TestMamba.token().items() if name not in ("A", "D", "state")}
    inputs["delta_bias"] = inputs.pop("dt_bias")[:, 0]
    inputs |= {name: x for name, x in TestMamba.token().items() if name in ("A", "D")}
    return chunk_mamba, inputs, {"return_last_state": True}


@pytest.mark.parametrize("kind", ["delta", "ssd", "mamba"])
def test_keywords_that_may_change_the_result_are_refused(kind: str) -> None:
    make, inputs, options = many_inputs(kind)
    with pytest.raises(Unsupported, match=r"head_mask=\.\.\. may change the result"):
        make(How(), refused)(**inputs, **options, head_mask=torch.ones(4))


LEARNING = [(kind, name) for kind in ("delta", "ssd", "mamba") for name in many_inputs(kind)[1]]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, name in LEARNING if kind != "mamba"])
def test_the_state_may_be_overwritten_before_the_backward(kind: str, name: str) -> None:
    """As the cache is, which it lies in, whichever input learns."""
    make, inputs, options = many_inputs(kind)
    state = inputs["initial_state" if kind == "delta" else "initial_states"]
    leaf, gradients = inputs[name].requires_grad_(), []
    for overwritten in (False, True):
        out, last = make(How(), refused)(**inputs, **options)
        if overwritten:
            with torch.no_grad():
                state.zero_()
        gradients += torch.autograd.grad(out.square().sum() + last.square().sum(), leaf)
    assert torch.equal(*gradients)


class TestHalfPrecision:
    """bfloat16 tokens keep their dtype on a GPU where nothing learns; else they are float32, as in transformers."""

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("there", [False, True])
    @torch.no_grad()
    def test_the_operators_are_given(self, there: bool, half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[torch.dtype] = []
        decays: list[torch.dtype] = []

        def spy(run: Callable[..., Any]) -> Callable[..., Any]:
            def watched(q: Tensor, *given: Any, **rest: Any) -> Any:
                seen.append(q.dtype)
                decays.append((rest["log_decay"] if "log_decay" in rest else given[0]).dtype)
                return run(q, *given, **rest)

            return watched

        module = "foci.integrations.transformers_recurrences"
        names = ("delta_rule", "linear_attention", "selective_scan")
        for name in (*names, *(f"{name}_step" for name in names)):
            monkeypatch.setattr(f"{module}.{name}", spy(getattr(recurrences, name)))
        monkeypatch.setattr(f"{module}.on_gpu", lambda x: there)
        delta = {name: x.to(half) for name, x in delta_inputs(1, False).items() if name != "initial_state"}
        ssd = {name: x.to(half) for name, x in TestStateSpaceDuality.inputs(1).items() if name != "initial_states"}
        x, C = torch.rand(2, 8, 1, dtype=half), torch.rand(2, 5, 1, dtype=half)
        scan = {"hidden_states": x, "dt": x, "A": -torch.rand(8, 5), "B": C, "C": C}
        _, state = chunk_delta(How(), refused)(**delta, output_final_state=True)
        tokens = [step_delta(How(), refused)(**delta, initial_state=state, output_final_state=True)[0]]
        _, states = chunk_ssd(How(), refused)(**ssd, chunk_size=16, return_final_states=True)
        one = {name: x[:, 0] for name, x in ssd.items() if name in ("hidden_states", "B", "C")}
        one |= {"dt": ssd["dt"][:, 0, :, None].expand(2, 4, 10), "A": ssd["A"][:, None, None].expand(4, 10, 6)}
        tokens.append(step_ssd(How(), refused)(states.contiguous(), **one))
        _, last = chunk_mamba(How(), refused)(**scan, return_last_state=True)
        token = {name: x if name == "A" else x[..., 0] for name, x in scan.items()}
        tokens.append(step_mamba(How(), refused)(last, **token))
        assert seen == 6 * [half if there and half == torch.bfloat16 else torch.float32]
        assert {x.dtype for x in tokens} == {half}
        assert {x.dtype for x in (state, states, last)} == {*decays} == {torch.float32}

    @pytest.mark.parametrize(("kind", "name"), LEARNING)
    def test_tokens_are_float32_whichever_input_learns(
        self, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make, inputs, options = many_inputs(kind)
        seen: list[torch.dtype] = []
        for operator in ("delta_rule", "linear_attention", "selective_scan"):
            run = getattr(recurrences, operator)
            spy = lambda q, *given, run=run, **rest: seen.append(q.dtype) or run(q, *given, **rest)  # noqa: E731
            monkeypatch.setattr(recurrences, operator, spy)
        monkeypatch.setattr(recurrences, "on_gpu", lambda x: True)
        narrow = ("query", "key", "value", "beta", "hidden_states", "B", "C")
        inputs = {key: x.bfloat16() if key in narrow else x for key, x in inputs.items()}
        make(How(), refused)(**inputs, **options)
        inputs[name].requires_grad_()
        make(How(), refused)(**inputs, **options)
        assert seen == [torch.bfloat16, torch.float32]

    @pytest.mark.parametrize(("asked", "kernels"), [(False, False), (False, True), (True, False)])
    def test_where_a_gradient_is_needed_it_is_as_in_transformers(
        self, asked: bool, kernels: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which takes kernels of others where they are installed, and these keep the dtype."""
        monkeypatch.setattr(recurrences, "on_gpu", lambda x: True)
        monkeypatch.setattr(recurrences, "installed", lambda package: kernels)
        x, gate = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, requires_grad=True)
        kept = torch.bfloat16 if asked or kernels else torch.float32
        assert How(keep_bfloat16=asked).dtype("fla", x, gate) == kept
        assert How(keep_bfloat16=asked).dtype("fla", x, gate.detach(), None) == torch.bfloat16
        assert How(keep_bfloat16=asked).dtype("fla", x.half(), None) == torch.float32
        with torch.no_grad():
            assert How(keep_bfloat16=asked).dtype("fla", x, gate) == torch.bfloat16
