"""The kernels of a call that is the first of its kind, compiled side by side before it runs.

While it runs they would be one after another, each when it is launched: seconds, where the longest takes one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.core.assembler import assembling
from foci.core.device import cores
from foci.core.tune import Launch, Target, heard, recording, target_of

_MOST = 4096  # kinds that are remembered
_SEEN: set[Any] = set()


def compiled_ahead(compute: Callable[..., Any], call: Any, *rest: Any) -> str:
    """Compile what `compute(call, *rest)` is going to launch, in threads, which Triton's compiler leaves to themselves.

    It is asked on meta tensors what that is: nothing is allocated or launched. What is compiled lies in Triton's cache
    on disk, where the call finds it; nothing else of Triton's is touched. Calls that differ in rows and tokens alone
    are not asked again. Gives what went wrong, "" if nothing did: the call meets it again, where it is awaited.
    """
    kind = compute, _kind(call), _kind(rest)
    if kind in _SEEN or cores() < 2 or not _possible():
        return ""
    if len(_SEEN) >= _MOST:
        _SEEN.clear()
    _SEEN.add(kind)
    target = target_of(call[0].device)
    try:
        with recording(target) as launches:
            compute(shadow(call), *map(shadow, rest))
        wanted = [] if len(launches) < 2 else _wanted(launches)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return _side_by_side(wanted, target) if len(wanted) > 1 else ""


def _possible() -> bool:
    """Whether Triton can be asked what it would compile, keeps it on disk, and tells nobody of it."""
    triton: Any = sys.modules.get("triton")
    if not hasattr(triton, "AsyncCompileMode"):
        return False
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    return not heard(runtime.jit_cache_hook, runtime.jit_post_compile_hook) and not compilation.always_compile


class _Asked(Exception):
    """In place of a compilation."""


def _wanted(launches: list[Launch]) -> list[Callable[[], Any]]:
    """What compiles each kernel that Triton does not have in memory, by its own door to compilers of another kind.

    The last launch first: walks come before what is made of them, which takes longest to compile. Begun last, it would
    be waited for alone.
    """

    class Asking(sys.modules["triton"].AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: Any, compile_fn: Any, finalize_fn: Any) -> Any:
            found.setdefault(key, compile_fn)
            raise _Asked  # before Triton notes that it is being compiled

    found: dict[Any, Callable[[], Any]] = {}
    for kernel, grid, arguments, meta in launches:
        if not kernel.pre_run_hooks:
            try:
                with Asking(None):
                    kernel.warmup(*arguments, grid=grid, **meta)
            except _Asked:
                continue
    return [*reversed(found.values())]


class _NotYet:
    """What a kernel is compiled to, before it is: nothing of it is known."""

    def __getattr__(self, name: str) -> None:
        return None


def _source(compile_fn: Callable[[], Any]) -> Any:
    """What is compiled, where Triton's function has it by that name and a launcher is made of it alone; else None.

    What a launcher does with maps for TMA the compiled kernel says.
    """
    try:
        source = inspect.getclosurevars(compile_fn).nonlocals.get("src")
    except (TypeError, ValueError):
        return None
    kinds = getattr(source, "signature", {}).values()
    return None if any(isinstance(kind, str) and kind.startswith("tensordesc") for kind in kinds) else source


def _side_by_side(wanted: list[Callable[[], Any]], target: Target) -> str:
    """What fails is compiled again when it is launched, and fails there. Each thread chooses its assembler, and keeps
    it to its end, also where who waits here is interrupted. Launchers, which Triton 3.6 has a compiler of C make,
    0.2 s and more each, are made here too, and found on disk like kernels. They are made of what is compiled alone, so
    by threads that no kernel is left for; what was not begun or failed there, behind its kernel.
    """
    from concurrent.futures import Future, ThreadPoolExecutor, wait

    driver = sys.modules["triton"].runtime.driver.active
    known = target.kind == "cuda"  # AMD's launchers are made of the compiled kernel too
    sources = {place: source for place, each in enumerate(wanted) if known and (source := _source(each)) is not None}
    beside: dict[int, Future[Any]] = {}

    def work(place: int) -> None:
        with assembling(target.arch):
            made = wanted[place]()
        launcher = beside.get(place)
        if launcher is None or launcher.cancel() or launcher.exception() is not None:
            driver.launcher_cls(made.src, made.metadata)

    pool = ThreadPoolExecutor(min(cores(), len(wanted) + len(sources)))
    try:
        futures = [pool.submit(work, place) for place in range(len(wanted))]
        for place, source in sources.items():
            beside[place] = pool.submit(driver.launcher_cls, source, _NotYet())
        wait(futures)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    errors = [error for future in futures if (error := future.exception()) is not None]
    return "" if not errors else f"{type(errors[0]).__name__}: {errors[0]}"


def _kind(value: Any) -> Any:
    """What may decide about kernels: not how many rows and tokens there are, nor numbers, which kernels are given."""
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(value, Tensor):
        return value.dtype, value.shape[2:]
    return value if isinstance(value, bool | str | None) else type(value)


def shadow(value: Any) -> Any:
    """The value with tensors that hold nothing."""
    if isinstance(value, Tensor):
        ahead = value.data_ptr() % 16 // value.itemsize  # kernels are compiled for where tensors begin
        size = ahead + 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True) if n)
        return torch.empty(size, dtype=value.dtype, device="meta").as_strided(value.shape, value.stride(), ahead)
    if isinstance(value, tuple):
        parts = map(shadow, value)
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value
