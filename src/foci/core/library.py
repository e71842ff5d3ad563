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

from foci.core import flops, plans
from foci.core.ahead import compile_ahead
from foci.core.errors import Unsupported
from foci.core.fast_path import (
    BackendRunner,
    CallTemplate,
    must_be_one_op,
    run_without_autocast,
    torch_op,
    with_placeholders,
    wrap_backend,
    wrap_compute,
    wrap_run,
)
from foci.core.replay import tuple_getter
from foci.core.select import choose
from foci.core.spec import Backend, Outputs, Spec, as_declared

_SCHEMA_TYPES = {Tensor: "Tensor", float: "float", bool: "bool", int: "int", str: "str"}
Pair = tuple[Callable[..., Any], Callable[..., Any]]
_LIBRARY = torch.library.Library("foci", "DEF")
_unwrapped: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
_LISTENER: ContextVar[Callable[[Any], object] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listen: Callable[[Any], object]) -> Iterator[None]:
    """Within it `listen` is called with each Call that a public function makes, before it runs on any backend."""
    before = _LISTENER.set(listen)
    try:
        yield
    finally:
        _LISTENER.reset(before)


class Runner:
    """Runs calls of one Spec on any of its backends.

    A backend with its own `backward` becomes the op pair `foci::<operator>_<backend>_fwd` and `_bwd`, opaque to the
    compiler and wired once to an autograd.Function (setup_context and vmap, so that torch.func works). Where its
    forward saves one tensor more for the backward (`kept`), the op `_alone` is the forward without it. A backend
    without `backward` runs as plain torch code.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._runners = {
            backend.name: _opaque(spec, backend) if _brings_gradient(backend) else _transparent(backend)
            for backend in spec.backends
        }

    def __call__(self, backend: Backend, call: Any) -> Outputs:
        return self._runners[backend.name].run(call)

    def given(
        self, bind: Callable[..., Any], first: tuple[Any, ...], rest: dict[str, Any], backend: str | None,
        single: bool = False,
    ) -> Outputs:  # fmt: skip
        """The outputs of `bind(*first, **rest)`, a public function's call, by the named backend or the one chosen.

        The call must depend on these arguments alone, its tensors in the order of the Call's fields. On a GPU a call
        that repeats an earlier one skips checks and dispatch, unless a mode or a profiler observes it (plans.py).
        `single`: only the first output is wanted; the others may be missing.
        """
        values = (*first, *rest.values())
        listen = None if torch.compiler.is_compiling() else _LISTENER.get()
        key = None
        if listen is None:
            key, replayed = plans.try_replay_operator((self, single), (*values, backend))
            if replayed is not None:
                return replayed
        call = bind(*first, **rest)
        if listen is not None:
            listen(call)
        single = single and plans.on_gpu(call[0]) and not must_be_one_op(call)
        chosen = choose(self.spec, call, backend, single)
        compute = torch_op(chosen, call) if single else None
        if compute is not None:
            if key is not None:
                plans.store_wrapper(key, wrap_compute(values, call, compute), call[0].device)
            return compute(*[value for value in _unwrap_dead(call) if isinstance(value, Tensor)])
        outputs = self(chosen, call)
        if key is not None:
            self._store(key, values, chosen, call)
        return outputs

    def _store(self, key: Any, values: tuple[Any, ...], chosen: Backend, call: Any) -> None:
        """Store under `key` how calls like this one are run from now on."""
        runner = self._runners[chosen.name]
        if "triton" not in chosen.needs:
            return plans.store_wrapper(key, wrap_backend(runner, chosen, values, call), call[0].device)
        forward: Callable[..., Any] = chosen.load().forward
        if not plans.wants_gradient(values):
            return plans.store_plan(key, values, forward, call)
        wrapper = wrap_run(values, call, runner.training)
        return plans.store_plan(key, values, forward, (*call, *(True,) * _saves_extra(chosen)), wrapper)


def _brings_gradient(backend: Backend) -> bool:
    # A backend whose package is absent is never chosen, but its ops exist: saved programs name them.
    return bool(backend.missing()) or hasattr(backend.load(), "backward")


_Replay = tuple[Callable[[], Outputs], CallTemplate]  # a closure that replays a call's plan, and its arguments' layout


def _transparent(backend: Backend) -> BackendRunner:
    """A backend without its own backward: plain torch code, which autograd and the compiler trace into."""
    forward: Callable[[Any], Outputs] = backend.load().forward
    return BackendRunner(lambda call: run_without_autocast(forward, call))


def _run_backend(backend: Backend, compute: Callable[..., Any], call: Any, *rest: Any) -> Any:
    """`compute`, a backend's forward or backward, of a call; replayed from its plan where kernels have one."""
    if "triton" not in backend.needs:
        return run_without_autocast(compute, call, *rest)
    flat = [*call]
    for part in rest:
        flat += part if isinstance(part, tuple) else (part,)
    return plans.replay_or_run(
        compute, flat, lambda: run_without_autocast(compute, call, *rest), lambda: compile_ahead(compute, call, *rest)
    )


def _opaque(spec: Spec, backend: Backend) -> BackendRunner:
    """A backend with its own backward: an op pair for the compiler and modes, plain calls in eager mode."""
    ops = _define(spec, backend)
    function = _autograd_function(spec, backend, ops)
    alone = _define_inference(spec, backend) if _saves_extra(backend) else ops[0][0]
    flops.add_formulas(spec, ops[0][0], ops[1][0], alone)
    count = len(spec.output_names)
    # torch.autograd.Function.apply does the same, but calls inspect.signature on forward every time: 20 us.
    apply = super(torch.autograd.Function, function).apply

    def tangents(*_: Any) -> Any:
        raise Unsupported(
            f"{spec.function}: backend {backend.name!r} has no forward-mode derivative (jvp)",
            ["its forward is an opaque op"],
            "use backend='reference' for forward mode",
        )

    # A subclass of its own, as torch.compile refuses a Function with a jvp.
    for_transforms: Any = type(function.__name__, (function,), {"jvp": staticmethod(tangents)})
    for op in {ops[0][0], alone}:
        # cut to the outputs of this op: `_alone` lacks the last, which is the one saved for the backward
        _register_autograd(op, lambda *values, op=op: for_transforms.apply(None, *values)[: len(op._schema.returns)])

    def training(replay: Callable[[], Outputs] | None, template: CallTemplate | None, call: Any) -> Outputs:
        outputs: Outputs = apply(None if replay is None else (replay, template), *call)
        return outputs[:count]

    def run(call: Any) -> Outputs:
        trained = plans.transformed() or plans.wants_gradient(call)
        if trained and not plans.jit_tracing():  # torch.jit.trace records the op; its autograd kernel has the gradient
            if not torch.compiler.is_compiling() and not plans.transformed():
                return training(None, None, _unwrap_dead(call))
            recorded = function if torch.compiler.is_compiling() else for_transforms
            differentiable: Outputs = recorded.apply(None, *_deduplicated(call))
            return differentiable[:count]
        if _needs_dispatch(call):
            if not torch.compiler.is_compiling():
                flops.tell_counters()  # the op itself does, but not in inference mode
            opaque: Outputs = alone(*call)
            return opaque
        # Plain eager without gradients: skip the dispatcher, which costs as much as a tiny attention.
        plain: Outputs = _run_backend(backend, backend.load().forward, _unwrap_dead(call))
        return plain

    return BackendRunner(run, training)


def _without_empty(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients, None for an empty one: the compiler makes zeros for the gradient of an empty (unwanted) state.

    The first is kept as it is, since the first output is always wanted.
    """
    return grads[0], *[x if x is None or x.numel() else None for x in grads[1:]]


def _detached(outputs: Outputs) -> Outputs:
    """The outputs, no longer marked as views: autograd forbids in-place changes of views that a Function returns."""
    return tuple([x.detach() if x._is_view() else x for x in outputs])


def _saves_extra(backend: Backend) -> bool:
    """Whether the forward saves one tensor more for the backward (`kept` in core/spec.py: Backend)."""
    return not backend.missing() and hasattr(backend.load(), "kept")


def _deduplicated(call: Any) -> Any:
    """The values, a tensor passed twice (q as k, one `offsets` as both) once as a view, as torch.compile requires."""
    if not torch.compiler.is_compiling():
        return call
    seen: list[Any] = []
    for value in call:
        repeated = isinstance(value, Tensor) and any(value is other for other in seen)
        seen.append(value.view_as(value) if repeated else value)
    return seen


def _needs_dispatch(call: Any) -> bool:
    """Whether the call must go through torch's dispatcher as one op.

    So for the compiler, a profiler, a mode (tracer, counter), a subclass or meta tensors, and where the dispatcher must
    resolve a conjugate, negative or zero tensor.
    """
    return plans.must_dispatch() or call[0].is_meta or not plans.all_plain(call)


def _unwrap_dead(call: Any) -> Any:
    """The call, functorch wrappers left over from a transform that has ended replaced by the tensors they wrap."""
    return call._make(_unwrapped(x) if isinstance(x, Tensor) else x for x in call)


def _has_tangent(values: Sequence[Any]) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in values)


def _define(spec: Spec, backend: Backend) -> tuple[Pair, Pair]:
    """The forward and the backward, each as an op and as the function that the op calls."""
    assert spec.call is not None and spec.outputs is not None
    arguments = _schema(spec.call)
    keeps = _saves_extra(backend)
    made = spec.output_names + ("kept",) * keeps
    results = ", ".join("Tensor" for _ in made)
    gradients = ", ".join(f"Tensor? grad_{name}" for name in spec.output_names)
    saved = ", ".join(f"Tensor saved_{name}" for name in made)
    returned = ", ".join("Tensor?" for _ in spec.differentiable)
    name = f"{spec.name}_{backend.name}"
    count, call_type, declared = len(spec.output_names), spec.call, spec.outputs
    place = count + len(made)  # index of `needs` among the arguments of the backward
    _LIBRARY.define(f"{name}_fwd({arguments}) -> ({results})")
    _LIBRARY.define(f"{name}_bwd({gradients}, {saved}, bool[] needs, {arguments}) -> ({returned})")

    def forward(*values: Any) -> Outputs:
        return _detached(_run_backend(backend, backend.load().forward, call_type(*values), *(True,) * keeps))

    def forward_fake(*values: Any) -> Outputs:
        call = call_type(*values)
        outputs = declared(call) + ((backend.load().kept(call),) if keeps else ())
        return tuple(output.empty(values[0]) for output in outputs)

    def backward(*values: Any) -> tuple[Tensor | None, ...]:
        grads, outputs, needs = values[:count], as_declared(values[count:place]), values[place]
        call, compute = call_type(*values[place + 1 :]), backend.load().backward
        found: tuple[Tensor | None, ...] = _run_backend(backend, compute, call, outputs, _without_empty(grads), needs)
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


def _define_inference(spec: Spec, backend: Backend) -> Any:
    """The op `_alone`: the forward without the extra saved tensor, for compiled calls that need no gradient."""
    assert spec.call is not None and spec.outputs is not None
    name, call_type, declared = f"{spec.name}_{backend.name}_alone", spec.call, spec.outputs
    _LIBRARY.define(f"{name}({_schema(call_type)}) -> ({', '.join('Tensor' for _ in spec.output_names)})")

    def forward(*values: Any) -> Outputs:
        outputs: Outputs = run_without_autocast(backend.load().forward, call_type(*values))
        return outputs

    def fake(*values: Any) -> Outputs:
        return tuple(output.empty(values[0]) for output in declared(call_type(*values)))

    _LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"foci::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.foci, name).default


def _register_autograd(op: Any, apply: Callable[..., Any]) -> None:
    """Register `apply` as the op's autograd kernel, for callers of the bare op, such as exported programs.

    Inside the op autograd is off, also for what a backend writes in place.
    """

    def run(*values: Any) -> Any:
        flops.tell_counters()
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


def _once_differentiable(spec: Spec, backend: Backend, backward_op: Any) -> Any:
    """The backward op as a Function that raises on double backward, which would otherwise silently be zero."""

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
            return _vmap_by_loop(Gradient.apply, info.batch_size, in_dims, values)

    Gradient.__name__ = Gradient.__qualname__ = f"{spec.name}_{backend.name}_bwd"
    _register_autograd(backward_op, Gradient.apply)
    return Gradient


def _autograd_function(spec: Spec, backend: Backend, ops: tuple[Pair, Pair]) -> Any:
    """The one autograd.Function of a backend. What its backward reads is exactly what setup_context saves.

    Its arguments are a _Replay, or None, and the values of the call.
    """
    (forward_op, plain_forward), backward_ops = ops
    fields = tuple(typing.get_type_hints(spec.call))
    places = tuple(fields.index(name) for name in spec.differentiable)
    count, keeps, planned = len(spec.output_names), _saves_extra(backend), "triton" in backend.needs
    gradients = _gradients(spec, backend, backward_ops, (count, count + keeps), places, len(fields))

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(replay: _Replay | None, *values: Any) -> Outputs:
            if replay is not None:
                return replay[0]()
            outputs: Outputs = (forward_op if _needs_dispatch(values) else plain_forward)(*values)
            return outputs

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            replay, *values = inputs
            if torch.compiler.is_compiling() or (replay is None and not planned):
                ctx.placeholders = with_placeholders(values)
                tensors = [value for value in values if isinstance(value, Tensor)]
            else:
                ctx.template = CallTemplate(values) if replay is None else replay[1]
                ctx.placeholders, tensors = ctx.template.placeholders, ctx.template.tensors(values)
            ctx.save_for_backward(*tensors, *output)
            ctx.set_materialize_grads(False)
            if keeps:
                ctx.mark_non_differentiable(output[count])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors  # read once: the hooks of torch.utils.checkpoint unpack them only once
            if torch.compiler.is_compiling() or not any(map(_is_batched, grads)):
                return gradients(ctx, saved, grads)
            return _unbatched(lambda *row: gradients(ctx, saved, row), grads)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
            return _vmap_by_loop(Forward.apply, info.batch_size, in_dims, values)

    Forward.__name__ = Forward.__qualname__ = f"{spec.name}_{backend.name}_fwd"
    return Forward


def _gradients(
    spec: Spec, backend: Backend, ops: Pair, counts: tuple[int, int], places: tuple[int, ...], size: int
) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward of the Function, given its saved tensors; `counts`, `places`, `size`: see `_replay_backward`."""
    (count, made), (op, plain) = counts, ops
    guarded, replay = _once_differentiable(spec, backend, op), _replay_backward(backend, counts, places, size)

    def gradients(ctx: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            replayed = replay(ctx, saved, grads)
            if replayed is not None:
                return replayed
        outputs, tensors, grads = saved[-made:], iter(saved[:-made]), grads[:count]
        call = [next(tensors) if value is Tensor else value for value in ctx.placeholders]
        needs = [ctx.needs_input_grad[1 + place] for place in places]
        if torch.is_grad_enabled() or plans.transformed():
            run = guarded.apply
        else:
            run = op if _needs_dispatch((*call, *grads)) else plain
        found: list[Tensor | None] = [None] * len(call)
        for place, gradient in zip(places, run(*grads, *outputs, needs, *call), strict=True):
            found[place] = gradient
        return (None, *found)

    return gradients


def _replay_backward(
    backend: Backend, counts: tuple[int, int], places: tuple[int, ...], size: int
) -> Callable[..., Any]:
    """A function that replays the plan of a backward, or runs the one stored with its forward, else returns None.

    It does little, as it is Python on autograd's thread. `counts`: how many outputs the operator has, and how many
    tensors its forward returns (one more with `kept`); `places`: indices of the differentiable among `size` values.
    """
    count, made = counts
    needed = tuple_getter([1 + place for place in places])
    spread = tuple_getter([1 + places.index(place) if place in places else 0 for place in range(-1, size)])

    def replay(ctx: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> Any:
        template = getattr(ctx, "template", None)
        if template is None:  # no plans here, or the compiler traced the forward, perhaps on another thread
            return None
        grads, needs = _without_empty(grads[:count]), needed(ctx.needs_input_grad)
        if template.backward is not None:
            if not plans.may_bypass_dispatch((*saved, *grads)):
                return None
            return spread((None, *template.backward(template.fill([*saved[:-made]]), saved[-made:], grads, needs)))

        def values() -> tuple[Any, ...]:
            return (*template.fill([*saved[:-made]]), *saved[-made:], *grads, [*needs])

        given = [x for x in grads if x is not None]
        key = (template, needs, len(given) == count or tuple([x is None for x in grads])) if template.shared else None
        found = plans.try_replay_function(backend.load().backward, [*saved, *given], key, values)
        return None if found is None else spread((None, *found))

    return replay


def _vmap_by_loop(apply: Callable[..., Any], count: int, in_dims: Any, values: Any) -> Any:
    """vmap by a loop over the mapped dimension: folding it into the batch would be wrong for some masks."""

    def one(place: int) -> Any:
        # A list (`needs`) comes with a list of in_dims; only tensors are mapped.
        pairs = zip(values, in_dims, strict=True)
        return apply(*(v.select(d, place) if isinstance(v, Tensor) and d is not None else v for v, d in pairs))

    if not count:  # run it once on zeros, for the shapes of the empty results
        values = [
            v.new_zeros((*v.shape[:d], 1, *v.shape[d + 1 :])) if isinstance(v, Tensor) and d is not None else v
            for v, d in zip(values, in_dims, strict=True)
        ]
    runs = [one(place) for place in range(max(1, count))]
    stacked = tuple(None if run[0] is None else torch.stack(run)[:count] for run in zip(*runs, strict=True))
    return stacked, tuple(None if value is None else 0 for value in stacked)


def _is_batched(grad: Tensor | None) -> bool:
    """Whether it is a legacy batched tensor, as `is_grads_batched` and vectorised Jacobians pass to a backward."""
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)


def _unbatched(run: Callable[..., Any], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """`run` of each row of the batched gradients, batched again: kernels cannot read the memory of a batched tensor."""
    level = 1  # nested batching would need a second derivative
    count = next(torch._remove_batch_dim(x, level, 1, 0).shape[0] for x in grads if x is not None and _is_batched(x))
    rows = [None if x is None else torch._remove_batch_dim(x, level, count, 0) for x in grads]
    found, dims = _vmap_by_loop(run, count, [0] * len(rows), rows)
    return tuple(
        None if dim is None else torch._add_batch_dim(x, dim, level) for x, dim in zip(found, dims, strict=True)
    )


def _schema(call_type: type) -> str:
    """The op schema of a Call: its field annotations as schema types, and its defaults.

    With the defaults, a program saved before a field was added still runs.
    """
    parts, defaults = [], getattr(call_type, "_field_defaults", {})
    for name, hint in typing.get_type_hints(call_type).items():
        options = [option for option in (typing.get_args(hint) or (hint,)) if option is not type(None)]
        optional = "?" if type(None) in typing.get_args(hint) else ""
        kind = "Tensor" if hasattr(options[0], "dim_str") else _SCHEMA_TYPES[options[0]]
        parts.append(f"{kind}{optional} {name}" + (f"={defaults[name]}" if name in defaults else ""))
    return ", ".join(parts)
