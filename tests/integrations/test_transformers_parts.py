"""Short convolutions and gated norms in place of transformers' own: the same numbers, and whose code computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from foci.core.errors import Unsupported
from foci.integrations.transformers_parts import gated_norm, short_convolution, step_convolution
from foci.integrations.transformers_recurrences import How
from tests.integrations.test_transformers_recurrences import BUDGET, draw, refused
from tests.integrations.transformers_models import relative


class TestShortConvolution:
    @torch.no_grad()
    @pytest.mark.parametrize("activation", ["silu", "gelu", None])
    def test_each_document_begins_anew_and_an_empty_one_is_nothing(self, activation: str | None) -> None:
        """The first one behind what the cache had of it, too."""
        normal, theirs = draw(), qwen.causal_conv1d_fn
        x, weight, bias = normal(1, 6, 12), normal(6, 4), normal(6)
        ours = short_convolution(How(), theirs)
        parts = [theirs(x[..., a:b], weight, bias, activation=activation) for a, b in ((0, 5), (5, 6), (6, 12))]
        for before in (0, 3):
            offsets = torch.tensor([0, 5 - before, 5 - before, 6 - before, 12 - before])
            out = ours(x, weight, bias, activation=activation, cu_seq_lens_q=offsets.int())
            assert relative(out, torch.cat(parts, -1)) < BUDGET
        assert torch.equal(ours(x, weight), theirs(x, weight))
        assert torch.equal(ours(x, weight, bias, activation), theirs(x, weight, bias, activation))

    @pytest.mark.parametrize("activation", ["silu", "gelu", None])
    @pytest.mark.usefixtures("on_a_gpu")
    def test_on_a_gpu_it_is_ours(self, activation: str | None) -> None:
        normal, theirs = draw(), qwen.causal_conv1d_fn
        x, weight, bias = (normal(*shape).requires_grad_() for shape in ((2, 6, 12), (6, 4), (6,)))
        dy = torch.randn(2, 6, 12)
        found, right = (
            (y.detach(), *torch.autograd.grad(y, [x, weight, bias], dy))
            for y in (run(x, weight, bias, activation) for run in (short_convolution(How(), refused), theirs))
        )
        assert max(relative(a, b) for a, b in zip(found, right, strict=True)) < BUDGET

    def test_several_rows_are_not_documents(self) -> None:
        normal = draw()
        with pytest.raises(Unsupported, match=r"documents are told apart in a batch of 1"):
            short_convolution(How(), qwen.causal_conv1d_fn)(normal(2, 6, 12), normal(6, 4), seq_idx=torch.zeros(2, 12))


class TestStepOfAConvolution:
    @torch.no_grad()
    @pytest.mark.usefixtures("on_a_gpu")
    @pytest.mark.parametrize("kept", [3, 4, 6])
    @pytest.mark.parametrize("activation", ["silu", None])
    def test_tokens_and_the_cache_are_theirs(self, kept: int, activation: str | None) -> None:
        """The cache also where it keeps more tokens than the taps reach back, as transformers' does."""
        normal, theirs = draw(), qwen.causal_conv1d_update
        weight, bias = normal(6, 4), normal(6)
        states = [x.clone() for x in 2 * [normal(2, 6, kept)]]
        for _ in range(3):
            x = normal(2, 1, 6).transpose(1, 2)
            found = [
                run(x, state, weight, bias, activation)
                for run, state in zip((theirs, step_convolution(How(), refused)), states, strict=True)
            ]
            assert found[1].shape == found[0].shape and relative(found[1], found[0]) < BUDGET
            assert torch.equal(*states)

    @torch.no_grad()
    @pytest.mark.usefixtures("on_a_gpu")
    def test_a_cache_that_keeps_many_tokens_moves_them_at_once(self) -> None:
        """As one that is recorded does, of a prompt of thousands; each write counts one version."""
        states = [torch.zeros(2, 6, kept) for kept in (4, 64)]
        for state in states:
            step_convolution(How(), refused)(torch.ones(2, 6, 1), state, torch.ones(6, 4))
        assert states[0]._version == states[1]._version

    @torch.no_grad()
    @pytest.mark.usefixtures("on_a_gpu")
    def test_tokens_that_move_onto_each_other_are_read_first(self) -> None:
        """A GPU copies in any order; a CPU in one that hides it."""
        copied: list[bool] = []

        class Copies(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.ops.aten.copy_.default:
                    copied.append(args[0].untyped_storage().data_ptr() == args[1].untyped_storage().data_ptr())
                return func(*args, **(kwargs or {}))

        with Copies():
            step_convolution(How(), refused)(torch.ones(2, 6, 1), torch.zeros(2, 6, 6), torch.ones(6, 4))
        assert copied and not any(copied)

    @pytest.mark.usefixtures("on_a_gpu")
    def test_what_is_not_one_token_without_a_gradient_is_theirs(self) -> None:
        normal = draw()
        ours = step_convolution(How(), lambda *given: "theirs")
        x, weight, state = normal(2, 6, 1), normal(6, 4), normal(2, 6, 4)
        assert ours(normal(2, 6, 2), state, weight, None, "silu") == "theirs"
        assert ours(x, state, weight, None, "gelu") == "theirs"
        assert ours(x, state[..., :2], weight, None, "silu") == "theirs"
        assert ours(x, state, weight[:, :1], None, "silu") == "theirs"
        for learning in range(4):
            given = [y.clone().requires_grad_(i == learning) for i, y in enumerate((x, state, weight, normal(6)))]
            assert ours(*given, "silu") == "theirs"

    @torch.no_grad()
    def test_on_a_cpu_it_is_theirs(self) -> None:
        assert (
            step_convolution(How(), lambda *given: "theirs")(torch.ones(1, 2, 1), torch.ones(1, 2, 4), torch.ones(2, 4))
            == "theirs"
        )


NORMS: dict[str, Callable[[], nn.Module]] = {
    "the gate behind the norm": lambda: qwen.Qwen3NextRMSNormGated(24),
    "a sigmoid": lambda: KimiLinearRMSNormGated(24),
    "the gate first, in groups": lambda: MambaRMSNormGated(24, group_size=8),
    "the gate first, by n_groups": lambda: FalconH1RMSNormGated(24, n_groups=3, norm_before_gate=False),
    "behind, by n_groups": lambda: FalconH1RMSNormGated(24, n_groups=3),
}


class Other(nn.Module):
    """No norm that foci has: its weight counts from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(24)), 1e-6

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        norm = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return hidden_states * norm * (1 + self.weight) * torch.nn.functional.silu(gate)


class Outside(Other):
    """Its eps is behind the root: another norm, of small numbers."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        size = hidden_states.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon
        return hidden_states / size * self.weight * torch.nn.functional.silu(gate)


class Squared(Other):
    """Its weight is 1 where that is 1."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        norm = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return hidden_states * norm * self.weight.square() * torch.nn.functional.silu(gate)


class WantsMore(Other):
    def forward(self, hidden_states: Tensor, gate: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states, gate) * more


class TestGatedNorm:
    @pytest.mark.usefixtures("on_a_gpu")
    @pytest.mark.parametrize("name", NORMS)
    def test_the_norm_is_found_by_what_it_computes(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        normal, norm = draw(), NORMS[name]()
        leaves = [normal(2, 5, 24).requires_grad_(), normal(2, 5, 24).requires_grad_(), norm.weight]
        with torch.no_grad():
            norm.weight.copy_(normal(24))
        forward, right = gated_norm(norm), norm(*leaves[:2])
        assert forward is not None
        monkeypatch.setattr(type(norm), "forward", refused)
        found, dy = forward(norm, *leaves[:2]), normal(2, 5, 24)
        assert relative(found.detach(), right.detach()) < BUDGET
        both = (torch.autograd.grad(y, leaves, dy) for y in (found, right))
        assert max(relative(a, b) for a, b in zip(*both, strict=True)) < BUDGET

    @pytest.mark.parametrize("name", NORMS)
    def test_on_a_cpu_and_without_a_gate_it_is_the_models_own(self, name: str) -> None:
        norm, x = NORMS[name](), torch.randn(2, 5, 24)
        forward = gated_norm(norm)
        assert forward is not None and torch.equal(forward(norm, x, x), norm(x, x))

    @pytest.mark.usefixtures("on_a_gpu")
    @pytest.mark.parametrize("name", NORMS)
    def test_on_a_gpu_without_a_gate_it_is_the_models_own(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        norm = NORMS[name]()
        theirs = type(norm).forward
        monkeypatch.setattr(type(norm), "forward", lambda *given: theirs(*given) if given[2:] != (None,) else "theirs")
        forward = gated_norm(norm)
        assert forward is not None and forward(norm, torch.randn(2, 5, 24)) == "theirs"

    def test_another_is_left_alone(self) -> None:
        """Also one whose weight is 1, with which it is a norm that foci has."""
        other = Other()
        assert gated_norm(other) is None
        other.variance_epsilon = None  # type: ignore[assignment]
        assert gated_norm(other) is None

    @pytest.mark.parametrize("kind", [Outside, Squared, WantsMore])
    def test_one_that_is_nearly_the_same_is_left_alone(self, kind: type[Other]) -> None:
        assert gated_norm(kind()) is None

    def test_one_whose_weight_is_one_number_is_left_alone(self) -> None:
        norm = qwen.Qwen3NextRMSNormGated(24)
        norm.weight = nn.Parameter(torch.ones(()))
        assert gated_norm(norm) is None

    @pytest.mark.usefixtures("on_a_gpu")
    def test_a_weight_made_of_others_is_not_read(self) -> None:
        """Its module refuses to be copied, and reading it may change it, as a spectral norm does."""
        norm, read = qwen.Qwen3NextRMSNormGated(24), []
        made = nn.Module()
        made.forward = lambda weight: read.append(weight) or 2 * weight
        torch.nn.utils.parametrize.register_parametrization(norm, "weight", made)
        read.clear()
        assert gated_norm(norm) is None and not read

    def test_it_is_found_among_fake_numbers(self) -> None:
        with FakeTensorMode():
            norm = qwen.Qwen3NextRMSNormGated(24)
            forward, x = gated_norm(norm), torch.zeros(2, 5, 24)
            assert forward is not None and forward(norm, x, x).shape == x.shape
