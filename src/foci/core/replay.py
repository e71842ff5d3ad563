"""Record a call's allocations and kernel launches while it runs, and replay them on other tensors (plans.py: when).

Memory is named by slots: first the call's input tensors, then its allocations. Everything that launchers are passed
stands in one list, the pool: the stream, constants, and an address for each slot and each pointer into one. So the
arguments of a launch are an itemgetter of the pool, which runs in C, and go straight to Triton's C launcher where its
Python one would do nothing else.
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
_data_ptr = Tensor.data_ptr
_SCRATCH_LIMIT = 1 << 22  # bytes: up to this, all memory that only the call's kernels use is one allocation
_ALIGNMENT = 512  # bytes, of torch's CUDA allocator

# An autograd wrapper: from a closure that replays the call's plan (None: no plan) and its input tensors to its outputs.
CallWrapper = Callable[[Callable[[], Any] | None, list[Tensor]], Any]


def tuple_getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """An itemgetter of these indices that returns a tuple also of one or none."""
    return itemgetter(*places) if len(places) > 1 else lambda row: tuple([row[place] for place in places])


class _Allocation(NamedTuple):
    """A contiguous allocation before launch number `launch`; `make` is torch.empty or torch.zeros."""

    make: Callable[..., Tensor]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    launch: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def packable(self) -> bool:
        """Whether it can be a part of a larger allocation: it is uninitialised and not empty."""
        return self.make is torch.empty and self.bytes > 0


class _Address(NamedTuple):
    """A symbolic address: a slot and an offset in bytes from its start."""

    slot: int
    offset: int

    def plus(self, offset: int) -> _Address:
        return _Address(self.slot, self.offset + offset)


class _TensorMap(NamedTuple):
    """A TMA descriptor of the tensor at this address; `make` builds one for a real address (tensor_maps.py)."""

    address: _Address
    make: Callable[[int], Any]


class _Launch(NamedTuple):
    """A recorded launch; among its arguments an _Address stands for a tensor, a _TensorMap for a TMA descriptor."""

    compiled: Any
    grid: tuple[int, ...]
    arguments: list[Any]


class _Step(NamedTuple):
    """Allocations, in the order of slots, then new pool entries (pointers, TMA descriptors), then one launch or None.

    `empties`: shape, strides and dtype of the allocations where none of them is zeroed, else (). `bases`, `offsets`:
    of each new pointer, the slot's address taken from the pool, and what is added to it. `maps`: of each TMA descriptor
    its builder and the pool index of its tensor's address. `arguments` takes those of the launcher from the pool;
    `nested`: those that follow as one tuple. `frees`: slots that no later step uses.
    """

    allocations: tuple[_Allocation, ...]
    empties: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    bases: Callable[[list[Any]], tuple[int, ...]]
    offsets: tuple[int, ...]
    maps: tuple[tuple[Callable[[int], Any], int], ...]
    launch: Callable[..., Any] | None
    arguments: Callable[[list[Any]], tuple[Any, ...]] | None
    nested: Callable[[list[Any]], tuple[Any, ...]] | None
    frees: tuple[int, ...]


class Plan(NamedTuple):
    """A recorded call: its steps, and `outputs`, which takes its results from the slots.

    `views`: size, strides and offset of each result that is a view of its slot, None of others. `fresh`: no result is
    an input or a view of one. `kernels`: the JITFunctions that are launched, as a hook may be put on one at any time.
    `wrapper`: the autograd wrapper of a call that is differentiated; in a plan without steps, what runs the call, of
    a backend that launches no kernels of ours.
    """

    steps: tuple[_Step, ...]
    constants: tuple[Any, ...]
    outputs: Callable[[list[Any]], tuple[Any, ...]]
    views: tuple[tuple[Any, ...] | None, ...]
    fresh: bool
    device: torch.device
    kernels: tuple[Any, ...]
    wrapper: CallWrapper | None = None


def replay_plan(plan: Plan, tensors: list[Tensor], pointers: list[int]) -> tuple[Tensor | None, ...]:
    """Replay the recorded call on these tensors, which start at these addresses; `tensors` is used up as the slots."""
    device, slots = plan.device, tensors
    pool, empty = [_stream(device), *plan.constants, *pointers], _fast_empty(device)
    for allocations, empties, bases, offsets, maps, launch, arguments, nested, frees in plan.steps:
        if empties and empty is not None:
            new = [*starmap(empty, empties)]
        else:
            new = [each.make(each.shape, dtype=each.dtype, device=device) for each in allocations]
        slots += new
        pool += map(_data_ptr, new)
        pool += map(add, bases(pool), offsets)
        if maps:
            pool += [make(pool[place]) for make, place in maps]
        if launch is not None and arguments is not None:
            if nested is None:
                launch(*arguments(pool))
            else:
                launch(*arguments(pool), nested(pool))
        for slot in frees:
            slots[slot] = None  # type: ignore[call-overload]
    slots.append(None)  # type: ignore[arg-type]
    results = plan.outputs(slots)  # index -1, the None just appended, is a result that is None
    if plan.views:
        pairs = zip(results, plan.views, strict=True)
        return tuple([x if view is None else x.as_strided(*view) for x, view in pairs])
    return results


def has_pre_run_hook(plan: Plan) -> bool:
    """Whether one of its kernels has a pre-run hook, which only a launch through Triton calls."""
    for kernel in plan.kernels:
        if kernel.pre_run_hooks:
            return True
    return False


def _stream(device: torch.device) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def _fast_empty(device: torch.device) -> Any:
    """Inductor's allocation function, `torch.empty` without the dispatcher; None: use torch.empty.

    It does not fill uninitialised memory, as `torch.use_deterministic_algorithms` wants.
    """
    return None if torch._C._get_deterministic_algorithms() else _inductor_empty(device)


@functools.cache
def _inductor_empty(device: torch.device) -> Any:
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)


class Recorder(TorchDispatchMode):
    """Records one call: a dispatch mode sees its allocations, `launched` (tune.LAUNCH_CALLBACK) its launches.

    `replayable` as long as the call does nothing but allocate, take views, and launch.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = len(tensors)  # the slot of the first allocation
        self.slots: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id: two inputs may share memory
        self.starts = [x.data_ptr() for x in tensors]  # of each slot: its address
        self.whole: dict[int, tuple[weakref.ref[Tensor], torch.dtype]] = {}  # of each slot: its tensor, no view
        self.allocations: list[_Allocation] = []
        self.launches: list[_Launch] = []
        self.kernels: list[Any] = []
        self.replayable = True
        self.device = tensors[0].device
        for slot, x in enumerate(tensors):
            self._register(x, slot)
            self.whole[slot] = self.slots[id(x)][0], x.dtype

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler here, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else [out]
        if func in _EMPTY or func in _ZEROS:
            self._allocated(func, out)
        elif func._schema.is_mutable or not all(isinstance(x, Tensor) for x in outputs):
            self.replayable = False
        else:  # a view of one known tensor is replayable
            sources = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
            slot = self._slot(sources[0]) if len(sources) == 1 else None
            if slot is None or any(_storage_ptr(x) != _storage_ptr(sources[0]) for x in outputs):
                self.replayable = False
            else:
                for x in outputs:
                    self._register(x, slot)
        return out

    def _register(self, x: Tensor, slot: int) -> None:
        self.slots[id(x)] = weakref.ref(x), slot

    def _slot(self, x: Tensor) -> int | None:
        """The slot whose memory it uses, or None. The weak reference guards against an id reused by a new tensor."""
        known, slot = self.slots.get(id(x), (None, None))
        return slot if known is not None and known() is x and not x.is_neg() and not x.is_conj() else None

    def _allocated(self, func: Any, out: Tensor) -> None:
        if out.device != self.device or not out.is_contiguous():
            self.replayable = False
        slot, make = self.inputs + len(self.allocations), torch.zeros if func in _ZEROS else torch.empty
        self.allocations.append(_Allocation(make, tuple(out.shape), out.stride(), out.dtype, len(self.launches)))
        self.starts.append(out.data_ptr())
        self._register(out, slot)
        self.whole[slot] = self.slots[id(out)][0], out.dtype

    def launched(self, kernel: Any, compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Record a launch; `compiled` is None where Triton launched it itself, which cannot be replayed."""
        recorded: list[Any] = []
        launch = None if compiled is None else tune.launcher_of(compiled, grid).launch
        makers = tensor_maps.makers(launch, arguments)
        for x in arguments:
            tensor = tensor_maps.tensor_of(x)
            if isinstance(tensor, Tensor):
                slot = self._slot(tensor)
                if slot is None or (tensor.numel() == 0 and self.starts[slot]):  # an empty view: data_ptr() is 0
                    self.replayable = False
                    return
                address = _Address(slot, tensor.data_ptr() - self.starts[slot])
                if tensor is x:
                    recorded.append(address)
                elif makers:
                    recorded += [_TensorMap(address, makers.pop(0)), *x.shape, *x.strides]
                else:
                    self.replayable = False
                    return
            else:
                recorded.append(x)
                self.replayable &= _is_constant(x)
        self.replayable &= compiled is not None
        if self.replayable:  # else there will be no plan, so no reference is kept
            if kernel not in self.kernels:
                self.kernels.append(kernel)
            self.launches.append(_Launch(compiled, grid, recorded))

    def plan(self, results: Any) -> Plan | None:
        """The plan of the recorded call, which returned `results`; None where it is not replayable."""
        if not self.replayable or not isinstance(results, tuple):
            return None
        found: list[Any] = [None if x is None else self._result(x) for x in results]
        if () in found:
            return None
        kept = {each[0] for each in found if each}
        steps, constants, addresses = _build_steps(self.inputs, self.allocations, self.launches, kept)
        outputs = tuple_getter([-1 if each is None else addresses[each[0]].slot for each in found])  # -1: `replay_plan`
        views = tuple(None if each is None else each[1] for each in found)
        fresh = all(each is None or each[0] >= self.inputs for each in found)
        return Plan(steps, constants, outputs, views if any(views) else (), fresh, self.device, tuple(self.kernels))

    def _result(self, x: Any) -> tuple[Any, ...]:
        """Its slot and view (None: the whole slot); () where it is neither a whole slot nor a view of an allocation."""
        slot = self._slot(x) if isinstance(x, Tensor) else None
        if slot is None:
            return ()
        whole, dtype = self.whole[slot]
        if whole() is x:
            return slot, None
        if slot < self.inputs or x.dtype != dtype:
            return ()
        return slot, (tuple(x.shape), x.stride(), x.storage_offset())


def _build_steps(
    inputs: int, allocations: list[_Allocation], launches: list[_Launch], kept: set[int]
) -> tuple[tuple[_Step, ...], tuple[Any, ...], dict[int, _Address]]:
    """The steps of these launches, their constant arguments, and of each recorded slot its address once packed.

    `kept`: slots that the call returns.
    """
    allocations = [*allocations]
    calls = [_launcher_call(launch, index, inputs, allocations) for index, launch in enumerate(launches)]
    packed, addresses = _pack_memory(inputs, allocations, set().union(*(call.slots for call in calls)), kept)
    calls = [call.relocated(addresses) for call in calls]
    live, frees = set(range(inputs)) | {addresses[slot].slot for slot in kept}, []
    for call in reversed(calls):  # a slot is freed by the last launch that uses it
        frees.append(tuple(sorted(call.slots - live)))
        live |= call.slots
    pool = _Pool(inputs, calls)
    steps = [  # the last one has no launch: what is allocated behind all launches
        pool.step(tuple(each for each in packed if each.launch == index), call, freed)
        for index, (call, freed) in enumerate(zip([*calls, None], [*reversed(frees), ()], strict=True))
    ]
    return tuple(steps), tuple(pool.constants), addresses


def _pack_memory(
    inputs: int, allocations: list[_Allocation], used: set[int], kept: set[int]
) -> tuple[list[_Allocation], dict[int, _Address]]:
    """The allocations of a replay, in order, and the address in them of each recorded slot.

    Up to _SCRATCH_LIMIT everything is allocated before the first launch, and scratch (what is not returned) as one
    piece. Slots that are neither used by a launch nor returned are dropped.
    """
    slots = [slot for slot in range(inputs, inputs + len(allocations)) if slot in used | kept]
    addresses = {slot: _Address(slot, 0) for slot in range(inputs)}
    scratch = {slot: allocations[slot - inputs] for slot in slots if slot not in kept}
    if sum(each.bytes for each in scratch.values()) > _SCRATCH_LIMIT:
        slots.sort(key=lambda slot: allocations[slot - inputs].launch)
        packed = [allocations[slot - inputs] for slot in slots]
    else:
        parts = [slot for slot, each in scratch.items() if each.packable]
        slots = [slot for slot in slots if slot not in parts]
        packed, size = [allocations[slot - inputs]._replace(launch=0) for slot in slots], 0
        for slot in parts:
            addresses[slot] = _Address(inputs + len(slots), size)
            size += -(-scratch[slot].bytes // _ALIGNMENT) * _ALIGNMENT
        if parts:
            packed.append(_Allocation(torch.empty, (size,), (1,), torch.uint8, 0))
    return packed, addresses | {slot: _Address(inputs + place, 0) for place, slot in enumerate(slots)}


def _launcher_call(launch: _Launch, index: int, inputs: int, allocations: list[_Allocation]) -> _LauncherCall:
    """The call of the launcher behind a recorded launch; the kernel's global scratch becomes one more allocation."""
    how = tune.launcher_of(launch.compiled, launch.grid)
    if any(isinstance(x, _TensorMap) for x in launch.arguments):  # `replay_plan` builds them, so skip Triton's wrapper
        how = how._replace(launch=tensor_maps.c_launcher(how.launch)[0])
    scratch = _Address(inputs + len(allocations), 0)
    if how.scratch:
        allocations.append(_Allocation(torch.empty, (how.scratch,), (1,), torch.uint8, index))
    head = [scratch if x is tune.SCRATCH else x for x in how.head]
    return _LauncherCall(how.launch, [*head, *launch.arguments], len(head) if how.nested else None)


class _LauncherCall(NamedTuple):
    """A launcher and its arguments; those from index `nested` on are passed in a tuple of their own (None: none)."""

    launch: Callable[..., Any]
    arguments: list[Any]
    nested: int | None

    @property
    def slots(self) -> set[int]:
        return {address.slot for address in map(_address_of, self.arguments) if address is not None}

    def relocated(self, addresses: dict[int, _Address]) -> _LauncherCall:
        def moved(x: Any) -> Any:
            old = _address_of(x)
            if old is None:
                return x
            new = addresses[old.slot].plus(old.offset)
            return x._replace(address=new) if isinstance(x, _TensorMap) else new

        return self._replace(arguments=[*map(moved, self.arguments)])


class _Pool:
    """The index in `replay_plan`'s pool of each launcher argument: stream (0), `constants`, then pointers by step."""

    def __init__(self, inputs: int, calls: list[_LauncherCall]) -> None:
        self.constants: list[Any] = []
        self.places: dict[Any, int] = {}
        self.pointers: dict[_Address, None] = {}  # an ordered set, as are the maps
        self.maps: dict[_TensorMap, None] = {}
        for x in (x for call in calls for x in call.arguments):
            address = _address_of(x)
            if address is not None:
                self.pointers[address] = None
                if isinstance(x, _TensorMap):
                    self.maps[x] = None
            elif x is not tune.STREAM and _constant_key(x) not in self.places:
                self.constants.append(x)
                self.places[_constant_key(x)] = len(self.constants)
        self.size, self.slot_count = 1 + len(self.constants), 0
        self._add_slots(inputs)

    def _add_slots(self, count: int) -> None:
        for _ in range(count):
            self._add(_Address(self.slot_count, 0))
            self.slot_count += 1

    def _add(self, x: _Address | _TensorMap) -> None:
        self.places[x] = self.size
        self.size += 1

    def step(self, allocations: tuple[_Allocation, ...], call: _LauncherCall | None, frees: tuple[int, ...]) -> _Step:
        """The next step; it adds to the pool all pointers and maps into the slots that exist after its allocations."""
        self._add_slots(len(allocations))
        new = [each for each in self.pointers if each.slot < self.slot_count and each not in self.places]
        bases = tuple_getter([self.places[_Address(each.slot, 0)] for each in new])
        offsets = tuple(x.offset for x in new)
        for pointer in new:
            self._add(pointer)
        new_maps = [each for each in self.maps if each.address.slot < self.slot_count and each not in self.places]
        maps = tuple((each.make, self.places[each.address]) for each in new_maps)
        for each in new_maps:
            self._add(each)
        zeroed = any(each.make is not torch.empty for each in allocations)
        empties = () if zeroed else tuple((each.shape, each.strides, each.dtype) for each in allocations)
        if call is None:
            return _Step(allocations, empties, bases, offsets, maps, None, None, None, frees)
        places = [self._place(x) for x in call.arguments]
        nested = None if call.nested is None else tuple_getter(places[call.nested :])
        arguments = tuple_getter(places[: call.nested])
        return _Step(allocations, empties, bases, offsets, maps, call.launch, arguments, nested, frees)

    def _place(self, x: Any) -> int:
        if x is tune.STREAM:
            return 0
        return self.places[x if isinstance(x, _Address | _TensorMap) else _constant_key(x)]


def _address_of(x: Any) -> _Address | None:
    """The symbolic address of a launch argument; None of a constant."""
    return x if isinstance(x, _Address) else x.address if isinstance(x, _TensorMap) else None


def _constant_key(x: Any) -> Any:
    """A dict key for a constant launch argument: 1, True and 1.0 are equal, but must stay apart."""
    return (x.__class__, x) if isinstance(x, int | str | None) else (None, id(x))


def _is_constant(x: Any) -> bool:
    """Whether a launch argument can be the same object in every replay: it is no tensor, and cannot hold one."""
    if isinstance(x, tuple | list):
        return all(map(_is_constant, x))
    return x is None or isinstance(x, bool | int | float | str | torch.dtype) or _is_triton_type(x.__class__)


def _is_triton_type(kind: type) -> bool:
    """Triton's own types and functions, constexpr arguments, which own no memory."""
    return kind.__module__ in ("triton.language.core", "triton.runtime.jit")


def _storage_ptr(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
