"""Tiles from and to memory: rows of any stride, with what lies outside masked."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(ptr, row0, rows, stride_row, col0, cols, stride_col, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_R, BLOCK_C] from rows row0.. of `rows` and columns col0.. of `cols`; zeros outside."""
    r, c = row0 + tl.arange(0, BLOCK_R), col0 + tl.arange(0, BLOCK_C)
    inside = ((r >= 0) & (r < rows))[:, None] & (c < cols)[None, :]
    places = r.to(tl.int64)[:, None] * stride_row + c.to(tl.int64)[None, :] * stride_col
    return tl.load(ptr + places, mask=inside, other=0.0)


@triton.jit
def store_tile(ptr, tile, row0, rows, stride_row, col0, cols, stride_col):  # type: ignore[no-untyped-def]
    """The way back: what lies outside is not written. The tile is rounded to the pointer's dtype."""
    r, c = row0 + tl.arange(0, tile.shape[0]), col0 + tl.arange(0, tile.shape[1])
    inside = ((r >= 0) & (r < rows))[:, None] & (c < cols)[None, :]
    places = r.to(tl.int64)[:, None] * stride_row + c.to(tl.int64)[None, :] * stride_col
    tl.store(ptr + places, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def present(ptr):  # type: ignore[no-untyped-def]
    """Whether the tensor has elements: one without begins at 0. So results that nobody asks for need no kernel more."""
    return ptr.to(tl.int64) != 0


@triton.jit
def add_tile(ptr, into, tile, row0, rows, stride_row, col0, cols):  # type: ignore[no-untyped-def]
    """`store_tile` at ptr + into of what is there and the tile, columns side by side; a ptr of None takes nothing."""
    if ptr is not None:
        there = load_tile(ptr + into, row0, rows, stride_row, col0, cols, 1, tile.shape[0], tile.shape[1])
        store_tile(ptr + into, there.to(tl.float32) + tile, row0, rows, stride_row, col0, cols, 1)


@triton.jit
def load_row(ptr, col0, cols, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_C] from columns col0.. of `cols`, one beside the other; zeros outside."""
    c = col0 + tl.arange(0, BLOCK_C)
    return tl.load(ptr + c, mask=c < cols, other=0.0)


@triton.jit
def opened(ptr, rows, stride_row, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where `load_block` and `store_block` find tiles: the pointer, or with TMA a tensor descriptor.

    TMA reckons addresses and masks itself. It wants columns side by side, and rows that begin at multiples of 16 bytes.
    """
    if TMA:
        return tl.make_tensor_descriptor(ptr, [rows, cols], [stride_row, 1], [BLOCK_R, BLOCK_C])
    else:
        return ptr


@triton.jit
def load_block(  # type: ignore[no-untyped-def]
    there,
    row0,
    rows,
    stride_row,
    col0,
    cols,
    stride_col,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TMA: tl.constexpr,
):
    """`load_tile` of what was opened."""
    if TMA:
        return there.load([row0, col0])
    else:
        return load_tile(there, row0, rows, stride_row, col0, cols, stride_col, BLOCK_R, BLOCK_C)


@triton.jit
def store_block(there, tile, row0, rows, stride_row, col0, cols, TMA: tl.constexpr):  # type: ignore[no-untyped-def]
    """`store_tile` to what was opened, columns side by side."""
    if TMA:
        there.store([row0, col0], tile.to(there.dtype))
    else:
        store_tile(there, tile, row0, rows, stride_row, col0, cols, 1)
