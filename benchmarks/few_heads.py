"""How few heads of Gated DeltaNet are best walked: by maps alone, or by what gates forget, with maps or without.

    python benchmarks/few_heads.py [--gates 1 0.01]

In turn, on a GPU, bfloat16, in microseconds behind a read that leaves nothing in a cache: forward, forward of a
training step, backward. Kernels only: the GPU sleeps until all of them wait in its queue. The results of each way are
compared with the first one's. `--gates`: times those that models have.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from errors import worst

from foci.bench.measure import ASLEEP, Way, clock_on, interleave
from foci.ops.delta import gpu
from foci.ops.delta.call import Call, bind
from foci.ops.delta.cases import Delta

SHAPES = (  # tokens, heads of keys and of values
    (32768, 2, 8), (32768, 1, 4), (32768, 1, 2), (32768, 8, 16), (16384, 12, 12), (8192, 8, 16), (8192, 2, 8),
    (6144, 4, 12),
)  # fmt: skip
WAYS = {
    "maps alone": {"token_walks.shares": lambda *_: 1, "token_walks.wide": lambda *_: 0},
    "gates or maps": {},
    "gates alone": {"token_joins.by_maps": lambda *_: False},
}
WHERE = "foci.ops.delta.kernels_triton_"


@contextmanager
def by(way: str) -> Iterator[None]:
    """Within it the delta rule walks so."""
    patches = [mock.patch(WHERE + name, rule) for name, rule in WAYS[way].items()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def call_of(T: int, G: int, H: int, gates: float, device: torch.device) -> Call:
    problem = Delta("", B=1, T=T, G=G, H=H, K=128, decay="token", gates=lambda draw, *shape: draw.gates(*shape) * gates)
    return bind(**problem.case.make(torch.bfloat16, device, 0))


def stages(call: Call) -> dict[str, Callable[[], Any]]:
    out, final, kept = gpu.forward(call, True)
    into = torch.randn_like(out), torch.randn_like(final)
    return {
        "forward": lambda: gpu.forward(call),
        "training": lambda: gpu.forward(call, True)[:2],
        "backward": lambda: gpu.backward(call, (out, final, kept), into, [True] * 5 + [False] * 2),
    }


def off(found: Any, right: Any) -> float:
    """The largest relative RMS error of tensors of which some are None, the same of both."""
    pairs = [(x, y) for x, y in zip(found, right, strict=True) if x is not None or y is not None]
    if any(x is None or y is None for x, y in pairs):
        return math.inf
    return worst(*(float((x.double() - y.double()).norm() / y.double().norm()) for x, y in pairs))


def measure(call: Call, device: torch.device) -> str:
    """One row: each way's three times, and how far it is from the first way."""
    runs = {}
    for way in WAYS:
        torch.manual_seed(0)  # the same incoming gradients
        with by(way):
            runs[way] = stages(call)
    clock = clock_on(device, clean=True, asleep=ASLEEP)
    found: dict[str, list[str]] = {way: [] for way in WAYS}
    errors = dict.fromkeys(WAYS, 0.0)
    for stage in ("forward", "training", "backward"):
        each = {way: Way(runs[way][stage], lambda way=way: by(way)) for way in WAYS}  # type: ignore[misc]
        results = {}
        for way in WAYS:
            with by(way):
                results[way] = runs[way][stage]()
            errors[way] = worst(errors[way], off(results[way], results["maps alone"]))
        for way, sample in interleave(each, rounds=12, clock=clock).items():
            found[way].append(f"{sample.median * 1e6:.0f}")
    return ", ".join(f"{way} {' '.join(found[way])} (off {errors[way]:.1e})" for way in WAYS)


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--gates", type=float, nargs="+", default=[1.0, 0.01])
    given = words.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("few_heads.py: it needs a GPU, and there is none here")
    device = torch.device("cuda")
    for T, G, H in SHAPES:
        for gates in given.gates:
            print(f"{T} {G}:{H}, gates x {gates:g}: {measure(call_of(T, G, H, gates, device), device)}", flush=True)


if __name__ == "__main__":
    main()
