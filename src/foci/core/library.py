"""The only door to torch.library: forward op, backward op, fake and one autograd.Function, all from a Spec."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from foci.core import plans
from foci.core.again import Rest, Way, as_written, by_torch, decided, holes, through_of, traced, whole
from foci.core.ahead import compiled_ahead
from foci.core.errors import Unsupported
from foci.core.select import choose
from foci.core.spec import Backend, Outputs, Spec
from foci.core.steps import choice

_SCHEMA_TYPES = {Tensor: "Tensor", float: "float", bool: "bool", int: "int", str: "str"}
Pair = tuple[Callable[..., Any], Callable[..., Any]]
_LIBRARY = torch.library.Library("foci", "DEF")
_unwrapped: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
_LISTENER: ContextVar[Callable[[Any], object] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listen: Callable[[Any], object]) -> Iterator[None]:
    """Inside, `listen` is told each Call that a public function makes, before it runs, whichever way that is."""
    before = _LISTENER.set(listen)
    try:
        yield
    finally:
        _LISTENER.reset(before)


class Runner:
    """Runs calls of one Spec on any of its backends.

    A backend with its own `backward` becomes the op pair `foci::<operator>_<backend>_fwd` and `_bwd`, opaque to the
    compiler and wired once to an autograd.Function (setup_context and vmap, so that torch.func works), and `_alone`
    where its forward keeps something that only a backward wants. One without runs as plain torch.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._ways = {
            backend.name: _opaque(spec, backend) if _brings_gradient(backend) else _transparent(backend)
            for backend in spec.backends
        }

    def __call__(self, backend: Backend, call: Any) -> Outputs:
        return self._ways[backend.name].run(call)

    def given(
        self, bind: Callable[..., Any], first: tuple[Any, ...], rest: dict[str, Any], backend: str | None,
        single: bool = False,
    ) -> Outputs:  # fmt: skip
        """The outputs of `bind(*first, **rest)`, a public function's call, by the backend that is named or chosen.

        What is given is all that decides about the call, its tensors in the order of the Call. On a GPU, where nobody
        watches, a call like one before is neither checked nor dispatched again; autograd is told where it must be.
        `single`: nobody asks for more than the first output, and there may be no other.
        """
        values = (*first, *rest.values())
        listen = None if torch.compiler.is_compiling() else _LISTENER.get()
        key, played = plans.again((self, single), (*values, backend)) if listen is None else (None, None)
        if played is not None:
            return played
        call = bind(*first, **rest)
        if listen is not None:
            listen(call)
        single = single and plans.on_gpu(call[0]) and not traced(call)
        chosen = choose(self.spec, call, backend, single)
        compute = by_torch(chosen, call) if single else None
        if compute is not None:
            if key is not None:
                plans.decide(key, whole(values, call, compute), call[0].device)
            return compute(*[value for value in _alive(call) if isinstance(value, Tensor)])
        made = self(chosen, call)
        if key is not None:
            self._learn(key, values, chosen, call)
        return made

    def _learn(self, key: Any, values: tuple[Any, ...], chosen: Backend, call: Any) -> None:
        way = self._ways[chosen.name]
        if "triton" not in chosen.needs:
            return plans.decide(key, decided(way, chosen, values, call), call[0].device)
        forward: Callable[..., Any] = chosen.load().forward
        if not plans.wants_gradient(values):
            return plans.learn(key, values, forward, call)
        through = through_of(values, call, way.training)
        return plans.learn(key, values, forward, (*call, *(True,) * _keeps(chosen)), through)


def _brings_gradient(backend: Backend) -> bool:
    # A backend whose package is absent is never chosen, but its ops exist: saved programs name them.
    return bool(backend.missing()) or hasattr(backend.load(), "backward")


_Playing = tuple[Callable[[], Outputs], Rest]  # what plays a call, and what is known of it


def _transparent(backend: Backend) -> Way:
    forward: Callable[[Any], Outputs] = backend.load().forward
    return Way(lambda call: as_written(forward, call))


def _computed(backend: Backend, compute: Callable[..., Any], call: Any, *rest: Any) -> Any:
    """What a backend makes of a call; kernels by their plan, where the call is of a kind that was seen before."""
    if "triton" not in backend.needs:
        return as_written(compute, call, *rest)
    values = [*call]
    for part in rest:
        values += part if isinstance(part, tuple) else (part,)
    return plans.played(
        compute, values, lambda: as_written(compute, call, *rest), lambda: compiled_ahead(compute, call, *rest)
    )


def _opaque(spec: Spec, backend: Backend) -> Way:
    ops = _define(spec, backend)
    function = _function(spec, backend, ops)
    alone = _define_alone(spec, backend) if _keeps(backend) else ops[0][0]
    count = len(spec.output_names)
    # A Function's own `apply` does the same, but asks `inspect` for the signature of its forward at every call: 20 us.
    plainly = super(torch.autograd.Function, function).apply

    def tangents(*_: Any) -> Any:
        raise Unsupported(
            f"{spec.function}: backend {backend.name!r} has no forward-mode derivative (jvp)",
            ["its forward is an opaque op"],
            "use backend='reference' for forward mode",
        )

    # The compiler refuses what has a jvp.
    for_transforms: Any = type(function.__name__, (function,), {"jvp": staticmethod(tangents)})
    for op in {ops[0][0], alone}:
        # as many as this op gives: what is kept is the last
        _differentiable(op, lambda *values, op=op: for_transforms.apply(None, *values)[: len(op._schema.returns)])

    def training(play: Callable[[], Outputs] | None, rest: Rest | None, call: Any) -> Outputs:
        outputs: Outputs = plainly(None if play is None else (play, rest), *call)
        return outputs[:count]

    def run(call: Any) -> Outputs:
        trained = plans.transformed() or plans.wants_gradient(call)
        if trained and not plans.scripting():  # a trace has the op, which brings its gradient
            if not torch.compiler.is_compiling() and not plans.transformed():
                return training(None, None, _alive(call))
            way = function if torch.compiler.is_compiling() else for_transforms
            differentiable: Outputs = way.apply(None, *_distinct(call))
            return differentiable[:count]
        if _watched(call):
            opaque: Outputs = alone(*call)
            return opaque
        # Plain eager without gradients: the dispatcher has nothing to add, and costs as much as a tiny attention.
        plain: Outputs = _computed(backend, backend.load().forward, _alive(call))
        return plain

    return Way(run, training)


def _said(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """None for a gradient of no elements, such as the compiler makes for a state that nobody asked for.

    The first output is always asked for.
    """
    return grads[0], *[x if x is None or x.numel() else None for x in grads[1:]]


def _own(outputs: Outputs) -> Outputs:
    """The outputs, none a view: autograd lets nobody change a Function's views in place."""
    return tuple([x.detach() if x._is_view() else x for x in outputs])


def _keeps(backend: Backend) -> bool:
    """Whether the forward leaves one tensor more for the backward (core/spec.py: Backend)."""
    return not backend.missing() and hasattr(backend.load(), "kept")


def _distinct(call: Any) -> Any:
    """The values, a tensor that stands twice (q as k, offsets as both) once as a view: the compiler needs that."""
    if not torch.compiler.is_compiling():
        return call
    seen: list[Any] = []
    for value in call:
        again = isinstance(value, Tensor) and any(value is other for other in seen)
        seen.append(value.view_as(value) if again else value)
    return seen


def _watched(call: Any) -> bool:
    """Whether the compiler, a profiler, a subclass, a meta tensor or a mode (tracer, counter) must see one op.

    Or torch's dispatcher must make a tensor what it stands for.
    """
    return plans.watched() or call[0].is_meta or not plans.literal(call)


def _alive(call: Any) -> Any:
    """The call with tensors that have memory in place of those that stand for them, of a transform that has ended."""
    return call._make(_unwrapped(x) if isinstance(x, Tensor) else x for x in call)


def _has_tangent(values: Sequence[Any]) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in values)


def _define(spec: Spec, backend: Backend) -> tuple[Pair, Pair]:
    """The forward and the backward, each as an op and as the function that the op calls."""
    assert spec.call is not None and spec.outputs is not None
    arguments = _schema(spec.call)
    keeps = _keeps(backend)
    made = spec.output_names + ("kept",) * keeps
    results = ", ".join("Tensor" for _ in made)
    gradients = ", ".join(f"Tensor? grad_{name}" for name in spec.output_names)
    saved = ", ".join(f"Tensor saved_{name}" for name in made)
    returned = ", ".join("Tensor?" for _ in spec.differentiable)
    name = f"{spec.name}_{backend.name}"
    count, call_type, declared = len(spec.output_names), spec.call, spec.outputs
    place = count + len(made)  # of `needs` among the arguments of the backward
    _LIBRARY.define(f"{name}_fwd({arguments}) -> ({results})")
    _LIBRARY.define(f"{name}_bwd({gradients}, {saved}, bool[] needs, {arguments}) -> ({returned})")

    def forward(*values: Any) -> Outputs:
        return _own(_computed(backend, backend.load().forward, call_type(*values), *(True,) * keeps))

    def forward_fake(*values: Any) -> Outputs:
        call = call_type(*values)
        outputs = declared(call) + ((backend.load().kept(call),) if keeps else ())
        return tuple(output.empty(values[0]) for output in outputs)

    def backward(*values: Any) -> tuple[Tensor | None, ...]:
        grads, outputs, needs = values[:count], values[count:place], values[place]
        call, compute = call_type(*values[place + 1 :]), backend.load().backward
        found: tuple[Tensor | None, ...] = _computed(backend, compute, call, outputs, _said(grads), needs)
        return found

    def backward_fake(*values: Any) -> tuple[Tensor | None, ...]:
        call, needs = call_type(*values[place + 1 :]), values[place]
        wanted = ((getattr(call, argument), need) for argument, need in zip(spec.differentiable, needs, strict=True))
        return tuple(tensor.new_empty(tensor.shape) if need else None for tensor, need in wanted)

    for suffix, real, fake in (("fwd", forward, forward_fake), ("bwd", backward, backward_fake)):
        _LIBRARY.impl(f"{name}_{suffix}", real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"foci::{name}_{suffix}", fake, lib=_LIBRARY)
    ops = torch.ops.foci
    return (getattr(ops, f"{name}_fwd").default, forward), (getattr(ops, f"{name}_bwd").default, backward)


def _define_alone(spec: Spec, backend: Backend) -> Any:
    """The forward of a backend that keeps something, without it: for the compiler where no gradient is asked for."""
    assert spec.call is not None and spec.outputs is not None
    name, call_type, declared = f"{spec.name}_{backend.name}_alone", spec.call, spec.outputs
    _LIBRARY.define(f"{name}({_schema(call_type)}) -> ({', '.join('Tensor' for _ in spec.output_names)})")

    def forward(*values: Any) -> Outputs:
        outputs: Outputs = as_written(backend.load().forward, call_type(*values))
        return outputs

    def fake(*values: Any) -> Outputs:
        return tuple(output.empty(values[0]) for output in declared(call_type(*values)))

    _LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"foci::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.foci, name).default


def _differentiable(op: Any, apply: Callable[..., Any]) -> None:
    """Have autograd find `apply` where the op is called by itself, as a program does that was exported.

    Within the op it sees nothing: not what a backend writes in place either.
    """

    def run(*values: Any) -> Any:
        if plans.wants_gradient(values) or _has_tangent(values):
            if torch._C._functorch.maybe_current_level() is not None:
                raise Unsupported(
                    f"{op._schema.name}: a transform of torch.func differentiates it where it is called by itself",
                    ["it is an op of a graph that was made before"],
                    "transform what the graph was made of, or differentiate the graph by torch.autograd",
                )
            return apply(*values)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*values)

    _LIBRARY.impl(op._schema.name, run, "Autograd")


def _guarded(spec: Spec, backend: Backend, backward_op: Any) -> Any:
    """The backward op where something could be differentiated again: a second derivative through it would be zero."""

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(*values: Any) -> tuple[Tensor | None, ...]:
            gradients: tuple[Tensor | None, ...] = backward_op(*values)
            return gradients

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            return None

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise Unsupported(
                f"{spec.function}: backend {backend.name!r} has no second derivative",
                ["its backward is an opaque op"],
                "use backend='reference' for double backward",
            )

        @staticmethod
        def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
            return _one_by_one(Gradient.apply, info.batch_size, in_dims, values)

    Gradient.__name__ = Gradient.__qualname__ = f"{spec.name}_{backend.name}_bwd"
    _differentiable(backward_op, Gradient.apply)
    return Gradient


def _function(spec: Spec, backend: Backend, ops: tuple[Pair, Pair]) -> Any:
    """The one autograd.Function of a backend. What its backward reads is exactly what setup_context saves.

    Its values are those of the call behind what plays them, or None.
    """
    (forward_op, plain_forward), backward_ops = ops
    fields = tuple(typing.get_type_hints(spec.call))
    places = tuple(fields.index(name) for name in spec.differentiable)
    count, keeps, planned = len(spec.output_names), _keeps(backend), "triton" in backend.needs
    gradients = _gradients(spec, backend, backward_ops, (count, count + keeps), places, len(fields))

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(playing: _Playing | None, *values: Any) -> Outputs:
            if playing is not None:
                return playing[0]()
            outputs: Outputs = (forward_op if _watched(values) else plain_forward)(*values)
            return outputs

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            playing, *values = inputs
            if torch.compiler.is_compiling() or (playing is None and not planned):
                ctx.rest = holes(values)
                tensors = [value for value in values if isinstance(value, Tensor)]
            else:
                ctx.known = Rest(values) if playing is None else playing[1]
                ctx.rest, tensors = ctx.known.holes, ctx.known.tensors(values)
            ctx.save_for_backward(*tensors, *output)
            ctx.set_materialize_grads(False)
            if keeps:
                ctx.mark_non_differentiable(output[count])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors  # once: a checkpoint's hooks give them but once
            if torch.compiler.is_compiling() or not any(map(_of_many, grads)):
                return gradients(ctx, saved, grads)
            return _row_by_row(lambda *row: gradients(ctx, saved, row), grads)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
            return _one_by_one(Forward.apply, info.batch_size, in_dims, values)

    Forward.__name__ = Forward.__qualname__ = f"{spec.name}_{backend.name}_fwd"
    return Forward


def _gradients(
    spec: Spec, backend: Backend, ops: Pair, counts: tuple[int, int], places: tuple[int, ...], size: int
) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward of its Function, of what was saved; `counts`, `places` and `size` as `_by_plan` has them."""
    (count, made), (op, plain) = counts, ops
    guarded, by_plan = _guarded(spec, backend, op), _by_plan(backend, counts, places, size)

    def gradients(ctx: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            played = by_plan(ctx, saved, grads)
            if played is not None:
                return played
        outputs, tensors, grads = saved[-made:], iter(saved[:-made]), grads[:count]
        call = [next(tensors) if value is Tensor else value for value in ctx.rest]
        needs = [ctx.needs_input_grad[1 + place] for place in places]
        if torch.is_grad_enabled() or plans.transformed():
            run = guarded.apply
        else:
            run = op if _watched((*call, *grads)) else plain
        found: list[Tensor | None] = [None] * len(call)
        for place, gradient in zip(places, run(*grads, *outputs, needs, *call), strict=True):
            found[place] = gradient
        return (None, *found)

    return gradients


def _by_plan(backend: Backend, counts: tuple[int, int], places: tuple[int, ...], size: int) -> Callable[..., Any]:
    """Plays a backward of this backend, or runs it as was decided with its forward, else None.

    Autograd's thread is slow, so it does little.

    `counts`: of outputs, and of all that the forward leaves; `places` of what is differentiable among `size` values.
    """
    count, made = counts
    needed = choice([1 + place for place in places])
    spread = choice([1 + places.index(place) if place in places else 0 for place in range(-1, size)])

    def played(ctx: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> Any:
        known = getattr(ctx, "known", None)
        if known is None:  # or during the forward the compiler was at work, which may have been in another thread
            return None
        grads, needs = _said(grads[:count]), needed(ctx.needs_input_grad)
        if known.backward is not None:
            if not plans.unseen((*saved, *grads)):
                return None
            return spread((None, *known.backward(known.filled([*saved[:-made]]), saved[-made:], grads, needs)))

        def values() -> tuple[Any, ...]:
            return (*known.filled([*saved[:-made]]), *saved[-made:], *grads, [*needs])

        there = [x for x in grads if x is not None]
        apart = (known, needs, len(there) == count or tuple([x is None for x in grads])) if known.lasts else None
        found = plans.at_once(backend.load().backward, [*saved, *there], apart, values)
        return None if found is None else spread((None, *found))

    return played


def _one_by_one(apply: Callable[..., Any], count: int, in_dims: Any, values: Any) -> Any:
    """vmap by a loop over the mapped dimension: right for every mask, which folding it into the batch would not be."""

    def one(place: int) -> Any:
        # A list (`needs`) comes with a list of in_dims; only tensors are mapped.
        pairs = zip(values, in_dims, strict=True)
        return apply(*(v.select(d, place) if isinstance(v, Tensor) and d is not None else v for v, d in pairs))

    if not count:  # one of zeros says of what shapes none would be
        values = [
            v.new_zeros((*v.shape[:d], 1, *v.shape[d + 1 :])) if isinstance(v, Tensor) and d is not None else v
            for v, d in zip(values, in_dims, strict=True)
        ]
    runs = [one(place) for place in range(max(1, count))]
    stacked = tuple(None if run[0] is None else torch.stack(run)[:count] for run in zip(*runs, strict=True))
    return stacked, tuple(None if value is None else 0 for value in stacked)


def _of_many(grad: Tensor | None) -> bool:
    """Whether it stands for a row of gradients, as `is_grads_batched` makes them, and so a vectorised Jacobian."""
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)


def _row_by_row(run: Callable[..., Any], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What `run` gives of each row, as rows: a tensor that stands for many has no memory that a kernel could read."""
    level = 1  # one within another would be a second derivative
    count = next(torch._remove_batch_dim(x, level, 1, 0).shape[0] for x in grads if x is not None and _of_many(x))
    rows = [None if x is None else torch._remove_batch_dim(x, level, count, 0) for x in grads]
    found, dims = _one_by_one(run, count, [0] * len(rows), rows)
    return tuple(
        None if dim is None else torch._add_batch_dim(x, dim, level) for x, dim in zip(found, dims, strict=True)
    )


def _schema(call_type: type) -> str:
    """The op schema of a Call: its field annotations in torch's words, and its defaults.

    So a program that was saved before a field with a default was added runs on.
    """
    parts, defaults = [], getattr(call_type, "_field_defaults", {})
    for name, hint in typing.get_type_hints(call_type).items():
        options = [option for option in (typing.get_args(hint) or (hint,)) if option is not type(None)]
        optional = "?" if type(None) in typing.get_args(hint) else ""
        kind = "Tensor" if hasattr(options[0], "dim_str") else _SCHEMA_TYPES[options[0]]
        parts.append(f"{kind}{optional} {name}" + (f"={defaults[name]}" if name in defaults else ""))
    return ", ".join(parts)
