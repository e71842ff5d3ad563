"""xFormers' memory-efficient attention, its partial and merging forms, computed by foci on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.compat.xformers.attn_bias import AttentionBias
from foci.core.errors import ShapeError, Unsupported
from foci.core.select import choose
from foci.merge.algebra import fold
from foci.merge.partial import Partial
from foci.ops.arguments import DTYPES, switch
from foci.ops.masks import Mask
from foci.ops.softmax.api import attention, attention_with_lse
from foci.ops.softmax.call import bind
from foci.ops.softmax.spec import SPEC


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Softmax attention, `foci.attention` behind xFormers' signature.

    query [B,M,H,K], key [B,S,H,K], value [B,S,H,V] -> [B,M,H,V]; also [B,M,K] (one head) and [B,M,G,H,K], where keys
    expanded over H are read once each when no gradient is wanted of them. float64 too, on the CPU too.
    attn_bias: an AttentionBias, or a float tensor added to the logits, broadcastable to [B,H,M,S] ([B,M,S] and
    [B,G,H,M,S] for the other layouts; copied where it has one of G and H); its gradient is computed. p: dropout.
    scale: K**-0.5 by default. output_dtype, floating: wider than the inputs', everything is computed in it.
    op: must be None. foci chooses; `foci.attention(..., backend=...)` takes a choice.

    Raises ShapeError, ValueError or TypeError naming the argument, Unsupported for an op. Paper: arXiv 2112.05682.
    """
    problem = _problem(query, key, value, attn_bias, op, output_dtype)
    out = attention(*problem.qkv, mask=problem.mask, bias=problem.bias, scale=scale, dropout=p)
    return problem.restore(out)


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """`memory_efficient_attention` without a graph for gradients."""
    with torch.no_grad():
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse): lse [B,H,M] ([B,G,H,M]), natural, float32, -inf for a row that sees nothing; packed for block masks.

    Both are differentiable here. `memory_efficient_attention_backward` takes them too. p must be 0.
    """
    _refuse_dropout(p)
    problem = _problem(query, key, value, attn_bias, op, output_dtype)
    out, lse = attention_with_lse(*problem.qkv, mask=problem.mask, bias=problem.bias, scale=scale)
    return problem.restore(out), problem.restore_lse(lse)


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over some of the keys, for `merge_attentions`: out float32 (float64 for float64), as computed.

    Differentiable, unlike xFormers', whose merged gradients would lack those of lse.
    """
    output_dtype = output_dtype or torch.promote_types(query.dtype, torch.float32)
    return memory_efficient_attention_forward_requires_grad(
        query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype
    )


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue) of a loss whose gradient by `output` is `grad`, from what the forward gave."""
    _refuse_dropout(p)
    with torch.no_grad():
        problem = _problem(query, key, value, attn_bias, op, None, share=False)
        call = bind(*problem.qkv, mask=problem.mask, bias=problem.bias, scale=scale)
        B, T, _, H, _, _, V = call.sizes
        expected = (*query.shape[:-1], value.shape[-1])
        for name, got in (("grad", grad), ("output", output)):
            if got.shape != expected:
                raise ShapeError(f"xformers: {name} is {list(got.shape)}; expected {list(expected)}")
        if tuple(lse.shape) not in ((B, H, T), (B, *problem.middle, T)):
            raise ShapeError(f"xformers: lse is {list(lse.shape)}; expected [{B}, {H}, {T}], packed and unpadded")
        lse = lse.reshape(B, H, T).transpose(1, 2).contiguous()
        dout, out = (x.reshape(B, T, H, V).contiguous() for x in (grad, output))
        backward = getattr(torch.ops.foci, f"{SPEC.name}_{choose(SPEC, call).name}_bwd").default
        gradients = backward(dout, None, out, lse, [True, True, True, False, False], *call)
    dquery, dkey, dvalue = (x.reshape(y.shape) for x, y in zip(gradients, (query, key, value), strict=False))
    return dquery, dkey, dvalue


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over all the keys from attention over parts of them; a fold of foci.Partial, differentiable.

    attn_split: out of each part, [B,M,H,K] or [B,M,G,H,K], as a list or stacked in front; lse_split alike, [B,H,M] or
    [B,G,H,M]. Gives (out, lse), None for lse unless write_lse. A part that saw nothing (lse -inf) adds nothing.
    """
    write_lse = switch("xformers", "write_lse", write_lse)
    outs, lses = (list(x.unbind(0)) if isinstance(x, Tensor) else list(x) for x in (attn_split, lse_split))
    if len(outs) != len(lses) or not outs:
        raise ShapeError(
            f"xformers: attn_split has {len(outs)} parts, lse_split has {len(lses)}; expected as many, 1 or more"
        )
    for place, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        rest = (*out.shape[:1], *out.shape[2:-1], *out.shape[1:2])
        if out.dim() not in (4, 5) or lse.shape != rest or out.shape != outs[0].shape:
            raise ShapeError(
                f"xformers: part {place} has attn_split {list(out.shape)} and lse_split {list(lse.shape)}; expected "
                "[B,M,H,K] and [B,H,M], or [B,M,G,H,K] and [B,G,H,M], equal in every part"
            )
    dtype = _output(output_dtype, outs[0].dtype)
    wide = torch.promote_types(lses[0].dtype, torch.float32)
    parts = (Partial(out.to(wide), lse.movedim(-1, 1).to(wide)) for out, lse in zip(outs, lses, strict=True))
    total = fold(parts)
    lse = total.lse.movedim(1, -1).to(lses[0].dtype)
    return total.out.to(dtype), lse if write_lse else None


class _Problem(NamedTuple):
    """A call in foci's layout, and the way back."""

    qkv: tuple[Tensor, Tensor, Tensor]
    mask: Mask | None
    bias: Tensor | None
    middle: tuple[int, ...]  # the head dimensions of the query, as they were
    dtype: torch.dtype

    def restore(self, out: Tensor) -> Tensor:
        return out.reshape(*out.shape[:2], *self.middle, out.shape[-1]).to(self.dtype)

    def restore_lse(self, lse: Tensor) -> Tensor:
        lse = lse.transpose(1, 2)
        return lse.unflatten(1, self.middle) if len(self.middle) == 2 else lse


def _problem(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | AttentionBias | None, op: Any,
    output_dtype: torch.dtype | None, share: bool = True,
) -> _Problem:  # fmt: skip
    if op is not None:
        raise Unsupported(
            "xformers: op", [f"{op!r} names a kernel of xFormers"], "leave it out; foci.attention takes a backend"
        )
    rank = query.dim()
    if rank not in (3, 4, 5) or key.dim() != rank or value.dim() != rank:
        raise ShapeError(
            f"xformers: query, key, value have {rank}, {key.dim()}, {value.dim()} dimensions; expected [B,M,K], "
            "[B,M,H,K] or [B,M,G,H,K] for all three"
        )
    mask, bias = None, attn_bias
    if isinstance(attn_bias, AttentionBias):
        mask, bias = attn_bias.lower(query.shape[1], key.shape[1], query.device)
    if isinstance(bias, Tensor):
        if not bias.is_floating_point():
            raise ValueError(f"xformers: attn_bias is {bias.dtype}; expected a float tensor, added to the logits")
        bias = _aligned(bias, (*query.shape[:1], *query.shape[2:-1], query.shape[1], key.shape[1]))
    elif bias is not None:
        raise TypeError(f"xformers: attn_bias must be a tensor or an AttentionBias of this module, got {bias!r}")
    dtype = _output(output_dtype, query.dtype)
    wide = torch.promote_types(query.dtype, dtype)
    if wide != query.dtype == key.dtype == value.dtype:  # what differs is refused by its name, not narrowed
        query, key, value = (x.to(wide) for x in (query, key, value))
    middle = tuple(query.shape[2:-1])
    return _Problem(_heads(query, key, value, share), mask, bias, middle, dtype)


def _aligned(bias: Tensor, logits: tuple[int, ...]) -> Tensor:
    """attn_bias, which broadcasts to `logits` ([B,M,S], [B,H,M,S] or [B,G,H,M,S]), so that it does to [B,heads,M,S]."""
    rank, lacking = len(logits), len(logits) - bias.dim()
    if lacking < 0 or any(n not in (1, size) for n, size in zip(bias.shape, logits[max(lacking, 0) :], strict=False)):
        letters = {3: "[B,M,S]", 4: "[B,H,M,S]", 5: "[B,G,H,M,S]"}[rank]
        raise ShapeError(
            f"xformers: attn_bias has shape {list(bias.shape)}; expected one that broadcasts to "
            f"{letters} = {list(logits)}"
        )
    if bias.dim() < 3 or rank == 4:
        return bias
    if rank == 3:
        return bias[:, None]
    bias = bias[(None,) * lacking]
    heads = logits[1:3] if bias.shape[1:3] != (1, 1) else (1, 1)
    return bias.expand(-1, *heads, -1, -1).flatten(1, 2)


def _output(wanted: torch.dtype | None, otherwise: torch.dtype) -> torch.dtype:
    """output_dtype; whole numbers would cut off what attention computes."""
    if wanted is None or wanted in DTYPES:
        return wanted or otherwise
    raise ValueError(f"xformers: output_dtype is {wanted!r}; expected float64, float32, bfloat16 or float16")


def _heads(query: Tensor, key: Tensor, value: Tensor, share: bool) -> tuple[Tensor, Tensor, Tensor]:
    """All three as [B, T, heads, D]."""
    if query.dim() == 3:
        return query[:, :, None], key[:, :, None], value[:, :, None]
    if query.dim() == 4:
        return query, key, value
    if query.shape[2:4] != key.shape[2:4] or key.shape[2:4] != value.shape[2:4]:
        shapes = [list(x.shape) for x in (query, key, value)]
        raise ShapeError(f"xformers: query, key, value are {shapes}; expected one G and one H, expanded where shared")
    # Keys expanded over the heads of a group are one key head; their gradient would have to be spread over all.
    wanted = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    if share and not wanted and key.stride(3) == 0 == value.stride(3):
        return query.flatten(2, 3), key[:, :, :, 0], value[:, :, :, 0]
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _refuse_dropout(p: float) -> None:
    if p != 0:
        reasons = [f"p is {p}; there is no lse of dropped probabilities"]
        raise Unsupported("xformers: p", reasons, "memory_efficient_attention takes it")
