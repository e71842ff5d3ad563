"""torch's fused attention kernels, with their different LSE conventions normalised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from foci.merge.partial import absorb
from foci.ops.masks import segments
from foci.ops.softmax import chunked
from foci.ops.softmax.aten_cuda import cuda_kernels, differentiated, fold, folds_dlse, little, slow, unit_stride
from foci.ops.softmax.call import Call, Gradients, Rows, never_empty

_flash_forward = torch._scaled_dot_product_flash_attention_for_cpu  # the same op, 2 us cheaper to call
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_HALF = (torch.bfloat16, torch.float16)
_FEW = 32  # elements whose product mostly fits in float32


class Kernel(Protocol):
    """The contract of torch's fused kernels: tensors [B, H, T, D] with one D, GQA, additive mask, top-left causal, true
    lse.

    `reasons(call, gradients)`: `gradients` says that they will be needed, which inside an op autograd does not show.

    `backward` recomputes p = exp(z - lse) and takes delta from sum(dout * out); for an empty row it gets lse = +inf, so
    p = 0.
    """

    name: str
    quick: bool

    def reasons(self, call: Call, gradients: bool = False) -> list[str]: ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip

    def unchecked(self, call: Call, causal: bool) -> tuple[Callable[..., Any], Callable[..., Any]] | None: ...

    def torch_op(self, call: Call, causal: bool) -> Callable[..., tuple[Tensor]] | None: ...


class FlashOnCpu:
    """torch's CPU flash attention. Its lse is 0.0 for an empty row, which would merge as a real one: see `forward`.

    It scales after q k, and its maximum may ignore NaN: see `_may_overflow` and `_lost_rows`.
    """

    name = "cpu flash"
    quick = True

    def reasons(self, call: Call, gradients: bool = False) -> list[str]:
        if not call.ascending and (call.causal_end or call.causal_start):
            return ["causal needs a positive scale there: -inf is multiplied by it"]
        return []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        return _flash_forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        grads: tuple[Tensor, Tensor, Tensor] = _flash_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return grads

    def unchecked(self, call: Call, causal: bool) -> None:
        """Nothing: on the CPU every call is checked."""

    torch_op = unchecked


_CPU_KERNELS: tuple[Kernel, ...] = (FlashOnCpu(),)


def _kernels(call: Call) -> tuple[Kernel, ...]:
    device = call.q.device.type
    if device == "cuda":
        return cuda_kernels(call.q.device)
    return _CPU_KERNELS if device in ("cpu", "meta") else ()


def _kernel(call: Call, quick: bool = False) -> Kernel:
    """The first kernel that supports the call and its gradients; with `quick`, preferably one that is quick to launch.

    Forward and backward may use different kernels, since all agree on out and lse.
    """
    for kernel in sorted(_kernels(call), key=lambda kernel: quick and not kernel.quick):
        if not kernel.reasons(call, gradients=True):
            return kernel
    raise AssertionError("no kernel: reasons(call) should have refused")


def reasons(call: Call) -> list[str]:
    """Why no fused kernel of torch can run this call. Sink, V != K, documents and lengths are decomposed by us."""
    found = []
    if call.softcap is not None:
        found.append("softcap is not supported by torch's fused kernels")
    if call.dropout:
        found.append("dropout follows torch's own random stream there, not foci's positions")
    if call.left is not None or call.right is not None:
        found.append("a window is not supported by torch's fused kernels (a dense mask would compute what it hides)")
    if call.band_low is not None or call.band_high is not None:
        found.append("a band is not supported by torch's fused kernels (a dense mask would compute what it hides)")
    if call.bias is not None and call.bias.requires_grad and torch.is_grad_enabled():
        found.append("bias needs a gradient, which torch's fused kernels do not compute")
    if call.sink is not None and call.sink.requires_grad and torch.is_grad_enabled() and call.q.dtype in _HALF:
        found.append("sink needs a gradient, which in half precision would carry the rounding of out")
    if not _causal_fits(call):
        found.append("torch's fused kernels align causal top-left; here the last query must see the last key")
    if call.q.is_cuda and (call.q_offsets is not None or call.kv_lengths is not None):
        found.append("documents and lengths would be read on the host, which waits for the GPU")
    kernels = _kernels(call)
    if not kernels:
        found.append(f"torch has no fused kernel on device {call.q.device.type!r}")
    if found:
        return found
    for kernel in kernels:
        against = kernel.reasons(call)
        if not against:
            return []
        found += [f"{kernel.name}: {reason}" for reason in against]
    return found


def prefers(call: Call, single: bool) -> str:
    """ "triton" if that is faster for this call, else "".

    With gradients, torch's own autograd with a kernel that is quick to launch has less host overhead than our Function.
    """
    if not call.q.is_cuda or not slow(call):
        return ""
    trained = single and differentiated(call) and not call.few and _kernel(call, quick=True).quick
    return "" if trained and torch_op(call) is not None else "triton"


def _causal_fits(call: Call) -> bool:
    """Whether causal is top-left in every segment, or masks nothing, as for a single query at the end."""
    if not call.causal_end:
        return True
    _, T, S, *_ = call.sizes
    if call.q_lengths is not None:
        return False
    if call.q_offsets is not None:
        return call.kv_lengths is None and call.q_offsets is call.kv_offsets
    return T == S or (T == 1 and not call.causal_start)


class Piece(NamedTuple):
    """One fused call: a view of some rows, queries and keys."""

    rows: slice
    queries: slice
    keys: slice
    mask: Tensor | None
    causal: bool


def _pieces(call: Call) -> Iterator[Piece]:
    B, T, S, *_ = call.sizes
    mask = _additive(call)
    for segment in segments(call.visible, B, T, S):
        queries, keys = slice(segment.q_start, segment.q_stop), slice(segment.k_start, segment.k_stop)
        if queries.start >= queries.stop or keys.start >= keys.stop:
            continue
        causal = segment.high is not None and segment.high < keys.stop - keys.start - 1
        yield Piece(segment.rows, queries, keys, _cut(mask, segment.rows, queries, keys), causal)


def _additive(call: Call) -> Tensor | None:
    """Bias and Dense combined into one additive mask of four dimensions, as the kernels take it."""
    mask = call.bias
    if call.dense is not None:
        zero = torch.zeros((), dtype=call.q.dtype, device=call.q.device) if mask is None else mask
        mask = torch.where(call.dense, zero, -torch.inf)
    if mask is None:
        return None
    # Rounding a float32 bias to a half-precision q would cost more than the LSE budget allows.
    same = mask.dtype == call.q.dtype and not _upcast(call.q)
    return mask.detach().to(mask.dtype if same else call.accumulator)[(None,) * (4 - mask.dim())]


def _cut(mask: Tensor | None, rows: slice, queries: slice, keys: slice) -> Tensor | None:
    if mask is None:
        return None
    for dim, part in ((0, rows), (2, queries), (3, keys)):
        if mask.shape[dim] != 1:
            mask = mask.narrow(dim, part.start, part.stop - part.start)
    return mask


def forward(call: Call, kernel: Kernel | None = None) -> tuple[Tensor, Tensor]:
    """out and lse, one kernel call per piece; `kernel`: by default the first that supports the call.

    A sink is merged afterwards, as one more key.
    """
    kernel = kernel or _kernel(call)
    if _bare(call):
        q, k, v = (unit_stride(x).transpose(1, 2) for x in call[:3])
        out, lse = kernel.forward(q, k, v, None, _causal_flag(call), call.scale)
        if _lost_rows(out, lse):
            return chunked.forward(call)
        return out.transpose_(1, 2).contiguous(), lse.transpose_(1, 2).contiguous()  # in place: no views
    B, T, _, H, _, K, V = call.sizes
    width = max(K, V)
    pieces = list(_pieces(call))
    whole = len(pieces) == 1 and pieces[0].queries == slice(0, T) and pieces[0].rows == slice(0, B)
    if not whole:
        out = torch.zeros(B, H, T, V, dtype=torch.float32 if _upcast(call.q) else call.q.dtype, device=call.q.device)
        lse = torch.full((B, H, T), -torch.inf, dtype=call.accumulator, device=call.q.device)
    for piece in pieces:
        rows, queries, keys = piece.rows, piece.queries, piece.keys
        parts = ((call.q, queries), (call.k, keys), (call.v, keys))
        q, k, v = (_heads_first(x[rows, tokens], width) for x, tokens in parts)
        o, e = kernel.forward(q, k, v, piece.mask, piece.causal, call.scale)
        o = o[..., :V]
        if piece.mask is not None:
            empty = _empty_rows(piece.mask, piece.causal, queries.stop - queries.start)
            o, e = o.masked_fill(empty[..., None], 0.0), e.masked_fill(empty, -torch.inf)
        if whole:
            out, lse = o, e
        else:
            out[rows, :, queries], lse[rows, :, queries] = o, e
    if _lost_rows(out, lse):
        return chunked.forward(call)
    if call.sink is not None:
        total = torch.logaddexp(lse, call.sink.to(lse.dtype)[:, None])
        out, lse = out * torch.exp(lse - never_empty(total))[..., None], total
    out, lse = out.transpose(1, 2).to(call.v.dtype), lse.transpose(1, 2)
    return out.contiguous().detach(), lse.contiguous().detach()  # no views


def _lost_rows(out: Tensor, lse: Tensor) -> bool:
    """Whether, on the CPU, a nonempty row may have become 0, or is not finite: such calls are recomputed by `chunked`.

    Below 16 keys (8 in float64) the kernel's maximum ignores NaN: a row without another finite logit gets out 0, lse 0.
    """
    if lse.device.type != "cpu":
        return False
    if lse.numel() <= _FEW:  # the product takes two operations less, and also is 0 or not finite then
        all_well = (told := lse.prod().item()) != 0 and isfinite(told)
    else:
        all_well = lse.reciprocal().add_(lse).sum().item() < torch.inf
    return not all_well and bool((~(lse < torch.inf) | (lse == 0) & ~out.any(-1)).any())


def _may_overflow(call: Call) -> bool:
    """Whether, on the CPU, q k may overflow before it is scaled, or a bias is +inf or NaN, which -inf cannot mask."""
    if call.q.device.type != "cpu":
        return False
    wild = _overflows([(call.q, call.k)], call.accumulator)
    if wild and (call.q_offsets is not None or call.kv_lengths is not None):  # excluded tokens may hold anything
        B, T, S, *_ = call.sizes
        parts = segments(call.visible, B, T, S)
        pairs = [(call.q[x.rows, x.q_start : x.q_stop], call.k[x.rows, x.k_start : x.k_stop]) for x in parts]
        wild = _overflows(pairs, call.accumulator)
    return wild or (call.bias is not None and call.bias.numel() > 0 and not call.bias.amax().item() < torch.inf)


def _overflows(pairs: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> bool:
    """Whether a product of one of these pairs (q, k) may overflow this dtype, or is NaN."""
    most = torch.finfo(dtype).max / 4
    pairs = [(q, k) for q, k in pairs if q.numel() and k.numel()]
    return not all(_largest(q) * _largest(k) * q.shape[-1] < most for q, k in pairs)


def _largest(x: Tensor) -> float:
    low, high = x.aminmax()
    return max(-low.item(), high.item())


def specialize(call: Call) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor | None, ...]]]:
    """`forward` and `backward` for calls with the same cache key, with this call's kernel; lse keeps its layout."""
    kernel, make = _kernel(call), type(call)._make
    unchecked, folds = kernel.unchecked(call, _causal_flag(call)) if _bare(call) else None, folds_dlse(call)

    def back(values: Any, outputs: Any, grads: Any, needs: Any) -> tuple[Tensor | None, ...]:
        (out, lse), (dout, dlse) = outputs, grads
        if unchecked is None or dout is None or (dlse is not None and not folds):
            return backward(make(values), outputs, grads, needs, kernel)
        if dlse is not None:
            dout, out = fold(dlse, lse, dout, out)
        found: tuple[Tensor | None, ...] = unchecked[1](values, (out, lse), dout, needs)
        return found

    return (lambda values: forward(make(values), kernel)) if unchecked is None else unchecked[0], back


def torch_op(call: Call) -> Callable[..., tuple[Tensor]] | None:
    """A function from q, k and v to (out,) for calls with the same cache key; None if they need our processing."""
    return _kernel(call, quick=little(call)).torch_op(call, _causal_flag(call)) if _bare(call) else None


def _causal_flag(call: Call) -> bool:
    """Whether a bare call needs the causal flag; a single query at the end sees every key without it."""
    return call.causal_start or (call.causal_end and call.q.shape[1] > 1)


def _bare(call: Call) -> bool:
    """Whether a kernel can take the call as it is: a fast path, so that a tiny attention has little overhead."""
    return (
        call.bias is None
        and call.sink is None
        and call.dense is None
        and call.q_offsets is None
        and call.kv_lengths is None
        and call.q.shape[-1] == call.v.shape[-1]
        and not _upcast(call.q)
        and call.q.numel() > 0
        and call.k.numel() > 0
    )


def backward(
    call: Call, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], needs: list[bool],
    kernel: Kernel | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v and sink. With the merged lse, p is already the share beside the sink.

    A gradient of lse adds p * dlse to dz. It is folded into out if possible (aten_cuda.py: fold). Otherwise it is
    passed as one more column: v gets a 1 and dout gets dlse, so that dp becomes dout v + dlse, while out gets a 0, so
    that delta = sum(dout * out) is unchanged.
    """
    if _may_overflow(call):
        return chunked.backward(call, chunked.forward(call), grads, needs)  # with lse recomputed, too
    if _sums_in_half(call):
        dout = None if grads[0] is None else grads[0].to(call.accumulator)
        found = backward(_as_part(call), (outputs[0].to(call.accumulator), outputs[1]), (dout, grads[1]), needs)
        return *(x if x is None else x.to(call.q.dtype) for x in found[:3]), *found[3:]
    kernel = kernel or _kernel(call)
    out, lse = outputs
    dout, dlse = grads
    *_, K, V = call.sizes
    dout = torch.zeros_like(out) if dout is None else dout
    dsink = None
    if call.sink is not None and needs[4]:
        delta = (dout.to(lse.dtype) * out).sum(-1)
        delta = -delta if dlse is None else dlse - delta
        dsink = (torch.exp(call.sink.to(lse.dtype) - never_empty(lse)) * delta).sum((0, 1)).to(call.sink.dtype)
    if dlse is not None and folds_dlse(call):
        dout, out = fold(dlse, lse, dout, out)
        dlse = None
    if dlse is None and _bare(call):
        do, q, k, v, o = (unit_stride(x).transpose(1, 2) for x in (dout, *call[:3], out))
        found = kernel.backward(do, q, k, v, o, lse.transpose(1, 2), None, _causal_flag(call), call.scale)
        whole = (x.transpose_(1, 2).contiguous() if need else None for x, need in zip(found, needs, strict=False))
        return *whole, None, None
    steady = never_empty(lse)
    # Kernels need widths that are multiples of eight: one column more means eight.
    width = max(K, V) if dlse is None else -(-(V + 1) // 8) * 8 if V + 1 > K else K
    width = max(width, K)
    q, k, v, o, do = (_heads_first(x, width) for x in (call.q, call.k, call.v, out, dout))
    if dlse is not None:
        v, do = v.clone(), do.clone()
        v[..., V], do[..., V] = 1.0, dlse.transpose(1, 2).to(do.dtype)
    dq, dk, dv = _backward_pieces(kernel, call, (do, q, k, v, o, steady.transpose(1, 2)))
    return (
        dq[..., :K].transpose(1, 2).to(call.q.dtype).contiguous() if needs[0] else None,
        dk[..., :K].transpose(1, 2).to(call.k.dtype).contiguous() if needs[1] else None,
        dv[..., :V].transpose(1, 2).to(call.v.dtype).contiguous() if needs[2] else None,
        None,
        dsink,
    )


def _sums_in_half(call: Call) -> bool:
    """torch's CPU kernel sums gradients of heads that share a key in bfloat16, no better than a plain computation."""
    *_, H, G, _, _ = call.sizes
    return call.q.dtype == torch.bfloat16 and call.q.device.type == "cpu" and H != G


def forward_part(call: Call, out: Tensor, lse: Tensor) -> None:
    """Merge attention over these keys into `out` and `lse` of other keys, in place (merge/partial.py: absorb).

    On the CPU half precision is computed in float32. On a GPU the kernel rounds its out to the dtype of q: parts are
    weighted shares of the sum, so the rounding error of many parts is that of one.
    """
    part, top = forward(_as_part(call))
    absorb(out, lse, part.to(out.dtype), top)


def backward_part(call: Call, rows: Rows, into: Gradients) -> None:
    """Accumulate the gradients of attention to these keys, in place."""
    assert into.dbias is None, "reasons(call) should have refused"
    if _may_overflow(call):
        return chunked.backward_part(call, rows, into)
    call = _as_part(call)
    out, dout = rows.out.to(call.q.dtype), rows.dout.to(call.q.dtype)
    found = backward(call, (out, rows.lse), (dout, rows.dlse), [True, True, True, False, False])
    for total, gradient in zip(into[:3], found[:3], strict=True):
        assert total is not None and gradient is not None
        total.add_(gradient)


def _as_part(call: Call) -> Call:
    wide = call.q.device.type == "cpu"
    q, k, v = (x.to(call.accumulator) if wide else x for x in call[:3])
    return call._replace(q=q, k=k, v=v, bias=None if call.bias is None else unit_stride(call.bias))


def _backward_pieces(kernel: Kernel, call: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    do, q, k, v, o, lse = tensors
    B, T, S, *_ = call.sizes
    pieces = list(_pieces(call))
    if len(pieces) == 1 and pieces[0][:3] == (slice(0, B), slice(0, T), slice(0, S)):
        return kernel.backward(do, q, k, v, o, lse, pieces[0].mask, pieces[0].causal, call.scale)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for piece in pieces:
        here, there = (piece.rows, slice(None), piece.queries), (piece.rows, slice(None), piece.keys)
        dq[here], dk[there], dv[there] = kernel.backward(
            do[here], q[here], k[there], v[there], o[here], lse[here], piece.mask, piece.causal, call.scale
        )
    return dq, dk, dv


def _heads_first(x: Tensor, width: int) -> Tensor:
    """[B, T, H, D] as [B, H, T, width], padded with zeros; float16 as float32, since its CPU matmul is emulated."""
    x = x.transpose(1, 2)
    if _upcast(x):
        x = x.float()
    # pad gives rows of one number channels-last strides.
    return unit_stride(x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])))


def _upcast(x: Tensor) -> bool:
    return x.dtype == torch.float16 and x.device.type == "cpu"


def _empty_rows(mask: Tensor, causal: bool, T: int) -> Tensor:
    """Rows [B|1, H|1, T] that see nothing: no key open, or under causal none before the first open one."""
    opened = mask != -torch.inf  # NaN is
    if not causal:
        return ~opened.any(-1).expand(-1, -1, T)
    first = torch.where(opened.any(-1), opened.to(torch.int8).argmax(-1), T)
    return first > torch.arange(T, device=mask.device)
