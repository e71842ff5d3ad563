"""What `foci.accelerate` gains on a GPU: two layers of transformers models, random weights, in widths of real ones.

    python benchmarks/accelerate_gpu.py [MODEL...] [--tokens 4096] [--dtype bfloat16] [--stages [--keep-bfloat16]]

Each is proved first, as ever; then the original and foci take turns. The original is what transformers runs by itself:
eager attention with a softcap or sinks, torch's fused kernels else, and its own torch code for recurrences where
flash-linear-attention and mamba_ssm are not installed.

--stages: forward, forward and backward, and one token of 8 rows behind 128, in place of the proof. Medians in ms as
called, in brackets what the GPU took for the kernels of one call; how far the logits of either are from those of the
model in float32, relative RMS. --keep-bfloat16: recurrences are trained in it (install's argument of that name), of the
models that have one.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from arguments import above_0
from layers import apart
from torch import Tensor

import foci
from foci.bench.measure import Way, clock_on, interleave
from foci.cli_tune import DTYPES
from foci.integrations.transformers import install

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
    "kimi-linear": (
        "KimiLinear",
        {
            "num_attention_heads": 32, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 512,
            "layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0,
        },
    ),
    "mamba2": ("Mamba2", {"num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 1}),
    "mamba": ("Mamba", {"state_size": 16}),
}  # fmt: skip
RECURRENT = ("qwen3-next", "kimi-linear", "mamba2", "mamba")  # the only ones with a choice of --keep-bfloat16


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


def forward(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def train(model: Any, ids: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, use_cache=False).logits.float().square().mean().backward()


def token(model: Any, ids: Tensor, cache: dict[str, Any]) -> None:
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **cache)


def prompt(model: Any, ids: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
    return {name: out[name] for name in ("past_key_values", "cache_params") if out.get(name) is not None}


def alone(run: Callable[[], object]) -> float:
    """Seconds of all kernels of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(float(event.self_device_time_total) for event in seen.key_averages()) / 1e6


def stages(name: str, tokens: int, dtype: torch.dtype, keep_bfloat16: bool) -> None:
    """`forward`, `train` and `token`, of the original and of foci in turns."""
    models = {"original": model_of(name, dtype)}
    models["foci"], wide = copy.deepcopy(models["original"]), copy.deepcopy(models["original"]).float()
    install(models["foci"], keep_bfloat16=keep_bfloat16)
    install(wide)
    ids, rows = (torch.randint(0, WIDTHS["vocab_size"], shape, device="cuda") for shape in ((1, tokens), (8, 128)))
    truth = forward(wide, ids[:, :1024])
    off = ", ".join(f"{who} {apart(forward(model, ids[:, :1024]), truth):.1e}" for who, model in models.items())
    print(f"{name:<11} off by {off}", flush=True)
    del wide, truth
    runs: dict[str, Callable[[Any], Callable[[], object]]] = {
        "forward": lambda model: partial(forward, model, ids),
        "training": lambda model: partial(train, model, ids),
        "one token": lambda model: partial(token, model, rows[:, :1], prompt(model, rows)),
    }
    for stage, make in runs.items():
        ways = {who: Way(make(model)) for who, model in models.items()}
        for way in ways.values():
            for _ in range(3):
                way.run()
        taken = interleave(ways, rounds=7, clock=clock_on(ids.device))
        texts = (f"{who} {1e3 * taken[who].median:.2f} ({1e3 * alone(ways[who].run):.2f})" for who in ways)
        print(f"{name:<11} {stage:<9} {', '.join(texts)} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--tokens", type=above_0, default=4096)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--stages", action="store_true", help="forward, training, one token, in place of the proof")
    parser.add_argument("--keep-bfloat16", action="store_true", help="in training too; with --stages")
    chosen = parser.parse_args()
    if chosen.keep_bfloat16 and not chosen.stages:
        parser.error("--keep-bfloat16 goes with --stages")
    known = RECURRENT if chosen.keep_bfloat16 else tuple(MODELS)
    if unknown := set(chosen.models) - set(known):
        parser.error(f"MODEL is {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    if not torch.cuda.is_available():
        sys.exit("accelerate_gpu.py: torch finds no GPU here")
    for name in chosen.models or known:
        given = (name, chosen.tokens, DTYPES[chosen.dtype])
        if chosen.stages:
            stages(*given, chosen.keep_bfloat16)
        else:
            accelerate(*given)


if __name__ == "__main__":
    main()
