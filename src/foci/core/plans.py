"""Which calls of a kernel backend are like one before, whose steps (steps.py) are then played again.

Which blocks, grids, strides and compiled kernels a call takes follows from the dtypes, shapes, strides and alignment of
its tensors, from which of them are one and the same, and from its other values. So the second call of one kind is noted
while it runs, and from the third on memory is taken and kernels are started as it did. A call that does anything else
on the way (a copy, a value read from the GPU, memory of its own that outlives it) runs as it is written, every time.
Nothing here keeps a tensor alive, neither while a call is noted nor after it.
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
from foci.core.steps import Noting, Plan, Through, choice, hooked, play

_MOST = 4096  # kinds of calls that are remembered
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_ALL_PLAIN = _TENSORS | {type(None)}
_LITERAL = _ALL_PLAIN | {bool, int, float, str}
_BOOL = frozenset({bool})
_TYPES = _TENSORS | {type(None), bool, int, str, float, list}  # of values that a plan can know
_FACTS = attrgetter("dtype", "shape")
_HIP = torch.version.hip is not None
_begins, _wants = Tensor.data_ptr, attrgetter("requires_grad")

_PLANS: dict[Any, Plan | None] = {}
_SEEN: set[Any] = set()
_WHOLE: dict[Any, Plan | None] = {}  # the same plans, by what a public function was given
_NEAR: dict[Any, tuple[tuple[Any, Plan], ...]] = {}  # some of them again, each with a guard of its tensors
_PLAINLY = nullcontext()
_AT_HAND = 4  # guards that are asked before a key is made


def again(kind: Any, given: Sequence[Any]) -> tuple[Any, Any]:
    """The key of a call of a public function, for `learn`, and its results where a call of its kind was learned.

    All that is asked of arguments before a backend runs, and which one does, follows from what the key holds: types,
    dtypes, shapes and strides of tensors, which GPU, and all other values; autocast's dtype; whether algorithms are to
    be deterministic; where a gradient is wanted, of which tensors. A tensor that is anywhere else has no key, nor has a
    call that is watched.
    """
    told = _told(kind, given) if on_gpu(given[0]) and _alone() else None
    if told is None:
        return None, None
    said, tensors, pointers = told
    wanted = tuple(map(_wants, tensors)) if torch.is_grad_enabled() else ()
    trains = True in wanted
    said += (autocast(given[0]), torch._C._get_deterministic_algorithms(), wanted if trains else None)
    key, plan = _known(_WHOLE, _Told(said, tensors, pointers))
    if plan is None or hooked(plan):
        return key, None
    if plan.through is None or (plan.steps and not trains):
        return None, None if trains else play(plan, tensors, pointers)
    return None, plan.through(functools.partial(play, plan, tensors, pointers) if plan.steps else None, tensors)


def decide(key: Any, through: Through | None, device: torch.device) -> None:
    """Calls with this key are run by `through`, neither checked nor dispatched again; None: as they are written."""
    if len(_WHOLE) >= _MOST:
        _WHOLE.clear()
        _NEAR.clear()
    _WHOLE[key] = None if through is None else Plan((), (), tuple, (), True, device, (), through)


def learn(
    key: Any, given: Sequence[Any], kind: Callable[..., Any], values: Sequence[Any], through: Through | None = None
) -> None:
    """Calls with this key are the plan of `kind` of these values, if it has one, `through` autograd where they train.

    The values' tensors are to be those that were given, in their order, or views of them that begin where they do;
    where they are others (autocast's, a seed that was drawn) every call is to make them, and nothing is learned.
    """
    told = _told(kind, values)
    if told is None:
        return
    try:
        plan = _PLANS[_key(told)]
    except KeyError:  # not yet
        return
    begins = [x.data_ptr() for x in given if isinstance(x, Tensor)] == told.pointers
    _WHOLE[key] = plan._replace(through=through) if plan is not None and begins and plan.fresh else None


def one(key: Any, given: Sequence[Any], kind: Callable[..., Tensor], values: Sequence[Any]) -> Tensor:
    """`kind(*values)`, one tensor, or the same by its plan, which is learned for calls with this key."""
    (out,) = played(kind, values, lambda: (kind(*values),))
    if key is not None:
        learn(key, given, kind, values)
    made: Tensor = out
    return made


def played(
    kind: Callable[..., Any], values: Sequence[Any], run: Callable[[], Any], first: Callable[[], Any] | None = None
) -> Any:
    """`run()`, what `kind` makes of these values, or the same by its plan; `first` goes before the first of a kind."""
    told = _told(kind, values) if _usable() else None
    if told is None:
        return run()
    key, plan = _known(_PLANS, told)
    if plan is not None and not hooked(plan):
        return play(plan, told.tensors, told.pointers)
    if key is None or any(x.is_complex() for x in told.tensors):  # one may be a conjugate, and another not
        return run()
    if key not in _SEEN:  # kernels are compiled and loaded, modules imported
        if len(_SEEN) >= _MOST:
            for known in (_SEEN, _PLANS, _WHOLE, _NEAR):
                known.clear()
        _SEEN.add(key)
        if first is not None:
            first()
        return run()
    noted = Noting(told.tensors)
    token = tune.NOTING.set(noted.launched)
    try:
        with noted:
            results = run()
    finally:
        tune.NOTING.reset(token)
    if _usable():  # still: another thread may have begun to watch
        _PLANS[key] = noted.plan(results)
    return results


def at_once(
    kind: Callable[..., Any], tensors: list[Tensor], apart: Any, values: Callable[[], Sequence[Any]]
) -> tuple[Tensor | None, ...] | None:
    """What `kind` makes of `values()` by its plan; None where it has none, or somebody watches.

    `tensors` are those of the values, in their order; `apart` says all else that they do, None where nothing does.
    """
    if not _alone() or not _TENSORS.issuperset(map(type, tensors)):  # a subclass is told of all that is asked of it
        return None
    try:
        pointers = [*map(_begins, tensors)]
    except RuntimeError:
        return None
    said = (kind, apart, _here(), _lies(tensors, pointers))
    plan = None if apart is None else _near(said, tensors)
    if plan is None:
        told = _told(kind, values())
        plan = None if told is None else _known(_PLANS, told)[1]
        if plan is not None and apart is not None:
            _guard(said, tensors, plan)
    return None if plan is None or hooked(plan) else play(plan, tensors, pointers)


def wants_gradient(values: Sequence[Any]) -> bool:
    """Whether autograd is to hear of an operator of these values."""
    if not torch.is_grad_enabled():
        return False
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def autocast(x: Tensor) -> torch.dtype | None:
    """What autocast makes of tensors where this one is; None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def unrounded(x: Tensor) -> AbstractContextManager[object]:
    """Without autocast, which would round products of float32 to half precision where this tensor is, lse and all."""
    return _PLAINLY if autocast(x) is None else torch.autocast(x.device.type, enabled=False)


def transformed() -> bool:
    """Under vmap, torch.func.grad or forward-mode: a bare op would lose tangents without a word."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def watched() -> bool:
    """Whether the compiler, a transform, a profiler or a mode (tracer, counter) must see what torch is asked."""
    if torch.compiler.is_compiling() or transformed() or torch.autograd._profiler_enabled() or scripting():
        return True
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0


def scripting() -> bool:
    """Whether torch.jit.trace notes what torch is asked."""
    return torch._C._get_tracing_state() is not None


def literal(values: Sequence[Any]) -> bool:
    """Whether these are no tensors but torch's own, each what its memory holds.

    Not negated when it is read (the imaginary part of a conjugate), nor zeros that no memory holds.
    """
    if not _LITERAL.issuperset(map(type, values)):
        return False
    tensors = [value for value in values if isinstance(value, Tensor)]
    return not (any(map(Tensor.is_neg, tensors)) or any(map(Tensor._is_zerotensor, tensors)))


def unseen(values: Sequence[Tensor | None]) -> bool:
    """Whether nobody is told of what is done with these: nobody watches, and none is a subclass."""
    return _alone() and _ALL_PLAIN.issuperset(map(type, values))


def _alone() -> bool:
    """Whether nobody is told of a call, neither of its kernels nor of what torch is asked."""
    if not _usable() or forward_ad._current_level >= 0 or torch.autograd._profiler_enabled():
        return False
    return torch._C._len_torch_function_stack() == 0


def _usable() -> bool:
    """Whether nobody watches launches, changes what is compiled, or wraps tensors."""
    if torch.compiler.is_compiling() or scripting() or not tune.ordinary():
        return False
    triton = sys.modules.get("triton")
    if triton is not None:  # else nothing is launched
        runtime = triton.knobs.runtime
        if runtime.debug or runtime.add_stages_inspection_hook is not None or tune.watched():
            return False
        if triton.knobs.compilation.instrumentation_mode:
            return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.maybe_current_level() is None


class _Places:
    """What takes from a call's values its tensors and what else says something; and where its floats and lists are.

    It stands for the types of all values, as there is one for each row of types.
    """

    def __init__(self, kinds: tuple[type, ...]) -> None:
        def of(*wanted: type) -> list[int]:
            return [place for place, kind in enumerate(kinds) if kind in wanted]

        self.tensors, self.rest = choice(of(*_TENSORS)), choice(of(bool, int, str))
        self.floats, self.lists = of(float), of(list)


@functools.lru_cache(_MOST)
def _places(kinds: tuple[type, ...]) -> _Places | None:
    """For values of these types; None where a plan cannot know one, or there is no tensor."""
    return None if not _TYPES.issuperset(kinds) or _TENSORS.isdisjoint(kinds) else _Places(kinds)


class _Told(NamedTuple):
    """What there is to know of a call without a word of its tensors' kinds; they, and where their memory is."""

    said: tuple[Any, ...]
    tensors: list[Any]
    pointers: list[int]


def _told(kind_of_call: Any, values: Sequence[Any]) -> _Told | None:
    """None where a value is nothing that a plan can know."""
    places = _places(tuple(map(type, values)))
    if places is None:
        return None
    tensors = [*places.tensors(values)]
    try:
        pointers = [*map(_begins, tensors)]
    except RuntimeError:  # it stands for another: of a transform that has ended
        return None
    said: tuple[Any, ...] = (
        kind_of_call,
        _here(),
        places,
        tensors[0].shape,
        _lies(tensors, pointers),
        places.rest(values),
    )
    for place in places.floats:
        said += (values[place].hex(),)  # 0.0 == -0.0, and no NaN equals another
    for place in places.lists:
        if not _BOOL.issuperset(map(type, values[place])):
            return None
        said += (tuple(values[place]),)
    return _Told(said, tensors, pointers)


def _lies(tensors: Sequence[Tensor], pointers: list[int]) -> Any:
    """Which begin at multiples of 16, as kernels are compiled for it; on AMD's also which memory is small."""
    aligned = not functools.reduce(or_, pointers) & 15 or tuple([pointer & 15 for pointer in pointers])
    return (aligned, *[x.untyped_storage().size() >> 31 for x in tensors]) if _HIP else aligned


def _key(told: _Told) -> tuple[Any, ...] | None:
    """All that a plan depends on; None where a tensor is not on this GPU, or is not what its memory holds."""
    said, tensors, pointers = told
    if {*map(Tensor.get_device, tensors)} != {said[1]} or any(map(Tensor.is_neg, tensors)):
        return None
    if 0 in pointers and any(map(Tensor._is_zerotensor, tensors)):
        return None
    identities = [*map(id, tensors)]  # one tensor in two places: its steps cannot tell which of them they mean
    same = tuple(map(identities.index, identities)) if len({*identities}) < len(tensors) else None
    return (*said, same, *map(_FACTS, tensors), *map(Tensor.stride, tensors))


def _known(plans: dict[Any, Plan | None], told: _Told) -> tuple[Any, Plan | None]:
    """The plan of a call among these, and the key of one that they do not have yet.

    To make a key takes longer than to play. So the first plans of calls that say the same are also found by a guard of
    torch's compiler, which compares in C all that a key holds of tensors: dtypes, shapes, strides, place, and what
    torch would make of them when they are read. It passes no tensor that stands twice.
    """
    plan = _near(told.said, told.tensors)
    if plan is not None:
        return None, plan
    key = _key(told)
    try:
        found = plans[key]
    except KeyError:  # nor by another thread that clears them in between
        return key, None
    if found is not None:
        _guard(told.said, told.tensors, found)
    return None, found


def _near(said: tuple[Any, ...], tensors: list[Any]) -> Plan | None:
    for guard, plan in _NEAR.get(said, ()):
        if guard.check(*tensors):
            return plan
    return None


def _guard(said: tuple[Any, ...], tensors: list[Any], plan: Plan) -> None:
    near, guards = _NEAR.get(said, ()), _of_compiler("TensorGuards")
    if guards and len(near) < _AT_HAND and len({*map(id, tensors)}) == len(tensors):
        guard = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        _NEAR[said] = (*near, (guard, plan))


def on_gpu(x: Any) -> bool:
    """Whether it is a tensor on a GPU; all else goes its own way at once."""
    return isinstance(x, Tensor) and x.is_cuda


def _here() -> int:
    """torch.cuda.current_device() where there is a tensor of a GPU, so that CUDA is there."""
    here: int = torch._C._cuda_getDevice()
    return here


@functools.cache
def _of_compiler(name: str) -> Any:
    """Something of what torch's compiler has in C; None where this torch has no such thing."""
    return getattr(torch._C._dynamo.guards, name, None)
