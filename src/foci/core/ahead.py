"""Compile the kernels of a call in parallel before its first run.

The run itself would compile them one after another, each at its launch: seconds, where the slowest kernel takes one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.core.assembler import assembling, retry_failed_passes
from foci.core.device import cores
from foci.core.tune import Launch, Target, any_hook_set, record_launches, target_of

_MOST = 4096  # keys that are remembered
_SEEN: set[Any] = set()


def compile_ahead(compute: Callable[..., Any], call: Any, *rest: Any) -> str:
    """Compile what `compute(call, *rest)` will launch, in threads: Triton's compiler releases the GIL.

    A dry run on meta tensors records the launches: nothing is allocated or launched. The kernels go to Triton's cache
    on disk, where the call finds them; no other state of Triton changes. Calls that differ only in batch and sequence
    length are not repeated. Returns an error message, or "": the call meets the error again, where it is handled.
    """
    key = compute, _cache_key(call), _cache_key(rest)
    if key in _SEEN or cores() < 2 or not _possible():
        return ""
    if len(_SEEN) >= _MOST:
        _SEEN.clear()
    _SEEN.add(key)
    target = target_of(call[0].device)
    try:
        with record_launches(target) as launches:
            compute(to_meta(call), *map(to_meta, rest))
        wanted = [] if len(launches) < 2 else _compilations(launches)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return _compile_all(wanted, target) if len(wanted) > 1 else ""


def _possible() -> bool:
    """Whether this Triton has AsyncCompileMode, caches kernels on disk, and has no compilation hooks installed."""
    triton: Any = sys.modules.get("triton")
    if not hasattr(triton, "AsyncCompileMode"):
        return False
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    return not any_hook_set(runtime.jit_cache_hook, runtime.jit_post_compile_hook) and not compilation.always_compile


class _Intercepted(Exception):
    """Raised in place of a compilation."""


def _compilations(launches: list[Launch]) -> list[Callable[[], Any]]:
    """Of each kernel that Triton has not loaded yet, the function that compiles it, intercepted by an AsyncCompileMode.

    The last launch comes first: it is the kernel that takes longest to compile, and started last it would run alone.
    """

    class Asking(sys.modules["triton"].AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: Any, compile_fn: Any, *_: Any) -> Any:
            found.setdefault(key, compile_fn)
            raise _Intercepted  # before Triton notes that it is being compiled

    found: dict[Any, Callable[[], Any]] = {}
    for launch in launches:
        if not launch.kernel.pre_run_hooks:
            try:
                with Asking(None):
                    launch.compiled()
            except _Intercepted:
                continue
    return [*reversed(found.values())]


class _NoMetadata:
    """Stands in for the metadata of a kernel that is not compiled yet: every attribute is None."""

    def __getattr__(self, name: str) -> None:
        return None


def _source(compile_fn: Callable[[], Any]) -> Any:
    """The source (ASTSource) that Triton's closure compiles, if a launcher can be built from it alone; else None.

    With TMA descriptors a launcher also needs the compiled kernel's metadata.
    """
    try:
        source = inspect.getclosurevars(compile_fn).nonlocals.get("src")
    except (TypeError, ValueError):
        return None
    kinds = getattr(source, "signature", {}).values()
    return None if any(isinstance(kind, str) and kind.startswith("tensordesc") for kind in kinds) else source


def _compile_all(compilations: list[Callable[[], Any]], target: Target) -> str:
    """Compile kernels and their launchers in a thread pool; returns the first error's message, or "".

    A kernel that fails here is compiled again when it is launched, and fails there. Each thread enters `assembling`
    itself, so its choice of assembler holds to its end even if the waiting thread is interrupted. Launchers, C code
    that Triton 3.6 compiles in 0.2 s or more each, are cached on disk too. They need only the kernel's source, so they
    go to threads left over by kernels; one that was not started or failed there is built after its kernel.
    """
    from concurrent.futures import Future, ThreadPoolExecutor, wait

    driver = sys.modules["triton"].runtime.driver.active
    by_source = target.kind == "cuda"  # AMD's launchers also need the compiled kernel
    sources = {
        place: source for place, each in enumerate(compilations) if by_source and (source := _source(each)) is not None
    }
    launchers: dict[int, Future[Any]] = {}

    def work(place: int) -> None:
        with assembling(target.arch):
            made = retry_failed_passes(compilations[place])
        launcher = launchers.get(place)
        if launcher is None or launcher.cancel() or launcher.exception() is not None:
            driver.launcher_cls(made.src, made.metadata)

    pool = ThreadPoolExecutor(min(cores(), len(compilations) + len(sources)))
    try:
        futures = [pool.submit(work, place) for place in range(len(compilations))]
        for place, source in sources.items():
            launchers[place] = pool.submit(driver.launcher_cls, source, _NoMetadata())
        wait(futures)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    errors = [error for future in futures if (error := future.exception()) is not None]
    return "" if not errors else f"{type(errors[0]).__name__}: {errors[0]}"


def _cache_key(value: Any) -> Any:
    """What decides which kernels a call needs: not batch and sequence length, nor numbers (run-time arguments)."""
    if isinstance(value, tuple | list):
        return tuple(map(_cache_key, value))
    if isinstance(value, Tensor):
        return value.dtype, value.shape[2:]
    return value if isinstance(value, bool | str | None) else type(value)


def to_meta(value: Any) -> Any:
    """The value with its tensors replaced by meta tensors of the same strides and alignment."""
    if isinstance(value, Tensor):
        ahead = value.data_ptr() % 16 // value.itemsize  # Triton specializes on the alignment of pointers
        size = ahead + 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True) if n)
        return torch.empty(size, dtype=value.dtype, device="meta").as_strided(value.shape, value.stride(), ahead)
    if isinstance(value, tuple):
        parts = map(to_meta, value)
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value
