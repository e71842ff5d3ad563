"""The gradient of constant gates of linear attention in Triton, by differentiating forward.

A head's one gate g weighs each pair of tokens by exp((t - s) g), so that its gradient sums over all of them:

    dg = scale sum over t > s of (t - s) exp((t - s) g) (q_t . k_s) (do_t . v_s)

and what first and final states give; with a bonus t - 1 in place of t. That may be a fortieth of its terms and less, as
these have both signs: of states rounded for products, and gradients through them, it would keep no digit. Here a state
S and M = dS/dg go forward side by side, in float32,

    S <- total S + (fall k)^T v        M <- total (M + C S) + (left fall k)^T v

for a chunk of C tokens, of which `left` follow a token. With `age` the gates between the chunk's start and what a token
reads, dg takes  scale (<S, (age rise q)^T do> + <M, (rise q)^T do>)  of it, the pairs within it, and  <M, d_final>.
Weights go to v and do, which are what they were as the sum of two bfloat16 then, and q and k are as they came.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, float_precision, launch, side, strides, target_of
from foci.tiles.memory import load_tile
from foci.tiles.near import bounded
from foci.tiles.state import chunk_at, in_two, sequence, working

CHUNK = 64
WIDTHS = {"BLOCK_K": (16, 32, 64), "BLOCK_V": (16, 32, 64)}  # what `foci tune` may try


@triton.jit
def constant_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, state_ptr, offsets_ptr, do_ptr, d_final_ptr, parts_ptr,
    q_strides, k_strides, v_strides, g_strides, state_strides, do_strides, d_final_strides, scale, T, N, H, R, K, V,
    walks, OWN: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A part [P,H] of dg: what a block of a sequence's states gives; behind `walks` programs, a chunk's pairs."""
    h, part = (tl.program_id(0) % H).to(tl.int64), tl.program_id(0) // H
    g = bounded(tl.load(g_ptr + h * g_strides[2]).to(tl.float32))
    t = tl.arange(0, CHUNK)
    q_ptr += h // R * q_strides[2]
    k_ptr += h // R * k_strides[2]
    v_ptr += h * v_strides[2]
    do_ptr += h * do_strides[2]
    if tl.program_id(0) >= walks:
        n, b, t0, stop, _slot = chunk_at(offsets_ptr, part - walks // H, N, T, CHUNK)
        row, stop = tl.cast(b, tl.int64), tl.where(n < 0, t0, stop)
        A = of_rows(q_ptr, q_strides, k_ptr, k_strides, row, t0, stop, K, PRECISION, CHUNK, BLOCK_K)
        dA = of_rows(do_ptr, do_strides, v_ptr, v_strides, row, t0, stop, V, PRECISION, CHUNK, BLOCK_V)
        lag = t[:, None] - t[None, :] if OWN else t[:, None] - t[None, :] - 1
        there = (lag > 0) & (t[:, None] < stop - t0)
        tl.store(parts_ptr + tl.program_id(0), scale * tl.sum(tl.where(there, lag * tl.exp(lag * g) * A * dA, 0.0)))
        return
    v0, rest = part % tl.cdiv(V, BLOCK_V) * BLOCK_V, part // tl.cdiv(V, BLOCK_V)
    k0, n = rest % tl.cdiv(K, BLOCK_K) * BLOCK_K, (rest // tl.cdiv(K, BLOCK_K)).to(tl.int64)
    b, start, stop, _slot = sequence(offsets_ptr, n, T, CHUNK)
    row = tl.cast(b, tl.int64)
    q_ptr += row * q_strides[0]
    k_ptr += row * k_strides[0]
    v_ptr += row * v_strides[0]
    do_ptr += row * do_strides[0]
    S, zeros = tl.zeros([BLOCK_K, BLOCK_V], tl.float32), tl.zeros([BLOCK_K, 2 * BLOCK_V], tl.float32)
    if state_ptr is not None:
        state_ptr += n * state_strides[0] + h * state_strides[1]
        S = load_tile(state_ptr, k0, K, state_strides[2], v0, V, state_strides[3], BLOCK_K, BLOCK_V).to(tl.float32)
    both, dg = beside(S, tl.zeros_like(S)), zeros
    age = tl.minimum(t + 1 if OWN else t, stop - start)  # no more, so that no gate above 0 overflows where nothing is
    rise = tl.exp(age * g)[:, None]
    for t0 in range(start, stop, CHUNK):
        q = working(load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
        do = working(load_tile(do_ptr, t0, stop, do_strides[1], v0, V, do_strides[3], CHUNK, BLOCK_V))
        dg += both * product(q, beside(do * (age[:, None] * rise), do * rise), zeros, PRECISION)
        k = working(load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
        v = working(load_tile(v_ptr, t0, stop, v_strides[1], v0, V, v_strides[3], CHUNK, BLOCK_V))
        here = tl.minimum(stop - t0, CHUNK)
        left, total = tl.maximum(here - 1 - t, 0), tl.exp(here * g)
        fall = tl.exp(left * g)[:, None]
        S, M = tl.split(tl.reshape(both, [BLOCK_K, BLOCK_V, 2]))
        both = beside(total * S, total * (M + here * S))
        both = product(k, beside(v * fall, v * (left[:, None] * fall)), both, PRECISION)
    dg *= scale
    if d_final_ptr is not None:
        d_final_ptr += n * d_final_strides[0] + h * d_final_strides[1]
        S, M = tl.split(tl.reshape(both, [BLOCK_K, BLOCK_V, 2]))
        M *= load_tile(d_final_ptr, k0, K, d_final_strides[2], v0, V, d_final_strides[3], BLOCK_K, BLOCK_V)
        dg += beside(tl.zeros_like(M), tl.where(stop > start, M, 0.0))  # where no gate was, whatever d_final is
    tl.store(parts_ptr + tl.program_id(0), tl.sum(dg))


@triton.jit
def of_rows(  # type: ignore[no-untyped-def]
    x_ptr, x_strides, y_ptr, y_strides, b, t0, stop, columns, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """x y^T [CHUNK,CHUNK] of a chunk's rows, over all columns; 0 from `stop` on."""
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    for c0 in range(0, columns, BLOCK):
        here = x_ptr + b * x_strides[0]
        x = working(load_tile(here, t0, stop, x_strides[1], c0, columns, x_strides[3], CHUNK, BLOCK))
        here = y_ptr + b * y_strides[0]
        y = working(load_tile(here, t0, stop, y_strides[1], c0, columns, y_strides[3], CHUNK, BLOCK))
        A = tl.dot(x, tl.trans(y), A, input_precision=PRECISION)
    return A


@triton.jit
def beside(x, y):  # type: ignore[no-untyped-def]
    """[R,2C] of x and y [R,C], column by column: what a thread holds of a product's two it then holds of both."""
    return tl.reshape(tl.join(x, y), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def product(x, y, z, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x^T y + z of x [C,R] as it came, and y float32: where x is bfloat16, as the sum of two."""
    if x.dtype == tl.bfloat16:
        high, low = in_two(y)
        z = tl.dot(tl.trans(x), low, z)
        z = tl.dot(tl.trans(x), high, z)
    else:
        z = tl.dot(tl.trans(x), y, z, input_precision=PRECISION)
    return z


def rule(dtype: torch.dtype, K: int, V: int, target: Target) -> Config:
    """Two states, and what is summed, in registers; small blocks, because a program walks a whole sequence."""
    if dtype == torch.bfloat16 and target.arch == 90:  # as measured on an H100
        return Config({"BLOCK_K": side(K, 64), "BLOCK_V": side(V, 32)}, warps=4, stages=3)
    half = dtype == torch.bfloat16
    return Config({"BLOCK_K": side(K, 64 if half else 32), "BLOCK_V": side(V, 16)}, warps=4 if half else 8, stages=2)


def parts(call: Any, do: Tensor, d_final: Tensor | None, slots: int) -> Tensor:
    """Parts [P,H] whose sum is the gradient of `call.constant` gates. `slots`: of chunks (ops/gpu.py)."""
    _, T, G, H, K, V, N = call.sizes
    g, target = call.log_decay, target_of(do.device)
    key = do.dtype, K, V
    config = configure("linear_constant", key, partial(rule, *key), target, WIDTHS)
    blocks = -(-K // config["BLOCK_K"]) * -(-V // config["BLOCK_V"])
    found = torch.empty(N * blocks + slots, H, dtype=torch.float32, device=do.device)
    launch(
        constant_kernel,
        (found.numel(),),
        call.q, call.k, call.v, g, call.state, call.offsets, do, d_final, found,
        call.q.stride(), call.k.stride(), call.v.stride(), strides(g), strides(call.state), do.stride(),
        strides(d_final), call.scale, T, N, H, H // G, K, V, N * blocks * H,
        config=config, OWN=call.bonus is None, PRECISION=float_precision(torch.float32, target), CHUNK=CHUNK,
    )  # fmt: skip
    return found
