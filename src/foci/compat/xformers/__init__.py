"""xFormers' attention over foci: `from foci.compat import xformers as xops`, or `as fmha`, in place of xformers.ops."""

from __future__ import annotations

from foci.compat.xformers import attn_bias
from foci.compat.xformers.attention import (
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
    merge_attentions,
)
from foci.compat.xformers.attn_bias import AttentionBias, BlockDiagonalMask, LowerTriangularMask

__all__ = [
    "AttentionBias", "BlockDiagonalMask", "LowerTriangularMask", "attn_bias", "memory_efficient_attention",
    "memory_efficient_attention_backward", "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad", "memory_efficient_attention_partial", "merge_attentions",
]  # fmt: skip
