"""Draw: the random arguments that cases are made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foci.core.spec import accumulator

EXTREMES = (0.0, -1e-6, -20.0, -1e4, -torch.inf)  # every gate that law 11 mixes


class Draw:
    """Random arguments of one dtype on one device, the same for the same seed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype, self.device = dtype, device
        self.generator: torch.Generator | None = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return self._exact(*shape).to(self.device, self.dtype)

    def unit(self, *shape: int) -> Tensor:
        """Vectors of length 1 along the last dimension."""
        return torch.nn.functional.normalize(self._exact(*shape), dim=-1).to(self.device, self.dtype)

    def uniform(self, *shape: int, most: float = 1.0) -> Tensor:
        """Between 0 and `most`."""
        return (most * self._between(*shape)).to(self.device, self.dtype)

    def boolean(self, *shape: int) -> Tensor:
        """About two thirds True."""
        return (torch.rand(shape, generator=self.generator, device="cpu") < 0.67).to(self.device)

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def state(self, *shape: int) -> Tensor:
        """As wide as a state is kept."""
        return self._exact(*shape).to(self.device, accumulator(self.dtype))

    def gates(self, *shape: int) -> Tensor:
        """Decays as trained models have them (half -0.03 and less, some -1), natural log, as wide as a state."""
        return (-0.03 * (1.5 * self._exact(*shape)).exp()).to(self.device, accumulator(self.dtype))

    def extremes(self, *shape: int) -> Tensor:
        """Each of EXTREMES equally often, in any order."""
        place = self._between(math.prod(shape)).argsort().view(shape) % len(EXTREMES)
        return torch.tensor(EXTREMES, dtype=torch.float64, device="cpu")[place].to(self.device, accumulator(self.dtype))

    def _exact(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")

    def _between(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64, device="cpu")


class OnDevice(Draw):
    """Drawn where they will be used, at that device's speed; other devices draw other numbers, meta shapes alone."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        super().__init__(dtype, device, seed)
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def _exact(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def _between(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)
