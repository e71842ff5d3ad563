"""Triton's interpreter with the same answers, and without most of the Python that it takes to give them.

More than half of the time of the kernels' tests went into three things: a reduction or a scan by a function of ours
went through a tensor number by number; every call of a device function searched Triton's language for what to replace,
which the launch had replaced already; and every value made a table of all dtypes to find its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests import front_end

DTYPE, PATCH = interpreter._get_np_dtype, interpreter._patch_lang
NUMBER_BY_NUMBER = interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan


def hasten() -> None:
    """From here on, in this process."""
    front_end.hasten()
    interpreter._get_np_dtype = Dtypes()
    interpreter._patch_lang = Patched()
    interpreter.ReduceOps.generic_reduce = reduced
    interpreter.ScanOps.generic_scan = scanned


class Dtypes(dict[str, Any]):
    """numpy's dtype of Triton's, each looked up once."""

    def __call__(self, dtype: Any) -> Any:
        found = self.get(dtype.name)
        if found is None:
            found = self[dtype.name] = DTYPE(dtype)
        return found


class Patched:
    """What a launch has replaced in the language, for itself and for all that it calls."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.languages: set[int] = set()
        self.seen: dict[int, tuple[int, set[int]]] = {}

    def __call__(self, fn: Callable[..., Any]) -> Patched:
        names = fn.__globals__
        size, wanted = self.seen.get(id(names), (0, set()))
        if size != len(names):
            wanted = {id(value) for value in names.values() if value is tl or value is tl.core}
            self.seen[id(names)] = len(names), wanted
        if not wanted or not wanted <= self.languages:
            self.scopes.append(PATCH(fn))
            self.languages |= wanted
        return self

    def restore(self) -> None:
        while self.scopes:
            self.scopes.pop().restore()
        self.languages.clear()
        front_end.forget()


def reduced(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """A reduction by any function, in the order in which the interpreter takes it, but all other axes at once."""
    parts, axis = self.unravel(given, self.axis)
    *_, last = come_to(self, parts, axis)
    if self.keep_dims:
        shape = [1 if self.axis in (None, place) else int(size) for place, size in enumerate(given[0].shape)]
        last = [data.reshape(shape) for data in last]
    return [self.to_tensor(data, part.dtype) for data, part in zip(last, parts, strict=True)]


def scanned(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """A scan by any function, likewise."""
    columns = zip(*come_to(self, given, self.axis), strict=True)
    return [
        self.to_tensor(np.stack(column, self.axis), part.dtype) for column, part in zip(columns, given, strict=True)
    ]


def come_to(self: Any, parts: tuple[Any, ...], axis: int) -> Iterator[list[Any]]:
    """What the first along an axis, the first two, the first three and so on come to.

    By a function that computes each number by itself: one that branches on a number, or makes others of two, fails.
    """
    columns = [np.moveaxis(part.handle.data, axis, 0) for part in parts]
    dtypes = [part.dtype for part in parts] * 2
    found: list[Any] = [column[0] for column in columns]
    yield found
    branch = tl.tensor.__bool__
    for at in range(1, len(columns[0])):
        operands = [*found, *(column[at] for column in columns)]
        tl.tensor.__bool__ = whole
        try:
            made = self.combine_fn.fn(*map(self.to_tensor, operands, dtypes))
        finally:
            tl.tensor.__bool__ = branch
        made = made if isinstance(made, tuple) else (made,)
        found = [fitted(x, old) for x, old in zip(made, found, strict=True)]
        yield found


def whole(value: Any) -> bool:
    """What a branch goes by: of one number that number, of more there is none."""
    assert value.handle.data.size == 1, "a branch on a number of many"
    return bool(value.handle.data)


def fitted(value: Any, old: Any) -> Any:
    """A column of what was made, in the shape and dtype of the one before."""
    data = np.asarray(value.handle.data if isinstance(value, tl.tensor) else value)
    assert data.size == 1 or data.shape == old.shape, (data.shape, old.shape)
    return np.broadcast_to(data.reshape(()) if data.size == 1 else data, old.shape).astype(old.dtype)
