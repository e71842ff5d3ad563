"""TMA descriptors (tensor maps) as kernel arguments: a cache of those that Triton's launcher would encode every time.

Triton asks the driver, from Python, for each descriptor of each launch: some 2 us. Here they are cached by address.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

_MOST = 64  # cached descriptors of one argument, by address


def is_map(x: Any) -> bool:
    """Whether it is a TensorDescriptor of Triton or Gluon; found by name, so that nothing is imported."""
    kind = x.__class__
    return kind.__name__ == "TensorDescriptor" and kind.__module__.startswith("triton.")


def tensor_of(x: Any) -> Any:
    """The tensor that a descriptor describes; anything else is returned as it is."""
    return x.base if is_map(x) else x


_WRAPPERS = {f"{name}.<locals>.inner" for name in ("wrap_handle_tensordesc", "wrap_handle_tensordesc_impl")}  # 3.8


def c_launcher(launch: Any) -> tuple[Any, Sequence[Any]]:
    """The C launcher beneath Triton's Python wrapper for tensor descriptors, and the metadata that encodes each.

    Verified against the source of Triton's NVIDIA driver; (None, ()) for any other, or where descriptors are not TMA.
    """
    if getattr(launch, "__qualname__", "") not in _WRAPPERS:
        return None, ()
    closure = dict(zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__), strict=True))
    if closure.get("make_tensordesc_arg", _encode()) is not _encode():
        return None, ()
    metadata = closure.get("tensordesc_meta") or [None]
    return (closure["launcher"], metadata) if None not in metadata and callable(closure.get("launcher")) else (None, ())


def makers(launch: Any, arguments: Sequence[Any]) -> list[Callable[[int], Any]]:
    """For each descriptor among the arguments, a function from an address to one like it; [] if `launch` is unknown."""
    found, (_, metadata) = [x for x in arguments if is_map(x)], c_launcher(launch)
    return [_maker(x, each) for x, each in zip(found, metadata, strict=True)] if len(metadata) == len(found) else []


def _encode() -> Any:
    """Triton's function that asks NVIDIA's driver for a tensor map; None without that backend."""
    return getattr(sys.modules.get("triton.backends.nvidia.driver"), "make_tensordesc_arg", None)


def _maker(x: Any, metadata: Any) -> Callable[[int], Any]:
    make = _encode()
    rest = (None,) * (make.__code__.co_argcount - 2)  # since Triton 3.8 the launch's head, which NVIDIA's ignores
    like = {name: value for name, value in vars(x).items() if name != "base"}  # keep no reference to the tensor

    @functools.lru_cache(_MOST)
    def made(address: int) -> Any:
        return make(SimpleNamespace(base=SimpleNamespace(data_ptr=lambda: address), **like), metadata, *rest)[0]

    return made
