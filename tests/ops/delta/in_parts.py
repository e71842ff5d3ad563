"""What a forward keeps for its backward, held to what Triton's walk keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import Call, bind
from foci.ops.delta.spec import SPEC


def drawn(inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Gradients of the output and, where there is a first state, of the last one, whose channels lie side by side."""
    draw, v, state = torch.Generator().manual_seed(1), inputs["v"], inputs.get("state")
    d_out, last = torch.randn(v.shape, generator=draw).bfloat16().to(v.device), None
    if state is not None:
        last = torch.randn(state.transpose(2, 3).shape, generator=draw).transpose(2, 3).to(v.device)
    return d_out, last


def apart(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def by_warps_or_triton(
    module: Any, inputs: dict[str, Any], grads: tuple[Tensor, Tensor | None], patches: pytest.MonkeyPatch, warps: bool
) -> dict[str, Tensor]:
    """Gradients of all inputs on a GPU, where a module that `takes` the call does its part, or Triton does."""
    call, asked, takes = bind(**inputs), [], module.takes

    def known(*given: Any) -> bool:
        asked.append(takes(*given))
        return warps

    with patches.context() as patch:
        patch.setattr(module, "takes", known)
        needs = [getattr(call, name) is not None for name in SPEC.differentiable]
        found = gpu.backward(call, gpu.forward(call, True), grads, needs)
    assert asked == [True]
    return {name: x for name, x in zip(SPEC.differentiable, found, strict=True) if x is not None}


def played_again(inputs: dict[str, Any]) -> None:
    """A backward's bits by the public function, whose third asks nothing of Triton (core/plans.py), and by a graph."""
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v", "beta", "log_decay")]
    d_out, _ = drawn(inputs)

    def gradients() -> tuple[Tensor, ...]:
        out, _ = delta_rule(**inputs, return_state=False, backend="triton")
        return torch.autograd.grad(out, leaves, d_out)

    wanted, graph = gradients(), torch.cuda.CUDAGraph()
    for _ in range(4):
        assert all(x.equal(y) for x, y in zip(gradients(), wanted, strict=True))
    with torch.cuda.graph(graph):
        captured = gradients()
    d_out.mul_(2)
    graph.replay()
    for x, y in zip(captured, gradients(), strict=True):
        assert x.equal(y)


def kept(call: Call, made: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Out, the final state, states and errors of a forward."""
    out, final, buffer = made
    parts = gpu._parts(call, buffer)
    return out, final, parts.states, parts.errors


def held(
    call: Call, made: Sequence[Tensor], by_triton: Sequence[Tensor], apart: Callable[[Tensor, Tensor], float]
) -> tuple[Tensor, ...]:
    """`kept`, as near to Triton's as rounding is: d as two bfloat16, of which the second is what the first left."""
    *found, errors = kept(call, made)
    *wanted, errors_too = kept(call, by_triton)
    for x, y in zip(found, wanted, strict=True):
        assert apart(x, y) <= 3e-3
    assert apart(errors.double().sum(0), errors_too.double().sum(0)) <= 2e-3
    high, low = errors.float()
    assert low.any() and bool((low.abs() <= 2**-8 * high.abs()).all())
    return *found, errors
