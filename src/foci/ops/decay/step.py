"""One token per row: the state is read once, then decayed and written in place."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments, step
from foci.ops.decay.call import NAME

STEP = f"{NAME}_step"


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None,
    bonus: Tensor | None,
    scale: float | None,
    slots: Tensor | None,
) -> Tensor:
    """out [B,H,V], from the state of each row or of its slot."""
    named = {"q": q, "k": k, "v": v, "log_decay": log_decay, "bonus": bonus}
    return step.forward(STEP, _step, state, scale, slots, named)


def _step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, scale: float, *, log_decay: Tensor | None, bonus: Tensor | None
) -> Tensor:
    """With d = exp(g): S_t^T q = S^T (d q) + (q . k) v, so one product reads the old state."""
    dtype = state.dtype
    q, k = (arguments.spread(x.to(dtype), v.shape[1], dim=1) for x in (q, k))
    v = v.to(dtype)
    decay = None if log_decay is None else torch.exp(log_decay.to(dtype))
    if bonus is None:
        old = q if decay is None else q * decay
        own = (q * k).sum(-1, keepdim=True)
    else:
        old, own = q, (q * bonus.to(dtype) * k).sum(-1, keepdim=True)
    out = torch.matmul(old[..., None, :], state)[..., 0, :].addcmul_(own, v).mul_(scale)
    arguments.write(state, decay, k, v)
    return out
