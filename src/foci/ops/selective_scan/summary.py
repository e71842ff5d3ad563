"""A run of tokens as an affine map of the state, and of its gradient in the backward, without any output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from foci.merge.affine import Affine
from foci.ops.selective_scan.call import Call, rates

_TOKENS = 32  # tokens whose decays [B,D,K] are in memory at the same time


def shapes(call: Call, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the transition and of the offset, for `rows` states."""
    *_, D, K, _ = call.sizes
    return (rows, D, K), (rows, D, K, 1)


def ahead(call: Call, through: bool = True) -> Affine:
    """h -> total h + sum_s fall_s dt_s x_s B_s^T of all tokens: offset [B,D,K,1] from call.state, total [B,D,K].

    fall_s = exp(A (dt_{s+1} + .. + dt_T)). total is zero if not `through`: the incoming state is not used.
    """
    batch, T, D, K, _ = call.sizes
    acc, A = call.accumulator, rates(call.A, call.accumulator)
    h = call.x.new_zeros(batch, D, K, dtype=acc) if call.state is None else call.state.to(acc, copy=True)
    whole = call.x.new_zeros(batch, D, dtype=acc)
    for here in _slabs(T):
        dt, x, B = (each[:, here].to(acc) for each in (call.dt, call.x, call.B))
        from_here = dt.flip(1).cumsum(1).flip(1)
        behind = torch.cat([from_here[:, 1:], torch.zeros_like(dt[:, :1])], 1)
        fall = torch.exp(behind[..., None] * A)
        h.mul_(torch.exp(from_here[:, 0, :, None] * A)).add_(torch.einsum("btdk,btd,btk->bdk", fall, dt * x, B))
        whole += from_here[:, 0]
    total = torch.exp(whole[..., None] * A) if through else torch.zeros_like(h)
    return Affine(total, h[..., None])


def back(call: Call, d_out: Tensor, d_state: Tensor) -> Tensor:
    """The gradient of the initial states [B,D,K,1], from those of the final states and of the outputs.

    dh_0 = total dh_T + sum_t rise_t dy_t C_t^T, rise_t = exp(A (dt_1 + .. + dt_t)).
    """
    acc, A = call.accumulator, rates(call.A, call.accumulator)
    dh = d_state.to(acc, copy=True)
    for here in reversed(list(_slabs(call.x.shape[1]))):
        dt, C, dy = (each[:, here].to(acc) for each in (call.dt, call.C, d_out))
        to_here = dt.cumsum(1)
        rise = torch.exp(to_here[..., None] * A)
        dh.mul_(torch.exp(to_here[:, -1, :, None] * A)).add_(torch.einsum("btdk,btd,btk->bdk", rise, dy, C))
    return dh[..., None]


def _slabs(T: int) -> Iterator[slice]:
    return (slice(start, min(start + _TOKENS, T)) for start in range(0, T, _TOKENS))
