"""Facts of this machine, asked late and once: versions, instruction set, threads, GPUs, Triton, shared memory."""

from __future__ import annotations

import os
import platform as host
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
Version = tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """One CUDA or ROCm device. `memory` and `shared` (the most one block may ask for) are in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    memory: int
    processors: int
    shared: int


@dataclass(frozen=True)
class Machine:
    """What `foci doctor` prints. `isa` is the best vector instruction set torch uses, with its 16-bit extensions."""

    system: str
    python: str
    torch: str
    cuda: str | None
    hip: str | None
    cudnn: Version | None
    packages: dict[str, str | None]
    cpu: str
    isa: tuple[str, ...]
    cores: int
    memory: int
    gpus: tuple[Gpu, ...]

    @property
    def threads(self) -> int:
        """Threads torch uses inside an operator: a setting, so asked each time."""
        return torch.get_num_threads()

    @property
    def line(self) -> str:
        """The machine in one line, as reports begin."""
        gpus = ", ".join(dict.fromkeys(gpu.name for gpu in self.gpus)) or "no GPU"
        return f"torch {self.torch} · CPU, {self.threads} threads, {' '.join(self.isa)} · {gpus}"

    @property
    def computer(self) -> str:
        """Operating system, CPU and memory in one line: what else measured times depend on."""
        return f"{self.system}, {self.cpu}, {self.cores} cores, {self.memory / 2**30:.0f} GiB"

    def as_dict(self) -> dict[str, Any]:
        """All facts as plain values, for JSON."""
        return asdict(self) | {"threads": self.threads}


@dataclass(frozen=True)
class Platform:
    """What the ledger needs of the place where a foreign kernel would run; a version that does not apply is ()."""

    device: str
    torch: Version
    cuda: Version = ()
    cudnn: Version = ()
    capability: Version = ()


def constant(function: Function) -> Function:
    """Let torch.compile keep the result instead of tracing into the function.

    torch.compiler.assume_constant_result does the same, but imports torch._dynamo, which costs `import foci` a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def installed(package: str) -> bool:
    """Whether a package can be imported; asked at every dispatch, so the search is cached."""
    return _found(package)  # a function of its own, as torch.compile warns when it traces a functools.cache


@constant
def imported(package: str) -> bool:
    """Import the package if it is installed; whether it is. Once imported, Triton says if its interpreter is on."""
    if package not in sys.modules and installed(package):
        import_module(package)
    return package in sys.modules


@cache
def _found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):  # sys.modules holds None or a stub in its place
        return False


def own_version() -> str:
    """foci's version; a source tree on the path has none."""
    return _installed("foci") or "from its source"


def version_of(text: str | None) -> Version:
    """(2, 13, 0) from "2.13.0+cu126"; () from None."""
    found = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in found[0].split(".")) if found else ()


@constant
def machine() -> Machine:
    """The facts of this machine. The first call asks every GPU, which initialises CUDA: never call it at import."""
    return _machine()


@constant
def platform(device: torch.device) -> Platform:
    """The platform of a tensor's device; asks nothing of any other device."""
    return _platform(device.type, device.index)


@cache
def _platform(kind: str, index: int | None) -> Platform:
    here = Platform(kind, version_of(torch.__version__))
    if kind != "cuda":
        return here
    capability = torch.cuda.get_device_capability(index)
    return Platform(kind, here.torch, version_of(torch.version.cuda), _cudnn() or (), capability)


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _machine() -> Machine:
    packages = ("numpy", "jaxtyping", "triton", "diffusers", "transformers")
    return Machine(
        system=f"{host.system()} {host.machine()}",
        python=".".join(str(part) for part in sys.version_info[:3]),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=_cudnn(),
        packages={name: _installed(name) for name in packages},
        cpu=_cpu_name(),
        isa=isa(),
        cores=cores(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0,
        gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())),
    )


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cudnn() -> Version | None:
    if not torch.backends.cudnn.is_available():
        return None
    number = torch.backends.cudnn.version() or 0
    # 9.10.2 is 91002 and 8.9.7 is 8907: the major version took one digit more with 9.
    major = 10000 if number >= 90000 else 1000
    return (number // major, number % major // 100, number % 100)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return host.processor() or host.machine()


def isa() -> tuple[str, ...]:
    """The vector instruction set torch uses on this CPU, and its 16-bit extensions; never initialises CUDA."""
    best = torch.backends.cpu.get_cpu_capability()
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    extras = {"bf16": has.get("avx512_bf16"), "fp16": has.get("avx512_fp16"), "AMX": has.get("amx_tile")}
    names = {"AVX512": "AVX-512", "DEFAULT": "no vector extension"}
    return (names.get(best, best), *(name for name, there in extras.items() if there))


def _gpu(index: int) -> Gpu:
    facts = torch.cuda.get_device_properties(index)
    shared = getattr(facts, "shared_memory_per_block_optin", 0)
    return Gpu(index, facts.name, (facts.major, facts.minor), facts.total_memory, facts.multi_processor_count, shared)
