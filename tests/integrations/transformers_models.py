"""Tiny transformers models with random weights: the ground the integration tests stand on."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": None,
}
_SIZES = _TEXT | {"num_key_value_heads": 2, "head_dim": 8}
_SLIDING = _SIZES | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_YARN = {"original_max_position_embeddings": 64, "rope_type": "yarn", "factor": 1.0, "rope_theta": 10000.0}
_CHUNKED = {"attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"]}

DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=5),
    "gemma2": lambda: transformers.Gemma2Config(**_SLIDING, attn_logit_softcapping=2.0, query_pre_attn_scalar=3),
    "gpt_oss": lambda: transformers.GptOssConfig(**_SLIDING, **_EXPERTS, rope_parameters=_YARN),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES),
    # By default its window is 0, no layer's, and it makes a mask of that.
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "llama4": lambda: transformers.Llama4TextConfig(**_SIZES, **_EXPERTS, **_CHUNKED, intermediate_size_mlp=48),
}
_IMAGE = {**{k: v for k, v in _TEXT.items() if not k.endswith("id")}, "image_size": 32, "patch_size": 8}
_COMPRESSED = {"layer_types": ["sliding_attention", "heavily_compressed_attention"], "sliding_window": 5} | {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}
}

# Models that compute with the mask they are given: they add a bias to it, read it, or lengthen it.
COMPUTING = {
    "doge": lambda: transformers.DogeForCausalLM(transformers.DogeConfig(**_SIZES, keep_window_size=8)),
    "deepseek_v4": lambda: transformers.DeepseekV4ForCausalLM(
        transformers.DeepseekV4Config(
            **{**_SIZES, "num_key_value_heads": 1}, **_COMPRESSED, n_routed_experts=2, num_experts_per_tok=1,
            moe_intermediate_size=16, q_lora_rank=8, o_groups=2, o_lora_rank=8,
        )
    ),
    "beit": lambda: transformers.BeitModel(transformers.BeitConfig(**_IMAGE, use_relative_position_bias=True)),
    "beit_shared": lambda: transformers.BeitModel(
        transformers.BeitConfig(**_IMAGE, use_shared_relative_position_bias=True)
    ),
}  # fmt: skip


def computing(name: str) -> nn.Module:
    model = COMPUTING[name]()
    model.set_attn_implementation("eager")
    return drawn(model)


def mllama(implementation: str) -> nn.Module:
    """A text model whose second layer looks at images; its gates are open, so that what it sees is seen."""
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig

    config = MllamaTextConfig(**_SIZES, cross_attention_layers=[1])
    config._attn_implementation = implementation
    model = drawn(transformers.MllamaForCausalLM(config))
    for name, parameter in model.named_parameters():
        if name.endswith("gate"):
            parameter.data.fill_(1.0)
    return model


def decoder(name: str, implementation: str = "eager") -> nn.Module:
    config = DECODERS[name]()
    config._attn_implementation = implementation
    return drawn(transformers.AutoModelForCausalLM.from_config(config))


def bert(**changes: object) -> nn.Module:
    config = transformers.BertConfig(**_TEXT, **changes)
    config._attn_implementation = "eager"
    return drawn(transformers.AutoModel.from_config(config))


def drawn(model: nn.Module) -> nn.Module:
    """Large random weights: with transformers' own, softmax is so flat that no attention fault is seen."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 or "sinks" in name:
            with torch.no_grad():
                parameter.normal_(std=1.0 if "sinks" in name else 0.3, generator=generator)
    return model.eval()


def tokens(rows: int = 3, length: int = 12) -> Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(2))


def padding(side: str) -> Tensor | None:
    """[3, 12]: nothing, 3 and 8 padded tokens on one side."""
    if side == "none":
        return None
    real = torch.ones(3, 12, dtype=torch.long)
    real[1, 9:], real[2, 4:] = 0, 0
    return real if side == "right" else real.flip(1)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()
