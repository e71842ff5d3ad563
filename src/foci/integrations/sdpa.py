"""SDPA's calling convention on foci's attention: the one place that translates layout, masks, causality and GQA."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foci.core.errors import ShapeError
from foci.ops.masks import Causal, Dense, Mask
from foci.ops.softmax.api import attention


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
    attend: Callable[..., Tensor] = attention,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by foci.

    query [..., H, T, K], key [..., G, S, K], value [..., G, S, V] -> [..., H, T, V], of any rank from 2 on. `attend`
    computes it: `foci.attention`, or a function with its signature.
    """
    rank = query.dim()
    if rank > 4:
        lead = query.shape[:-3]
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, -4)
        query, key, value = (x.expand(*lead, *x.shape[-3:]).flatten(0, -4) for x in (query, key, value))
    elif rank < 4:
        query, key, value = (x[(None,) * (4 - rank)] for x in (query, key, value))
    out = sdpa_bthd(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        backend=backend,
        attend=attend,
    ).transpose(1, 2)
    if rank > 4:
        return out.unflatten(0, lead)
    return out[(0,) * (4 - rank)] if rank < 4 else out


def sdpa_bthd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
    attend: Callable[..., Tensor] = attention,
) -> Tensor:
    """The same in foci's layout: query [B, T, H, K], key [B, S, G, K], value [B, S, G, V] -> [B, T, H, V].

    The mask keeps SDPA's layout, broadcastable to [B, H, T, S]: boolean (True may be seen) or additive. `is_causal` is
    SDPA's: the first query sees the first key only, also where T and S differ. Heads that are fewer than the query's
    need `enable_gqa`, and a mask excludes `is_causal`, as there.
    """
    heads = query.shape[2]
    if not enable_gqa and key.shape[2] != heads:
        raise ShapeError(
            f"sdpa: key has {key.shape[2]} heads, query has {heads}; expected equal without enable_gqa=True"
        )
    if attn_mask is not None and is_causal:
        raise ValueError("sdpa: attn_mask and is_causal=True were both given; expected one of them")
    mask: Mask | None = Causal("top-left") if is_causal else None
    bias = None
    if attn_mask is not None:
        if attn_mask.is_floating_point():
            bias = attn_mask
        else:
            mask = Dense(attn_mask)
    return attend(query, key, value, mask=mask, bias=bias, scale=scale, dropout=dropout_p, backend=backend)
