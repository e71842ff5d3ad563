"""One token per row: the state is read once, then decayed and written in place."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments, native
from foci.ops.decay.call import NAME

STEP = f"{NAME}_step"
_DECAYS = {1: ("H",), 2: ("B", "H"), 3: ("B", "H", "K")}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None,
    bonus: Tensor | None,
    scale: float | None,
) -> Tensor:
    """out [B,H,V]. With d = exp(g): S_t^T q = S^T (d q) + (q . k) v, so one product reads the old state."""
    named = {"q": q, "k": k, "v": v, "state": state, "bonus": bonus, "log_decay": log_decay}
    q, k, v = arguments.bind_step(STEP, named)
    dtype = state.dtype
    B, H, K, _ = state.shape
    scale = (K or 1) ** -0.5 if scale is None else arguments.number(STEP, "scale", scale)
    log_decay = arguments.decay(STEP, log_decay, _DECAYS, v.new_empty(()).expand(B, H, K))
    if native.steps(state):
        return native.step(q, k, v, state, scale, log_decay=log_decay, bonus=bonus).to(v.dtype)
    out_dtype = v.dtype
    q, k = (arguments.spread(x.to(dtype), H, dim=1) for x in (q, k))
    v = v.to(dtype)
    decay = None if log_decay is None else torch.exp(log_decay.to(dtype))
    if bonus is None:
        old = q if decay is None else q * decay
        own = (q * k).sum(-1, keepdim=True)
    else:
        old, own = q, (q * bonus.to(dtype) * k).sum(-1, keepdim=True)
    out = torch.matmul(old[..., None, :], state)[..., 0, :].addcmul_(own, v).mul_(scale)
    arguments.write(state, decay, k, v)
    return out.to(out_dtype)
