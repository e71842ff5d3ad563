"""Triton kernels: the GPU backend."""

from __future__ import annotations

from torch import Tensor

from foci.merge.partial import absorb
from foci.ops.gpu import unsuitable
from foci.ops.softmax.call import Call, Gradients, Rows

_FAR = 1 << 29  # tiles/softmax.py: FAR, a side of a window that is open

_SMALL = ("sink", "q_offsets", "kv_offsets", "kv_lengths", "q_lengths", "band_low", "band_high")


def reasons(call: Call) -> list[str]:
    sizes = call.sizes
    documents = 1 if call.q_offsets is None else call.q_offsets.shape[0] - 1
    found = unsuitable(call.q, (*sizes, documents), sizes[-2:])
    if max(sizes) > _FAR:
        found.append(f"rows longer than {_FAR} tokens are not supported")
    return found


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B,T,H,V] in v's dtype and lse [B,T,H] in float32."""
    from foci.ops.softmax import kernels_triton_forward

    return kernels_triton_forward.forward(_there(call))


def forward_paged(call: Call, table: Tensor) -> Tensor:
    """out of keys and values that lie in pages (paged.py): k [P,page,G,K], v [P,page,G,V], table [B,M]."""
    from foci.ops.softmax import kernels_triton_forward

    return kernels_triton_forward.forward(_there(call), table)[0]


def backward(
    call: Call, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, sink: two launches, one more for a sink, one or two for a bias."""
    from foci.ops.softmax import kernels_triton_backward, kernels_triton_bias

    if not any(needs):
        return (None,) * 5
    call = _there(call)
    problem, found, parts = kernels_triton_backward.backward(call, outputs, grads, needs)
    dbias = dsink = None
    if call.bias is not None and needs[3]:
        dbias = kernels_triton_bias.of_bias(problem, kernels_triton_backward.strides)
    if call.sink is not None and parts is not None:
        dsink = kernels_triton_bias.total(parts, call.sink)
    return *found, dbias, dsink


def forward_part(call: Call, out: Tensor, lse: Tensor) -> None:
    """Merge attention over these keys into what other keys gave, in place (merge/partial.py: absorb)."""
    from foci.ops.softmax import kernels_triton_forward

    part, top = kernels_triton_forward.forward(_there(call), dtype=out.dtype)
    absorb(out, lse, part, top)


def backward_part(call: Call, rows: Rows, into: Gradients) -> None:
    """Add to the gradients, in place, what these keys give."""
    from foci.ops.softmax import kernels_triton_backward, kernels_triton_bias

    problem = kernels_triton_backward.backward_part(_there(call), rows, into)
    if into.dbias is not None:
        kernels_triton_bias.of_bias(problem, kernels_triton_backward.strides, into.dbias)


def _there(call: Call) -> Call:
    """The call as kernels read it: what is small one after another on the device, reaches within what 32 bits hold."""
    left, right = (None if x is None else min(int(x), _FAR) for x in (call.left, call.right))
    given = {name: getattr(call, name) for name in _SMALL}
    small = {n: x.to(call.q.device, non_blocking=True).contiguous() for n, x in given.items() if x is not None}
    return call._replace(left=left, right=right, **small)
