"""What gates per channel ask of the delta rule's backward in Triton: decayed operands, and a chunk's gradients.

Its walk (kernels_triton_backward.py) reads rise q, fall k, rise e and each chunk's total, which the first launch here
makes. The last one makes dA = do d^T and dE = -dv d^T of one chunk and head, and goes through the channels in blocks,
each of which has decays of its own. All tiles are float32. In half precision pairs are those of
tiles/pairs.py, in float32 those of tiles/gates.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, launch, side, strides
from foci.tiles import gates, near
from foci.tiles.chunk_backward import decayed, gather, outer, store_in_two, through_both
from foci.tiles.gates import load_gates, pairs_backward_onto, total
from foci.tiles.memory import load_tile, store_tile
from foci.tiles.pairs import below, far_backward, near_backward, on_diagonal
from foci.tiles.state import chunk_at, rounded

CHUNK = 64


@triton.jit
def ends_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, g_ptr, offsets_ptr, risen_q_ptr, fallen_k_ptr, risen_e_ptr, total_ptr,
    q_strides, k_strides, e_strides, g_strides, T, N, H, R, K, half, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """rise q, fall k, rise e [B,T,H,K] and total of one chunk, one head, one block of K; e in bfloat16 as two."""
    NEAR: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
    k0, rest = tl.program_id(0) % tl.cdiv(K, BLOCK_K) * BLOCK_K, tl.program_id(0) // tl.cdiv(K, BLOCK_K)
    h = (rest % H).to(tl.int64)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, rest // H, N, T, CHUNK)
    if n < 0:
        return
    row = tl.cast(b, tl.int64)
    here = g_ptr + row * g_strides[0] + h * g_strides[2]
    g = load_tile(here, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K).to(tl.float32)
    rise, fall = near.ends(g, True, NEAR)
    into = (row * T * H + h) * K
    q = decayed(q_ptr, q_strides, row, h // R, rise, t0, stop, k0, K)
    store_tile(risen_q_ptr + into, q, t0, stop, H * K, k0, K, 1)
    k = decayed(k_ptr, k_strides, row, h // R, fall, t0, stop, k0, K)
    store_tile(fallen_k_ptr + into, k, t0, stop, H * K, k0, K, 1)
    e = decayed(e_ptr, e_strides, row, h // R, rise, t0, stop, k0, K)
    store_in_two(risen_e_ptr + into, half, e, t0, stop, H * K, k0, K)
    c = k0 + tl.arange(0, BLOCK_K)
    tl.store(total_ptr + (slot * H + h) * K + c, total(g), mask=c < K)


@triton.jit
def side_by_channel_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, d_out_ptr, dv_ptr, errors_ptr, states_ptr, ends_ptr, offsets_ptr,
    far_ptr, dP_ptr, q_sums_ptr, k_sums_ptr, e_sums_ptr, d_q_ptr, d_k_ptr, d_e_ptr, d_beta_ptr, d_g_ptr,
    q_strides, k_strides, e_strides, beta_strides, g_strides, d_out_strides, scale, zero, T, N, H, R, K, V, half,
    FAR: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One chunk of one key head and the R heads that read it. Without `e_ptr` k erases, and has its gradient.

    dA and dE below the diagonal are in memory, dP [2,B,T,H,CHUNK], `half` apart: products read them from there, and so
    no registers hold them through the channels. In half precision a first launch takes near pairs alone, and says in
    `far_ptr`, a number per program, where that was not all; there the second, FAR, does all again.
    """
    NEAR: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
    if FAR:  # noqa: SIM102  a constant and a tensor
        if tl.load(far_ptr + tl.program_id(0)) == 0:
            return
    group = (tl.program_id(0) % (H // R)).to(tl.int64)
    n, b, first, stop, slot = chunk_at(offsets_ptr, tl.program_id(0) // (H // R), N, T, CHUNK)
    if n < 0:
        if NEAR and not FAR:
            tl.store(far_ptr + tl.program_id(0), 0)
        return
    row, G, levels = tl.cast(b, tl.int64), H // R, 0
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
        dE = -outer(value_ptr, (0, H * V, 0, 1), d_ptr, H * V, t0, stop, V, True, PRECISION, CHUNK, BLOCK_V)
        store_tile(
            dP_ptr + half + head * CHUNK, rounded(dE, PRECISION) if NEAR else dE, t0, stop, H * CHUNK, 0, CHUNK, 1
        )
        dA = scale * outer(out_ptr, d_out_strides, d_ptr, H * V, t0, stop, V, False, PRECISION, CHUNK, BLOCK_V)
        on = on_diagonal(dA)
        dA = below(dA)
        store_tile(dP_ptr + head * CHUNK, rounded(dA, PRECISION) if NEAR else dA, t0, stop, H * CHUNK, 0, CHUNK, 1)
        tl.debug_barrier()
        beta = load_gates(beta_ptr + row * beta_strides[0] + h * beta_strides[2], t0, stop, beta_strides[1], CHUNK)
        d_beta = tl.zeros([CHUNK], tl.float32)
        for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
            t0 = first + zero * k0
            by_q, by_e, by_w, by_total = through_both(
                out_ptr, d_out_strides, value_ptr, d_ptr, H * V, states_ptr + there, ends_ptr + there,
                t0, stop, k0, K, V, PRECISION, CHUNK, BLOCK_K, BLOCK_V,
            )  # fmt: skip
            by_q, by_e = by_q * scale, -by_e
            t0 += zero
            g, q, e, w = operands(
                gates_ptr, q_ptr, e_ptr, k_ptr, beta, g_strides, q_strides, e_strides, k_strides,
                t0, stop, k0, K, CHUNK, BLOCK_K,
            )  # fmt: skip
            by_total *= total(g)
            rise, fall = near.ends(g, True, NEAR)
            d_w = by_w * fall
            dA = load_tile(dP_ptr + head * CHUNK, t0, stop, H * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK)
            if NEAR:
                _, c, close = near.exponents(g, True)
                by_fall = w * d_w
                d_w += on[:, None] * q
                d_g = tl.zeros_like(g) + (by_total + tl.sum(by_fall, 0))[None, :]
                down, to_w = rounded(w * near.lift(c), PRECISION), tl.zeros([CHUNK, BLOCK_K], tl.float32)
                d_q, to_w, by_q = near_backward(by_q, to_w, dA, q, down, c, close, PRECISION)
                t0 += zero
                dE = load_tile(dP_ptr + half + head * CHUNK, t0, stop, H * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK)
                d_e, to_w, by_e = near_backward(by_e, to_w, dE, e, down, c, close, PRECISION)
                d_g += tl.cumsum(by_q + by_e - down * to_w - by_fall, 0, reverse=True)
                d_q, d_w = d_q + on[:, None] * w, d_w + near.lift(c) * to_w
                levels = tl.maximum(levels, near.far_levels(close))
                for i in tl.range(2 * near.far_levels(close) if FAR else 0, disable_licm=True):  # A and E in turn
                    t0 = first + zero * i
                    g, q, e, w = operands(
                        gates_ptr, q_ptr, e_ptr, k_ptr, beta, g_strides, q_strides, e_strides, k_strides,
                        t0, stop, k0, K, CHUNK, BLOCK_K,
                    )  # fmt: skip
                    here = dP_ptr + i % 2 * half + head * CHUNK
                    dP = load_tile(here, t0, stop, H * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK)
                    _, c, close = near.exponents(g, True)
                    x = tl.where(i % 2 == 0, q, e)
                    to_x, d_w, d_g = far_backward(d_w, d_g, dP, x, w, c, close, i // 2, PRECISION)
                    d_q += tl.where(i % 2 == 0, to_x, 0.0)
                    d_e += tl.where(i % 2 == 0, 0.0, to_x)
            else:
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
        if NEAR and not FAR:
            tl.store(far_ptr + tl.program_id(0), levels)
        if d_beta_ptr is not None:
            at = (first + tl.arange(0, CHUNK)).to(tl.int64)
            tl.store(d_beta_ptr + head + at * H, d_beta, mask=at < stop)


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


def _ends_rule(K: int, V: int, wide: bool, target: Target) -> Config:
    return Config({"BLOCK_K": side(K, 32)}, warps=4, stages=1)


def _channels_rule(K: int, V: int, wide: bool, target: Target) -> Config:
    if target.arch == 90 and not wide:  # as measured on an H200: it spills, and is faster than what does not
        return Config({"BLOCK_K": side(K, 32), "BLOCK_V": side(V, 64)}, warps=4, stages=1)
    return Config({"BLOCK_K": 16, "BLOCK_V": side(V, 32)}, warps=8, stages=1)


def with_decays(problem: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rise q, fall k, rise e [B,T,H,K], total [slots,H,K]; rise e in bfloat16 [2,..]: its rounding, what is left."""
    call, shape = problem.call, (problem.B, problem.T, problem.H, problem.K)
    q, k = states.new_empty(2, *shape).unbind()
    e = states.new_empty(*((2,) if states.dtype == torch.bfloat16 else ()), *shape)
    gone = states.new_empty(states.numel() // problem.V, dtype=torch.float32)
    config = problem.config("ends", _ends_rule)
    launch(
        ends_kernel, (problem.chunks * problem.H * -(-problem.K // config["BLOCK_K"]),),
        call.q, call.k, problem.erase, problem.g, call.offsets, q, k, e, gone,
        call.q.stride(), call.k.stride(), problem.erase.stride(), strides(problem.g),
        problem.T, problem.N, problem.H, problem.H // problem.G, problem.K, q.numel(), config=config, CHUNK=CHUNK,
    )  # fmt: skip
    return q, k, e, gone


def side_by_channel(problem: Any, kept: Sequence[Tensor], d_out: Tensor, dv: Tensor, behind: Tensor) -> None:
    """All that is left when the walk has made dv and the gradients `behind` each chunk."""
    call, config = problem.call, problem.config("side_by_channel", _channels_rule)
    d_q, d_k, _, d_beta, d_g, d_erase, _ = problem.found
    waiting, half = dv.new_empty(2, problem.B, problem.T, problem.H, CHUNK), call.q.dtype != torch.float32
    programs = problem.chunks * problem.G
    far = torch.empty(programs, dtype=torch.int32, device=dv.device) if half else None
    for again in (False, True)[: 2 if half else 1]:
        launch(
            side_by_channel_kernel, (programs,),
            call.q, call.k, call.erase, call.beta, problem.g, d_out, dv, kept[1], kept[0], behind, call.offsets,
            far, waiting, *map(problem.sums, (d_q, d_k, d_erase)), d_q, d_k, d_erase, d_beta, d_g,
            call.q.stride(), call.k.stride(), strides(call.erase), call.beta.stride(), strides(problem.g),
            d_out.stride(), call.scale, 0, problem.T, problem.N, problem.H, problem.H // problem.G, problem.K,
            problem.V, waiting[0].numel(),
            config=Config(config.blocks, 8, 1) if again else config, FAR=again, PRECISION=problem.precision,
            CHUNK=CHUNK,
        )  # fmt: skip
