"""Checks of tensor values that are not readable under torch.compile or vmap: they raise when the call runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor  # whether vmap batches it


def unreadable(*tensors: Tensor) -> bool:
    """Whether values cannot be read, under torch.compile or vmap."""
    return torch.compiler.is_compiling() or any(map(is_batched, tensors))


def raise_unless(ok: Tensor, message: str) -> None:
    """Raise unless `ok` [] holds (for every element of a vmap): ValueError, or RuntimeError when a compiled call runs.

    No check on a GPU, which would synchronise, nor for a vmap inside a compiled function, which cannot trace it.
    """
    if ok.device.type != "cpu":
        return
    if torch.compiler.is_compiling():
        if not is_batched(ok):
            torch._assert_async(ok, message)
        return
    while torch._C._functorch.is_functorch_wrapped_tensor(ok):
        ok = torch._C._functorch.get_unwrapped(ok)
    if not ok.all():
        raise ValueError(message)


def check_ends(
    q_offsets: Tensor | None, kv_offsets: Tensor | None, kv_lengths: Tensor | None, q_lengths: Tensor | None,
    T: int, S: int,
) -> None:  # fmt: skip
    """Insist that a mask's documents and rows end within T queries and S keys."""
    sides = (
        ("q_offsets", q_offsets, "q_lengths", q_lengths, T),
        ("kv_offsets", kv_offsets, "kv_lengths", kv_lengths, S),
    )
    for name, offsets, which, lengths, size in sides:
        if offsets is not None:
            ok = (offsets[0] == 0) & (offsets.diff() >= 0).all() & (offsets[-1] <= size)
            raise_unless(ok, f"Packed: {name} must start at 0, never decrease and end at {size} or before")
        if lengths is not None:
            ok = ((lengths >= 0) & (lengths <= (size if offsets is None else offsets.diff()))).all()
            raise_unless(ok, f"Lengths: {which} must each be 0 to the tokens of its row")
