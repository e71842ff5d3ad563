"""Checks of values that the compiler or vmap does not show: they raise when the call runs."""

from __future__ import annotations

import torch
from torch import Tensor

_mapped = torch._C._functorch.is_batchedtensor


def unseen(*tensors: Tensor) -> bool:
    """Whether the compiler or vmap shows no values to look at."""
    return torch.compiler.is_compiling() or any(map(_mapped, tensors))


def insist(ok: Tensor, message: str) -> None:
    """Raise unless ok [], for every row of vmap: ValueError, RuntimeError when a compiled call runs.

    On a GPU, which is not waited for, nothing is asked; nor of a vmap inside what is compiled, which traces no such
    check.
    """
    if ok.device.type != "cpu":
        return
    if torch.compiler.is_compiling():
        if not _mapped(ok):
            torch._assert_async(ok, message)
        return
    while _mapped(ok):
        ok = torch._C._functorch.get_unwrapped(ok)
    if not ok.all():
        raise ValueError(message)
