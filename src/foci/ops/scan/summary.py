"""A run of tokens as an affine map of the state, and of its gradient in the backward, without any output."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.merge.affine import Affine
from foci.ops.scan.call import Call


def shapes(call: Call, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the transition and of the offset, for `rows` states."""
    *_, D, _ = call.sizes
    return (rows, D), (rows, D, 1)


def ahead(call: Call, through: bool = True) -> Affine:
    """h -> total h + sum_s fall_s x_s of all tokens, rows of a batch: offset [B,D,1] from call.state, total [B,D].

    fall_s = exp(g_{s+1} + .. + g_T), summed from the end, so that large sums, whose exp is 0, do not round small ones.
    total is zero if not `through`: the incoming state is not used.
    """
    g = call.log_decay.to(call.accumulator)
    from_here = g.flip(1).cumsum(1).flip(1)  # [B,T,D]: g_s + .. + g_T
    fall = torch.cat([from_here[:, 1:], torch.zeros_like(g[:, :1])], 1).exp_()
    total = torch.exp(from_here[:, 0]) if g.shape[1] else g.new_ones(g.shape[0], g.shape[2])
    offset = (fall * call.x).sum(1)
    if call.state is not None:
        offset.addcmul_(total, call.state.to(total.dtype))
    return Affine(total if through else torch.zeros_like(total), offset[..., None])


def back(call: Call, d_out: Tensor, d_state: Tensor) -> Tensor:
    """The gradient of the initial states [B,D,1], from those of the final states and of the outputs.

    dh_0 = total dh_T + sum_t rise_t dout_t, rise_t = exp(g_1 + .. + g_t).
    """
    to_here = call.log_decay.to(call.accumulator).cumsum(1)
    total = torch.exp(to_here[:, -1:]).sum(1) if to_here.shape[1] else torch.ones_like(d_state)
    read = (to_here.exp_() * d_out).sum(1)
    return torch.addcmul(read, total, d_state.to(read.dtype))[..., None]
