"""Tiles without masks are those with them, where nothing is outside."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.tiles.memory import store_tile
from foci.tiles.whole import read, read_beside, read_rows, within, write, write_beside
from tests.ops.in_triton import DEVICE
from tests.tiles.test_memory import COLUMNS, ROWS, strided


@triton.jit
def _copy(x_ptr, y_ptr, row, rows, stride, column, columns, step, WHOLE: tl.constexpr, EVEN: tl.constexpr):
    tile = read(x_ptr, row, rows, stride, column, columns, step, 16, 32, WHOLE, EVEN)
    write(y_ptr, tile, row, rows, columns, column, columns, WHOLE, EVEN)


@pytest.mark.parametrize("turned", [False, True])
def test_a_whole_tile_comes_and_goes_as_with_masks(turned: bool) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x = x.t().contiguous().t() if turned else x
    for row, column in (0, 0), (16, 32), (48, 64):
        for whole, even in ((False, False), (False, True), (True, False)):
            y = torch.zeros(64, 96, device=DEVICE)
            _copy[(1,)](x, y, row, 64, x.stride(0), column, 96, x.stride(1), whole, even)
            expected = torch.zeros_like(y)
            expected[row : row + 16, column : column + 32] = x[row : row + 16, column : column + 32]
            assert torch.equal(y, expected)


def test_with_masks_nothing_outside_is_written() -> None:
    x, y = torch.ones(64, 96, device=DEVICE), torch.zeros(64, 96, device=DEVICE)
    _copy[(1,)](x, y, 56, 64, 96, 80, 96, 1, False, False)
    assert y.sum() == 8 * 16


def test_where_columns_are_whole_rows_outside_are_not_written() -> None:
    x, y = torch.ones(64, 96, device=DEVICE), torch.zeros(64, 96, device=DEVICE)
    _copy[(1,)](x, y, 40, 50, 96, 64, 96, 1, False, True)
    assert y.sum() == 10 * 32 and y[40:50, 64:].all()


def test_which_tiles_32_bits_can_count() -> None:
    x = torch.empty(1, device="meta")
    assert within(64, 128, x.expand(1, 8192, 64, 128), None)
    assert not within(64, 128, x.as_strided((1, 8192, 1, 128), (0, 1 << 26, 0, 1)))


@triton.jit
def rows_kernel(x_ptr, out_ptr, row0, col0, rows, cols, x_row, x_col, EVEN: tl.constexpr):
    tile = read_rows(x_ptr, row0, rows, x_row, col0, cols, x_col, 4, 2, EVEN)
    store_tile(out_ptr, tile, 0, 4, 2, 0, 2, 1)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(("row0", "col0"), [(0, 0), (3, 1), (5, 0)])
def test_rows_of_whole_blocks_are_those_of_a_tile(row0: int, col0: int, even: bool) -> None:
    x, out = strided(), torch.full((4, 2), torch.nan, device=DEVICE)
    rows_kernel[(1,)](x, out, row0, col0, ROWS, COLUMNS, *x.stride(), EVEN=even)
    expected = torch.zeros(4, 2, device=DEVICE)
    inside = x[row0 : row0 + 4, col0 : col0 + 2]
    expected[: len(inside)] = inside
    assert torch.equal(out, expected)


@triton.jit
def _beside(x_ptr, y_ptr, apart, rows, columns, WHOLE: tl.constexpr):
    tile = read_beside(x_ptr, apart, 8, rows, columns, 16, columns, 2, 16, 32, WHOLE)
    write_beside(y_ptr, tile, apart, 8, rows, columns, 16, columns, WHOLE, 16)


@pytest.mark.parametrize(("rows", "columns"), [(24, 48), (20, 40)])
def test_tiles_below_each_other_lie_apart_in_memory(rows: int, columns: int) -> None:
    x = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    y, expected = torch.zeros_like(x), torch.zeros_like(x)
    _beside[(1,)](x, y, rows * columns, rows, columns, (rows, columns) == (24, 48))
    expected[:2, 8:, 16:] = x[:2, 8:, 16:]
    assert torch.equal(y, expected)
