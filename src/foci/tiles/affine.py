"""States [K,V] as tuples of tiles of rows, and the affine maps S -> M S + N that pieces of a sequence are to them."""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.chunk_backward import right
from foci.tiles.memory import lines_of, load_tile, loaded, store_tile
from foci.tiles.state import halves, in_two, sequence
from foci.tiles.stretches import stretch


@triton.jit
def piece_at(offsets_ptr, index, T, N, CHUNK: tl.constexpr, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(sequence, row of the batch, first token, end, first chunk's slot, its own, pieces before it, pieces behind it).

    PIECE 0: sequence `index` as a whole. -1 as sequence has nothing to do (tiles/stretches.py: stretch).
    """
    if PIECE > 0:
        n, b, start, stop, first, end, own = stretch(offsets_ptr, index, T, N, PIECE)
        before, behind = (first - start) // PIECE, tl.cdiv(stop - end, PIECE)
        _, _, _, slot = sequence(offsets_ptr, tl.maximum(n, 0), T, CHUNK)
        slot = tl.cast(slot, tl.int64) + before * (PIECE // CHUNK)
        n, own = tl.cast(n, tl.int64), tl.cast(own, tl.int64)
    else:
        n, own, before, behind = tl.cast(index, tl.int64), index, 0, 0
        b, first, end, slot = sequence(offsets_ptr, n, T, CHUNK)
    return n, tl.cast(b, tl.int64), first, end, slot, own, before, behind


@triton.jit
def load_state(  # type: ignore[no-untyped-def]
    ptr, strides, rows, v0, V, TILES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Columns v0.. of a state, as a tuple of tiles of BLOCK_K rows each in float32; zeros without one."""
    S = ()
    for i in tl.static_range(TILES):
        if ptr is None:
            S += (tl.zeros([BLOCK_K, BLOCK_V], tl.float32),)  # type: ignore[assignment]
        else:
            tile = load_tile(ptr, i * BLOCK_K, rows, strides[2], v0, V, strides[3], BLOCK_K, BLOCK_V)
            S += (tile.to(tl.float32),)  # type: ignore[assignment]
    return S


@triton.jit
def store_state(ptr, S, rows, v0, V, TILES: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns v0.. of a contiguous state, its first `rows` rows."""
    for i in tl.static_range(TILES):
        store_tile(ptr, S[i], i * BLOCK_K, rows, V, v0, V, 1)


@triton.jit
def turned(S, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each tile transposed: of rows into such of columns, and back."""
    found = ()
    for i in tl.static_range(TILES):
        found += (tl.trans(S[i]),)  # type: ignore[assignment]
    return found


@triton.jit
def load_columns(there, row, TILES: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of rows by a map, as a tuple of tiles of BLOCK_K columns each."""
    found = ()
    for i in tl.static_range(TILES):
        found += (loaded(there, row, i * BLOCK_K),)  # type: ignore[assignment]
    return found


@triton.jit
def faded(S, gone, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """gone S."""
    found = ()
    for i in tl.static_range(TILES):
        found += (S[i] * gone,)  # type: ignore[assignment]
    return found


@triton.jit
def added(S, high, low, x, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """S + (high + low) x, of tiles of columns; `low` may be None."""
    found = ()
    for i in tl.static_range(TILES):
        tile = S[i] if low is None else tl.dot(low, x[i], S[i])
        found += (tl.dot(high, x[i], tile),)  # type: ignore[assignment]
    return found


@triton.jit
def with_unit(S, c0, TILES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # type: ignore[no-untyped-def]
    """S with columns c0.. of the unit matrix added; with c0 < 0 none."""
    column = c0 + tl.arange(0, BLOCK_V)
    found = ()
    for i in tl.static_range(TILES):
        row = i * BLOCK_K + tl.arange(0, BLOCK_K)
        found += (S[i] + tl.where(row[:, None] == column[None, :], 1.0, 0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def store_map(M_ptr, N_ptr, S, at, K, v0, V, TILES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # type: ignore[no-untyped-def]
    """What became of columns v0.. of a state, in whole blocks, and the unit matrix behind it: of N [K,V] or M [K,K].

    M in bfloat16 is two of them one behind the other, its rounding and what that left.
    """
    c0 = v0 - tl.cdiv(V, BLOCK_V) * BLOCK_V
    if c0 < 0:
        store_state(N_ptr + at * K * V, S, K, v0, V, TILES, BLOCK_K)
    elif M_ptr.dtype.element_ty == tl.bfloat16:
        for i in tl.static_range(TILES):
            high, here = S[i].to(tl.bfloat16), M_ptr + at * 2 * K * K
            store_tile(here, high, i * BLOCK_K, K, K, c0, K, 1)
            store_tile(here + K * K, S[i] - high.to(tl.float32), i * BLOCK_K, K, K, c0, K, 1)
    else:
        store_state(M_ptr + at * K * K, S, K, c0, K, TILES, BLOCK_K)


@triton.jit
def mapped(  # type: ignore[no-untyped-def]
    S, M_ptr, N_ptr, at, K, v0, V,
    PRECISION: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """M S + N in columns v0.., by products of bfloat16 in two, or of float32 by PRECISION."""
    ahead = ()
    here = M_ptr + at * K * K * (2 if M_ptr.dtype.element_ty == tl.bfloat16 else 1)
    for i in tl.static_range(TILES):
        found = load_tile(N_ptr + at * K * V, i * BLOCK_K, K, V, v0, V, 1, BLOCK_K, BLOCK_V)
        for j in tl.static_range(TILES):
            if M_ptr.dtype.element_ty == tl.bfloat16:
                lost = load_tile(here + K * K, i * BLOCK_K, K, K, j * BLOCK_K, K, 1, BLOCK_K, BLOCK_K)
                found = tl.dot(lost, S[j].to(tl.bfloat16), found)
            M = load_tile(here, i * BLOCK_K, K, K, j * BLOCK_K, K, 1, BLOCK_K, BLOCK_K)
            found = right(M, S[j], found, PRECISION)
        ahead += (found,)  # type: ignore[assignment]
    return ahead


@triton.jit
def joined(  # type: ignore[no-untyped-def]
    S, M_ptr, N_ptr, slot, count, h, H, K, v0, V, STEP: tl.constexpr,
    PRECISION: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What `count` pieces from `slot` on, in steps of STEP, make of a state. The first has it in its N, and needs no M.

    S: the state where there is no piece, else zeros.
    """
    first, found = N_ptr + (slot * H + h) * K * V, ()
    for i in tl.static_range(TILES):
        tile = load_tile(first, i * BLOCK_K, tl.where(count > 0, K, 0), V, v0, V, 1, BLOCK_K, BLOCK_V)
        found += (S[i] + tile,)  # type: ignore[assignment]
    S = found
    for i in tl.range(1, count, disable_licm=True):
        S = mapped(S, M_ptr, N_ptr, (slot + i * STEP) * H + h, K, v0, V, PRECISION, TILES, BLOCK_K, BLOCK_V)
    return S


@triton.jit
def store_turned_map(M_ptr, N_ptr, S, at, v0, V):  # type: ignore[no-untyped-def]
    """`store_map` of a state turned over, [columns,K]: rows of N^T [V,K], or of M^T [K,K] as two bfloat16."""
    K: tl.constexpr = S.shape[1]
    c0 = v0 - tl.cdiv(V, S.shape[0]) * S.shape[0]
    if c0 < 0:
        store_tile(N_ptr + at * K * V, S, v0, V, K, 0, K, 1)
    else:
        high, here = S.to(tl.bfloat16), M_ptr + at * 2 * K * K
        store_tile(here, high, c0, K, K, 0, K, 1)
        store_tile(here + K * K, S - high.to(tl.float32), c0, K, K, 0, K, 1)


@triton.jit
def turned_maps(M_ptr, at, size, count, K: tl.constexpr, TMA: tl.constexpr):  # type: ignore[no-untyped-def]
    """M^T of `count` pieces from `at` on, `size` apart, for TMA."""
    return lines_of(M_ptr, at * 2 * K, ((count - 1) * size + 1) * 2 * K, K, K, K, TMA)


@triton.jit
def mapped_turned(S, M_there, N_ptr, at, size, i, v0, V):  # type: ignore[no-untyped-def]
    """S M^T + N^T in columns v0.. of a state turned over, by the i-th of `turned_maps`.

    N^T alone where nothing is of a column: M may have overflowed, over tokens that nobody reads.
    """
    K: tl.constexpr = S.shape[1]
    M, lost = loaded(M_there, i * size * 2 * K, 0), loaded(M_there, i * size * 2 * K + K, 0)
    some = tl.max((S != 0.0).to(tl.int32), 1)[:, None] > 0
    high, low = in_two(S)
    S = tl.where(some, halves(high, low, M, lost, tl.zeros_like(S)), 0.0)
    return S + load_tile(N_ptr + (at + i * size) * K * V, v0, V, K, 0, K, 1, S.shape[0], K)


@triton.jit
def joined_turned(S, M_ptr, N_ptr, at, size, count, v0, V, TMA: tl.constexpr):  # type: ignore[no-untyped-def]
    """`joined` of a state turned over, of pieces from `at` on, `size` apart."""
    K: tl.constexpr = S.shape[1]
    S += load_tile(N_ptr + at * K * V, v0, tl.where(count > 0, V, 0), K, 0, K, 1, S.shape[0], K)
    there = turned_maps(M_ptr, at, size, count, K, TMA)
    for i in tl.range(1, count, num_stages=2):
        S = mapped_turned(S, there, N_ptr, at, size, i, v0, V)
    return S


@triton.jit
def store_joined_turned(  # type: ignore[no-untyped-def]
    first_ptr, M_ptr, N_ptr, at, size, last, v0, V, K: tl.constexpr, BLOCK_V: tl.constexpr
):
    """The state with which each piece begins, from the second to the `last`, as `joined_turned` has it."""
    S = load_tile(N_ptr + at * K * V, v0, V, K, 0, K, 1, BLOCK_V, K)
    there = turned_maps(M_ptr, at, size, last, K, 1)
    for i in tl.range(1, last, num_stages=2):
        store_tile(first_ptr + (at + i * size) * K * V, S, v0, V, K, 0, K, 1)
        S = mapped_turned(S, there, N_ptr, at, size, i, v0, V)
    store_tile(first_ptr + (at + last * size) * K * V, S, v0, V, K, 0, K, 1)


@triton.jit
def faded_each(S, gone, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """`faded` where each tile has its own gates."""
    found = ()
    for i in tl.static_range(TILES):
        found += (S[i] * gone[i],)  # type: ignore[assignment]
    return found
