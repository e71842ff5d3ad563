"""Memory for what packed documents give: tokens before the first and behind the last are in none, and 0 in all of it.

Which those are only the GPU knows. Zeros everywhere, nearly all of which are written over, took a tenth of the time of
Gated DeltaNet's forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, launch
from foci.tiles.state import covered

CONFIG = Config({"BLOCK": 1024}, warps=4, stages=1)
PROGRAMS = 128  # each takes every 128th block of the rest: where there is none they end at once
MOST = 6  # tensors of a launch


@triton.jit
def _clear(x_ptr, width, start, stop, T, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of x [T,width] before `start`, and from `stop` on."""
    if x_ptr is not None:
        for i in range(tl.program_id(0) * BLOCK, start * width, PROGRAMS * BLOCK):
            at = i + tl.arange(0, BLOCK).to(tl.int64)
            tl.store(x_ptr + at, 0.0, mask=at < start * width)
        for i in range(stop * width + tl.program_id(0) * BLOCK, T * width, PROGRAMS * BLOCK):
            at = i + tl.arange(0, BLOCK).to(tl.int64)
            tl.store(x_ptr + at, 0.0, mask=at < T * width)


@triton.jit
def rest_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, offsets_ptr, widths, N, T, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Tokens that none of N documents has, in up to six tensors of T rows, `widths` wide.

    None should be before the first; but offsets on a GPU are moved inside 0..T and not refused (tiles/state.py).
    """
    start, stop = covered(offsets_ptr, N, T)
    start, stop, T = start.to(tl.int64), stop.to(tl.int64), tl.cast(T, tl.int64)
    _clear(a_ptr, widths[0], start, stop, T, PROGRAMS, BLOCK)
    _clear(b_ptr, widths[1], start, stop, T, PROGRAMS, BLOCK)
    _clear(c_ptr, widths[2], start, stop, T, PROGRAMS, BLOCK)
    _clear(d_ptr, widths[3], start, stop, T, PROGRAMS, BLOCK)
    _clear(e_ptr, widths[4], start, stop, T, PROGRAMS, BLOCK)
    _clear(f_ptr, widths[5], start, stop, T, PROGRAMS, BLOCK)


def room(call: Any, like: Tensor) -> Tensor:
    """Memory for an output of a call, contiguous, with the shape, dtype and device of `like`."""
    found = _empty(like)
    _clear_rest(call, [found])
    return found


def rooms(call: Any, likes: Iterable[Tensor | None], needs: Iterable[bool]) -> tuple[Tensor | None, ...]:
    """Memory for gradients of a call, as `room` has it: of what there is and is needed."""
    found = [_empty(like) if need and like is not None else None for like, need in zip(likes, needs, strict=True)]
    _clear_rest(call, [x for x in found if x is not None])
    return tuple(found)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _clear_rest(call: Any, found: Sequence[Tensor]) -> None:
    """Of each that has the call's tokens [1,T,..]."""
    T, offsets = call.sizes[1], call.offsets
    if offsets is None:
        return
    rows = [x for x in found if x.shape[:2] == (1, T)]
    for i in range(0, len(rows), MOST):
        some = rows[i : i + MOST]
        none = (None,) * (MOST - len(some))
        widths = (*(x.numel() // T for x in some), *(0 for _ in none))
        launch(
            rest_kernel, (PROGRAMS,), *some, *none, offsets, widths, offsets.shape[0] - 1, T,
            config=CONFIG, PROGRAMS=PROGRAMS,
        )  # fmt: skip
