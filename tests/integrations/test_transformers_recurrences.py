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

    def test_one_token_changes_the_state_in_place(self) -> None:
        theirs, normal = mamba2.mamba2_selective_state_update, draw()
        heads = {"A": (4, 10, 6), "D": (4, 10), "dt_bias": (4, 10)}
        inputs = {name: normal(4).view(-1, *[1] * (len(shape) - 1)).expand(shape) for name, shape in heads.items()}
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

    @pytest.mark.parametrize("name", ["hidden_states", "dt", "A", "B", "C", "D", "dt_bias"])
    def test_one_token_that_needs_a_gradient_is_theirs(self, name: str) -> None:
        normal = draw()
        inputs = {"hidden_states": normal(2, 8), "dt": normal(2, 8), "A": -normal(8, 5).exp(), "D": normal(8)}
        inputs |= {"B": normal(2, 5), "C": normal(2, 5), "dt_bias": normal(8)}
        inputs[name].requires_grad_()
        assert step_mamba(How(), lambda *given, **rest: "theirs")(normal(2, 8, 5), **inputs) == "theirs"


class TestHalfPrecision:
    """bfloat16 tokens keep their dtype on a GPU where nothing learns; else they are float32, as in transformers."""

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("there", [False, True])
    @torch.no_grad()
    def test_the_operators_are_given(self, there: bool, half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[torch.dtype] = []

        def spy(run: Callable[..., Any]) -> Callable[..., Any]:
            return lambda q, *given, **rest: seen.append(q.dtype) or run(q, *given, **rest)

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
        step_delta(How(), refused)(**delta, initial_state=state, output_final_state=True)
        _, states = chunk_ssd(How(), refused)(**ssd, chunk_size=16, return_final_states=True)
        one = {name: x[:, 0] for name, x in ssd.items() if name in ("hidden_states", "B", "C")}
        one |= {"dt": ssd["dt"][:, 0, :, None].expand(2, 4, 10), "A": ssd["A"][:, None, None].expand(4, 10, 6)}
        step_ssd(How(), refused)(states.contiguous(), **one)
        _, last = chunk_mamba(How(), refused)(**scan, return_last_state=True)
        step_mamba(How(), refused)(last, **{name: x if name == "A" else x[..., 0] for name, x in scan.items()})
        assert seen == 6 * [half if there and half == torch.bfloat16 else torch.float32]
        assert {x.dtype for x in (state, states, last)} == {torch.float32}

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
