"""What this machine can do at most, measured here and now: a product of matrices, and a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from foci.bench.measure import Way, clock, clock_on, interleave

_LARGE, _LONG = 1536, 0.1  # of a product on a CPU: its side, and its seconds at most


class Ceilings(NamedTuple):
    """Floating point operations and bytes a second; bytes are those read and those written."""

    flops: float
    bytes: float

    def floor(self, flops: float, moved: float) -> float:
        """The least seconds that so much work takes here."""
        return max(flops / self.flops, moved / self.bytes)


def ceilings(dtype: torch.dtype, device: torch.device, *, rounds: int = 7) -> Ceilings:
    """The rate of the best of a few large products of this dtype, and of copying more than any cache holds."""
    size, count = (8192, 1 << 29) if device.type == "cuda" else (_side(dtype), 1 << 26)
    source = torch.zeros(count, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    ways = {"product": Way(_product(size, dtype, device)), "copy": Way(lambda: target.copy_(source))}
    taken = interleave(ways, rounds=rounds, clock=clock_on(device))
    return Ceilings(2 * size**3 / min(taken["product"].seconds), 2 * count / min(taken["copy"].seconds))


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=product)


def _side(dtype: torch.dtype) -> int:
    """How large a product is soon done on this CPU: without instructions for a dtype it is hundreds of times slower."""
    size = _LARGE // 8
    while size < _LARGE:
        run = _product(size, dtype, torch.device("cpu"))
        if 8 * min(clock(run) for _ in range(2)) > _LONG:  # the first also starts threads
            break
        size *= 2
    return size
