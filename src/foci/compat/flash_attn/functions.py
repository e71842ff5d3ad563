"""flash-attn 2.8's attention functions: its names, layouts and alignment, computed by foci on any device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.compat.flash_attn.arguments import (
    alibi,
    check_inside,
    indices,
    join,
    logits,
    longest,
    mask_of,
    per_head,
    unpack,
)
from foci.core.errors import ShapeError
from foci.ops.arguments import check_offsets, switch
from foci.ops.masks import Mask, Packed
from foci.ops.softmax.api import attention, attention_with_lse
from foci.ops.softmax.call import probability

Attended = Tensor | tuple[Tensor, Tensor, Tensor]


class Options(NamedTuple):
    """What the functions share, in flash-attn's words."""

    dropout_p: float
    softmax_scale: float | None
    softcap: float
    deterministic: bool

    def keywords(self, q: Tensor) -> dict[str, Any]:
        """The same in foci's words. Some of torch's CUDA kernels add with atomics; `chunked` never does."""
        scale, softcap = logits(self.softmax_scale, self.softcap)
        repeats = switch("flash_attn", "deterministic", self.deterministic)
        return {
            "scale": scale,
            "softcap": softcap,
            "dropout": probability("flash_attn", "dropout_p", self.dropout_p),
            "backend": "chunked" if repeats and q.device.type == "cuda" else None,
        }


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """Softmax attention, `foci.attention` behind flash-attn's signature.

    q [B,T,H,D], k [B,S,G,D], v [B,S,G,V] -> out [B,T,H,V]; H a multiple of G. float64 and float32 run too.
    causal and window_size (left, right; -1 is open) let the last query stand at the last key. softcap <= 0 is none.
    alibi_slopes [H] or [B,H]: -slope |t + S - T - s| is added to the logits, after the cap; differentiable here.
    return_attn_probs: (out, softmax_lse [B,H,T], S_dmask). The lse is natural, -inf for a row that sees nothing
    (flash-attn 2 says +inf there), of the logits as defined above (flash-attn 2 leaves slope * (t + S - T) out of a
    causal one), and differentiable. S_dmask is empty without dropout, as theirs is; with it, the probabilities
    [B,H,T,S], negative where dropped.

    Raises ShapeError, ValueError or TypeError naming the argument. Papers: arXiv 2205.14135, 2307.08691; ALiBi
    2108.12409.
    """
    bias = None
    if alibi_slopes is not None:
        T, S = q.shape[1], k.shape[1]
        rows, columns = (torch.arange(n, device=q.device)[None] for n in (T, S))
        bias = alibi(per_head(alibi_slopes, q.shape[0], q), rows + S - T, columns)
    options = Options(dropout_p, softmax_scale, softcap, deterministic)
    return _attend(q, k, v, mask_of(causal, window_size), bias, options, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """`flash_attn_func` with kv [B,S,2,G,D]: keys and values in one tensor."""
    k, v = unpack("kv", kv, 2, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """`flash_attn_func` with qkv [B,T,3,H,D]: queries, keys and values in one tensor."""
    q, k, v = unpack("qkv", qkv, 2, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Attended:
    """`flash_attn_func` for N sequences end to end: q [T,H,D], k [S,G,D], v [S,G,V] -> out [T,H,V].

    cu_seqlens_q, cu_seqlens_k: int32 or int64 [N+1], where each sequence starts. A sequence longer than max_seqlen_q or
    max_seqlen_k raises. alibi_slopes [H] or [N,H]; its bias takes O(T S) memory here. softmax_lse is [H,T], S_dmask
    [N,H,max_seqlen_q,max_seqlen_k]. block_table [N, pages]: k and v are pages [P, page, G, D] and are gathered, which
    copies the keys that are used; what it holds behind a sequence's last page may be anything.
    """
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_offsets("flash_attn", starts, name=name)
    mask = join(Packed(cu_seqlens_q, cu_seqlens_k), mask_of(causal, window_size))
    N = cu_seqlens_q.numel() - 1
    longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q)
    longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k)
    if block_table is not None:
        k, v = _gathered(k, v, cu_seqlens_k, indices("block_table", block_table, N, k.device, "pages"))
    bias = None
    if alibi_slopes is not None:
        slopes = per_head(alibi_slopes, N, q)
        if N:
            bias = _alibi(slopes.expand(N, -1), q.shape[0], k.shape[0], cu_seqlens_q, cu_seqlens_k)
    options = Options(dropout_p, softmax_scale, softcap, deterministic)
    attended = _attend(q[None], k[None], v[None], mask, bias, options, return_attn_probs)
    if isinstance(attended, Tensor):
        return attended[0]
    out, lse, dropped = attended
    if dropped.numel():
        dropped = _by_sequence(dropped[0], cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return out[0], lse[0], dropped


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """`flash_attn_varlen_func` with kv [S,2,G,D]."""
    k, v = unpack("kv", kv, 1, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """`flash_attn_varlen_func` with qkv [T,3,H,D]."""
    q, k, v = unpack("qkv", qkv, 1, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, options: Options, probabilities: bool
) -> Attended:
    if not switch("flash_attn", "return_attn_probs", probabilities):
        return attention(q, k, v, mask=mask, bias=bias, **options.keywords(q))
    if not options.dropout_p:
        out, lse = attention_with_lse(q, k, v, mask=mask, bias=bias, **options.keywords(q))
        return out, lse.transpose(1, 2), q.new_empty(0)
    # The identity as further columns of v reads off the very probabilities that out was made of.
    (B, S, G), V = k.shape[:3], v.shape[-1]
    unit = torch.eye(S, dtype=v.dtype, device=v.device)[None, :, None].expand(B, S, G, S)
    out, lse = attention_with_lse(q, k, torch.cat([v, unit], -1), mask=mask, bias=bias, **options.keywords(q))
    with torch.no_grad():
        whole = attention(q, k, unit, mask=mask, bias=bias, **options._replace(dropout_p=0.0).keywords(q))
        signed = torch.where(out[..., V:] > 0, whole, -whole)
    return out[..., :V], lse.transpose(1, 2), signed.transpose(1, 2)


def _places(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token, and its place there; tokens behind the last sequence count as the last one's."""
    token = torch.arange(total, device=offsets.device)
    document = torch.searchsorted(offsets[1:].long(), token, right=True).clamp(max=max(offsets.numel() - 2, 0))
    return document, token - offsets.long()[document]


def _alibi(slopes: Tensor, T: int, S: int, q_offsets: Tensor, k_offsets: Tensor) -> Tensor:
    """The bias [1,H,T,S] of slopes [N,H], a row for each sequence."""
    document, rows = _places(q_offsets, T)
    _, columns = _places(k_offsets, S)
    ends = k_offsets.long().diff() - q_offsets.long().diff()
    return alibi(slopes[document].T[None, :, :, None], (rows + ends[document])[None], columns[None])


def _gathered(k: Tensor, v: Tensor, offsets: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [S, G, D] of the sequences whose pages `table` names."""
    size, ends = k.shape[1], offsets.tolist()
    most = max((end - start for start, end in pairwise(ends)), default=0)
    if (needed := -(-most // max(size, 1))) > table.shape[1]:
        raise ShapeError(
            f"flash_attn: block_table names {table.shape[1]} pages of {size} tokens for each sequence; "
            f"the longest needs {needed}"
        )
    starts = torch.arange(table.shape[1], device=table.device) * size
    check_inside("block_table", table, k.shape[0], "a page", starts < offsets.long().diff()[:, None])
    document, place = _places(offsets, ends[-1])
    page = table[document, place // size]
    return k[page, place % size], v[page, place % size]


def _by_sequence(pairs: Tensor, q_offsets: Tensor, k_offsets: Tensor, T: int, S: int) -> Tensor:
    """[H, total T, total S] cut into [N, H, T, S], 0 behind each sequence."""
    q_starts, k_starts = q_offsets.tolist(), k_offsets.tolist()
    found = pairs.new_zeros(len(q_starts) - 1, pairs.shape[0], T, S)
    bounds = zip(found, q_starts, q_starts[1:], k_starts, k_starts[1:], strict=False)
    for place, q0, q1, k0, k1 in bounds:
        place[:, : q1 - q0, : k1 - k0] = pairs[:, q0:q1, k0:k1]
    return found
