"""What warps load for others by TMA: for those that walk (kernels_gluon.py), where one stores outputs, and backwards.

Each waits until all that use a place have left it; those of a walk describe what they load while the others do so.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from foci.tiles.tma import async_load, async_store
from foci.tiles.told import settle

HALF: gl.constexpr = gl.constexpr(64)  # columns of a state that four warps have: the rows of a product
RENAMED: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # since Triton 3.9


@gluon.jit
def has_exact(exact_ptr, i, H, inside, CHUNK: gl.constexpr, KEEP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Whether chunk i has tokens that are exact."""
    if KEEP:
        return gl.to_tensor(True)
    else:
        return gl.load(exact_ptr + i * 3 * H * CHUNK, mask=inside, other=0.0) != 0.0


@gluon.jit
def _described(x, step, stop, cols, tiles, MAPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """A head's rows for TMA, or the map of all heads that x is."""
    if MAPS:
        return x
    else:
        return tma.make_tensor_descriptor(x, [stop, cols], [step, 1], [tiles.shape[1], tiles.shape[2]], tiles.layout)


@gluon.jit
def _copy(there, row, first, tiles, at, bar, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """CHUNK rows to their place in shared memory, tile by tile of columns from `first` on."""
    count: gl.constexpr = tiles.shape[0] // STAGES
    for tile in gl.static_range(count):
        column = first + tile * tiles.shape[2]
        async_load(there, [row, column], bar, tiles.index(count * at + tile))


@gluon.jit
def _free(turn, full, empty, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """(place of a chunk, its barrier), when all that walk have left it."""
    at = turn % STAGES
    mbarrier.wait(empty.index(at), (turn // STAGES & 1) ^ 1)
    return at, full.index(at)


@gluon.jit
def _factors(here, rise, write, exact, rows, marks, at, CHUNK: gl.constexpr, KEEP: gl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk's factors per token to their place, and marks where some tokens are exact."""
    rows.index(2 * at).store(rise)
    rows.index(2 * at + 1).store(write)
    if not KEEP:  # noqa: SIM102  a constant and a tensor
        if exact:
            marks.index(at).store(gl.load(here + 2 * CHUNK))


@gluon.jit
def load_keys(  # type: ignore[no-untyped-def]
    these, flow, CHUNK: gl.constexpr, STAGES: gl.constexpr, MAPS: gl.constexpr
):
    """What a warp that loads does, chunk by chunk, when all that walk have left the place."""
    keys, step, stop, first, tiles = these
    full, empty, span, start = flow
    begin, _own, end = span
    K: gl.constexpr = tiles.shape[0] // STAGES * tiles.shape[2]
    there = _described(keys, step, stop, K, tiles, MAPS)
    for i in range(begin, end):
        at, bar = _free(i - begin, full, empty, STAGES)
        mbarrier.expect(bar, 2 * CHUNK * K)
        _copy(there, start + i * CHUNK, first, tiles, at, bar, STAGES)


@gluon.jit
def load_values_and_store(  # type: ignore[no-untyped-def]
    these, flow, CHUNK: gl.constexpr, STAGES: gl.constexpr, MAPS: gl.constexpr, SETTLE: gl.constexpr
):
    """What the second does: outputs of the chunk whose place it is lie where its values were, and go first."""
    values, step, outputs, stop, H, V, v0, tiles = these
    full, empty, span, start = flow
    begin, _own, end = span
    there = _described(values, step, stop, V, tiles, MAPS)
    for phase in gl.static_range(2):
        i0, i1 = (begin, gl.minimum(begin + STAGES, end)) if phase == 0 else (begin + STAGES, end)
        if phase == 1:  # described, if it is here, behind the first loads: it takes as long as they do
            out_there = _described(outputs, H * V, stop, V, tiles, MAPS)
        for i in range(i0, i1):
            at, bar = _free(i - begin, full, empty, STAGES)
            if phase == 1:
                _store(out_there, i - STAGES, v0, tiles, span, start, CHUNK, STAGES)
            mbarrier.expect(bar, 2 * CHUNK * HALF * (tiles.shape[0] // STAGES))
            _copy(there, start + i * CHUNK, v0, tiles, at, bar, STAGES)
    for i in range(gl.maximum(begin, end - STAGES), end):
        turn = i - begin
        mbarrier.wait(empty.index(turn % STAGES), turn // STAGES & 1)
        _store(out_there, i, v0, tiles, span, start, CHUNK, STAGES)
    settle(SETTLE)


@gluon.jit
def _store(there, i, v0, tiles, span, start, CHUNK: gl.constexpr, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Outputs of a chunk that was read to memory; then its place is free."""
    begin, own, _end = span
    at = (i - begin) % STAGES
    groups: gl.constexpr = tiles.shape[0] // STAGES
    if i >= own:
        for group in gl.static_range(groups):
            async_store(there, [start + i * CHUNK, v0 + group * HALF], tiles.index(groups * at + group))
    tma.store_wait(0)


@gluon.jit
def _expect_products(bar, reads, exact, CHUNK: gl.constexpr, ALONE: gl.constexpr):  # type: ignore[no-untyped-def]
    """The bytes of X, if it is not `ALONE` of A where that is read, and of both twice where tokens are exact."""
    each: gl.constexpr = 2 * CHUNK * CHUNK
    if ALONE:
        mbarrier.expect(bar, each, pred=exact == 0)
        mbarrier.expect(bar, 2 * each, pred=exact)
    else:
        mbarrier.expect(bar, each, pred=(reads == 0) & (exact == 0))
        mbarrier.expect(bar, 2 * each, pred=reads != exact)
        mbarrier.expect(bar, 4 * each, pred=reads & exact)


@gluon.jit
def load_products(  # type: ignore[no-untyped-def]
    these, flow, CHUNK: gl.constexpr, STAGES: gl.constexpr, MAPS: gl.constexpr, KEEP: gl.constexpr
):
    """What the third does: X, A for what is read if there are `pairs`, and what rounding left of exact tokens."""
    products, pairs, exact_ptr, stop, X_at, A_at, step, H, X_tiles, A_tiles = these
    full, empty, span, start = flow
    begin, own, end = span
    exact = has_exact(exact_ptr, begin, H, begin < end, CHUNK, KEEP)
    there = _described(products, step, stop, step // H, X_tiles, MAPS)
    A_there = pairs if MAPS else there
    for i in range(begin, end):
        then = has_exact(exact_ptr, i + 1, H, i + 1 < end, CHUNK, KEEP)
        t0, reads, both = start + i * CHUNK, i >= own, (i >= own) & exact
        at, bar = _free(i - begin, full, empty, STAGES)
        _expect_products(bar, reads, exact, CHUNK, pairs is None)
        if pairs is not None:
            async_load(A_there, [t0, A_at], bar, A_tiles.index(2 * at), pred=reads)
            async_load(A_there, [t0, A_at + CHUNK], bar, A_tiles.index(2 * at + 1), pred=both)
        async_load(there, [t0, X_at], bar, X_tiles.index(2 * at))
        async_load(there, [t0, X_at + CHUNK], bar, X_tiles.index(2 * at + 1), pred=exact)
        exact = then


@gluon.jit
def load_queries(  # type: ignore[no-untyped-def]
    these, flow, CHUNK: gl.constexpr, STAGES: gl.constexpr, MAPS: gl.constexpr, KEEP: gl.constexpr
):
    """What the last does: q of what is read, factors per token, marks where some tokens are exact."""
    queries, step, rows_ptr, exact_ptr, stop, first, H, tiles, rows, marks = these
    full, empty, span, start = flow
    begin, own, end = span
    K: gl.constexpr = tiles.shape[0] // STAGES * tiles.shape[2]
    LINES: gl.constexpr = 2 if KEEP else 3
    line: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    exact = has_exact(exact_ptr, begin, H, begin < end, CHUNK, KEEP)
    there = _described(queries, step, stop, K, tiles, MAPS)
    for i in range(begin, end):
        then = has_exact(exact_ptr, i + 1, H, i + 1 < end, CHUNK, KEEP)
        here = rows_ptr + (LINES * H * i * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, line))[None, :])
        rise, write = gl.load(here), gl.load(here + CHUNK)
        at, bar = _free(i - begin, full, empty, STAGES)
        if i >= own:
            _copy(there, start + i * CHUNK, first, tiles, at, bar, STAGES)
        _factors(here, rise, write, exact, rows, marks, at, CHUNK, KEEP)
        mbarrier.arrive(bar, count=1, pred=i < own)  # before it, in any case, all of the warp have stored factors
        mbarrier.expect(bar, 2 * CHUNK * K, pred=i >= own)
        exact = then


@gluon.jit
def brought(  # type: ignore[no-untyped-def]
    there, at, place: gl.constexpr, tiles, bars, turn, count: gl.constexpr, PLACES: gl.constexpr
):
    """A tile by TMA, when all have left its place, the first of `count` that its barrier tells of."""
    full, empty = bars
    own = turn % PLACES
    tile, bar = tiles[place].index(own), barrier_of(full, place, own, PLACES)
    mbarrier.wait(barrier_of(empty, place, own, PLACES), (turn // PLACES & 1) ^ 1)
    mbarrier.expect(bar, count * 2 * tile.shape[0] * tile.shape[1])
    async_load(there, at, bar, tile)


@gluon.jit
def barrier_of(bars, place: gl.constexpr, own, PLACES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The barrier of a tile's place, of which there may be two."""
    return bars.index(place) if PLACES == 1 else bars.index(PLACES * place + own)


@gluon.jit
def place_of(turn, zero, PLACES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Which place it is. Of one: 0, not known before the loop, as what is would be kept in registers."""
    return turn * zero if PLACES == 1 else turn % PLACES


@gluon.jit
def in_float32(tile, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """The place of [2 rows,columns] bfloat16 as that of [rows,columns] float32."""
    shape: gl.constexpr = [tile.shape[0] // 2, tile.shape[1]]
    if RENAMED:
        return tile.reinterpret(gl.float32, shape, layout)
    else:
        return tile._reinterpret(gl.float32, shape, layout)
