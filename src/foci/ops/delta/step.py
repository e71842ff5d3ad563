"""One token per row: the state is read once, then decayed and written in place."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.delta.call import NAME

STEP = f"{NAME}_step"
_DECAYS = {1: ("H",), 2: ("B", "H"), 3: ("B", "H", "K")}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None,
    erase: Tensor | None,
    scale: float | None,
) -> Tensor:
    """out [B,H,V]. With d = exp(g) and u the write: S_t^T q = S^T (d q) + (q . k) u, one product reads the state."""
    named = {"q": q, "k": k, "v": v, "beta": beta, "state": state, "erase": erase, "log_decay": log_decay}
    sizes = arguments.bind_step(STEP, named)
    dtype = state.dtype
    B, H, K = v.shape[0], v.shape[1], sizes["K"]
    scale = (K or 1) ** -0.5 if scale is None else arguments.number(STEP, "scale", scale)
    log_decay = arguments.decay(STEP, log_decay, _DECAYS, v.new_empty(()).expand(B, H, K))
    reads = torch.stack([q, k if erase is None else erase], dim=2).to(dtype)
    reads, k = (arguments.spread(x, H, dim=1) for x in (reads, k.to(dtype)))
    decay = None if log_decay is None else torch.exp(log_decay.to(dtype))
    own = (reads[:, :, 0] * k).sum(-1, keepdim=True)
    if decay is not None:
        reads = reads * decay[..., None, :]
    old = torch.matmul(reads, state)
    u = (v.to(dtype) - old[:, :, 1]) * beta.to(dtype)[..., None]
    out = torch.addcmul(old[:, :, 0], own, u).mul_(scale)
    arguments.write(state, decay, k, u)
    return out.to(v.dtype)
