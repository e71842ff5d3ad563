"""Steps are the scan, token by token, and only the state changes."""

from __future__ import annotations

import pytest
import torch

from foci.ops.scan.spec import SPEC
from foci.ops.scan.step import forward
from tests.ops.recurrences import error, inputs_of


@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
def test_steps_are_the_scan(dtype: torch.dtype) -> None:
    inputs = inputs_of(SPEC, "extreme gates", dtype)
    out, final = SPEC.reference(**inputs)
    x, gates, state = (inputs[name] for name in ("x", "log_decay", "state"))
    found = torch.stack([forward(x[:, t], gates[:, t], state) for t in range(x.shape[1])], dim=1)
    assert found.dtype == dtype and error(found, out) < 1e-6 and error(state, final) < 1e-6


def test_only_the_state_changes_and_the_answer_is_no_view_of_it() -> None:
    x, gates, state = torch.ones(2, 3), torch.full((2, 3), -1.0), torch.ones(2, 3)
    h = forward(x, gates, state)
    assert torch.equal(h, state) and torch.equal(x, torch.ones(2, 3)) and torch.equal(gates, -torch.ones(2, 3))
    state.zero_()
    assert h.all()


def test_tokens_that_lie_in_the_state_are_read_as_they_were() -> None:
    state, gates = torch.rand(2, 3), -torch.rand(2, 3)
    before = state.clone()
    h = forward(state, gates, state)
    assert torch.equal(h, state) and torch.allclose(h, gates.exp() * before + before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.ones(1, 2, 3)}, "x has 3 dimensions"),
        ({"log_decay": torch.ones(2, 4)}, "log_decay has shape"),
        ({"state": torch.ones(2, 3).double()}, "state is float64; expected float32"),
        ({"x": torch.ones(2, 3, requires_grad=True)}, "it has no gradients"),
    ],
)
def test_what_does_not_fit_is_named(change: dict, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^scan_step: {said}"):
        forward(**{"x": torch.ones(2, 3), "log_decay": torch.zeros(2, 3), "state": torch.ones(2, 3)} | change)
