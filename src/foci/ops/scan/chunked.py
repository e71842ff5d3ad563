"""Plain torch in chunks: the CPU backend, O(T) memory, its own backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.scan.call import NAME, Call


def reasons(call: Call) -> list[str]:
    return []


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """h_t = exp(g_t) h_{t-1} + x_t; the initial state, decayed, is added to the first token's x."""
    h, powers, final = _copy(call.x, call.accumulator), _powers(call), _states(call)
    for rows, states, start, stop in _stretches(call):
        h[rows, start].addcmul_(powers[rows, start].exp2(), final[states])
        _recur(h[rows, start:stop], powers[rows, start:stop])
        final[states] = h[rows, stop - 1]
    return h.to(call.x.dtype), arguments.ends(call, final)


def backward(
    call: Call, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """The same recurrence in reverse, with decays shifted by one token:

    dh_t = dout_t + exp(g_{t+1}) dh_{t+1};  dx_t = dh_t;  dg_t = dh_t exp(g_t) h_{t-1};  dh_0 = exp(g_1) dh_1
    """
    _, T, _, _ = call.sizes
    powers, before, dstate = _powers(call), outputs[0].to(call.accumulator).roll(1, 1), _states(call)
    turned = torch.zeros_like(powers) if grads[0] is None else grads[0].to(call.accumulator).flip(1)
    later = powers.flip(1).roll(1, 1)
    stretches = _stretches(call)
    for rows, states, start, stop in stretches:
        if grads[1] is not None:
            turned[rows, T - stop] += grads[1][states]
        _recur(turned[rows, T - stop : T - start], later[rows, T - stop : T - start])
        before[rows, start] = dstate[states]
    dh = turned.flip(1)
    decay = powers.exp2_().mul_(dh)
    dstate = torch.zeros_like(dstate) if grads[1] is None else grads[1].to(dstate.dtype, copy=True)
    for rows, states, start, _ in stretches:
        dstate[states] = decay[rows, start]
    return (
        dh.to(call.x.dtype) if needs[0] else None,
        decay.mul_(before).to(call.log_decay.dtype) if needs[1] else None,
        dstate.to(call.state.dtype) if call.state is not None and needs[2] else None,
    )


def _recur(h: Tensor, powers: Tensor) -> None:
    """h_t += 2^powers_t h_{t-1} along dim 1, in place; `powers` is overwritten.

    Blocks of about sqrt(T) tokens: scan within all blocks at once, then over the blocks' ends, then add to each block;
    one torch call per token would be bound by overhead. Only products of decays: no overflow, no division. A block's
    own decay is that of the sum of its powers, rounded once: rounding errors of products of numbers just below 1 have
    one sign, and over all blocks would add up beyond the error budget (1e-5 in float32).
    """
    T = h.shape[1]
    count = math.isqrt(T)
    whole = T // count * count
    pieces, decays = (x[:, :whole].unflatten(1, (count, -1)) for x in (h, powers))
    totals, decay = decays.sum(2).exp2_(), powers.exp2_()
    _run(pieces.unbind(2), decays.unbind(2), products=True)
    _run(pieces[:, :, -1].unbind(1), totals.unbind(1))
    pieces[:, 1:, :-1].addcmul_(decays[:, 1:, :-1], pieces[:, :-1, -1:])
    _run(h[:, whole - 1 :].unbind(1), decay[:, whole - 1 :].unbind(1))


def _run(h: tuple[Tensor, ...], decay: tuple[Tensor, ...], products: bool = False) -> None:
    """A sequential scan; with `products`, decay becomes the cumulative product."""
    for t in range(1, len(h)):
        h[t].addcmul_(decay[t], h[t - 1])
        if products:
            decay[t].mul_(decay[t - 1])


def _stretches(call: Call) -> list[arguments.Stretch]:
    """The call's stretches that are not empty."""
    B, T, _, _ = call.sizes
    return [each for each in arguments.stretches(NAME, call.offsets, B, T) if each.start < each.stop]


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _powers(call: Call) -> Tensor:
    """g as a power of 2, because torch's exp2 takes less than half the time of its exp."""
    return _copy(call.log_decay, call.accumulator).mul_(math.log2(math.e))


def _states(call: Call) -> Tensor:
    """A copy of the initial states."""
    _, _, D, N = call.sizes
    if call.state is None:
        return torch.zeros(N, D, dtype=call.accumulator, device=call.x.device)
    return _copy(call.state, call.accumulator)
