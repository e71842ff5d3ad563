"""Plain torch in chunks: the CPU backend, O(T) memory, its own backward.

Within a chunk  o = A v + (rise q) S,  A the decayed products of queries and keys, S the state at the chunk's start; the
state at its end is  total S + (fall k)^T v  (ops/gates.py: rise, fall, total; GLA, arXiv 2312.06635, section 4). The
backward processes slabs from last to first, each from the state at its start, which the forward saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.backwards import Found, walk
from foci.ops.decay import everywhere
from foci.ops.decay.call import NAME, Call
from foci.ops.gates import Gates
from foci.ops.slabs import Decays, Slab, borders, ends, initial, keeps, kept, load, room, sequences, slabs, store

Gradients = tuple[Tensor | None, ...]


def reasons(call: Call) -> list[str]:
    return []


def forward(call: Call, keep: bool = False) -> tuple[Tensor, ...]:
    """out [B,T,H,V] in v's dtype, the final state [call.ends,H,K,V], accumulated; `keep`: and what `kept` declares."""
    states = kept(call).empty(call.v) if keep else None
    if not call.causal:
        return everywhere.forward(call) + ((states,) if states is not None else ())
    T = call.v.shape[1]
    out, final = room(call, call.v), initial(call)
    decays, work = Decays(call.log_decay, call.v, call.accumulator, own=call.bonus is None), _products_in(call)
    for start, stop, state in sequences(arguments.documents(NAME, call.offsets, T), final, T):
        for place, slab in enumerate(slabs(start, stop, state.shape[0])):
            if states is not None and keeps(call):
                states[place] = state
            gates = decays(slab)
            q, k, v = (load(x, slab, call.v.shape[2], work) for x in (call.q, call.k, call.v))
            A = _products(call, gates, q, k).mul_(call.scale)
            starts = borders(gates, gates.fallen(k), v, state)
            read = torch.bmm(gates.risen(q), starts.to(work))
            store(read.baddbmm_(A, v, beta=call.scale), slab, out)
    given = out, arguments.ends(call, final)
    return given if states is None else (*given, states)


def _products_in(call: Call) -> torch.dtype:
    """The dtype of matmuls: bfloat16 where the error budget allows; sums and states are not affected."""
    per_token = call.bonus is None and (call.log_decay is None or call.log_decay.shape[3] == 1)
    return torch.bfloat16 if per_token and call.v.dtype == torch.bfloat16 else call.accumulator


def _bonus(call: Call, slab_rows: int) -> Tensor:
    assert call.bonus is not None
    return call.bonus.to(call.accumulator).repeat(slab_rows // call.bonus.shape[0], 1)[:, None]


def _products(call: Call, gates: Gates, q: Tensor, k: Tensor) -> Tensor:
    A = gates.pairs(q[:, :, None], k)[:, :, 0]
    if call.bonus is not None:
        A.diagonal(dim1=1, dim2=2).copy_((q * _bonus(call, q.shape[0]) * k).sum(-1))
    return A


def backward(call: Call, outputs: tuple[Tensor, ...], grads: Gradients, needs: list[bool]) -> Gradients:
    """Gradients of q, k, v, log_decay, bonus and state, None where not needed."""
    if not call.causal:
        return everywhere.backward(call, grads, needs)
    found = Found(call, ("q", "k", "v", "log_decay", "bonus", "state"), needs)
    decays = Decays(call.log_decay, call.v, call.accumulator, own=call.bonus is None)

    def carry(slab: Slab, state: Tensor) -> None:
        gates = decays(slab)
        k, v = (load(x, slab, call.v.shape[2], call.accumulator) for x in (call.k, call.v))
        borders(gates, gates.fallen(k), v, state)

    def back(slab: Slab, state: Tensor, d_state: Tensor, d_out: Tensor) -> None:
        _slab_backward(call, slab, decays(slab), state, d_state, d_out, found)

    return found.gradients(walk(NAME, call, outputs[2], grads, carry, back))


def _slab_backward(
    call: Call, slab: Slab, gates: Gates, state: Tensor, d_state: Tensor, d_out: Tensor, found: Found
) -> None:
    """The gradients of one slab; d_state is changed in place from the gradient of its final to its initial state."""
    H = call.v.shape[2]
    q, k, v = (load(x, slab, H, call.accumulator) for x in (call.q, call.k, call.v))
    q.mul_(call.scale)
    do = load(d_out, slab, H, call.accumulator)
    rows, columns = q * gates.rise, k * gates.fall
    starts = borders(gates, columns, v, state)
    behind = ends(gates, torch.bmm(rows.transpose(1, 2), do), d_state)
    A, dA = _products(call, gates, q, k), torch.bmm(do, v.transpose(1, 2))
    found.put("v", torch.baddbmm(torch.bmm(columns, behind), A.transpose(1, 2), do), slab)
    to_rows, to_columns = torch.bmm(do, starts.transpose(1, 2)), torch.bmm(v, behind.transpose(1, 2))
    dq, dk, dg = gates.pairs_backward(dA[:, :, None], A[:, :, None], q[:, :, None], k)
    dq = dq[:, :, 0].addcmul_(to_rows, gates.rise)
    dk.addcmul_(to_columns, gates.fall)
    if call.bonus is not None:
        diagonal, u = dA.diagonal(dim1=1, dim2=2)[..., None], _bonus(call, q.shape[0])
        if "bonus" in found.needed:
            found.there["bonus"] += (diagonal * q * k).sum(1).view(-1, H, q.shape[2]).sum(0)
        dq.addcmul_(diagonal * u, k)
        dk.addcmul_(diagonal * u, q)
    found.put("q", dq.mul_(call.scale), slab)
    found.put("k", dk, slab)
    if "log_decay" in found.needed:
        dg += gates.backward(rows * to_rows, columns * to_columns, (starts * behind).sum(-1))
        found.put("log_decay", gates.zero_where_forgotten(dg), slab)
