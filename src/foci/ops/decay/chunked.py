"""Plain torch in chunks: the CPU backend, O(T) memory, its own backward.

Within a chunk  o = A v + (rise q) S,  A the decayed products of queries and keys, S the state at the chunk's start; the
state at its end is  total S + (fall k)^T v  (ops/gates.py: rise, fall, total; GLA, arXiv 2312.06635, section 4). The
backward walks the slabs from last to first, each from the state at its start, which the forward left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.decay import everywhere
from foci.ops.decay.call import NAME, Call
from foci.ops.gates import Gates
from foci.ops.slabs import Decays, Slab, borders, ends, initial, keeps, kept, load, sequences, slabs, store

Gradients = tuple[Tensor | None, ...]


def reasons(call: Call) -> list[str]:
    return []


def forward(call: Call, keep: bool = False) -> tuple[Tensor, ...]:
    """out [B,T,H,V] in v's dtype and the final state [N,H,K,V], accumulated; `keep`: and what `kept` declares."""
    states = kept(call).empty(call.v) if keep else None
    if not call.causal:
        return everywhere.forward(call) + ((states,) if states is not None else ())
    T = call.v.shape[1]
    out, final = torch.empty_like(call.v, memory_format=torch.contiguous_format), initial(call)
    decays, work = Decays(call.log_decay, call.v, call.accumulator, own=call.bonus is None), _products_in(call)
    for start, stop, state in sequences(arguments.documents(NAME, call.offsets, T), final, T):
        for place, slab in enumerate(slabs(start, stop, state.shape[0])):
            if states is not None and keeps(call):
                states[place] = state
            gates = decays(slab)
            q, k, v = (load(x, slab, call.v.shape[2], work) for x in (call.q, call.k, call.v))
            A = _products(call, gates, q, k).mul_(call.scale)
            starts = borders(gates, gates.fallen(k), v, state)
            read = torch.bmm(gates.risen(q), starts)
            store(read.baddbmm_(A, v, beta=call.scale), slab, out)
    return (out, final) if states is None else (out, final, states)


def _products_in(call: Call) -> torch.dtype:
    """bfloat16 where the budget bears it, for processors multiply it faster; sums and states stay the accumulator's."""
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
    T, H = call.v.shape[1:3]
    d_out = torch.zeros_like(call.v) if grads[0] is None else grads[0]
    d_state = initial(call._replace(state=grads[1]))
    found = _Found(call, needs)
    decays = Decays(call.log_decay, call.v, call.accumulator, own=call.bonus is None)
    packed = arguments.documents(NAME, call.offsets, T)
    runs = zip(sequences(packed, initial(call), T), sequences(packed, d_state, T), strict=True)
    for (start, stop, state), (_, _, d) in runs:
        passed = list(slabs(start, stop, state.shape[0]))
        befores = list(outputs[2][: len(passed)]) if keeps(call) else []
        for slab in passed[len(befores) :]:
            befores.append(state.clone())
            gates = decays(slab)
            k, v = (load(x, slab, H, call.accumulator) for x in (call.k, call.v))
            borders(gates, k * gates.fall, v, state)
        while passed:
            _slab_backward(call, passed.pop(), decays, befores.pop(), d, d_out, found)
    return found.gradients(d_state)


class _Found:
    """The gradients as they are found, slab by slab."""

    def __init__(self, call: Call, needs: list[bool]) -> None:
        self.call, self.needs = call, needs
        self.q, self.k, self.v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in call[:3])
        acc = call.accumulator
        decay = call.log_decay
        self.decay = (
            call.v.new_empty(*call.v.shape[:3], decay.shape[3], dtype=acc) if decay is not None and needs[3] else None
        )
        self.bonus = None if call.bonus is None else call.bonus.new_zeros(call.bonus.shape, dtype=acc)

    def gradients(self, d_state: Tensor) -> Gradients:
        call = self.call
        log_decay = None
        if self.decay is not None:
            assert call.log_decay is not None
            log_decay = self.decay.sum_to_size(call.log_decay.shape).to(call.log_decay.dtype)
        bonus = None if call.bonus is None or self.bonus is None else self.bonus.to(call.bonus.dtype)
        state = None if call.state is None else d_state.to(call.state.dtype)
        found = (self.q, self.k, self.v, log_decay, bonus, state)
        return tuple(x if need else None for x, need in zip(found, self.needs, strict=True))


def _slab_backward(
    call: Call, slab: Slab, decays: Decays, state: Tensor, d_state: Tensor, d_out: Tensor, found: _Found
) -> None:
    """The gradients of one slab; d_state goes in as the gradient of the state behind it and out as that before it."""
    H = call.v.shape[2]
    gates = decays(slab)
    q, k, v = (load(x, slab, H, call.accumulator) for x in (call.q, call.k, call.v))
    q.mul_(call.scale)
    do = load(d_out, slab, H, call.accumulator)
    rows, columns = q * gates.rise, k * gates.fall
    starts = borders(gates, columns, v, state.clone())
    behind = ends(gates, torch.bmm(rows.transpose(1, 2), do), d_state)
    A, dA = _products(call, gates, q, k), torch.bmm(do, v.transpose(1, 2))
    store(torch.baddbmm(torch.bmm(columns, behind), A.transpose(1, 2), do), slab, found.v)
    to_rows, to_columns = torch.bmm(do, starts.transpose(1, 2)), torch.bmm(v, behind.transpose(1, 2))
    dq, dk, dg = gates.pairs_backward(dA[:, :, None], A[:, :, None], q[:, :, None], k)
    dq = dq[:, :, 0].addcmul_(to_rows, gates.rise)
    dk.addcmul_(to_columns, gates.fall)
    if call.bonus is not None:
        assert found.bonus is not None
        diagonal, u = dA.diagonal(dim1=1, dim2=2)[..., None], _bonus(call, q.shape[0])
        found.bonus += (diagonal * q * k).sum(1).view(-1, H, q.shape[2]).sum(0)
        dq.addcmul_(diagonal * u, k)
        dk.addcmul_(diagonal * u, q)
    store(dq.mul_(call.scale), slab, found.q)
    store(dk, slab, found.k)
    if found.decay is not None:
        dg += gates.backward(rows * to_rows, columns * to_columns, (starts * behind).sum(-1))
        store(dg, slab, found.decay)
