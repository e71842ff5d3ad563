"""The public functions: what they return, choose and refuse."""

from __future__ import annotations

import inspect

import pytest
import torch

import foci
from foci.ops import native
from foci.ops.decay.api import linear_attention
from foci.ops.decay.call import bind
from foci.ops.decay.spec import SPEC

B, T, H, K, V = 2, 5, 3, 4, 6
Q, VALUE = torch.randn(B, T, H, K), torch.randn(B, T, H, V)
ARGS = (Q, Q, VALUE)


def test_the_state_is_given_when_asked_for() -> None:
    out, state = linear_attention(*ARGS)
    assert out.shape == (B, T, H, V)
    assert state is None
    again, state = linear_attention(*ARGS, return_state=True)
    assert torch.equal(out, again)
    assert state is not None
    assert state.shape == (B, H, K, V)


def test_a_state_is_not_changed_and_does_not_come_back() -> None:
    given = torch.randn(B, H, K, V)
    before = given.clone()
    _, state = linear_attention(*ARGS, state=given, return_state=True)
    assert torch.equal(given, before)
    assert state is not None
    assert state.data_ptr() != given.data_ptr()


def test_backends() -> None:
    assert foci.explain("linear", *ARGS).chosen == ("chunked" if native.reasons(bind(*ARGS)) else "native")
    torch.testing.assert_close(linear_attention(*ARGS, backend="reference")[0], linear_attention(*ARGS)[0])
    with pytest.raises(ValueError, match="unknown backend 'magic'"):
        linear_attention(*ARGS, backend="magic")


def test_every_argument_of_the_call_is_one_of_the_function() -> None:
    named = set(inspect.signature(linear_attention).parameters) - {"backend"}
    assert named == set(inspect.signature(bind).parameters)
    assert set(SPEC.differentiable) <= named


def test_vmap_and_functional_gradients() -> None:
    def of(v: torch.Tensor) -> torch.Tensor:
        return linear_attention(*ARGS[:2], v, *ARGS[3:])[0]

    mapped = torch.func.vmap(of)(torch.stack([VALUE, 2 * VALUE]))
    torch.testing.assert_close(mapped[1], 2 * mapped[0])
    leaf = VALUE.clone().requires_grad_()
    of(leaf).sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda v: of(v).sum())(VALUE), leaf.grad)
