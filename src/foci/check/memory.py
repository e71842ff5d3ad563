"""State that a result must not depend on or change: uninitialised memory, strides, global settings of torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

UNWRITTEN = "the result depends on memory that nobody wrote: right on a fresh process, wrong on a busy one"
STRIDES = "the result depends on the strides of its inputs: a view of a fused projection would give other numbers"
BACKWARD_STRIDES = (
    "the gradient depends on the strides of an input or of the output's gradient: out.sum().backward() hands in a view"
)
EXPANDED = "the gradient is another where the output's is a view of one number, as out.sum().backward() hands in"
DEFAULT = (
    "the result depends on the program's default dtype (torch.set_default_dtype): memory is not of the size that is "
    "written to it"
)
EXCLUDED = "NaN in keys or values that the mask excludes reaches the result: a cache holds uninitialised memory there"


# Global settings of torch, by description: getter, setter, and the default value.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled, True),
    "how deterministic algorithms are": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
}


@contextmanager
def default_settings() -> Iterator[list[str]]:
    """Within it SETTINGS have their defaults; then they are restored, and the list has a sentence for each changed."""
    before = {name: read() for name, (read, _, _) in SETTINGS.items()}
    changes: list[str] = []
    try:
        for _, write, value in SETTINGS.values():
            write(value)
        yield changes
        for name, (read, _, value) in SETTINGS.items():
            if (now := read()) != value:
                changes.append(f"it changes {name} from {value} to {now} and leaves it so, for the whole program")
    finally:
        for name, (_, write, _) in SETTINGS.items():
            write(before[name])


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it torch.empty and its kin are filled with NaN (largest integer); then the settings are restored."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = torch.utils.deterministic
    fill = switch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    switch.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        switch.fill_uninitialized_memory = fill


@contextmanager
def another_default() -> Iterator[None]:
    """Within it the default dtype is another: float64, or float32 where it was float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if before == torch.float64 else torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def strided(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs as views of every other element of a buffer full of NaN."""
    return {name: _spread(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def turned(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs as views whose last dimension lies as ever and the two before it the other way round."""

    def turn(value: Any) -> Any:
        large = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2
        return value.transpose(-3, -2).contiguous().transpose(-3, -2) if large else value

    return {name: turn(value) for name, value in inputs.items()}


def _spread(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return tensor
    buffer = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan)
    view = buffer[..., ::2]
    view.copy_(tensor)
    return view
