"""The fast path: a call that repeats an earlier one reaches its backend without binding, checks or dispatch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.core import plans
from foci.core.replay import CallWrapper, tuple_getter
from foci.core.spec import Backend, Outputs


class BackendRunner(NamedTuple):
    """How a backend runs a call; `training` (where it has its own backward) runs it, or a replay, under autograd."""

    run: Callable[[Any], Outputs]
    training: Callable[[Callable[[], Outputs] | None, CallTemplate | None, Any], Outputs] | None = None


def must_be_one_op(call: Any) -> bool:
    """Whether the call becomes part of a graph, in which it must be one op of ours, or has a tensor subclass.

    Other modes do not count: torch.utils.checkpoint must save the same tensors when it recomputes, and a mode may be on
    in one of the two runs only.
    """
    if torch.compiler.is_compiling() or plans.transformed() or plans.jit_tracing():
        return True
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return (tracer is not None and tracer.get_proxy_mode() is not None) or not plans.all_plain(call)


def wrap_compute(values: tuple[Any, ...], call: Any, compute: Callable[..., Outputs]) -> CallWrapper | None:
    """A CallWrapper that calls `compute` on the tensors; None where the Call holds other tensors than the arguments."""
    given, tensors = ([x for x in each if isinstance(x, Tensor)] for each in (values, call))
    if len(given) != len(tensors) or any(x is not y for x, y in zip(given, tensors, strict=True)):
        return None
    return lambda _, tensors: compute(*tensors)


def torch_op(backend: Backend, call: Any) -> Callable[..., Outputs] | None:
    """A function from the call's tensors to its first output, by a torch op with its own autograd formula.

    So the backward runs no Python of ours. None where the backend has no such function for this call.
    """
    find = getattr(backend.load(), "torch_op", None)
    compute: Callable[..., Outputs] | None = None if find is None else find(call)
    if compute is None or plans.autocast_dtype(call[0]) is None:
        return compute

    def unrounded(*tensors: Tensor) -> Outputs:
        with plans.without_autocast(tensors[0]):
            return compute(*tensors)

    return unrounded


def wrap_backend(runner: BackendRunner, backend: Backend, values: tuple[Any, ...], call: Any) -> CallWrapper | None:
    """The CallWrapper of calls like this on a backend that launches no Triton kernels; None: they run as written."""
    specialize = getattr(backend.load(), "specialize", None)
    if specialize is None or runner.training is None:
        run, make = runner.run, type(call)._make
        return wrap_run(values, call, lambda _, template, filled: run(make(filled)))
    forward, backward = specialize(call)
    backward = functools.partial(run_without_autocast, backward)  # whether autocast is on is known only when it runs
    if plans.autocast_dtype(call[0]) is not None:
        forward = functools.partial(run_without_autocast, forward)
    if not plans.wants_gradient(call):
        return wrap_run(values, call, lambda _, template, filled: forward(filled))
    training = runner.training

    def trained(_: Any, template: CallTemplate, filled: tuple[Any, ...]) -> Outputs:
        return training(functools.partial(forward, filled), template, filled)

    return wrap_run(values, call, trained, backward)


def wrap_run(values: tuple[Any, ...], call: Any, run: Any, backward: Any = None) -> CallWrapper | None:
    """A CallWrapper that calls `run` without binding arguments to a Call; None where they must be bound every time.

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
    template = CallTemplate(call, shared=True)
    template.backward = backward
    reshaped = [(place, shape) for place, shape in enumerate(shapes) if shape is not None]

    def wrapper(replay: Callable[[], Outputs] | None, tensors: list[Tensor]) -> Outputs:
        tensors = tensors.copy()  # a replay appends its allocations to the list
        for place, shape in reshaped:
            tensors[place] = tensors[place].view(shape)
        outputs: Outputs = run(replay, template, template.fill(tensors))
        return outputs

    return wrapper


class CallTemplate:
    """The values of a call that are no tensors, and how to put tensors back in between them.

    `shared`: one object serves all calls with the same key, and so does its `backward`.
    """

    backward: Callable[..., Any] | None = None

    def __init__(self, values: Sequence[Any], shared: bool = False) -> None:
        self.shared = shared
        places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
        others = [place for place, value in enumerate(values) if not isinstance(value, Tensor)]
        self.tensors, self.placeholders = tuple_getter(places), with_placeholders(values)
        self.others = [values[place] for place in others]
        order = [*places, *others]
        self.order = tuple_getter([order.index(place) for place in range(len(order))])

    def fill(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        return self.order(tensors + self.others)


def with_placeholders(values: Sequence[Any]) -> list[Any]:
    """The values, each tensor replaced by the class Tensor as a placeholder."""
    return [Tensor if isinstance(value, Tensor) else value for value in values]


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.dtype == y.dtype


def run_without_autocast(compute: Callable[..., Any], call: Any, *rest: Any) -> Any:
    with plans.without_autocast(call[0]):
        return compute(call, *rest)
