"""What `foci.accelerate` gains on a GPU: two layers of transformers models, random weights, in widths of real ones.

    python benchmarks/accelerate_gpu.py [MODEL...] [--tokens 4096] [--dtype bfloat16]

Each is proved first, as ever; then the original and foci take turns. The original is what transformers runs by itself:
eager attention with a softcap or sinks, torch's fused kernels else, and its own torch code for recurrences where
flash-linear-attention and mamba_ssm are not installed.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import transformers
from arguments import above_0

import foci
from foci.cli_tune import DTYPES

WIDTHS = {"vocab_size": 512, "hidden_size": 2048, "num_hidden_layers": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024}),
    "gpt-oss": (
        "GptOss", EXPERTS | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
    ),
    "llama": ("Llama", {"num_attention_heads": 16, "num_key_value_heads": 4}),
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "mamba2": ("Mamba2", {"num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 1}),
    "mamba": ("Mamba", {"state_size": 16}),
}  # fmt: skip


def model_of(name: str, dtype: torch.dtype) -> torch.nn.Module:
    kind, widths = MODELS[name]
    torch.manual_seed(0)
    if "num_attention_heads" in widths:
        widths = widths | {"intermediate_size": 4096}
    config = getattr(transformers, f"{kind}Config")(**WIDTHS, **widths)
    made: torch.nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made.eval().to("cuda", dtype)


def accelerate(name: str, tokens: int, dtype: torch.dtype) -> None:
    ids = torch.randint(0, WIDTHS["vocab_size"], (1, tokens), device="cuda")

    def tell(phase: str, text: str, finished: bool) -> None:
        if finished:
            print(f"{name:<11} {phase:<8} {text}", flush=True)

    foci.accelerate(model_of(name, dtype), {"input_ids": ids, "use_cache": False}, compile="off", progress=tell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--tokens", type=above_0, default=4096)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    chosen = parser.parse_args()
    if unknown := set(chosen.models) - set(MODELS):
        parser.error(f"MODEL is {', '.join(sorted(unknown))}; expected some of {', '.join(MODELS)}")
    if not torch.cuda.is_available():
        sys.exit("accelerate_gpu.py: torch finds no GPU here")
    for name in chosen.models or MODELS:
        accelerate(name, chosen.tokens, DTYPES[chosen.dtype])


if __name__ == "__main__":
    main()
