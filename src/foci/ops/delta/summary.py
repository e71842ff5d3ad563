"""A run of tokens as an affine map of the state, and of its gradient in the backward, without any output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foci.merge.affine import Affine
from foci.ops.delta.call import Call
from foci.ops.delta.triangle import inverse
from foci.ops.gates import Gates
from foci.ops.slabs import Decays, Slab, initial, load, sequences, slabs


class _Chunks(NamedTuple):
    """The terms of a slab's chunks that the state needs: X (rise e), fall w, and X, as in chunked.py."""

    gates: Gates
    write: Tensor  # [M,C,K]: beta k
    fall: Tensor  # [M,C,K]
    X: Tensor  # [M,C,C]
    keys: Tensor  # [M,C,K]


def _chunks(call: Call, decays: Decays, slab: Slab) -> _Chunks:
    H, acc = call.v.shape[2], call.accumulator
    gates = decays(slab)
    erase = load(call.k if call.erase is None else call.erase, slab, H, acc)
    write = load(call.k, slab, H, acc).mul_(load(call.beta[..., None], slab, H, acc))
    X = inverse(gates.pairs(erase[:, :, None], write)[:, :, 0])
    return _Chunks(gates, write, gates.fallen(write), X, torch.bmm(X, gates.risen(erase)))


def shapes(call: Call, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the transition and of the offset, for `rows` states."""
    *_, H, K, V, _ = call.sizes
    return (rows, H, K, K), (rows, H, K, V)


def ahead(call: Call, through: bool = True) -> Affine:
    """S -> A S + offset of all tokens, rows of a batch: offset [B,H,K,V] from call.state, A [B,H,K,K].

    A, the product of (I - beta_t k_t e_t^T) Diag(exp g_t), is the final state if the state is the identity and values
    are 0: K more columns of the state. If not `through`, the incoming state is unused: A is 0, as a diagonal [B,H,1].
    """
    offset = initial(call)
    *rows, K, V = offset.shape
    state = offset
    if through:
        one = torch.eye(K, dtype=offset.dtype, device=offset.device)
        state = torch.cat([offset, one.expand(*rows, K, K)], -1)
    decays = Decays(call.log_decay, call.v, call.accumulator)
    for start, stop, S in sequences(None, state, call.v.shape[1]):
        for slab in slabs(start, stop, S.shape[0]):
            chunks, P = _chunks(call, decays, slab), S.shape[0]
            values = torch.bmm(chunks.X, load(call.v, slab, call.v.shape[2], call.accumulator))
            for i in range(slab.n):
                here = slice(i * P, (i + 1) * P)
                errors = torch.bmm(chunks.keys[here], S).neg_()
                errors[..., :V] += values[here]
                S.mul_(chunks.gates.total[here, :, None]).baddbmm_(chunks.fall[here].transpose(1, 2), errors)
    if not through:
        return Affine(offset.new_zeros(*rows, 1), state)
    return Affine(state[..., V:].contiguous(), state[..., :V].contiguous())


def back(call: Call, d_out: Tensor, d_state: Tensor) -> Tensor:
    """The gradient of the initial states [B,H,K,V], from those of the final states and of the outputs.

    dS_0 = A^T dS_T + what the outputs read of S_0; chunk by chunk, with dd = A^T do + (fall w) dS the gradient of the
    errors:  dS <- total dS + (scale rise q)^T do - (X rise e)^T dd. It needs no values and no state.
    """
    H, acc = call.v.shape[2], call.accumulator
    found = initial(call._replace(state=d_state))
    decays = Decays(call.log_decay, call.v, acc)
    for start, stop, dS in sequences(None, found, call.v.shape[1]):
        for slab in reversed(list(slabs(start, stop, dS.shape[0]))):
            chunks, P = _chunks(call, decays, slab), dS.shape[0]
            q, do = load(call.q, slab, H, acc).mul_(call.scale), load(d_out, slab, H, acc)
            products = chunks.gates.pairs(q[:, :, None], chunks.write)[:, :, 0]
            d_errors = torch.bmm(products.transpose(1, 2), do)
            read = torch.bmm(chunks.gates.risen(q).transpose(1, 2), do)
            for i in reversed(range(slab.n)):
                here = slice(i * P, (i + 1) * P)
                d_errors[here].baddbmm_(chunks.fall[here], dS)
                dS.mul_(chunks.gates.total[here, :, None]).add_(read[here])
                dS.baddbmm_(chunks.keys[here].transpose(1, 2), d_errors[here], alpha=-1)
    return found
