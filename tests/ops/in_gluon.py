"""Enough of Gluon's language, as threads and torch on a CPU, to run kernels that no interpreter runs.

Each partition of a kernel's warps is a thread. What a GPU does behind a program's back is done late: a copy by TMA at
any time before its barrier says so, a product of a warpgroup when it is waited for, and no sooner. So who does not
wait reads what was there before, NaN at first; who waits for what never comes fails after a while.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from foci.core.tensor_maps import is_map

PATIENCE = 60.0  # seconds until what is waited for is taken never to come
LATE = 0.4  # seconds that others are given


def told(options: dict[str, Any]) -> str:
    """A test's name of its options, the same in every process: a function's own word has its address."""
    return " ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())


def plain(x: Any) -> Any:
    """The value of a constexpr."""
    return getattr(x, "value", x)


class Value(Tensor):
    """A value, which nothing changes: what is computed of it is another one."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)

    def __iadd__(self, x: Any) -> Any:
        return self + x

    def __isub__(self, x: Any) -> Any:
        return self - x

    def __imul__(self, x: Any) -> Any:
        return self * x


def value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


class Pointer:
    """Numbers of a tensor's memory from one on, or, of an offset with dimensions, many."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def to(self, dtype: torch.dtype) -> Value:
        """An address, 0 of a tensor without elements."""
        assert dtype == torch.int64
        return value(1 + self.offset if self.memory.numel() else 0)


def jitted(module: ModuleType) -> dict[str, Any]:
    """The device functions that it knows by name."""
    return {name: x for name, x in vars(module).items() if hasattr(x, "fn") and callable(x)}


def pointer(x: Tensor) -> Pointer:
    size = x.untyped_storage().nbytes() // x.element_size()
    return Pointer(x.detach().as_strided((size,), (1,), 0), x.storage_offset())


def load(ptr: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    at = torch.as_tensor(ptr.offset)
    inside = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(at.shape)
    assert bool((~inside | ((at >= 0) & (at < ptr.memory.numel()))).all()), "a load from behind a tensor"
    found = ptr.memory[torch.where(inside, at, 0)]
    return value(torch.where(inside, found, torch.as_tensor(other, dtype=found.dtype)))


def store(ptr: Pointer, x: Any, mask: Any = True) -> None:
    at = torch.as_tensor(ptr.offset)
    inside = torch.as_tensor(mask).expand(at.shape)
    assert bool((~inside | ((at >= 0) & (at < ptr.memory.numel()))).all()), "a store behind a tensor"
    ptr.memory[at[inside]] = torch.as_tensor(x).to(ptr.memory.dtype).expand(at.shape)[inside]


class Shared:
    """Shared memory, or a part of it seen in some way."""

    unfenced: ClassVar[dict[tuple[int, int], int]] = {}  # what threads have stored that products and TMA may not see

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.shape, self.layout = tuple(memory.shape), None

    def index(self, at: Any) -> Shared:
        assert 0 <= int(at) < self.shape[0]
        return Shared(self.memory[int(at)])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory.narrow(dim, start, length))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[Any], _layout: Any) -> Shared:
        return Shared(self.memory.view(-1).view(dtype).view([int(plain(n)) for n in shape]))

    def load(self, _layout: Any) -> Tensor:
        return value(self.memory.clone())

    def store(self, x: Tensor) -> None:
        assert self.shape == x.shape and self.memory.dtype == x.dtype
        self.memory.copy_(x)
        self.unfenced[self.place()] = threading.get_ident()

    def place(self) -> tuple[int, int]:
        """Its first byte, and the first one behind it."""
        begin = self.memory.data_ptr()
        last = sum((n - 1) * step for n, step in zip(self.memory.shape, self.memory.stride(), strict=True))
        return begin, begin + (last + 1) * self.memory.element_size()

    def fenced(self) -> bool:
        """Whether who has stored here has fenced it since."""
        begin, end = self.place()
        return not any(first < end and begin < last for first, last in tuple(self.unfenced))


class Layout:
    """Where numbers lie does not matter here."""

    def __init__(self, *_: Any) -> None: ...

    @classmethod
    def get_default_for(cls, *_: Any) -> Layout:
        return cls()


class Barrier:
    """An mbarrier: a phase is over when all that are counted have come, and all bytes that are expected."""

    def __init__(self) -> None:
        self.changed, self.phase, self.bytes, self.count, self.missing = threading.Condition(), 0, 0, 0, 0

    def come(self, arrivals: int, more: int) -> None:
        with self.changed:
            self.missing, self.bytes = self.missing - arrivals, self.bytes + more
            assert self.missing >= 0, "one arrival too many"
            if self.missing == self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE):
                raise TimeoutError(f"phase {self.phase}: {self.missing} arrivals and {self.bytes} bytes are missing")


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.all[int(at)]


class Descriptor:
    """A matrix in memory for TMA: what is asked of behind its rows and columns is 0, and is not stored."""

    def __init__(
        self, ptr: Pointer, shape: Sequence[Any], steps: Sequence[Any], block: Sequence[Any], _layout: Any
    ) -> None:
        self.ptr, self.block = ptr, [int(plain(x)) for x in block]
        self.shape, self.steps = [int(plain(x)) for x in shape], [int(plain(x)) for x in steps]
        assert self.steps[1] == 1 and self.steps[0] * ptr.memory.element_size() % 16 == 0, "TMA wants 16 bytes"
        assert int(ptr.offset) * ptr.memory.element_size() % 16 == 0, "TMA begins at 16 bytes"

    def places(self, at: Sequence[Any]) -> tuple[Tensor, Tensor]:
        rows, columns = (int(plain(x)) + torch.arange(n) for x, n in zip(at, self.block, strict=True))
        inside = (rows < self.shape[0])[:, None] & (columns < self.shape[1])[None, :]
        return int(self.ptr.offset) + rows[:, None] * self.steps[0] + columns[None, :], inside


def given_by_host(x: Any) -> Any:
    """An argument of a launch as a kernel has it."""
    if is_map(x):
        return Descriptor(pointer(x.base), x.shape, x.strides, x.block_shape, x.layout)
    return pointer(x) if isinstance(x, Tensor) else x


class Engine:
    """The thread that copies: what is queued, in any order, or the `newest` first."""

    def __init__(self, newest: bool = False) -> None:
        self.newest = newest
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        held: list[Callable[[], None]] = []
        draw, ended = random.Random(0), False
        while held or not ended:
            while not self.queue.empty() or not held:
                task = self.queue.get()
                ended = task is None
                if ended:
                    break
                held.append(task)
            if self.newest and not ended:
                time.sleep(0.001)  # until as much is asked for as will be
                if not self.queue.empty():
                    continue
            if held:
                try:
                    held.pop(-1 if self.newest else draw.randrange(len(held)))()
                except BaseException as error:
                    self.error = error

    def end(self) -> None:
        self.queue.put(None)
        self.thread.join(PATIENCE)
        if self.error is not None:
            raise self.error
        assert not self.thread.is_alive(), "copies that do not end"


class Product:
    """A product that has not been waited for."""

    def __init__(self, a: Any, b: Shared, sums: Any) -> None:
        self.a, self.b, self.sums, self.value = a, b, sums, None

    def end(self) -> None:
        left = self.a.memory if isinstance(self.a, Shared) else self.a
        sums = self.sums.value if isinstance(self.sums, Product) else self.sums
        found = left.float() @ self.b.memory.float()
        self.value = value(found if sums is None else found + sums)


class Threads(threading.local):
    """What each partition has to itself."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[tuple[threading.Event, Callable[[], None] | None]] = []


class Gluon:
    """The language, for the programs of one launch; `ahead`: the first one first, and what is copied last first.

    `late`: the one of those that run beside each other which begins when the others have gone as far as they can.

    `parts`: among how many partitions a program's warps were shared out.
    """

    def __init__(self, real: ModuleType, ahead: bool = False, late: int | None = None) -> None:
        self.late = late
        self.own, self.engine, self.program, self.programs, self.ahead = Threads(), Engine(ahead), 0, 1, ahead
        self.draw, self.parts = random.Random(1), 0
        self.unsettled: set[int] = set()  # threads whose stores by TMA need not have arrived
        names = {name: getattr(real, name) for name in vars(real) if not name.startswith("__")}
        self.gl = SimpleNamespace(**(names | self.language()))
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None, init=self.init, wait=self.wait, expect=self.expect, arrive=self.arrive
        )
        self.tma = SimpleNamespace(make_tensor_descriptor=Descriptor, store_wait=self.store_wait)

    def language(self) -> dict[str, Any]:
        def where(c: Any, x: Any, y: Any) -> Tensor:
            return value(torch.where(value(c), value(x), value(y)))

        return {
            "program_id": lambda _: value(self.program), "to_tensor": value, "num_warps": lambda: 4,
            "int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bfloat16": torch.bfloat16,
            "arange": lambda low, high, layout: value(torch.arange(plain(low), plain(high))), "static_range": range,
            "zeros": lambda shape, dtype, _: value(torch.zeros([plain(n) for n in shape], dtype=dtype)), "where": where,
            "convert_layout": lambda x, _: x, "load": load, "store": store, "exp2": torch.exp2,
            "maximum": lambda x, y: torch.maximum(value(x), value(y)), "num_programs": lambda _: self.programs,
            "minimum": lambda x, y: torch.minimum(value(plain(x)), value(plain(y))),
            "max": lambda x, axis: x.amax(axis), "sum": lambda x, axis: x.sum(axis),
            "associative_scan": lambda x, axis, _plus: x.cumsum(axis), "allocate_shared_memory": self.allocate,
            "warp_specialize": self.part, "NVMMASharedLayout": Layout, "BlockedLayout": Layout, "SliceLayout": Layout,
        }  # fmt: skip

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], _layout: Any) -> Any:
        sizes = [int(plain(n)) for n in shape]
        return Barriers(sizes[0]) if dtype == torch.int64 else Shared(torch.full(sizes, float("nan"), dtype=dtype))

    def part(self, partitions: Sequence[tuple[Any, tuple[Any, ...]]], _warps: Any, _registers: Any) -> None:
        errors: list[BaseException] = []
        self.parts = len(partitions)

        def go(place: int, function: Any, arguments: tuple[Any, ...]) -> None:
            try:
                time.sleep(LATE if place == self.late else 0)
                function(*map(plain, arguments))
                assert not self.own.products and not self.own.stores, "a product or a store that nobody waits for"
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=go, args=(i, *each), daemon=True) for i, each in enumerate(partitions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "warps that do not end"

    def init(self, bar: Barrier, count: int) -> None:
        bar.count = bar.missing = count

    def wait(self, bar: Barrier, parity: Any, pred: Any = True) -> None:
        if bool(pred):
            bar.wait(int(parity))

    def expect(self, bar: Barrier, size: int, pred: Any = True) -> None:
        if bool(pred):
            bar.come(1, int(plain(size)))

    def arrive(self, bar: Barrier, count: int = 1, pred: Any = True) -> None:
        if bool(pred):
            bar.come(count, 0)

    def copy_in(self, there: Descriptor, at: Sequence[Any], bar: Barrier, tile: Shared, pred: Any = True) -> None:
        def copy() -> None:
            places, inside = there.places(at)
            tile.memory.copy_(load(Pointer(there.ptr.memory, places), inside))
            bar.come(0, -tile.memory.numel() * tile.memory.element_size())

        if bool(pred):
            self.engine.queue.put(copy)

    def copy_out(self, there: Descriptor, at: Sequence[Any], tile: Shared) -> None:
        left = threading.Event()

        def copy() -> None:
            places, inside = there.places(at)
            store(Pointer(there.ptr.memory, places[inside]), tile.memory[inside])
            left.set()

        assert tile.fenced(), "what was stored is copied without a fence"
        late = self.draw.random() < 0.5  # when it is waited for, and no sooner
        self.own.stores.append((left, copy if late else None))
        self.unsettled.add(threading.get_ident())
        if not late:
            self.engine.queue.put(copy)

    def store_wait(self, count: int) -> None:
        while len(self.own.stores) > count:
            left, copy = self.own.stores.pop(0)
            if copy is not None:
                copy()
            assert left.wait(PATIENCE)

    def atomic_add(self, ptr: Pointer, x: Any) -> Value:
        """Of programs one by one; the number before. Who is told so may store where these have stored by TMA."""
        assert not self.unsettled, "what a warp has stored by TMA is only on its way"
        before = load(ptr)
        store(ptr, before + x)
        return before

    def assembly(self, text: str, *_: Any, **_options: Any) -> None:
        """An instruction that waits for what a warp has stored by TMA, which `store_wait` has waited for here too."""
        assert text.startswith("cp.async.bulk.wait_group 0;") and not self.own.stores
        self.unsettled.discard(threading.get_ident())

    def fence(self) -> None:
        for place, thread in tuple(Shared.unfenced.items()):
            if thread == threading.get_ident():
                Shared.unfenced.pop(place, None)

    def product(self, a: Any, b: Shared, sums: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        for x in (a, b):
            assert not isinstance(x, Shared) or x.fenced(), "what was stored is multiplied without a fence"
        assert not (use_acc and isinstance(sums, Product) and sums.value is not None), (
            "a sum that was waited for before"
        )
        made = Product(a, b, sums if use_acc else None)
        self.own.products.append(made)
        return made if is_async else self.product_wait(0, [made])

    def product_wait(self, count: int, deps: Sequence[Product]) -> Any:
        if len(self.own.products) > count:
            time.sleep(0.0002)  # what was let go too early is copied over in between
        while len(self.own.products) > count:
            self.own.products.pop(0).end()
        assert all(each.value is not None for each in deps), "what is waited for may not be there yet"
        found = tuple(each.value for each in deps)
        return found[0] if len(found) == 1 else found

    def run(
        self, module: ModuleType, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], **meta: Any
    ) -> None:
        """All programs of a launch of the module's kernel, one by one, the last one first unless `ahead`."""
        given = [*map(given_by_host, arguments)]
        named = {"gl": self.gl, "mbarrier": self.mbarrier, "tma": self.tma, "fence_async_shared": self.fence}
        named |= {"async_load": self.copy_in, "async_store": self.copy_out}
        named |= {"warpgroup_mma": self.product, "warpgroup_mma_wait": self.product_wait}
        with ExitStack() as stack:
            stack.callback(self.engine.end)
            for each in self.modules(module):
                own = {name: plain(x) for name, x in vars(each).items() if type(x).__name__ == "constexpr"}
                own |= {name: x.fn for name, x in jitted(each).items()} | {"tl": self.triton()}
                stack.enter_context(
                    mock.patch.multiple(each, **{name: x for name, x in (own | named).items() if hasattr(each, name)})
                )
            self.programs = grid[0]
            programs = range(grid[0]) if self.ahead else reversed(range(grid[0]))
            for self.program in programs:
                Shared.unfenced.clear()
                self.unsettled.clear()
                kernel.fn(*given, **meta)

    def modules(self, module: ModuleType) -> list[ModuleType]:
        """It, and those whose device functions it calls, and they."""
        found = [module]
        for each in found:
            others = {x.fn.__globals__["__name__"] for x in jitted(each).values()} - {x.__name__ for x in found}
            found += [sys.modules[name] for name in sorted(others) if name.startswith(("foci.", "tests."))]
        return found

    def triton(self) -> SimpleNamespace:
        """What is used of Triton's language by device functions of both."""
        return SimpleNamespace(
            load=load, store=store, atomic_add=self.atomic_add, inline_asm_elementwise=self.assembly,
            max=self.gl.max, cast=lambda x, dtype: value(x).to(dtype), cdiv=lambda x, y: (x + y - 1) // y,
            int32=torch.int32, int64=torch.int64, int16=torch.int16, float32=torch.float32, bfloat16=torch.bfloat16,
            minimum=lambda x, y: torch.minimum(value(plain(x)), value(plain(y))),
            maximum=self.gl.maximum, where=self.gl.where, static_range=range,
        )  # fmt: skip
