"""One token per row of linear attention or the delta rule: checked, and taken by Triton, C++ or torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foci.ops import arguments, gpu, native

_DECAYS = {1: ("H",), 2: ("B", "H"), 3: ("B", "H", "K")}


def forward(
    operator: str,
    in_torch: Callable[..., Tensor],
    state: Tensor,
    scale: float | None,
    slots: Tensor | None,
    named: dict[str, Tensor | None],
) -> Tensor:
    """out [B,H,V] of q, k, v, log_decay and what else is `named`, from the state of each row or of its slot.

    `in_torch(q, k, v, state, scale, **rest)` changes `state` in place, too, and is for any device and dtype.
    """
    q, k, v = arguments.bind_step(operator, named | {"state": state, "slots": slots})
    (B, H, _), K = v.shape, q.shape[2]
    scale = (K or 1) ** -0.5 if scale is None else arguments.number(operator, "scale", scale)
    rest = {name: x for name, x in named.items() if name not in "qkv"}
    rest["log_decay"] = arguments.decay(operator, named["log_decay"], _DECAYS, (B, H, K))
    if gpu.steps(state):
        from foci.ops.kernels_triton_step import step

        out = step(q, k, v, state, scale, slots=slots, **rest)
        torch.autograd.graph.increment_version(state)
        return out
    taken = None if slots is None else arguments.Slots(state, slots)
    now = state if taken is None else taken.state
    out = (native.step if native.steps(now) else in_torch)(q, k, v, now, scale, **rest).to(v.dtype)
    return out if taken is None else taken.put(out)
