"""Triton kernels: the GPU backend."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.core.spec import Output
from foci.ops.decay.call import NAME, Call
from foci.ops.gpu import chunks, placed, unsuitable

Gradients = tuple[Tensor | None, ...]


def reasons(call: Call) -> list[str]:
    *_, K, V, _ = call.sizes
    return unsuitable(call.v, call.sizes, (K, V))


def kept(call: Call) -> Output:
    """The state at the start of every chunk; room for two more, since the compiler tells 0 and 1 from other numbers."""
    *_, H, K, V, _ = call.sizes
    dtype = torch.bfloat16 if call.v.dtype == torch.bfloat16 else torch.float32
    return Output("kept", (_slots(call) + 2 if call.causal else 0, H, K, V), dtype)


def _slots(call: Call) -> int:
    return chunks(call.v.shape[1], call.v.shape[0], call.offsets)


def forward(call: Call, keep: bool = False) -> tuple[Tensor, ...]:
    """out [B,T,H,V] in v's dtype and the final state [N,H,K,V]; `keep`: and what `kept` declares."""
    from foci.ops.decay import kernels_triton_forward as kernels

    call = call._replace(offsets=placed(NAME, call.offsets, call.v))
    states = kept(call).empty(call.v) if keep or call.causal else None
    out, final = kernels.forward(call, states, _slots(call))
    return (out, final) if states is None or not keep else (out, final, states)


def backward(call: Call, outputs: tuple[Tensor, ...], grads: Gradients, needs: list[bool]) -> Gradients:
    """Gradients of q, k, v, log_decay, bonus and state, None where not needed."""
    from foci.ops.decay import kernels_triton_backward as kernels

    call = call._replace(offsets=placed(NAME, call.offsets, call.v))
    return kernels.backward(call, outputs[2] if call.causal else outputs[1], grads, needs, _slots(call))
