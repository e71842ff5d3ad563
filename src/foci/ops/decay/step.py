"""One token per row: the state is read once, then decayed and written in place."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments, gpu, native
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
    slots: Tensor | None,
) -> Tensor:
    """out [B,H,V]. With d = exp(g): S_t^T q = S^T (d q) + (q . k) v, so one product reads the old state."""
    named = {"q": q, "k": k, "v": v, "state": state, "bonus": bonus, "log_decay": log_decay, "slots": slots}
    q, k, v = arguments.bind_step(STEP, named)
    (B, H, _), K = v.shape, q.shape[2]
    scale = (K or 1) ** -0.5 if scale is None else arguments.number(STEP, "scale", scale)
    log_decay = arguments.decay(STEP, log_decay, _DECAYS, v.new_empty(()).expand(B, H, K))
    if gpu.steps(state):
        from foci.ops.decay.kernels_triton_step import step

        found = step(q, k, v, state, scale, log_decay=log_decay, bonus=bonus, slots=slots)
        torch.autograd.graph.increment_version(state)
        return found
    if slots is None:
        return _step(q, k, v, state, scale, log_decay, bonus)
    taken = arguments.Slots(state, slots)
    return taken.put(_step(q, k, v, taken.state, scale, log_decay, bonus))


def _step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, scale: float, log_decay: Tensor | None, bonus: Tensor | None
) -> Tensor:
    if native.steps(state):
        return native.step(q, k, v, state, scale, log_decay=log_decay, bonus=bonus).to(v.dtype)
    dtype, out_dtype = state.dtype, v.dtype
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
    return out.to(out_dtype)
