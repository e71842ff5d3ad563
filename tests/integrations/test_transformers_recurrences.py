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
from foci.integrations.transformers_recurrences import (
    chunk_delta,
    chunk_mamba,
    chunk_ssd,
    short_convolution,
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
        compare(theirs, chunk_delta(None, theirs), delta_inputs(70, per_channel), **options)

    @CHUNKS
    @torch.no_grad()
    def test_documents_and_no_state_asked_for(self, theirs: Any, per_channel: bool) -> None:
        inputs = {name: x[:1] for name, x in delta_inputs(20, per_channel).items() if name != "initial_state"}
        apart = [
            theirs(**{name: x[:, part] for name, x in inputs.items()})[0] for part in (slice(0, 13), slice(13, 20))
        ]
        out, state = chunk_delta(None, theirs)(**inputs, cu_seqlens=torch.tensor([0, 13, 20]))
        assert state is None
        assert relative(out, torch.cat(apart, 1)) < BUDGET

    @pytest.mark.parametrize(
        ("theirs", "per_channel"),
        [(qwen.torch_recurrent_gated_delta_rule, False), (kimi.recurrent_kimi_delta_attention, True)],
    )
    def test_one_token(self, theirs: Any, per_channel: bool) -> None:
        options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        inputs, ours = delta_inputs(1, per_channel), step_delta(None, theirs)
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
        compare(theirs, chunk_ssd(None, theirs), self.inputs(70), **options)

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
                for run, state in zip((theirs, step_ssd(None, theirs)), states, strict=True)
            ]
            assert max(relative(b, a) for a, b in (outs, states)) < BUDGET


class TestMamba:
    def test_many_tokens(self) -> None:
        theirs, normal = mamba.mamba_selective_scan, draw()
        inputs = {"hidden_states": normal(2, 8, 40), "dt": normal(2, 8, 40), "A": -normal(8, 5).exp(), "D": normal(8)}
        inputs |= {"B": normal(2, 5, 40), "C": normal(2, 5, 40), "z": normal(2, 8, 40), "delta_bias": normal(8)}
        compare(theirs, chunk_mamba(None, theirs), inputs, delta_softplus=True, return_last_state=True)

    @torch.no_grad()
    def test_one_token_changes_the_state_in_place(self) -> None:
        theirs, normal = mamba.mamba_selective_state_update, draw()
        inputs = {"hidden_states": normal(2, 8), "dt": normal(2, 8), "A": -normal(8, 5).exp(), "D": normal(8)}
        inputs |= {"B": normal(2, 5), "C": normal(2, 5), "z": normal(2, 8), "dt_bias": normal(8)}
        states = [x.clone() for x in 2 * [normal(2, 8, 5)]]
        outs = [
            run(state, **inputs, dt_softplus=True)
            for run, state in zip((theirs, step_mamba(None, theirs)), states, strict=True)
        ]
        assert max(relative(b, a) for a, b in (outs, states)) < BUDGET


class TestShortConvolution:
    @torch.no_grad()
    @pytest.mark.parametrize("activation", ["silu", "gelu", None])
    def test_each_document_begins_anew_and_an_empty_one_is_nothing(self, activation: str | None) -> None:
        """The first one behind what the cache had of it, too."""
        normal, theirs = draw(), qwen.causal_conv1d_fn
        x, weight, bias = normal(1, 6, 12), normal(6, 4), normal(6)
        ours = short_convolution(None, theirs)
        parts = [theirs(x[..., a:b], weight, bias, activation=activation) for a, b in ((0, 5), (5, 6), (6, 12))]
        for before in (0, 3):
            offsets = torch.tensor([0, 5 - before, 5 - before, 6 - before, 12 - before])
            out = ours(x, weight, bias, activation=activation, cu_seq_lens_q=offsets.int())
            assert relative(out, torch.cat(parts, -1)) < BUDGET
        assert torch.equal(ours(x, weight), theirs(x, weight))

    @pytest.mark.parametrize("activation", ["silu", "gelu", None])
    def test_on_a_gpu_it_is_ours(self, activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        normal, theirs = draw(), qwen.causal_conv1d_fn
        x, weight, bias = (normal(*shape).requires_grad_() for shape in ((2, 6, 12), (6, 4), (6,)))
        dy = torch.randn(2, 6, 12)
        found, right = (
            (y.detach(), *torch.autograd.grad(y, [x, weight, bias], dy))
            for y in (run(x, weight, bias, activation) for run in (short_convolution(None, refused), theirs))
        )
        assert max(relative(a, b) for a, b in zip(found, right, strict=True)) < BUDGET

    def test_several_rows_are_not_documents(self) -> None:
        normal = draw()
        with pytest.raises(Unsupported, match=r"documents are told apart in a batch of 1"):
            short_convolution(None, qwen.causal_conv1d_fn)(normal(2, 6, 12), normal(6, 4), seq_idx=torch.zeros(2, 12))
