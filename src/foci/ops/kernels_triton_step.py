"""One token of linear attention or the delta rule in Triton: each part of the state is read once, written in place."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, strides, target_of


@triton.jit
def step_kernel(  # type: ignore[no-untyped-def]
    state_ptr, q_ptr, k_ptr, v_ptr, beta_ptr, g_ptr, erase_ptr, bonus_ptr, slots_ptr, out_ptr,
    state_strides, q_strides, k_strides, v_strides, beta_strides, g_strides, erase_strides, bonus_strides,
    slots_strides, scale, M, H, R, K, V, PER_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """S' = Diag(exp(g)) S;  S <- S' + k w^T, w = v;  o = scale S^T q, with a bonus u  scale (S + Diag(u) k w^T)^T q.

    With beta the delta rule's: w = beta (v - S'^T e), e = k where there is no other. One head of one row, BLOCK_V
    columns of its state. A slot outside 0.. M: nothing is read or changed, o = 0.
    """
    b, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    slot = b if slots_ptr is None else tl.load(slots_ptr + b * slots_strides[0]).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    v = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    there = (slot >= 0) & (slot < M)
    rows, columns = there & (k < K), there & (v < V)
    inside = rows[:, None] & columns[None, :]
    state_ptr += slot * state_strides[0] + h * state_strides[1]
    places = state_ptr + k[:, None] * state_strides[2] + v[None, :] * state_strides[3]
    S = tl.load(places, mask=inside, other=0.0)
    query = tl.load(q_ptr + b * q_strides[0] + h // R * q_strides[1] + k * q_strides[2], mask=rows, other=0.0)
    key = tl.load(k_ptr + b * k_strides[0] + h // R * k_strides[1] + k * k_strides[2], mask=rows, other=0.0)
    value = tl.load(v_ptr + b * v_strides[0] + h * v_strides[1] + v * v_strides[2], mask=columns, other=0.0)
    value, read = value.to(tl.float32), S
    if g_ptr is not None:
        g_ptr += b * g_strides[0] + h * g_strides[1]
        if PER_CHANNEL:
            S *= tl.exp(tl.load(g_ptr + k * g_strides[2], mask=rows, other=0.0).to(tl.float32))[:, None]
        else:
            S *= tl.exp(tl.load(g_ptr, mask=there, other=0.0).to(tl.float32))
    if beta_ptr is not None:
        erase = key
        if erase_ptr is not None:
            erase_ptr += b * erase_strides[0] + h // R * erase_strides[1]
            erase = tl.load(erase_ptr + k * erase_strides[2], mask=rows, other=0.0)
        beta = tl.load(beta_ptr + b * beta_strides[0] + h * beta_strides[1], mask=there, other=0.0).to(tl.float32)
        value = beta * (value - tl.sum(erase.to(tl.float32)[:, None] * S, 0))
    written = key.to(tl.float32)[:, None] * value[None, :]
    S += written
    if bonus_ptr is None:
        read = S
    else:
        bonus = tl.load(bonus_ptr + h * bonus_strides[0] + k * bonus_strides[1], mask=rows, other=0.0).to(tl.float32)
        read += bonus[:, None] * written
    out = tl.sum(query.to(tl.float32)[:, None] * read, 0) * scale
    tl.debug_barrier()  # all have read before any writes: a small state lies in several threads
    tl.store(places, S, mask=inside)
    tl.store(out_ptr + (b * H + h) * V + v, out.to(out_ptr.dtype.element_ty), mask=v < V)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    scale: float,
    *,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    bonus: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """out [B,H,V] in v's dtype of q, k [B,G,K], v [B,H,V]; `state` [B or M,H,K,V] is changed in place, in one launch.

    log_decay [B or 1, H, K or 1], bonus [H,K]; of the delta rule beta [B,H], erase [B,G,K].
    """
    (B, G, K), (H, V) = q.shape, v.shape[1:]
    out, target = torch.empty(B, H, V, dtype=v.dtype, device=v.device), target_of(v.device)
    name = "linear_step" if beta is None else "delta_step"
    config = configure(name, (K, V), partial(rule, heads=B * H, K=K, V=V), target)
    inputs = (state, q, k, v, beta, log_decay, erase, bonus, slots)
    launch(
        step_kernel, (B * H, triton.cdiv(V, config["BLOCK_V"])), *inputs, out, *map(strides, inputs),
        scale, state.shape[0], H, H // G, K, V,
        PER_CHANNEL=log_decay is not None and log_decay.shape[2] > 1, config=config,
    )  # fmt: skip
    return out


def rule(target: Target, heads: int, K: int, V: int) -> Config:
    """32 KiB of the state at a time, of K whole; less where programs would be too few to fill the GPU."""
    block_k = triton.next_power_of_2(K)
    block_v = min(triton.next_power_of_2(V), max(16, 8192 // block_k))
    while block_v > 16 and heads * triton.cdiv(V, block_v) < 2 * target.processors:
        block_v //= 2
    return Config({"BLOCK_K": block_k, "BLOCK_V": block_v}, warps=max(1, min(4, block_k * block_v // 1024)), stages=1)
