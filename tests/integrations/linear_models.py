"""Tiny random models of every family whose linear layers transformers runs as torch code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": None,
}
_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 8,
}
_EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_LATENT = {
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}
_KDA = {"linear_head_dim": 8, "linear_num_heads": 2}
_BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 8}
_MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 6, "eos_token_id": None}


def _of(config: str, model: str = "", **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = getattr(transformers, config)(**changes)
        made._attn_implementation = "eager"
        cls = getattr(transformers, model or config.replace("Config", "ForCausalLM").replace("Text", ""))
        return filled(cls(made))

    return make


MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen3_next": _of("Qwen3NextConfig", **_TEXT, **_DELTA, **_EXPERTS, **_KINDS),
    "qwen3_5": _of("Qwen3_5TextConfig", **_TEXT, **_DELTA, **_KINDS),
    "qwen3_5_moe": _of("Qwen3_5MoeTextConfig", **_TEXT, **_DELTA, **_EXPERTS, **_KINDS),
    "qwen4_exp": _of(
        "Qwen4ExpTextConfig",
        **_TEXT, **_DELTA, **_EXPERTS, **_KINDS, hc_count=2, hc_lowrank=8, ngram_vocab_size_base=50, heads_per_ngram=2,
        make_ngram_vocab_size_divisible_by=2, split_ngram_parts=2, indexer_n_heads=4, indexer_kv_heads=1,
        indexer_head_dim=8, indexer_budget=64, indexer_compress_ratio=4,
    ),
    "olmo_hybrid": _of("OlmoHybridConfig", **{**_TEXT, **_DELTA, "linear_num_value_heads": 2}, **_KINDS),
    "kimi_linear": _of("KimiLinearConfig", **{**_TEXT, **_LATENT}, **_KDA, **_KINDS),
    "bailing_hybrid": _of(
        "BailingHybridConfig", **{**_TEXT, **_LATENT}, **_KINDS, head_dim=8, n_group=1, topk_group=1, num_mtp_layers=0
    ),
    "glm5_next": _of(
        "Glm5NextTextConfig", "Glm5NextTextModel",
        **{**_TEXT, **_LATENT, "qk_rope_head_dim": 0}, **_KDA, q_lora_rank=12, n_routed_experts=2, index_topk=64,
        index_head_dim=8, index_n_heads=2, hc_mult=2, layer_types=["linear_attention", "deepseek_sparse_attention"],
    ),
    "mamba2": _of("Mamba2Config", **_MAMBA, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "bamba": _of("BambaConfig", **_TEXT, **_BAMBA, attn_layer_indices=[1]),
    "falcon_h1": _of("FalconH1Config", **_TEXT, **_BAMBA, mamba_d_ssm=64),
    "falcon_h1_norm": _of("FalconH1Config", **_TEXT, **_BAMBA, mamba_d_ssm=64, mamba_rms_norm=True),
    "granitemoehybrid": _of(
        "GraniteMoeHybridConfig", **_TEXT, **_BAMBA, num_local_experts=2, num_experts_per_tok=1,
        shared_intermediate_size=32, layer_types=["mamba", "attention"],
    ),
    "nemotron_h": _of(
        "NemotronHConfig",
        **{k: v for k, v in _TEXT.items() if k != "num_hidden_layers"}, layers_block_type=["mamba", "attention"],
        head_dim=8, ssm_state_size=6, mamba_num_heads=8, mamba_head_dim=8, n_groups=2, chunk_size=8,
    ),
    "zamba2": _of(
        "Zamba2Config", **_TEXT, layers_block_type=["mamba", "hybrid"], mamba_d_state=6, mamba_ngroups=2,
        n_mamba_heads=8, chunk_size=8, adapter_rank=4,
    ),
    "mamba": _of("MambaConfig", **_MAMBA),
    "falcon_mamba": _of("FalconMambaConfig", **_MAMBA),
    "jamba": _of(
        "JambaConfig", **_TEXT, num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
        mamba_d_state=6,
    ),
    "zamba": _of(
        "ZambaConfig", **{**_TEXT, "num_key_value_heads": 4, "num_hidden_layers": 3},
        layers_block_type=["hybrid", "mamba", "hybrid"], n_mamba_heads=2, mamba_d_state=6,
    ),
    "rwkv": _of("RwkvConfig", vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=64, eos_token_id=None),
    "minimax": _of(
        "MiniMaxConfig", **_TEXT, layer_types=["full_attention", "linear_attention"], head_dim=8, block_size=8,
        num_local_experts=2, num_experts_per_tok=1,
    ),
    "recurrent_gemma": _of(
        "RecurrentGemmaConfig", **_TEXT, block_types=["recurrent", "attention"], attention_window_size=8
    ),
    "xlstm": _of(
        "xLSTMConfig", vocab_size=64, hidden_size=128, num_hidden_layers=2, num_heads=2, chunk_size=8, eos_token_id=None
    ),
}  # fmt: skip


def filled(model: nn.Module) -> nn.Module:
    """Weights that make every gate matter; what a model needs in a range of its own (A, dt, decays) stays near it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and parameter.shape[-1] > 1 and parameter[0].numel() > 1:
                parameter.normal_(std=0.2, generator=generator)
            else:
                parameter.nan_to_num_().clamp_(-2, 2)
                parameter.add_(torch.empty_like(parameter).normal_(std=0.1, generator=generator))
    return model.eval()
