"""What a call makes and launches, noted while it runs, and the same again on other tensors (plans.py says when).

All that launches are told stands in one row, the pool: the stream, what never changes, where each tensor lies. So a
launch is a choice of places in the pool, made in C, as is what follows where Triton's own launcher does no more.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from itertools import starmap
from math import prod
from operator import add, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foci.core import tensor_maps, tune

_ATEN = torch.ops.aten
_EMPTY = {_ATEN.empty.memory_format, _ATEN.new_empty.default, _ATEN.empty_like.default, _ATEN.empty_strided.default}
_ZEROS = {_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default}
_begins = Tensor.data_ptr
_LITTLE = 1 << 22  # bytes: so much that nobody but a call's own kernels see is taken at once, and given back at its end
_LINE = 512  # bytes: where torch lets what it gives on a GPU begin

# Of what plays a call's plan, once, if it has one, and the tensors that were given: its outputs, which autograd knows.
Through = Callable[[Callable[[], Any] | None, list[Tensor]], Any]


def choice(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What stands at these places, a tuple of however many."""
    return itemgetter(*places) if len(places) > 1 else lambda row: tuple([row[place] for place in places])


class _Made(NamedTuple):
    """Memory that a call takes, in a row, before launch `turn`; `make` is torch.empty or torch.zeros."""

    make: Callable[..., Tensor]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    turn: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def spare(self) -> bool:
        """Whether it can be a part of something larger: it is not filled, and where it lies is somewhere."""
        return self.make is torch.empty and self.bytes > 0


class _At(NamedTuple):
    """An address: so many bytes from where the memory of this slot begins."""

    slot: int
    offset: int

    def on(self, further: int) -> _At:
        return _At(self.slot, self.offset + further)


class _Map(NamedTuple):
    """A map for TMA of what lies there, as `make` makes it of an address (tensor_maps.py)."""

    at: _At
    make: Callable[[int], Any]


class _Launch(NamedTuple):
    """A launch as it was noted; an _At in what it was told stands for a tensor, a _Map for what reads one."""

    compiled: Any
    grid: tuple[int, ...]
    told: list[Any]


class _Step(NamedTuple):
    """What is made, in the order of slots; pointers into what there is, from where and how far; the launch behind it.

    `plain`: of what is made shape, strides and dtype, where nothing of it is filled. `maps`: what makes each for TMA,
    and which place of the pool says where its tensor lies. `rest`: what goes to the launch as one argument more, all in
    a tuple. `last`: whose memory it is the last to use.
    """

    made: tuple[_Made, ...]
    plain: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    begins: Callable[[list[Any]], tuple[int, ...]]
    offsets: tuple[int, ...]
    maps: tuple[tuple[Callable[[int], Any], int], ...]
    launch: Callable[..., Any] | None
    line: Callable[[list[Any]], tuple[Any, ...]] | None
    rest: Callable[[list[Any]], tuple[Any, ...]] | None
    last: tuple[int, ...]


class Plan(NamedTuple):
    """All steps, and what of all tensors the call gives; `views`: size, strides and offset of what is no whole one.

    `fresh`: whether that is nothing which was given. `kernels`: what is launched, in Triton's words before it is
    compiled; a hook may be put on one at any time. `through`: how a call that is differentiated takes its results to
    autograd; without steps, how a call is run whose backend brings no kernels of ours.
    """

    steps: tuple[_Step, ...]
    constants: tuple[Any, ...]
    gives: Callable[[list[Any]], tuple[Any, ...]]
    views: tuple[tuple[Any, ...] | None, ...]
    fresh: bool
    device: torch.device
    kernels: tuple[Any, ...]
    through: Through | None = None


def play(plan: Plan, tensors: list[Tensor], pointers: list[int]) -> tuple[Tensor | None, ...]:
    """What the call gives that was noted, of these tensors, which begin at these addresses."""
    device, room = plan.device, tensors
    pool, empty = [_stream(device), *plan.constants, *pointers], _empty(device)
    for made, plain, begins, offsets, maps, launch, line, rest, last in plan.steps:
        if plain and empty is not None:
            new = [*starmap(empty, plain)]
        else:
            new = [each.make(each.shape, dtype=each.dtype, device=device) for each in made]
        room += new
        pool += map(_begins, new)
        pool += map(add, begins(pool), offsets)
        if maps:
            pool += [make(pool[place]) for make, place in maps]
        if launch is not None and line is not None:
            if rest is None:
                launch(*line(pool))
            else:
                launch(*line(pool), rest(pool))
        for slot in last:
            room[slot] = None  # type: ignore[call-overload]
    room.append(None)  # type: ignore[arg-type]
    results = plan.gives(room)
    if plan.views:
        pairs = zip(results, plan.views, strict=True)
        return tuple([x if view is None else x.as_strided(*view) for x, view in pairs])
    return results


def hooked(plan: Plan) -> bool:
    """Whether someone put a hook on one of its kernels, which only a launch through Triton calls."""
    for kernel in plan.kernels:
        if kernel.pre_run_hooks:
            return True
    return False


def _stream(device: torch.device) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def _empty(device: torch.device) -> Any:
    """How torch's own compiler takes memory: `torch.empty` without what that asks on the way; None: not here.

    Nothing fills what it gives, as torch is told to by `torch.use_deterministic_algorithms`.
    """
    return None if torch._C._get_deterministic_algorithms() else _takes(device)


@functools.cache
def _takes(device: torch.device) -> Any:
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)


class Noting(TorchDispatchMode):
    """What one call makes and launches; `plain` as long as nothing else happens."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.first = len(tensors)
        self.known: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by identity, as two values may share memory
        self.starts = [x.data_ptr() for x in tensors]  # where the memory of each slot begins
        self.whole: dict[int, tuple[weakref.ref[Tensor], torch.dtype]] = {}  # of each slot: the tensor that has it all
        self.made: list[_Made] = []
        self.launches: list[_Launch] = []
        self.kernels: list[Any] = []
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
        slot, make = self.first + len(self.made), torch.zeros if func in _ZEROS else torch.empty
        self.made.append(_Made(make, tuple(out.shape), out.stride(), out.dtype, len(self.launches)))
        self.starts.append(out.data_ptr())
        self._know(out, slot)
        self.whole[slot] = self.known[id(out)][0], out.dtype

    def launched(self, kernel: Any, compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        told: list[Any] = []
        launch = None if compiled is None else tune.started(compiled, grid).launch
        makers = tensor_maps.makers(launch, arguments)
        for x in arguments:
            lies = tensor_maps.tensor_of(x)
            if isinstance(lies, Tensor):
                slot = self._slot(lies)
                if slot is None or (lies.numel() == 0 and self.starts[slot]):  # whose pointer is 0, wherever it lies
                    self.plain = False
                    return
                at = _At(slot, lies.data_ptr() - self.starts[slot])
                if lies is x:
                    told.append(at)
                elif makers:
                    told += [_Map(at, makers.pop(0)), *x.shape, *x.strides]
                else:
                    self.plain = False
                    return
            else:
                told.append(x)
                self.plain &= _lasting(x)
        self.plain &= compiled is not None
        if self.plain:  # else there is no plan, and nothing is to be held for it
            if kernel not in self.kernels:
                self.kernels.append(kernel)
            self.launches.append(_Launch(compiled, grid, told))

    def plan(self, results: Any) -> Plan | None:
        """The plan, or None where something was done that no plan has."""
        if not self.plain or not isinstance(results, tuple):
            return None
        found: list[Any] = [None if x is None else self._result(x) for x in results]
        if () in found:
            return None
        steps, constants, lies = _arranged(self.first, self.made, self.launches, {each[0] for each in found if each})
        gives = choice([-1 if each is None else lies[each[0]].slot for each in found])  # the last in the room is None
        views = tuple(None if each is None else each[1] for each in found)
        fresh = all(each is None or each[0] >= self.first for each in found)
        return Plan(steps, constants, gives, views if any(views) else (), fresh, self.device, tuple(self.kernels))

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


def _arranged(
    first: int, made: list[_Made], launches: list[_Launch], kept: set[int]
) -> tuple[tuple[_Step, ...], tuple[Any, ...], dict[int, _At]]:
    """The steps of these launches, what they are told that never changes, and where in the room each slot then lies.

    `kept`: slots that the call gives.
    """
    made = [*made]
    rows = [_row(launch, turn, first, made) for turn, launch in enumerate(launches)]
    order, lies = _laid(first, made, set().union(*(row.slots for row in rows)), kept)
    rows = [row.moved(lies) for row in rows]
    wanted, last = set(range(first)) | {lies[slot].slot for slot in kept}, []
    for row in reversed(rows):
        last.append(tuple(sorted(row.slots - wanted)))
        wanted |= row.slots
    pool = _Pool(first, rows)
    steps = [
        pool.step(tuple(each for each in order if each.turn == turn), row, mine)
        for turn, (row, mine) in enumerate(zip([*rows, None], [*reversed(last), ()], strict=True))
    ]
    return tuple(steps), tuple(pool.constants), lies


def _laid(first: int, made: list[_Made], used: set[int], kept: set[int]) -> tuple[list[_Made], dict[int, _At]]:
    """What is made, in order, and where in it each slot lies: little that nobody else sees at once, in one piece.

    What neither a launch nor anybody else is told of is not made.
    """
    slots = [slot for slot in range(first, first + len(made)) if slot in used | kept]
    lies = {slot: _At(slot, 0) for slot in range(first)}
    own = {slot: made[slot - first] for slot in slots if slot not in kept}
    if sum(each.bytes for each in own.values()) > _LITTLE:
        slots.sort(key=lambda slot: made[slot - first].turn)
        order = [made[slot - first] for slot in slots]
    else:
        parts = [slot for slot, each in own.items() if each.spare]
        slots = [slot for slot in slots if slot not in parts]
        order, size = [made[slot - first]._replace(turn=0) for slot in slots], 0
        for slot in parts:
            lies[slot] = _At(first + len(slots), size)
            size += -(-own[slot].bytes // _LINE) * _LINE
        if parts:
            order.append(_Made(torch.empty, (size,), (1,), torch.uint8, 0))
    return order, lies | {slot: _At(first + place, 0) for place, slot in enumerate(slots)}


def _row(launch: _Launch, turn: int, first: int, made: list[_Made]) -> _Row:
    """A launch with all that its launcher is told; the memory that it asks for itself is made like all other."""
    how = tune.started(launch.compiled, launch.grid)
    if any(isinstance(x, _Map) for x in launch.told):  # they are made by who plays
        how = how._replace(launch=tensor_maps.beneath(how.launch)[0])
    scratch = _At(first + len(made), 0)
    if how.scratch:
        made.append(_Made(torch.empty, (how.scratch,), (1,), torch.uint8, turn))
    head = [scratch if x is tune.SCRATCH else x for x in how.head]
    return _Row(how.launch, [*head, *launch.told], len(head) if how.nested else None)


class _Row(NamedTuple):
    """What a launcher is told, all in one row; from `rest` on in a tuple of its own."""

    launch: Callable[..., Any]
    told: list[Any]
    rest: int | None

    @property
    def slots(self) -> set[int]:
        return {at.slot for at in map(_at, self.told) if at is not None}

    def moved(self, lies: dict[int, _At]) -> _Row:
        def anew(x: Any) -> Any:
            at = _at(x)
            if at is None:
                return x
            there = lies[at.slot].on(at.offset)
            return x._replace(at=there) if isinstance(x, _Map) else there

        return self._replace(told=[*map(anew, self.told)])


class _Pool:
    """Where everything stands that launches are told: the stream, `constants`, pointers as they come to be known."""

    def __init__(self, first: int, rows: list[_Row]) -> None:
        self.constants: list[Any] = []
        self.places: dict[Any, int] = {}
        self.pointers: dict[_At, None] = {}  # in the order in which they are told
        self.maps: dict[_Map, None] = {}
        for x in (x for row in rows for x in row.told):
            at = _at(x)
            if at is not None:
                self.pointers[at] = None
                if isinstance(x, _Map):
                    self.maps[x] = None
            elif x is not tune.STREAM and _same(x) not in self.places:
                self.constants.append(x)
                self.places[_same(x)] = len(self.constants)
        self.size, self.made = 1 + len(self.constants), 0
        self._make(first)

    def _make(self, count: int) -> None:
        for _ in range(count):
            self._enter(_At(self.made, 0))
            self.made += 1

    def _enter(self, at: _At | _Map) -> None:
        self.places[at] = self.size
        self.size += 1

    def step(self, made: tuple[_Made, ...], row: _Row | None, last: tuple[int, ...]) -> _Step:
        """The next, with all pointers that begin in what is made by then."""
        self._make(len(made))
        new = [at for at in self.pointers if at.slot < self.made and at not in self.places]
        begins, offsets = choice([self.places[_At(at.slot, 0)] for at in new]), tuple(at.offset for at in new)
        for at in new:
            self._enter(at)
        new_maps = [each for each in self.maps if each.at.slot < self.made and each not in self.places]
        maps = tuple((each.make, self.places[each.at]) for each in new_maps)
        for each in new_maps:
            self._enter(each)
        filled = any(each.make is not torch.empty for each in made)
        plain = () if filled else tuple((each.shape, each.strides, each.dtype) for each in made)
        if row is None:
            return _Step(made, plain, begins, offsets, maps, None, None, None, last)
        line = [0 if x is tune.STREAM else self.places[x if isinstance(x, _At | _Map) else _same(x)] for x in row.told]
        rest = None if row.rest is None else choice(line[row.rest :])
        return _Step(made, plain, begins, offsets, maps, row.launch, choice(line[: row.rest]), rest, last)


def _at(x: Any) -> _At | None:
    """Where what a launch is told lies, if it lies anywhere."""
    return x if isinstance(x, _At) else x.at if isinstance(x, _Map) else None


def _same(x: Any) -> Any:
    """Of values that a launcher is told: equal only where one may stand for the other."""
    return (x.__class__, x) if isinstance(x, int | str | None) else (None, id(x))


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
