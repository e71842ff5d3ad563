"""The delta rule's walk backwards on Hopper, by warps with work of their own.

What `token_walk_back_kernel` does (kernels_triton_token_walks.py: equations, letters), of whole sequences: 64 columns
of dS, last chunk to first. In a chunk

    dd^T = do^T A + dS^T k^T (fall beta);  dv^T = dd^T X;  dS^T <- total dS^T + (scale rise do)^T q - (rise dv)^T k

wait for each other, and are left to four warps. One loads, as far ahead as shared memory has places. Four more go ahead
of those that walk and make what needs no state, in the places of what it is made of: do^T A, and scale rise do.

The four that walk are what a chunk takes, by instructions more than by products. So what is kept of dv is rounded while
the next chunk's products run, and of a left operand that is two, the first, its digits cut off, is multiplied while
what that leaves is made.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from foci.core.tune import Config, launch, strides
from foci.tiles.layouts import BY_KEY, BY_TOKEN, OF_KEYS, OF_LINES, OF_SUMS, OF_TILES, OF_TOKENS
from foci.tiles.loads import HALF, in_float32
from foci.tiles.maps import tiles_of
from foci.tiles.state import in_two, nearest_in_two
from foci.tiles.tma import async_load, async_store, map_of

CHUNK: gl.constexpr = gl.constexpr(64)


@gluon.jit
def _load(there, at, tiles, bars, count, H, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """What the warp that loads does: chunks from the last one on, when those that walk have left the place."""
    q_there, k_there, do_there, X_there, A_there, rows_there = there
    start, key_at, value_at, pair_at, line = at
    q_tiles, k_tiles, do_tiles, X_tiles, A_tiles, rows, _S_tiles, _dv_tiles = tiles
    full, empty, _made = bars
    K: gl.constexpr = k_tiles.shape[2]
    for turn in range(count):
        own, chunk = turn % STAGES, count - 1 - turn
        t0, row, bar = start + chunk * CHUNK, line + 2 * H * chunk, full.index(own)
        mbarrier.wait(empty.index(own), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(bar, 2 * CHUNK * (2 * K + HALF + 4 * CHUNK) + 2 * 4 * CHUNK)
        async_load(do_there, [t0, value_at], bar, do_tiles.index(own))
        async_load(A_there, [t0, pair_at], bar, A_tiles.index(own).slice(0, CHUNK))
        async_load(A_there, [t0, pair_at + CHUNK], bar, A_tiles.index(own).slice(CHUNK, CHUNK))
        async_load(rows_there, [row, 0], bar, rows.index(2 * own))
        async_load(rows_there, [row + 1, 0], bar, rows.index(2 * own + 1))
        async_load(k_there, [t0, key_at], bar, k_tiles.index(own))
        async_load(q_there, [t0, key_at], bar, q_tiles.index(own))
        async_load(X_there, [t0, pair_at], bar, X_tiles.index(2 * own))
        async_load(X_there, [t0, pair_at + CHUNK], bar, X_tiles.index(2 * own + 1))


@gluon.jit
def _ahead(tiles, bars, scale, count, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """What four warps do that need no state: do^T A in float32 in the place of A, scale rise do in that of do."""
    _q_tiles, _k_tiles, do_tiles, _X_tiles, A_tiles, rows, _S_tiles, _dv_tiles = tiles
    full, _empty, made = bars
    for turn in range(count):
        own = turn % STAGES
        mbarrier.wait(full.index(own), turn // STAGES & 1)
        do, A = do_tiles.index(own).permute((1, 0)), A_tiles.index(own)
        dd = gl.zeros([HALF, CHUNK], gl.float32, BY_TOKEN)
        dd = warpgroup_mma(do, A.slice(CHUNK, CHUNK), dd, use_acc=False, is_async=True)
        dd = warpgroup_mma(do, A.slice(0, CHUNK), dd, is_async=True)
        by_read = do.load(BY_TOKEN).to(gl.float32) * (rows.index(2 * own).load(BY_TOKEN) * scale)
        dd = warpgroup_mma_wait(0, deps=[dd])
        do.store(by_read.to(gl.bfloat16))
        in_float32(A, OF_SUMS).store(dd)
        fence_async_shared()
        mbarrier.arrive(made.index(own), count=1)


@gluon.jit
def _kept(dv, tiles, dv_there, low_there, t0, value_at):  # type: ignore[no-untyped-def]
    """dv of a chunk to memory, rounded and what that left; tokens behind the last one are not stored."""
    said, unsaid = nearest_in_two(dv)
    tiles.index(0).permute((1, 0)).store(said)
    tiles.index(1).permute((1, 0)).store(unsaid)
    fence_async_shared()
    async_store(dv_there, [t0, value_at], tiles.index(0))
    async_store(low_there, [t0, value_at], tiles.index(1))


@gluon.jit
def _walk(results, last, at, tiles, bars, sizes, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """What four others do: dS through the chunks. It is kept behind each of them, dv one chunk later."""
    ends, dv_there, low_there, first_ptr = results
    last_ptr, last_strides, total_ptr = last
    start, _key_at, value_at, _pair_at, line = at
    q_tiles, k_tiles, do_tiles, X_tiles, A_tiles, rows, S_tiles, dv_tiles = tiles
    full, empty, made = bars
    tokens, count, H, V, v0, zero = sizes
    K: gl.constexpr = k_tiles.shape[2]
    of_keys: gl.constexpr = OF_KEYS if K == 128 else OF_TOKENS
    by_key: gl.constexpr = BY_KEY if K == 128 else BY_TOKEN
    v = (v0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, by_key)))[:, None]
    c = gl.arange(0, K, layout=gl.SliceLayout(0, by_key))[None, :]
    dS = gl.zeros([HALF, K], gl.float32, by_key)
    if last_ptr is not None:
        there = last_ptr + c.to(gl.int64) * last_strides[2] + v.to(gl.int64) * last_strides[3]
        dS = gl.load(there).to(gl.float32)
    gone = gl.load(total_ptr + (count - 1) * H, mask=count > 0, other=0.0)
    dv, t0, own, phase = gl.zeros([HALF, CHUNK], gl.float32, BY_TOKEN), tokens, 0, 0
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    mbarrier.wait(made.index(0), 0, pred=count > 0)
    for turn in range(count):
        chunk, around = count - 1 - turn, own == STAGES - 1
        gone_then = gl.load(total_ptr + (chunk - 1) * H, mask=chunk > 0, other=0.0)
        q, k, do, A = q_tiles.index(own), k_tiles.index(own), do_tiles.index(own), A_tiles.index(own)
        X, X_lost = X_tiles.index(2 * own), X_tiles.index(2 * own + 1)
        none = gl.zeros([HALF, CHUNK], gl.float32, BY_TOKEN)
        rounded = dS.to(gl.bfloat16)
        operand = gl.convert_layout(rounded, OF_TOKENS)
        read = warpgroup_mma(operand, k.permute((1, 0)), none, use_acc=False, is_async=True)
        dS = warpgroup_mma(do.permute((1, 0)), q, dS * gone, is_async=True)
        tma.store_wait(0)
        S_tiles.index(0).permute((1, 0)).store(rounded)
        rise = rows.index(2 * own).load(BY_TOKEN)
        dd = in_float32(A, OF_SUMS).load(BY_TOKEN)
        read = warpgroup_mma_wait(1, deps=[read])
        high, low = in_two(dd + read * rows.index(2 * own + 1).load(BY_TOKEN))
        high = gl.convert_layout(high, OF_TOKENS)
        found = warpgroup_mma(high, X_lost, none, use_acc=False, is_async=True)
        found = warpgroup_mma(high, X, found, is_async=True)
        found = warpgroup_mma(gl.convert_layout(low, OF_TOKENS), X, found, is_async=True)
        _kept(dv, dv_tiles, dv_there, low_there, t0, value_at)
        async_store(ends, [(line // 2 + chunk * H) * K, v0], S_tiles.index(0))
        dv, dS = warpgroup_mma_wait(0, deps=[found, dS])
        high, low = in_two(dv * -rise)
        dS = warpgroup_mma(gl.convert_layout(high, of_keys), k, dS, is_async=True)
        dS = warpgroup_mma(gl.convert_layout(low, of_keys), k, dS, is_async=True)
        then, phase = gl.where(around, 0, own + 1), gl.where(around, phase ^ 1, phase)
        mbarrier.wait(full.index(then), phase, pred=chunk > 0)
        mbarrier.wait(made.index(then), phase, pred=chunk > 0)
        dS = warpgroup_mma_wait(0, deps=[dS])
        mbarrier.arrive(empty.index(own), count=1)
        own, gone, t0 = then, gone_then, start + chunk * CHUNK
    tma.store_wait(0)
    _kept(dv, dv_tiles, dv_there, low_there, t0, value_at)
    tma.store_wait(0)
    if first_ptr is not None:  # addresses kept from before would cost registers
        gl.store(first_ptr + ((c + zero) * V + (v + zero)), dS)


@gluon.jit
def wide_walk_back_kernel(  # type: ignore[no-untyped-def]
    queries, keys, d_out, inverse, products, rows_there, total_ptr, d_final_ptr, dv_there, low_there, ends, d_state_ptr,
    d_final_strides, scale, zero, tokens, T, H, R, V, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """HALF columns of one head's dS through one sequence of whole chunks, K channels: 64 or 128.

    What TMA reads and writes are maps (tiles/maps.py), of all heads and sequences.
    """
    v0 = gl.program_id(0) % (V // HALF) * HALF
    rest = gl.program_id(0) // (V // HALF)
    h, n, count = rest % H, rest // H, T // CHUNK
    tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, K], OF_TILES),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, K], OF_TILES),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, HALF], OF_TILES),
        gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, CHUNK, CHUNK], OF_TILES),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * CHUNK, CHUNK], OF_TILES),
        gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, CHUNK], OF_LINES),
        gl.allocate_shared_memory(gl.bfloat16, [1, K, HALF], OF_TILES),
        gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, HALF], OF_TILES),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=1)
        mbarrier.init(made.index(place), count=1)
    bars, first = (full, empty, made), n * count * H + h
    if d_final_ptr is not None:
        d_final_ptr += n.to(gl.int64) * d_final_strides[0] + h.to(gl.int64) * d_final_strides[1]
    if d_state_ptr is not None:
        d_state_ptr += rest.to(gl.int64) * K * V
    there = queries, keys, d_out, inverse, products, rows_there
    at = n * T, h // R * K, h * V + v0, h * 2 * CHUNK, 2 * first
    results = ends, dv_there, low_there, d_state_ptr
    last, sizes = (d_final_ptr, d_final_strides, total_ptr + first), (tokens, count, H, V, v0, zero)
    gl.warp_specialize(
        [
            (_walk, (results, last, at, tiles, bars, sizes, STAGES)),
            (_ahead, (tiles, bars, scale, count, STAGES)),
            (_load, (there, at, tiles, bars, count, H, STAGES)),
        ],
        [4, 1],
        [120, 32],
    )


def backward(
    call: Any, kept: Sequence[Tensor], d_out: Tensor, d_final: Tensor | None, results: Sequence[Tensor | None]
) -> None:
    """As `backward` of kernels_triton_token_walks.py, of whole sequences; `kept`: rows, total, A and X."""
    B, T, G, H, K, V, N = call.sizes
    (rows, total, products, inverse), (dv, unsaid, behind, d_state) = kept, results
    chunk, half = int(CHUNK), int(HALF)

    def there(x: Any, width: int) -> Any:
        return map_of(x, x.stride(-3), x.shape[-2] * x.shape[-1], (chunk, width), OF_TILES)

    launch(
        wide_walk_back_kernel, (N * H * (V // half),),
        there(call.q, K), there(call.k, K), there(d_out, half), there(inverse, chunk), there(products, chunk),
        map_of(rows, chunk, chunk, (1, chunk), OF_LINES), total, d_final, there(dv, half), there(unsaid, half),
        map_of(behind, V, V, (K, half), OF_TILES), d_state,
        strides(d_final), call.scale, 0, B * T, T, H, H // G, V,
        config=Config(warps=4, stages=1), K=K, STAGES=2 if K == 128 else 3,
    )  # fmt: skip


def takes(call: Any, d_out: Tensor, by: Any) -> bool:
    """Whether it walks where Triton would walk `by` (ops/delta/pieces.py): sequences of whole chunks, with gates.

    Where Triton walks them whole; where it would cut them, 16 chunks in any case, and 48 in place of two pieces that
    warm up, of which the second is then hardly shorter. `fits` of kernels_triton_token_walks.py says of dtypes and
    strides what is asked there too.
    """
    *_, K, V, _ = call.sizes
    if call.log_decay is None or call.log_decay.shape[3] > 1 or call.erase is not None or K > 128 or V % 64:
        return False
    cut = (by.pieces if by.turned else 1) > 1 or by.cut.tokens > 0
    most = 48 if by.turned and by.pieces == 2 and not by.maps else 16
    few = call.sizes[1] <= most * int(CHUNK)
    return (few or not cut) and tiles_of(True, True, int(CHUNK), call.offsets, call.q, call.k, d_out).tma == 2
