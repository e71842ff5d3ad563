"""Compile kernels for Hopper with the oldest ptxas of Triton's that is right and that the driver loads.

Triton ships two. For Hopper 3.6 and 3.7 use the older, ptxas 12.8, which miscompiles some chains of warpgroup products
(wgmma) whose PTX 12.9 assembles correctly: on an H200 the delta rule's backward had gradients wrong by 0.8 of their
size, or illegal memory accesses, at 3 of 16 block sizes (Triton 3.6; triton#11366, triton#11781, fla#984). 3.9 uses the
newer, 13.4, which is right and spills more than its older one, 12.9 (docs/h200.md: By Triton 3.9). Kernels stay as they
are. Triton's disk cache is keyed by the ptxas version among other things, so binaries of another one are not reused.

Triton's setting is of the whole process: what other threads compile meanwhile is assembled so too, and a kernel whose
PTX was written before, for a newer ptxas, may be refused by this one.

A driver loads what a ptxas of its own major version of CUDA has made, or of one before: ptxas 13 marks its binaries as
of another ABI. Triton 3.7 ships 12.8 and 13.1, so with a driver of CUDA 12 it has none that is right: kernels are
refused then, with what to do (`refusal`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

from foci.core.device import constant

HOPPER = 90
RIGHT = (12, 9)  # the oldest ptxas that assembles foci's kernels as their PTX says, by all laws on an H200
WRONG = (13, 0)  # a newer one that does not: stores to wrong addresses of shared memory (fla#1262)
SETTINGS = {  # Triton's of a ptxas, and the environment variables by which a user chooses it, who takes precedence
    "ptxas": "TRITON_PTXAS_PATH",
    "ptxas_blackwell": "TRITON_PTXAS_BLACKWELL_PATH",
}


class _Choice:
    """Triton's setting is process-wide, and several threads may compile: the first sets it, the last restores it."""

    def __init__(self) -> None:
        self.lock, self.inside, self.undo = threading.Lock(), 0, ExitStack()

    def enter(self) -> None:
        with self.lock:
            if not self.inside and (tool := ptxas_for(HOPPER)) is not None:
                nvidia = sys.modules["triton"].knobs.nvidia
                self.undo.callback(_forget)
                self.undo.enter_context(nvidia.scope())
                setattr(nvidia, setting(), tool.path)
                _forget()
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.undo.close()


_CHOICE = _Choice()


@contextmanager
def assembling(arch: int) -> Iterator[None]:
    """Within it Triton compiles for this architecture with the `chosen` ptxas; afterwards its setting is restored."""
    if arch != HOPPER:
        yield
        return
    _CHOICE.enter()
    try:
        yield
    finally:
        _CHOICE.leave()


def retry_failed_passes(ask: Callable[[], Any]) -> Any:
    """`ask()`, which compiles a kernel, retried up to three times where one of Triton's passes failed, or Python's.

    Python 3.11 counts how deep a syntax tree is for all threads at once, and refuses one that others have added to. For
    sm_100 Triton's TritonGPUHoistTMEMAlloc depends on the order of addresses in memory, and fails in one compilation of
    16 of the delta rule's near_side_kernel of far rows (Triton 3.7.1, 2026-11-26).
    """
    for _ in range(3):
        try:
            return ask()
        except (RuntimeError, SystemError) as error:
            if not any(words in str(error) for words in ("PassManager::run failed", "recursion depth mismatch")):
                raise
    return ask()


def _forget() -> None:
    """Clear Triton's cache of the ptxas version, part of its disk cache's key, which it asks for once per process.

    Otherwise, once any kernel had been compiled with Triton's own choice, binaries of the old ptxas would be reused.
    """
    compiler = sys.modules.get("triton.backends.nvidia.compiler")
    forget = getattr(getattr(compiler, "get_ptxas_version", None), "cache_clear", None)
    if forget is not None:
        forget()


def ptxas_for(arch: int) -> Any:
    """The ptxas (`path`, `version`) to use instead of Triton's choice; None to keep Triton's."""
    if arch != HOPPER or "triton" not in sys.modules or SETTINGS[setting()] in os.environ:
        return None
    tools = [tool for name in SETTINGS if (tool := _tool(name)) is not None and _loads(tool)]
    return min(filter(_right, tools), key=_version, default=next(iter(tools), None))


@functools.cache
def setting() -> str:
    """Which of its settings Triton assembles Hopper's kernels by: Blackwell's since 3.9, until then all others'.

    Its own function says so, run on settings that are their own names: what they are set to does not matter then.
    """
    choose = getattr(sys.modules.get("triton.backends.nvidia.compiler"), "get_ptxas", None)
    names = SimpleNamespace(nvidia=SimpleNamespace(**{name: name for name in SETTINGS}))
    chosen = None if choose is None else FunctionType(choose.__code__, {"knobs": names})(HOPPER)
    return chosen if chosen in SETTINGS else "ptxas"


@constant
def refusal() -> str | None:
    """Why no kernel for Hopper would be assembled as its PTX says; None if all would, or Triton is not imported."""
    return _refusal(os.environ.get(SETTINGS[setting()])) if "triton" in sys.modules else None


@functools.cache
def _refusal(named: str | None) -> str | None:
    tool, driver = ptxas_for(HOPPER) or _tool(setting()), _driver()
    if tool is not None and _right(tool) and _loads(tool):
        return None
    what = "no ptxas" if tool is None else f"ptxas {tool.version}"
    right = "{}.{} or newer but {}.{}".format(*RIGHT, *WRONG)
    name = SETTINGS[setting()]
    there = f"Triton brings {what}" if named is None else f"{name} names {what}"
    if named is not None and not _is(tool, named):
        there = f"{name} names none that runs, {named}; Triton brings {what}"
    if driver is not None:
        right += f", of CUDA {driver} at most, as the driver is"
    return (
        f"{there}, and Hopper needs {right}: others miscompile its kernels (triton#11366, fla#1262); name one by "
        f"{name}, as that of the package nvidia-cuda-nvcc-cu12"
    )


def describe_ptxas() -> str:
    """Which ptxas Hopper's kernels are compiled with, in words."""
    if (reason := refusal()) is not None:
        return f"none: {reason}"
    name = SETTINGS[setting()] if "triton" in sys.modules else ""
    if (named := os.environ.get(name)) is not None:
        tool = _tool(setting())
        return f"{named}, as {name} says" if _is(tool, named) else f"ptxas {tool.version}: {name} names none that runs"
    tool = ptxas_for(HOPPER)
    return "Triton's own choice" if tool is None else f"ptxas {tool.version}, the oldest right one that Triton has"


def _is(tool: Any, named: str) -> bool:
    """Whether Triton takes what is named; where that does not run it takes its own, without a word."""
    return tool is None or tool.path == named


def _tool(name: str) -> Any:
    """A ptxas of Triton's by its setting's name; None where a distribution of Triton has left it out."""
    nvidia = getattr(getattr(sys.modules.get("triton"), "knobs", None), "nvidia", None)
    try:
        return getattr(nvidia, name, None)
    except RuntimeError:  # Triton's words: Cannot find ptxas-blackwell
        return None


def _right(tool: Any) -> bool:
    return _version(tool) >= RIGHT and _version(tool)[:2] != WRONG


def _loads(tool: Any) -> bool:
    """Whether the driver, if there is one, loads what this ptxas makes."""
    driver = _driver()
    return driver is None or _version(tool)[0] <= driver


@functools.cache
def _driver() -> int | None:
    """The major version of CUDA that NVIDIA's driver has; None without one."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in tool.version.split("."))
