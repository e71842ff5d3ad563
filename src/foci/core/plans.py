"""Calls of a kernel backend that were seen before, played again: what they allocate, and what they launch on it.

Which blocks, grids, strides and compiled kernels a call takes follows from the dtypes, shapes, strides and alignment of
its tensors, from which of them are one and the same, and from its other values. So the second call of one kind is noted
while it runs, and from the third on memory is taken and kernels are started as it did. A call that does anything else
on the way (a copy, a value read from the GPU, memory of its own that outlives it) runs as it is written, every time.
Nothing here keeps a tensor alive, neither while a call is noted nor after it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from foci.core import tune

_MOST = 4096  # kinds of calls that are remembered
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_BOOL = frozenset({bool})
_TYPES = _TENSORS | {type(None), bool, int, str, float, list}  # of values that a plan can know
_FACTS = attrgetter("dtype", "shape")
_ATEN = torch.ops.aten
_EMPTY = {_ATEN.empty.memory_format, _ATEN.new_empty.default, _ATEN.empty_like.default, _ATEN.empty_strided.default}
_ZEROS = {_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default}


# Of what plays a call's plan, once, if it has one, and the tensors that were given: its outputs, which autograd knows.
Through = Callable[[Callable[[], Any] | None, list[Tensor]], Any]


class _Made(NamedTuple):
    """Memory that a call takes, in a row; `make` is torch.empty or torch.zeros."""

    make: Callable[..., Tensor]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Step(NamedTuple):
    """One launch: what is made before it, in the order of slots, its arguments, and whose memory it is the last to use.

    `pointers`: (place among the arguments, slot, bytes from the slot's first).
    """

    made: tuple[_Made, ...]
    compiled: Any
    grid: tuple[int, ...]
    arguments: list[Any]
    pointers: tuple[tuple[int, int, int], ...]
    last: tuple[int, ...] = ()


class _Plan(NamedTuple):
    """All steps, and the results by slot, None for None; `view`: size, strides and offset where it is no whole slot.

    `kernels`: what is launched, in Triton's words before it is compiled; a hook may be put on one at any time.
    `through`: how a call that is differentiated takes its results to autograd; without steps, how a call is run whose
    backend brings no kernels of ours.
    """

    steps: tuple[_Step, ...]
    results: tuple[tuple[int, tuple[Any, ...] | None] | None, ...]
    device: torch.device
    kernels: tuple[Any, ...]
    through: Through | None = None


_PLANS: dict[Any, _Plan | None] = {}
_SEEN: set[Any] = set()
_WHOLE: dict[Any, _Plan | None] = {}  # the same plans, by what a public function was given
_NEAR: dict[Any, tuple[tuple[Any, _Plan], ...]] = {}  # some of them again, each with a guard of its tensors
_AT_HAND = 4  # guards that are asked before a key is made


def again(kind: Any, given: Sequence[Any]) -> tuple[Any, Any]:
    """The key of a call of a public function, for `learn`, and its results where a call of its kind was learned.

    All that is asked of arguments before a backend runs, and which one does, follows from what the key holds: types,
    dtypes, shapes and strides of tensors, which GPU, and all other values; autocast's dtype; whether algorithms are to
    be deterministic; where a gradient is wanted, of which tensors. A tensor that is anywhere else has no key, nor has a
    call that is watched.
    """
    if torch.compiler.is_compiling() or not on_gpu(given[0]) or watched() or not _usable():
        return None, None
    trains = wants_gradient(given)
    wanted = [isinstance(x, Tensor) and x.requires_grad for x in given] if trains else ()
    told = _told((kind, autocast(given[0]), torch._C._get_deterministic_algorithms(), *wanted), given)
    if told is None:
        return None, None
    key, plan = _known(_WHOLE, told)
    if plan is None or _hooked(plan):
        return key, None
    if plan.through is None or (plan.steps and not trains):
        return None, None if trains else _play(plan, told)
    return None, plan.through(functools.partial(_play, plan, told) if plan.steps else None, told.tensors)


def decide(key: Any, through: Through | None, device: torch.device) -> None:
    """Calls with this key are run by `through`, neither checked nor dispatched again; None: as they are written."""
    if len(_WHOLE) >= _MOST:
        _WHOLE.clear()
        _NEAR.clear()
    _WHOLE[key] = None if through is None else _Plan((), (), device, (), through)


def learn(
    key: Any, given: Sequence[Any], kind: Callable[..., Any], values: Sequence[Any], through: Through | None = None
) -> None:
    """Calls with this key are the plan of `kind` of these values, if it has one, `through` autograd where they train.

    The values' tensors are to be those that were given, in their order, or views of them that begin where they do;
    where they are others (autocast's, a seed that was drawn) every call is to make them, and nothing is learned.
    """
    told = _told(kind, values)
    known = None if told is None else _key(told)
    if told is None or known not in _PLANS:  # not yet
        return
    plan, count = _PLANS[known], len(told.tensors)
    begins = [x.data_ptr() for x in given if isinstance(x, Tensor)] == told.pointers
    own = plan is not None and all(each is None or each[0] >= count for each in plan.results)
    _WHOLE[key] = plan._replace(through=through) if plan is not None and begins and own else None


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
    if plan is not None and not _hooked(plan):
        return _play(plan, told)
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
    noted = _Noting(told.tensors)
    token = tune.NOTING.set(noted.launched)
    try:
        with noted:
            results = run()
    finally:
        tune.NOTING.reset(token)
    if _usable():  # still: another thread may have begun to watch
        _PLANS[key] = noted.plan(results)
    return results


def at_once(kind: Callable[..., Any], values: Sequence[Any]) -> Any:
    """What `kind` makes of these values, by its plan; None where it has none, or somebody watches."""
    told = None if watched() or not _usable() else _told(kind, values)
    plan = None if told is None else _known(_PLANS, told)[1]
    return None if told is None or plan is None or _hooked(plan) else _play(plan, told)


def _hooked(plan: _Plan) -> bool:
    """Whether someone put a hook on one of its kernels, which only a launch through Triton calls."""
    for kernel in plan.kernels:
        if kernel.pre_run_hooks:
            return True
    return False


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


def transformed() -> bool:
    """Under vmap, torch.func.grad or forward-mode: a bare op would lose tangents without a word."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def watched() -> bool:
    """Whether the compiler, a transform, a profiler or a mode (tracer, counter) must see what torch is asked."""
    if torch.compiler.is_compiling() or transformed() or torch.autograd._profiler_enabled():
        return True
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0


def _usable() -> bool:
    """Whether nobody watches launches, changes what is compiled, or wraps tensors."""
    if torch.compiler.is_compiling() or not tune.ordinary():
        return False
    triton = sys.modules.get("triton")
    if triton is not None:  # else nothing is launched
        runtime = triton.knobs.runtime
        if runtime.debug or runtime.add_stages_inspection_hook is not None or tune.watched():
            return False
        if triton.knobs.compilation.instrumentation_mode:
            return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.maybe_current_level() is None


class _Places(NamedTuple):
    """Where among a call's values its tensors are, its floats, its lists, and what else says something."""

    tensors: tuple[int, ...]
    floats: tuple[int, ...]
    lists: tuple[int, ...]
    rest: tuple[int, ...]


@functools.lru_cache(_MOST)
def _places(kinds: tuple[type, ...]) -> _Places | None:
    """For values of these types; None where a plan cannot know one."""
    if not _TYPES.issuperset(kinds):
        return None

    def of(*wanted: type) -> tuple[int, ...]:
        return tuple(place for place, kind in enumerate(kinds) if kind in wanted)

    return _Places(of(*_TENSORS), of(float), of(list), of(bool, int, str))


class _Told(NamedTuple):
    """What there is to know of a call without a word of its tensors' kinds; they, and where their memory is."""

    said: tuple[Any, ...]
    tensors: list[Any]
    pointers: list[int]


def _told(kind_of_call: Any, values: Sequence[Any]) -> _Told | None:
    """None where a value is nothing that a plan can know."""
    kinds = tuple(map(type, values))
    places = _places(kinds)
    if places is None or not places.tensors:
        return None
    tensors = [values[place] for place in places.tensors]
    try:
        pointers = [*map(Tensor.data_ptr, tensors)]
    except RuntimeError:  # it stands for another: of a transform that has ended
        return None
    said = [kind_of_call, _here(), kinds, tensors[0].shape, *[pointer & 15 for pointer in pointers]]
    said += [values[place] for place in places.rest]
    said += [values[place].hex() for place in places.floats]  # 0.0 == -0.0, and no NaN equals another
    for place in places.lists:
        if not _BOOL.issuperset(map(type, values[place])):
            return None
        said.append(tuple(values[place]))
    if torch.version.hip:  # there kernels are compiled for small memory and for large
        said += [x.untyped_storage().size() >> 31 for x in tensors]
    if len({*pointers}) < len(pointers):  # one tensor in two places: its steps cannot tell which of them they mean
        identities = [*map(id, tensors)]
        said.append(tuple(map(identities.index, identities)))
    return _Told(tuple(said), tensors, pointers)


def _key(told: _Told) -> tuple[Any, ...] | None:
    """All that a plan depends on; None where a tensor is not on this GPU, or is not what its memory holds."""
    said, tensors, pointers = told
    if {*map(Tensor.get_device, tensors)} != {said[1]} or any(map(Tensor.is_neg, tensors)):
        return None
    if 0 in pointers and any(map(Tensor._is_zerotensor, tensors)):
        return None
    return (*said, *map(_FACTS, tensors), *map(Tensor.stride, tensors))


def _known(plans: dict[Any, _Plan | None], told: _Told) -> tuple[Any, _Plan | None]:
    """The plan of a call among these, and the key of one that they do not have yet.

    To make a key takes longer than to play. So the first plans of calls that say the same are also found by a guard of
    torch's compiler, which compares in C all that a key holds of tensors: dtypes, shapes, strides, place, and what
    torch would make of them when they are read. It passes no tensor that stands twice.
    """
    said, tensors, _ = told
    near = _NEAR.get(said, ())
    for guard, plan in near:
        if guard.check(*tensors):
            return None, plan
    key = _key(told)
    if key not in plans:
        return key, None
    found, guards = plans[key], _of_compiler("TensorGuards")
    if found is not None and guards and len(near) < _AT_HAND and len({*map(id, tensors)}) == len(tensors):
        guard = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        _NEAR[said] = (*near, (guard, found))
    return None, found


def on_gpu(x: Any) -> bool:
    """Whether it is a tensor on a GPU; all else goes its own way at once."""
    return isinstance(x, Tensor) and x.is_cuda


def _here() -> int:
    return torch.cuda.current_device()


def _stream(device: torch.device) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def _empty(device: torch.device) -> Any:
    """How torch's own compiler takes memory: `torch.empty` without what that asks on the way; None: not here.

    Nothing fills what it gives, as torch is told to by `torch.use_deterministic_algorithms`.
    """
    return None if torch._C._get_deterministic_algorithms() else _of_compiler(f"_empty_strided_{device.type}")


@functools.cache
def _of_compiler(name: str) -> Any:
    """Something of what torch's compiler has in C; None where this torch has no such thing."""
    return getattr(torch._C._dynamo.guards, name, None)


def _play(plan: _Plan, told: _Told) -> tuple[Tensor | None, ...]:
    _, room, pointers = told
    device, stream, empty = plan.device, _stream(plan.device), _empty(plan.device)
    for made, compiled, grid, arguments, places, last in plan.steps:
        for make, shape, strides, dtype in made:
            if empty is None or make is not torch.empty:
                x = make(shape, dtype=dtype, device=device)
            else:
                x = empty(shape, strides, dtype)
            room.append(x)
            pointers.append(x.data_ptr())
        if compiled is None:
            continue
        arguments = arguments.copy()
        for place, slot, offset in places:
            arguments[place] = pointers[slot] + offset
        tune.fire(compiled, grid, stream, arguments)
        for slot in last:
            room[slot] = None
    return tuple(
        None if result is None else room[result[0]] if result[1] is None else room[result[0]].as_strided(*result[1])
        for result in plan.results
    )


class _Noting(TorchDispatchMode):
    """What one call makes and launches; `plain` as long as nothing else happens."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.first = len(tensors)
        self.known: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by identity, as two values may share memory
        self.starts = [x.data_ptr() for x in tensors]  # where the memory of each slot begins
        self.whole: dict[int, tuple[weakref.ref[Tensor], torch.dtype]] = {}  # of each slot: the tensor that has it all
        self.made: list[_Made] = []
        self.steps: list[_Step] = []
        self.kernels: list[Any] = []
        self.told = 0  # how many of `made` stand in a step
        self.plain = True
        self.device = tensors[0].device
        for slot, x in enumerate(tensors):
            self._know(x, slot)
            self.whole[slot] = self.known[id(x)][0], x.dtype

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler here, a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else [out]
        if func in _EMPTY or func in _ZEROS:
            self._new(func, out)
        elif func._schema.is_mutable or not all(isinstance(x, Tensor) for x in outputs):
            self.plain = False
        else:
            sources = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
            slot = self._slot(sources[0]) if len(sources) == 1 else None
            if slot is None or any(_memory(x) != _memory(sources[0]) for x in outputs):
                self.plain = False
            else:
                for x in outputs:
                    self._know(x, slot)
        return out

    def _know(self, x: Tensor, slot: int) -> None:
        self.known[id(x)] = weakref.ref(x), slot

    def _slot(self, x: Tensor) -> int | None:
        """In whose memory it lies. What is no more may have left its identity to another."""
        there, slot = self.known.get(id(x), (None, None))
        return slot if there is not None and there() is x and not x.is_neg() and not x.is_conj() else None

    def _new(self, func: Any, out: Tensor) -> None:
        if out.device != self.device or not out.is_contiguous():
            self.plain = False
        slot = self.first + len(self.made)
        self.made.append(
            _Made(torch.zeros if func in _ZEROS else torch.empty, tuple(out.shape), out.stride(), out.dtype)
        )
        self.starts.append(out.data_ptr())
        self._know(out, slot)
        self.whole[slot] = self.known[id(out)][0], out.dtype

    def _just_made(self) -> tuple[_Made, ...]:
        made, self.told = tuple(self.made[self.told :]), len(self.made)
        return made

    def launched(self, kernel: Any, compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        pointers: list[tuple[int, int, int]] = []
        plain: list[Any] = []
        for place, x in enumerate(arguments):
            if isinstance(x, Tensor):
                slot = self._slot(x)
                if slot is None or (x.numel() == 0 and self.starts[slot]):  # whose pointer is 0, wherever it lies
                    self.plain = False
                    return
                pointers.append((place, slot, x.data_ptr() - self.starts[slot]))
                plain.append(None)
            else:
                plain.append(x)
                self.plain &= _lasting(x)
        self.plain &= compiled is not None
        if self.plain:  # else there is no plan, and nothing is to be held for it
            if kernel not in self.kernels:
                self.kernels.append(kernel)
            self.steps.append(_Step(self._just_made(), compiled, grid, plain, tuple(pointers)))

    def plan(self, results: Any) -> _Plan | None:
        """The plan, or None where something was done that no plan has."""
        if not self.plain or not isinstance(results, tuple):
            return None
        found: list[Any] = [None if x is None else self._result(x) for x in results]
        if () in found:
            return None
        later = {each[0] for each in found if each is not None}
        steps = [_Step(self._just_made(), None, (), [], ())]
        for step in reversed(self.steps):
            used = {slot for _, slot, _ in step.pointers}
            steps.append(step._replace(last=tuple(slot for slot in used - later if slot >= self.first)))
            later |= used
        return _Plan(tuple(reversed(steps)), tuple(found), self.device, tuple(self.kernels))

    def _result(self, x: Any) -> tuple[Any, ...]:
        """Its slot and view, () where it is neither something whole nor a part of what was made."""
        slot = self._slot(x) if isinstance(x, Tensor) else None
        if slot is None:
            return ()
        whole, dtype = self.whole[slot]
        if whole() is x:
            return slot, None
        if slot < self.first or x.dtype != dtype:
            return ()
        return slot, (tuple(x.shape), x.stride(), x.storage_offset())


def _lasting(x: Any) -> bool:
    """Whether an argument of a launch can be one for all calls of a kind: no tensor, nor what may hold one."""
    if isinstance(x, tuple | list):
        return all(map(_lasting, x))
    return x is None or isinstance(x, bool | int | float | str | torch.dtype) or _of_triton(x.__class__)


def _of_triton(kind: type) -> bool:
    """Types and functions that kernels are told at compile time, which no memory belongs to."""
    return kind.__module__ in ("triton.language.core", "triton.runtime.jit")


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
