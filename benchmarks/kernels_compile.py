"""Compiles recorded launches of Triton kernels without a GPU, and reads from the result what they will cost."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kernels_races
import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars

from foci.cli_tune_ahead import Offline as _Offline
from foci.cli_tune_ahead import gpu
from foci.core.assembler import assembling, ptxas_for, retry_failed_passes
from foci.core.tensor_maps import is_map
from foci.core.tune import Launch, Target

FORMAT = 6  # of a record: what is read from a compiled kernel; a change makes every cached record unfit
# What Hopper's kernels are searched for races by: another search is asked of all of them.
SEARCH = hashlib.sha256(Path(kernels_races.__file__).read_bytes()).hexdigest()
LIMIT = 300.0  # seconds that one compilation may take
MATRIX = {
    "wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma", "mma": r"\bmma\.sync", "mfma": r"\bv_mfma_",
    "TMA": r"\bcp\.async\.bulk\.tensor", "cp.async": r"\bcp\.async\.c[ag]\.",
}  # fmt: skip
PRODUCTS = ("wgmma", "tcgen05", "mma", "mfma")
TENSOR_MEMORY = 512  # columns of a processor


def identity(launch: Launch, target: Target) -> str:
    """What a compiled kernel depends on: its source with all it calls, its arguments as Triton tells them apart.

    And the assembler, where it is not Triton's own choice.
    """
    arguments = [_told(value) for value in launch.arguments]
    meta = sorted((name, str(value)) for name, value in launch.meta.items())
    parts: tuple[object, ...] = (
        FORMAT, triton.__version__, str(gpu(target)), launch.kernel.cache_key, arguments, meta
    )  # fmt: skip
    if (tool := ptxas_for(target.arch)) is not None:
        parts += (tool.version,)
    if _searched(target):
        parts += (SEARCH,)
    # What a user has set for the compiler; where it is nothing, as nearly always, it is not told.
    ours = {name: value for name, value in os.environ.items() if name.startswith(("TRITON_PTXAS", "PTXAS_OPTIONS"))}
    if said := sorted((get_cache_invalidating_env_vars() | ours).items()):
        parts += (said,)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _searched(target: Target) -> bool:
    """For races: of Hopper, whose products alone go on behind what begins them and wait by no barrier."""
    return (target.kind, target.arch) == ("cuda", 90)


def meta_of(launch: Launch) -> dict[str, Any]:
    """Of a kernel's constants those that a table holds: numbers and words, no dtypes."""
    return {name: value for name, value in launch.meta.items() if isinstance(value, int | str | None)}


def _told(value: Any) -> str:
    """An argument as a launch specialises on it: dtype and alignment of a tensor, 1 and multiples of 16 of an int."""
    if isinstance(value, torch.Tensor):
        small = value.untyped_storage().size() < 2**31
        return f"{value.dtype} {value.data_ptr() % 16 == 0} {small}"
    if isinstance(value, tuple | list):
        return f"({', '.join(_told(part) for part in value)})"
    if is_map(value):
        return f"map {value.base.dtype} {value.block_shape}"
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{type(value).__name__} {value if value is None or isinstance(value, bool) else ''}"
    return f"int {value == 1} {value % 16 == 0} {-(2**31) <= value < 2**31}"


def compile_all(
    jobs: Iterable[tuple[Launch, Target]],
    cache: Path,
    *,
    known: Mapping[str, dict[str, Any]] | None = None,
    workers: int = 2,
    tell: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """The record of every job by its identity: `known` or in the cache, else compiled, each in a process of its own."""
    cache.mkdir(parents=True, exist_ok=True)
    wanted = {identity(launch, target): (launch, target) for launch, target in jobs}
    found = {key: record for key, record in (known or {}).items() if key in wanted}
    for key in wanted.keys() - found.keys():
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # a cut one is no record
            found[key] = json.loads((cache / f"{key}.json").read_text())
    left = [(key, *wanted[key]) for key in wanted if key not in found]
    for done, (key, record) in enumerate(_compile_each(left, workers), 1):
        found[key] = record
        # What the machine did (a limit of time, a kill) is asked again next time; what the compiler said is not.
        if "stopped" not in record:
            (cache / f"{key}.json").write_text(json.dumps(record))
        if tell and (done % 10 == 0 or done == len(left)):
            tell(f"{done} of {len(left)} compiled")
    return found


def _compile_each(jobs: list[tuple[str, Launch, Target]], workers: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """An architecture that LLVM does not know aborts the process, so each compilation has one: forked, for speed."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(jobs)), {}
    with tempfile.TemporaryDirectory(prefix="foci-kernels-") as folder:
        while waiting or running:
            while waiting and len(running) < workers:
                key, launch, target = waiting.pop()
                out = Path(folder) / key
                process = context.Process(target=_compile_into, args=(out, launch, target))
                process.start()
                running[key] = process, out, time.monotonic()
            multiprocessing.connection.wait([process.sentinel for process, *_ in running.values()], timeout=1.0)
            for key, (process, out, since) in list(running.items()):
                late = time.monotonic() - since > LIMIT
                if process.is_alive() and not late:
                    continue
                if late:
                    process.kill()
                process.join()
                del running[key]
                yield key, _record_of(out, process.exitcode, late)


def _record_of(out: Path, code: int | None, late: bool) -> dict[str, Any]:
    if late:
        return {"error": f"not compiled within {LIMIT:.0f} s", "stopped": True}
    if (record := out / "record.json").exists():
        found: dict[str, Any] = json.loads(record.read_text())
        return found
    said = (out / "stderr").read_text(errors="replace").strip() if (out / "stderr").exists() else ""
    cause = next((line for line in said.splitlines() if re.search(r"error|LLVM|assert", line, re.I)), said[-200:])
    verdict = f"the compiler died (exit code {code}): {cause[:300]}"
    return {"error": verdict, "stopped": True} if code in (-9, -15) else {"error": verdict}


def _compile_into(out: Path, launch: Launch, target: Target) -> None:
    """In the child: compile, and write what was found, or what went wrong, to the folder `out`."""
    out.mkdir()
    # LLVM writes to the file descriptors, not to sys.stderr.
    with (out / "stderr").open("w") as said:
        os.dup2(said.fileno(), 2)
        os.dup2(said.fileno(), 1)
    triton.knobs.cache.dir = str(out / "triton")
    try:
        record = _compiled(launch, target)
    except Exception as error:
        record = {"error": f"{type(error).__name__}: {_last_words(str(error))}"}
        # A full disk, or an assembler that was killed: the machine's doing too.
        if isinstance(error, OSError) or re.search(r"code -\d", str(error)):
            record["stopped"] = True
    (out / "record.tmp").write_text(json.dumps(record))
    (out / "record.tmp").rename(out / "record.json")


def _last_words(message: str) -> str:
    """The lines of an error that say most: CompilationError shows source first, the cause last."""
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    return "\n".join(lines if len(lines) <= 8 else [*lines[:4], "...", *lines[-4:]])[:1500]


def _compiled(launch: Launch, target: Target) -> dict[str, Any]:
    triton.runtime.driver.set_active(_Offline(gpu(target)))
    began = _processor()
    log = io.StringIO()
    if hasattr(triton.knobs.nvidia, "dump_ptxas_log"):
        triton.knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(log), assembling(target.arch):
        compiled = retry_failed_passes(launch.compiled)
    seconds = _processor() - began
    metadata, asm = compiled.metadata, compiled.asm
    read = _of_amd(asm["amdgcn"]) if target.kind == "hip" else _of_nvidia(asm, log.getvalue(), target)
    text = asm["amdgcn"] if target.kind == "hip" else asm["ptx"]
    instructions = {name: len(re.findall(pattern, text)) for name, pattern in MATRIX.items()}
    raced = kernels_races.races(asm["ttgir"]) if _searched(target) else []
    return {
        **read,
        **({"races": raced} if raced else {}),
        "shared": metadata.shared,
        "tensor": getattr(metadata, "tmem_size", None) or 0,
        "warps": metadata.num_warps,
        "instructions": {name: count for name, count in instructions.items() if count},
        "dots": _dots(asm["ttir"]) if "ttir" in asm else 0,
        "seconds": round(seconds, 2),
    }


def _processor() -> float:
    """Seconds of this process and of those it waited for: what others do on the machine is not in them."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _dots(ttir: str) -> int:
    """Products of tiles that matrix instructions should do: all but full float32 ones on NVIDIA, which none can."""
    dots = [line for line in ttir.splitlines() if "tt.dot" in line]
    return sum("xf32>" not in line.split("->")[0].split(" : ")[-1] or "inputPrecision = tf32" in line for line in dots)


def _of_nvidia(asm: Any, log: str, target: Target) -> dict[str, int]:
    """Registers a thread, bytes that it spills and keeps in local memory, and whether each product of a warpgroup waits
    for the one before it, as ptxas says."""
    if "Used" not in log:
        log = _ptxas(asm["ptx"], target)
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.search(r"Used (\d+) registers", log)
    if not used:
        raise RuntimeError(f"ptxas did not say how many registers it used: {log[-300:]}")
    stack, stores, loads = (int(number) for number in spilled.groups()) if spilled else (0, 0, 0)
    found = {"registers": int(used[1]), "spills": max(stores, loads), "stack": stack}
    return found | {"serial": True} if "wgmma.mma_async instructions are serialized" in log else found


def _ptxas(ptx: str, target: Target) -> str:
    """What the assembler says of a kernel, for a Triton that does not pass it on."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    name = "ptxas-blackwell" if target.arch >= 100 and (tools / "ptxas-blackwell").exists() else "ptxas"
    tool = ptxas_for(target.arch)
    path = str(tools / name) if tool is None else tool.path
    suffix = "a" if target.arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [path, "-v", f"--gpu-name=sm_{target.arch}{suffix}", str(source), "-o", f"{source}.o"]
        if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
            command.insert(2, "--regAllocOptLevel=2")
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def _of_amd(assembly: str) -> dict[str, int]:
    """The same of an AMD kernel, whose assembly ends with them; scratch memory is what it spills to, among others."""

    def last(name: str) -> int:
        numbers = re.findall(rf"\.{name}:\s+(\d+)", assembly)
        return int(numbers[-1]) if numbers else 0

    return {
        "registers": last("vgpr_count"),
        "spills": 4 * last("vgpr_spill_count"),
        "stack": last("private_segment_fixed_size"),
    }


def faults(record: dict[str, Any], target: Target) -> list[str]:
    """What no GPU of this target could run, or not as it was meant; a spill is judged by who knows the kernel."""
    if "error" in record:
        return [record["error"]]
    found: list[str] = list(record.get("races", []))
    if record["shared"] > target.shared:
        found.append(f"{record['shared']} bytes of shared memory, the target has {target.shared}")
    if record["tensor"] > TENSOR_MEMORY:
        found.append(f"{record['tensor']} columns of tensor memory, there are {TENSOR_MEMORY}")
    if record["dots"] and not any(record["instructions"].get(name) for name in PRODUCTS):
        found.append("it multiplies tiles and has no matrix instruction: an oversized kernel compiles to an empty one")
    return found


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
