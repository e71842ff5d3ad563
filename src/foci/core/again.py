"""How calls like one before come to a backend's functions, or torch's, without being bound, checked or dispatched."""

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
    """How a backend runs a call; where it brings its gradient, also how autograd takes one, or what plays it."""

    run: Callable[[Any], Outputs]
    training: Callable[[Callable[[], Outputs] | None, Rest | None, Any], Outputs] | None = None


def traced(call: Any) -> bool:
    """Whether a graph is made of the call, of which one op of ours is to be a part; or it is of a subclass.

    Not whether anybody watches: what is computed again for a checkpoint is to save what it saved the first time, and
    only then, or not any more, a mode may be on.
    """
    if torch.compiler.is_compiling() or plans.transformed() or plans.scripting():
        return True
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return (tracer is not None and tracer.get_proxy_mode() is not None) or not plans.literal(call)


def whole(values: tuple[Any, ...], call: Any, compute: Callable[..., Outputs]) -> plans.Through | None:
    """How calls like this one, made of these values, come to `compute`; None where tensors are not what was given."""
    given, tensors = ([x for x in each if isinstance(x, Tensor)] for each in (values, call))
    if len(given) != len(tensors) or any(x is not y for x, y in zip(given, tensors, strict=True)):
        return None
    return lambda _, tensors: compute(*tensors)


def by_torch(backend: Backend, call: Any) -> Callable[..., Outputs] | None:
    """What makes of a call's tensors the first output alone, by an op of torch that autograd knows.

    So no Python of ours runs backward. None where the backend has none.
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
    """How calls like this one, made of these values, are run by a backend that launches no kernels of ours."""
    alike = getattr(backend.load(), "alike", None)
    if alike is None or way.training is None:
        run, make = way.run, type(call)._make
        return through_of(values, call, lambda _, rest, filled: run(make(filled)))
    forward, backward = alike(call)
    backward = functools.partial(as_written, backward)  # only then is known whether autocast is on
    if plans.autocast(call[0]) is not None:
        forward = functools.partial(as_written, forward)
    if not plans.wants_gradient(call):
        return through_of(values, call, lambda _, rest, filled: forward(filled))
    training = way.training

    def trained(_: Any, rest: Rest, filled: tuple[Any, ...]) -> Outputs:
        return training(functools.partial(forward, filled), rest, filled)

    return through_of(values, call, trained, backward)


def through_of(values: tuple[Any, ...], call: Any, run: Any, backward: Any = None) -> plans.Through | None:
    """How calls like this one, made of these values, come to `run` without being bound; None where they must be.

    Tensors of the call are those that were given, in their order, or views of all that one holds. `backward` runs that
    of calls like it, where no plan does.
    """
    given = [value for value in values if isinstance(value, Tensor)]
    places = [place for place, value in enumerate(call) if isinstance(value, Tensor)]
    if run is None or len(given) != len(places):
        return None
    shapes = [None if call[place] is x else call[place].shape for place, x in zip(places, given, strict=True)]
    for place, x, shape in zip(places, given, shapes, strict=True):
        if shape is not None and not (x.numel() == shape.numel() and _same(x.detach().view(shape), call[place])):
            return None
    rest = Rest(call, lasts=True)
    rest.backward = backward
    viewed = [(place, shape) for place, shape in enumerate(shapes) if shape is not None]

    def through(play: Callable[[], Outputs] | None, tensors: list[Tensor]) -> Outputs:
        tensors = tensors.copy()  # playing takes its memory behind them
        for place, shape in viewed:
            tensors[place] = tensors[place].view(shape)
        outputs: Outputs = run(play, rest, rest.filled(tensors))
        return outputs

    return through


class Rest:
    """What is no tensor among the values of a call, and how its tensors come back to their places in between.

    `lasts`: one for all calls like it, `backward` included.
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
    """The values, in place of each tensor the class: a hole."""
    return [Tensor if isinstance(value, Tensor) else value for value in values]


def _same(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.dtype == y.dtype


def as_written(compute: Callable[..., Any], call: Any, *rest: Any) -> Any:
    with plans.unrounded(call[0]):
        return compute(call, *rest)
