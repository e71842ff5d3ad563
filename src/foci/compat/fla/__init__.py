"""The public functions of fla.ops (flash-linear-attention) that foci's operators cover, with FLA's own signatures.

    from foci.compat.fla import chunk_gla          # was: from fla.ops.gla import chunk_gla

Tensors are [B,T,H,D], decays are natural logarithms and at most 0, states are float32 (float64 for float64), and
cu_seqlens [N+1] cuts a batch of 1 into documents, empty ones allowed. A function returns (o, final state), the latter
None unless output_final_state. scale is K**-0.5 by default unless a signature says otherwise. Everything is
differentiable, on any device, the fused_recurrent_ forms too; chunk_, fused_chunk_ and fused_recurrent_ name one
computation.

chunk_size, cu_seqlens_cpu, safe_gate, disable_recompute and checkpoint_level only tune FLA's kernels: they are checked
and change no result. What foci does not honour raises Unsupported with reasons; what does not fit raises ShapeError,
ValueError or TypeError. FLA's deprecated head_first and transpose_state_layout (now state_v_first) are unknown names.
"""

from __future__ import annotations

from foci.compat.fla.delta import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_gdn2,
    chunk_kda,
    fused_chunk_delta_rule,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
)
from foci.compat.fla.gsa import chunk_gsa, fused_recurrent_gsa
from foci.compat.fla.hgrn import chunk_hgrn, fused_recurrent_hgrn
from foci.compat.fla.linear import (
    chunk_gla,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_rwkv6,
    chunk_simple_gla,
    fused_chunk_gla,
    fused_chunk_linear_attn,
    fused_chunk_retention,
    fused_chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_rwkv6,
    fused_recurrent_simple_gla,
    parallel_retention,
    parallel_simple_gla,
)
from foci.compat.fla.products import (
    chunk_comba,
    chunk_dplr_delta_rule,
    chunk_gated_delta_product,
    chunk_iplr_delta_rule,
    chunk_rwkv7,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_comba,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_iplr_delta_rule,
    fused_recurrent_rwkv7,
)

__all__ = [
    "chunk_comba", "chunk_delta_rule", "chunk_dplr_delta_rule", "chunk_gated_delta_product", "chunk_gated_delta_rule",
    "chunk_gdn", "chunk_gdn2", "chunk_gla", "chunk_gsa", "chunk_hgrn", "chunk_iplr_delta_rule", "chunk_kda",
    "chunk_lightning_attn", "chunk_linear_attn", "chunk_retention", "chunk_rwkv6", "chunk_rwkv7", "chunk_simple_gla",
    "fused_chunk_delta_rule", "fused_chunk_gla", "fused_chunk_linear_attn", "fused_chunk_retention",
    "fused_chunk_simple_gla", "fused_mul_recurrent_rwkv7", "fused_recurrent_comba", "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn",
    "fused_recurrent_gdn2", "fused_recurrent_gla", "fused_recurrent_gsa", "fused_recurrent_hgrn",
    "fused_recurrent_iplr_delta_rule", "fused_recurrent_kda", "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn", "fused_recurrent_retention", "fused_recurrent_rwkv6", "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla", "parallel_retention", "parallel_simple_gla",
]  # fmt: skip
