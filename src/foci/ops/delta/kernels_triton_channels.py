"""What gates per channel ask of the delta rule's backward in Triton: operands of its walk, and a chunk's gradients.

Its walk (kernels_triton_backward.py) reads scale rise q, X^T fall beta k, rise e, A X and each chunk's total, which the
first launch here makes. The last one makes dA = do d^T and dE = -dv d^T of one chunk and head, and goes through the
channels in blocks, each of which has decays of its own. In bfloat16 pairs are those of tiles/pairs.py, of float32
rounded to TF32 or two bfloat16, else those of tiles/gates.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, dependent_launch, launch, side, strides
from foci.tiles import gates, near
from foci.tiles.chunk_backward import gather, load_in_two, of_beta, store_in_two
from foci.tiles.gates import load_gates, pairs_backward_onto, total
from foci.tiles.memory import load_row, load_tile, store_tile
from foci.tiles.near import DOWN, UP
from foci.tiles.pairs import band_backward, below, of_two, on_diagonal, parted, sums_behind
from foci.tiles.state import chunk_at, working
from foci.tiles.through import onto_end, outers, through_states
from foci.tiles.turns import begin_next, wait_for_last
from foci.tiles.whole import read, within, write

CHUNK = 64


@triton.jit
def ends_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, A_ptr, X_ptr, offsets_ptr,
    risen_q_ptr, solved_k_ptr, risen_e_ptr, solved_A_ptr, total_ptr, sums_ptr,
    q_strides, k_strides, e_strides, beta_strides, g_strides, scale, T, N, H, R, K, half,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """scale rise q, X^T fall beta k, rise e [B,T,H,K], total of one chunk, head and block of K; or so many rows of A X.

    In bfloat16 all but scale rise q are two each. In half precision also what gates sum to, which tells of totals that
    float32 has no number for. Without `e_ptr` k erases; WHOLE: no tile reaches beyond its tensor (tiles/whole.py).
    """
    NEAR: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
    WIDE: tl.constexpr = 2 * CHUNK if X_ptr.dtype.element_ty == tl.bfloat16 else CHUNK
    blocks = tl.cdiv(K, BLOCK_K)
    parts = blocks + CHUNK // BLOCK_K
    part, rest = tl.program_id(0) % parts, tl.program_id(0) // parts
    h = (rest % H).to(tl.int64)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, rest // H, N, T, CHUNK)
    if n < 0:
        return
    row = tl.cast(b, tl.int64)
    first = row * T * H + h
    X, X_lost = load_in_two(X_ptr + first * WIDE, CHUNK, t0, stop, H * WIDE, CHUNK, CHUNK, WHOLE)
    zeros = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    if part < blocks:
        k0, into = part * BLOCK_K, first * K
        here = g_ptr + row * g_strides[0] + h * g_strides[2]
        g = read(here, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
        beta = load_gates(beta_ptr + row * beta_strides[0] + h * beta_strides[2], t0, stop, beta_strides[1], CHUNK)
        q_ptr += row * q_strides[0] + h // R * q_strides[2]
        q = read(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
        k_ptr += row * k_strides[0] + h // R * k_strides[2]
        k = read(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
        e = k
        if e_ptr is not None:
            e_ptr += row * e_strides[0] + h // R * e_strides[2]
            e = read(e_ptr, t0, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
        rise, fall = near.ends(g, True, NEAR)
        write(risen_q_ptr + into, q * (scale * rise), t0, stop, H * K, k0, K, WHOLE)
        store_in_two(risen_e_ptr + into, half, e * rise, t0, stop, H * K, k0, K, WHOLE)
        c = k0 + tl.arange(0, BLOCK_K)
        sums = tl.sum(near.bounded(g) if NEAR else g, 0)
        tl.store(total_ptr + (slot * H + h) * K + c, tl.exp(sums), mask=c < K)
        if NEAR:
            tl.store(sums_ptr + (slot * H + h) * K + c, sums, mask=c < K)
        high, low = parted(k * (fall * beta[:, None]), X.dtype, PRECISION)
        k = of_two(tl.trans(X), tl.trans(X_lost), high, low, zeros, PRECISION)
        store_in_two(solved_k_ptr + into, half, k, t0, stop, H * K, k0, K, WHOLE)
    else:
        r = t0 + (part - blocks) * BLOCK_K
        A, A_lost = load_in_two(A_ptr + first * WIDE, CHUNK, r, stop, H * WIDE, BLOCK_K, CHUNK, WHOLE)
        # as X^T A^T: of X on the right of a product every warp would hold all
        A = tl.trans(of_two(tl.trans(X), tl.trans(X_lost), tl.trans(A), tl.trans(A_lost), zeros, PRECISION))
        store_in_two(solved_A_ptr + first * WIDE, CHUNK, A, r, stop, H * WIDE, 0, CHUNK, WHOLE)


@triton.jit
def side_by_channel_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, d_out_ptr, dv_ptr, errors_ptr, states_ptr, ends_ptr, offsets_ptr,
    dP_ptr, q_sums_ptr, k_sums_ptr, e_sums_ptr, d_q_ptr, d_k_ptr, d_e_ptr, d_beta_ptr, d_g_ptr,
    q_strides, k_strides, e_strides, beta_strides, g_strides, d_out_strides, scale, zero, T, N, H, R, K, V, half,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One chunk of one key head and the R heads that read it. Without `e_ptr` k erases, and has its gradient.

    dA and dE below the diagonal are in memory, dP [2,B,T,H,CHUNK], `half` apart: products read them from there, and so
    no registers hold them through the channels.
    """
    group = (tl.program_id(0) % (H // R)).to(tl.int64)
    n, b, first, stop, slot = chunk_at(offsets_ptr, tl.program_id(0) // (H // R), N, T, CHUNK)
    if n < 0:
        return
    row, G = tl.cast(b, tl.int64), H // R
    q_ptr += row * q_strides[0] + group * q_strides[2]
    k_ptr += row * k_strides[0] + group * k_strides[2]
    if e_ptr is not None:
        e_ptr += row * e_strides[0] + group * e_strides[2]
    into = (row * T * G + group) * K
    for r in tl.range(R, disable_licm=True):
        t0 = first + zero * r  # what the loop changes stays in it: addresses kept through it would cost registers
        h = group * R + r
        head, there = row * T * H + h, (slot * H + h) * K * V
        out_ptr = d_out_ptr + row * d_out_strides[0] + h * d_out_strides[2]
        gates_ptr = g_ptr + row * g_strides[0] + h * g_strides[2]
        d_ptr, value_ptr = errors_ptr + head * V, dv_ptr + head * V
        dA, dE = outers(
            out_ptr, d_out_strides, value_ptr, d_ptr, H * V, t0, stop, V, tl.float32, PRECISION, CHUNK, BLOCK_V, False
        )
        store_tile(dP_ptr + half + head * CHUNK, below(-dE), t0, stop, H * CHUNK, 0, CHUNK, 1)
        dA *= scale
        on = on_diagonal(dA)
        store_tile(dP_ptr + head * CHUNK, below(dA), t0, stop, H * CHUNK, 0, CHUNK, 1)
        tl.debug_barrier()
        beta = load_gates(beta_ptr + row * beta_strides[0] + h * beta_strides[2], t0, stop, beta_strides[1], CHUNK)
        d_beta = tl.zeros([CHUNK], tl.float32)
        for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
            t0 = first + zero * k0
            by_q, by_e, by_w, by_total = through_states(
                out_ptr, d_out_strides, value_ptr, d_ptr, H * V, states_ptr + there, ends_ptr + there,
                t0, stop, k0, K, V, PRECISION, CHUNK, BLOCK_K, BLOCK_V, False,
            )  # fmt: skip
            by_q, by_e = by_q * scale, -by_e
            t0 += zero
            g, q, e, w = operands(
                gates_ptr, q_ptr, e_ptr, k_ptr, beta, g_strides, q_strides, e_strides, k_strides,
                t0, stop, k0, K, CHUNK, BLOCK_K,
            )  # fmt: skip
            by_total *= total(g)
            rise, fall = gates.ends(g)
            d_w = by_w * fall
            dA = load_tile(dP_ptr + head * CHUNK, t0, stop, H * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK)
            dE = load_tile(dP_ptr + half + head * CHUNK, t0, stop, H * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK)
            d_q, d_e = by_q * rise, by_e * rise
            d_g = gates.by_ends(q * d_q + e * d_e, w * d_w, by_total)
            d_q, d_w = d_q + on[:, None] * w, d_w + on[:, None] * q
            d_q, d_w, d_g = pairs_backward_onto(d_q, d_w, d_g, dA, q, w, g, True, PRECISION)
            d_e, d_w, d_g = pairs_backward_onto(d_e, d_w, d_g, dE, e, w, g, True, PRECISION)
            t0 = first + zero * k0 + zero
            gather(d_q_ptr, q_sums_ptr, into, d_q, r, R, t0, stop, G * K, k0, K)
            if d_g_ptr is not None:
                store_tile(d_g_ptr + head * K, d_g, t0, stop, H * K, k0, K, 1)
            k = load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K).to(tl.float32)
            d_beta += tl.sum(d_w * k, 1)
            d_k = beta[:, None] * d_w
            if e_ptr is None:
                d_k += d_e
            else:
                gather(d_e_ptr, e_sums_ptr, into, d_e, r, R, t0, stop, G * K, k0, K)
            gather(d_k_ptr, k_sums_ptr, into, d_k, r, R, t0, stop, G * K, k0, K)
        if d_beta_ptr is not None:
            at = (first + tl.arange(0, CHUNK)).to(tl.int64)
            tl.store(d_beta_ptr + head + at * H, d_beta, mask=at < stop)


@triton.jit
def near_side_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, sums_ptr, d_out_ptr, dv_ptr, errors_ptr, states_ptr, ends_ptr, offsets_ptr,
    dP_ptr, d_value_ptr, q_sums_ptr, k_sums_ptr, e_sums_ptr, d_q_ptr, d_k_ptr, d_e_ptr, d_beta_ptr, d_g_ptr,
    q_strides, k_strides, e_strides, beta_strides, g_strides, d_out_strides, scale, T, N, H, R, K, V, half,
    EACH: tl.constexpr, FAR: tl.constexpr, KEEP: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, ALL_K: tl.constexpr, BESIDE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`side_by_channel_kernel` in bfloat16, of EACH chunks: a launch for those whose rows are all near, and, FAR,
    one before it for all others, as sums of gates say; BESIDE: it begins beside that one, whose rows take long, and its
    last program waits for it. dA and dE are two, side by side.

    KEEP: do, dv and d, V in one block, lie in shared memory through the channels, as dA and dE do. WHOLE: no tile
    reaches beyond its tensor (tiles/whole.py). What d_q, d_e and d_w wait for, a band's rise or lift, they are given
    when products have been added up; for in the first one fall is lift times total.
    """
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    PARTS: tl.constexpr = 2
    if FAR:
        begin_next(BESIDE)
    for i in range(EACH):
        program, G = tl.program_id(0) * EACH + i, H // R
        group = (program % G).to(tl.int64)
        n, b, t0, stop, slot = chunk_at(offsets_ptr, program // G, N, T, CHUNK)
        row, heads = tl.cast(b, tl.int64), tl.where(n < 0, 0, R)
        into = (row * T * G + group) * K
        far = 0
        for r in range(heads):
            far = tl.maximum(far, near.forgets(sums_ptr + (slot * H + group * R + r) * K, near.REACH, K, ALL_K))
        for r in tl.range(tl.where((far == 0) == FAR, 0, heads), disable_licm=True):
            h = group * R + r
            query_ptr = q_ptr + row * q_strides[0] + group * q_strides[2]
            key_ptr = k_ptr + row * k_strides[0] + group * k_strides[2]
            head, there = row * T * H + h, (slot * H + h) * K * V
            out_ptr = d_out_ptr + row * d_out_strides[0] + h * d_out_strides[2]
            gates_ptr = g_ptr + row * g_strides[0] + h * g_strides[2]
            d_ptr, value_ptr = errors_ptr + head * V, dv_ptr + head * V
            dA, dE = outers(
                out_ptr, d_out_strides, value_ptr, d_ptr, H * V, t0, stop, V, DTYPE, PRECISION, CHUNK, BLOCK_V, WHOLE
            )
            on, by_error = scale * on_diagonal(dA), on_diagonal(dE)
            dA, dE = below(scale * dA), -below(dE)
            pairs_ptr = dP_ptr + head * PARTS * CHUNK
            high, low = parted(dA, DTYPE, PRECISION)
            write(pairs_ptr, high, t0, stop, H * PARTS * CHUNK, 0, CHUNK, WHOLE)
            write(pairs_ptr + CHUNK, low, t0, stop, H * PARTS * CHUNK, 0, CHUNK, WHOLE)
            high, low = parted(dE, DTYPE, PRECISION)
            write(pairs_ptr + half, high, t0, stop, H * PARTS * CHUNK, 0, CHUNK, WHOLE)
            write(pairs_ptr + half + CHUNK, low, t0, stop, H * PARTS * CHUNK, 0, CHUNK, WHOLE)
            tl.debug_barrier()
            A = read(pairs_ptr, t0, stop, H * PARTS * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, WHOLE)
            E = read(pairs_ptr + half, t0, stop, H * PARTS * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, WHOLE)
            A_low = read(pairs_ptr + CHUNK, t0, stop, H * PARTS * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, WHOLE)
            E_low = read(pairs_ptr + half + CHUNK, t0, stop, H * PARTS * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, WHOLE)
            pairs = A, A_low, E, E_low
            if KEEP:
                do = working(read(out_ptr, t0, stop, d_out_strides[1], 0, V, d_out_strides[3], CHUNK, BLOCK_V, WHOLE))
                if d_value_ptr is None:
                    dv = read(value_ptr, t0, stop, H * V, 0, V, 1, CHUNK, BLOCK_V, WHOLE).to(do.dtype)
                else:
                    dv = working(read(d_value_ptr + head * V, t0, stop, H * V, 0, V, 1, CHUNK, BLOCK_V, WHOLE))
                d, d_lost = parted(read(d_ptr, t0, stop, H * V, 0, V, 1, CHUNK, BLOCK_V, WHOLE), DTYPE, PRECISION)
            beta = load_gates(beta_ptr + row * beta_strides[0] + h * beta_strides[2], t0, stop, beta_strides[1], CHUNK)
            d_beta = tl.zeros([CHUNK], tl.float32)
            for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
                whole = tl.exp2(load_row(sums_ptr + (slot * H + h) * K, k0, K, BLOCK_K) * near.LOG2E + UP)
                g = read(gates_ptr, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
                q = read(query_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
                k = read(key_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
                e = k
                if e_ptr is not None:
                    e_there = e_ptr + row * e_strides[0] + group * e_strides[2]
                    e = read(e_there, t0, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
                if KEEP:
                    S = working(read(states_ptr + there, k0, K, V, 0, V, 1, BLOCK_K, BLOCK_V, WHOLE))
                    dS = working(read(ends_ptr + there, k0, K, V, 0, V, 1, BLOCK_K, BLOCK_V, WHOLE))
                    to_q = tl.dot(do, tl.trans(S), input_precision=PRECISION)
                    to_e = tl.dot(dv, tl.trans(S), input_precision=PRECISION)
                    by_w = onto_end(d, d_lost, dS, tl.zeros([CHUNK, BLOCK_K], tl.float32), PRECISION)
                    by_total = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
                else:
                    to_q, to_e, by_w, by_total = through_states(
                        out_ptr, d_out_strides, value_ptr, d_ptr, H * V, states_ptr + there, ends_ptr + there,
                        t0, stop, k0, K, V, PRECISION, CHUNK, BLOCK_K, BLOCK_V, WHOLE,
                    )  # fmt: skip
                c, last = near.sums_in_two(g, FAR)
                w = k * beta[:, None]
                if FAR:
                    d_q, d_e, by_token = tl.zeros_like(c), tl.zeros_like(c), tl.zeros_like(c)
                    d_w = tl.exp2(last - c) * by_w
                    by_fall = w * d_w
                    for i in tl.range(near.bands(c), disable_licm=True):
                        rise, lift = near.of_band(c, i, True)
                        once = tl.where(i == 0, DOWN, 0.0)
                        x, y, z, of_token = band_backward(
                            scale * once * to_q, -once * to_e, tl.zeros_like(c), pairs, q, e, w, rise, lift,
                            DTYPE, PRECISION,
                        )  # fmt: skip
                        d_q, d_e, d_w, by_token = d_q + x, d_e + y, d_w + z, by_token + of_token
                else:
                    rise, lift = near.of_band(c, 0, False)
                    to_w = by_w * whole[None, :]
                    by_fall = w * lift * to_w
                    d_q, d_e, d_w, by_token = band_backward(
                        scale * DOWN * to_q, -DOWN * to_e, to_w, pairs, q, e, w, rise, lift, DTYPE, PRECISION
                    )
                d_g = tl.zeros([CHUNK, BLOCK_K], tl.float32)
                d_g += (by_total * (whole * DOWN) + tl.sum(by_fall, 0))[None, :]
                if FAR:
                    by_token -= by_fall
                d_g = sums_behind(by_token, d_g, DTYPE)
                d_q, d_w = d_q + on[:, None] * w, d_w + on[:, None] * q
                gather(d_q_ptr, q_sums_ptr, into, d_q, r, R, t0, stop, G * K, k0, K)
                if d_g_ptr is not None:
                    write(d_g_ptr + head * K, d_g, t0, stop, H * K, k0, K, WHOLE)
                d_beta += tl.sum(d_w * k, 1)
                d_k = beta[:, None] * d_w
                if e_ptr is None:
                    d_k += d_e
                else:
                    gather(d_e_ptr, e_sums_ptr, into, d_e, r, R, t0, stop, G * K, k0, K)
                gather(d_k_ptr, k_sums_ptr, into, d_k, r, R, t0, stop, G * K, k0, K)
            if d_beta_ptr is not None:
                at = (t0 + tl.arange(0, CHUNK)).to(tl.int64)
                d_beta = of_beta(by_error, beta, d_beta, 2.0**-30)  # columns of pairs are up to 2^88 times as small
                tl.store(d_beta_ptr + head + at * H, d_beta, mask=at < stop)
    if not FAR and tl.program_id(0) == tl.num_programs(0) - 1:
        wait_for_last(BESIDE)


@triton.jit
def operands(  # type: ignore[no-untyped-def]
    g_ptr, q_ptr, e_ptr, k_ptr, beta, g_strides, q_strides, e_strides, k_strides,
    t0, stop, k0, K, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """g, q, e (k without `e_ptr`) and w = beta k [CHUNK,BLOCK_K] in float32."""
    g = load_tile(g_ptr, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K).to(tl.float32)
    q = load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K).to(tl.float32)
    k = load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K).to(tl.float32)
    e = k
    if e_ptr is not None:
        e = load_tile(e_ptr, t0, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_K).to(tl.float32)
    return g, q, e, k * beta[:, None]


def _ends_rule(K: int, V: int, dtype: torch.dtype, target: Target) -> Config:
    half = dtype == torch.bfloat16
    wide = half and target.arch == 90  # as measured on an H200
    # Products of float32 tiles by four warps would spill.
    return Config({"BLOCK_K": side(K, 64 if wide else 32)}, warps=4 if half else 8, stages=1)


def _channels_rule(K: int, V: int, dtype: torch.dtype, target: Target) -> Config:
    if target.arch == 90:  # as measured on an H100: it spills, and is faster than what does not
        return Config({"BLOCK_K": side(K, 32), "BLOCK_V": side(V, 32)}, warps=4, stages=2)
    return Config({"BLOCK_K": 16, "BLOCK_V": side(V, 32)}, warps=8, stages=1)


def _near_rule(K: int, V: int, dtype: torch.dtype, target: Target) -> Config:
    """Where a processor has room for two programs' do, dv and d, they lie there; else they are read in blocks."""
    if target.arch == 90:
        return Config({"BLOCK_K": side(K, 32), "BLOCK_V": side(V, 128)}, warps=4, stages=1)
    return Config({"BLOCK_K": 16, "BLOCK_V": side(V, 32)}, warps=8, stages=1)


def for_walk(problem: Any, kept: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """scale rise q, X^T fall beta k, rise e [B,T,H,K], total [slots,H,K], A X; k, e and A X in bfloat16 as two.

    The problem is given what gates sum to.
    """
    call, (states, _, inverse, products) = problem.call, kept[:4]
    shape = problem.B, problem.T, problem.H, problem.K
    q, parts = states.new_empty(shape), (2,) if states.dtype == torch.bfloat16 else ()
    k, e = states.new_empty(2, *parts, *shape).unbind()
    A = torch.empty_like(products)
    gone, sums = states.new_empty(2, states.numel() // problem.V, dtype=torch.float32).unbind()
    config = problem.config("ends", _ends_rule)
    launch(
        ends_kernel, (problem.chunks * problem.H * (-(-problem.K // config["BLOCK_K"]) + CHUNK // config["BLOCK_K"]),),
        call.q, call.k, call.erase, call.beta, problem.g, products, inverse, call.offsets, q, k, e, A, gone, sums,
        call.q.stride(), call.k.stride(), strides(call.erase), call.beta.stride(), strides(problem.g), call.scale,
        problem.T, problem.N, problem.H, problem.H // problem.G, problem.K, q.numel(),
        config=config, WHOLE=_whole(problem, config["BLOCK_K"]), PRECISION=problem.precision, CHUNK=CHUNK,
    )  # fmt: skip
    problem.gates = sums
    return q, k, e, gone, A


def _whole(problem: Any, block_k: int, block_v: int = 1, *more: Tensor) -> bool:
    """Whether no tile of such blocks reaches beyond its tensor, those `more` included."""
    call, sizes = problem.call, (problem.T % CHUNK, problem.K % block_k, problem.V % block_v)
    near_by = within(CHUNK, max(problem.K, problem.V), call.q, call.k, call.erase, problem.g, *more)
    return call.offsets is None and not any(sizes) and near_by


def side_by_channel(problem: Any, kept: Sequence[Tensor], d_out: Tensor, dv: Tensor, behind: Tensor) -> None:
    """All that is left when the walk has made dv and the gradients `behind` each chunk."""
    if problem.call.q.dtype == torch.bfloat16:
        _near_side(problem, kept, d_out, dv, behind)
        return
    call, config = problem.call, problem.config("side_by_channel", _channels_rule)
    d_q, d_k, _, d_beta, d_g, d_erase, _ = problem.found
    waiting = dv.new_empty(2, problem.B, problem.T, problem.H, CHUNK)
    launch(
        side_by_channel_kernel, (problem.chunks * problem.G,),
        call.q, call.k, call.erase, call.beta, problem.g, d_out, dv, kept[1], kept[0], behind, call.offsets,
        waiting, *map(problem.sums, (d_q, d_k, d_erase)), d_q, d_k, d_erase, d_beta, d_g,
        call.q.stride(), call.k.stride(), strides(call.erase), call.beta.stride(), strides(problem.g),
        d_out.stride(), call.scale, 0, problem.T, problem.N, problem.H, problem.H // problem.G, problem.K,
        problem.V, waiting[0].numel(), config=config, PRECISION=problem.precision, CHUNK=CHUNK,
    )  # fmt: skip


def _near_side(problem: Any, kept: Sequence[Tensor], d_out: Tensor, dv: Tensor, behind: Tensor) -> None:
    """The same in bfloat16, far chunks and beside them near ones, which wait at their end, by as many warps.

    Of other warps other instructions make a product: near rows would differ in their last bits by what comes later.
    """
    call, config = problem.call, problem.config("near_side", _near_rule)
    d_q, d_k, d_value, d_beta, d_g, d_erase, _ = problem.found
    waiting = dv.new_empty(2, problem.B, problem.T, problem.H, 2, CHUNK, dtype=torch.bfloat16)
    whole = _whole(problem, config["BLOCK_K"], config["BLOCK_V"], d_out)
    programs = problem.chunks * problem.G
    for far in (True, False):
        # Most find nothing far: fewer of them take less time for it.
        each = next(n for n in (8, 4, 2, 1) if programs % n == 0) if far else 1
        launch(
            near_side_kernel, (programs // each,),
            call.q, call.k, call.erase, call.beta, problem.g, problem.gates, d_out, dv, kept[1], kept[0], behind,
            call.offsets, waiting, d_value, *map(problem.sums, (d_q, d_k, d_erase)),
            d_q, d_k, d_erase, d_beta, d_g,
            call.q.stride(), call.k.stride(), strides(call.erase), call.beta.stride(), strides(problem.g),
            d_out.stride(), call.scale, problem.T, problem.N, problem.H, problem.H // problem.G, problem.K, problem.V,
            waiting[0].numel(), config=config, EACH=each, FAR=far, KEEP=not far and config["BLOCK_V"] >= problem.V,
            WHOLE=whole, PRECISION=problem.precision, CHUNK=CHUNK, ALL_K=side(problem.K, 1 << 20),
            **dependent_launch(problem.target, not far),
        )  # fmt: skip
