"""An operator's own graph inside of an autograd.Function: run apart from the caller's, and read by its backward."""

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


class Entrance(torch.autograd.Function):
    """The inputs of a graph within a graph: edges at which gradients are read, and which hold no memory."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, needs: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, ...]:
        entered = tuple(x.view_as(x) for x in tensors)
        ctx.mark_non_differentiable(*(x for x, need in zip(entered, needs, strict=True) if not need))
        return entered

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("gradients are read at this edge")


class Inside:
    """An operator's own graph, run apart from the caller's: its edges, and the tensors that it saved, by number.

    The tensors themselves are saved by the function round it, so that what they obey (memory freed by the backward,
    activation checkpointing, offloading) holds for these too.
    """

    def __init__(self) -> None:
        self.saved: list[Tensor] = []
        self.inputs: list[GradientEdge] = []
        self.outputs: list[GradientEdge | None] = []

    def run(
        self, compute: Callable[[Sequence[Tensor]], Outputs], tensors: Sequence[Tensor], needs: Sequence[bool]
    ) -> Outputs:
        """compute(tensors), where gradients reach those that need one."""
        with torch.enable_grad(), saved_tensors_hooks(self._put, self._get):
            anchor = torch.zeros((), requires_grad=True, device="cpu")
            entered = Entrance.apply(anchor, needs, *tensors)
            self.inputs = [get_gradient_edge(x) for x, need in zip(entered, needs, strict=True) if need]
            outputs = compute(entered)
            self.outputs = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        return tuple(x.detach() for x in outputs)

    def taken(self) -> list[Tensor]:
        """The tensors that the graph needs, for the function round it to save; here they are forgotten."""
        saved, self.saved = self.saved, []
        return saved

    def gradients(self, grads: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient at each input that needs one, from those of the outputs and what was `taken`; None: no path."""
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

    def _put(self, tensor: Tensor) -> int:
        self.saved.append(tensor.detach())
        return len(self.saved) - 1

    def _get(self, number: int) -> Tensor:
        return self.saved[number]


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A backward whose gradients have no gradient: they raise Unsupported where one is asked for.

    torch's decorator of this name says so only where the incoming gradient has a graph; that of a plain sum has none,
    and the second derivative would be "unused".
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Gradients:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        anchor = torch.zeros((), requires_grad=True, device="cpu")
        return tuple(None if each is None else _Last.apply(anchor, each) for each in found)

    return run


class _Last(torch.autograd.Function):
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
