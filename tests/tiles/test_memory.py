"""Tiles read and written through strides, with what lies outside masked; where packed documents lie."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.tiles.memory import document, load_tile, store_tile
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


@triton.jit
def document_kernel(offsets_ptr, out_ptr, N, T, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    chunk = tl.program_id(0)
    found, start, stop, place = document(offsets_ptr, N, chunk, T, BLOCK_T, BLOCK_N)
    tl.store(out_ptr + 4 * chunk, found)
    tl.store(out_ptr + 4 * chunk + 1, start)
    tl.store(out_ptr + 4 * chunk + 2, stop)
    tl.store(out_ptr + 4 * chunk + 3, place)


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


def documents(offsets: list[int], T: int, chunks: int, BLOCK_T: int, BLOCK_N: int, dtype: torch.dtype) -> list:
    out = torch.full((chunks, 4), -7, dtype=torch.int32, device=DEVICE)
    values = torch.tensor(offsets, dtype=dtype, device=DEVICE)
    document_kernel[(chunks,)](values, out, len(offsets) - 1, T, BLOCK_T, BLOCK_N)
    return out.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("BLOCK_N", [2, 4, 8])
@pytest.mark.parametrize("lengths", [[9], [3, 1, 4, 8], [0, 5, 0, 0, 4, 12, 0], [0, 0, 0, 1], [4] * 9])
def test_every_chunk_finds_its_document(lengths: list[int], BLOCK_N: int, dtype: torch.dtype) -> None:
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    expected = [
        [n, offsets[n], offsets[n + 1], place] for n, length in enumerate(lengths) for place in range(-(-length // 4))
    ]
    found = documents(offsets, offsets[-1], len(expected) + 2, 4, BLOCK_N, dtype)
    assert found[:-2] == expected
    assert [row[0] for row in found[-2:]] == [-1, -1]


def test_offsets_that_lie_never_lead_outside() -> None:
    for offsets in ([0, -5, 99, 3], [-3, 50], [7, 2, 9]):
        for found, start, stop, _ in documents(offsets, 10, 6, 4, 4, torch.int64):
            assert found == -1 or 0 <= start <= stop <= 10, offsets
