"""Plain torch in chunks: the CPU backend, O(T) memory, its own backward.

With w = beta k a token writes w_t d_t^T, and the errors d of a chunk solve  (I + E) d = v - (rise e) S,  E the decayed
products of erase keys and w below the diagonal, S the state at the chunk's start. With X = (I + E)^-1:

    d = X v - X (rise e) S;   o = A d + (rise q) S;   S <- total S + (fall w)^T d       A: products of queries and w

(ops/gates.py: rise, fall, total; DeltaNet, arXiv 2406.06484, section 3.2.) Only d and S depend on earlier chunks. The
backward processes slabs from last to first, each recomputed from the state at its start, which the forward saved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.backwards import Found, walk
from foci.ops.delta.call import NAME, Call
from foci.ops.delta.triangle import inverse
from foci.ops.gates import Gates, over_reads
from foci.ops.slabs import Decays, Slab, initial, keeps, kept, load, room, sequences, slabs, store

Gradients = tuple[Tensor | None, ...]


def reasons(call: Call) -> list[str]:
    return []


class _Chunks(NamedTuple):
    """The state-independent terms of a slab's chunks; M chunks of C tokens."""

    gates: Gates
    reads: Tensor  # [M,C,2,K]: scaled queries and erase keys
    key: Tensor  # [M,C,K]: as given
    beta: Tensor  # [M,C,1]
    write: Tensor  # [M,C,K]: beta k
    value: Tensor  # [M,C,V]
    products: Tensor  # [M,C,2,C]: A, and E with its diagonal

    @property
    def A(self) -> Tensor:
        return self.products[:, :, 0]

    @property
    def E(self) -> Tensor:
        return self.products[:, :, 1]


def _chunks(call: Call, decays: Decays, slab: Slab) -> _Chunks:
    H, acc = call.v.shape[2], call.accumulator
    gates = decays(slab)
    erase = call.k if call.erase is None else call.erase
    reads = call.q.new_empty(slab.n * call.v.shape[0] * H, slab.C, 2, call.q.shape[3], dtype=acc)
    load(call.q, slab, H, acc, reads[:, :, 0]).mul_(call.scale)
    load(erase, slab, H, acc, reads[:, :, 1])
    key, value, beta = load(call.k, slab, H, acc), load(call.v, slab, H, acc), load(call.beta[..., None], slab, H, acc)
    write = key * beta
    return _Chunks(gates, reads, key, beta, write, value, gates.pairs(reads, write))


class _Pass(NamedTuple):
    """The terms of a slab's chunks after a pass of the state: X, the errors d, and S at each chunk's start."""

    X: Tensor  # [M,C,C]
    keys: Tensor  # [M,C,K]: X (rise e)
    fall: Tensor  # [M,C,K]: fall w
    errors: Tensor  # [M,C,V]
    starts: Tensor  # [M,K,V]


def _through(chunks: _Chunks, state: Tensor) -> _Pass:
    """Advance `state` [P,K,V] through the chunks, in place."""
    gates, P = chunks.gates, state.shape[0]
    n = chunks.value.shape[0] // P
    X = inverse(chunks.E)
    keys = torch.bmm(X, gates.risen(chunks.reads[:, :, 1]))
    errors, fall = torch.bmm(X, chunks.value), gates.fallen(chunks.write)
    starts = state.new_empty(n + 1, *state.shape)
    starts[0] = state
    for i in range(n):
        here = slice(i * P, (i + 1) * P)
        errors[here].baddbmm_(keys[here], starts[i], alpha=-1)
        torch.mul(starts[i], gates.total[here, :, None], out=starts[i + 1])
        starts[i + 1].baddbmm_(fall[here].transpose(1, 2), errors[here])
    state.copy_(starts[n])
    return _Pass(X, keys, fall, errors, starts[:n].flatten(0, 1))


def forward(call: Call, keep: bool = False) -> tuple[Tensor, ...]:
    """out [B,T,H,V] in v's dtype, the final state [call.ends,H,K,V], accumulated; `keep`: and what `kept` declares."""
    states = kept(call).empty(call.v) if keep else None
    T = call.v.shape[1]
    out, final = room(call, call.v), initial(call)
    decays = Decays(call.log_decay, call.v, call.accumulator)
    for start, stop, state in sequences(arguments.documents(NAME, call.offsets, T), final, T):
        for place, slab in enumerate(slabs(start, stop, state.shape[0])):
            if states is not None and keeps(call):
                states[place] = state
            chunks = _chunks(call, decays, slab)
            _, _, _, errors, starts = _through(chunks, state)
            read = torch.bmm(chunks.gates.risen(chunks.reads[:, :, 0]), starts)
            store(read.baddbmm_(chunks.A, errors), slab, out)
    given = out, arguments.ends(call, final)
    return given if states is None else (*given, states)


def backward(call: Call, outputs: tuple[Tensor, ...], grads: Gradients, needs: list[bool]) -> Gradients:
    """Gradients of q, k, v, beta, log_decay, erase and state, None where not needed."""
    found = Found(call, ("q", "k", "v", "beta", "log_decay", "erase", "state"), needs)
    decays = Decays(call.log_decay, call.v, call.accumulator)

    def carry(slab: Slab, state: Tensor) -> None:
        _through(_chunks(call, decays, slab), state)

    def back(slab: Slab, state: Tensor, d_state: Tensor, d_out: Tensor) -> None:
        _slab_backward(call, slab, _chunks(call, decays, slab), state, d_state, d_out, found)

    return found.gradients(walk(NAME, call, outputs[2], grads, carry, back))


def _slab_backward(
    call: Call, slab: Slab, chunks: _Chunks, state: Tensor, d_state: Tensor, d_out: Tensor, found: Found
) -> None:
    """The gradients of one slab; d_state is changed in place from the gradient of its final to its initial state."""
    X, keys, fall, errors, starts = _through(chunks, state)
    gates, P = chunks.gates, state.shape[0]
    given = errors.new_empty(*errors.shape[:2], 2, errors.shape[2])  # gradients of both reads: of o, and of -d
    do = load(d_out, slab, call.v.shape[2], call.accumulator, given[:, :, 0])
    rows = chunks.reads * gates.rise[:, :, None]

    # From the last chunk to the first: gradients of the errors, and of the state at each chunk's end.
    d_errors = torch.bmm(chunks.A.transpose(1, 2), do)
    read = torch.bmm(rows[:, :, 0].transpose(1, 2), do)
    ends = state.new_empty(slab.n + 1, *state.shape)
    ends[slab.n] = d_state
    for i in reversed(range(slab.n)):
        here = slice(i * P, (i + 1) * P)
        d_errors[here].baddbmm_(fall[here], ends[i + 1])
        torch.addcmul(read[here], gates.total[here, :, None], ends[i + 1], out=ends[i])
        ends[i].baddbmm_(keys[here].transpose(1, 2), d_errors[here], alpha=-1)
    d_state.copy_(ends[0])
    behind = ends[1:].flatten(0, 1)

    d_value = torch.bmm(X.transpose(1, 2), d_errors)
    found.put("v", d_value, slab)
    torch.neg(d_value, out=given[:, :, 1])
    d_products = torch.bmm(given.flatten(1, 2), errors.transpose(1, 2)).view_as(chunks.products)
    d_products[:, :, 1].tril_(-1)  # a token reads its own erase key before it writes
    to_rows = torch.bmm(given.flatten(1, 2), starts.transpose(1, 2)).view_as(rows)
    to_fall = torch.bmm(errors, behind.transpose(1, 2))
    d_reads, d_write, dg = gates.pairs_backward(d_products, chunks.products, chunks.reads, chunks.write)
    d_reads.addcmul_(to_rows, gates.rise[:, :, None])
    d_write.addcmul_(to_fall, gates.fall)

    found.put("q", d_reads[:, :, 0] * call.scale, slab)
    found.put("beta", (d_write * chunks.key).sum(-1, keepdim=True), slab)
    d_key = d_write.mul_(chunks.beta)
    if call.erase is None:
        d_key += d_reads[:, :, 1]
    else:
        found.put("erase", d_reads[:, :, 1], slab)
    found.put("k", d_key, slab)
    if "log_decay" in found.needed:
        dg += gates.backward(over_reads(rows * to_rows), fall * to_fall, (starts * behind).sum(-1))
        found.put("log_decay", gates.zero_where_forgotten(dg), slab)
