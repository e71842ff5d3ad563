"""What the delta rule's backward in Triton has left after its walk, of gates per token or none: each chunk alone.

Let W be the gates' weights of pairs, P_A = scale W do d^T and P_E = -W dv d^T, on and below the diagonal of a chunk and
below it. Then, S the state at its start and dS the gradient of that at its end (kernels_triton_backward.py),

    dq = P_A beta k + scale rise (do S^T);   de = P_E beta k - rise (dv S^T);   dw = P_A^T q + P_E^T e + fall (d dS^T),

w = beta k. The first launch makes the pairs: beta and gates take of them no more than their products with q k^T and
e k^T, and q, e and k read their sums over the heads that share a key. The second goes through the states. Between them
lie these sums, and what each head's tokens have: neither launch's registers hold the other's tiles.

Keys that are alike make sums over d and dv telescope. These lie in memory as two bfloat16 each, of which pairs take
both, in three products or two; what goes through a state in bfloat16 takes the first. For float16, whose range holds no
decays, all products are of float32 tiles (tiles/state.py: working).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, side, strides
from foci.tiles import near
from foci.tiles.chunk_backward import onto, store_in_two
from foci.tiles.gates import by_ends, by_pairs, load_gates
from foci.tiles.memory import load_tile, store_tile
from foci.tiles.state import chunk_at, rounded, working
from foci.tiles.whole import read_rows, within

CHUNK = 64


@triton.jit
def pairs_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, d_out_ptr, dv_ptr, dv_low_ptr, errors_ptr, offsets_ptr, pairs_ptr, rows_ptr,
    q_strides, k_strides, e_strides, beta_strides, g_strides, d_out_strides, scale, zero, T, N, H, R, K, V, size, half,
    tokens, SAME: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The pairs of one chunk and one key head, P_A in every other program and P_E in those between.

    Their sums over heads, times beta, go to pairs [3 or 4,..,B,T,G,CHUNK], `size` apart: P_A, its transpose, P_E and
    its own (SAME, where e is k: both in one sum), in bfloat16 as two, `half` apart. What beta and gates
    take of them, and the factors rise and fall, go to rows [..,B,T,H], `tokens` apart.
    """
    of_e, rest = tl.program_id(0) % 2, tl.program_id(0) // 2
    G = H // R
    group, chunk = (rest % G).to(tl.int64), rest // G
    n, b, first, stop, _slot = chunk_at(offsets_ptr, chunk, N, T, CHUNK)
    if n < 0:
        return
    tl.assume(K > 0)
    tl.assume(V > 0)
    tl.assume(R > 0)
    row, size, tokens = tl.cast(b, tl.int64), tl.cast(size, tl.int64), tl.cast(tokens, tl.int64)
    q_ptr += row * q_strides[0] + group * q_strides[2]
    k_ptr += row * k_strides[0] + group * k_strides[2]
    e_ptr += row * e_strides[0] + group * e_strides[2]
    beta_ptr += row * beta_strides[0] + group * R * beta_strides[2]
    if g_ptr is not None:
        g_ptr += row * g_strides[0] + group * R * g_strides[2]
    d_out_ptr += row * d_out_strides[0] + group * R * d_out_strides[2]
    pairs_ptr += (row * T * G + group) * CHUNK
    head = row * T * H + group * R
    errors_ptr += head * V
    if of_e == 0:
        P = pairs_of(
            q_ptr, q_strides, k_ptr, k_strides, beta_ptr, beta_strides, g_ptr, g_strides, d_out_ptr,
            d_out_strides, None, errors_ptr, rows_ptr + head, scale, zero, first, stop, H, R, K, V,
            tokens, True, EVEN, PRECISION, CHUNK, BLOCK_K, BLOCK_V,
        )  # fmt: skip
        store_in_two(pairs_ptr, half, P, first, stop, G * CHUNK, 0, CHUNK)
        store_in_two(pairs_ptr + size, half, tl.trans(P), first, stop, G * CHUNK, 0, CHUNK)
    else:
        if dv_low_ptr is not None:
            dv_low_ptr += head * V
        P = pairs_of(
            e_ptr, e_strides, k_ptr, k_strides, beta_ptr, beta_strides, g_ptr, g_strides, dv_ptr + head * V,
            (0, H * V, V, 1), dv_low_ptr, errors_ptr, rows_ptr + tokens + head,
            -1.0, zero, first, stop, H, R, K, V, tokens, False, EVEN, PRECISION, CHUNK, BLOCK_K, BLOCK_V,
        )  # fmt: skip
        if SAME:
            P += tl.trans(P)
        else:
            store_in_two(pairs_ptr + 3 * size, half, tl.trans(P), first, stop, G * CHUNK, 0, CHUNK)
        store_in_two(pairs_ptr + 2 * size, half, P, first, stop, G * CHUNK, 0, CHUNK)


@triton.jit
def pairs_of(  # type: ignore[no-untyped-def]
    x_ptr, x_strides, k_ptr, k_strides, beta_ptr, beta_strides, g_ptr, g_strides, from_ptr, from_strides, low_ptr,
    d_ptr, rows_ptr, factor, zero, first, stop, H, R, K, V, tokens,
    OWN: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The sum over heads of beta P, P = factor W from d^T, of pairs on (OWN) and below the diagonal."""
    NEAR: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    product = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
        x = working(read_rows(x_ptr, first, stop, x_strides[1], k0, K, x_strides[3], CHUNK, BLOCK_K, EVEN))
        k = working(read_rows(k_ptr, first, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, EVEN))
        product = tl.dot(x, tl.trans(k), product, input_precision=PRECISION)
    product *= factor
    found = tl.zeros([CHUNK, CHUNK], tl.float32)
    for r in tl.range(R, disable_licm=True):
        t0 = first + zero * r  # what the loop changes stays in it: addresses kept through it would cost registers
        dP = tl.zeros([CHUNK, CHUNK], tl.float32)
        for v0 in range(0, V, BLOCK_V):
            here = from_ptr + r * from_strides[2]
            x = working(read_rows(here, t0, stop, from_strides[1], v0, V, from_strides[3], CHUNK, BLOCK_V, EVEN))
            d = read_rows(d_ptr + r * V, t0, stop, H * V, v0, V, 1, CHUNK, BLOCK_V, EVEN)
            if d.dtype == tl.bfloat16:
                rest = read_rows(d_ptr + tokens * V + r * V, t0, stop, H * V, v0, V, 1, CHUNK, BLOCK_V, EVEN)
                dP = tl.dot(x, tl.trans(rest), dP)
                if low_ptr is not None:
                    low = read_rows(low_ptr + r * V, t0, stop, H * V, v0, V, 1, CHUNK, BLOCK_V, EVEN)
                    dP = tl.dot(low, tl.trans(d), dP)
                dP = tl.dot(x, tl.trans(d), dP)
            else:
                d = tl.trans(rounded(d, PRECISION))
                dP = tl.dot(rounded(x, PRECISION), d, dP, input_precision=PRECISION)
        t0 += zero
        t, s = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
        at = (t0 + tl.arange(0, CHUNK)).to(tl.int64)
        here = rows_ptr + r + at * H
        dP = tl.where(t >= s if OWN else t > s, dP, 0.0)
        if g_ptr is not None:
            g = load_gates(g_ptr + r * g_strides[2], t0, stop, g_strides[1], CHUNK)
            dP *= near.weights(g, True, NEAR)
            if OWN:
                rise, fall = near.ends(g, True, NEAR)
                tl.store(here + 4 * tokens, rise, mask=at < stop)
                tl.store(here + 5 * tokens, fall, mask=at < stop)
        beta = load_gates(beta_ptr + r * beta_strides[2], t0, stop, beta_strides[1], CHUNK)
        both, dP = dP * product, dP * beta[None, :]
        found += dP
        if OWN:
            on = tl.sum(tl.where(t == s, both, 0.0), 1)
            both = tl.where(t > s, both, 0.0)
        by_columns = tl.sum(both, 0)
        tl.store(here, by_columns + on if OWN else by_columns, mask=at < stop)
        if g_ptr is not None:
            if NEAR:
                by_gate = tl.sum(both * beta[None, :], 1) - beta * by_columns
            else:
                by_gate = by_pairs(both * beta[None, :], True)
            tl.store(here + 2 * tokens, by_gate, mask=at < stop)
    return factor * found


@triton.jit
def side_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, beta_ptr, d_out_ptr, dv_ptr, errors_ptr, states_ptr, ends_ptr, offsets_ptr,
    pairs_ptr, rows_ptr, d_q_ptr, d_k_ptr, d_e_ptr, d_beta_ptr, d_g_ptr,
    q_strides, k_strides, e_strides, beta_strides, d_out_strides, scale, zero, T, N, H, R, K, V, size, half,
    tokens, GATES: tl.constexpr, EVEN: tl.constexpr, CONSTANT: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What goes through the states of one chunk of one key head and the R heads that read it, and all sums.

    Without `e_ptr` k erases. `pairs_ptr` and `rows_ptr`: see `pairs_kernel`; what a block of K gives to beta and gates
    joins rows. EVEN: no block of K or V is a part of one. CONSTANT: d_g [chunks,H], the sum over tokens.
    """
    NEAR: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
    tl.assume(K > 0)  # else a loop might be left out, and Hopper's assembler would have each product wait (C7515)
    tl.assume(V > 0)
    tl.assume(R > 0)
    group, chunk, G = (tl.program_id(0) % (H // R)).to(tl.int64), tl.program_id(0) // (H // R), H // R
    n, b, first, stop, slot = chunk_at(offsets_ptr, chunk, N, T, CHUNK)
    if n < 0:
        if CONSTANT and d_g_ptr is not None:
            for r in range(R):
                tl.store(d_g_ptr + chunk * H + group * R + r, 0.0)
        return
    row, size, tokens = tl.cast(b, tl.int64), tl.cast(size, tl.int64), tl.cast(tokens, tl.int64)
    q_ptr += row * q_strides[0] + group * q_strides[2]
    k_ptr += row * k_strides[0] + group * k_strides[2]
    if e_ptr is not None:
        e_ptr += row * e_strides[0] + group * e_strides[2]
    pairs_ptr += (row * T * G + group) * CHUNK
    for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
        d_q = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        d_k = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        d_e = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        by_q = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        by_e = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        by_w = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        by_total = tl.zeros([BLOCK_K, BLOCK_V // 8], tl.float32)
        blocks = tl.cdiv(V, BLOCK_V)
        for i in tl.range(R * blocks, disable_licm=True):  # heads and blocks of V in one loop: loads run ahead
            h, v0 = group * R + i // blocks, i % blocks * BLOCK_V
            head, there = row * T * H + h, (slot * H + h) * K * V
            t0 = first + zero * i  # what the loop changes stays in it: addresses kept through it would cost registers
            here = d_out_ptr + row * d_out_strides[0] + h * d_out_strides[2]
            S = working(read_rows(states_ptr + there, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V, EVEN))
            dS = working(read_rows(ends_ptr + there, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V, EVEN))
            do = read_rows(here, t0, stop, d_out_strides[1], v0, V, d_out_strides[3], CHUNK, BLOCK_V, EVEN)
            dv = read_rows(dv_ptr + head * V, t0, stop, H * V, v0, V, 1, CHUNK, BLOCK_V, EVEN)
            d = read_rows(errors_ptr + head * V, t0, stop, H * V, v0, V, 1, CHUNK, BLOCK_V, EVEN)
            by_q = tl.dot(do.to(S.dtype), tl.trans(S), by_q, input_precision=PRECISION)
            by_e = tl.dot(dv, tl.trans(S), by_e, input_precision=PRECISION)
            by_w = tl.dot(d, tl.trans(dS), by_w, input_precision=PRECISION)
            by_total += tl.sum(tl.reshape(S.to(tl.float32) * dS.to(tl.float32), [BLOCK_K, BLOCK_V // 8, 8]), 2)
            if v0 + BLOCK_V >= V:
                at = (t0 + tl.arange(0, CHUNK)).to(tl.int64)
                rows = rows_ptr + head + at * H
                beta = load_gates(
                    beta_ptr + row * beta_strides[0] + h * beta_strides[2], t0, stop, beta_strides[1], CHUNK
                )
                rise = tl.full([CHUNK], 1.0, tl.float32)
                fall = rise
                if GATES:
                    rise = tl.load(rows + 4 * tokens, mask=at < stop, other=0.0)
                    fall = tl.load(rows + 5 * tokens, mask=at < stop, other=0.0)
                by_q, by_e, by_w = by_q * (scale * rise)[:, None], by_e * rise[:, None], by_w * fall[:, None]
                d_q += by_q
                d_k += by_w * beta[:, None]
                if e_ptr is None:
                    d_k -= by_e
                else:
                    d_e -= by_e
                k = read_rows(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, EVEN).to(tl.float32)
                rows += (6 + k0 // BLOCK_K * 2) * tokens
                tl.store(rows, tl.sum(k * by_w, 1), mask=at < stop)
                if d_g_ptr is not None:
                    q = read_rows(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K, EVEN)
                    if e_ptr is None:
                        by_rise = tl.sum(q.to(tl.float32) * by_q - k * by_e, 1)
                    else:
                        e = read_rows(e_ptr, t0, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_K, EVEN)
                        by_rise = tl.sum(q.to(tl.float32) * by_q - e.to(tl.float32) * by_e, 1)
                    # A gate takes what rise has from its token on: at the last one is also what total has.
                    end = tl.minimum(stop, t0 + CHUNK) - 1
                    by_rise += tl.where(at == end, rise * tl.sum(by_total), 0.0)
                    tl.store(rows + tokens, by_rise, mask=at < stop)
                by_q = tl.zeros([CHUNK, BLOCK_K], tl.float32)
                by_e = tl.zeros([CHUNK, BLOCK_K], tl.float32)
                by_w = tl.zeros([CHUNK, BLOCK_K], tl.float32)
                by_total = tl.zeros([BLOCK_K, BLOCK_V // 8], tl.float32)
        t0, into = first + zero * k0, (row * T * G + group) * K
        d_q = onto(d_q, pairs_ptr, half, G * CHUNK, k_ptr, k_strides, t0, stop, k0, K, PRECISION, EVEN)
        if d_q_ptr is not None:
            store_tile(d_q_ptr + into, d_q, t0, stop, G * K, k0, K, 1)
        d_k = onto(d_k, pairs_ptr + size, half, G * CHUNK, q_ptr, q_strides, t0, stop, k0, K, PRECISION, EVEN)
        if e_ptr is None:
            d_k = onto(d_k, pairs_ptr + 2 * size, half, G * CHUNK, k_ptr, k_strides, t0, stop, k0, K, PRECISION, EVEN)
        else:
            d_k = onto(d_k, pairs_ptr + 3 * size, half, G * CHUNK, e_ptr, e_strides, t0, stop, k0, K, PRECISION, EVEN)
            d_e = onto(d_e, pairs_ptr + 2 * size, half, G * CHUNK, k_ptr, k_strides, t0, stop, k0, K, PRECISION, EVEN)
            if d_e_ptr is not None:
                store_tile(d_e_ptr + into, d_e, t0, stop, G * K, k0, K, 1)
        if d_k_ptr is not None:
            store_tile(d_k_ptr + into, d_k, t0, stop, G * K, k0, K, 1)
        tl.debug_barrier()  # the next block's, and those below, read what others have written
    at = (first + tl.arange(0, CHUNK)).to(tl.int64)
    for r in tl.range(R, disable_licm=True):
        h = group * R + r
        head = row * T * H + h
        here = rows_ptr + head + at * H
        by_fall = tl.zeros([CHUNK], tl.float32)
        by_rise = tl.zeros([CHUNK], tl.float32)
        for i in range(tl.cdiv(K, BLOCK_K)):
            by_fall += tl.load(here + (6 + 2 * i) * tokens, mask=at < stop, other=0.0)
            if d_g_ptr is not None:
                by_rise += tl.load(here + (7 + 2 * i) * tokens, mask=at < stop, other=0.0)
        if d_beta_ptr is not None:
            d_beta = tl.load(here, mask=at < stop, other=0.0) + tl.load(here + tokens, mask=at < stop, other=0.0)
            tl.store(d_beta_ptr + head + at * H, d_beta + by_fall, mask=at < stop)
        if d_g_ptr is not None:
            beta = load_gates(
                beta_ptr + row * beta_strides[0] + h * beta_strides[2], first, stop, beta_strides[1], CHUNK
            )
            d_g = tl.load(here + 2 * tokens, mask=at < stop, other=0.0)
            d_g += tl.load(here + 3 * tokens, mask=at < stop, other=0.0)
            if NEAR:
                d_g = by_ends(by_rise + d_g, beta * by_fall, 0.0)
            else:
                d_g += by_ends(by_rise, beta * by_fall, 0.0)
            if CONSTANT:
                tl.store(d_g_ptr + chunk * H + h, tl.sum(tl.where(at < stop, d_g, 0.0), 0))
            else:
                tl.store(d_g_ptr + head + at * H, d_g, mask=at < stop)


@triton.jit
def sums_kernel(parts_ptr, sum_ptr, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum over the rows of [rows, columns]."""
    c0 = tl.program_id(0) * BLOCK_C
    found = tl.zeros([1, BLOCK_C], tl.float32)
    for row in range(0, rows, BLOCK_R):
        found += tl.sum(load_tile(parts_ptr, row, rows, columns, c0, columns, 1, BLOCK_R, BLOCK_C), 0, keep_dims=True)
    store_tile(sum_ptr, found, 0, 1, columns, c0, columns, 1)


def _pairs_rule(K: int, V: int, wide: bool, target: Target) -> Config:
    """On Hopper operands go to shared memory by themselves, blocks ahead."""
    if target.arch == 90 and not wide:  # as measured on an H200
        return Config({"BLOCK_K": side(K, 64), "BLOCK_V": side(V, 64)}, warps=4, stages=3)
    return Config({"BLOCK_K": side(K, 16 if wide else 32), "BLOCK_V": side(V, 32)}, warps=8, stages=1)


def _side_rule(K: int, V: int, wide: bool, target: Target) -> Config:
    """As many channels as registers hold without a spill."""
    if target.arch == 90 and not wide:  # as measured on an H200
        return Config({"BLOCK_K": side(K, 64), "BLOCK_V": side(V, 64)}, warps=8, stages=3)
    return Config({"BLOCK_K": side(K, 16 if wide else 32), "BLOCK_V": side(V, 32)}, warps=8, stages=1)


def _sums_rule(target: Target) -> Config:
    return Config({"BLOCK_R": 32, "BLOCK_C": 64}, warps=4, stages=1)


def side_by_token(problem: Any, kept: Sequence[Tensor], d_out: Tensor, dv: Any, behind: Tensor) -> None:
    """All that is left when the walk has made dv and the gradients `behind` each chunk."""
    call, g, parts, erase = problem.call, problem.g, None, problem.erase
    d_q, d_k, _, d_beta, d_g, d_erase, _ = problem.found
    low, errors = None, kept[1]
    if isinstance(dv, tuple):
        (dv, low), errors = dv, errors[0]
    if d_g is not None and problem.constant:
        d_g = parts = dv.new_empty(problem.chunks, problem.H, dtype=torch.float32)
    ahead, config = problem.config("pairs", _pairs_rule), problem.config("side", _side_rule)
    pairs, rows = _waiting(problem, dv, -(-problem.K // config["BLOCK_K"]))
    sizes = (problem.T, problem.N, problem.H, problem.H // problem.G, problem.K, problem.V)
    apart, even = (pairs[0].numel(), pairs[0, 0].numel(), rows[0].numel()), _even(problem, d_out, ahead)
    launch(
        pairs_kernel, (2 * problem.chunks * problem.G,),
        call.q, call.k, erase, call.beta, g, d_out, dv, low, kept[1], call.offsets, pairs, rows,
        call.q.stride(), call.k.stride(), erase.stride(), call.beta.stride(), strides(g), d_out.stride(), call.scale,
        0, *sizes, *apart, config=ahead, SAME=call.erase is None, EVEN=even,
        PRECISION=problem.precision, CHUNK=CHUNK,
    )  # fmt: skip
    even = _even(problem, d_out, config)
    launch(
        side_kernel, (problem.chunks * problem.G,),
        call.q, call.k, call.erase, call.beta, d_out, dv, errors, kept[0], behind, call.offsets,
        pairs, rows, d_q, d_k, d_erase, d_beta, d_g,
        call.q.stride(), call.k.stride(), strides(call.erase), call.beta.stride(), d_out.stride(),
        call.scale, 0, *sizes, *apart, config=config, GATES=g is not None, EVEN=even,
        CONSTANT=problem.constant, PRECISION=problem.precision, CHUNK=CHUNK,
    )  # fmt: skip
    if parts is not None:
        config = configure("delta_backward_sums", (), _sums_rule, problem.target)
        launch(sums_kernel, (-(-problem.H // config["BLOCK_C"]),), parts, problem.found[4], *parts.shape, config=config)


def _waiting(problem: Any, like: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """What the first launch leaves: pairs, and what each head's tokens have."""
    tokens, half = (problem.B, problem.T), problem.call.q.dtype == torch.bfloat16
    sets, dtype = 3 if problem.call.erase is None else 4, torch.bfloat16 if half else torch.float32
    return (
        like.new_empty(sets, 2 if half else 1, *tokens, problem.G, CHUNK, dtype=dtype),
        like.new_empty(6 + 2 * blocks, *tokens, problem.H, dtype=torch.float32),
    )


def _even(problem: Any, d_out: Tensor, config: Config) -> bool:
    """Whether no block of K or V is a part of one, and a tile's places are numbers of 32 bits (tiles/whole.py)."""
    near = within(CHUNK, max(problem.K, problem.V), problem.call.q, problem.call.k, problem.erase, d_out)
    return near and problem.K % config["BLOCK_K"] == 0 and problem.V % config["BLOCK_V"] == 0
