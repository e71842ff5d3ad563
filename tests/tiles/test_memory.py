"""Tiles read and written through strides, with what lies outside masked; where packed documents lie."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.tiles.maps import Tiles
from foci.tiles.memory import (
    lines_of,
    load_block,
    load_halves,
    load_tile,
    own_rows,
    rows_of,
    store_block,
    store_tile,
    unless,
)
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


B, T, H, C = 2, 32, 3, 16


@triton.jit
def rows_kernel(
    x, own, lines, out_ptr, x_strides, T, H, C, first, none, OWN: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr
):
    """Tiles of head 1 in row 1 of the batch, from token 16 on; what is `none`; and some lines."""
    if OWN:
        there = own_rows(own, 1, 1, T, H, T, C, BLOCK, BLOCK, TMA)
    else:
        there = rows_of(x, 1, 1, T, T, x_strides, C, BLOCK, BLOCK, TMA)
    there = unless(there, none != 0, H * C)
    step = H * C if OWN else x_strides[1]
    tile = load_block(there, 16, T, step, tl.where(none != 0, C, 0), C, 1, BLOCK, BLOCK, TMA)
    store_tile(out_ptr, tile, 0, BLOCK, BLOCK, 0, BLOCK, 1)
    there = lines_of(lines, first, 8, C, BLOCK, BLOCK, TMA)
    tile = load_block(there, 1, 8, C, 0, C, 1, BLOCK, BLOCK, TMA)
    store_tile(out_ptr + BLOCK * BLOCK, tile, 0, BLOCK, BLOCK, 0, BLOCK, 1)


@triton.jit
def put_kernel(x, out, x_strides, T, H, C, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """Each head's rows of x [B,T,H,C] to where they are in out."""
    b, h, t0 = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK
    here = rows_of(x, b, h, T, T, x_strides, C, BLOCK, BLOCK, TMA)
    there = own_rows(out, b, h, T, H, T, C, BLOCK, BLOCK, TMA)
    tile = load_block(here, t0, T, x_strides[1], 0, C, 1, BLOCK, BLOCK, TMA)
    store_block(there, tile.to(tl.float32), t0, T, H * C, 0, C, TMA)


def numbered() -> torch.Tensor:
    """[B,T,H,C], heads 1 to 3 of six, all of them other numbers."""
    whole = torch.arange(B * T * 2 * H * C, device=DEVICE).view(B, T, 2 * H, C) % 2039
    return whole.to(torch.float16)[:, :, 1 : 1 + H]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("none", [0, 1])
@pytest.mark.parametrize("tma", [0, 1, 2])
def test_a_head_is_found_by_a_pointer_and_by_a_map(tma: int, none: int, own: bool) -> None:
    """What is nothing is behind all heads, not in the next one."""
    x, by = numbered(), Tiles(tma)
    packed = x.contiguous()
    lines, out = packed.view(-1, C), torch.full((2, 16, 16), torch.nan, device=DEVICE)
    given = by.rows(x, 16, 16), by.rows(packed, 16, 16), by.lines(lines, 16, 16)
    rows_kernel[(1,)](*given, out, x.stride(), T, H, C, 5, none, own, 16, tma)
    assert torch.equal(out[0], torch.zeros_like(out[0]) if none else x[1, 16:32, 1].float())
    assert torch.equal(out[1, :7], lines[6:13].float())  # what is behind 8 lines a map of all has


@pytest.mark.parametrize("tma", [0, 1, 2])
def test_tiles_go_back_to_where_they_were(tma: int) -> None:
    x, by = numbered(), Tiles(tma)
    out = torch.full((B, T, H, C), torch.nan, dtype=torch.float16, device=DEVICE)
    put_kernel[(B, H, T // 16)](by.rows(x, 16, 16), by.rows(out, 16, 16), x.stride(), T, H, C, 16, tma)
    assert torch.equal(out, x)


@triton.jit
def halves_kernel(x_ptr, out_ptr, h, row0, stop, H, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    WIDE: tl.constexpr = 32 if HALVES else 16
    there = own_rows(x_ptr, 0, h, stop, H, stop, WIDE, 16, 16, 0)
    for tile in tl.static_range(2):
        store_tile(out_ptr + tile * 256, load_halves(there, row0, stop, H, 16, HALVES, 0)[tile], 0, 16, 16, 0, 16, 1)


@pytest.mark.parametrize("halves", [True, False])
def test_a_square_tile_comes_with_what_it_has_lost_or_twice(halves: bool) -> None:
    x, out = torch.randn(20, 3, 32 if halves else 16, device=DEVICE), torch.full((2, 16, 16), torch.nan, device=DEVICE)
    halves_kernel[(1,)](x, out, 1, 8, 20, 3, halves)
    for tile, columns in zip(out, (slice(16), slice(-16, None)), strict=True):
        assert torch.equal(tile[:12], x[8:, 1, columns]) and not tile[12:].any()
