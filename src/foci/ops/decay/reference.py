"""The equation, literally; any device, float64; short enough to read in a minute."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.decay.call import NAME, Call


def reasons(call: Call) -> list[str]:
    return []


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B,T,H,V] in v's dtype and the final state [call.ends,H,K,V]; computed in float32, float64 for float64."""
    return equation(call, call.accumulator)


def equation(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t, with every intermediate in `dtype`.

    With a bonus u: o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T q_t. Not causal: o_t = scale S^T q_t with the last S.
    """
    B, T, G, H, K, V, N = call.sizes
    q, k = (x.to(dtype).repeat_interleave(H // G, dim=2)[..., None] for x in (call.q, call.k))  # h reads h // (H / G)
    v = call.v.to(dtype)
    decay = None if call.log_decay is None else torch.exp(call.log_decay.to(dtype)).expand(B, T, H, -1)[..., None]
    bonus = None if call.bonus is None else call.bonus.to(dtype)[..., None]
    state = v.new_zeros(N, H, K, V) if call.state is None else call.state.to(dtype)
    queries, keys, values = arguments.by_token(q, k, v[..., None, :])
    decays = None if decay is None else arguments.by_token(decay)[0]

    def run(start: int, stop: int, S: Tensor) -> tuple[list[Tensor], Tensor]:
        out = []
        for t in range(start, stop):
            new = keys[t] * values[t]
            seen = S if bonus is None else S + bonus * new
            S = new + (S if decays is None else decays[t] * S)
            out.append(read(queries[t], S if bonus is None else seen))
        return out if call.causal else [read(query, S) for query in queries[start:stop]], S

    def read(query: Tensor, S: Tensor) -> Tensor:
        return call.scale * (query * S).sum(-2)

    packed = arguments.documents(NAME, call.offsets, T)
    if packed is None:
        out, state = run(0, T, state)
    else:
        runs = [run(*place, state[n : n + 1]) for n, place in enumerate(packed)]
        out = [o for outs, _ in runs for o in outs]
        state = torch.cat([v.new_zeros(0, H, K, V), *(S for _, S in runs)])
    stacked = torch.stack(out, dim=1) if out else arguments.of_no_token(v, call)
    return stacked.to(call.v.dtype).contiguous(), arguments.ends(call, state.to(call.accumulator).clone())
