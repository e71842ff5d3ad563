"""The equation, literally; any device, float64; short enough to read in a minute."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops.masks import check, materialize
from foci.ops.softmax.call import Call, without_padding
from foci.ops.softmax.dropout import keep, positions


def reasons(call: Call) -> list[str]:
    return []


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B,T,H,V] in v's dtype and lse [B,T,H]; computed in float32, float64 for float64."""
    return equation(call, call.accumulator)


def equation(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Softmax attention with every intermediate in `dtype`.

    z[t,s] = cap(scale * q_t . k_s) + bias[t,s];  lse[t] = log(sum_s exp z[t,s] + exp sink);  out[t] = sum_s exp(z -
    lse) v_s
    """
    B, T, S, H, G, _, _ = call.sizes
    check(call.visible, B, T, S)
    q, k, v = (x.transpose(1, 2).to(dtype) for x in without_padding(call)[:3])
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))  # head h reads h // (H / G)

    z = q @ k.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        z = call.softcap * torch.tanh(z / call.softcap)
    if call.bias is not None:
        z = z + call.bias.to(dtype)
    z = z.masked_fill(~materialize(call.visible, T, S).to(z.device), -torch.inf)
    if call.sink is not None:  # one more key that has no value
        z = torch.cat([z, call.sink.to(dtype).view(1, H, 1, 1).expand(B, H, T, 1)], dim=-1)

    empty = (z == -torch.inf).all(-1, keepdim=True)  # a row that may see nothing: out = 0, lse = -inf
    lse = z.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True) if z.shape[-1] else z.sum(-1, keepdim=True)
    p = torch.exp(z - lse)[..., :S]
    if call.seed is not None:
        kept = keep(call.seed, call.dropout, *positions(B, H, T, S, z.device))
        p = torch.where(kept, p / (1 - call.dropout), 0.0)
    out = (p @ v).transpose(1, 2)
    lse = lse.masked_fill(empty, -torch.inf)[..., 0].transpose(1, 2)
    return out.to(call.v.dtype).contiguous(), lse.to(call.accumulator).contiguous()
