"""One token per row: the state is decayed, written and read in place."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments, step
from foci.ops.delta.call import NAME

STEP = f"{NAME}_step"


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
    named = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "erase": erase}
    return step.forward(STEP, _step, state, scale, slots, named)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    scale: float,
    *,
    beta: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
) -> Tensor:
    """One matmul reads the state for the key, another for the output.

    A single one with two rows, on the state before the write, is slower: it reads the state once per row.
    """
    dtype = state.dtype
    B, H, K, V = state.shape
    q, k, e = (arguments.spread(x.to(dtype), H, dim=1) for x in (q, k, k if erase is None else erase))
    if log_decay is not None:
        state.mul_(torch.exp(log_decay.to(dtype))[..., None])
    values, reads, queries = v.to(dtype).reshape(B * H, 1, V), e.reshape(B * H, 1, K), q.reshape(B * H, 1, K)
    error = torch.baddbmm(values, reads, state.flatten(0, 1), alpha=-1)
    arguments.write(state, None, k, error.view(B, H, V).mul_(beta.to(dtype)[..., None]))
    return torch.bmm(queries, state.flatten(0, 1)).mul_(scale).view(B, H, V)
