"""The equation, literally; any device, float64; short enough to read in a minute."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.selective_scan.call import NAME, Call, rates


def reasons(call: Call) -> list[str]:
    return []


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """y [B,T,D] in x's dtype and the final state [call.ends,D,K]; computed in float32, float64 for float64."""
    return equation(call, call.accumulator)


def equation(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  y_t = h_t C_t + skip x_t, with every intermediate in `dtype`."""
    batch, T, D, K, N = call.sizes
    x, dt, B, C = (each.to(dtype) for each in (call.x, call.dt, call.B, call.C))
    A = rates(call.A, dtype)
    state = x.new_zeros(N, D, K) if call.state is None else call.state.to(dtype)
    out, final = [arguments.of_no_token(x[:, :0], call)], [state[:0]]
    tokens = list(zip(*arguments.by_token(x, dt, B, C), strict=True))
    for _, states, start, stop in arguments.stretches(NAME, call.offsets, batch, T):
        h = state[states]
        for x_t, dt_t, B_t, C_t in tokens[start:stop]:
            new = (dt_t * x_t)[..., None] * B_t[:, None, :]
            h = torch.exp(dt_t[..., None] * A) * h + new
            out.append((h * C_t[:, None, :]).sum(-1)[:, None])
        final.append(h)
    y = torch.cat(out, dim=1)
    if call.skip is not None:
        y = y + call.skip.to(dtype) * x
    return y.to(call.x.dtype), arguments.ends(call, torch.cat(final).to(call.accumulator))
