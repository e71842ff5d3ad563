"""The kernels of a call that is the first of its kind, compiled side by side before it runs.

While it runs they would be one after another, each when it is launched: seconds, where the longest takes one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.core.assembler import assembling
from foci.core.tune import Launch, Target, recording, target_of

_MOST = 4096  # kinds that are remembered
_SEEN: set[Any] = set()


def compiled_ahead(compute: Callable[..., Any], call: Any, *rest: Any) -> str:
    """Compile what `compute(call, *rest)` is going to launch, in threads, which Triton's compiler leaves to themselves.

    It is asked on meta tensors what that is: nothing is allocated or launched. Kernels that are there already take no
    time, and calls that differ in rows and tokens alone are not asked again. Gives what went wrong, "" if nothing did:
    the call meets it again, where it is awaited.
    """
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    kind = compute, _kind(call), _kind(rest)
    if not hasattr(sys.modules.get("triton"), "AsyncCompileMode") or workers < 2 or kind in _SEEN:
        return ""
    if len(_SEEN) >= _MOST:
        _SEEN.clear()
    _SEEN.add(kind)
    target = target_of(call[0].device)
    try:
        with recording(target) as launches:
            compute(_meta(call), *map(_meta, rest))
        if len(launches) > 1:
            _compile(launches, target, min(workers, len(launches)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _compile(launches: list[Launch], target: Target, workers: int) -> None:
    """A kernel that fails is compiled again when it is launched, and fails there."""
    from concurrent.futures import ThreadPoolExecutor

    pool, side_by_side = ThreadPoolExecutor(workers), sys.modules["triton"].AsyncCompileMode
    with pool, assembling(target.arch), side_by_side(pool, ignore_errors=True):
        for kernel, grid, arguments, meta in launches:
            if not kernel.pre_run_hooks:
                kernel.warmup(*arguments, grid=grid, **meta)


def _kind(value: Any) -> Any:
    """What may decide about kernels: not how many rows and tokens there are, nor numbers, which kernels are given."""
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(value, Tensor):
        return value.dtype, value.shape[2:]
    return value if isinstance(value, bool | str | None) else type(value)


def _meta(value: Any) -> Any:
    """The value with tensors that hold nothing."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        parts = map(_meta, value)
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value
