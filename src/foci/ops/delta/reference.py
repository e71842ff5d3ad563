"""The equation, literally; any device, float64; short enough to read in a minute."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.delta.call import NAME, Call


def reasons(call: Call) -> list[str]:
    return []


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B,T,H,V] in v's dtype and the final state [call.ends,H,K,V]; computed in float32, float64 for float64."""
    return equation(call, call.accumulator)


def equation(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """S' = Diag(exp g_t) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T e_t)^T;  o_t = scale S_t^T q_t, all in `dtype`.

    e_t is erase_t where given, else k_t.
    """
    B, T, G, H, K, V, N = call.sizes
    erase = call.k if call.erase is None else call.erase
    q, k, e = (x.to(dtype).repeat_interleave(H // G, dim=2)[..., None] for x in (call.q, call.k, erase))
    v, beta = call.v.to(dtype), call.beta.to(dtype)[..., None]
    decay = None if call.log_decay is None else torch.exp(call.log_decay.to(dtype)).expand(B, T, H, -1)[..., None]
    state = v.new_zeros(N, H, K, V) if call.state is None else call.state.to(dtype)
    queries, keys, erased, values, betas = arguments.by_token(q, k, e, v, beta)
    decays = None if decay is None else arguments.by_token(decay)[0]

    def run(start: int, stop: int, S: Tensor) -> tuple[list[Tensor], Tensor]:
        out = []
        for t in range(start, stop):
            if decays is not None:
                S = decays[t] * S
            error = values[t] - (erased[t] * S).sum(-2)  # what is stored under the key is not yet the value
            S = S + keys[t] * (betas[t] * error)[..., None, :]
            out.append(call.scale * (queries[t] * S).sum(-2))
        return out, S

    packed = arguments.documents(NAME, call.offsets, T)
    if packed is None:
        out, state = run(0, T, state)
    else:
        runs = [run(start, stop, state[n : n + 1]) for n, (start, stop) in enumerate(packed)]
        out = [o for outs, _ in runs for o in outs]
        state = torch.cat([v.new_zeros(0, H, K, V), *(S for _, S in runs)])
    stacked = torch.stack(out, dim=1) if out else arguments.of_no_token(v, call)
    return stacked.to(call.v.dtype).contiguous(), arguments.ends(call, state.to(call.accumulator).clone())
