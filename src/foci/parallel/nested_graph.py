"""A nested autograd graph inside an autograd.Function: built in its forward, differentiated in its backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from foci.core.errors import Unsupported
from foci.core.spec import Outputs

Gradients = Sequence[Tensor | None]


class GraphInputs(torch.autograd.Function):
    """The inputs of the nested graph: edges at which its gradients are read, which hold no memory."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, needs: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, ...]:
        entered = tuple(x.view_as(x) for x in tensors)
        ctx.mark_non_differentiable(*(x for x, need in zip(entered, needs, strict=True) if not need))
        return entered

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("gradients are read at this edge")


class NestedGraph:
    """The nested graph of an operator: its input and output edges, and the tensors it saved, by number.

    The tensors themselves are saved by the enclosing Function, so that freeing after the backward, activation
    checkpointing and offloading apply to them too.
    """

    def __init__(self) -> None:
        self.saved: list[Tensor] = []
        self.inputs: list[GradientEdge] = []
        self.outputs: list[GradientEdge | None] = []

    def run(
        self, compute: Callable[[Sequence[Tensor]], Outputs], tensors: Sequence[Tensor], needs: Sequence[bool]
    ) -> Outputs:
        """compute(tensors), recorded so that gradients reach the tensors that need one; the outputs are detached."""
        with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
            anchor = torch.zeros((), requires_grad=True, device="cpu")
            entered = GraphInputs.apply(anchor, needs, *tensors)
            self.inputs = [get_gradient_edge(x) for x, need in zip(entered, needs, strict=True) if need]
            outputs = compute(entered)
            self.outputs = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        return tuple(x.detach() for x in outputs)

    def take_saved(self) -> list[Tensor]:
        """The saved tensors, for the enclosing Function to save; this object drops them."""
        saved, self.saved = self.saved, []
        return saved

    def gradients(self, grads: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of each input that needs one, given those of outputs and `take_saved`; None: no path."""
        pairs = [(edge, grad) for edge, grad in zip(self.outputs, grads, strict=True) if edge is not None]
        if not pairs:
            return [None] * len(self.inputs)
        edges, given = zip(*pairs, strict=True)
        self.saved = list(saved)
        try:
            found = torch.autograd.grad(edges, self.inputs, given, allow_unused=True, retain_graph=True)
        finally:
            self.saved = []
        return list(found)

    def _pack(self, tensor: Tensor) -> int:
        self.saved.append(tensor.detach())
        return len(self.saved) - 1

    def _unpack(self, number: int) -> Tensor:
        return self.saved[number]


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorate a backward so that differentiating its gradients raises Unsupported.

    torch's decorator of this name raises only if the incoming gradient has a graph; that of a plain sum has none, and
    the second derivative would be reported as "unused".
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Gradients:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        anchor = torch.zeros((), requires_grad=True, device="cpu")
        return tuple(None if each is None else _NoSecondDerivative.apply(anchor, each) for each in found)

    return run


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise Unsupported(
            "a wrapper over ranks has no second derivative",
            ["its backward exchanges tensors and is not recorded"],
            "in one process, backend='reference' has double backward",
        )
