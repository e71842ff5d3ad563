"""One token of the delta rule in Triton: each part of the state is read once, and written in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, target_of


@triton.jit
def delta_step_kernel(  # type: ignore[no-untyped-def]
    state_ptr, q_ptr, k_ptr, v_ptr, beta_ptr, g_ptr, erase_ptr, slots_ptr, out_ptr,
    state_strides, q_strides, k_strides, v_strides, beta_strides, g_strides, erase_strides, slots_stride,
    scale, M, H, R, K, V, PER_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """S' = Diag(exp(g)) S;  S <- S' + beta k (v - S'^T e)^T;  o = scale S^T q;  e = k where there is no other.

    One head of one row, BLOCK_V columns of its state. A slot outside 0.. M: nothing is read or changed, o = 0.
    """
    b, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    slot = b if slots_ptr is None else tl.load(slots_ptr + b * slots_stride).to(tl.int64)
    k, v = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    there = (slot >= 0) & (slot < M)
    rows, columns = there & (k < K), there & (v < V)
    inside = rows[:, None] & columns[None, :]
    state_ptr += slot * state_strides[0] + h * state_strides[1]
    places = state_ptr + k.to(tl.int64)[:, None] * state_strides[2] + v.to(tl.int64)[None, :] * state_strides[3]
    S = tl.load(places, mask=inside, other=0.0)
    query = tl.load(q_ptr + b * q_strides[0] + h // R * q_strides[1] + k * q_strides[2], mask=rows, other=0.0)
    key = tl.load(k_ptr + b * k_strides[0] + h // R * k_strides[1] + k * k_strides[2], mask=rows, other=0.0)
    value = tl.load(v_ptr + b * v_strides[0] + h * v_strides[1] + v * v_strides[2], mask=columns, other=0.0)
    if g_ptr is not None:
        g_ptr += b * g_strides[0] + h * g_strides[1]
        if PER_CHANNEL:
            S *= tl.exp(tl.load(g_ptr + k * g_strides[2], mask=rows, other=0.0).to(tl.float32))[:, None]
        else:
            S *= tl.exp(tl.load(g_ptr, mask=there, other=0.0).to(tl.float32))
    erase = key
    if erase_ptr is not None:
        erase_ptr += b * erase_strides[0] + h // R * erase_strides[1]
        erase = tl.load(erase_ptr + k * erase_strides[2], mask=rows, other=0.0)
    beta = tl.load(beta_ptr + b * beta_strides[0] + h * beta_strides[1], mask=there, other=0.0).to(tl.float32)
    error = beta * (value.to(tl.float32) - tl.sum(erase.to(tl.float32)[:, None] * S, 0))
    S += key.to(tl.float32)[:, None] * error[None, :]
    out = tl.sum(query.to(tl.float32)[:, None] * S, 0) * scale
    tl.store(places, S, mask=inside)
    out_ptr += (b * H + h) * V
    tl.store(out_ptr + v, out.to(out_ptr.dtype.element_ty), mask=v < V)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """out [B,H,V] in v's dtype of q, k, erase [B,G,K], v [B,H,V]; `state` [B or M,H,K,V] is changed in place.

    One launch. beta [B,H], log_decay [B or 1, H, K or 1].
    """
    (B, G, K), (H, V) = q.shape, v.shape[1:]
    out, target = torch.empty(B, H, V, dtype=v.dtype, device=v.device), target_of(v.device)
    config = configure("delta_step", (K, V), lambda target: rule(target, B * H, K, V), target)
    log_decay = None if log_decay is None else log_decay.expand(B, H, -1)
    launch(
        delta_step_kernel, (B * H, triton.cdiv(V, config["BLOCK_V"])),
        state, q, k, v, beta, log_decay, erase, slots, out,
        state.stride(), q.stride(), k.stride(), v.stride(), beta.stride(),
        None if log_decay is None else log_decay.stride(), None if erase is None else erase.stride(),
        None if slots is None else slots.stride(0),
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
