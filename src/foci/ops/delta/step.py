"""One token per row: the state is decayed, written and read in place."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments, gpu, native
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
    slots: Tensor | None,
) -> Tensor:
    """out [B,H,V], from the state of each row or of its slot."""
    named = {"q": q, "k": k, "v": v, "beta": beta, "state": state, "erase": erase, "log_decay": log_decay}
    q, k, v = arguments.bind_step(STEP, named | {"slots": slots})
    (B, H, _), K = v.shape, q.shape[2]
    scale = (K or 1) ** -0.5 if scale is None else arguments.number(STEP, "scale", scale)
    log_decay = arguments.decay(STEP, log_decay, _DECAYS, v.new_empty(()).expand(B, H, K))
    if gpu.steps(state):
        from foci.ops.delta.kernels_triton_step import step

        found = step(q, k, v, beta, state, scale, log_decay=log_decay, erase=erase, slots=slots)
        torch.autograd.graph.increment_version(state)
        return found
    if slots is None:
        return _step(q, k, v, beta, state, scale, log_decay, erase)
    taken = arguments.Slots(state, slots)
    return taken.put(_step(q, k, v, beta, taken.state, scale, log_decay, erase))


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    log_decay: Tensor | None,
    erase: Tensor | None,
) -> Tensor:
    """What the state holds under the key is read by one product, the output by another.

    Both at once, as two rows against the state before the write, is slower: the product then reads it once a row.
    """
    if native.steps(state):
        return native.step(q, k, v, state, scale, beta=beta, log_decay=log_decay, erase=erase).to(v.dtype)
    dtype, out_dtype = state.dtype, v.dtype
    B, H, K, V = state.shape
    q, k, e = (arguments.spread(x.to(dtype), H, dim=1) for x in (q, k, k if erase is None else erase))
    if log_decay is not None:
        state.mul_(torch.exp(log_decay.to(dtype))[..., None])
    values, reads, queries = v.to(dtype).reshape(B * H, 1, V), e.reshape(B * H, 1, K), q.reshape(B * H, 1, K)
    error = torch.baddbmm(values, reads, state.flatten(0, 1), alpha=-1)
    arguments.write(state, None, k, error.view(B, H, V).mul_(beta.to(dtype)[..., None]))
    return torch.bmm(queries, state.flatten(0, 1)).mul_(scale).view(B, H, V).to(out_dtype)
