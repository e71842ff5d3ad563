"""A cache of plans: a kernel backend's call that repeats an earlier one replays its allocations and launches.

Block sizes, grids, strides and compiled kernels of a call follow from its cache key: dtypes, shapes, strides and
alignment of its tensors, which of them are the same object, and all other arguments. The first call with a key runs as
written (kernels compile), the second is recorded while it runs, and from the third on its plan is replayed. A call that
does anything but allocate and launch (a copy, a value read from the GPU, memory of its own that outlives it) has no
plan: it runs as written every time. Neither recording nor a plan (both in replay.py) keeps a tensor alive.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from foci.core import tune
from foci.core.replay import CallWrapper, Plan, Recorder, has_pre_run_hook, replay_plan, tuple_getter

_MAX_KEYS = 4096  # keys in a cache; a full one is cleared
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_TENSOR_OR_NONE = _TENSORS | {type(None)}
_PLAIN_TYPES = _TENSOR_OR_NONE | {bool, int, float, str}
_BOOL = frozenset({bool})
_TYPES = _TENSORS | {type(None), bool, int, str, float, list}  # argument types that a key can hold
_metadata = attrgetter("dtype", "shape")
_HIP = torch.version.hip is not None
_data_ptr, _requires_grad = Tensor.data_ptr, attrgetter("requires_grad")

_FUNCTION_PLANS: dict[Any, Plan | None] = {}  # by the arguments of a backend's function; None: run it as written
_SEEN: set[Any] = set()  # keys of calls that ran at least once
_OPERATOR_PLANS: dict[Any, Plan | None] = {}  # the same plans, by the arguments of a public function
_GUARDED: dict[Any, tuple[tuple[Any, Plan], ...]] = {}  # by the key's prefix: plans, each behind a guard of its tensors
_NO_CONTEXT = nullcontext()
_MAX_GUARDS = 4  # of one prefix; they are tried before a full key is built


def try_replay_operator(operator: Any, given: Sequence[Any]) -> tuple[Any, Any]:
    """Look up the call of a public `operator`: (None, results) where its plan was replayed.

    (key, None): run the call and store it with `store_plan` or `store_wrapper`. (None, None): run it, store nothing; so
    for tensors that are not on a GPU and for a call that a tracer, transform, mode or profiler observes. The key holds
    all that argument checks and the choice of a backend depend on: types, dtypes, shapes and strides of tensors, which
    GPU, all other values, autocast's dtype, whether algorithms must be deterministic, and which tensors require a
    gradient.
    """
    described = _describe(operator, given) if on_gpu(given[0]) and _unobserved() else None
    if described is None:
        return None, None
    prefix, tensors, pointers = described
    wanted = tuple(map(_requires_grad, tensors)) if torch.is_grad_enabled() else ()
    trains = True in wanted
    prefix += (autocast_dtype(given[0]), torch._C._get_deterministic_algorithms(), wanted if trains else None)
    key, plan = _lookup(_OPERATOR_PLANS, _Described(prefix, tensors, pointers))
    if plan is None or has_pre_run_hook(plan):
        return key, None
    if plan.wrapper is None or (plan.steps and not trains):
        return None, None if trains else replay_plan(plan, tensors, pointers)
    return None, plan.wrapper(functools.partial(replay_plan, plan, tensors, pointers) if plan.steps else None, tensors)


def store_wrapper(key: Any, wrapper: CallWrapper | None, device: torch.device) -> None:
    """From now on calls with this key run `wrapper`, without argument checks or dispatch; None: they run as written."""
    if len(_OPERATOR_PLANS) >= _MAX_KEYS:
        _OPERATOR_PLANS.clear()
        _GUARDED.clear()
    _OPERATOR_PLANS[key] = None if wrapper is None else Plan((), (), tuple, (), True, device, (), wrapper)


def store_plan(
    key: Any,
    given: Sequence[Any],
    function: Callable[..., Any],
    values: Sequence[Any],
    wrapper: CallWrapper | None = None,
) -> None:
    """Store the plan of `function(*values)`, if there is one, for the public calls with this key.

    `wrapper` is its autograd wrapper, for calls that train. The values' tensors must be those of `given`, in the same
    order, or views that start at the same address. Where they are new tensors (a cast by autocast, a seed drawn per
    call), every call must make them again: None is stored, and such calls run as written.
    """
    described = _describe(function, values)
    if described is None:
        return
    try:
        plan = _FUNCTION_PLANS[_key(described)]
    except KeyError:  # not recorded yet
        return
    same_memory = [x.data_ptr() for x in given if isinstance(x, Tensor)] == described.pointers
    _OPERATOR_PLANS[key] = plan._replace(wrapper=wrapper) if plan is not None and same_memory and plan.fresh else None


def replay_or_run_one(key: Any, given: Sequence[Any], function: Callable[..., Tensor], values: Sequence[Any]) -> Tensor:
    """`function(*values)`, which returns one tensor, replayed where it has a plan; the plan is stored for `key` too."""
    (out,) = replay_or_run(function, values, lambda: (function(*values),))
    if key is not None:
        store_plan(key, given, function, values)
    made: Tensor = out
    return made


def replay_or_run(
    function: Callable[..., Any], values: Sequence[Any], run: Callable[[], Any], first: Callable[[], Any] | None = None
) -> Any:
    """`run()`, which computes `function(*values)`, or a replay of its plan; `first` precedes the key's first call."""
    described = _describe(function, values) if _usable() else None
    if described is None:
        return run()
    key, plan = _lookup(_FUNCTION_PLANS, described)
    if plan is not None and not has_pre_run_hook(plan):
        return replay_plan(plan, described.tensors, described.pointers)
    if key is None or any(x.is_complex() for x in described.tensors):  # the key does not hold the conjugate bit
        return run()
    if key not in _SEEN:  # this run compiles and loads kernels and imports modules: the next one is recorded
        if len(_SEEN) >= _MAX_KEYS:
            for cache in (_SEEN, _FUNCTION_PLANS, _OPERATOR_PLANS, _GUARDED):
                cache.clear()
        _SEEN.add(key)
        if first is not None:
            first()
        return run()
    recorder = Recorder(described.tensors)
    token = tune.LAUNCH_CALLBACK.set(recorder.launched)
    try:
        with recorder:
            results = run()
    finally:
        tune.LAUNCH_CALLBACK.reset(token)
    if _usable():  # still: another thread may have installed a hook meanwhile
        _FUNCTION_PLANS[key] = recorder.plan(results)
    return results


def try_replay_function(
    function: Callable[..., Any], tensors: list[Tensor], stand_in: Any, values: Callable[[], Sequence[Any]]
) -> tuple[Tensor | None, ...] | None:
    """`function(*values())` by replay of its plan; None where it has no plan or the call is observed.

    `tensors` are the values' tensors, in order. `stand_in` is a hashable that stands for all other values, so that a
    guard can find the plan without building them; None: there is no such stand-in, and `values()` is called.
    """
    if not _unobserved() or not _TENSORS.issuperset(map(type, tensors)):  # __torch_function__ of a subclass must run
        return None
    try:
        pointers = [*map(_data_ptr, tensors)]
    except RuntimeError:
        return None
    prefix = (function, stand_in, _current_device(), _alignment(tensors, pointers))
    plan = None if stand_in is None else _guarded(prefix, tensors)
    if plan is None:
        described = _describe(function, values())
        plan = None if described is None else _lookup(_FUNCTION_PLANS, described)[1]
        if plan is not None and stand_in is not None:
            _add_guard(prefix, tensors, plan)
    return None if plan is None or has_pre_run_hook(plan) else replay_plan(plan, tensors, pointers)


def wants_gradient(values: Sequence[Any]) -> bool:
    """Whether autograd must record an operator of these values: grad mode is on and one of them requires grad."""
    if not torch.is_grad_enabled():
        return False
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Autocast's dtype on this tensor's device; None where autocast is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context that disables autocast on this tensor's device: it would round float32 products and lse to half."""
    return _NO_CONTEXT if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def transformed() -> bool:
    """Whether vmap, torch.func.grad or forward-mode AD is active: an op without a rule would silently drop tangents."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def must_dispatch() -> bool:
    """Whether the compiler, a transform, a profiler, torch.jit.trace or a mode (tracer, counter) must see each op."""
    if torch.compiler.is_compiling() or transformed() or torch.autograd._profiler_enabled() or jit_tracing():
        return True
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0


def jit_tracing() -> bool:
    """Whether torch.jit.trace is recording."""
    return torch._C._get_tracing_state() is not None


def all_plain(values: Sequence[Any]) -> bool:
    """Whether the tensors among these are plain (no subclass) and their values are the bytes in their memory.

    Not so with the negative bit set (the imaginary part of a conjugate), nor for zero tensors, which have no memory.
    """
    if not _PLAIN_TYPES.issuperset(map(type, values)):
        return False
    tensors = [value for value in values if isinstance(value, Tensor)]
    return not (any(map(Tensor.is_neg, tensors)) or any(map(Tensor._is_zerotensor, tensors)))


def may_bypass_dispatch(values: Sequence[Tensor | None]) -> bool:
    """Whether an op on these may bypass torch's dispatcher: nothing observes the call, and none is a subclass."""
    return _unobserved() and _TENSOR_OR_NONE.issuperset(map(type, values))


def _unobserved() -> bool:
    """Whether nothing observes a call: `_usable`, and no forward-mode AD, profiler or torch function mode either."""
    if not _usable() or forward_ad._current_level >= 0 or torch.autograd._profiler_enabled():
        return False
    return torch._C._len_torch_function_stack() == 0


def _usable() -> bool:
    """Whether plans may be used: no tracer, transform, mode, launch hook, debug setting or `record_launches`."""
    if torch.compiler.is_compiling() or jit_tracing() or not tune.launches_normally():
        return False
    triton = sys.modules.get("triton")
    if triton is not None:  # else there are no launches
        runtime = triton.knobs.runtime
        if runtime.debug or runtime.add_stages_inspection_hook is not None or tune.has_launch_hooks():
            return False
        if triton.knobs.compilation.instrumentation_mode:
            return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.maybe_current_level() is None


class _Positions:
    """Positions of tensors, of hashable values, of floats and of lists among arguments of these types.

    There is one object for each tuple of types (`_positions` caches it), so in a key it stands for the types.
    """

    def __init__(self, types: tuple[type, ...]) -> None:
        def of(*wanted: type) -> list[int]:
            return [position for position, each in enumerate(types) if each in wanted]

        self.tensors, self.rest = tuple_getter(of(*_TENSORS)), tuple_getter(of(bool, int, str))
        self.floats, self.lists = of(float), of(list)


@functools.lru_cache(_MAX_KEYS)
def _positions(types: tuple[type, ...]) -> _Positions | None:
    """For arguments of these types; None where a key cannot hold one of them, or there is no tensor."""
    return None if not _TYPES.issuperset(types) or _TENSORS.isdisjoint(types) else _Positions(types)


class _Described(NamedTuple):
    """A call: the prefix of its cache key, without its tensors' metadata; its tensors, and their addresses."""

    prefix: tuple[Any, ...]
    tensors: list[Any]
    pointers: list[int]


def _describe(function: Any, values: Sequence[Any]) -> _Described | None:
    """A call of `function` (any hashable that identifies it); None where a key cannot hold one of the values."""
    positions = _positions(tuple(map(type, values)))
    if positions is None:
        return None
    tensors = [*positions.tensors(values)]
    try:
        pointers = [*map(_data_ptr, tensors)]
    except RuntimeError:  # a functorch wrapper without memory, left over from a transform that has ended
        return None
    prefix: tuple[Any, ...] = (
        function,
        _current_device(),
        positions,
        tensors[0].shape,
        _alignment(tensors, pointers),
        positions.rest(values),
    )
    for position in positions.floats:
        prefix += (values[position].hex(),)  # 0.0 == -0.0, and NaN != NaN
    for position in positions.lists:
        if not _BOOL.issuperset(map(type, values[position])):
            return None
        prefix += (tuple(values[position]),)
    return _Described(prefix, tensors, pointers)


def _alignment(tensors: Sequence[Tensor], pointers: list[int]) -> Any:
    """Addresses modulo 16 (True: all 0), which Triton specializes on; on AMD also storage sizes in units of 2 GiB."""
    aligned = not functools.reduce(or_, pointers) & 15 or tuple([pointer & 15 for pointer in pointers])
    return (aligned, *[x.untyped_storage().size() >> 31 for x in tensors]) if _HIP else aligned


def _key(described: _Described) -> tuple[Any, ...] | None:
    """The cache key: all that a plan depends on.

    None where a tensor is not on the current GPU, or its values are not the bytes in its memory (see `all_plain`).
    """
    prefix, tensors, pointers = described
    if {*map(Tensor.get_device, tensors)} != {prefix[1]} or any(map(Tensor.is_neg, tensors)):
        return None
    if 0 in pointers and any(map(Tensor._is_zerotensor, tensors)):
        return None
    identities = [*map(id, tensors)]  # of a tensor passed twice: a recording cannot tell which argument a launch means
    same = tuple(map(identities.index, identities)) if len({*identities}) < len(tensors) else None
    return (*prefix, same, *map(_metadata, tensors), *map(Tensor.stride, tensors))


def _lookup(plans: dict[Any, Plan | None], described: _Described) -> tuple[Any, Plan | None]:
    """(None, the plan or None) of a call whose key is in this cache, else (its key, None).

    Building a key takes longer than a replay. So the first plans of each prefix are also kept behind a guard: torch's
    compiler's TensorGuards, which compares in C all that a key holds of tensors: dtype, shape, strides, device and
    dispatch keys. A guard accepts no tensor twice.
    """
    plan = _guarded(described.prefix, described.tensors)
    if plan is not None:
        return None, plan
    key = _key(described)
    try:
        found = plans[key]
    except KeyError:  # `in` before it would race with a thread that clears the cache
        return key, None
    if found is not None:
        _add_guard(described.prefix, described.tensors, found)
    return None, found


def _guarded(prefix: tuple[Any, ...], tensors: list[Any]) -> Plan | None:
    for guard, plan in _GUARDED.get(prefix, ()):
        if guard.check(*tensors):
            return plan
    return None


def _add_guard(prefix: tuple[Any, ...], tensors: list[Any], plan: Plan) -> None:
    present, make_guard = _GUARDED.get(prefix, ()), _from_dynamo("TensorGuards")
    if make_guard and len(present) < _MAX_GUARDS and len({*map(id, tensors)}) == len(tensors):
        guard = make_guard(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        _GUARDED[prefix] = (*present, (guard, plan))


def on_gpu(x: Any) -> bool:
    """Whether it is a tensor on a GPU: nothing else has plans."""
    return isinstance(x, Tensor) and x.is_cuda


def _current_device() -> int:
    """torch.cuda.current_device(), without its check that CUDA is initialised: a tensor on a GPU shows that it is."""
    index: int = torch._C._cuda_getDevice()
    return index


@functools.cache
def _from_dynamo(name: str) -> Any:
    """A C++ helper of torch's compiler by name; None where this version of torch has none."""
    return getattr(torch._C._dynamo.guards, name, None)
