"""Recurrences kept stable by a running maximum, and those written into a method, against transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import xLSTMConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention as theirs
from transformers.models.xlstm.modeling_xlstm import xLSTMBackend

from foci.integrations.transformers_methods import below_zero, mlstm, rg_lru, running_maximum, wkv
from foci.integrations.transformers_recurrences import How
from tests.integrations.transformers_models import relative

BUDGET = 1e-5


class TestRunningMaximum:
    def test_it_is_the_recurrence(self) -> None:
        k, g = 30 * torch.randn(2, 50, 3), -torch.rand(2, 50, 3)
        m = [torch.full((2, 3), -4.0)]
        for t in range(50):
            m.append(torch.maximum(m[-1] + g[:, t], k[:, t]))
        assert torch.allclose(running_maximum(k, g, m[0]), torch.stack(m, 1).double(), atol=1e-4)

    def test_what_rounding_left_above_zero_goes_and_its_gradient_stays(self) -> None:
        x = torch.tensor([-1.0, 1e-6], requires_grad=True)
        below_zero(x).sum().backward()
        assert below_zero(x).tolist() == [-1.0, 0.0]
        assert x.grad is not None
        assert x.grad.tolist() == [1.0, 1.0]

    @pytest.mark.parametrize("reach", [1.0, 10.0, 80.0])
    def test_rwkv_stays_finite_where_exponentials_would_not(self, reach: float) -> None:
        generator = torch.Generator().manual_seed(0)
        key, value = reach * torch.randn(2, 18, 8, generator=generator), torch.randn(2, 18, 8, generator=generator)
        decay, first = torch.linspace(-8, 4, 8), torch.randn(8, generator=generator)

        def as_softmax(decay: Tensor, first: Tensor, key: Tensor, value: Tensor) -> Tensor:
            behind = torch.arange(18)[:, None] - torch.arange(18) - 1
            logits = key[:, None] - behind[..., None] * decay.exp()  # [B, T, S, D]
            own = (first + key)[:, :, None].expand_as(logits)
            logits = torch.where((behind == -1)[..., None], own, logits).masked_fill(
                (behind < -1)[..., None], -torch.inf
            )
            return (logits.softmax(2) * value[:, None]).sum(2)

        def in_two_parts(*given: Tensor) -> Tensor:
            run = wkv(How(), theirs)
            start, state = run(*given[:2], *(x[:, :7] for x in given[2:]), return_state=True)
            return torch.cat([start, run(*given[:2], *(x[:, 7:] for x in given[2:]), state=state)[0]], 1)

        found = []
        for run, dtype in (
            (as_softmax, torch.float64),
            (lambda *given: theirs(*given)[0], torch.float32),
            (in_two_parts, torch.float32),
        ):
            leaves = [x.to(dtype).requires_grad_() for x in (decay, first, key, value)]
            out = run(*leaves)
            found.append([out.detach(), *torch.autograd.grad(out.square().mean(), leaves)])
        assert all(bool(x.isfinite().all()) for x in found[2])
        # At 80 the softmax is one-hot: its gradients have vanished, and what is left of them is rounding.
        for truth, own, ours in list(zip(*found, strict=True))[: 1 if reach > 10 else None]:
            assert relative(ours, truth) <= max(BUDGET, 2 * relative(own, truth))


class TestMatrixMemory:
    @staticmethod
    def inputs(T: int, reach: float = 1.0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, 2, T, 6), (2, 2, T, 6), (2, 2, T, 10), (2, 2, T), (2, 2, T)]
        q, k, v, i, f = (torch.randn(shape, generator=generator) for shape in shapes)
        return [q, k, v, reach * i, 2 + reach * f]

    @pytest.mark.parametrize(
        ("T", "reach", "dtype", "budget"),
        # Chunks run in float64 throughout; a gate of 12 makes the epsilon beside the normaliser matter, and with it the
        # maximum's own gradient.
        [(1, 1.0, torch.float32, BUDGET), (19, 1.0, torch.float32, BUDGET), (16, 12.0, torch.float64, 1e-9)],
    )
    def test_outputs_states_and_gradients_equal_theirs(
        self, T: int, reach: float, dtype: torch.dtype, budget: float
    ) -> None:
        module = xLSTMBackend(xLSTMConfig(chunk_size=8))
        first = [x.to(dtype) for x in self.inputs(8, reach)]
        found = []
        for forward in (xLSTMBackend.forward, mlstm(How(), xLSTMBackend.forward)):
            leaves = [x.to(dtype).requires_grad_() for x in self.inputs(T, reach)]
            _, past = forward(module, *first)
            h, states = forward(module, *leaves, *past)
            gradients = torch.autograd.grad(h.square().mean(), leaves)
            found.append([x.detach() for x in (h, *states, *gradients)])
        assert max(relative(ours, own) for own, ours in zip(*found, strict=True)) < budget

    @torch.no_grad()
    def test_training_modes_return_and_refuse_as_theirs(self) -> None:
        run = mlstm(How(), xLSTMBackend.forward)
        module = xLSTMBackend(xLSTMConfig(chunk_size=8, mode="train", return_last_states=False))
        assert relative(run(module, *self.inputs(16)), module(*self.inputs(16))) < BUDGET
        with pytest.raises(ValueError, match="not divisible by chunk size"):
            run(module, *self.inputs(13))
        module = xLSTMBackend(xLSTMConfig(chunk_size=8, mode="train_with_padding", return_last_states=False))
        assert relative(run(module, *self.inputs(13)), module(*self.inputs(13))) < BUDGET
        with pytest.raises(ValueError, match="not supported with train_with_padding"):
            run(module, *self.inputs(13), return_last_states=True)


def test_a_gated_lru_forgets_at_resets_and_where_its_gate_underflows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 9, 5, generator=generator), torch.rand(2, 9, 5, generator=generator)
    gate[0, 3], gate[1, 6] = 0.0, 1.0
    reset = torch.zeros(2, 9, 1, dtype=torch.bool)
    reset[:, 0], reset[1, 4] = True, True
    state = torch.randn(2, 5, generator=generator)
    module, found = None, []
    for run in (RecurrentGemmaRglru._rnn_scan, rg_lru(How(), RecurrentGemmaRglru._rnn_scan)):
        leaves = [each.clone().requires_grad_() for each in (x, gate)]
        h, last = run(module, *leaves, reset, state)
        one, _ = run(module, x[:, :1], gate[:, :1], ~reset[:, :1], last)
        gradients = torch.autograd.grad(h.square().sum() + one.sum(), leaves)
        found.append([h.detach(), last.detach(), one.detach(), *gradients])
    own, ours = found
    assert all(bool(each.isfinite().all()) for each in ours)
    # Where the gate is 0 its logarithm has no gradient.
    own[4][gate == 0], ours[4][gate == 0] = 0.0, 0.0
    assert max(relative(a, b) for a, b in zip(ours, own, strict=True)) < BUDGET
