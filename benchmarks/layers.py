"""foci.nn's layers in training on one GPU: their parts by kernels, by torch's operations, compiled. Run it by hand.

    python benchmarks/layers.py [LAYER...] [--batch 4] [--tokens 2048] [--width 2048] [--documents N] [--compiled]
        [--profile]
    python benchmarks/layers.py --steps [LAYER...] [--batch 64]

Parts are what lies round a layer's operator: short convolutions, norms and gates, rotary positions. By torch's
operations they run where kernels do not (ops/layer_parts.py), as here when that is asked for. How far outputs and all
gradients of both are apart comes first, relative RMS, the largest; then all take turns, forward and backward to the
input and all parameters, bfloat16: by the GPU's events as called, the same with the GPU asleep until all is launched
(its own time), and the host's until the call returns. Medians in ms; MiB that a call holds at most.

--steps: one token of each row behind eight in a cache, in inference mode, as called and by the GPU, in microseconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
from arguments import above_0
from torch import Tensor

from foci import nn
from foci.bench.measure import Way, clock_on, host_seconds, interleave
from foci.bench.memory import peak_memory
from foci.ops import layer_parts

HEAD = 128
ASLEEP = 40_000_000  # cycles: 20 ms, longer than a slow host needs to launch a layer's forward and backward
LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "GatedDeltaNet": lambda width: nn.GatedDeltaNet(width, width // HEAD),
    "KimiDeltaAttention": lambda width: nn.KimiDeltaAttention(width, width // HEAD),
    "GatedLinearAttention": lambda width: nn.GatedLinearAttention(width, width // HEAD),
    "Mamba2": lambda width: nn.Mamba2(width, width // 32),
    "Attention": lambda width: nn.Attention(width, width // HEAD, num_kv_heads=width // HEAD // 4 or 1, qk_norm=True),
}


def by_torch() -> AbstractContextManager[object]:
    return patch.object(layer_parts._Part, "__call__", lambda part, *given: part.by_torch(*given))


def apart(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def profile(name: str, run: Callable[[], object]) -> None:
    with torch.profiler.profile() as seen:
        run()
        torch.cuda.synchronize()
    print(name, seen.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90))


def measure(name: str, chosen: argparse.Namespace) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name](chosen.width).cuda().bfloat16()
    x = torch.randn(chosen.batch, chosen.tokens, chosen.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout, leaves = torch.randn_like(x), [x, *layer.parameters()]
    offsets = None if chosen.documents is None else torch.linspace(0, chosen.tokens, chosen.documents + 1).long().cuda()

    def train(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = run(x, offsets=offsets)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    ways = {"kernels": Way(partial(train, layer)), "torch": Way(partial(train, layer), by_torch)}
    with by_torch():
        truth = train(layer)
    print(f"{name}: {max(map(apart, train(layer), truth)):.1e} apart", flush=True)
    if chosen.compiled:
        ways["compiled"] = Way(partial(train, torch.compile(layer, fullgraph=True)), nullcontext)
    held, host = {}, {}
    for who, way in ways.items():
        with way.within():
            way.run()
            held[who], host[who] = peak_memory(way.run, x.device) >> 20, host_seconds(way.run)
            if chosen.profile:
                profile(f"{name}, {who}", way.run)
    called = interleave(ways, rounds=chosen.rounds, clock=clock_on(x.device))
    alone = interleave(ways, rounds=chosen.rounds, clock=clock_on(x.device, asleep=ASLEEP))
    for who in ways:
        times = (
            f"{1e3 * called[who].median:.2f}, by the GPU {1e3 * alone[who].median:.2f}, the host {1e3 * host[who]:.2f}"
        )
        print(f"{name}, {who}: {times} ms; {held[who]} MiB", flush=True)


def step(name: str, chosen: argparse.Namespace) -> None:
    layer, cache = LAYERS[name](chosen.width).cuda().bfloat16().eval(), nn.Cache()
    device = torch.device("cuda")
    with torch.inference_mode():
        prompt, token = (
            torch.randn(chosen.batch, tokens, chosen.width, device=device, dtype=torch.bfloat16) for tokens in (8, 1)
        )
        layer(prompt, cache=cache)
        run = partial(layer, token, cache=cache)
        ways = {"kernels": Way(run), "torch": Way(run, by_torch)}
        for way in ways.values():
            with way.within():
                for _ in range(3):
                    way.run()
        called = interleave(ways, rounds=chosen.rounds, clock=clock_on(device))
        alone = interleave(ways, rounds=chosen.rounds, clock=clock_on(device, asleep=ASLEEP))
    for who in ways:
        print(f"{name}, {who}: {1e6 * called[who].median:.0f}, by the GPU {1e6 * alone[who].median:.0f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", metavar="LAYER", help=f"of {', '.join(LAYERS)}; default: all")
    parser.add_argument("--batch", type=above_0, default=4)
    parser.add_argument("--tokens", type=above_0, default=2048)
    parser.add_argument("--width", type=above_0, default=2048, help=f"a multiple of {HEAD}")
    parser.add_argument("--rounds", type=above_0, default=15)
    parser.add_argument("--documents", type=above_0, help="packed end to end, as long as each other; batch 1")
    parser.add_argument("--compiled", action="store_true", help="also by torch.compile")
    parser.add_argument("--steps", action="store_true", help="of one token behind a cache, in place of training")
    parser.add_argument("--profile", action="store_true", help="the kernels of forward and backward")
    chosen = parser.parse_args()
    if unknown := set(chosen.layers) - set(LAYERS):
        parser.error(f"LAYER is {', '.join(sorted(unknown))}; expected some of {', '.join(LAYERS)}")
    if chosen.width % HEAD:
        parser.error(f"--width is {chosen.width}; expected a multiple of {HEAD}")
    if chosen.documents is not None and chosen.batch != 1:
        parser.error(f"--batch is {chosen.batch} with --documents; expected 1")
    if chosen.steps and (chosen.documents or chosen.compiled or chosen.profile):
        parser.error("--steps goes with --batch, --width and --rounds alone")
    if not torch.cuda.is_available():
        sys.exit("layers.py: torch finds no GPU here")
    for name in chosen.layers or LAYERS:
        (step if chosen.steps else measure)(name, chosen)


if __name__ == "__main__":
    main()
