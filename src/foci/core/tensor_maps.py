"""Maps for TMA that a kernel is told of in place of tensors, made again and again as Triton's launcher makes them.

That asks the driver for each map of each launch, in Python, some 2 us. Here a map is kept for where its tensor lies.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

_MOST = 64  # addresses of one argument for which a map is kept


def is_map(x: Any) -> bool:
    """Whether it is a TensorDescriptor of Triton's or Gluon's; nothing is imported for the question."""
    kind = x.__class__
    return kind.__name__ == "TensorDescriptor" and kind.__module__.startswith("triton.")


def tensor_of(x: Any) -> Any:
    """The tensor that a map reads; of what is no map, itself."""
    return x.base if is_map(x) else x


def beneath(launch: Any) -> tuple[Any, Sequence[Any]]:
    """The launcher in C that Triton's calls with maps it has made, and how each is made.

    Held against the source of Triton's on NVIDIA; (None, ()) where it is another, or maps are not for TMA.
    """
    if getattr(launch, "__qualname__", "") != "wrap_handle_tensordesc.<locals>.inner":
        return None, ()
    held = dict(zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__), strict=True))
    ways = held.get("tensordesc_meta") or [None]
    return (held["launcher"], ways) if None not in ways and callable(held.get("launcher")) else (None, ())


def makers(launch: Any, arguments: Sequence[Any]) -> list[Callable[[int], Any]]:
    """Of each map among the arguments what makes one like it of an address; none where `launch` is not known."""
    found, (_, ways) = [x for x in arguments if is_map(x)], beneath(launch)
    return [_maker(x, way) for x, way in zip(found, ways, strict=True)] if len(ways) == len(found) else []


def _maker(x: Any, way: Any) -> Callable[[int], Any]:
    make = sys.modules["triton.backends.nvidia.driver"].make_tensordesc_arg
    like = {name: value for name, value in vars(x).items() if name != "base"}  # no tensor is kept

    @functools.lru_cache(_MOST)
    def made(address: int) -> Any:
        return make(SimpleNamespace(base=SimpleNamespace(data_ptr=lambda: address), **like), way)[0]

    return made
