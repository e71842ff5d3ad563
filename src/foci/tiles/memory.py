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
    """The pointer, or with TMA a tensor map, which is made here.

    TMA reckons addresses and masks itself. It wants columns side by side, and rows that begin at multiples of 16 bytes.
    """
    if TMA:
        return tl.make_tensor_descriptor(ptr, [rows, cols], [stride_row, 1], [BLOCK_R, BLOCK_C])
    else:
        return ptr


@triton.jit
def rows_of(  # type: ignore[no-untyped-def]
    x, b, h, T, stop, strides, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr
):
    """Where `load_block` and `store_block` find a head's rows in x [B,T,H,cols]: (pointer or map, row, column).

    TMA: 0 for a pointer, 1 for a map that is made here, 2 where x is one, of all heads (tiles/maps.py).
    """
    if TMA == 2:
        return x, tl.cast(b * T, tl.int32), tl.cast(h * cols, tl.int32)
    else:
        here = x + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[2]
        return opened(here, stop, strides[1], cols, BLOCK_R, BLOCK_C, TMA), 0, 0


@triton.jit
def own_rows(  # type: ignore[no-untyped-def]
    x, b, h, T, H, stop, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr
):
    """`rows_of` what lies one after another."""
    if TMA == 2:
        return x, tl.cast(b * T, tl.int32), tl.cast(h * cols, tl.int32)
    else:
        here = x + (tl.cast(b, tl.int64) * T * H + h) * cols
        return opened(here, stop, H * cols, cols, BLOCK_R, BLOCK_C, TMA), 0, 0


@triton.jit
def lines_of(x, first, count, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same of `count` lines from `first` on of x [lines,cols], one after another."""
    if TMA == 2:
        return x, tl.cast(first, tl.int32), 0
    else:
        return opened(x + tl.cast(first, tl.int64) * cols, count, cols, cols, BLOCK_R, BLOCK_C, TMA), 0, 0


@triton.jit
def unless(there, none, cols):  # type: ignore[no-untyped-def]
    """`there`, or where `none` is to be read behind all `cols` of a map of all heads, where zeros are."""
    return there[0], there[1], tl.where(none, cols, there[2])


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
        return loaded(there, row0, col0)
    else:
        return load_tile(there[0], row0, rows, stride_row, col0, cols, stride_col, BLOCK_R, BLOCK_C)


@triton.jit
def store_block(there, tile, row0, rows, stride_row, col0, cols, TMA: tl.constexpr):  # type: ignore[no-untyped-def]
    """`store_tile` to what was opened, columns side by side."""
    if TMA:
        put(there, tile, row0, col0)
    else:
        store_tile(there[0], tile, row0, rows, stride_row, col0, cols, 1)


@triton.jit
def loaded(there, row0, col0):  # type: ignore[no-untyped-def]
    """`load_block` by a map."""
    return there[0].load([there[1] + row0, there[2] + col0])


@triton.jit
def put(there, tile, row0, col0):  # type: ignore[no-untyped-def]
    """`store_block` by a map."""
    there[0].store([there[1] + row0, there[2] + col0], tile.to(there[0].dtype))


@triton.jit
def awaited(product, always):  # type: ignore[no-untyped-def]
    """The last product of a loop's round, to be waited for before the loads behind it begin; `always` is true there.

    Hopper's products read shared memory while the code goes on. Where something else reads what they read, Triton has
    one place too few for the loads that run ahead, and the next round's tile would be read in place of this one's
    (benchmarks/kernels_races.py). It waits for a product that something reads, and for all before it. For Blackwell,
    whose products are waited for otherwise, Triton does not compile this.
    """
    return tl.where(always, product, 0.0)


@triton.jit
def load_halves(  # type: ignore[no-untyped-def]
    there, row0, rows, H, CHUNK: tl.constexpr, HALVES: tl.constexpr, TMA: tl.constexpr
):
    """A chunk's square tile of H heads' [CHUNK], and HALVES: what it has lost, beside it; else twice the same."""
    WIDE: tl.constexpr = 2 * CHUNK if HALVES else CHUNK
    high = load_block(there, row0, rows, H * WIDE, 0, CHUNK, 1, CHUNK, CHUNK, TMA)
    low = high
    if HALVES:
        low = load_block(there, row0, rows, H * WIDE, CHUNK, WIDE, 1, CHUNK, CHUNK, TMA)
    return high, low
