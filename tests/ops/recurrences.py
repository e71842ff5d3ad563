"""What the tests of the scans share: a backend with every gradient, and how far two answers are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Spec

CPU = torch.device("cpu")
BUDGET = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


def inputs_of(spec: Spec, name: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return next(case for case in spec.cases if case.name == name).make(dtype, CPU, 0)


def answers(function: Callable[..., Any], spec: Spec, inputs: dict[str, Any], backend: str) -> dict[str, Tensor]:
    """Both outputs and the gradients of a fixed random combination of them."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items() if n in spec.differentiable}
    outputs = function(**inputs | leaves, return_state=True, backend=backend)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=draw, dtype=torch.float64).to(o) for o in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights)
    named = zip(leaves, gradients, strict=True)
    return {n: o.detach() for n, o in zip(spec.output_names, outputs, strict=True)} | {
        f"d{name}": x for name, x in named
    }


def remembering(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same problem, forgotten so slowly that a float32 rounds every decay by 2e-8 in one direction."""
    slow = inputs | {"log_decay": torch.full_like(inputs["log_decay"], -3.3e-4)}
    return slow | ({"beta": inputs["beta"] / 100} if "beta" in inputs else {})


def forgetful(inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """The same problem with gates, of which a third forget everything; and where these are."""
    draw = torch.Generator().manual_seed(1)
    forgotten = torch.rand(inputs["log_decay"].shape, generator=draw) < 1 / 3
    return inputs | {"log_decay": inputs["log_decay"].masked_fill(forgotten, -1e4)}, forgotten


def unasked(spec: Spec, forward: Callable[[Any], tuple[Tensor, ...]], call: Any) -> Tensor:
    """The final states of a call that wants none, whose `out` must be the same to the last bit."""
    assert spec.outputs is not None
    every, some = forward(call), forward(call._replace(return_state=False))
    assert [(tuple(x.shape), x.dtype) for x in some[:2]] == [
        (declared.shape, declared.dtype) for declared in spec.outputs(call._replace(return_state=False))
    ]
    assert every[0].equal(some[0])
    return some[1]


def told_of_nothing(spec: Spec, backend: str, call: Any) -> bool:
    """Whether a gradient of no states, as the compiler makes one, changes no gradient to the last bit."""
    call = call._replace(return_state=False)
    outputs = getattr(torch.ops.foci, f"{spec.name}_{backend}_fwd")(*call)
    backward = getattr(torch.ops.foci, f"{spec.name}_{backend}_bwd")
    needs = [getattr(call, name) is not None for name in spec.differentiable]
    by_none, by_empty = (
        backward(torch.ones_like(outputs[0]), given, *outputs, needs, *call)
        for given in (None, torch.zeros_like(outputs[1]))
    )
    return all(x is None or x.equal(y) for x, y in zip(by_none, by_empty, strict=True))


def exact(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same numbers in float64."""
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}


def error(got: Tensor, truth: Tensor) -> float:
    """Relative RMS; infinite where anything is not finite."""
    apart = float((got.double() - truth.double()).norm())
    return apart / max(float(truth.double().norm()), 1e-30) if apart == apart else float("inf")
