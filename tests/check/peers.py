"""Other people's parallel attentions as functions that `foci check --world` can call, on the default group."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@cache
def _config(size: int, kind: str, anything: bool = False) -> Any:
    """Diffusers' configuration of one dimension over all ranks, set up as enable_parallelism sets it up."""
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    degrees = {"ring": (size, 1), "ulysses": (1, size)}[kind]
    mesh = dist.device_mesh.init_device_mesh("cpu", degrees, mesh_dim_names=("ring", "ulysses"))
    config = ContextParallelConfig(
        ring_degree=degrees[0], ulysses_degree=degrees[1], ring_anything=anything and kind == "ring",
        ulysses_anything=anything and kind == "ulysses",
    )  # fmt: skip
    config.setup(dist.get_rank(), size, torch.device("cpu"), mesh)
    return ParallelConfig(context_parallel_config=config)


def _dispatched(q: Tensor, k: Tensor, v: Tensor, kind: str, anything: bool = False, **options: Any) -> Tensor:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    config = _config(dist.get_world_size(), kind, anything)
    return dispatch_attention_fn(q, k, v, backend="native", parallel_config=config, **options)


def diffusers_ulysses(q, k, v, *, scale=None):
    """As shipped: the backend "native", which runs on a CPU. It refuses causal and grouped heads by a ValueError."""
    return _dispatched(q, k, v, "ulysses", scale=scale)


def diffusers_ulysses_key_mask(q, k, v, *, attn_mask=None):
    """The same with the mask as models give it: over the keys, of this rank."""
    return _dispatched(q, k, v, "ulysses", attn_mask=_of_this_rank(attn_mask))


def diffusers_ulysses_anything(q, k, v, *, scale=None):
    return _dispatched(q, k, v, "ulysses", anything=True, scale=scale)


def diffusers_ring_native(q, k, v, *, scale=None):
    """As shipped: the only backend of a CPU, which gives no lse."""
    return _dispatched(q, k, v, "ring", scale=scale)


def diffusers_ring(q, k, v, *, scale=None, return_lse=False):
    """Diffusers' ring round torch's own CPU kernel, which returns a true lse: its other kernels need a GPU."""
    return _ring(q, k, v, scale=scale, return_lse=return_lse)


def diffusers_ring_key_mask(q, k, v, *, attn_mask=None):
    """The same with the mask as models give it: over the keys, of this rank."""
    return _ring(q, k, v, attn_mask=_of_this_rank(attn_mask))


def diffusers_ring_anything(q, k, v, *, scale=None, return_lse=False):
    return _ring(q, k, v, anything=True, scale=scale, return_lse=return_lse)


def _of_this_rank(mask: Tensor | None) -> Tensor | None:
    """[B, 1, T / P, S] of equal rows -> [B, 1, 1, S / P]."""
    if mask is None:
        return None
    other = torch.tensor([int(mask.shape[1] != 1 or bool((mask != mask[:, :, :1]).any()))])
    dist.all_reduce(other)
    if other.item():
        raise NotImplementedError("only a mask over the keys is asked")
    return mask[:, :, :1].chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


def _ring(q, k, v, anything=False, attn_mask=None, scale=None, return_lse=False) -> Any:
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    return _templated_context_parallel_attention(
        q, k, v, attn_mask, 0.0, False, scale, False, return_lse, forward_op=_cpu_forward, backward_op=_cpu_backward,
        _parallel_config=_config(dist.get_world_size(), "ring", anything),
    )  # fmt: skip


def _cpu_forward(
    ctx, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
    return_lse=False, _save_ctx=True, _parallel_config=None,
):  # fmt: skip
    """Shaped as Diffusers' own forward ops: [B,T,H,D] in, out and lse [B,T,H] back."""
    if attn_mask is not None:
        full = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        attn_mask = full.expand(query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if not key.numel() or not query.numel():
        raise NotImplementedError("torch's CPU kernel divides by the number of tokens")
    if _save_ctx:
        ctx.save_for_backward(query, key, value)
        ctx.attn_mask, ctx.is_causal, ctx.scale = attn_mask, is_causal, scale
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2) if lse.shape[1] == q.shape[1] else lse


def _cpu_backward(ctx, grad_out, query=None, key=None, value=None, out=None, lse=None, **rest):
    q, k, v, out, grad_out = (x.transpose(1, 2).contiguous() for x in (query, key, value, out, grad_out))
    if lse.shape[1] != q.shape[2]:
        raise AssertionError("lse is [B, T, H] here")
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse.transpose(1, 2).contiguous(), 0.0, ctx.is_causal, attn_mask=ctx.attn_mask,
        scale=ctx.scale,
    )  # fmt: skip
    return tuple(g.transpose(1, 2) for g in grads)


def torch_context_parallel(q, k, v, *, is_causal=False, scale=None, mesh, order):
    """torch's context_parallel round its own attention: [B,H,T/P,D]. Its balanced order is what we call zigzag.

    A buffer of a length that 2 P does not divide has it keep the plain order.
    """
    from torch.distributed.tensor.experimental import context_parallel

    buffer = torch.zeros(mesh.size() * (2 if order == "zigzag" else 1))
    context = partial(context_parallel, mesh, buffers=[buffer], buffer_seq_dims=[0])
    with context(), torch.enable_grad():
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
