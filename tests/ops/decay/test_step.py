"""One token of linear attention: what torch and C++ make of it, and whom a bonus favours."""

from __future__ import annotations

import pytest
import torch

import foci
from foci.ops.decay import step


@pytest.mark.parametrize("bonus", [None, torch.ones(4, 3)], ids=["without", "bonus"])
def test_in_torch_and_wherever_it_runs_are_one(bonus: torch.Tensor | None) -> None:
    q, k, v = torch.randn(2, 2, 3), torch.randn(2, 2, 3), torch.randn(2, 4, 5)
    g, state = -torch.rand(2, 4, 3), torch.randn(2, 4, 3, 5)
    again = state.clone()
    out = foci.linear_attention_step(q, k, v, state, log_decay=g, bonus=bonus, scale=0.3)
    torch.testing.assert_close(out, step._step(q, k, v, again, 0.3, log_decay=g, bonus=bonus))
    torch.testing.assert_close(state, again)


def test_with_a_bonus_the_state_is_read_before_it_decays() -> None:
    state, one = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)
    out = foci.linear_attention_step(
        one, one, 2 * one, state, log_decay=torch.full((1,), -torch.inf), bonus=torch.full((1, 1), 3.0)
    )
    assert out.item() == 1 + 3 * 2 and state.item() == 2
