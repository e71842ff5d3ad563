"""The delta rule's walks on Hopper, in bfloat16, gates per token or none: a state turned over, [V,K], in registers.

The equations are those of kernels_triton_forward.py and kernels_triton_backward.py, turned over too:

    d^T = (v^T - S^T e^T rise) X^T;  o^T = S^T q^T (scale rise) + d^T A^T;  S^T <- total S^T + (fall beta d)^T k
    dv^T = (do^T A + dS^T k^T (fall beta)) X;  dS^T <- total dS^T + (scale rise do)^T q - (rise dv)^T e

So whatever one product makes and another takes is its left operand, and stays in registers: what Hopper adds up lies
where it takes a left operand from. The right ones lie in shared memory as TMA has brought them, none of them waits for
a product, and between the products of a chunk, which wait for each other, nothing is stored, fenced or waited for.

What is said first is loaded first: a wait for TMA ends a stretch of code, and in one stretch the assembler fills the
time of products with other work. Stores of one shape have one place in shared memory, and each waits until the last has
left it: they are far apart. Factors per token lie by columns here, where of a load each thread would take 16 addresses:
TMA brings them too, as rows of 64 (kernels_triton_triangles.py: Gated.rows).

Where gates forget, few heads still fill a GPU: a sequence is cut into pieces, walked at once, each of which begins with
the state at its first chunk. What was there some chunks before has a factor of all gates since then, and of each
token's I - beta k k^T, which makes nothing longer than |1 - beta |k|^2| or 1 do. Where the product of these is less
than 2^-126, below which float32 has fewer digits, it is taken as 0: so a piece warms up from there on, by states alone.
Where nothing is forgotten it begins with the sequence, or by maps (kernels_triton_token_joins.py). By such a factor of
0 what is no number stays none, as it does in one walk: where a piece's state is none at its end, all behind it is made
none (tiles/told.py), and a backward looks for such gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, by_tma, configure, interpreting, launch, strides, target_of
from foci.tiles import affine
from foci.tiles.affine import added, faded, load_columns, load_state, store_state, turned
from foci.tiles.maps import tiles_of
from foci.tiles.memory import lines_of, loaded, own_rows, present, put, rows_of, unless
from foci.tiles.near import UNREAD
from foci.tiles.pieces import FAR, forgotten, remembered, share, silent, slow_pieces
from foci.tiles.state import halves, in_two, nearest_in_two, sequence
from foci.tiles.told import count_map, store_and_spread_lost, tell

CHUNK = 64
SHORTEST, FEW, SHORTEST_OF_FEW = 8, 3, 10  # chunks of a piece where there are more than FEW, and where there are not


@triton.jit
def token_walk_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, v_ptr, X_ptr, A_ptr, rows_ptr, total_ptr, reach_ptr, slow_ptr, M_ptr, N_ptr, state_ptr,
    offsets_ptr, out_ptr, final_ptr, errors_ptr, states_ptr,
    first_ptr, arrived_ptr, lost_ptr, all_out_ptr, all_errors_ptr, all_states_ptr,
    q_strides, k_strides, e_strides, v_strides, state_strides, scale, B, T, N, H, R, V, pieces, SETTLE: tl.constexpr,
    EXACT: tl.constexpr, FAR: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's state through one sequence, and what its tokens read: `walk_kernel`.

    With `reach_ptr` through one of its `pieces`, after the chunks before it that are not forgotten; `lost_ptr` says
    which columns are no numbers behind it (tiles/told.py). A piece that is `slow`, or without `reach_ptr` each, begins
    by maps (tiles/affine.py). Without `out_ptr` it is found out which are slow, and maps are made of all before those.
    EXACT, of these alone: X has a second part in chunks whose last token is exact (kernels_triton_chunks.py).
    """
    PIECES: tl.constexpr = reach_ptr is not None or M_ptr is not None
    tl.static_assert(out_ptr is None or not EXACT)
    tl.static_assert(TILES == 1 or not PIECES)
    K: tl.constexpr = TILES * BLOCK_K
    blocks = tl.cdiv(V, BLOCK_V) + (K // BLOCK_V if out_ptr is None else 0)
    v0 = tl.program_id(0) % blocks * BLOCK_V
    rest = tl.program_id(0) // blocks
    h, n, piece = (rest % H).to(tl.int64), (rest // H).to(tl.int64), 0
    if PIECES:
        n, piece = n // pieces, rest // H % pieces
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    row, chunks = tl.cast(b, tl.int64), tl.cdiv(stop - start, CHUNK)
    first = tl.cast(slot, tl.int64) * H + h
    behind_V = v0 - tl.cdiv(V, BLOCK_V) * BLOCK_V
    if out_ptr is None:  # noqa: SIM102  before anything else, as mostly nothing else is to be done
        if tell(
            reach_ptr, slow_ptr, first_ptr, M_ptr, N_ptr, arrived_ptr, first, n, h, piece, pieces, rest, chunks, H, V,
            v0, SETTLE, K, BLOCK_V, FAR,
        ):  # fmt: skip
            return
    k_there = rows_of(k_ptr, row, h // R, T, stop, k_strides, K, CHUNK, BLOCK_K, TMA)
    e_there = k_there
    if e_ptr is not None:
        e_there = rows_of(e_ptr, row, h // R, T, stop, e_strides, K, CHUNK, BLOCK_K, TMA)
    v_there = rows_of(v_ptr, row, h, T, stop, v_strides, V, CHUNK, BLOCK_V, TMA)
    if out_ptr is None:
        v_there = unless(v_there, behind_V >= 0, H * V)
    lines: tl.constexpr = 3 if EXACT else 2
    X_there = own_rows(X_ptr, row, h, T, H, stop, (4 if EXACT and A_ptr is not None else 2) * CHUNK, CHUNK, CHUNK, TMA)
    if out_ptr is not None:
        q_there = rows_of(q_ptr, row, h // R, T, stop, q_strides, K, CHUNK, BLOCK_K, TMA)
        A_there = own_rows(A_ptr, row, h, T, H, stop, 2 * CHUNK, CHUNK, CHUNK, TMA)
        out_there = own_rows(out_ptr, row, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
    if states_ptr is not None:
        states_there = lines_of(states_ptr, first * K, chunks * H * K, V, BLOCK_K // 2, BLOCK_V, TMA)
        errors_there = own_rows(errors_ptr, row, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
        unsaid_there = own_rows(errors_ptr, row + B, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
    rows_there = lines_of(rows_ptr, first * lines, lines * H * chunks, CHUNK, 1, CHUNK, TMA)
    if state_ptr is not None:
        state_ptr += n * state_strides[0] + h * state_strides[1]
    rows = K if out_ptr is not None or piece == 0 else 0
    S = load_state(state_ptr, state_strides, rows, v0, V, TILES, BLOCK_K, BLOCK_V)
    if out_ptr is None:
        S = affine.with_unit(S, behind_V, TILES, BLOCK_K, BLOCK_V)
    S = turned(S, TILES)
    begin, own, end = start, start, stop
    if PIECES:
        ahead, behind = share(piece, pieces, chunks, reach_ptr is not None)
        own, end = start + ahead * CHUNK, tl.minimum(start + behind * CHUNK, stop)
        if out_ptr is None:
            begin, own = own, end
        else:
            idle = (ahead == behind) & (piece < pieces - 1)  # who has no chunk has nothing to wait for
            known, lost, others = piece, 0.0, tl.where(idle, 0, piece)
            if reach_ptr is not None:
                known, lost = remembered(reach_ptr + first, H, ahead, 2 * UNREAD)
                known = tl.where(idle, ahead, known)
                if slow_ptr is not None:
                    slow = tl.load(slow_ptr + rest) != 0
                    known, others = tl.where(slow, ahead, known), tl.where(slow, others, 0)
            begin = own if reach_ptr is None else start + known * CHUNK
            first_state = S[0] * tl.where(known == 0, 1.0, 0.0) + lost
            if M_ptr is not None:
                first_state = affine.joined_turned(first_state, M_ptr, N_ptr, n * pieces * H + h, H, others, v0, V, TMA)
            S = (first_state,)
    for phase in tl.static_range(0 if reach_ptr is not None or out_ptr is None else 1, 1 if out_ptr is None else 2):
        t1, t2 = begin, own
        if phase == 1:
            t1, t2 = own, end
        if total_ptr is not None:  # each a chunk before it is wanted
            gone = tl.load(total_ptr + first + (t1 - start) // CHUNK * H, mask=t1 < stop, other=0.0)
        for t0 in tl.range(t1, t2, CHUNK):
            chunk = (t0 - start) // CHUNK
            v = loaded(v_there, t0, v0)
            if phase == 1:
                A, A_lost = loaded(A_there, t0, 0), loaded(A_there, t0, CHUNK)
            k = load_columns(k_there, t0, TILES, BLOCK_K)
            if phase == 1:
                q = load_columns(q_there, t0, TILES, BLOCK_K)
            e = k
            if e_ptr is not None:
                e = load_columns(e_there, t0, TILES, BLOCK_K)
            second = t0
            if EXACT:  # behind the end lie zeros
                second = tl.where(tl.load(rows_ptr + (first + chunk * H + 1) * lines * CHUNK - 1) != 0.0, t0, stop)
            X, X_lost = loaded(X_there, t0, 0), loaded(X_there, second, CHUNK)
            write = loaded(rows_there, lines * H * chunk + 1, 0)
            read, o = tl.zeros([BLOCK_V, CHUNK], tl.float32), tl.zeros([BLOCK_V, CHUNK], tl.float32)
            for i in tl.static_range(TILES):
                operand = S[i].to(tl.bfloat16)
                if states_ptr is not None and phase == 1:
                    left, right = tl.split(tl.permute(tl.reshape(operand, [BLOCK_V, 2, BLOCK_K // 2]), [0, 2, 1]))
                    put(states_there, tl.trans(left), chunk * H * K + i * BLOCK_K, v0)
                read = tl.dot(operand, tl.trans(e[i]), read)
                if states_ptr is not None and phase == 1:  # each from the same place in shared memory
                    put(states_there, tl.trans(right), chunk * H * K + i * BLOCK_K + BLOCK_K // 2, v0)
                if total_ptr is not None and i == TILES - 1:
                    rise = loaded(rows_there, lines * H * chunk, 0)
                if phase == 1:
                    o = tl.dot(operand, tl.trans(q[i]), o)
            if total_ptr is not None:
                read *= rise
            high, low = in_two(tl.trans(v).to(tl.float32) - read)
            if phase == 1:
                if total_ptr is not None:
                    o *= rise
                o *= scale
            d = halves(high, low, tl.trans(X), tl.trans(X_lost), tl.zeros_like(read))
            if total_ptr is not None:
                S = faded(S, gone, TILES)
                gone = tl.load(total_ptr + first + (chunk + 1) * H, mask=chunk + 1 < chunks, other=0.0)
            if phase == 1:
                high, low = in_two(d)
                o = halves(high, low, tl.trans(A), tl.trans(A_lost), o)
            if states_ptr is not None and phase == 1:
                said, unsaid = nearest_in_two(d)
                put(errors_there, tl.trans(said), t0, v0)
            high, low = in_two(d * write)
            S = added(S, high, low, k, TILES)
            if phase == 1:
                put(out_there, tl.trans(o), t0, v0)
            if states_ptr is not None and phase == 1:
                put(unsaid_there, tl.trans(unsaid), t0, v0)
    if out_ptr is None:
        affine.store_turned_map(M_ptr, N_ptr, S[0], rest.to(tl.int64), v0, V)
        if first_ptr is not None:
            count_map(arrived_ptr, n * H + h, V, SETTLE)
    if final_ptr is not None:  # noqa: SIM102  a constant and a tensor
        if (piece == pieces - 1) & present(final_ptr):
            store_state(final_ptr + (n * H + h) * K * V, turned(S, TILES), K, v0, V, TILES, BLOCK_K)
    if lost_ptr is not None:
        store_and_spread_lost(
            S[0], lost_ptr, arrived_ptr, all_out_ptr, final_ptr, all_errors_ptr, all_states_ptr, offsets_ptr, v0,
            rest, tl.cast(B, tl.int64) * T * H * V, T, H, V, pieces, SETTLE, CHUNK,
        )  # fmt: skip


@triton.jit
def token_walk_back_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, rows_ptr, total_ptr, reach_ptr, A_ptr, X_ptr, slow_ptr, M_ptr, N_ptr, do_ptr, d_out_ptr,
    d_final_ptr, offsets_ptr, dv_ptr, unsaid_ptr, ends_ptr, d_state_ptr,
    q_strides, k_strides, e_strides, d_out_strides, d_final_strides, scale, T, N, H, R, V, pieces,
    FAR: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's dS through one sequence, last chunk to first: the backward's `walk_kernel`.

    With `reach_ptr` through one of its `pieces`, counted from the end, after what behind it is not forgotten;
    `slow_ptr` and maps as the forward has them, these made without `dv_ptr`. But gates behind the last gradient do not
    tell which piece is slow, as bits of what is before would know the future; `slow_ptr` has less these chunks, for who
    warms up.
    """
    PIECES: tl.constexpr = reach_ptr is not None or M_ptr is not None
    tl.static_assert(TILES == 1 or not PIECES)
    K: tl.constexpr = TILES * BLOCK_K
    blocks = tl.cdiv(V, BLOCK_V) + (K // BLOCK_V if dv_ptr is None else 0)
    v0 = tl.program_id(0) % blocks * BLOCK_V
    rest = tl.program_id(0) // blocks
    h, n, piece = (rest % H).to(tl.int64), (rest // H).to(tl.int64), 0
    if PIECES:
        n, piece = n // pieces, rest // H % pieces
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    row, count = tl.cast(b, tl.int64), tl.cdiv(stop - start, CHUNK)
    first = tl.cast(slot, tl.int64) * H + h
    behind_V = v0 - tl.cdiv(V, BLOCK_V) * BLOCK_V
    d_out_ptr += row * d_out_strides[0] + h * d_out_strides[2]
    if d_final_ptr is not None:
        d_final_ptr += n * d_final_strides[0] + h * d_final_strides[1]
    still, later = 0, (piece < pieces - 1).to(tl.int32)
    if dv_ptr is None and reach_ptr is not None:
        slow, later = slow_pieces(reach_ptr + first + (count - 1) * H, -H, piece, pieces, count, 0, FAR)
        if (slow != 0) | (later != 0):
            asked = start
            if d_final_ptr is not None:  # it is behind all: where there is any, no chunk is silent
                none = silent(d_final_ptr, 0, K, d_final_strides[2], V, d_final_strides[3], CHUNK, BLOCK_V) * CHUNK >= K
                asked = tl.where(none, start, stop)
            still = silent(d_out_ptr, asked, stop, d_out_strides[1], V, d_out_strides[3], CHUNK, BLOCK_V)
            slow, later = slow_pieces(reach_ptr + first + (count - 1) * H, -H, piece, pieces, count, still, FAR)
        if v0 == 0:
            tl.store(slow_ptr + rest, tl.where(slow != 0, 1, -still))
    if dv_ptr is None:  # noqa: SIM102  a constant and a tensor
        if (later == 0) | ((piece == 0) & (behind_V >= 0)):
            return
    q_there = rows_of(q_ptr, row, h // R, T, stop, q_strides, K, CHUNK, BLOCK_K, TMA)
    k_there = rows_of(k_ptr, row, h // R, T, stop, k_strides, K, CHUNK, BLOCK_K, TMA)
    if e_ptr is not None:
        e_there = rows_of(e_ptr, row, h // R, T, stop, e_strides, K, CHUNK, BLOCK_K, TMA)
    do_there = rows_of(do_ptr, row, h, T, stop, d_out_strides, V, CHUNK, BLOCK_V, TMA)
    if dv_ptr is None:
        do_there = unless(do_there, behind_V >= 0, H * V)
    A_there = own_rows(A_ptr, row, h, T, H, stop, 2 * CHUNK, CHUNK, CHUNK, TMA)
    X_there = own_rows(X_ptr, row, h, T, H, stop, 2 * CHUNK, CHUNK, CHUNK, TMA)
    if dv_ptr is not None:
        dv_there = own_rows(dv_ptr, row, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
        unsaid_there = own_rows(unsaid_ptr, row, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
        ends_there = lines_of(ends_ptr, first * K, count * H * K, V, BLOCK_K // 2, BLOCK_V, TMA)
    rows_there = lines_of(rows_ptr, first * 2, 2 * H * count, CHUNK, 1, CHUNK, TMA)
    rows = K if dv_ptr is not None or piece == 0 else 0
    dS = load_state(d_final_ptr, d_final_strides, rows, v0, V, TILES, BLOCK_K, BLOCK_V)
    if dv_ptr is None:
        dS = affine.with_unit(dS, behind_V, TILES, BLOCK_K, BLOCK_V)
    dS = turned(dS, TILES)
    begin, own, end = 0, 0, count
    if PIECES:
        own, end = share(piece, pieces, count, reach_ptr is not None)
        if dv_ptr is None:  # a map of nothing, that is not asked for, may not be infinite: it is multiplied by 0
            if reach_ptr is not None:
                dS = (dS[0] * tl.where((behind_V >= 0) & (own < still), 0.0, 1.0),)
            begin, own = own, end
        else:
            if (own == end) & (piece < pieces - 1):
                return
            begin, others = own, piece
            last_state = dS[0] * tl.where(piece == 0, 1.0, 0.0)
            if reach_ptr is not None:
                begin, lost = remembered(reach_ptr + first + (count - 1) * H, -H, own, UNREAD / 2)
                gone_by = begin
                if slow_ptr is not None:
                    told = tl.load(slow_ptr + rest)
                    slow = told > 0
                    gone_by, others = tl.where(slow, 0, begin), tl.where(slow, piece, 0)
                    begin = tl.where(slow, own, tl.minimum(tl.maximum(begin, -told), own))
                t1 = start + (count - gone_by) * CHUNK
                lost += forgotten(do_there, t1, start + count * CHUNK, v0, CHUNK, BLOCK_V)
                last_state = dS[0] * tl.where(begin == 0, 1.0, 0.0) + lost[:, None]
            if M_ptr is not None:
                last_state = affine.joined_turned(last_state, M_ptr, N_ptr, n * pieces * H + h, H, others, v0, V, TMA)
            dS = (last_state,)
    for phase in tl.static_range(0 if reach_ptr is not None or dv_ptr is None else 1, 1 if dv_ptr is None else 2):
        i1, i2 = begin, own
        if phase == 1:
            i1, i2 = own, end
        if total_ptr is not None:  # as the forward's
            gone = tl.load(total_ptr + first + (count - 1 - i1) * H, mask=i1 < count, other=0.0)
        for i in tl.range(i1, i2):
            chunk = count - 1 - i
            t0 = start + chunk * CHUNK
            do, A, A_lost = loaded(do_there, t0, v0), loaded(A_there, t0, 0), loaded(A_there, t0, CHUNK)
            X, X_lost = loaded(X_there, t0, 0), loaded(X_there, t0, CHUNK)
            k, q = load_columns(k_there, t0, TILES, BLOCK_K), load_columns(q_there, t0, TILES, BLOCK_K)
            e = k
            if e_ptr is not None:
                e = load_columns(e_there, t0, TILES, BLOCK_K)
            write = loaded(rows_there, 2 * H * chunk + 1, 0)
            read = tl.zeros([BLOCK_V, CHUNK], tl.float32)
            for j in tl.static_range(TILES):
                operand = dS[j].to(tl.bfloat16)
                if phase == 1:
                    left, right = tl.split(tl.permute(tl.reshape(operand, [BLOCK_V, 2, BLOCK_K // 2]), [0, 2, 1]))
                    put(ends_there, tl.trans(left), chunk * H * K + j * BLOCK_K, v0)
                read = tl.dot(operand, tl.trans(k[j]), read)
                if phase == 1:  # each from the same place in shared memory
                    put(ends_there, tl.trans(right), chunk * H * K + j * BLOCK_K + BLOCK_K // 2, v0)
            dd = tl.dot(tl.trans(do), A, tl.dot(tl.trans(do), A_lost))
            if total_ptr is None:  # what roundings leave is not forgotten either
                for j in tl.static_range(TILES):
                    lost_of_it = (dS[j] - dS[j].to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
                    read = tl.dot(lost_of_it, tl.trans(k[j]), read)
            dd += read * write
            high, low = in_two(dd)
            _, by_read = tl.split(tl.join(dd, tl.trans(do).to(tl.float32)))  # so that both lie alike
            if total_ptr is None:
                by_read *= scale
            else:
                rise = loaded(rows_there, 2 * H * chunk, 0)
                by_read *= scale * rise
                dS = faded(dS, gone, TILES)
                gone = tl.load(total_ptr + first + (chunk - 1) * H, mask=chunk > 0, other=0.0)
            by_read = by_read.to(tl.bfloat16)
            dS = added(dS, by_read, None, q, TILES)
            dv = halves(high, low, X, X_lost, tl.zeros_like(dd))
            if phase == 1:
                said, unsaid = nearest_in_two(dv)
                put(dv_there, tl.trans(said), t0, v0)
            by_erase = -dv
            if total_ptr is not None:
                by_erase = dv * -rise
            high, low = in_two(by_erase)
            dS = added(dS, high, low, e, TILES)
            if phase == 1:
                put(unsaid_there, tl.trans(unsaid), t0, v0)
    if dv_ptr is None:
        affine.store_turned_map(M_ptr, N_ptr, dS[0], rest.to(tl.int64), v0, V)
    elif d_state_ptr is not None:  # noqa: SIM102  a constant and a tensor
        if not PIECES or piece == pieces - 1:
            store_state(d_state_ptr + (n * H + h) * K * V, turned(dS, TILES), K, v0, V, TILES, BLOCK_K)


def suits(programs: int, K: int, V: int, target: Target, *operands: Tensor | None) -> bool:
    """Whether these kernels can walk (`fits`), and are worth it, where no piece begins by maps (ops/delta/pieces.py).

    `programs`: heads of all sequences, times the pieces of each (`shares`). A chunk takes these kernels longer than it
    takes 32 columns alone, of which few heads make twice the programs: on an H200 they win, in both directions, with
    programs for more than half of the processors; of 256 channels, of which those have 16 columns, wherever they can.
    """
    enough = K > 128 or 2 * programs * -(-V // 64) > target.processors
    return enough and fits(K, V, target, *operands)


def fits(K: int, V: int, target: Target, *operands: Tensor | None) -> bool:
    """Whether these kernels can walk."""
    found = target.arch == 90 and K in (64, 128, 256) and V > 32 and V % 8 == 0
    return found and all(x is None or x.dtype == torch.bfloat16 for x in operands) and all(map(by_tma, operands))


def shares(call: Any, target: Target) -> int:
    """Into how many pieces a sequence is cut where its gates may forget, so that few heads fill a GPU.

    Of shapes alone, as ops/delta/pieces.py has it; by programs of 64 columns of a state.
    """
    B, T, _, H, K, V, N = call.sizes
    if K > 128 or not (_forgets(call, target) and N):
        return 1
    room, chunks = target.processors // (N * H * -(-V // 64)), B * T // (N * CHUNK)
    several = min(room, chunks // SHORTEST)
    return max(1, several if several > FEW else min(room, chunks // SHORTEST_OF_FEW))


def wide(call: Any, target: Target, keep: bool = False) -> int:
    """How many columns a program has of which the warps of kernels_gluon.py walk, wherever they can; 0: they cannot.

    64, of which a chunk takes 1.1 to 1.3 us on an H200, as long as each program has a processor or V is no multiple of
    128; else 128, and of 256 channels always, of which it takes 2 to 2.6. Here 64 columns take as long as that, and the
    launch before a third more.
    `keep`: a backward is to come. Then they walk whole chunks, where programs are enough (`suits`), and memory is what
    is waited for: 64 columns.
    """
    *_, H, K, V, N = call.sizes
    if V % 64 or not (N and _forgets(call, target) and fits(K, V, target, call.q, call.k, call.v)):
        return 0
    if keep:
        whole = tiles_of(True, True, CHUNK, call.offsets, call.q, call.k, call.v).tma == 2
        return 64 if whole and K <= 128 else 0
    idle = target.processors >= N * H * (V // 64)
    if K <= 128 and (idle or V % 128):
        return 64
    return 128 if V % 128 == 0 else 0


def alone(call: Any, target: Target) -> bool:
    """Whether the walk by 64 columns makes A itself (kernels_gluon.py), so that the launch before it makes X alone.

    A walk of 64 channels has room for that, and a chunk of it takes a fifth longer; where a quarter of the processors
    walk, the launch before saves more. With 128 channels a chunk takes a third longer.
    """
    *_, H, K, V, N = call.sizes
    return K == 64 and target.processors <= 4 * N * H * (V // 64)


def _forgets(call: Any, target: Target) -> bool:
    """Whether what is left of a state is known, and walked here. No bound is known of what erase keys leave."""
    gates = call.log_decay is not None and call.log_decay.shape[3] == 1 and call.erase is None
    return gates and target.arch == 90 and call.v.dtype == torch.bfloat16 and call.sizes[4] in (64, 128, 256)


def rule(K: int, tiles: int, target: Target) -> Config:
    """As many columns as a warpgroup's product has rows; loads two chunks ahead where shared memory has the room."""
    return Config({"BLOCK_V": 64}, warps=4, stages=3 if K * tiles <= 256 else 2 if K * tiles <= 512 else 1)


def _config(name: str, K: int, V: int, e: Tensor | None, target: Target) -> Config:
    tiles = 2 if e is None else 3
    return configure(f"delta_{name}", (K, V, tiles), partial(rule, K, tiles), target)


def forward(
    call: Any, parts: Any, made: tuple[Tensor, Tensor | None, Any], pieces: int, lost: Tensor | None,
    out: Tensor | None, final: Tensor | None, begins: Sequence[Tensor | None],
) -> None:  # fmt: skip
    """`out` and `final`, each sequence in `pieces`, the states and errors that `parts` keeps, and `lost`.

    `begins`: (slow, N, M) as kernels_triton_token_joins.py has them; without `out` they are found, and the states with
    which pieces begin, up to the last slow one, if they are asked for behind these.
    """
    B, T, G, H, K, V, N = call.sizes
    inverse, products, gated = made
    slow, ends, maps, first = (*begins, None)[:4]
    q, k, e, v, rows = call.q, call.k, call.erase, call.v, gated.rows
    config = _config("token_walk", K, V, e, target_of(v.device))
    blocks = -(-V // config["BLOCK_V"]) + (K // config["BLOCK_V"] if out is None else 0)
    tile, exact = K if K <= 128 else 64, rows.shape[2] > 2  # with 128 channels at once products wait for registers
    by = tiles_of(True, not exact and V % config["BLOCK_V"] == 0, CHUNK, call.offsets, q, k, e, v)
    key, value, pair = (CHUNK, tile), (CHUNK, config["BLOCK_V"]), (CHUNK, CHUNK)
    errors, states = (None, None) if parts is None else (parts.errors, parts.states)
    launch(
        token_walk_kernel, (N * H * pieces * blocks,),
        by.rows(q, *key), by.rows(k, *key), by.rows(e, *key), by.rows(v, *value), by.rows(inverse, *pair),
        by.rows(products, *pair), by.lines(rows, 1, CHUNK), gated.total, gated.reach, slow,
        maps if out is None else by.lines(maps, K, K), ends, call.state, call.offsets, by.rows(out, *value), final,
        by.rows(errors, *value), by.lines(states, tile // 2, value[1]),
        first, gated.arrived, *((None,) * 4 if lost is None else (lost, out, errors, states)),
        q.stride(), k.stride(), strides(e), v.stride(), strides(call.state), call.scale, B, T, N, H, H // G, V, pieces,
        config=config, SETTLE=not interpreting(), EXACT=exact, FAR=int(FAR), CHUNK=CHUNK, TILES=K // tile,
        BLOCK_K=tile, TMA=by.tma,
    )  # fmt: skip


def backward(
    call: Any, kept: Sequence[Tensor | None], pieces: int, d_out: Tensor, d_final: Tensor | None,
    results: Sequence[Tensor | None], begins: Sequence[Tensor | None],
) -> None:  # fmt: skip
    """`results`: dv, what its rounding left, the states' gradients behind each chunk, and that of the first state.

    `kept`: rows, total, reach (None where no piece warms up), A and X as the forward left them (gpu.py: Parts).
    `begins` as the forward has them, found without dv.
    """
    _, T, G, H, K, V, N = call.sizes
    q, k, e = call.q, call.k, call.erase
    (rows, total, reach, products, inverse), (dv, unsaid, behind, d_state) = kept, results
    slow, ends, maps = begins
    config = _config("token_walk_back", K, V, e, target_of(q.device))
    blocks, tile = -(-V // config["BLOCK_V"]) + (K // config["BLOCK_V"] if dv is None else 0), min(K, 128)
    by = tiles_of(True, V % config["BLOCK_V"] == 0, CHUNK, call.offsets, q, k, e, d_out)
    key, value, pair = (CHUNK, tile), (CHUNK, config["BLOCK_V"]), (CHUNK, CHUNK)
    launch(
        token_walk_back_kernel, (N * H * pieces * blocks,),
        by.rows(q, *key), by.rows(k, *key), by.rows(e, *key), by.lines(rows, 1, CHUNK), total, reach,
        by.rows(products, *pair), by.rows(inverse, *pair), slow,
        maps if dv is None else by.lines(maps, K, K), ends, by.rows(d_out, *value), d_out, d_final, call.offsets,
        by.rows(dv, *value), by.rows(unsaid, *value), by.lines(behind, tile // 2, value[1]), d_state,
        q.stride(), k.stride(), strides(e), d_out.stride(), strides(d_final), call.scale, T, N, H, H // G, V, pieces,
        config=config, FAR=int(FAR), CHUNK=CHUNK, TILES=K // tile, BLOCK_K=tile, TMA=by.tma,
    )  # fmt: skip
