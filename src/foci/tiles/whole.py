"""Tiles that lie whole within their tensors, or with all columns: no masks, addresses of 32 bits behind one of 64."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from foci.tiles.memory import load_tile, store_tile


@triton.jit
def read(  # type: ignore[no-untyped-def]
    ptr, row0, rows, stride_row, col0, cols, stride_col,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """`load_tile` of tiles/memory.py; WHOLE: nothing of the tile is outside, and it spans less than 2^31 numbers.

    EVEN: the same of columns alone, and row0 >= 0.
    """
    if WHOLE or EVEN:
        ptr += tl.cast(row0, tl.int64) * stride_row + col0 * stride_col
        r, c = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_C)[None, :]
        ptr += r * stride_row + c * stride_col
        tile = tl.load(ptr) if WHOLE else tl.load(ptr, mask=r < rows - row0, other=0.0)
    else:
        tile = load_tile(ptr, row0, rows, stride_row, col0, cols, stride_col, BLOCK_R, BLOCK_C)
    return tile


@triton.jit
def read_rows(  # type: ignore[no-untyped-def]
    ptr, row0, rows, stride_row, col0, cols, stride_col,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`read` of rows that may end within the tile."""
    return read(ptr, row0, rows, stride_row, col0, cols, stride_col, BLOCK_R, BLOCK_C, False, EVEN)


@triton.jit
def write(  # type: ignore[no-untyped-def]
    ptr, tile, row0, rows, stride_row, col0, cols, WHOLE: tl.constexpr, EVEN: tl.constexpr = False
):
    """`store_tile` of columns side by side, under the same conditions."""
    if WHOLE or EVEN:
        ptr += tl.cast(row0, tl.int64) * stride_row + col0
        r, c = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
        tl.store(ptr + (r * stride_row + c), tile.to(ptr.dtype.element_ty), mask=None if WHOLE else r < rows - row0)
    else:
        store_tile(ptr, tile, row0, rows, stride_row, col0, cols, 1)


@triton.jit
def beside(ptr, apart, row0, stride_row, col0, TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """(pointers, rows, columns) of tiles below each other that lie `apart` from each other in memory."""
    r, c = tl.arange(0, TILES * BLOCK_R)[:, None], tl.arange(0, BLOCK_C)[None, :]
    ptr += tl.cast(row0, tl.int64) * stride_row + col0
    places = ptr + (r // BLOCK_R) * tl.cast(apart, tl.int64) + (r % BLOCK_R * stride_row + c)
    return places, row0 + r % BLOCK_R, col0 + c


@triton.jit
def read_beside(  # type: ignore[no-untyped-def]
    ptr, apart, row0, rows, stride_row, col0, cols,
    TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """TILES tiles as one, below each other, under the same conditions as `read`."""
    places, r, c = beside(ptr, apart, row0, stride_row, col0, TILES, BLOCK_R, BLOCK_C)
    return tl.load(places) if WHOLE else tl.load(places, mask=(r < rows) & (c < cols), other=0.0)


@triton.jit
def write_beside(ptr, tiles, apart, row0, rows, stride_row, col0, cols, WHOLE: tl.constexpr, BLOCK_R: tl.constexpr):  # type: ignore[no-untyped-def]
    """The way back."""
    TILES: tl.constexpr = tiles.shape[0] // BLOCK_R
    places, r, c = beside(ptr, apart, row0, stride_row, col0, TILES, BLOCK_R, tiles.shape[1])
    if WHOLE:
        tl.store(places, tiles.to(ptr.dtype.element_ty))
    else:
        tl.store(places, tiles.to(ptr.dtype.element_ty), mask=(r < rows) & (c < cols))


def within(rows: int, columns: int, *tensors: Any) -> bool:
    """Whether 32 bits count what lies between the first and the last number of a tile of these tensors [B,T,H,D]."""
    return all(x is None or rows * abs(x.stride(1)) + columns * abs(x.stride(3)) < 1 << 31 for x in tensors)
