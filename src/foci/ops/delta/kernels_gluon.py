"""The delta rule's walk on Hopper by warps with work of their own.

What `token_walk_kernel` does (kernels_triton_token_walks.py: equations, letters, pieces). There one program has 64
columns, and each of its products waits for the one before it; two such programs find no room beside each other. Here
four warps load, each what it has described to TMA while others do so, and one of them stores. Four others walk 64
columns, beside four that make A, of 64 channels (`alone` there); or two times four, 64 columns each (`wide`): they
share keys, queries, X and A and wait for nothing else, so one half has the tensor cores while the other rounds.

What is not a state is two bfloat16 there, and here where a backward is to come. Else it is one, and 4 products in place
of 7, but of exact tokens: those from the first one on in their chunk whose keys are alike (kernels_triton_chunks.py). A
chunk that has some loads and multiplies both, and those before have 0 as the second, so that what comes later changes
no bit.

Gluon says where every number lies: a product's sums are the next one's left operand in the same registers, turned over
as there. It has no interpreter: the tests hold these kernels to the equation as threads on a CPU, and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from foci.core.tune import Config, dependent_launch, launch, strides, target_of
from foci.tiles.affine import faded
from foci.tiles.layouts import BY_KEY, BY_TOKEN, OF_KEYS, OF_LINES, OF_TILES, OF_TOKENS, plus
from foci.tiles.loads import (
    HALF,
    has_exact,
    load_keys,
    load_products,
    load_queries,
    load_values_and_store,
)
from foci.tiles.maps import reaches, tiles_of
from foci.tiles.memory import present
from foci.tiles.near import UNREAD
from foci.tiles.pieces import FORGOTTEN, share, thirds
from foci.tiles.state import sequence
from foci.tiles.tma import async_store, map_of
from foci.tiles.told import settle, spread_lost

CHUNK = 64


@gluon.jit
def _rounded(x, marks, EXACT: gl.constexpr, KEEP: gl.constexpr):  # type: ignore[no-untyped-def]
    """x [HALF,tokens] rounded, and what that left of tokens that are exact; KEEP: all are."""
    high = x.to(gl.bfloat16)
    low = high
    if EXACT:
        left = x - high.to(gl.float32)
        low = (left if KEEP else gl.where(marks.load(BY_TOKEN) > 0, left, 0.0)).to(gl.bfloat16)
    return high, low


@gluon.jit
def _remembered(reach_ptr, step, count):  # type: ignore[no-untyped-def]
    """`remembered` of tiles/pieces.py."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    begin = 0
    reaches, worst = 0.0, 0.0
    for i in range(0, count, 128):
        at = count - 1 - i - gl.arange(0, 128, layout=layout)
        reach = gl.load(reach_ptr + at.to(gl.int64) * step, mask=at >= 0, other=0.0)
        sums = reaches + gl.associative_scan(reach, 0, plus)
        begin = gl.maximum(begin, gl.max(gl.where(sums <= FORGOTTEN, at, 0), 0))
        reaches, worst = reaches + gl.sum(reach, 0), gl.maximum(worst, gl.max(reach, 0))
    return begin, gl.where(worst > 2 * UNREAD, float("nan"), 0.0)


@gluon.jit
def _chunk(  # type: ignore[no-untyped-def]
    S, step, tiles, kept, flow, group: gl.constexpr, READS: gl.constexpr, EXACT: gl.constexpr, KEEP: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """The state behind a chunk; READS: what its tokens read is handed on. EXACT: some of its tokens are.

    KEEP: the state before it, and d as two bfloat16, go to memory as the outputs do, by a warp of these four.
    """
    turn, gone, scale, line, t0 = step
    full, empty, _span, _start = flow
    q_tiles, k_tiles, v_tiles, X_tiles, A_tiles, rows, marks, S_tiles, d_tiles, made = tiles
    at = turn % STAGES
    mbarrier.wait(full.index(at), turn // STAGES & 1)
    v = v_tiles.index(v_tiles.shape[0] // STAGES * at + group).permute((1, 0))
    X, X_lost = X_tiles.index(2 * at).permute((1, 0)), X_tiles.index(2 * at + 1).permute((1, 0))
    none = gl.zeros([HALF, CHUNK], gl.float32, BY_TOKEN)
    read, o = none, none
    for i in gl.static_range(TILES):
        operand = gl.convert_layout(S[i].to(gl.bfloat16), OF_TOKENS)
        k = k_tiles.index(TILES * at + i).permute((1, 0))
        read = warpgroup_mma(operand, k, read, use_acc=i > 0, is_async=True)
        if READS:
            q = q_tiles.index(TILES * at + i).permute((1, 0))
            o = warpgroup_mma(operand, q, o, use_acc=i > 0, is_async=True)
    if made is not None:  # sooner than A is wanted, as a wait takes its time; who is two turns behind, waits for ever
        mbarrier.wait(made.index(at), turn // STAGES & 1)
    if KEEP and READS:
        tma.store_wait(0)
        S_tiles.index(0).permute((1, 0)).store(S[0].to(gl.bfloat16))
    if TILES == 1:
        value, rise = v.load(BY_TOKEN).to(gl.float32), rows.index(2 * at).load(BY_TOKEN)
    read = warpgroup_mma_wait(1 if READS else 0, deps=[read])
    if TILES > 1:  # no sooner, as registers hold little else than a state
        value, rise = v.load(BY_TOKEN).to(gl.float32), rows.index(2 * at).load(BY_TOKEN)
    high, low = _rounded(value - read * rise, marks.index(at), EXACT, KEEP)
    high, low = gl.convert_layout(high, OF_TOKENS), gl.convert_layout(low, OF_TOKENS)
    d = none
    if EXACT:
        d = warpgroup_mma(low, X, d, use_acc=False, is_async=True)
        d = warpgroup_mma(high, X_lost, d, is_async=True)
    d = warpgroup_mma(high, X, d, use_acc=EXACT, is_async=True)
    S = faded(S, gone, TILES)
    if READS:
        o = warpgroup_mma_wait(3 if EXACT else 1, deps=[o]) * (rows.index(2 * at).load(BY_TOKEN) * scale)
    d = warpgroup_mma_wait(0, deps=[d])
    if READS:
        A, A_lost = A_tiles.index(2 * at).permute((1, 0)), A_tiles.index(2 * at + 1).permute((1, 0))
        high, low = _rounded(d, marks.index(at), EXACT, KEEP)
        left, lost = gl.convert_layout(high, OF_TOKENS), gl.convert_layout(low, OF_TOKENS)
        if EXACT:
            o = warpgroup_mma(lost, A, o, is_async=True)
            o = warpgroup_mma(left, A_lost, o, is_async=True)
        o = warpgroup_mma(left, A, o, is_async=True)
        if KEEP:
            d_tiles.index(0).permute((1, 0)).store(high)
            d_tiles.index(1).permute((1, 0)).store(low)
    of_keys: gl.constexpr = OF_KEYS if k_tiles.shape[2] == 128 else OF_TOKENS
    high, low = _rounded(d * rows.index(2 * at + 1).load(BY_TOKEN), marks.index(at), EXACT, KEEP)
    high, low = gl.convert_layout(high, of_keys), gl.convert_layout(low, of_keys)
    behind = ()
    for i in gl.static_range(TILES):
        k = k_tiles.index(TILES * at + i)
        tile = S[i]
        if EXACT:
            tile = warpgroup_mma(low, k, tile, is_async=True)
        behind += (warpgroup_mma(high, k, tile, is_async=True),)  # type: ignore[assignment]
    if READS:
        o = warpgroup_mma_wait(2 * TILES if EXACT else TILES, deps=[o])
        v.store(o.to(gl.bfloat16))
    S = ()
    for i in gl.static_range(TILES):
        S += (warpgroup_mma_wait(TILES - 1 - i, deps=[behind[i]]),)
    if READS:
        fence_async_shared()
    if KEEP and READS:
        states, errors, v0, value_at, tokens = kept
        async_store(states, [line, v0], S_tiles.index(0))
        async_store(errors, [t0, value_at], d_tiles.index(0))
        async_store(errors, [tokens + t0, value_at], d_tiles.index(1))
    mbarrier.arrive(empty.index(at), count=1)
    return S


@gluon.jit
def _walk(  # type: ignore[no-untyped-def]
    group: gl.constexpr, tiles, memory, these, kept, flow,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """What four warps do: HALF columns from v0 on, or behind those, through the chunks of a piece."""
    state_ptr, state_strides, first_ptr, total_ptr, exact_ptr, final_ptr, lost_ptr = memory
    slow, lost, last, scale, zero, first_line, H, V, v0, rest = these
    _full, _empty, span, start = flow
    begin, own, end = span
    gone = gl.load(total_ptr + begin * H, mask=begin < end, other=0.0)
    exact = has_exact(exact_ptr, begin, H, begin < end, CHUNK, KEEP)
    v0 += group * HALF
    TILE: gl.constexpr = tiles[1].shape[2]
    by_key: gl.constexpr = BY_KEY if TILE == 128 else BY_TOKEN
    v = (v0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, by_key)))[:, None]
    S = ()
    for tile in gl.static_range(TILES):
        c = (tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, by_key)))[None, :]
        first = gl.zeros([HALF, TILE], gl.float32, by_key)
        if state_ptr is not None:
            there = state_ptr + c.to(gl.int64) * state_strides[2] + v.to(gl.int64) * state_strides[3]
            first = gl.load(there).to(gl.float32)
        first = first * gl.where(begin == 0, 1.0, 0.0) + lost
        if first_ptr is not None:  # noqa: SIM102  a constant and a tensor
            if slow:
                first += gl.load(first_ptr + ((v + zero) * (TILES * TILE) + (c + zero)))
        S += (first,)  # type: ignore[assignment]
    for phase in gl.static_range(2):
        first, stop = (begin, own) if phase == 0 else (own, end)
        for i in range(first, stop):
            gone_then = gl.load(total_ptr + (i + 1) * H, mask=i + 1 < end, other=0.0)
            exact_then = has_exact(exact_ptr, i + 1, H, i + 1 < end, CHUNK, KEEP)
            step = i - begin, gone, scale, first_line + i * H * TILES * TILE, start + i * CHUNK
            if KEEP:
                S = _chunk(S, step, tiles, kept, flow, group, phase == 1, True, True, CHUNK, STAGES, TILES)
            elif exact:
                S = _chunk(S, step, tiles, kept, flow, group, phase == 1, True, False, CHUNK, STAGES, TILES)
            else:
                S = _chunk(S, step, tiles, kept, flow, group, phase == 1, False, False, CHUNK, STAGES, TILES)
            gone, exact = gone_then, exact_then
    if KEEP:
        tma.store_wait(0)
        settle(lost_ptr is not None)
    if lost_ptr is not None:
        at, none = v0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, by_key)), S[0] * 0.0  # type: ignore[misc]
        for tile in gl.static_range(1, TILES):
            none += S[tile] * 0.0
        gl.store(lost_ptr + (rest * V + at), gl.where(gl.sum(none, 1) == 0.0, 0, 1))
    if last:
        for tile in gl.static_range(TILES):  # addresses kept from before would cost registers
            c = (tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, by_key)) + zero)[None, :]
            gl.store(final_ptr + (c * V + (v + zero)), S[tile])


@gluon.jit
def _pairs(  # type: ignore[no-untyped-def]
    tiles, these, flow, CHUNK: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr
):
    """What four warps do that make A of each chunk that is read, as `token_chunks_kernel` does, while others walk."""
    q_tiles, k_tiles, _v_tiles, _X_tiles, A_tiles, _rows, _marks, _S_tiles, _d_tiles, made = tiles
    sums_ptr, exact_ptr, H = these
    full, _empty, span, _start = flow
    begin, own, end = span
    t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, BY_TOKEN))
    s = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, BY_TOKEN))
    for i in range(begin, own):
        mbarrier.wait(full.index((i - begin) % STAGES), (i - begin) // STAGES & 1)
        mbarrier.arrive(made.index((i - begin) % STAGES), count=1)
    step = 2 * H * CHUNK
    sums_ptr += own * step
    exact = has_exact(exact_ptr, own, H, own < end, CHUNK, False)
    c_t, c_s = gl.load(sums_ptr + t, mask=own < end, other=0.0), gl.load(sums_ptr + s, mask=own < end, other=0.0)
    by = gl.load(sums_ptr + CHUNK + s, mask=own < end, other=0.0)
    for i in range(own, end):
        at, inside = (i - begin) % STAGES, i + 1 < end
        sums_ptr += step
        exact_then = has_exact(exact_ptr, i + 1, H, inside, CHUNK, False)
        t_then, s_then = gl.load(sums_ptr + t, mask=inside, other=0.0), gl.load(sums_ptr + s, mask=inside, other=0.0)
        by_then = gl.load(sums_ptr + CHUNK + s, mask=inside, other=0.0)
        mbarrier.wait(full.index(at), (i - begin) // STAGES & 1)
        product = gl.zeros([CHUNK, CHUNK], gl.float32, BY_TOKEN)
        for tile in gl.static_range(TILES):
            k = k_tiles.index(TILES * at + tile).permute((1, 0))
            product = warpgroup_mma(q_tiles.index(TILES * at + tile), k, product, use_acc=tile > 0, is_async=True)
        weights = gl.exp2(c_t[:, None] - c_s[None, :])
        product = warpgroup_mma_wait(0, deps=[product])
        A = gl.where(t[:, None] >= s[None, :], product * weights, 0.0) * by[None, :]
        high = A.to(gl.bfloat16)
        A_tiles.index(2 * at).store(high)
        if exact:
            marks = gl.load(exact_ptr + (i * 3 * H * CHUNK - (CHUNK - 1) + t))[:, None]
            A_tiles.index(2 * at + 1).store(gl.where(marks > 0, A - high.to(gl.float32), 0.0).to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(made.index(at), count=1)
        exact, c_t, c_s, by = exact_then, t_then, s_then, by_then


@gluon.jit
def wide_walk_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, products, pairs, sums_ptr, rows_ptr, total_ptr, reach_ptr, slow_ptr, first_ptr, state_ptr,
    offsets_ptr, outputs, final_ptr, states, errors, lost_ptr, arrived_ptr, all_out_ptr, all_errors_ptr, all_states_ptr,
    q_strides, k_strides, v_strides, state_strides, scale, zero, tokens, T, H, R, V, pieces,
    CHUNK: gl.constexpr, BLOCK_K: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, MAPS: gl.constexpr,
    TWICE: gl.constexpr, BESIDE: gl.constexpr,
):  # fmt: skip
    """GROUPS HALF columns of one head's state through one of the `pieces` of a sequence.

    One, without `reach_ptr`; or, TWICE, two that both begin with the sequence (tiles/pieces.py: thirds).
    MAPS: what TMA reads and writes are maps (tiles/maps.py), of all heads; else pointers. With `states` and `errors`,
    maps, a backward is to come: each state and d are kept, all tokens are exact, X and A are two tensors, GROUPS is 1.
    Without `pairs` A is made here, of gates' `sums_ptr` (kernels_triton_triangles.py), GROUPS is 1. BESIDE: a program
    may begin before the last launch has ended (tiles/turns.py).
    """
    K: gl.constexpr = BLOCK_K
    KEEP: gl.constexpr = states is not None
    MAKES: gl.constexpr = pairs is None
    LINES: gl.constexpr = 2 if KEEP else 3
    PRODUCTS: gl.constexpr = 2 if KEEP or MAKES else 4  # of CHUNK columns each, of a token: X, or X and A
    TILE: gl.constexpr = 128 if K == 128 else HALF
    TILES: gl.constexpr = K // TILE
    COLUMNS: gl.constexpr = GROUPS * HALF
    SETTLE: gl.constexpr = lost_ptr is not None
    v0 = gl.program_id(0) % (V // COLUMNS) * COLUMNS
    rest = gl.program_id(0) // (V // COLUMNS)
    h, n, piece = (rest % H).to(gl.int64), (rest // H // pieces).to(gl.int64), rest // H % pieces
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    row, count = gl.to_tensor(b).to(gl.int64), (stop - start + CHUNK - 1) // CHUNK
    first = gl.to_tensor(slot).to(gl.int64) * H + h
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TILES, CHUNK, TILE], OF_TILES)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TILES, CHUNK, TILE], OF_TILES)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, CHUNK, HALF], OF_TILES)
    X_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, CHUNK, CHUNK], OF_TILES)
    A_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, CHUNK, CHUNK], OF_TILES)
    rows = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, CHUNK], OF_LINES)
    marks = gl.allocate_shared_memory(gl.float32, [STAGES, 1, CHUNK], OF_LINES)
    S_tiles, d_tiles, made = None, None, None
    if KEEP:
        S_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, K, HALF], OF_TILES)
        d_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, HALF], OF_TILES)
    if MAKES:
        made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tiles = q_tiles, k_tiles, v_tiles, X_tiles, A_tiles, rows, marks, S_tiles, d_tiles, made
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(full.index(at), count=4)
        mbarrier.init(empty.index(at), count=GROUPS)
        if made is not None:
            mbarrier.init(made.index(at), count=1)
    begin, own, end = 0, 0, count
    lost, slow = 0.0, False
    if BESIDE:
        gdc_wait()
    if TWICE:
        own, end = thirds(piece, count)
    if reach_ptr is not None:
        own, end = share(piece, pieces, count)
        begin, lost = _remembered(reach_ptr + first, H, own)
        if slow_ptr is not None:
            slow = gl.load(slow_ptr + rest) != 0
            begin = gl.where(slow, own, begin)
            first_ptr += rest.to(gl.int64) * K * V
        begin = gl.where((own == end) & (piece < pieces - 1), end, begin)  # without a chunk nobody has anything to do
    total_ptr += first
    rows_ptr += LINES * first * CHUNK
    exact_ptr = rows_ptr + (3 * CHUNK - 1)  # of the last token: where one is exact, it is
    group, key_at, X_at, A_at, value_at = h // R, 0, 0, 2 * CHUNK, v0
    if MAKES:
        sums_ptr += 2 * first * CHUNK
    if MAPS:
        start += (row * T).to(gl.int32)
        key_at, value_at = (group * K).to(gl.int32), v0 + (h * V).to(gl.int32)
        X_at = (h * PRODUCTS * CHUNK).to(gl.int32)
        A_at = X_at if KEEP else X_at + 2 * CHUNK
    else:
        queries += row * q_strides[0] + group * q_strides[2]
        keys += row * k_strides[0] + group * k_strides[2]
        values += row * v_strides[0] + h * v_strides[2]
        products += PRODUCTS * (row * T * H + h) * CHUNK
        outputs += (row * T * H + h) * V
    if state_ptr is not None:
        state_ptr += n * state_strides[0] + h * state_strides[1]
    last, span = (piece == pieces - 1) & present(final_ptr), (begin, own, end)
    final_there = final_ptr + (n * H + h) * K * V
    memory = state_ptr, state_strides, first_ptr, total_ptr, exact_ptr, final_there, lost_ptr
    told = slow, lost, last, scale, zero, (first * K).to(gl.int32), H, V, v0, rest
    kept = states, errors, v0, value_at, tokens
    of_keys = keys, k_strides[1], stop, key_at, k_tiles
    of_values = values, v_strides[1], outputs, stop, H, V, value_at, v_tiles
    of_products = products, pairs, exact_ptr, stop, X_at, A_at, PRODUCTS * H * CHUNK, H, X_tiles, A_tiles
    of_queries = queries, q_strides[1], rows_ptr, exact_ptr, stop, key_at, H, q_tiles, rows, marks
    flow = full, empty, span, start
    SPARE: gl.constexpr = 40 if K == 64 else 24  # registers of a thread that loads: the others have what is left
    if MAKES:
        gl.warp_specialize(
            [
                (_walk, (gl.constexpr(0), tiles, memory, told, kept, flow, CHUNK, STAGES, TILES, KEEP)),
                (_pairs, (tiles, (sums_ptr, exact_ptr, H), flow, CHUNK, STAGES, TILES)),
                (load_keys, (of_keys, flow, CHUNK, STAGES, MAPS)),
                (load_values_and_store, (of_values, flow, CHUNK, STAGES, MAPS, SETTLE)),
                (load_products, (of_products, flow, CHUNK, STAGES, MAPS, KEEP)),
                (load_queries, (of_queries, flow, CHUNK, STAGES, MAPS, KEEP)),
            ],
            [4, 1, 1, 1, 1],
            [168, 40, 40, 40, 40],
        )
    elif GROUPS == 1:
        gl.warp_specialize(
            [
                (_walk, (gl.constexpr(0), tiles, memory, told, kept, flow, CHUNK, STAGES, TILES, KEEP)),
                (load_keys, (of_keys, flow, CHUNK, STAGES, MAPS)),
                (load_values_and_store, (of_values, flow, CHUNK, STAGES, MAPS, SETTLE)),
                (load_products, (of_products, flow, CHUNK, STAGES, MAPS, KEEP)),
                (load_queries, (of_queries, flow, CHUNK, STAGES, MAPS, KEEP)),
            ],
            [1, 1, 1, 1],
            [40, 40, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (gl.constexpr(0), tiles, memory, told, kept, flow, CHUNK, STAGES, TILES, KEEP)),
                (_walk, (gl.constexpr(1), tiles, memory, told, kept, flow, CHUNK, STAGES, TILES, KEEP)),
                (load_keys, (of_keys, flow, CHUNK, STAGES, MAPS)),
                (load_values_and_store, (of_values, flow, CHUNK, STAGES, MAPS, SETTLE)),
                (load_products, (of_products, flow, CHUNK, STAGES, MAPS, KEEP)),
                (load_queries, (of_queries, flow, CHUNK, STAGES, MAPS, KEEP)),
            ],
            [4, 1, 1, 1, 1],
            [252 - SPARE // 2, SPARE, SPARE, SPARE, SPARE],
        )
    if lost_ptr is not None:  # all from the program's number again: kept from before it would cost registers
        index = gl.program_id(0) + zero
        block = index % (V // COLUMNS)
        v = block * COLUMNS + gl.arange(0, COLUMNS, layout=gl.BlockedLayout([1], [32], [4], [0]))
        spread_lost(
            lost_ptr, arrived_ptr, all_out_ptr, final_ptr, all_errors_ptr, all_states_ptr, offsets_ptr, v, block,
            index // (V // COLUMNS), gl.to_tensor(tokens).to(gl.int64) * H * V, T, H, K, V, pieces, CHUNK,
        )  # fmt: skip


def walk(columns: int, twice: bool) -> Callable[..., None]:
    """`forward` of kernels_triton_token_walks.py by so many columns a program, as `wide` says there.

    `twice`: as `twice` of kernels_triton_token_joins.py says, each sequence, which is one piece, by two programs.
    """
    return partial(_forward, columns, twice)


def _forward(
    columns: int, twice: bool, call: Any, parts: Any, made: tuple[Tensor, Tensor | None, Any], pieces: int,
    lost: Tensor | None, out: Tensor, final: Tensor, begins: Sequence[Tensor | None],
) -> None:  # fmt: skip
    B, T, G, H, K, V, N = call.sizes
    (inverse, products, gated), (slow, first, _) = made, begins
    by_maps = tiles_of(True, True, CHUNK, call.offsets, call.q, call.k, call.v).tma == 2
    by_maps &= reaches(inverse.numel() * inverse.element_size())  # without gradients A may be in it
    half = int(HALF)
    key = K if K == 128 else half

    def there(x: Tensor, rows: int, columns: int) -> Any:
        return map_of(x, x.stride(-3), x.shape[-2] * x.shape[-1], (rows, columns), OF_TILES) if by_maps else x

    X, states, errors, keep = there(inverse, CHUNK, half), None, None, parts is not None
    pairs = None if products is None else there(products, CHUNK, half) if keep else X
    if keep:
        states, errors = map_of(parts.states, V, V, (K, half), OF_TILES), there(parts.errors, CHUNK, half)
    kept = (None, None) if parts is None else (parts.errors, parts.states)
    reach = gated.reach if pieces > 1 else None
    pieces, stages = 2 if twice else pieces, _stages(K, columns, keep)
    launch(
        wide_walk_kernel, (N * H * pieces * (V // columns),),
        there(call.q, CHUNK, key), there(call.k, CHUNK, key), there(call.v, CHUNK, half), X, pairs,
        gated.sums, gated.rows, gated.total, reach, slow, first, call.state, call.offsets,
        there(out, CHUNK, half), final, states, errors,
        *((None,) * 5 if lost is None else (lost, gated.arrived, out, *kept)),
        call.q.stride(), call.k.stride(), call.v.stride(), strides(call.state), call.scale, 0,
        B * T, T, H, H // G, V, pieces,
        config=Config(warps=4, stages=stages), CHUNK=CHUNK, BLOCK_K=K, GROUPS=columns // half, STAGES=stages,
        MAPS=by_maps, TWICE=twice, **dependent_launch(target_of(call.v.device), True),
    )  # fmt: skip


def _stages(K: int, columns: int, keep: bool) -> int:
    """How many chunks shared memory holds besides what is kept of one, in lines of 128 bytes: 222 KiB, and factors."""
    kept = columns * (K + 2 * CHUNK) // 64 if keep else 0
    return 3 if 3 * (2 * K + columns + 4 * CHUNK) + kept <= 1776 else 2
