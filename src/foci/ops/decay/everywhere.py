"""The non-causal form, forward and backward: o = scale (S_0 + sum_s k_s v_s^T)^T q."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.decay.call import NAME, Call
from foci.ops.slabs import initial, load, room, sequences, slabs, store

_CHUNK = 512


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B,T,H,V] and the state that every token reads [N,H,K,V]."""
    out, final = room(call, call.v), initial(call)
    for start, stop, state in sequences(
        arguments.documents(NAME, call.offsets, call.v.shape[1]), final, call.v.shape[1]
    ):
        add_up(call, call.k, call.v, start, stop, state)
        _read(call, call.q, state * call.scale, start, stop, out)
    return out, final


def backward(call: Call, grads: tuple[Tensor | None, ...], needs: list[bool]) -> tuple[Tensor | None, ...]:
    T = call.v.shape[1]
    d_out = torch.zeros_like(call.v) if grads[0] is None else grads[0]
    d_state, final = initial(call._replace(state=grads[1])), initial(call)
    dq, dk, dv = (room(call, x) for x in call[:3])
    packed = arguments.documents(NAME, call.offsets, T)
    for (start, stop, state), (_, _, d) in zip(sequences(packed, final, T), sequences(packed, d_state, T), strict=True):
        add_up(call, call.k, call.v, start, stop, state)
        scaled = torch.zeros_like(d)
        add_up(call, call.q, d_out, start, stop, scaled)
        d.add_(scaled, alpha=call.scale)
        _read(call, d_out, state.transpose(1, 2) * call.scale, start, stop, dq)
        _read(call, call.v, d.transpose(1, 2), start, stop, dk)
        _read(call, call.k, d, start, stop, dv)
    state_gradient = None if call.state is None else d_state.to(call.state.dtype)
    found = (dq, dk, dv, None, None, state_gradient)
    return tuple(x if need else None for x, need in zip(found, needs, strict=True))


def add_up(call: Call, keys: Tensor, values: Tensor, start: int, stop: int, state: Tensor) -> None:
    """state += sum_s key_s value_s^T, in place."""
    for slab in slabs(start, stop, state.shape[0], _CHUNK):
        k, v = (load(x, slab, call.v.shape[2], call.accumulator) for x in (keys, values))
        state += torch.bmm(k.transpose(1, 2), v).view(slab.n, *state.shape).sum(0)


def _read(call: Call, x: Tensor, matrix: Tensor, start: int, stop: int, into: Tensor) -> None:
    """into_t = matrix^T x_t, summed over the heads that share one head of `into`."""
    for slab in slabs(start, stop, matrix.shape[0], _CHUNK):
        rows = load(x, slab, call.v.shape[2], call.accumulator)
        store(torch.matmul(rows.unflatten(0, (slab.n, -1)), matrix).flatten(0, 1), slab, into)
