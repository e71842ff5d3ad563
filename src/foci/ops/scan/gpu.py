"""Triton kernels: the GPU backend."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from foci.ops import stretches
from foci.ops.gpu import placed, unsuitable
from foci.ops.scan.call import NAME, Call

CUT = stretches.Rule(32, few=3, most=16, joined=0.5)  # as measured on an H100


def reasons(call: Call) -> list[str]:
    return unsuitable(call.x, call.sizes, (1,))


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """h [B,T,D] in x's dtype and the final state [call.ends,D]."""
    from foci.ops.kernels_triton_packed import room
    from foci.ops.scan import kernels_triton

    call = call._replace(offsets=placed(NAME, call.offsets, call.x))
    out, rest = room(call, call.x)
    rest.end()
    return out, kernels_triton.forward(call, out, _cut(call))


def backward(
    call: Call, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients that `needs` asks for, each in its tensor's dtype."""
    from foci.ops.kernels_triton_packed import rooms
    from foci.ops.scan import kernels_triton

    call = call._replace(offsets=placed(NAME, call.offsets, call.x))
    found, rest = rooms(call, (call.x, call.log_decay, call.state), needs)
    rest.end()
    kernels_triton.backward(call, outputs[0], grads, found, _cut(call))
    return found


def step(x: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
    """One token: h [B,D] in x's dtype, `state` changed in place to the same."""
    from foci.ops.scan import kernels_triton

    return kernels_triton.step(x, log_decay, state)


def _cut(call: Call) -> partial[stretches.Cut]:
    """The rule of the Cut, still to be called with the target GPU and the warps per sequence."""
    B, T, _, N = call.sizes
    return partial(stretches.cut, CUT, N, B, T, call.offsets is not None)
