"""A graph within an autograd.Function: its gradients, and that what it saved is kept and freed with the outer one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foci.core.errors import Unsupported
from foci.parallel.nested_graph import NestedGraph, once_differentiable

RUNS: list[str] = []


class Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        RUNS.append("forward")
        ctx.inside = NestedGraph()
        outputs = ctx.inside.run(compute, tensors, ctx.needs_input_grad)
        ctx.save_for_backward(tensors[0].new_empty(0), *ctx.inside.take_saved())
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = iter(ctx.inside.gradients(grads, ctx.saved_tensors[1:]))
        return tuple(next(found) if need else None for need in ctx.needs_input_grad)


def compute(tensors: Any) -> tuple[Tensor, ...]:
    x, y, z = tensors
    return (x.sin() * y).exp(), x.detach() + 1, z.cos()


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, dtype=torch.float64, requires_grad=grown) for grown in (True, False, True)]


def test_gradients_are_those_of_the_graph() -> None:
    x, y, z = inputs()
    expected = torch.autograd.grad(sum(each.sum() for each in compute((x, y, z))), (x, z))
    outputs = Outer.apply(x, y, z)
    found = torch.autograd.grad(sum(each.sum() for each in outputs), (x, z))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert y.grad is None


def test_what_was_saved_is_freed_with_the_outer_graph_and_not_before() -> None:
    x, y, z = inputs()
    loss = Outer.apply(x, y, z)[0].sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


def test_a_checkpoint_computes_it_again_once() -> None:
    x, y, z = inputs()
    expected = torch.autograd.grad(Outer.apply(x, y, z)[0].sin().sum(), x)[0]
    RUNS.clear()
    out = checkpoint(lambda *each: Outer.apply(*each)[0].sin(), x, y, z, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], expected)
    assert RUNS == ["forward", "forward"]


def test_no_path_is_no_gradient() -> None:
    inside = NestedGraph()
    x = torch.ones(2)
    assert torch.equal(inside.run(lambda each: (x + 1,), [x], [True])[0], x + 1)
    assert inside.gradients([x], inside.take_saved()) == [None]


def test_a_second_derivative_is_refused_however_it_is_asked_for() -> None:
    for loss_of in (torch.sum, lambda x: (x * x).sum()):
        x, y, z = inputs()
        first, _ = torch.autograd.grad(loss_of(Outer.apply(x, y, z)[0]), (x, z), create_graph=True, allow_unused=True)
        expected = torch.autograd.grad(loss_of(compute((x, y, z))[0]), x)[0]
        torch.testing.assert_close(first, expected)
        with pytest.raises(Unsupported, match="no second derivative"):
            first.sum().backward()
