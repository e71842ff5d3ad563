"""What the tests of the summaries share: each against the operator's own final state and gradient of the state."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core.spec import Spec
from tests.ops.recurrences import exact, inputs_of

# Of every operator those with all its features; where documents are packed, the first of them is taken.
NAMES = [
    "plain", "one token", "state", "packed", "everything", "extreme gates per head", "extreme gates per token",
    "extreme gates per channel", "extreme gates, bonus", "not causal, grouped heads", "bonus, grouped heads",
    "all gates at -20, per channel", "identical keys, beta of 2", "erase, grouped heads",
    "no whole chunks, per channel", "no whole pieces", "extreme gates", "no whole slabs", "extreme rates", "skip",
]  # fmt: skip


def cases_of(spec: Spec) -> list[str]:
    known = [case.name for case in spec.cases]
    return [name for name in NAMES if name in known]


def calls(spec: Spec, name: str) -> tuple[Any, Tensor, Tensor]:
    """A call in float64 without documents, a state to come in and one that comes back."""
    inputs = exact(inputs_of(spec, name))
    inputs.pop("offsets", None)
    inputs.pop("state", None)
    assert spec.bind is not None and spec.outputs is not None
    call = spec.bind(**inputs)
    _, state = spec.outputs(call)
    return call, torch.randn(state.shape, dtype=torch.float64), torch.randn(state.shape, dtype=torch.float64)


class InSummaries:
    """A subclass says of which operator, and gives its summary.py."""

    spec: Spec
    module: ModuleType

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", cases_of(self.spec))

    def test_ahead_is_the_final_state(self, name: str) -> None:
        call, state, _ = calls(self.spec, name)
        backend = self.spec.backend("reference").load()
        _, expected = backend.forward(call._replace(state=state))
        found = self.module.ahead(call)
        assert self.module.shapes(call, state.shape[0]) == (found.transition.shape, found.offset.shape)
        torch.testing.assert_close(found.apply(state.view_as(found.offset)).view_as(expected), expected)
        before = state.clone()
        fresh = self.module.ahead(call._replace(state=state), through=False)
        torch.testing.assert_close(fresh.offset.view_as(expected), expected)
        assert not fresh.transition.any()
        assert torch.equal(state, before)

    def test_back_is_the_gradient_of_the_state(self, name: str) -> None:
        call, state, d_state = calls(self.spec, name)
        state.requires_grad_()
        out, final = self.spec.backend("reference").load().forward(call._replace(state=state))
        d_out = torch.randn_like(out)
        (expected,) = torch.autograd.grad((out, final), state, (d_out, d_state))
        before = d_state.clone()
        found = self.module.back(call, d_out, d_state)
        torch.testing.assert_close(found.view_as(expected), expected)
        assert torch.equal(d_state, before)

    def test_no_tokens_change_nothing(self) -> None:
        call, state, d_state = calls(self.spec, "plain")
        few = {n: x[:, :0] for n, x in call._asdict().items() if isinstance(x, Tensor) and x.dim() > 2}
        call = call._replace(**few)
        found = self.module.ahead(call)
        torch.testing.assert_close(found.apply(state.view_as(found.offset)).view_as(state), state)
        d_out = torch.zeros_like(call.v if hasattr(call, "v") else call.x)
        torch.testing.assert_close(self.module.back(call, d_out, d_state.clone()).view_as(d_state), d_state)
