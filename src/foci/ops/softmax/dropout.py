"""Which probabilities dropout keeps: a hash of seed and position, the same in every backend and process."""

from __future__ import annotations

import torch
from torch import Tensor

# The constants of splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit integers; products wrap.
_GOLDEN = -7046029254386353131
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685


def keep(seed: Tensor, p: float, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """True with probability 1 - p for each (b, h, t, s); int64 index tensors that broadcast against each other.

    A seed that was `placed` maps indices to positions in a larger problem, and gives that problem's mask.
    """
    if seed.dim():
        b, h, t, s = (seed[1 + 2 * n] + seed[2 + 2 * n] * index for n, index in enumerate((b, h, t, s)))
        seed = seed[0]
    row = _mix(_mix(_mix(seed + b * _GOLDEN) + h * _GOLDEN) + t * _GOLDEN)
    return (_mix(row + s * _GOLDEN) >> 11) & (2**53 - 1) >= int(p * 2**53)


def placed(
    seed: Tensor,
    *,
    b: tuple[int, int] | None = None,
    h: tuple[int, int] | None = None,
    t: tuple[int, int] | None = None,
    s: tuple[int, int] | None = None,
) -> Tensor:
    """The seed [9] for a part of a problem: index i of it is start + i * step in the whole, for each (start, step)
    given.

    Dimensions that are not given keep the seed's mapping: (0, 1), if it was never placed.
    """
    if not seed.dim():
        seed = torch.cat([seed[None], seed.new_tensor([0, 1] * 4)])
    seed = seed.clone()
    for place, part in enumerate((b, h, t, s)):
        if part is not None:
            seed[1 + 2 * place], seed[2 + 2 * place] = part
    return seed


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right, which torch does not have for signed integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def positions(B: int, H: int, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The index tensors of a whole [B, H, T, S] problem."""
    sizes = (B, H, T, S)
    return tuple(
        torch.arange(n, device=device).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(sizes)
    )  # type: ignore[return-value]
