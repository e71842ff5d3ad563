"""Memory is counted as it is held: at its peak, and without what was there before."""

from __future__ import annotations

import torch

from foci.bench.memory import peak_memory


def test_peak_is_what_is_held_at_once() -> None:
    there = torch.zeros(1000, 1000)

    def run() -> torch.Tensor:
        x = there.view(1000, 1000)
        for _ in range(5):
            x = x + 1
        return x

    assert peak_memory(run, torch.device("cpu")) == 8_000_000
