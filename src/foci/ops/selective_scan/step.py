"""One token per row, the state updated in place."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from foci.core import plans
from foci.core.shapes import Signature
from foci.ops import arguments, step
from foci.ops.gpu import can_step
from foci.ops.selective_scan import gpu
from foci.ops.selective_scan.call import NAME, Rates, Skip, rates

STEP = f"{NAME}_step"
Token = Float[Tensor, "B D"]
Key = Float[Tensor, "B K"]
State = Float[Tensor, "B D K"]


def forward(x: Token, dt: Token, A: Rates, B: Key, C: Key, state: State, *, skip: Skip | None) -> Token:
    """h = exp(dt A) h + dt x B^T;  y = h C + skip x."""
    given = (x, dt, A, B, C, state, skip)
    key, out = step.try_replay_step(STEP, given, state)
    if out is not None:
        return out
    named = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "state": state, "skip": skip}
    _SIGNATURE.bind(named)
    arguments.check_step(STEP, x, named)
    if can_step(state) and plans.all_plain(given):
        return step.replay_or_run_step(key, given, gpu.step, given, state)
    dtype, out_dtype = state.dtype, x.dtype
    x, dt, B, C = (each.to(dtype) for each in (x, dt, B, C))
    h = (dt[..., None] * rates(A, dtype)).exp_().mul_(state).addcmul_((dt * x)[..., None], B[:, None])
    with plans.without_autocast(state):
        y = torch.matmul(h, C[..., None])[..., 0]
    if skip is not None:
        y.addcmul_(skip.to(dtype), x)
    state.copy_(h)  # written last, as the others may alias the state
    return y.to(out_dtype)


_SIGNATURE = Signature(forward, STEP)
