"""fla.ops.gsa, gated slot attention: two passes of linear_attention with a softmax over the slots between."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from foci.compat.fla.arguments import Run, hold, tuning
from foci.core.errors import ShapeError
from foci.core.shapes import Signature, dense
from foci.core.spec import accumulator

States = tuple[Tensor, Tensor]
Query = Float[Tensor, "B T HQ K"]
Key = Float[Tensor, "B T H K"]
Value = Float[Tensor, "B T H V"]
Slots = Float[Tensor, "B T H M"]


def chunk_gsa(
    q: Query,
    k: Key,
    v: Value,
    s: Slots,
    g: Slots | None = None,
    scale: float | None = None,
    initial_state: States | None = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, States | None]:
    """Gated slot attention: a memory of M slots per head, each with its own decay.

        P_t = P_{t-1} Diag(exp(g_t)) + k_t s_t^T           the slots' keys, K x M
        W_t = Diag(exp(g_t)) W_{t-1} + s_t v_t^T           the slots' values, M x V
        o_t = W_t^T softmax(scale P_t^T q_t)

    q [B,T,HQ,K], k [B,T,H,K], v [B,T,H,V], s and g [B,T,H,M], HQ a multiple of H, g in natural log. Without g, slots
    are filled as in ABC: z_t = log(exp(s_1) + ... + exp(s_t)), g_t = z_{t-1} - z_t and s_t <- exp(s_t - z_t).
    States are (P [N,H,K,M], W [N,H,M,V]) -> (o [B,T,HQ,V], final states or None). In the first pass every slot is a
    head: M times the work. checkpoint_level trades FLA's memory for time, and has no effect on the result.
    Papers: Zhang et al. 2024 (arXiv 2409.07146); ABC, Peng et al. 2021 (2110.02488).
    """
    tuning(chunk_size=chunk_size, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    if checkpoint_level not in (0, 1, 2):
        raise ValueError(f"checkpoint_level must be 0, 1 or 2, got {checkpoint_level!r}")
    return fused_recurrent_gsa(q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_gsa(
    q: Query,
    k: Key,
    v: Value,
    s: Slots,
    g: Slots | None = None,
    scale: float | None = None,
    initial_state: States | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States | None]:
    """`chunk_gsa`, in either direction; without g the slots are still filled from the first token on, as in FLA."""
    hold(_GSA, {"q": q, "k": k, "v": v, "s": s, "g": g})
    if initial_state is not None and (not isinstance(initial_state, tuple | list) or len(initial_state) != 2):
        raise ValueError("initial_state is not a pair; expected (P [N,H,K,M], W [N,H,M,V])")
    keys, values = (None if x is None else dense("fla", "initial_state", x) for x in initial_state or (None, None))
    if g is None:
        Run(scale, keys, output_final_state, cu_seqlens).check(s)
        s, g = _filling(s, cu_seqlens)
    groups = q.shape[2] // max(k.shape[2], 1)
    if q.shape[2] != groups * k.shape[2]:
        raise ShapeError(f"q has {q.shape[2]} heads, k has {k.shape[2]}; expected a multiple")
    if groups > 1:
        k, v, s, g = (x.repeat_interleave(groups, dim=2) for x in (k, v, s, g))
        keys, values = (None if x is None else x.repeat_interleave(groups, dim=1) for x in (keys, values))
    wide = accumulator(v.dtype)  # half precision would round the logits before their softmax
    first = Run(scale, keys, output_final_state, cu_seqlens, reverse)
    logits, keys = first.linear(q.to(wide), k.to(wide), s.to(wide), value_decay=g)
    slots = logits.softmax(-1).to(v.dtype)
    out, values = Run(1.0, values, output_final_state, cu_seqlens, reverse).linear(slots, s.to(v.dtype), v, g)
    if keys is None or values is None:
        return out, None
    return out, (keys[:, ::groups].contiguous(), values[:, ::groups].contiguous())


def _filling(s: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """ABC's slots: s_t <- exp(s_t - z_t) and g_t = z_{t-1} - z_t, where z_t = logsumexp(s_1 .. s_t) and g_1 = 0."""
    wide = s.to(accumulator(s.dtype))
    parts = [wide] if cu_seqlens is None else list(wide.split(cu_seqlens.diff().tolist(), dim=1))
    totals = [part.logcumsumexp(1) for part in parts]
    gates = [torch.cat([z[:, :1], z[:, :-1]], 1) - z for z in totals]
    return (wide - torch.cat(totals, 1)).exp().to(s.dtype), torch.cat(gates, 1)


_GSA = Signature(fused_recurrent_gsa, "fla")
