"""Which of the assemblers that Triton brings makes a kernel's machine code for Hopper: the newest.

Triton gives all before Blackwell to its ptxas 12.8 (from 3.8 on 12.9), and Blackwell to a newer one. On Hopper the old
one makes wrong code of some chains of products by warpgroups, from PTX that others assemble well: on an H200 the delta
rule's backward had gradients wrong by 0.8 of their size, or read where nothing is, at 3 of 16 block sizes (Triton 3.6;
triton#11366, triton#11781, fla#984). Both assemblers take the same PTX, so no kernel has to change. What Triton keeps
on disk is found by the assembler's version among other things: what another one made of a kernel is not taken.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

HOPPER = 90
NAMED = "TRITON_PTXAS_PATH"  # by which a user chooses one; it is left alone


class _Choice:
    """The choice is the process's, and several threads may compile: the first makes it, the last takes it back."""

    def __init__(self) -> None:
        self.lock, self.inside, self.undo = threading.Lock(), 0, ExitStack()

    def enter(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside > 1 or (tool := chosen(HOPPER)) is None:
                return
            nvidia = sys.modules["triton"].knobs.nvidia
            self.undo.callback(_forget)
            self.undo.enter_context(nvidia.scope())
            nvidia.ptxas = tool.path
            _forget()

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.undo.close()


_CHOICE = _Choice()


@contextmanager
def assembling(arch: int) -> Iterator[None]:
    """Within it Triton assembles for this architecture as said above; what was chosen before comes back after it."""
    if arch != HOPPER:
        yield
        return
    _CHOICE.enter()
    try:
        yield
    finally:
        _CHOICE.leave()


def persistent(ask: Callable[[], Any]) -> Any:
    """What `ask` gives, which compiles a kernel: again where passes of Triton's failed that do not the next time.

    For sm_100 its TritonGPUHoistTMEMAlloc goes by the order of addresses, and fails in one compilation of 16 of the
    delta rule's near_side_kernel of far rows (Triton 3.7.1, 2026-11-26).
    """
    for _ in range(3):
        try:
            return ask()
        except RuntimeError as error:
            if "PassManager::run failed" not in str(error):
                raise
    return ask()


def _forget() -> None:
    """Let Triton ask for the assembler's version again, which it does once a process and finds kernels on disk by.

    Else, after anyone's kernel by Triton's own choice, ours that the old assembler once made would be found and taken.
    """
    compiler = sys.modules.get("triton.backends.nvidia.compiler")
    forget = getattr(getattr(compiler, "get_ptxas_version", None), "cache_clear", None)
    if forget is not None:
        forget()


def chosen(arch: int) -> Any:
    """The assembler (`path`, `version`) that takes the place of Triton's choice; None where Triton's stays."""
    nvidia = getattr(getattr(sys.modules.get("triton"), "knobs", None), "nvidia", None)
    if arch != HOPPER or nvidia is None or NAMED in os.environ:
        return None
    tools = [tool for name in ("ptxas", "ptxas_blackwell") if (tool := getattr(nvidia, name, None)) is not None]
    return max(tools, key=_version, default=None)


def told() -> str:
    """Which assembler Hopper's kernels get, in words."""
    if NAMED in os.environ:
        return f"{os.environ[NAMED]}, as {NAMED} says"
    tool = chosen(HOPPER)
    return "Triton's own choice" if tool is None else f"ptxas {tool.version}, the newest that Triton brings"


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in tool.version.split("."))
