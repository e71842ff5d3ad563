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

from foci.core.assembler import assembling, retry_failed_passes
from foci.core.device import constant, machine
from foci.core.tensor_maps import tensor_of

TABLES = Path(__file__).parent / "tuned"


class Target(NamedTuple):
    """A GPU as kernels are configured for it: "cuda" or "hip", and arch (90 is sm_90, 0x942 gfx942).

    `processors` counts its SMs or CUs; `shared` is what one block may use, in bytes.
    """

    kind: str
    arch: int
    processors: int
    shared: int
    name: str = ""

    @property
    def warpgroups(self) -> bool:
        """Whether matrix products run on warpgroups with operands in shared memory (wgmma, tcgen05)."""
        return self.kind == "cuda" and 90 <= self.arch < 120

    @property
    def lanes(self) -> int:
        """Threads of a warp."""
        return 64 if self.kind == "hip" else 32

    @property
    def architecture(self) -> str:
        """As compilers name it: sm_90, gfx942."""
        return f"gfx{self.arch:x}" if self.kind == "hip" else f"sm_{self.arch}"


# For compiling and checking configurations without a GPU: kind, arch, number of SMs or CUs, shared memory (bytes).
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


_OPTIONS = {"enable_fp_fusion": True}  # for the compiler: without it Triton 3.9 warns, and 3.10 will fuse nothing


class Launch(NamedTuple):
    """A launch that was recorded instead of made."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    meta: dict[str, Any]

    def compiled(self) -> Any:
        """The kernel as this launch would compile it, for the GPU that Triton's driver tells it of."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.meta, **_OPTIONS)


class _Recording(NamedTuple):
    target: Target
    launches: list[Launch]


_RECORDING: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def record_launches(target: Target) -> Iterator[list[Launch]]:
    """Within it launches are recorded for `target`, not made: run a backend on meta tensors to see what it launches."""
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
    return triton is not None and _interpret_knob(id(triton))[1]


@functools.cache
def _interpret_knob(triton: int) -> tuple[Any, bool]:
    """Cached, as Triton reads its environment each time; the module is kept, so that its id is not reused."""
    module: Any = sys.modules["triton"]
    return module, bool(module.knobs.runtime.interpret)


@constant
def target_of(device: torch.device) -> Target:
    """What kernels for tensors of this device are configured for."""
    active = _RECORDING.get()
    if active is not None:
        return active.target
    return _target(device.index or 0) if device.type == "cuda" else TARGETS["sm_90"]._replace(processors=4)


@constant
@functools.cache
def _target(index: int) -> Target:
    gpu = machine().gpus[index]
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
        return Target("hip", int(arch.removeprefix("gfx"), 16), gpu.processors, gpu.shared or 65_536, gpu.name)
    return Target("cuda", 10 * gpu.capability[0] + gpu.capability[1], gpu.processors, gpu.shared, gpu.name)


class ConfigRequest(NamedTuple):
    """A request to `configure`: the rule's answer, and the block sizes that may be tried instead."""

    rule: Config
    vary: Mapping[str, Sequence[int]]


class _Overrides(NamedTuple):
    chosen: Mapping[tuple[str, str], Config]
    requests: dict[tuple[str, str], ConfigRequest]


# A stack, the last in force. Global to the process, as autograd runs a GPU's backward on a thread of its own.
_OVERRIDES: list[_Overrides] = []


@contextmanager
def override_configs(chosen: Mapping[tuple[str, str], Config]) -> Iterator[dict[tuple[str, str], ConfigRequest]]:
    """Within it these configurations, by (kernel, key), override all others on every thread; yields the requests."""
    overrides = _Overrides(chosen, {})
    _OVERRIDES.append(overrides)
    try:
        yield overrides.requests
    finally:
        _OVERRIDES.pop()


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
    if _OVERRIDES:
        overrides = _OVERRIDES[-1]
        name = _key_name(key)
        overrides.requests[kernel, name] = ConfigRequest(rule(target), vary or {})
        if (kernel, name) in overrides.chosen:
            return overrides.chosen[kernel, name]
    rows = _kernels(target.name).get(kernel) if target.name else None
    if rows is None:
        return rule(target)
    key = tuple(key)
    if key not in rows:  # cached under the tuple itself, so that later calls need not format it
        rows[key] = rows.get(_key_name(key))
    return rows[key] or rule(target)


def _key_name(key: Sequence[object]) -> str:
    return ",".join(str(part) for part in key)


def candidates(request: ConfigRequest) -> list[Config]:
    """The configurations to try: the rule's answer first, then its blocks, warps and stages varied."""
    rule = request.rule
    sizes = [[(block, size) for size in dict.fromkeys((rule[block], *sizes))] for block, sizes in request.vary.items()]
    warps = [rule.warps, *(warps for warps in (rule.warps // 2, 2 * rule.warps) if 1 <= warps <= 16)]
    stages = [rule.stages, *(stages for stages in (rule.stages - 1, rule.stages + 1) if 1 <= stages <= 5)]
    tiles = [{**rule.blocks, **dict(chosen)} for chosen in itertools.product(*sizes)]
    return [Config(*parts) for parts in itertools.product(tiles, warps, stages)]


def table_of(gpu: str) -> dict[str, Any] | None:
    """The table measured on a GPU of this name, from the package's files; None if there is none."""
    path = TABLES / f"{file_name(gpu)}.json"
    table: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return table


def measurement_dates(table: Mapping[str, Any]) -> str:
    """When a table's rows were measured, first date to last; empty where it has no rows."""
    dates = sorted(row["date"] for rows in table["kernels"].values() for row in rows.values())
    return " to ".join(dict.fromkeys((*dates[:1], *dates[-1:])))


@constant
@functools.cache
def _kernels(gpu: str) -> dict[str, dict[Any, Config | None]]:
    """The measured configurations of each kernel, by the names of their keys."""
    kernels = (table_of(gpu) or {"kernels": {}})["kernels"]
    return {
        kernel: {name: Config(row["blocks"], row["warps"], row["stages"]) for name, row in rows.items()}
        for kernel, rows in kernels.items()
    }


def file_name(gpu: str) -> str:
    """NVIDIA H200 -> nvidia_h200"""
    return "_".join(re.findall(r"[a-z0-9]+", gpu.lower()))


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, config: Config, **constants: Any) -> None:
    """Launch a kernel on its first tensor's device, or record it (`record_launches`); an empty grid launches none."""
    if 0 in grid:
        return
    active = _RECORDING.get()
    if active is not None:
        active.launches.append(Launch(kernel, grid, arguments, constants | config.meta))
        return
    device = next(x.device for x in map(tensor_of, arguments) if isinstance(x, torch.Tensor))
    meta = constants | config.meta
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _start(kernel, grid, arguments, meta, device)
    else:
        _start(kernel, grid, arguments, meta, device)


def dependent_launch(target: Target, second: bool) -> dict[str, bool]:
    """Launch keywords for programmatic dependent launch: the `second` of two kernels may start before the first ends.

    The kernels synchronise by tiles/turns.py.
    """
    supported = target.kind == "cuda" and target.arch >= 90 and not interpreting()
    return {"BESIDE": supported, "launch_pdl": True} if supported and second else {"BESIDE": supported}


_COMPILED: dict[tuple[Any, ...], Any] = {}
# A callback on every launch (core/plans.py): kernel, compiled kernel (None: not known), grid, all arguments.
LaunchCallback = Callable[[Any, Any, tuple[int, ...], tuple[Any, ...]], None]
LAUNCH_CALLBACK: ContextVar[LaunchCallback | None] = ContextVar("launch_callback", default=None)


def launches_normally() -> bool:
    """Whether launches run as usual: not under `record_launches`, `override_configs` or Triton's interpreter."""
    return _RECORDING.get() is None and not _OVERRIDES and not interpreting()


def has_launch_hooks() -> bool:
    """Whether a Triton launch hook is installed."""
    runtime = sys.modules["triton"].knobs.runtime
    return any_hook_set(runtime.launch_enter_hook, runtime.launch_exit_hook)


def any_hook_set(*hooks: Any) -> bool:
    """Whether one of these Triton hooks is set; Triton keeps them as chains, usually empty."""
    for hook in hooks:
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def launch_compiled(compiled: Any, grid: tuple[int, ...], stream: int, arguments: Sequence[Any]) -> None:
    """Launch a compiled kernel as `compiled[grid](*arguments)` does without hooks."""
    run = compiled.run  # this property loads the kernel at first use
    if getattr(run, "global_scratch_size", 0):
        with _ScratchAllocator():
            run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    else:
        run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


class Launcher(NamedTuple):
    """How to launch a compiled kernel: `launch(*head, *arguments)`, or `launch(*head, arguments)` where `nested`.

    In `head`, STREAM is a placeholder for the stream and SCRATCH for the address of `scratch` bytes of global scratch.
    """

    launch: Callable[..., Any]
    head: tuple[Any, ...]
    nested: bool = False
    scratch: int = 0


STREAM, SCRATCH = object(), object()
PROVEN: tuple[str, ...] = ("3.6.", "3.7.", "3.9.")  # by which the kernels' tests have passed on a GPU


def launcher_of(compiled: Any, grid: tuple[int, ...]) -> Launcher:
    """How `launch_compiled` launches this kernel and grid: by Triton's C launcher where its Python one adds nothing.

    Verified against the source of Triton's NVIDIA launcher in the versions below; any other is called as it is.
    """
    run = compiled.run
    version = _triton_version()
    known = run.__class__.__module__ == "triton.backends.nvidia.driver" and run.__class__.__name__ == "CudaLauncher"
    if not known or not proven() or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return Launcher(functools.partial(_launch_with_stream, compiled, grid), (STREAM,))
    scratch = run.global_scratch_size * run.num_ctas * math.prod(grid)
    room = SCRATCH if scratch else None
    head = (*grid, STREAM, compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    if version == "3.6.":
        return Launcher(run.launch, (*head, room, None, compiled.packed_metadata, None, None, None), scratch=scratch)
    head = (*head, compiled.packed_metadata, None, None, None, room, None, run.arg_annotations, run.kernel_signature)
    return Launcher(run.launch, head, nested=True, scratch=scratch)


def _launch_with_stream(compiled: Any, grid: tuple[int, ...], stream: int, *arguments: Any) -> None:
    launch_compiled(compiled, grid, stream, arguments)


class _ScratchAllocator:
    """Within it Triton allocates a kernel's global scratch, for tensor descriptors, from torch's caching allocator.

    The memory is freed right after the launch: whoever reuses it on this stream runs after the kernel. Without Triton
    it does nothing. (A class, as contextlib's generators are slower.)
    """

    __slots__ = ("chosen", "token")

    def __enter__(self) -> None:
        self.chosen = getattr(sys.modules.get("triton.runtime._allocation"), "_allocator", None)
        if self.chosen is not None:
            self.token = self.chosen.set(_allocate)

    def __exit__(self, *_: object) -> None:
        if self.chosen is not None:
            self.chosen.reset(self.token)


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")  # aligned to 512 bytes


def _start(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: dict[str, Any], device: torch.device
) -> None:
    """`kernel[grid](*arguments, **meta)`, with a cache of compiled kernels that is faster than Triton's own.

    Its key holds what Triton specializes on, from the C function that Triton itself calls for every argument. Where
    that is not known to suffice (other versions of Triton, the interpreter, hooks), Triton launches the kernel itself.
    """
    triton, callback = _jit_module(kernel.__class__), LAUNCH_CALLBACK.get()
    if triton is None or kernel.pre_run_hooks or triton.knobs.runtime.add_stages_inspection_hook is not None:
        with assembling(target_of(device).arch), _ScratchAllocator():
            retry_failed_passes(lambda: kernel[grid](*arguments, **meta, **_OPTIONS))
        if callback is not None:
            callback(kernel, None, grid, arguments)
        return
    specialize, backend = triton.native_specialize_impl, kernel.device_caches[device.index or 0][3]
    key = (
        kernel.fn, device, triton.knobs.runtime.debug, triton.knobs.compilation.instrumentation_mode,
        tuple(meta), tuple(meta.values()), *[specialize(backend, value, False, True, True) for value in arguments],
    )  # fmt: skip
    compiled = _COMPILED.get(key)
    if compiled is None:
        with assembling(target_of(device).arch), _ScratchAllocator():
            compiled = retry_failed_passes(lambda: kernel[grid](*arguments, **meta, **_OPTIONS))
        if hasattr(type(compiled), "result"):  # a future: the user compiles in an AsyncCompileMode
            compiled = compiled.result()
        if hasattr(compiled, "packed_metadata"):  # else a hook replaced it
            _COMPILED[key] = compiled
        if callback is not None:
            callback(kernel, None, grid, arguments)
        return
    arguments = (*arguments, *[meta[name] for name in kernel.arg_names[len(arguments) :]])
    grid = (*grid, 1, 1)[:3]
    if has_launch_hooks():
        with _ScratchAllocator():
            compiled[grid](*arguments)
    else:
        launch_compiled(compiled, grid, triton.driver.active.get_current_stream(device.index or 0), arguments)
    if callback is not None:
        callback(kernel, compiled, grid, arguments)


@functools.cache
def _jit_module(kind: Any) -> Any:
    """Triton's module of JITFunction in the versions that `_start` was verified against; else None."""
    if not proven():
        return None
    if kind.__name__ == "GluonJITFunction":  # compiled differently, launched the same way
        kind = kind.__mro__[1]
    return sys.modules[kind.__module__] if kind.__name__ == "JITFunction" else None


def proven() -> bool:
    """Whether the kernels' tests have passed on a GPU by this version of Triton."""
    return _triton_version() in PROVEN


def _triton_version() -> str:
    version: str = getattr(sys.modules.get("triton"), "__version__", "")
    return version[:4]


def with_gluon() -> bool:
    """Whether Gluon kernels can run: by a Triton that is proven, and not in its interpreter."""
    return proven() and not interpreting()


def precision(dtype: torch.dtype, target: Target) -> str:
    """`input_precision` of a tl.dot of two tiles of this dtype: full float32, as three TF32 products on NVIDIA."""
    return "tf32x3" if dtype == torch.float32 and target.kind == "cuda" else "ieee"


def float_precision(dtype: torch.dtype, target: Target) -> str:
    """`input_precision` of a tl.dot of float32 tiles computed from inputs of this dtype: TF32 for bfloat16.

    For float16 three bfloat16 products of numbers split in two, which keep 16 bits of mantissa where TF32 keeps 11, too
    few for telescoping sums. The interpreter has no such products.
    """
    if target.kind != "cuda" or dtype == torch.float32 or (dtype == torch.float16 and interpreting()):
        return precision(torch.float32, target)
    return "bf16x3" if dtype == torch.float16 else "tf32"


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels store states and their gradients: decayed states would underflow in float16."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def side(size: int, most: int) -> int:
    """The block size for a head's channels: the next power of two, at least 16 (for tl.dot) and at most `most`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def strides(x: torch.Tensor | None) -> tuple[int, ...] | None:
    """The strides, 0 along dimensions of size 1, so that kernels broadcast them: torch leaves those arbitrary."""
    if x is None:
        return None
    found: tuple[int, ...] = x.stride()
    return tuple(0 if n == 1 else s for n, s in zip(x.shape, found, strict=True)) if 1 in x.shape else found


def by_tma(x: torch.Tensor | None) -> bool:
    """Whether TMA can read it: contiguous columns, row strides not 0, and rows aligned to 16 bytes."""
    if x is None:
        return True
    *rows, column = x.stride()
    size = x.element_size()
    return column == 1 and x.data_ptr() % 16 == 0 and all(n and n * size % 16 == 0 for n in rows)
