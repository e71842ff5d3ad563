"""What the delta rule's backward on Hopper has left after its walk, by warps with work of their own.

The equations are those of kernels_triton_tokens.py, letters too; this does both launches of products there as one, so
that nothing is read twice. A program takes one chunk and key head after the other, and of each all heads that read the
key; sums over heads of 128 channels wait in memory, for no warps have registers for them beside a head's own. Four
warps load: each tile when all have left its place, of which every tile has one, or of 64 channels two, so what is
needed first of the next chunk comes while the last of this one is multiplied. Three times four share the work, for none
has registers for all of it; of 64 channels, where one head reads a key, four times four, P_A and P_E apart:

- pairs: P_A and P_E of a head, handed on as two bfloat16 each, and what beta and gates take of them;
- queries: scale rise (do S^T) + P_A k = dq; what the state's decay takes, S dS; and what values tell of gates, v dv;
- keys: fall beta (d dS^T) - rise (dv S^T) + P_A^T q + (P_E + P_E^T) k = dk.
"""

from __future__ import annotations

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

from foci.core.tune import Config, by_tma, launch, strides
from foci.tiles.documents import document_of
from foci.tiles.layouts import BY_KEY, BY_TOKEN, OF_TILES, plus
from foci.tiles.loads import barrier_of, brought, place_of
from foci.tiles.maps import in_line, reaches
from foci.tiles.near import LEAST, LOG2E
from foci.tiles.state import sequence
from foci.tiles.tma import async_load, async_store, map_of

CHUNK: gl.constexpr = gl.constexpr(64)
PARTS: gl.constexpr = gl.constexpr(16)  # of the sum over a state
# Places in shared memory. Barriers are known by them too, V by that of LOW, K by that of Q.
STATE, END, OUT, ERROR, VALUE, REST, LOW, Q, K, V, PAIRS_A, PAIRS_E = (gl.constexpr(place) for place in range(12))
D_Q, D_K = (gl.constexpr(place) for place in (12, 13))  # by which gradients leave
USERS: gl.constexpr = gl.constexpr((2, 2, 2, 2, 3, 1, 2, 3))  # how many of three use what a barrier tells of
USERS_APART: gl.constexpr = gl.constexpr((2, 2, 2, 3, 3, 2, 2, 4))  # of four, P_A and P_E apart
A_THERE, A_USED, A_GONE, E_THERE, E_GONE = (gl.constexpr(what) for what in range(5))  # barriers of what is handed on
LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # of one number a token: each warp has all
ROWS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # of tiles that nothing multiplies
HALF_ROWS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of 64 columns


@gluon.jit
def _place(item, offsets_ptr, sizes, WHOLE: gl.constexpr):  # type: ignore[no-untyped-def]
    """(row of the batch, first token, that of all rows, slot, key head, tokens) of a program's item.

    A slot that is no document's has no token.
    """
    T, N, _items, H, R, _apart = sizes
    slot, group = gl.to_tensor(item) // (H // R), gl.to_tensor(item) % (H // R)
    if offsets_ptr is None:
        count = (T + CHUNK - 1) // CHUNK
        b, first = slot // count, slot % count * CHUNK
        left = CHUNK if WHOLE else gl.minimum(CHUNK, T - first)
    else:
        b, start, stop, own = sequence(offsets_ptr, document_of(offsets_ptr, slot, N, T, CHUNK), T, CHUNK)
        b, first = gl.to_tensor(b), start + (slot - own) * CHUNK
        inside = (slot >= own) & (first < stop)
        first, left = gl.where(inside, first, 0), gl.where(inside, gl.minimum(CHUNK, stop - first), 0)
    return b, first, slot * CHUNK if WHOLE else b * T + first, slot, group, left


@gluon.jit
def _by_token(g_ptr, g_strides, beta_ptr, beta_strides, b, first, h, left):  # type: ignore[no-untyped-def]
    """Of one head's tokens: gates and beta."""
    t = gl.arange(0, CHUNK, layout=LINE)
    b, first, h = b.to(gl.int64), first.to(gl.int64), h.to(gl.int64)
    g_ptr += b * g_strides[0] + first * g_strides[1] + h * g_strides[2]
    beta_ptr += b * beta_strides[0] + first * beta_strides[1] + h * beta_strides[2]
    g = gl.load(g_ptr + t.to(gl.int64) * g_strides[1], mask=t < left, other=0.0).to(gl.float32)
    beta = gl.load(beta_ptr + t.to(gl.int64) * beta_strides[1], mask=t < left, other=0.0).to(gl.float32)
    return g, beta


@gluon.jit
def _weighted(dP, product, g, beta, rows_ptr, apart, left, OWN: gl.constexpr):  # type: ignore[no-untyped-def]
    """beta P, P = W dP of a head's pairs on (OWN) and below the diagonal; to rows what beta and gates take of it."""
    by_row: gl.constexpr = gl.SliceLayout(1, BY_TOKEN)
    by_column: gl.constexpr = gl.SliceLayout(0, BY_TOKEN)
    at = gl.arange(0, CHUNK, layout=by_row)
    t, s = at[:, None], gl.arange(0, CHUNK, layout=by_column)[None, :]
    beta_s = gl.convert_layout(beta, by_column)[None, :]
    sums = gl.associative_scan(gl.where(g < LEAST, LEAST, g) * LOG2E, 0, plus)  # late, as it waits for the gates
    power = gl.convert_layout(sums, by_row)[:, None] - gl.convert_layout(sums, by_column)[None, :]
    below = (t > s) & (t < left)
    seen = (t >= s) & (t < left) if OWN else below
    both = gl.where(seen, dP * gl.exp2(power), 0.0)
    found = both * beta_s
    both *= product
    pairs = gl.where(below, both, 0.0)
    by_columns = gl.convert_layout(gl.sum(pairs, 0), by_row)
    by_gate = gl.sum(pairs * beta_s, 1) - gl.convert_layout(beta, by_row) * by_columns
    if OWN:
        by_columns += gl.sum(gl.where(t == s, both, 0.0), 1)
    gl.store(rows_ptr + at, by_columns)
    gl.store(rows_ptr + apart + at, by_gate)
    return found


@gluon.jit
def _load(there, tiles, bars, offsets_ptr, sizes, tokens, WHOLE: gl.constexpr, PLACES: gl.constexpr):  # type: ignore[no-untyped-def]
    """What those who load do, in the order in which it is wanted."""
    q_there, k_there, v_there, do_there, dv_there, low_there, d_there, S_there, dS_there = there
    full, _ = bars
    _T, _N, items, H, R, _apart = sizes
    WIDTH: gl.constexpr = tiles[Q].shape[2]
    i, turn = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _b, _first, t0, slot, group, _left = _place(item, offsets_ptr, sizes, WHOLE)
        for r in range(R):
            h = group * R + r
            c, line = h * WIDTH, (slot * H + h) * WIDTH
            brought(S_there, [line, 0], STATE, tiles, bars, turn, 1, PLACES)
            brought(do_there, [t0, c], OUT, tiles, bars, turn, 1, PLACES)
            brought(d_there, [t0, c], ERROR, tiles, bars, turn, 1, PLACES)
            brought(dS_there, [line, 0], END, tiles, bars, turn, 1, PLACES)
            if r == 0:
                brought(q_there, [t0, group * WIDTH], Q, tiles, bars, i, 2, PLACES)
                own = i % PLACES
                async_load(k_there, [t0, group * WIDTH], barrier_of(full, Q, own, PLACES), tiles[K].index(own))
            brought(d_there, [tokens + t0, c], REST, tiles, bars, turn, 1, PLACES)
            brought(dv_there, [t0, c], VALUE, tiles, bars, turn, 1, PLACES)
            brought(low_there, [t0, c], LOW, tiles, bars, turn, 2, PLACES)
            own = turn % PLACES
            async_load(v_there, [t0, c], barrier_of(full, LOW, own, PLACES), tiles[V].index(own))
            turn += 1
        i += 1  # noqa: SIM113  what enumerates is Python's


@gluon.jit
def _pairs(  # type: ignore[no-untyped-def]
    these, offsets_ptr, sizes, WHOLE: gl.constexpr, PLACES: gl.constexpr, READ: gl.constexpr, ERASED: gl.constexpr
):
    """What four warps do: P_A (READ) and P_E (ERASED), for both others to multiply."""
    tiles, bars, handed, g_ptr, g_strides, beta_ptr, beta_strides, rows_ptr, scale, zero = these
    full, empty = bars
    _T, _N, items, H, R, apart = sizes
    apart = gl.to_tensor(apart).to(gl.int64)
    by_row: gl.constexpr = ROWS if tiles[Q].shape[2] == 128 else HALF_ROWS
    i, turn = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, first, _t0, slot, group, left = _place(item, offsets_ptr, sizes, WHOLE)
        for r in range(R):
            at, key = place_of(turn, zero, PLACES), place_of(i, zero, PLACES)
            do, d, dv = tiles[OUT].index(at), tiles[ERROR].index(at), tiles[VALUE].index(at)
            rest, low = tiles[REST].index(at), tiles[LOW].index(at)
            q, k = tiles[Q].index(key), tiles[K].index(key)
            A, E = tiles[PAIRS_A].index(turn * zero), tiles[PAIRS_E].index(turn * zero)
            h, parity, again = group * R + r, turn // PLACES & 1, turn & 1
            g, beta = _by_token(g_ptr, g_strides, beta_ptr, beta_strides, b, first, h, left)
            rows = rows_ptr + (slot * H + h).to(gl.int64) * CHUNK
            none = gl.zeros([CHUNK, CHUNK], gl.float32, BY_TOKEN)
            if READ:
                mbarrier.wait(barrier_of(full, OUT, at, PLACES), parity)
            mbarrier.wait(barrier_of(full, Q, key, PLACES), i // PLACES & 1)
            mbarrier.wait(barrier_of(full, REST, at, PLACES), parity)
            if READ:
                product = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
                dP = warpgroup_mma(do, rest.permute((1, 0)), none, use_acc=False, is_async=True)
                mbarrier.wait(barrier_of(full, ERROR, at, PLACES), parity)
                dP = warpgroup_mma(do, d.permute((1, 0)), dP, is_async=True)
                dP, product = warpgroup_mma_wait(0, deps=[dP, product])
                mbarrier.arrive(barrier_of(empty, OUT, at, PLACES), count=1)
                found = _weighted(dP, product * scale, g, beta, rows, apart, left, True) * scale
                mbarrier.wait(handed.index(A_GONE), again ^ 1)
                _handed_on(found, A)
                if not WHOLE:  # noqa: SIM102  a constant and a tensor
                    if left < CHUNK:  # tokens of who comes next, which nothing that is multiplied by 0 may see
                        inside = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, by_row))[:, None] < left
                        q.store(gl.where(inside, q.load(by_row).to(gl.float32), 0.0).to(gl.bfloat16))
                        k.store(gl.where(inside, k.load(by_row).to(gl.float32), 0.0).to(gl.bfloat16))
                fence_async_shared()
                mbarrier.arrive(handed.index(A_THERE), count=1)
            if ERASED:
                mbarrier.wait(barrier_of(full, ERROR, at, PLACES), parity)
                mbarrier.wait(barrier_of(full, VALUE, at, PLACES), parity)
                mbarrier.wait(barrier_of(full, LOW, at, PLACES), parity)
                product = warpgroup_mma(k, k.permute((1, 0)), none, use_acc=False, is_async=True)
                dP = warpgroup_mma(dv, rest.permute((1, 0)), none, use_acc=False, is_async=True)
                dP = warpgroup_mma(low, d.permute((1, 0)), dP, is_async=True)
                dP = warpgroup_mma(dv, d.permute((1, 0)), dP, is_async=True)
                dP, product = warpgroup_mma_wait(0, deps=[dP, product])
                mbarrier.arrive(barrier_of(empty, VALUE, at, PLACES), count=1)
                mbarrier.arrive(barrier_of(empty, LOW, at, PLACES), count=1)
            mbarrier.arrive(barrier_of(empty, REST, at, PLACES), count=1)
            mbarrier.arrive(barrier_of(empty, ERROR, at, PLACES), count=1)
            if ERASED:
                t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, BY_TOKEN))
                s = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, BY_TOKEN))
                gl.store(rows + 4 * apart + t, gl.sum(gl.where(t[:, None] == s[None, :], dP, 0.0), 1))
                found = -_weighted(dP, -product, g, beta, rows + 2 * apart, apart, left, False)
                mbarrier.wait(handed.index(E_GONE), again ^ 1)
                _handed_on(found, E)
                fence_async_shared()
                mbarrier.arrive(handed.index(E_THERE), count=1)
            turn += 1
        mbarrier.arrive(barrier_of(empty, Q, place_of(i, zero, PLACES), PLACES), count=1)
        i += 1  # noqa: SIM113  what enumerates is Python's


@gluon.jit
def _handed_on(x, tile):  # type: ignore[no-untyped-def]
    """x [CHUNK,CHUNK] rounded, and beside it what that left."""
    high = x.to(gl.bfloat16)
    tile.slice(0, CHUNK, 1).store(high)
    tile.slice(CHUNK, CHUNK, 1).store((x - high.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _waiting(sums_ptr, which, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where a program's sum over heads waits while the next head's products have the registers.

    Each thread reads what it has written, mostly from L2.
    """
    t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return sums_ptr + (2 * gl.program_id(0) + which) * (CHUNK * WIDTH) + (t * WIDTH + c)


@gluon.jit
def _queries(these, sums_ptr, offsets_ptr, sizes, WHOLE: gl.constexpr, PLACES: gl.constexpr):  # type: ignore[no-untyped-def]
    """What four do: dq, and what the state's decay and values tell of gates."""
    tiles, bars, handed, out_there, gated_ptr, rows_ptr, totals_ptr, d_q_ptr, scale, zero = these
    full, empty = bars
    _T, _N, items, H, R, apart = sizes
    apart = gl.to_tensor(apart).to(gl.int64)
    WIDTH: gl.constexpr = tiles[Q].shape[2]
    by_key: gl.constexpr = BY_KEY if WIDTH == 128 else BY_TOKEN
    by_row: gl.constexpr = ROWS if WIDTH == 128 else HALF_ROWS
    token, part = (
        gl.arange(0, CHUNK, layout=gl.SliceLayout(1, by_key)),
        gl.arange(0, PARTS, layout=gl.SliceLayout(1, by_row)),
    )
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, by_row))
    i, turn = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _b, _first, t0, slot, group, left = _place(item, offsets_ptr, sizes, WHOLE)
        d_q = gl.zeros([CHUNK, WIDTH], gl.float32, by_key)
        for r in range(R):
            at, key = place_of(turn, zero, PLACES), place_of(i, zero, PLACES)
            S, dS, do = tiles[STATE].index(at), tiles[END].index(at), tiles[OUT].index(at)
            dv, low = tiles[VALUE].index(at), tiles[LOW].index(at)
            q, k, v = tiles[Q].index(key), tiles[K].index(key), tiles[V].index(at)
            A = tiles[PAIRS_A].index(turn * zero)
            h, parity, again = group * R + r, turn // PLACES & 1, turn & 1
            line = (slot * H + h).to(gl.int64)
            rise = gl.load(gated_ptr + line * 2 * CHUNK + token)
            rows = rows_ptr + line * CHUNK
            mbarrier.wait(barrier_of(full, STATE, at, PLACES), parity)
            mbarrier.wait(barrier_of(full, OUT, at, PLACES), parity)
            none = gl.zeros([CHUNK, WIDTH], gl.float32, by_key)
            read = warpgroup_mma(do, S.permute((1, 0)), none, use_acc=False, is_async=True)
            tma.store_wait(0)
            mbarrier.arrive(handed.index(A_GONE), count=1, pred=turn > 0)
            mbarrier.wait(barrier_of(full, END, at, PLACES), parity)
            total = gl.zeros([PARTS, WIDTH], gl.float32, by_row)
            for j in gl.static_range(WIDTH // PARTS):
                one, other = S.slice(j * PARTS, PARTS).load(by_row), dS.slice(j * PARTS, PARTS).load(by_row)
                total += one.to(gl.float32) * other.to(gl.float32)
            gl.store(totals_ptr + line * PARTS + part, gl.sum(total, 1))
            mbarrier.wait(barrier_of(full, Q, key, PLACES), i // PLACES & 1)
            read = warpgroup_mma_wait(0, deps=[read]) * scale
            mbarrier.arrive(barrier_of(empty, STATE, at, PLACES), count=1)
            mbarrier.arrive(barrier_of(empty, END, at, PLACES), count=1)
            mbarrier.arrive(barrier_of(empty, OUT, at, PLACES), count=1)
            gl.store(rows + 7 * apart + token, gl.sum(q.load(by_key).to(gl.float32) * read, 1))
            if sums_ptr is None:
                d_q += read * rise[:, None]
            else:
                d_q = read * rise[:, None] + gl.load(_waiting(sums_ptr, 0, WIDTH, by_key), mask=r > 0, other=0.0)
            mbarrier.wait(barrier_of(full, VALUE, at, PLACES), parity)
            mbarrier.wait(barrier_of(full, LOW, at, PLACES), parity)
            by_value = dv.load(by_row).to(gl.float32) + low.load(by_row).to(gl.float32)
            gl.store(rows + 5 * apart + row, gl.sum(v.load(by_row).to(gl.float32) * by_value, 1))
            mbarrier.arrive(barrier_of(empty, VALUE, at, PLACES), count=1)
            mbarrier.arrive(barrier_of(empty, LOW, at, PLACES), count=1)
            mbarrier.wait(handed.index(A_THERE), again)
            d_q = warpgroup_mma(A.slice(CHUNK, CHUNK, 1), k, d_q, is_async=True)
            d_q = warpgroup_mma(A.slice(0, CHUNK, 1), k, d_q, is_async=True)
            d_q = warpgroup_mma_wait(0, deps=[d_q])
            if sums_ptr is not None:
                gl.store(_waiting(sums_ptr, 0, WIDTH, by_key), d_q, mask=r < R - 1)
            mbarrier.wait(handed.index(A_USED), again)
            turn += 1
        mbarrier.arrive(barrier_of(empty, Q, place_of(i, zero, PLACES), PLACES), count=1)
        _stored(d_q, tiles[D_Q].index(turn * zero), out_there, d_q_ptr, t0, group, left, H // R, zero, WHOLE)
        i += 1  # noqa: SIM113  what enumerates is Python's
    tma.store_wait(0)


@gluon.jit
def _stored(x, tile, there, ptr, t0, group, left, G, zero, WHOLE: gl.constexpr):  # type: ignore[no-untyped-def]
    """A gradient to memory, by TMA or, of a chunk that ends early, token by token."""
    WIDTH: gl.constexpr = tile.shape[1]
    by_row: gl.constexpr = ROWS if WIDTH == 128 else HALF_ROWS
    tile.store(x.to(gl.bfloat16))
    fence_async_shared()
    if WHOLE:  # noqa: SIM114  a constant and a tensor
        async_store(there, [t0, group * WIDTH], tile)
    elif left == CHUNK:
        async_store(there, [t0, group * WIDTH], tile)
    else:
        t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, by_row))[:, None]
        c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, by_row))[None, :]
        to = ptr + (t0.to(gl.int64) * G + group) * WIDTH
        gl.store(to + ((t + zero) * G * WIDTH + c), tile.load(by_row), mask=t < left)


@gluon.jit
def _keys(these, sums_ptr, offsets_ptr, sizes, WHOLE: gl.constexpr, PLACES: gl.constexpr):  # type: ignore[no-untyped-def]
    """What four do: dk."""
    tiles, bars, handed, out_there, gated_ptr, rows_ptr, d_k_ptr, zero = these
    full, empty = bars
    _T, _N, items, H, R, apart = sizes
    apart = gl.to_tensor(apart).to(gl.int64)
    WIDTH: gl.constexpr = tiles[Q].shape[2]
    by_key: gl.constexpr = BY_KEY if WIDTH == 128 else BY_TOKEN
    token = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, by_key))
    i, turn = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _b, _first, t0, slot, group, left = _place(item, offsets_ptr, sizes, WHOLE)
        d_k = gl.zeros([CHUNK, WIDTH], gl.float32, by_key)
        for r in range(R):
            at, key = place_of(turn, zero, PLACES), place_of(i, zero, PLACES)
            S, dS, d, dv = tiles[STATE].index(at), tiles[END].index(at), tiles[ERROR].index(at), tiles[VALUE].index(at)
            q, k = tiles[Q].index(key), tiles[K].index(key)
            A, E = tiles[PAIRS_A].index(turn * zero), tiles[PAIRS_E].index(turn * zero)
            h, parity, again = group * R + r, turn // PLACES & 1, turn & 1
            line = (slot * H + h).to(gl.int64)
            gated = gated_ptr + line * 2 * CHUNK + token
            rise, write = gl.load(gated), gl.load(gated + CHUNK)
            rows = rows_ptr + line * CHUNK
            none = gl.zeros([CHUNK, WIDTH], gl.float32, by_key)
            mbarrier.wait(barrier_of(full, ERROR, at, PLACES), parity)
            mbarrier.wait(barrier_of(full, END, at, PLACES), parity)
            written = warpgroup_mma(d, dS.permute((1, 0)), none, use_acc=False, is_async=True)
            tma.store_wait(0)
            mbarrier.arrive(handed.index(E_GONE), count=1, pred=turn > 0)
            mbarrier.wait(barrier_of(full, Q, key, PLACES), i // PLACES & 1)
            written = warpgroup_mma_wait(0, deps=[written])
            mbarrier.arrive(barrier_of(empty, END, at, PLACES), count=1)
            mbarrier.arrive(barrier_of(empty, ERROR, at, PLACES), count=1)
            gl.store(rows + 6 * apart + token, gl.sum(k.load(by_key).to(gl.float32) * written, 1))
            if sums_ptr is None:
                d_k += written * write[:, None]
            else:
                d_k = written * write[:, None]
            mbarrier.wait(barrier_of(full, VALUE, at, PLACES), parity)
            mbarrier.wait(barrier_of(full, STATE, at, PLACES), parity)
            erased = warpgroup_mma(dv, S.permute((1, 0)), none, use_acc=False, is_async=True)
            erased = warpgroup_mma_wait(0, deps=[erased])
            mbarrier.arrive(barrier_of(empty, STATE, at, PLACES), count=1)
            mbarrier.arrive(barrier_of(empty, VALUE, at, PLACES), count=1)
            gl.store(rows + 8 * apart + token, gl.sum(k.load(by_key).to(gl.float32) * erased, 1))
            d_k -= erased * rise[:, None]
            if sums_ptr is not None:
                d_k += gl.load(_waiting(sums_ptr, 1, WIDTH, by_key), mask=r > 0, other=0.0)
            mbarrier.wait(handed.index(A_THERE), again)
            d_k = warpgroup_mma(A.slice(CHUNK, CHUNK, 1).permute((1, 0)), q, d_k, is_async=True)
            d_k = warpgroup_mma(A.slice(0, CHUNK, 1).permute((1, 0)), q, d_k, is_async=True)
            mbarrier.wait(handed.index(E_THERE), again)
            d_k = warpgroup_mma_wait(0, deps=[d_k])
            mbarrier.arrive(handed.index(A_USED), count=1)
            d_k = warpgroup_mma(E.slice(CHUNK, CHUNK, 1), k, d_k, is_async=True)
            d_k = warpgroup_mma(E.slice(0, CHUNK, 1), k, d_k, is_async=True)
            d_k = warpgroup_mma(E.slice(CHUNK, CHUNK, 1).permute((1, 0)), k, d_k, is_async=True)
            d_k = warpgroup_mma(E.slice(0, CHUNK, 1).permute((1, 0)), k, d_k, is_async=True)
            d_k = warpgroup_mma_wait(0, deps=[d_k])
            if sums_ptr is not None:
                gl.store(_waiting(sums_ptr, 1, WIDTH, by_key), d_k, mask=r < R - 1)
            turn += 1
        mbarrier.arrive(barrier_of(empty, Q, place_of(i, zero, PLACES), PLACES), count=1)
        _stored(d_k, tiles[D_K].index(turn * zero), out_there, d_k_ptr, t0, group, left, H // R, zero, WHOLE)
        i += 1  # noqa: SIM113  what enumerates is Python's
    tma.store_wait(0)


@gluon.jit
def side_and_pairs_kernel(  # type: ignore[no-untyped-def]
    q_there, k_there, v_there, beta_ptr, g_ptr, do_there, dv_there, low_there, d_there, S_there, dS_there, gated_ptr,
    offsets_ptr, sums_ptr, rows_ptr, totals_ptr, d_q_there, d_q_ptr, d_k_there, d_k_ptr,
    beta_strides, g_strides, scale, zero, T, N, items, H, R, tokens, apart,
    WIDTH: gl.constexpr, WHOLE: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """Chunks and key heads, `items` of them, one after the other. WHOLE: no chunk ends early. ALONE: R is 1.

    WIDTH: K and V, 64 or 128. In sums [programs,2,CHUNK,WIDTH], if given, sums over heads wait. Gradients go to d_q and
    d_k [B,T,G,WIDTH], and to rows [9,slots,H,CHUNK] and totals [slots,H,PARTS] what kernels_triton_tokens.py:
    gates_kernel reads there.
    """
    there = q_there, k_there, v_there, do_there, dv_there, low_there, d_there, S_there, dS_there
    PLACES: gl.constexpr = 2 if WIDTH == 64 else 1  # of each tile that is brought
    APART: gl.constexpr = WIDTH == 64 and ALONE
    tiles = ()
    for _ in gl.static_range(2):
        tiles += (gl.allocate_shared_memory(gl.bfloat16, [PLACES, WIDTH, WIDTH], OF_TILES),)  # type: ignore[assignment]
    for _ in gl.static_range(8):
        tiles += (gl.allocate_shared_memory(gl.bfloat16, [PLACES, CHUNK, WIDTH], OF_TILES),)  # type: ignore[assignment]
    for _ in gl.static_range(2):
        tiles += (gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK, 2 * CHUNK], OF_TILES),)  # type: ignore[assignment]
    for each in gl.static_range(2):  # a gradient leaves by the place of the pairs it was made of, where that is as wide
        if WIDTH == 2 * CHUNK:
            tiles += (tiles[PAIRS_A + each],)  # type: ignore[assignment]
        else:
            tiles += (gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK, WIDTH], OF_TILES),)  # type: ignore[assignment]
    places: gl.constexpr = PLACES * len(USERS)
    full = gl.allocate_shared_memory(gl.int64, [places, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [places, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(places):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=(USERS_APART if APART else USERS)[place // PLACES])
    for place in gl.static_range(5):
        mbarrier.init(handed.index(place), count=1)
    bars, sizes = (full, empty), (T, N, items, H, R, apart)
    pairs = tiles, bars, handed, g_ptr, g_strides, beta_ptr, beta_strides, rows_ptr, scale, zero
    queries = tiles, bars, handed, d_q_there, gated_ptr, rows_ptr, totals_ptr, d_q_ptr, scale, zero
    keys = tiles, bars, handed, d_k_there, gated_ptr, rows_ptr, d_k_ptr, zero
    WAITS: gl.constexpr = WHOLE and sums_ptr is not None
    QUERIES: gl.constexpr = 128 if WIDTH == 64 else 152 if WAITS else 144  # registers; keys have what is left
    PAIRS: gl.constexpr = 208 if WIDTH == 64 else 168 if WAITS else 176
    if APART:
        gl.warp_specialize(
            [
                (_keys, (keys, sums_ptr, offsets_ptr, sizes, WHOLE, PLACES)),
                (_queries, (queries, sums_ptr, offsets_ptr, sizes, WHOLE, PLACES)),
                (_pairs, (pairs, offsets_ptr, sizes, WHOLE, PLACES, gl.constexpr(True), gl.constexpr(False))),
                (_pairs, (pairs, offsets_ptr, sizes, WHOLE, PLACES, gl.constexpr(False), gl.constexpr(True))),
                (_load, (there, tiles, bars, offsets_ptr, sizes, tokens, WHOLE, PLACES)),
            ],
            [4, 4, 4, 1],
            [96, 128, 128, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_keys, (keys, sums_ptr, offsets_ptr, sizes, WHOLE, PLACES)),
                (_queries, (queries, sums_ptr, offsets_ptr, sizes, WHOLE, PLACES)),
                (_pairs, (pairs, offsets_ptr, sizes, WHOLE, PLACES, gl.constexpr(True), gl.constexpr(True))),
                (_load, (there, tiles, bars, offsets_ptr, sizes, tokens, WHOLE, PLACES)),
            ],
            [4, 4, 4],
            [QUERIES, PAIRS, 24],
        )


def takes(problem: Any, d_out: Tensor, dv: Any) -> bool:
    """Whether `side_and_pairs` has a backward's last products.

    In bfloat16, heads of 64 or 128 and gates per token; of tensors that are one matrix of all heads; and of documents
    of four chunks in the mean, as each may leave a slot that is nobody's, and is walked as well.
    """
    call, (d_q, d_k, *_) = problem.call, problem.found
    _, T, _, H, K, V, N = call.sizes
    if call.offsets is not None and 4 * N * int(CHUNK) > T:
        return False
    lines, rows = problem.chunks * H * K, call.v.numel() // V
    if problem.target.arch != 90 or not isinstance(dv, tuple) or problem.g is None or d_q is None or d_k is None:
        return False
    given, most = (call.q, call.k, call.v, d_out), max(lines, 2 * rows)
    if K not in (64, 128) or V != K or call.erase is not None or lines >= 1 << 31 or not reaches(2 * most * V):
        return False
    return all(by_tma(x) and in_line(x) and reaches(2 * x.shape[0] * T * x.stride(1)) for x in given)


def side_and_pairs(
    problem: Any, kept: Any, d_out: Tensor, dv: tuple[Tensor, Tensor], behind: Tensor
) -> tuple[Tensor, Tensor]:
    """dq and dk; (rows, totals [slots,H,PARTS]) for `gates_kernel` of kernels_triton_tokens.py."""
    call, (d_q, d_k, *_) = problem.call, problem.found
    B, T, G, H, _, V, N = call.sizes
    states, errors, gated = kept[0], kept[1], kept[7]
    totals = gated.new_empty(*states.shape[:2], int(PARTS))
    rows = gated.new_empty(9, *states.shape[:2], int(CHUNK))
    items = len(states) * G
    programs = min(items, problem.target.processors)
    sums = gated.new_empty(programs, 2, int(CHUNK), V) if G < H and V == 128 else None
    q, k, v, do, dv_there, low, d, d_q_there, d_k_there = (
        map_of(x, x.stride(-3), x.shape[-2] * V, (int(CHUNK), V), OF_TILES)
        for x in (call.q, call.k, call.v, d_out, *dv, errors, d_q, d_k)
    )
    S, dS = (map_of(x, V, V, (V, V), OF_TILES) for x in (states, behind))
    launch(
        side_and_pairs_kernel, (programs,),
        q, k, v, call.beta, problem.g, do, dv_there, low, d, S, dS, gated,
        call.offsets, sums, rows, totals, d_q_there, d_q, d_k_there, d_k,
        call.beta.stride(), strides(problem.g), call.scale, 0, T, N, items, H, H // G, B * T, rows[0].numel(),
        config=Config(warps=4, stages=1), WIDTH=V, WHOLE=call.offsets is None and T % int(CHUNK) == 0, ALONE=G == H,
    )  # fmt: skip
    return rows, totals
