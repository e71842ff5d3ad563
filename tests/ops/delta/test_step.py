"""One token of the delta rule: what torch and C++ make of it, and what it erases."""

from __future__ import annotations

import pytest
import torch

import foci
from foci.ops.delta import step


@pytest.mark.parametrize("erase", [None, torch.ones(2, 2, 3)], ids=["without", "erase"])
def test_in_torch_and_wherever_it_runs_are_one(erase: torch.Tensor | None) -> None:
    q, k, v = torch.randn(2, 2, 3), torch.randn(2, 2, 3), torch.randn(2, 4, 5)
    beta, g, state = torch.rand(2, 4), -torch.rand(2, 4, 3), torch.randn(2, 4, 3, 5)
    again = state.clone()
    out = foci.delta_rule_step(q, k, v, beta, state, log_decay=g, erase=erase, scale=0.3)
    torch.testing.assert_close(out, step._step(q, k, v, again, 0.3, beta=beta, log_decay=g, erase=erase))
    torch.testing.assert_close(state, again)


def test_what_is_under_the_key_is_replaced() -> None:
    key, state = torch.eye(3)[None, :1], torch.randn(1, 1, 3, 5)
    before, v = state.clone(), torch.randn(1, 1, 5)
    out = foci.delta_rule_step(key, key, v, torch.ones(1, 1), state, scale=1.0)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(state[0, 0], torch.cat([v[0], before[0, 0, 1:]]))


def test_erase_keys_are_keys() -> None:
    """Of the dtype of the others, under autocast in its own, which a call on a GPU cannot do without."""
    q, k, erase = (torch.randn(2, 2, 4) for _ in range(3))
    v, beta, state = torch.randn(2, 2, 3), torch.rand(2, 2), torch.randn(2, 2, 4, 3)
    with pytest.raises(ValueError, match=r"q, k, v, erase have dtypes bfloat16, bfloat16, bfloat16, float32; expected"):
        foci.delta_rule_step(*(x.bfloat16() for x in (q, k, v)), beta, state.clone(), erase=erase)
    with torch.autocast("cpu"):
        out = foci.delta_rule_step(q, k, v, beta, state.clone(), erase=erase)
    halves = (x.bfloat16() for x in (q, k, v))
    assert out.equal(foci.delta_rule_step(*halves, beta, state.clone(), erase=erase.bfloat16()))
