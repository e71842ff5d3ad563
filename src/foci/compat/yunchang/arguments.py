"""yunchang's arguments in foci's terms: kernels by name, windows, ALiBi by place in the whole sequence, determinism."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.compat.flash_attn.arguments import alibi, mask_of, per_head
from foci.core.errors import Unsupported
from foci.ops.arguments import switch
from foci.ops.softmax.api import attention, attention_with_lse
from foci.parallel.exchange import gather_counts, sum_gradient
from foci.parallel.operators import operator_of
from foci.parallel.shard_positions import groups_of, order_of, pieces_by_rank, positions_of, shard_index


class AttnType(Enum):
    """yunchang's names of kernels. The exact ones all mean foci's own choice; those that approximate are refused."""

    AITER = "aiter"
    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH_MATH = "torch_math"
    TORCH_FLASH = "torch_flash"
    TORCH_EFFICIENT = "torch_efficient"
    TORCH_CUDNN = "torch_cudnn"
    SAGE_AUTO = "sage_auto"
    SAGE_FP16 = "sage_fp16"
    SAGE_FP16_TRITON = "sage_fp16_triton"
    SAGE_FP8 = "sage_fp8"
    SAGE_FP8_SM90 = "sage_fp8_sm90"
    SPARSE_SAGE = "sparse_sage"
    NPU = "npu"

    @classmethod
    def from_string(cls, s: str) -> AttnType:
        """The kernel of this value; raises ValueError for one that there is not."""
        return cls(s)


class Options(NamedTuple):
    """What layers and functions share, in yunchang's words."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    deterministic: bool


def check_kernel(attn_type: AttnType, attn_processor: object) -> None:
    """Raise for a kernel that approximates, or that is brought along."""
    if not isinstance(attn_type, AttnType):
        raise TypeError(f"yunchang: attn_type must be an AttnType, got {attn_type!r}")
    if "SAGE" in attn_type.name:
        raise Unsupported(
            f"yunchang: attn_type is {attn_type}",
            ["it quantises or drops keys; foci computes exact attention"],
            "AttnType.FA, or any other exact kernel, lets foci choose",
        )
    if attn_processor is not None:
        raise Unsupported(
            f"yunchang: attn_processor is {type(attn_processor).__name__}",
            ["it is yunchang's own kernel for sparse attention"],
            "foci.parallel.ulysses(your_callable, group) exchanges heads round any attention",
        )


def attend(
    wrap: Callable[[Any], Any],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    options: Options,
    *,
    lse: bool,
) -> tuple[Tensor, ...]:
    """(out,) or (out, lse [B,H,T]) of q, k, v and ALiBi slopes through a wrapper of foci.attention."""
    q, k, v, slopes = tensors
    repeats = switch("yunchang", "deterministic", options.deterministic)
    op = wrap(attention_with_lse if lse else attention)
    result = op(
        q,
        k,
        v,
        mask=mask_of(options.causal, options.window_size),
        bias=None if slopes is None else _bias(op, q, k, slopes),
        softcap=options.softcap if options.softcap > 0 else None,
        scale=options.softmax_scale,
        dropout=options.dropout_p,
        # Some of torch's CUDA kernels add with atomics, in the backward too; `chunked` never does.
        backend="chunked" if repeats and q.device.type == "cuda" else None,
    )
    return (result[0], result[1].transpose(1, 2)) if lse else (result,)


def _bias(op: Any, q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
    """-slope |t + S - T - s| for this rank's queries, wherever they stand, and every key: [B|1, H, T here, S]."""
    wrapped = operator_of(op)
    groups = groups_of(wrapped)
    counts = gather_counts("alibi_slopes", groups, [q.shape[1], k.shape[1]])
    T, S = (sum(row[place] for row in counts) for place in (0, 1))
    pieces = pieces_by_rank(groups, order_of(wrapped), [row[0] for row in counts])
    rows = positions_of(pieces[shard_index(groups)]).to(q.device)
    slopes = per_head(slopes, q.shape[0], q)
    if slopes.requires_grad and torch.is_grad_enabled():
        for group in groups:
            slopes = sum_gradient(slopes, group, "alibi_slopes")
    return alibi(slopes, rows[None] + S - T, torch.arange(S, device=q.device)[None])
