"""What the recurrent operators' checks have in common: a problem of so many tokens, and how laws take it apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Case
from foci.ops.draw import Draw

Gates = Callable[..., Tensor]


def closed(draw: Draw, *shape: int) -> Tensor:
    """Every gate at -20: over a chunk their sum is far below what exp can hold, in either direction."""
    return 0 * draw.gates(*shape) - 20


@dataclass(frozen=True)
class Problem:
    """The sizes of a case, and which optional arguments it has; an operator adds its own in `more`.

    G and V follow H and K. decay: "", "head" [H], "token" [B,T,H] or "channel" [B,T,H,K], drawn by `gates`; `narrow`:
    in the dtype of q. `offsets` pack documents into one row. `fused`: q, k and v are views of one projection.
    """

    name: str
    B: int = 2
    T: int = 19
    H: int = 4
    G: int = 0
    K: int = 16
    V: int = 0
    decay: str = ""
    gates: Gates = Draw.gates
    narrow: bool = False
    state: bool = False
    offsets: tuple[int, ...] = ()
    scale: float | None = None
    fused: bool = False

    @property
    def case(self) -> Case:
        return Case(
            self.name, frozenset(self.features()), lambda dtype, device, seed: self.make(Draw(dtype, device, seed))
        )

    def features(self) -> set[str]:
        said = {
            f"decay per {self.decay}": self.decay,
            "extreme": self.gates is not Draw.gates,
            "gqa": self.heads != self.H,
            "value width": self.width != self.K,
            "state": self.state,
            "packed": self.offsets,
            "scale": self.scale is not None,
            "strided": self.fused,
        }
        return {feature for feature, present in said.items() if present}

    @property
    def heads(self) -> int:
        """Of queries and keys."""
        return self.G or self.H

    @property
    def width(self) -> int:
        """Of values."""
        return self.V or self.K

    @property
    def states(self) -> int:
        return len(self.offsets) - 1 if self.offsets else self.B

    def make(self, draw: Draw) -> dict[str, Any]:
        B, T, H, K = self.B, self.T, self.H, self.K
        q, k, v = draw.normal(B, T, self.heads, K), self.keys(draw), draw.normal(B, T, H, self.width)
        made: dict[str, Any] = {"q": q, "k": k, "v": v}
        if self.fused:
            parts = torch.cat([x.flatten(2) for x in (q, k, v)], dim=2).split([x[0, 0].numel() for x in (q, k, v)], 2)
            made = {name: part.view(x.shape) for (name, x), part in zip(made.items(), parts, strict=True)}
        if self.decay:
            shape = {"head": (H,), "token": (B, T, H), "channel": (B, T, H, K)}[self.decay]
            gates = self.gates(draw, *shape)
            made["log_decay"] = gates.to(draw.dtype) if self.narrow else gates
        if self.state:
            made["state"] = draw.state(self.states, H, K, self.width)
        if self.offsets:
            made["offsets"] = torch.tensor(self.offsets, dtype=torch.int64, device=draw.device)
        if self.scale is not None:
            made["scale"] = self.scale
        return made | self.more(draw)

    def keys(self, draw: Draw) -> Tensor:
        return draw.normal(self.B, self.T, self.heads, self.K)

    def more(self, draw: Draw) -> dict[str, Any]:
        return {}
