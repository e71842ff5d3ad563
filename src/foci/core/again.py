"""How a call that repeats an earlier one reaches its backend without being bound, checked or dispatched again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.core import plans
from foci.core.spec import Backend, Outputs
from foci.core.steps import choice


class Way(NamedTuple):
    """How a backend runs a call; `training` (where it has its own backward) runs it, or a replay, under autograd."""

    run: Callable[[Any], Outputs]
    training: Callable[[Callable[[], Outputs] | None, Rest | None, Any], Outputs] | None = None


def traced(call: Any) -> bool:
    """Whether the call becomes part of a graph, in which it must be one op of ours, or has a tensor subclass.

    Other modes do not count: torch.utils.checkpoint must save the same tensors when it recomputes, and a mode may be on
    in one of the two runs only.
    """
    if torch.compiler.is_compiling() or plans.transformed() or plans.scripting():
        return True
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return (tracer is not None and tracer.get_proxy_mode() is not None) or not plans.literal(call)


def whole(values: tuple[Any, ...], call: Any, compute: Callable[..., Outputs]) -> plans.Through | None:
    """A Through that calls `compute` on the tensors; None where the Call holds other tensors than the arguments."""
    given, tensors = ([x for x in each if isinstance(x, Tensor)] for each in (values, call))
    if len(given) != len(tensors) or any(x is not y for x, y in zip(given, tensors, strict=True)):
        return None
    return lambda _, tensors: compute(*tensors)


def by_torch(backend: Backend, call: Any) -> Callable[..., Outputs] | None:
    """A function from the call's tensors to its first output, by a torch op with its own autograd formula.

    So the backward runs no Python of ours. None where the backend has no such function for this call.
    """
    find = getattr(backend.load(), "by_torch", None)
    compute: Callable[..., Outputs] | None = None if find is None else find(call)
    if compute is None or plans.autocast(call[0]) is None:
        return compute

    def unrounded(*tensors: Tensor) -> Outputs:
        with plans.unrounded(tensors[0]):
            return compute(*tensors)

    return unrounded


def decided(way: Way, backend: Backend, values: tuple[Any, ...], call: Any) -> plans.Through | None:
    """The Through of calls like this one on a backend that launches no Triton kernels; None: they run as written."""
    alike = getattr(backend.load(), "alike", None)
    if alike is None or way.training is None:
        run, make = way.run, type(call)._make
        return through_of(values, call, lambda _, rest, filled: run(make(filled)))
    forward, backward = alike(call)
    backward = functools.partial(as_written, backward)  # whether autocast is on is known only when it runs
    if plans.autocast(call[0]) is not None:
        forward = functools.partial(as_written, forward)
    if not plans.wants_gradient(call):
        return through_of(values, call, lambda _, rest, filled: forward(filled))
    training = way.training

    def trained(_: Any, rest: Rest, filled: tuple[Any, ...]) -> Outputs:
        return training(functools.partial(forward, filled), rest, filled)

    return through_of(values, call, trained, backward)


def through_of(values: tuple[Any, ...], call: Any, run: Any, backward: Any = None) -> plans.Through | None:
    """A Through that calls `run` without binding arguments to a Call; None where they must be bound every time.

    That needs the Call's tensors to be the arguments themselves, in order, or reshapes of them that share their memory.
    `backward` computes the gradients of such calls where no plan does.
    """
    given = [value for value in values if isinstance(value, Tensor)]
    places = [place for place, value in enumerate(call) if isinstance(value, Tensor)]
    if run is None or len(given) != len(places):
        return None
    shapes = [None if call[place] is x else call[place].shape for place, x in zip(places, given, strict=True)]
    for place, x, shape in zip(places, given, shapes, strict=True):
        if shape is not None and not (x.numel() == shape.numel() and _same_memory(x.detach().view(shape), call[place])):
            return None
    rest = Rest(call, lasts=True)
    rest.backward = backward
    viewed = [(place, shape) for place, shape in enumerate(shapes) if shape is not None]

    def through(play: Callable[[], Outputs] | None, tensors: list[Tensor]) -> Outputs:
        tensors = tensors.copy()  # a replay appends its allocations to the list
        for place, shape in viewed:
            tensors[place] = tensors[place].view(shape)
        outputs: Outputs = run(play, rest, rest.filled(tensors))
        return outputs

    return through


class Rest:
    """The values of a call that are no tensors, and how to put tensors back in between them.

    `lasts`: one object serves all calls with the same key, and so does its `backward`.
    """

    backward: Callable[..., Any] | None = None

    def __init__(self, values: Sequence[Any], lasts: bool = False) -> None:
        self.lasts = lasts
        places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
        others = [place for place, value in enumerate(values) if not isinstance(value, Tensor)]
        self.tensors, self.holes = choice(places), holes(values)
        self.others = [values[place] for place in others]
        order = [*places, *others]
        self.order = choice([order.index(place) for place in range(len(order))])

    def filled(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        return self.order(tensors + self.others)


def holes(values: Sequence[Any]) -> list[Any]:
    """The values, each tensor replaced by the class Tensor as a placeholder."""
    return [Tensor if isinstance(value, Tensor) else value for value in values]


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.dtype == y.dtype


def as_written(compute: Callable[..., Any], call: Any, *rest: Any) -> Any:
    with plans.unrounded(call[0]):
        return compute(call, *rest)
