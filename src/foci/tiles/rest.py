"""Zeros in what packed documents give, where no document is: by programs behind those of some launch."""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.state import covered

PROGRAMS: tl.constexpr = tl.constexpr(128)  # each takes every 128th block of the rest; mostly there is none
BLOCK: tl.constexpr = tl.constexpr(1024)


@triton.jit
def behind():  # type: ignore[no-untyped-def]
    """Which of PROGRAMS behind a launch's own this one is; below 0 it is one of those."""
    return tl.program_id(0) - (tl.num_programs(0) - PROGRAMS)


@triton.jit
def _clear(x_ptr, width, index, start, stop, T):  # type: ignore[no-untyped-def]
    """Rows of x [T,width] before `start`, and from `stop` on."""
    if x_ptr is not None:
        for i in range(index * BLOCK, start * width, PROGRAMS * BLOCK):
            at = i + tl.arange(0, BLOCK).to(tl.int64)
            tl.store(x_ptr + at, 0.0, mask=at < start * width)
        for i in range(stop * width + index * BLOCK, T * width, PROGRAMS * BLOCK):
            at = i + tl.arange(0, BLOCK).to(tl.int64)
            tl.store(x_ptr + at, 0.0, mask=at < T * width)


@triton.jit
def clear_rest(a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, widths, offsets_ptr, index, N, T):  # type: ignore[no-untyped-def]
    """Tokens that none of N documents has, in up to six tensors of T rows, `widths` wide: what PROGRAMS do, by `index`.

    None should be before the first; but offsets on a GPU are moved inside 0..T and not refused (tiles/state.py).
    """
    start, stop = covered(offsets_ptr, N, T)
    start, stop, T = start.to(tl.int64), stop.to(tl.int64), tl.cast(T, tl.int64)
    _clear(a_ptr, widths[0], index, start, stop, T)
    _clear(b_ptr, widths[1], index, start, stop, T)
    _clear(c_ptr, widths[2], index, start, stop, T)
    _clear(d_ptr, widths[3], index, start, stop, T)
    _clear(e_ptr, widths[4], index, start, stop, T)
    _clear(f_ptr, widths[5], index, start, stop, T)
