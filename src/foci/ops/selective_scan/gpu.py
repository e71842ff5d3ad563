"""Triton kernels: the GPU backend."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from foci.core.spec import Output
from foci.ops import stretches
from foci.ops.gpu import placed, unsuitable
from foci.ops.selective_scan.call import NAME, Call

KEEP = 32  # tokens between saved states: as many bytes as x in bfloat16, for K = 16
FORWARD = stretches.Rule(KEEP, few=4, most=40, joined=1.2)  # as measured on an H100
BACKWARD = stretches.Rule(KEEP, few=3, most=40, joined=0.9)
DOCUMENTS = BACKWARD._replace(few=8)  # the backward of packed documents: stretches balance their different lengths


def reasons(call: Call) -> list[str]:
    return unsuitable(call.x, call.sizes, (call.sizes[3],))


def kept(call: Call) -> Output:
    """The state at every KEEP-th token of each sequence; plus two, as torch.compile specializes on sizes 0 and 1."""
    B, T, D, K, N = call.sizes
    slots = B * -(-T // KEEP) if call.offsets is None else T // KEEP + N
    return Output("kept", (slots + 2, D, K), torch.float32)


def forward(call: Call, keep: bool = False) -> tuple[Tensor, ...]:
    """y [B,T,D] in x's dtype and the final state [call.ends,D,K]; `keep`: and what `kept` declares."""
    from foci.ops.kernels_triton_packed import room
    from foci.ops.selective_scan import kernels_triton_forward

    call = call._replace(offsets=placed(NAME, call.offsets, call.x))
    (out, rest), states = room(call, call.x), kept(call).empty(call.x) if keep else None
    rest.end()
    final = kernels_triton_forward.forward(call, out, states, KEEP, _cut(call, FORWARD))
    return (out, final) if states is None else (out, final, states)


def backward(
    call: Call, outputs: tuple[Tensor, ...], grads: tuple[Tensor | None, Tensor | None], needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients that `needs` asks for, each in its tensor's dtype."""
    from foci.ops.kernels_triton_packed import rooms
    from foci.ops.selective_scan import kernels_triton_backward

    call = call._replace(offsets=placed(NAME, call.offsets, call.x))
    found, rest = rooms(call, (call.x, call.dt), needs[:2])
    rest.end()
    sums, _ = rooms(call, (call.A, call.B, call.C, call.skip, call.state), needs[2:])  # none has rows left to clear
    found += sums
    rule = BACKWARD if call.offsets is None else DOCUMENTS
    kernels_triton_backward.backward(call, outputs[2], KEEP, grads, found, _cut(call, rule))
    return found


def step(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, skip: Tensor | None) -> Tensor:
    """One token: y [B,D] in x's dtype, `state` changed in place."""
    from foci.ops.selective_scan import kernels_triton_forward

    return kernels_triton_forward.step(x, dt, A, B, C, state, skip)


def _cut(call: Call, rule: stretches.Rule) -> partial[stretches.Cut]:
    """The rule of the Cut, still to be called with the target GPU and the warps per sequence."""
    B, T, *_, N = call.sizes
    return partial(stretches.cut, rule, N, B, T, call.offsets is not None)
