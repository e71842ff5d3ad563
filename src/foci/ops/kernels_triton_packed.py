"""Memory for what packed documents give: tokens before the first and behind the last are in none, and 0 in all of it.

Which those are only the GPU knows. Zeros everywhere, nearly all of which are written over, took a tenth of the time of
Gated DeltaNet's forward. A launch of its own takes 1 us, and what the host takes. So programs behind those of a kernel
that is launched anyway write these zeros, where one has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, launch
from foci.tiles.rest import PROGRAMS, clear_rest

MOST = 6  # tensors of a launch


@triton.jit
def rest_kernel(a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, widths, offsets_ptr, N, T):  # type: ignore[no-untyped-def]
    """`clear_rest`, where no other launch has programs for it."""
    clear_rest(a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, widths, offsets_ptr, tl.program_id(0), N, T)


class Rest:
    """What is still to be cleared of what a call has of each token: behind another launch, or by one of its own."""

    def __init__(self, call: Any, found: Sequence[Tensor | None]) -> None:
        T, self.offsets = call.sizes[1], call.offsets
        rows = [x for x in found if x is not None and x.dim() > 2 and x.shape[:2] == (1, T)]
        self.left, self.T = rows if self.offsets is not None else [], T

    def taken(self) -> tuple[int, tuple[Any, ...]]:
        """(how many programs more, what `clear_rest` takes: tensors and widths, all None where nothing is left)."""
        some, self.left = self.left[:MOST], self.left[MOST:]
        none = (None,) * (MOST - len(some))
        widths = (*(x.numel() // self.T for x in some), *(0 for _ in none)) if some else None
        return PROGRAMS.value if some else 0, (*some, *none, widths)

    def end(self) -> None:
        """What nothing has taken."""
        while self.left:
            programs, given = self.taken()
            launch(
                rest_kernel, (programs,), *given, self.offsets, self.offsets.shape[0] - 1, self.T, config=Config()
            )  # fmt: skip


def room(call: Any, like: Tensor) -> tuple[Tensor, Rest]:
    """Memory for an output of a call, contiguous, with the shape, dtype and device of `like`; and its Rest."""
    found = _empty(like)
    return found, Rest(call, [found])


def rooms(
    call: Any, likes: Iterable[Tensor | None], needs: Iterable[bool]
) -> tuple[tuple[Tensor | None, ...], Rest]:  # fmt: skip
    """Memory for gradients of a call, as `room` has it: of what there is and is needed."""
    found, of_tokens = [], []
    for like, need in zip(likes, needs, strict=True):
        found.append(_empty(like) if need and like is not None else None)
        if like is not call.state:  # which may have as many heads as there are tokens
            of_tokens.append(found[-1])
    return tuple(found), Rest(call, of_tokens)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
