"""Triton kernels: the GPU backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foci.merge.partial import absorb
from foci.ops.gpu import brought, unsuitable
from foci.ops.masks import check_near
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

    if any(x is not None for x in call[7:13]):
        check_near(call.visible, *call.sizes[:3])
    return kernels_triton_forward.forward(_prepared(call))


def forward_paged(call: Call, table: Tensor) -> Tensor:
    """out of paged keys and values (paged.py): k [P,page,G,K], v [P,page,G,V], table [B,M]."""
    from foci.ops.softmax import kernels_triton_forward

    return kernels_triton_forward.forward(_prepared(call), table)[0]


def backward(
    call: Call, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, sink: two launches, one more for a sink, one or two for a bias.

    And on Hopper one more where heads are wider than 128.
    """
    from foci.ops.softmax import kernels_triton_backward, kernels_triton_bias, kernels_triton_few

    if not any(needs):
        return (None,) * 5
    call = _prepared(call)
    if kernels_triton_few.suits(call, grads, needs):
        problem = kernels_triton_backward.Problem(call, grads[0])
        rest = kernels_triton_backward.strides, kernels_triton_bias.total
        return *kernels_triton_few.backward(problem, outputs, grads[1], needs, *rest), None, None
    problem, found, parts = kernels_triton_backward.backward(call, outputs, grads, needs)
    dbias = dsink = None
    if call.bias is not None and needs[3]:
        dbias = kernels_triton_bias.of_bias(problem, kernels_triton_backward.strides)
    if call.sink is not None and parts is not None:
        dsink = kernels_triton_bias.total(parts, call.sink)
    return *found, dbias, dsink


def forward_part(call: Call, out: Tensor, lse: Tensor) -> None:
    """Merge attention over these keys into `out` and `lse` of other keys, in place (merge/partial.py: absorb)."""
    from foci.ops.softmax import kernels_triton_forward

    part, top = kernels_triton_forward.forward(_prepared(call), dtype=out.dtype)
    absorb(out, lse, part, top)


def backward_part(call: Call, rows: Rows, into: Gradients) -> None:
    """Accumulate the gradients of attention to these keys, in place."""
    from foci.ops.softmax import kernels_triton_backward, kernels_triton_bias

    problem = kernels_triton_backward.backward_part(_prepared(call), rows, into)
    if into.dbias is not None:
        kernels_triton_bias.of_bias(problem, kernels_triton_backward.strides, into.dbias)


def _prepared(call: Call) -> Call:
    """The call in the form kernels read: small tensors contiguous on the device, window sides clamped to 32 bits."""
    if call.band_low is not None or call.band_high is not None:
        call = _windowed(call)
    device = call.q.device
    changed: dict[str, Any] = {}
    for name, x in zip(_SMALL, (call.sink, *call[7:13]), strict=True):
        if x is not None and not (x.device == device and x.is_contiguous()):
            changed[name] = brought("attention", name, x, device)
    for name, reach in (("left", call.left), ("right", call.right)):
        if reach is not None and reach > _FAR:
            changed[name] = _FAR
    return call._replace(**changed) if changed else call


def _windowed(call: Call) -> Call:
    """Replace a Band of one CPU value for whole rows by the equal Window, so that nothing is copied to the GPU."""
    bounds = [x for x in (call.band_low, call.band_high) if x is not None]
    if call.q_offsets is not None or call.kv_lengths is not None or any(len(x) > 1 or not x.is_cpu for x in bounds):
        return call
    _, T, S, *_ = call.sizes
    low, high = (x if x is None else S - T - max(-_FAR, min(int(x), _FAR)) for x in (call.band_low, call.band_high))
    left = [x for x in (call.left, low) if x is not None]
    right = [x for x in (call.right, None if high is None else -high) if x is not None]
    return call._replace(band_low=None, band_high=None, left=min(left, default=None), right=min(right, default=None))
