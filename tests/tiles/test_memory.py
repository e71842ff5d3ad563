"""Tiles read and written through strides, with what lies outside masked; where packed documents lie."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.tiles.memory import load_tile, store_tile
from tests.ops.in_triton import DEVICE

ROWS, COLUMNS = 5, 3


@triton.jit
def copy_kernel(
    x_ptr, out_ptr, row0, col0, rows, cols, x_strides, out_strides, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    tile = load_tile(x_ptr, row0, rows, x_strides[0], col0, cols, x_strides[1], BLOCK_R, BLOCK_C)
    store_tile(out_ptr, tile, row0, rows, out_strides[0], col0, cols, out_strides[1])


@triton.jit
def load_kernel(x_ptr, out_ptr, row0, col0, rows, cols, x_row, x_col, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    tile = load_tile(x_ptr, row0, rows, x_row, col0, cols, x_col, BLOCK_R, BLOCK_C)
    places = tl.arange(0, BLOCK_R)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    tl.store(out_ptr + places, tile)


def strided(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[ROWS, COLUMNS] numbers as a view, transposed and of every other element; NaN lies between."""
    buffer = torch.full((2 * COLUMNS, ROWS), torch.nan, dtype=dtype, device=DEVICE)
    view = buffer[::2].T
    view.copy_(torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) + 1)
    return view


@pytest.mark.parametrize(("row0", "col0"), [(0, 0), (3, 2), (4, 0), (-2, 0), (5, 0), (0, 3)])
def test_a_tile_holds_what_lies_inside_and_zeros(row0: int, col0: int) -> None:
    x, out = strided(), torch.full((4, 4), torch.nan, device=DEVICE)
    load_kernel[(1,)](x, out, row0, col0, ROWS, COLUMNS, *x.stride(), 4, 4)
    expected = torch.zeros(4, 4, device=DEVICE)
    for r in range(4):
        for c in range(4):
            if 0 <= row0 + r < ROWS and col0 + c < COLUMNS:
                expected[r, c] = x[row0 + r, col0 + c]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("rows", [5, 2])
def test_rows_are_limited_as_told_and_not_as_memory_is(rows: int) -> None:
    x, out = strided(), torch.full((8, 4), torch.nan, device=DEVICE)
    load_kernel[(1,)](x, out, 0, 0, rows, COLUMNS, *x.stride(), 8, 4)
    assert torch.equal(out[:rows, :COLUMNS], x[:rows])
    assert not out[rows:].any() and not out[:, COLUMNS:].any()


@pytest.mark.parametrize(("row0", "col0"), [(0, 0), (3, 2), (-2, 0), (5, 0)])
def test_what_lies_outside_is_not_written(row0: int, col0: int) -> None:
    x = strided()
    buffer = torch.full((2 * ROWS, 2 * COLUMNS), -1.0, device=DEVICE)
    out = buffer[::2, 1::2]
    copy_kernel[(1,)](x, out, row0, col0, ROWS, COLUMNS, x.stride(), out.stride(), 4, 4)
    expected = torch.full_like(buffer, -1.0)
    inside = slice(max(row0, 0), max(row0 + 4, 0)), slice(col0, col0 + 4)
    expected[::2, 1::2][inside] = x[inside]
    assert torch.equal(buffer, expected)


def test_a_tile_is_rounded_to_what_it_is_written_to() -> None:
    x = strided() / 3
    out = torch.empty(ROWS, COLUMNS, dtype=torch.float16, device=DEVICE)
    copy_kernel[(1,)](x, out, 0, 0, ROWS, COLUMNS, x.stride(), out.stride(), 8, 4)
    assert torch.equal(out, x.half())


def test_a_stride_of_0_is_one_row_many_times() -> None:
    x = torch.arange(3.0, device=DEVICE).expand(ROWS, 3)
    out = torch.empty(ROWS, 3, device=DEVICE)
    copy_kernel[(1,)](x, out, 0, 0, ROWS, 3, x.stride(), out.stride(), 8, 4)
    assert torch.equal(out, x)
