"""Launch configurations: a rule of thumb, then a measured table per GPU; and the one door to a launch."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foci.core.assembler import assembling, persistent
from foci.core.device import constant, machine
from foci.core.tensor_maps import tensor_of

TABLES = Path(__file__).parent / "tuned"


class Target(NamedTuple):
    """What a kernel is configured for: "cuda" or "hip", arch (90 is sm_90, 0x942 gfx942), bytes a block may share."""

    kind: str
    arch: int
    processors: int
    shared: int
    name: str = ""

    @property
    def warpgroups(self) -> bool:
        """Whether products are made by whole warpgroups, out of shared memory."""
        return self.kind == "cuda" and 90 <= self.arch < 120

    @property
    def lanes(self) -> int:
        """Threads of a warp."""
        return 64 if self.kind == "hip" else 32

    @property
    def architecture(self) -> str:
        """As compilers name it: sm_90, gfx942."""
        return f"gfx{self.arch:x}" if self.kind == "hip" else f"sm_{self.arch}"


# A configuration must fit these without a GPU at hand: what a block may share (bytes) and how many blocks run at once.
TARGETS = {
    "sm_80": Target("cuda", 80, 108, 166_912),
    "sm_90": Target("cuda", 90, 132, 232_448),
    "sm_100": Target("cuda", 100, 148, 232_448),
    "sm_120": Target("cuda", 120, 188, 101_376),
    "gfx942": Target("hip", 0x942, 304, 65_536),
}


@dataclass(frozen=True)
class Config:
    """How one kernel is launched: its block sizes by constexpr name, warps, and stages of its pipelined loops."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2

    def __getitem__(self, block: str) -> int:
        return self.blocks[block]

    @functools.cached_property
    def meta(self) -> dict[str, int]:
        """The keywords of a launch."""
        return {**self.blocks, "num_warps": self.warps, "num_stages": self.stages}


class Launch(NamedTuple):
    """A launch that was recorded and not made."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    meta: dict[str, Any]


class _Recording(NamedTuple):
    target: Target
    launches: list[Launch]


_RECORDING: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording(target: Target) -> Iterator[list[Launch]]:
    """Within it launches are noted for `target` and not made: run a backend on meta tensors to see what it launches."""
    launches: list[Launch] = []
    token = _RECORDING.set(_Recording(target, launches))
    try:
        yield launches
    finally:
        _RECORDING.reset(token)


@constant
def interpreting() -> bool:
    """Whether Triton's interpreter, which takes tensors of the CPU, was on when Triton was imported."""
    triton = sys.modules.get("triton")
    return triton is not None and _interprets(id(triton))[1]


@functools.cache
def _interprets(triton: int) -> tuple[Any, bool]:
    """Asked at every call, when Triton reads its environment; with the module, so that no other has its id."""
    module: Any = sys.modules["triton"]
    return module, bool(module.knobs.runtime.interpret)


@constant
def target_of(device: torch.device) -> Target:
    """What kernels for tensors of this device are configured for."""
    there = _RECORDING.get()
    if there is not None:
        return there.target
    return _target(device.index or 0) if device.type == "cuda" else TARGETS["sm_90"]._replace(processors=4)


@constant
@functools.cache
def _target(index: int) -> Target:
    gpu = machine().gpus[index]
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
        return Target("hip", int(arch.removeprefix("gfx"), 16), gpu.processors, gpu.shared or 65_536, gpu.name)
    return Target("cuda", 10 * gpu.capability[0] + gpu.capability[1], gpu.processors, gpu.shared, gpu.name)


class Asked(NamedTuple):
    """What was asked of `configure`: the rule's answer, and the sizes that a block may have instead."""

    rule: Config
    vary: Mapping[str, Sequence[int]]


class _Choosing(NamedTuple):
    chosen: Mapping[tuple[str, str], Config]
    asked: dict[tuple[str, str], Asked]


# The last rules. Of the process, not of a thread: autograd runs what is on a GPU backward in a thread of its own.
_CHOOSING: list[_Choosing] = []


@contextmanager
def choosing(chosen: Mapping[tuple[str, str], Config]) -> Iterator[dict[tuple[str, str], Asked]]:
    """Within it these configurations go before all others, in every thread, by (kernel, key); gives what was asked."""
    there = _Choosing(chosen, {})
    _CHOOSING.append(there)
    try:
        yield there.asked
    finally:
        _CHOOSING.pop()


def configure(
    kernel: str,
    key: Sequence[object],
    rule: Callable[[Target], Config],
    target: Target,
    vary: Mapping[str, Sequence[int]] | None = None,
) -> Config:
    """The configuration measured for this kernel, key and GPU, else the rule of thumb's.

    `vary`: the sizes that `foci tune` may try for a block, by its name; warps and stages may always vary.
    """
    if _CHOOSING:
        there = _CHOOSING[-1]
        name = _name(key)
        there.asked[kernel, name] = Asked(rule(target), vary or {})
        if (kernel, name) in there.chosen:
            return there.chosen[kernel, name]
    rows = _kernels(target.name).get(kernel) if target.name else None
    if rows is None:
        return rule(target)
    key = tuple(key)
    if key not in rows:  # from here on it is found without being written out
        rows[key] = rows.get(_name(key))
    return rows[key] or rule(target)


def _name(key: Sequence[object]) -> str:
    return ",".join(str(part) for part in key)


def candidates(asked: Asked) -> list[Config]:
    """What is worth trying in place of the rule's answer, which comes first: its blocks, warps and stages varied."""
    rule = asked.rule
    sizes = [[(block, size) for size in dict.fromkeys((rule[block], *sizes))] for block, sizes in asked.vary.items()]
    warps = [rule.warps, *(warps for warps in (rule.warps // 2, 2 * rule.warps) if 1 <= warps <= 16)]
    stages = [rule.stages, *(stages for stages in (rule.stages - 1, rule.stages + 1) if 1 <= stages <= 5)]
    tiles = [{**rule.blocks, **dict(chosen)} for chosen in itertools.product(*sizes)]
    return [Config(*parts) for parts in itertools.product(tiles, warps, stages)]


def table_of(gpu: str) -> dict[str, Any] | None:
    """The table that was measured on a GPU of this name and lies in the package."""
    path = TABLES / f"{file_name(gpu)}.json"
    table: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return table


def measured(table: Mapping[str, Any]) -> str:
    """When the rows of a table were, from the first to the last; empty where it has none."""
    dates = sorted(row["date"] for rows in table["kernels"].values() for row in rows.values())
    return " to ".join(dict.fromkeys((*dates[:1], *dates[-1:])))


@constant
@functools.cache
def _kernels(gpu: str) -> dict[str, dict[Any, Config | None]]:
    """Of each kernel the configurations measured, by their keys' names."""
    kernels = (table_of(gpu) or {"kernels": {}})["kernels"]
    return {
        kernel: {name: Config(row["blocks"], row["warps"], row["stages"]) for name, row in rows.items()}
        for kernel, rows in kernels.items()
    }


def file_name(gpu: str) -> str:
    """NVIDIA H200 -> nvidia_h200"""
    return "_".join(re.findall(r"[a-z0-9]+", gpu.lower()))


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, config: Config, **constants: Any) -> None:
    """Launch a kernel on its first tensor's device, or note it (`recording`). An empty grid launches nothing."""
    if 0 in grid:
        return
    there = _RECORDING.get()
    if there is not None:
        there.launches.append(Launch(kernel, grid, arguments, constants | config.meta))
        return
    device = next(x.device for x in map(tensor_of, arguments) if isinstance(x, torch.Tensor))
    meta = constants | config.meta
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _start(kernel, grid, arguments, meta, device)
    else:
        _start(kernel, grid, arguments, meta, device)


def beside(target: Target, second: bool) -> dict[str, bool]:
    """What two launches are told of which the `second` may begin beside the first (tiles/turns.py)."""
    there = target.kind == "cuda" and target.arch >= 90 and not interpreting()
    return {"BESIDE": there, "launch_pdl": True} if there and second else {"BESIDE": there}


_COMPILED: dict[tuple[Any, ...], Any] = {}
# Told of every launch (core/plans.py): the kernel, as compiled (None: not known), its grid, all its arguments.
Noting = Callable[[Any, Any, tuple[int, ...], tuple[Any, ...]], None]
NOTING: ContextVar[Noting | None] = ContextVar("noting", default=None)


def ordinary() -> bool:
    """Whether launches are made, as the tables say: neither recorded, nor with configurations that someone chose."""
    return _RECORDING.get() is None and not _CHOOSING and not interpreting()


def watched() -> bool:
    """Whether a hook of Triton's wants to hear of every launch."""
    runtime = sys.modules["triton"].knobs.runtime
    return heard(runtime.launch_enter_hook, runtime.launch_exit_hook)


def heard(*hooks: Any) -> bool:
    """Whether one of these hooks of Triton's is there: they are chains, empty as a rule."""
    for hook in hooks:
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def fire(compiled: Any, grid: tuple[int, ...], stream: int, arguments: Sequence[Any]) -> None:
    """Start a compiled kernel, as `compiled[grid](*arguments)` does it where no hook listens."""
    run = compiled.run  # loads it, where it is not
    if getattr(run, "global_scratch_size", 0):
        with _Lending():
            run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    else:
        run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


class Started(NamedTuple):
    """How a compiled kernel is started: `launch(*head, *arguments)`, or `launch(*head, arguments)` where `nested`.

    In `head` STREAM and SCRATCH stand for the stream and for the address of `scratch` bytes for this launch alone.
    """

    launch: Callable[..., Any]
    head: tuple[Any, ...]
    nested: bool = False
    scratch: int = 0


STREAM, SCRATCH = object(), object()


def started(compiled: Any, grid: tuple[int, ...]) -> Started:
    """What `fire` comes to with this kernel and grid: the launcher in C, where nothing else is done on the way to it.

    Held against the source of Triton's launcher on NVIDIA; all others are called as they are.
    """
    run = compiled.run
    version = _version()
    known = run.__class__.__module__ == "triton.backends.nvidia.driver" and run.__class__.__name__ == "CudaLauncher"
    if not known or version not in ("3.6.", "3.7.") or run.profile_scratch_size:
        return Started(functools.partial(_fired, compiled, grid), (STREAM,))
    scratch = run.global_scratch_size * run.num_ctas * math.prod(grid)
    room = SCRATCH if scratch else None
    head = (*grid, STREAM, compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    if version == "3.6.":
        return Started(run.launch, (*head, room, None, compiled.packed_metadata, None, None, None), scratch=scratch)
    head = (*head, compiled.packed_metadata, None, None, None, room, None, run.arg_annotations, run.kernel_signature)
    return Started(run.launch, head, nested=True, scratch=scratch)


def _fired(compiled: Any, grid: tuple[int, ...], stream: int, *arguments: Any) -> None:
    fire(compiled, grid, stream, arguments)


class _Lending:
    """Within it a kernel that asks for memory of its own, for its tensor descriptors, is given some by torch.

    It is given back when the launch is made: what takes it next on this stream comes after the kernel. Nothing happens
    where Triton is not there. (A class, as contextlib's generators take longer.)
    """

    __slots__ = ("chosen", "token")

    def __enter__(self) -> None:
        self.chosen = getattr(sys.modules.get("triton.runtime._allocation"), "_allocator", None)
        if self.chosen is not None:
            self.token = self.chosen.set(_lent)

    def __exit__(self, *_: object) -> None:
        if self.chosen is not None:
            self.chosen.reset(self.token)


def _lent(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")  # at a multiple of 512 bytes


def _start(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: dict[str, Any], device: torch.device
) -> None:
    """`kernel[grid](*arguments, **meta)`, without Triton's search for what it has compiled, which takes longer.

    A compiled kernel is kept by what Triton tells apart: it is asked of the function that Triton itself asks of every
    argument. Where that is not known to be all there is, as in the interpreter, Triton does everything.
    """
    triton, noting = _known(kernel.__class__), NOTING.get()
    if triton is None or kernel.pre_run_hooks or triton.knobs.runtime.add_stages_inspection_hook is not None:
        with assembling(target_of(device).arch), _Lending():
            persistent(lambda: kernel[grid](*arguments, **meta))
        if noting is not None:
            noting(kernel, None, grid, arguments)
        return
    told, backend = triton.native_specialize_impl, kernel.device_caches[device.index or 0][3]
    key = (
        kernel.fn, device, triton.knobs.runtime.debug, triton.knobs.compilation.instrumentation_mode,
        tuple(meta), tuple(meta.values()), *[told(backend, value, False, True, True) for value in arguments],
    )  # fmt: skip
    compiled = _COMPILED.get(key)
    if compiled is None:
        with assembling(target_of(device).arch), _Lending():
            compiled = persistent(lambda: kernel[grid](*arguments, **meta))
        if hasattr(type(compiled), "result"):  # it is being compiled elsewhere, in a mode of the user's own
            compiled = compiled.result()
        if hasattr(compiled, "packed_metadata"):  # else a hook has taken it
            _COMPILED[key] = compiled
        if noting is not None:
            noting(kernel, None, grid, arguments)
        return
    arguments = (*arguments, *[meta[name] for name in kernel.arg_names[len(arguments) :]])
    grid = (*grid, 1, 1)[:3]
    if watched():
        with _Lending():
            compiled[grid](*arguments)
    else:
        fire(compiled, grid, triton.driver.active.get_current_stream(device.index or 0), arguments)
    if noting is not None:
        noting(kernel, compiled, grid, arguments)


@functools.cache
def _known(kind: Any) -> Any:
    """The module of Triton's jitted functions where `_start` has been held against its source; else None."""
    if _version() not in ("3.6.", "3.7."):
        return None
    if kind.__name__ == "GluonJITFunction":  # one that is compiled otherwise, and launched alike
        kind = kind.__mro__[1]
    return sys.modules[kind.__module__] if kind.__name__ == "JITFunction" else None


def _version() -> str:
    version: str = getattr(sys.modules.get("triton"), "__version__", "")
    return version[:4]


def with_gluon() -> bool:
    """Whether kernels in Gluon may be asked for: of Tritons that compile them, and not of its interpreter."""
    return _version() in ("3.6.", "3.7.", "3.9.") and not interpreting()


def precision(dtype: torch.dtype, target: Target) -> str:
    """What a product of two tiles of this dtype asks of `tl.dot`: float32 in full, by three TF32 products on NVIDIA."""
    return "tf32x3" if dtype == torch.float32 and target.kind == "cuda" else "ieee"


def float_precision(dtype: torch.dtype, target: Target) -> str:
    """The same of float32 tiles made of inputs of this dtype: of bfloat16 by TF32.

    Of float16 by three products of bfloat16, each number the sum of two: 16 digits, as bfloat16's own kernels have of
    tiles that matter, where TF32 has 11, too few for sums that telescope. The interpreter knows no such products.
    """
    if target.kind != "cuda" or dtype == torch.float32 or (dtype == torch.float16 and interpreting()):
        return precision(torch.float32, target)
    return "bf16x3" if dtype == torch.float16 else "tf32"


def stored(dtype: torch.dtype) -> torch.dtype:
    """In which dtype states and their gradients are handed on: float16 would lose those that have decayed."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def side(size: int, most: int) -> int:
    """The power of two that holds a head's channels, or `most` of them; products want 16 at least."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def strides(x: torch.Tensor | None) -> tuple[int, ...] | None:
    """Of sizes as well as of memory: 0 along what is broadcast, where a tensor of one entry may have any."""
    if x is None:
        return None
    found: tuple[int, ...] = x.stride()
    return tuple(0 if n == 1 else s for n, s in zip(x.shape, found, strict=True)) if 1 in x.shape else found


def by_tma(x: torch.Tensor | None) -> bool:
    """Whether TMA can read it: rows apart that begin at multiples of 16 bytes, columns side by side."""
    if x is None:
        return True
    *rows, column = x.stride()
    size = x.element_size()
    return column == 1 and x.data_ptr() % 16 == 0 and all(n and n * size % 16 == 0 for n in rows)
