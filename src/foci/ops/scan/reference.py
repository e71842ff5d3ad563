"""The equation, literally; any device, float64; short enough to read in a minute."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.scan.call import NAME, Call


def reasons(call: Call) -> list[str]:
    return []


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """h [B,T,D] in x's dtype and the final state [call.ends,D]; computed in float32, float64 for float64."""
    return equation(call, call.accumulator)


def equation(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """h_t = exp(g_t) h_{t-1} + x_t, with every intermediate in `dtype`."""
    B, T, D, N = call.sizes
    x, decay = call.x.to(dtype), torch.exp(call.log_decay.to(dtype))
    state = x.new_zeros(N, D) if call.state is None else call.state.to(dtype)
    out, final = [arguments.of_no_token(x[:, :0], call)], [state[:0]]
    decays, news = arguments.by_token(decay, x)
    for _, states, start, stop in arguments.stretches(NAME, call.offsets, B, T):
        h = state[states]
        for t in range(start, stop):
            h = decays[t] * h + news[t]
            out.append(h[:, None])
        final.append(h)
    return torch.cat(out, dim=1).to(call.x.dtype), arguments.ends(call, torch.cat(final).to(call.accumulator))
