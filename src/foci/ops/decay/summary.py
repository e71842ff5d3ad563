"""A run of tokens as an affine map of the state, and of its gradient in the backward, without any output."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.merge.affine import Affine
from foci.ops.decay import everywhere
from foci.ops.decay.call import Call
from foci.ops.slabs import Decays, borders, ends, initial, load, sequences, slabs


def shapes(call: Call, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the transition and of the offset, for `rows` states."""
    *_, H, K, V, _ = call.sizes
    D = 1 if call.log_decay is None else call.log_decay.shape[-1]
    return (rows, H, D), (rows, H, K, V)


def ahead(call: Call, through: bool = True) -> Affine:
    """S -> Diag(total) S + sum_s fall_s k_s v_s^T of all tokens, rows of a batch: offset [B,H,K,V] from call.state.

    total [B,H,K or 1] is the product of all decays; zeros if not `through`: the incoming state is not used.
    """
    T, H = call.v.shape[1:3]
    D = 1 if call.log_decay is None else call.log_decay.shape[3]
    offset = initial(call)
    total = torch.full((*offset.shape[:2], D), float(through), dtype=offset.dtype, device=offset.device)
    if not call.causal:
        for start, stop, state in sequences(None, offset, T):
            everywhere.add_up(call, call.k, call.v, start, stop, state)
        return Affine(total, offset)
    decays = Decays(call.log_decay, call.v, call.accumulator)
    for start, stop, state in sequences(None, offset, T):
        for slab in slabs(start, stop, state.shape[0]):
            gates = decays(slab)
            k, v = (load(x, slab, H, call.accumulator) for x in (call.k, call.v))
            borders(gates, gates.fallen(k), v, state)
            total *= gates.total.view(slab.n, *total.shape).prod(0)
    return Affine(total, offset)


def back(call: Call, d_out: Tensor, d_state: Tensor) -> Tensor:
    """The gradient of the initial states [B,H,K,V], from those of the final states and of the outputs.

    dS_0 = Diag(total) dS_T + scale sum_t rise_t q_t do_t^T: it needs neither keys nor values.
    """
    T, H = call.v.shape[1:3]
    found = initial(call._replace(state=d_state))
    if not call.causal:
        read = torch.zeros_like(found)
        for start, stop, state in sequences(None, read, T):
            everywhere.add_up(call, call.q, d_out, start, stop, state)
        return found.add_(read, alpha=call.scale)
    decays = Decays(call.log_decay, call.v, call.accumulator, own=call.bonus is None)
    for start, stop, state in sequences(None, found, T):
        for slab in reversed(list(slabs(start, stop, state.shape[0]))):
            gates = decays(slab)
            q, do = (load(x, slab, H, call.accumulator) for x in (call.q, d_out))
            ends(gates, torch.bmm(gates.risen(q.mul_(call.scale)).transpose(1, 2), do), state)
    return found
