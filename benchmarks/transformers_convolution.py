"""transformers' short convolution on one GPU, as it is there and as foci.integrations puts another there. By hand.

    python benchmarks/transformers_convolution.py [--rounds 15]

Theirs is torch's conv1d and an activation, as transformers writes it into every model file; tokens lie as a projection
leaves them. bfloat16, four taps, forward alone and with the backward to tokens and weights: medians in microseconds as
called, and first the relative RMS between both, of the output and of both gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from arguments import above_0
from layers import apart
from torch import Tensor

from foci.bench.measure import Way, clock_on, interleave
from foci.integrations.transformers_parts import short_convolution
from foci.integrations.transformers_recurrences import How

SHAPES = ((2, 4096, 8192), (1, 8192, 2048), (1, 128, 8192))  # rows, tokens, channels


def theirs(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    padding, channels = weight.shape[-1] - 1, x.shape[1]
    y = F.conv1d(x.to(weight.dtype), weight.unsqueeze(1), bias, padding=padding, groups=channels)
    return F.silu(y[:, :, : x.shape[-1]]).to(x.dtype)


def measure(B: int, T: int, D: int, rounds: int) -> None:
    half = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, weight = half(B, T, D).transpose(1, 2).requires_grad_(), half(D, 4, requires_grad=True)
    dy = half(B, T, D).transpose(1, 2)

    def forward(run: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return run(x, weight, activation="silu")

    def both(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(x, weight, activation="silu"), (x, weight), dy)

    runs = {"foci": short_convolution(How(), theirs), "theirs": theirs}
    found, truth = ((forward(run), *both(run)) for run in runs.values())
    print(f"[{B}, {T}, {D}]: {', '.join(f'{apart(a, b):.1e}' for a, b in zip(found, truth, strict=True))} apart")
    for name, what in (("forward", forward), ("both", both)):
        ways = {who: Way(partial(what, run)) for who, run in runs.items()}
        taken = interleave(ways, rounds=rounds, clock=clock_on(x.device))
        print(name, ", ".join(f"{who} {1e6 * taken[who].median:.0f} us" for who in ways), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=above_0, default=15)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        sys.exit("transformers_convolution.py: torch finds no GPU here")
    for shape in SHAPES:
        measure(*shape, rounds)


if __name__ == "__main__":
    main()
