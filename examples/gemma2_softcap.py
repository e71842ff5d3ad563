"""Where routing pays on a CPU: two Gemma 2 layers (softcap, sliding window, random weights) on 2048 tokens.

python examples/gemma2_softcap.py
"""

from __future__ import annotations

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import foci


def main() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        sliding_window=256,
    )
    model = Gemma2ForCausalLM(config).eval()
    inputs = {"input_ids": torch.randint(0, 512, (1, 2048)), "use_cache": False}

    def tell(phase: str, text: str, finished: bool) -> None:
        if finished:
            print(f"{phase:<9}{text}")

    foci.accelerate(model, inputs, compile="off", progress=tell)


if __name__ == "__main__":
    main()
