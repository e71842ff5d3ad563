"""foci.nn's layers beside Flash Linear Attention's with the same weights, on one GPU. Run it by hand.

    python benchmarks/layers.py [LAYER...] [--batch 4] [--tokens 2048] [--width 2048] [--compiled] [--profile]

Each layer of FLA's is given to foci's by its state dict. Outputs and the gradient of the input are compared with those
of foci's layer in float32, relative RMS, before anything is timed; then both take turns, forward without gradients, and
forward and backward to the input and all parameters. Times are of the GPU's events, host included, medians in ms.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from arguments import above_0
from torch import Tensor

from foci import nn
from foci.bench.measure import Way, clock_on, interleave
from foci.bench.memory import peak_memory

HEAD = 128
RENAMED = {"g_norm_swish_gate": "o_norm", "g_norm": "o_norm"}  # FLA's names of what foci names alike in all layers
# foci's layer: the module and class of FLA's, and what both are given beyond widths and heads
PEERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "GatedDeltaNet": ("gated_deltanet", "GatedDeltaNet", {}, {"expand_v": 1, "head_dim": HEAD}),
    "KimiDeltaAttention": ("kda", "KimiDeltaAttention", {}, {"expand_v": 1, "head_dim": HEAD}),
    "DeltaNet": ("delta_net", "DeltaNet", {}, {}),
    "GatedLinearAttention": ("gla", "GatedLinearAttention", {}, {"expand_k": 1}),
    "SimpleGatedLinearAttention": ("simple_gla", "SimpleGatedLinearAttention", {}, {"use_short_conv": False}),
    "MultiScaleRetention": ("multiscale_retention", "MultiScaleRetention", {}, {"expand_v": 1}),
    "HGRN2": ("hgrn2", "HGRN2Attention", {}, {}),
}


def pair(name: str, width: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """foci's layer and FLA's, of the same weights, in float32."""
    module, kind, ours, theirs = PEERS[name]
    torch.manual_seed(0)
    heads = width // HEAD
    made = getattr(importlib.import_module(f"fla.layers.{module}"), kind)
    peer = made(hidden_size=width, num_heads=heads, layer_idx=0, **theirs).cuda()
    layer = getattr(nn, name)(width, heads, head_dim=HEAD, **ours).cuda()
    state = {}
    for key, value in peer.state_dict().items():
        head, _, rest = key.partition(".")
        state[".".join([RENAMED.get(head, head), rest] if rest else [head])] = value
    layer.load_state_dict(state)
    return layer, peer


def first(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


def forward(layer: Callable[[Tensor], Any], x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def both(layer: Callable[[Tensor], Any], leaves: list[Tensor], x: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    out = first(layer(x))
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def apart(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).square().mean().sqrt() / truth.double().square().mean().sqrt())


def profile(name: str, run: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=list(torch.profiler.ProfilerActivity)) as seen:
        run()
        torch.cuda.synchronize()
    print(name, seen.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90))


def compare(name: str, chosen: argparse.Namespace) -> None:
    wide, peer = pair(name, chosen.width)
    x = torch.randn(chosen.batch, chosen.tokens, chosen.width, device="cuda")
    x = x.bfloat16()
    dout = torch.randn_like(x)
    leaf = x.float().requires_grad_()
    truth = both(wide, [leaf], leaf, dout.float())
    layer = pair(name, chosen.width)[0].bfloat16()
    made: dict[str, Callable[[Tensor], Any]] = {"foci": layer, "FLA": peer.bfloat16()}
    leaves = {"foci": list(layer.parameters()), "FLA": list(peer.parameters())}
    if chosen.compiled:
        for who in tuple(made):
            made[f"{who} compiled"], leaves[f"{who} compiled"] = torch.compile(made[who]), leaves[who]
    ways: dict[str, Way] = {}
    x.requires_grad_()
    for who, run in made.items():
        found = both(run, [x], x, dout)
        errors = [apart(a, b) for a, b in zip(found, truth, strict=True)]
        trains = partial(both, run, [x, *leaves[who]], x, dout)
        trains()
        room = peak_memory(trains, x.device) >> 20
        print(f"{name} {who}: out {errors[0]:.1e}, dx {errors[1]:.1e}, {room} MiB to train", flush=True)
        ways |= {f"{who}, forward": Way(partial(forward, run, x)), f"{who}, both": Way(trains)}
    if chosen.profile:
        for who, way in ways.items():
            if "both" in who:
                profile(f"{name} {who}", way.run)
    if chosen.rounds:
        found_ = interleave(ways, rounds=chosen.rounds, clock=clock_on(x.device))
        for who, sample in found_.items():
            print(f"{name} {who}: {1e3 * sample.median:.2f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", metavar="LAYER", help=f"of {', '.join(PEERS)}; default: all")
    parser.add_argument("--batch", type=above_0, default=4)
    parser.add_argument("--tokens", type=above_0, default=2048)
    parser.add_argument("--width", type=above_0, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true", help="also by torch.compile")
    parser.add_argument("--profile", action="store_true", help="the kernels of forward and backward")
    chosen = parser.parse_args()
    if unknown := set(chosen.layers) - set(PEERS):
        parser.error(f"LAYER is {', '.join(sorted(unknown))}; expected some of {', '.join(PEERS)}")
    if not torch.cuda.is_available():
        sys.exit("layers.py: torch finds no GPU here")
    for name in chosen.layers or PEERS:
        compare(name, chosen)


if __name__ == "__main__":
    main()
