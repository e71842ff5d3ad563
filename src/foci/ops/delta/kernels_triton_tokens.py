"""What the delta rule's backward in Triton has left after its walk, of gates per token or none: each chunk alone.

Let W be the gates' weights of pairs, P_A = scale W do d^T and P_E = -W dv d^T, on and below the diagonal of a chunk and
below it. Then, S the state at its start and dS the gradient of that at its end (kernels_triton_backward.py),

    dq = P_A beta k + scale rise (do S^T);   de = P_E beta k - rise (dv S^T);   dw = P_A^T q + P_E^T e + fall (d dS^T),

w = beta k. The first launch goes through the states: one loop of loads that run ahead, and little else. The second
makes the pairs, of which q, e and k read the sums over the heads that share a key, and adds what these give to what the
first left; beta and gates take of pairs no more than products with q k^T and e k^T. The third adds up what beta and
gates take of either. No launch's registers hold another's tiles.

Keys that are alike make sums over d and dv telescope. These lie in memory as two bfloat16 each, of which pairs take
both, in three products or two. Products through a state take the first alone, which is too little for gates. The
equations of d and dv say what these are to have: as dd - E^T dv = dv, over channels fall w (d dS^T) sums to d dv less
what the columns of A and E sum to; as v - rise e S = d + E d, rise e (dv S^T) to v dv - d dv less what E's rows do.
These are taken unless fall or rise leaves so little that the product is nearer, or that is 0. Without gates the walk
makes dv of more digits, and beta's gradient, by the equations of both, is d dv / beta.
For float16, whose range holds no decays, all products are of float32 tiles (tiles/state.py: working).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, side, strides
from foci.tiles import near
from foci.tiles.chunk_backward import across, load_in_two, of_beta, onto, store_in_two
from foci.tiles.gates import by_ends, by_pairs, load_gates
from foci.tiles.memory import load_tile, store_tile
from foci.tiles.pairs import parted
from foci.tiles.rest import behind, clear_rest
from foci.tiles.state import chunk_at, rounded, working
from foci.tiles.whole import read, within, write

CHUNK = 64
CLEAR: tl.constexpr = tl.constexpr(2.0**-8)  # a decay that leaves a rest larger than the rounding of what it is left of


@triton.jit
def plus(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """Three sums at once wait for each other's warps once."""
    return a + d, b + e, c + f


@triton.jit
def side_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, rise_ptr, write_ptr, d_out_ptr, dv_ptr, errors_ptr, states_ptr, ends_ptr,
    offsets_ptr, rows_ptr, totals_ptr, q_sums_ptr, k_sums_ptr, e_sums_ptr,
    q_strides, k_strides, e_strides, write_strides, d_out_strides, scale, zero, T, N, H, R, K, V,
    apart, EVEN: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What goes through the states of one chunk of one key head and the R heads that read it.

    Without `e_ptr` k erases. To sums [B,T,G,K] go q's, k's and e's parts; to rows [3 blocks of K,slots,H,CHUNK] what
    fall and, for q and e, rise are to be multiplied by, to totals [slots,H,K] what total is.
    EVEN: no block of K or V is a part of one; WHOLE: and no chunk.
    """
    tl.assume(K > 0)  # else a loop might be left out, and Hopper's assembler would have each product wait (C7515)
    tl.assume(V > 0)
    tl.assume(R > 0)
    group, chunk, G = (tl.program_id(0) % (H // R)).to(tl.int64), tl.program_id(0) // (H // R), H // R
    n, b, first, stop, slot = chunk_at(offsets_ptr, chunk, N, T, CHUNK)
    if n < 0:
        return
    row, apart = tl.cast(b, tl.int64), tl.cast(apart, tl.int64)
    q_ptr += row * q_strides[0] + group * q_strides[2]
    k_ptr += row * k_strides[0] + group * k_strides[2]
    if e_ptr is not None:
        e_ptr += row * e_strides[0] + group * e_strides[2]
    into = (row * T * G + group) * K
    d_q = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    d_k = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    d_e = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    by_q = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    by_e = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    by_w = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    by_total = tl.zeros([BLOCK_K, BLOCK_V // 8], tl.float32)
    r, k0, v0 = 0, 0, 0
    steps = R * tl.cdiv(K, BLOCK_K) * tl.cdiv(V, BLOCK_V)
    for i in tl.range(steps, num_stages=STAGES, disable_licm=True):  # all in one loop: loads run ahead
        h = group * R + r
        head, there = row * T * H + h, (slot * H + h) * K * V
        t0 = first + zero * i  # what the loop changes stays in it: addresses kept through it would cost registers
        here = d_out_ptr + row * d_out_strides[0] + h * d_out_strides[2]
        S = working(read(states_ptr + there, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V, EVEN))
        dS = working(read(ends_ptr + there, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V, EVEN))
        do = read(here, t0, stop, d_out_strides[1], v0, V, d_out_strides[3], CHUNK, BLOCK_V, WHOLE, EVEN)
        dv = read(dv_ptr + head * V, t0, stop, H * V, v0, V, 1, CHUNK, BLOCK_V, WHOLE, EVEN)
        d = read(errors_ptr + head * V, t0, stop, H * V, v0, V, 1, CHUNK, BLOCK_V, WHOLE, EVEN)
        k = read(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, WHOLE, EVEN)
        q = read(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K, WHOLE, EVEN)
        e = k
        if e_ptr is not None:
            e = read(e_ptr, t0, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_K, WHOLE, EVEN)
        at = (t0 + tl.arange(0, CHUNK)).to(tl.int64)
        write = load_gates(write_ptr + row * write_strides[0] + h * write_strides[2], t0, stop, write_strides[1], CHUNK)
        if rise_ptr is not None:
            rise = tl.load(rise_ptr + head + at * H, mask=at < stop, other=0.0)
        # Not where a head ends: products whose sums change in a branch wait for each other on Hopper.
        by_q, by_e = tl.where(v0 > 0, by_q, 0.0), tl.where(v0 > 0, by_e, 0.0)
        by_w, by_total = tl.where(v0 > 0, by_w, 0.0), tl.where(v0 > 0, by_total, 0.0)
        by_q = tl.dot(do.to(S.dtype), tl.trans(S), by_q, input_precision=PRECISION)
        by_e = tl.dot(dv, tl.trans(S), by_e, input_precision=PRECISION)
        by_w = across(d, dS, by_w, PRECISION)
        by_total += tl.sum(tl.reshape(S.to(tl.float32) * dS.to(tl.float32), [BLOCK_K, BLOCK_V // 8, 8]), 2)
        if v0 + BLOCK_V >= V:  # a branch too where V is one block: what is in one comes after the next loads' start
            on_q, on_e = by_q * scale, by_e
            by_read, by_erase, by_fall = tl.reduce(
                (q.to(tl.float32) * on_q, e.to(tl.float32) * by_e, k.to(tl.float32) * by_w), 1, plus
            )
            if rise_ptr is not None:
                on_q, on_e = on_q * rise[:, None], on_e * rise[:, None]
            d_q = tl.where(r > 0, d_q, 0.0) + on_q
            d_k = tl.where(r > 0, d_k, 0.0) + by_w * write[:, None]
            if e_ptr is None:
                d_k -= on_e
            else:
                d_e = tl.where(r > 0, d_e, 0.0) - on_e
            c = k0 + tl.arange(0, BLOCK_K)
            tl.store(totals_ptr + (slot * H + h) * K + c, tl.sum(by_total, 1), mask=c < K)
            rows = rows_ptr + (slot * H + h) * CHUNK + k0 // BLOCK_K * 3 * apart + tl.arange(0, CHUNK)
            tl.store(rows, by_fall)
            tl.store(rows + apart, by_read)
            tl.store(rows + 2 * apart, by_erase)
            if r == R - 1:
                if q_sums_ptr is not None:
                    store_tile(q_sums_ptr + into, d_q, t0, stop, G * K, k0, K, 1)
                if k_sums_ptr is not None:
                    store_tile(k_sums_ptr + into, d_k, t0, stop, G * K, k0, K, 1)
                if e_sums_ptr is not None:
                    store_tile(e_sums_ptr + into, d_e, t0, stop, G * K, k0, K, 1)
        v0 += BLOCK_V
        r = tl.where(v0 >= V, r + 1, r)
        v0 = tl.where(v0 >= V, 0, v0)
        k0 = tl.where(r == R, k0 + BLOCK_K, k0)
        r = tl.where(r == R, 0, r)


@triton.jit
def pairs_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, v_ptr, beta_ptr, g_ptr, d_out_ptr, dv_ptr, dv_low_ptr, errors_ptr, offsets_ptr, pairs_ptr,
    rows_ptr, q_sums_ptr, k_sums_ptr, e_sums_ptr, d_q_ptr, d_k_ptr, d_e_ptr,
    q_strides, k_strides, e_strides, v_strides, beta_strides, g_strides, d_out_strides, scale, zero, T, N, H, R, K, V,
    half, tokens, apart, SAME: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The pairs of one chunk and one key head, first P_A and then P_E, onto sums as `side_kernel` left them.

    P_A waits in pairs [..,B,T,G,CHUNK], in bfloat16 as two, `half` apart: sums are read once, and by one loop. SAME: e
    is k. What beta and gates take of either goes to rows [6,slots,H,CHUNK], with values d dv and v dv too.
    """
    G, program = H // R, tl.num_programs(0) - 1 - tl.program_id(0)  # what was written last is in the cache yet
    group, chunk = (program % G).to(tl.int64), program // G
    n, b, first, stop, slot = chunk_at(offsets_ptr, chunk, N, T, CHUNK)
    if n < 0:
        return
    tl.assume(K > 0)
    tl.assume(V > 0)
    tl.assume(R > 0)
    row, tokens, apart = tl.cast(b, tl.int64), tl.cast(tokens, tl.int64), tl.cast(apart, tl.int64)
    q_ptr += row * q_strides[0] + group * q_strides[2]
    k_ptr += row * k_strides[0] + group * k_strides[2]
    e_ptr += row * e_strides[0] + group * e_strides[2]
    beta_ptr += row * beta_strides[0] + group * R * beta_strides[2]
    if g_ptr is not None:
        g_ptr += row * g_strides[0] + group * R * g_strides[2]
    d_out_ptr += row * d_out_strides[0] + group * R * d_out_strides[2]
    if v_ptr is not None:
        v_ptr += row * v_strides[0] + group * R * v_strides[2]
    into, head = (row * T * G + group) * K, row * T * H + group * R
    errors_ptr += head * V
    dv_ptr += head * V
    if dv_low_ptr is not None:
        dv_low_ptr += head * V
    rows_ptr += (tl.cast(slot, tl.int64) * H + group * R) * CHUNK
    P = pairs_of(
        q_ptr, q_strides, k_ptr, k_strides, beta_ptr, beta_strides, g_ptr, g_strides, d_out_ptr, d_out_strides,
        None, None, None, errors_ptr, rows_ptr, scale, zero, first, stop, H, R, K, V, tokens, apart,
        True, EVEN, WHOLE, PRECISION, CHUNK, BLOCK_K, BLOCK_V,
    )  # fmt: skip
    pairs_ptr += (row * T * G + group) * CHUNK
    store_in_two(pairs_ptr, half, P, first, stop, G * CHUNK, 0, CHUNK)
    tl.debug_barrier()  # what others have written is read below
    # What both have alike is reckoned twice: kept from the first to the second it would cost registers.
    first += zero
    H += zero
    V += zero
    e_strides = (0, e_strides[1] + zero, 0, e_strides[3])
    k_strides = (0, k_strides[1] + zero, 0, k_strides[3])
    P = pairs_of(
        e_ptr, e_strides, k_ptr, k_strides, beta_ptr, beta_strides, g_ptr, g_strides, dv_ptr, (0, H * V, V, 1),
        dv_low_ptr, v_ptr, v_strides, errors_ptr, rows_ptr + 2 * apart, -1.0, zero, first, stop, H, R, K, V, tokens,
        apart, False, EVEN, WHOLE, PRECISION, CHUNK, BLOCK_K, BLOCK_V,
    )  # fmt: skip
    if SAME:
        P += tl.trans(P)
    E, E_low = parted(P, k_ptr.dtype.element_ty, PRECISION)
    A, A_low = load_in_two(pairs_ptr, half, first, stop, G * CHUNK, CHUNK, CHUNK, WHOLE)
    A = rounded(A, PRECISION)
    # The stages are said again, as a loop that says them loads sums ahead too, and not operands alone.
    BLOCK_N: tl.constexpr = BLOCK_K // 2 if BLOCK_K > 16 else BLOCK_K
    for k0 in tl.range(0, K, BLOCK_N, num_stages=STAGES, disable_licm=True):
        k = working(read(k_ptr, first, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_N, WHOLE, EVEN))
        q = working(read(q_ptr, first, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_N, WHOLE, EVEN))
        if d_q_ptr is not None:
            d_q = read(q_sums_ptr + into, first, stop, G * K, k0, K, 1, CHUNK, BLOCK_N, WHOLE, EVEN).to(tl.float32)
            write(d_q_ptr + into, onto(d_q, A, A_low, k, PRECISION), first, stop, G * K, k0, K, WHOLE)
        if not SAME:
            e = working(read(e_ptr, first, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_N, WHOLE, EVEN))
            if d_e_ptr is not None:
                d_e = read(e_sums_ptr + into, first, stop, G * K, k0, K, 1, CHUNK, BLOCK_N, WHOLE, EVEN).to(tl.float32)
                write(d_e_ptr + into, onto(d_e, E, E_low, k, PRECISION), first, stop, G * K, k0, K, WHOLE)
        if d_k_ptr is not None:
            d_k = read(k_sums_ptr + into, first, stop, G * K, k0, K, 1, CHUNK, BLOCK_N, WHOLE, EVEN).to(tl.float32)
            d_k = onto(d_k, tl.trans(A), tl.trans(A_low), q, PRECISION)
            if SAME:
                d_k = onto(d_k, E, E_low, k, PRECISION)
            else:
                d_k = onto(d_k, tl.trans(E), tl.trans(E_low), e, PRECISION)
            write(d_k_ptr + into, d_k, first, stop, G * K, k0, K, WHOLE)


@triton.jit
def pairs_of(  # type: ignore[no-untyped-def]
    x_ptr, x_strides, k_ptr, k_strides, beta_ptr, beta_strides, g_ptr, g_strides, from_ptr, from_strides, low_ptr,
    v_ptr, v_strides, d_ptr, rows_ptr, factor, zero, first, stop, H, R, K, V, tokens, apart,
    OWN: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The sum over heads of beta P, P = factor W from d^T, of pairs on (OWN) and below the diagonal."""
    NEAR: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    product = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
        x = working(read(x_ptr, first, stop, x_strides[1], k0, K, x_strides[3], CHUNK, BLOCK_K, WHOLE, EVEN))
        k = working(read(k_ptr, first, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, WHOLE, EVEN))
        product = tl.dot(x, tl.trans(k), product, input_precision=PRECISION)
    product *= factor
    found = tl.zeros([CHUNK, CHUNK], tl.float32)
    dP = tl.zeros([CHUNK, CHUNK], tl.float32)
    by_value = tl.zeros([CHUNK], tl.float32)
    r, v0 = (0 if OWN else R - 1), 0  # heads that were read last come first again
    for i in tl.range(R * tl.cdiv(V, BLOCK_V), disable_licm=True):  # all in one loop: loads run ahead
        t0 = first + zero * i  # what the loop changes stays in it: addresses kept through it would cost registers
        here = from_ptr + r * from_strides[2]
        x = working(read(here, t0, stop, from_strides[1], v0, V, from_strides[3], CHUNK, BLOCK_V, WHOLE, EVEN))
        d = read(d_ptr + r * V, t0, stop, H * V, v0, V, 1, CHUNK, BLOCK_V, WHOLE, EVEN)
        dP = tl.where(v0 > 0, dP, 0.0)
        if d.dtype == tl.bfloat16:
            rest = read(d_ptr + tokens * V + r * V, t0, stop, H * V, v0, V, 1, CHUNK, BLOCK_V, WHOLE, EVEN)
            dP = tl.dot(x, tl.trans(rest), dP)
            if low_ptr is not None:
                low = read(low_ptr + r * V, t0, stop, H * V, v0, V, 1, CHUNK, BLOCK_V, WHOLE, EVEN)
                dP = tl.dot(low, tl.trans(d), dP)
            dP = tl.dot(x, tl.trans(d), dP)
            if v_ptr is not None:
                there = v_ptr + r * v_strides[2]
                v = read(there, t0, stop, v_strides[1], v0, V, v_strides[3], CHUNK, BLOCK_V, WHOLE, EVEN)
                by_value = tl.where(v0 > 0, by_value, 0.0)
                by_value += tl.sum(v.to(tl.float32) * (x.to(tl.float32) + low.to(tl.float32)), 1)
        else:
            d = tl.trans(rounded(d, PRECISION))
            dP = tl.dot(rounded(x, PRECISION), d, dP, input_precision=PRECISION)
        if v0 + BLOCK_V >= V:
            t0 += zero
            t, s = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
            if g_ptr is not None:
                both = near.weighted(
                    dP, load_gates(g_ptr + r * g_strides[2], t0, stop, g_strides[1], CHUNK), not OWN, NEAR
                )
            else:
                both = tl.where(t >= s if OWN else t > s, dP, 0.0)
            beta = load_gates(beta_ptr + r * beta_strides[2], t0, stop, beta_strides[1], CHUNK)
            found += both * beta[None, :]
            both *= product
            if OWN:
                behind = tl.where(t > s, both, 0.0)
                on, both = tl.sum(both - behind, 1), behind
            by_columns = tl.sum(both, 0)
            rows = rows_ptr + r * CHUNK + tl.arange(0, CHUNK)
            tl.store(rows, by_columns + on if OWN else by_columns)
            if g_ptr is not None:
                if NEAR:
                    by_gate = tl.sum(both * beta[None, :], 1) - beta * by_columns
                else:
                    by_gate = by_pairs(both * beta[None, :], True)
                tl.store(rows + apart, by_gate)
            if low_ptr is not None:
                tl.store(rows + 2 * apart, tl.sum(tl.where(t == s, dP, 0.0), 1))
            if v_ptr is not None:
                tl.store(rows + 3 * apart, by_value)
        v0 += BLOCK_V
        r = tl.where(v0 >= V, r + 1 if OWN else r - 1, r)
        v0 = tl.where(v0 >= V, 0, v0)
    return factor * found


@triton.jit
def gates_kernel(  # type: ignore[no-untyped-def]
    beta_ptr, g_ptr, offsets_ptr, rows_ptr, totals_ptr, d_beta_ptr, d_g_ptr,
    rest_a, rest_b, rest_c, rest_d, rest_e, rest_f, widths, beta_strides, g_strides, T, N, H, K, apart,
    BLOCKS: tl.constexpr, CONSTANT: tl.constexpr, NEAR: tl.constexpr, TWO: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of beta and gates of one chunk and BLOCK_H heads, from what both kernels above left in rows.

    BLOCKS of K. CONSTANT: d_g [chunks,H], the sum over tokens. Behind its programs are those of `clear_rest`.
    """
    if widths is not None:
        rest = behind()
        if rest >= 0:
            clear_rest(rest_a, rest_b, rest_c, rest_d, rest_e, rest_f, widths, offsets_ptr, rest, N, T)
            return
    chunk, h0 = tl.program_id(0) // tl.cdiv(H, BLOCK_H), tl.program_id(0) % tl.cdiv(H, BLOCK_H) * BLOCK_H
    n, b, first, stop, slot = chunk_at(offsets_ptr, chunk, N, T, CHUNK)
    h = h0 + tl.arange(0, BLOCK_H)
    if n < 0:
        if CONSTANT and d_g_ptr is not None:
            tl.store(d_g_ptr + tl.cast(chunk, tl.int64) * H + h, tl.zeros([BLOCK_H], tl.float32), mask=h < H)
        return
    row, apart = tl.cast(b, tl.int64), tl.cast(apart, tl.int64)
    rows_ptr += tl.cast(slot, tl.int64) * H * CHUNK
    left = stop - first
    by_fall = tl.zeros([CHUNK, BLOCK_H], tl.float32)
    by_rise, by_erase = by_fall, by_fall
    for i in tl.static_range(BLOCKS):
        by_fall += load_tile(rows_ptr + (6 + 3 * i) * apart, 0, left, 1, h0, H, CHUNK, CHUNK, BLOCK_H)
        by_rise += load_tile(rows_ptr + (7 + 3 * i) * apart, 0, left, 1, h0, H, CHUNK, CHUNK, BLOCK_H)
        by_erase += load_tile(rows_ptr + (8 + 3 * i) * apart, 0, left, 1, h0, H, CHUNK, CHUNK, BLOCK_H)
    by_total = tl.zeros([BLOCK_H], tl.float32)
    totals_ptr += tl.cast(slot, tl.int64) * H * K
    for k0 in tl.range(0, K, BLOCK_K):
        by_total += tl.sum(load_tile(totals_ptr, h0, H, K, k0, K, 1, BLOCK_H, BLOCK_K), 1)
    rise = tl.full([CHUNK, BLOCK_H], 1.0, tl.float32)
    fall = rise
    if g_ptr is not None:
        g_ptr += row * g_strides[0]
        g = load_tile(g_ptr, first, stop, g_strides[1], h0, H, g_strides[2], CHUNK, BLOCK_H).to(tl.float32)
        rise, fall = near.ends(g, True, NEAR)
    by_fall, by_rise, by_erase = by_fall * fall, by_rise * rise, by_erase * rise
    columns_A = load_tile(rows_ptr, 0, left, 1, h0, H, CHUNK, CHUNK, BLOCK_H)
    columns_E = load_tile(rows_ptr + 2 * apart, 0, left, 1, h0, H, CHUNK, CHUNK, BLOCK_H)
    beta_ptr += row * beta_strides[0]
    beta = load_tile(beta_ptr, first, stop, beta_strides[1], h0, H, beta_strides[2], CHUNK, BLOCK_H).to(tl.float32)
    if TWO:
        by_error = load_tile(rows_ptr + 4 * apart, 0, left, 1, h0, H, CHUNK, CHUNK, BLOCK_H)
    if d_beta_ptr is not None:
        d_beta = columns_A + columns_E + by_fall
        if TWO and g_ptr is None:
            d_beta = of_beta(by_error, beta, d_beta, 2.0**-60)
        store_tile(d_beta_ptr + row * T * H, d_beta, first, stop, H, h0, H, 1)
    if d_g_ptr is not None:
        by_E = load_tile(rows_ptr + 3 * apart, 0, left, 1, h0, H, CHUNK, CHUNK, BLOCK_H)
        d_g = load_tile(rows_ptr + apart, 0, left, 1, h0, H, CHUNK, CHUNK, BLOCK_H) + by_E
        by_fall *= beta
        if TWO:
            by_value = load_tile(rows_ptr + 5 * apart, 0, left, 1, h0, H, CHUNK, CHUNK, BLOCK_H)
            # Where nothing comes from behind or before, the sums are rounding; and fall is the future's.
            clear = (fall > CLEAR) & (by_fall != 0.0)
            by_fall = tl.where(clear, by_error - beta * (columns_A + columns_E), by_fall)
            clear = (rise > CLEAR) & (by_erase != 0.0)
            by_erase = tl.where(clear, by_value - by_error + by_E + beta * columns_E, by_erase)
        # A gate takes what rise has from its token on: at the last one is also what total has.
        end = tl.minimum(stop, first + CHUNK) - 1
        by_rise += tl.where((first + tl.arange(0, CHUNK) == end)[:, None], by_total[None, :] * rise, 0.0) - by_erase
        none = tl.zeros([BLOCK_H], tl.float32)
        if NEAR:
            d_g = by_ends(by_rise + d_g, by_fall, none)
        else:
            d_g += by_ends(by_rise, by_fall, none)
        if CONSTANT:
            d_g = tl.where((first + tl.arange(0, CHUNK) < stop)[:, None], d_g, 0.0)
            tl.store(d_g_ptr + tl.cast(chunk, tl.int64) * H + h, tl.sum(d_g, 0), mask=h < H)
        else:
            store_tile(d_g_ptr + row * T * H, d_g, first, stop, H, h0, H, 1)


@triton.jit
def sums_kernel(parts_ptr, sum_ptr, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum over the rows of [rows, columns]."""
    c0 = tl.program_id(0) * BLOCK_C
    found = tl.zeros([1, BLOCK_C], tl.float32)
    for row in range(0, rows, BLOCK_R):
        found += tl.sum(load_tile(parts_ptr, row, rows, columns, c0, columns, 1, BLOCK_R, BLOCK_C), 0, keep_dims=True)
    store_tile(sum_ptr, found, 0, 1, columns, c0, columns, 1)


# Channels of K and of V, warps and stages on Hopper: measured on an H200, of float16 and float32 on an H100. There
# operands of pairs go to shared memory by themselves, blocks ahead, and of a side in bfloat16 V at once, and the next
# head's meanwhile. Beside erase keys, and dS in float32, shared memory has no room for all of V.
_ON_HOPPER = {
    "pairs": {torch.bfloat16: (64, 64, 4, 3), torch.float16: (64, 64, 4, 2), torch.float32: (32, 32, 4, 2)},
    "side": {torch.bfloat16: (64, 128, 8, 2), torch.float16: (32, 32, 4, 2), torch.float32: (32, 32, 4, 2)},
    "side_with_erase": {torch.bfloat16: (64, 64, 8, 2), torch.float16: (32, 32, 4, 2), torch.float32: (32, 32, 4, 2)},
}


def _rule(kernel: str, K: int, V: int, dtype: torch.dtype, target: Target) -> Config:
    """Elsewhere as many channels as registers hold without a spill."""
    few = 32 if dtype == torch.bfloat16 else 16, 32, 8, 1
    k, v, warps, stages = _ON_HOPPER[kernel][dtype] if target.arch == 90 else few
    if target.arch == 90 and kernel == "side" and dtype == torch.bfloat16 and K <= 64 and V <= 64:  # one step a head
        warps, stages = 4, 1
    return Config({"BLOCK_K": side(K, k), "BLOCK_V": side(V, v)}, warps, stages)


def _gates_rule(target: Target) -> Config:
    return Config({"BLOCK_H": 8, "BLOCK_K": 64}, warps=4, stages=1)


def _sums_rule(target: Target) -> Config:
    return Config({"BLOCK_R": 32, "BLOCK_C": 64}, warps=4, stages=1)


def side_by_token(problem: Any, kept: Any, d_out: Tensor, dv: Any, behind: Tensor, by_warps: Any) -> None:
    """What is left when the walk has made dv and the gradients `behind` each chunk; `by_warps` has what it takes."""
    call, g, parts, two = problem.call, problem.g, None, isinstance(dv, tuple)
    d_beta, d_g = problem.found[3:5]
    if by_warps is not None and by_warps.takes(problem, d_out, dv):
        rows, totals = by_warps.side_and_pairs(problem, kept, d_out, dv, behind)
    else:
        rows, totals = _in_two_launches(problem, kept, d_out, dv, behind)
    if d_g is not None and problem.constant:
        d_g = parts = totals.new_empty(problem.chunks, problem.H)
    if d_beta is not None or d_g is not None:
        config = configure("delta_backward_gates", (), _gates_rule, problem.target)
        more, rest = problem.rest.taken()
        launch(
            gates_kernel, (problem.chunks * -(-problem.H // config["BLOCK_H"]) + more,),
            call.beta, g, call.offsets, rows, totals, d_beta, d_g, *rest, call.beta.stride(), strides(g),
            problem.T, problem.N, problem.H, totals.shape[2], rows[0].numel(),
            config=config, BLOCKS=len(rows) // 3 - 2, CONSTANT=problem.constant, NEAR=call.q.dtype != torch.float32,
            TWO=two, CHUNK=CHUNK,
        )  # fmt: skip
    if parts is not None:
        config = configure("delta_backward_sums", (), _sums_rule, problem.target)
        launch(sums_kernel, (-(-problem.H // config["BLOCK_C"]),), parts, problem.found[4], *parts.shape, config=config)


def _in_two_launches(problem: Any, kept: Any, d_out: Tensor, dv: Any, behind: Tensor) -> tuple[Tensor, Tensor]:
    """dq, dk and de by `side_kernel` and `pairs_kernel`; (rows, totals [slots,H,K]) for `gates_kernel`."""
    call, g, erase = problem.call, problem.g, problem.erase
    d_q, d_k, _, _, d_g, d_erase, _ = problem.found
    low, errors, write = None, kept[1], call.beta if kept[5] is None else kept[5]
    if isinstance(dv, tuple):
        (dv, low), errors = dv, errors[0]
    value, d_out = None if low is None or d_g is None else _close(call.v, problem), _close(d_out, problem)
    name = "side" if call.erase is None else "side_with_erase"
    config, ahead = (problem.config(kernel, partial(_rule, kernel)) for kernel in (name, "pairs"))
    blocks = -(-problem.K // config["BLOCK_K"])
    rows = dv.new_empty(6 + 3 * blocks, *behind.shape[:2], CHUNK, dtype=torch.float32)
    totals = dv.new_empty(*behind.shape[:3], dtype=torch.float32)
    sums = tuple(map(_waiting, (d_q, d_k, d_erase)))
    pairs = kept[0].new_empty(2 if call.q.dtype == torch.bfloat16 else 1, problem.B, problem.T, problem.G, CHUNK)
    sizes = (problem.T, problem.N, problem.H, problem.H // problem.G, problem.K, problem.V)
    even, whole = _even(problem, d_out, config), call.offsets is None and problem.T % CHUNK == 0
    launch(
        side_kernel, (problem.chunks * problem.G,),
        call.q, call.k, call.erase, kept[4], write, d_out, dv, errors, kept[0], behind, call.offsets,
        rows[6:], totals, *sums, call.q.stride(), call.k.stride(), strides(call.erase), write.stride(), d_out.stride(),
        call.scale, 0, *sizes, rows[0].numel(), config=config, EVEN=even, WHOLE=even and whole,
        PRECISION=problem.precision, CHUNK=CHUNK, STAGES=config.stages,
    )  # fmt: skip
    even = _even(problem, d_out, ahead)
    launch(
        pairs_kernel, (problem.chunks * problem.G,),
        call.q, call.k, erase, value, call.beta, g, d_out, dv, low, kept[1], call.offsets, pairs, rows, *sums,
        d_q, d_k, d_erase,
        call.q.stride(), call.k.stride(), erase.stride(), strides(value), call.beta.stride(), strides(g),
        d_out.stride(), call.scale, 0, *sizes, pairs[0].numel(), dv.numel() // problem.V, rows[0].numel(), config=ahead,
        SAME=call.erase is None, EVEN=even, WHOLE=even and whole, PRECISION=problem.precision, CHUNK=CHUNK,
        STAGES=min(ahead.stages, 3),
    )  # fmt: skip
    return rows, totals


def _close(x: Tensor, problem: Any) -> Tensor:
    """x, copied where heads that read one key lie further apart than numbers of 32 bits reach."""
    return x if problem.H // problem.G * x.stride(2) < 1 << 31 else x.contiguous()


def _waiting(found: Tensor | None) -> Tensor | None:
    """Where a gradient waits for the part of its pairs: its own place, but for float16, whose range holds no sums."""
    return torch.empty_like(found, dtype=torch.float32) if found is not None and found.dtype == torch.float16 else found


def _even(problem: Any, d_out: Tensor, config: Config) -> bool:
    """Whether no block of K or V is a part of one, and a tile's places are numbers of 32 bits (tiles/whole.py)."""
    call = problem.call
    near = within(CHUNK, max(problem.K, problem.V), call.q, call.k, call.v, problem.erase, d_out)
    near = near and CHUNK * problem.G * problem.K < 1 << 31
    return near and problem.K % config["BLOCK_K"] == 0 and problem.V % config["BLOCK_V"] == 0
