"""What this machine can do at most, measured here and now: a product of matrices, and a copy."""

from __future__ import annotations

from typing import NamedTuple

import torch

from foci.bench.measure import Way, clock_on, interleave


class Ceilings(NamedTuple):
    """Floating point operations and bytes a second; bytes are those read and those written."""

    flops: float
    bytes: float

    def floor(self, flops: float, moved: float) -> float:
        """The least seconds that so much work takes here."""
        return max(flops / self.flops, moved / self.bytes)


def ceilings(dtype: torch.dtype, device: torch.device, *, rounds: int = 7) -> Ceilings:
    """The rate of the best of a few large products of this dtype, and of copying more than any cache holds."""
    size, count = (8192, 1 << 29) if device.type == "cuda" else (1536, 1 << 26)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(count, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    product = torch.empty_like(a)
    ways = {
        "product": Way(lambda: torch.mm(a, b, out=product)),
        "copy": Way(lambda: target.copy_(source)),
    }
    taken = interleave(ways, rounds=rounds, clock=clock_on(device))
    return Ceilings(2 * size**3 / min(taken["product"].seconds), 2 * count / min(taken["copy"].seconds))
