"""The small problems on which softmax attention is proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Case
from foci.ops.masks import Causal, Dense, Lengths, Mask, Packed, Window

Maker = Callable[["Draw"], dict[str, Any]]


class Draw:
    """Random arguments of one dtype on one device, the same for the same seed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype).to(self.device)

    def boolean(self, *shape: int, share: float = 0.7) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < share).to(self.device)

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def qkv(
        self,
        B: int = 2,
        T: int = 19,
        S: int | None = None,
        H: int = 4,
        G: int | None = None,
        K: int = 16,
        V: int | None = None,
    ) -> dict[str, Any]:
        S, G, V = S or T, G or H, V or K
        return {"q": self.normal(B, T, H, K), "k": self.normal(B, S, G, K), "v": self.normal(B, S, G, V)}


def _case(name: str, *features: str) -> Callable[[Maker], Case]:
    def wrap(maker: Maker) -> Case:
        return Case(name, frozenset(features), lambda dtype, device, seed: maker(Draw(dtype, device, seed)))

    return wrap


def _masked(name: str, mask: Callable[[Draw], Mask], *features: str, **sizes: int) -> Case:
    return Case(
        name,
        frozenset(features),
        lambda dtype, device, seed: (lambda d: {**d.qkv(**sizes), "mask": mask(d)})(Draw(dtype, device, seed)),
    )


def _plain(name: str, *features: str, extra: Callable[[Draw], dict[str, Any]] = lambda d: {}, **sizes: int) -> Case:
    return Case(
        name,
        frozenset(features),
        lambda dtype, device, seed: (lambda d: {**d.qkv(**sizes), **extra(d)})(Draw(dtype, device, seed)),
    )


CASES = ()
