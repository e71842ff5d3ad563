"""Split: how many ranks share the heads, how many the tokens, in which order; and every split of a world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from foci.ops.arguments import whole
from foci.parallel.balance import Order
from foci.parallel.workload import Shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Split:
    """`ulysses` ranks exchange heads for tokens by all-to-all, `ring` ranks pass keys round (recurrences: states on).

    `order`: how a ring's tokens are sharded. `cfg`: 2 if each branch of classifier-free guidance has half of the ranks.
    `inner`: which of the two has adjacent ranks; the other's are a stride apart. `handoff`: `ring` counts the ranks of
    a handoff.
    """

    ulysses: int = 1
    ring: int = 1
    order: str = "plain"
    cfg: int = 1
    inner: str = "ulysses"
    handoff: bool = False

    def __post_init__(self) -> None:
        for name in ("ulysses", "ring", "cfg"):
            whole("Split", name, getattr(self, name))
        if self.order not in get_args(Order):
            raise ValueError(f"Split: order must be one of {', '.join(map(repr, get_args(Order)))}, got {self.order!r}")
        if self.inner not in ("ulysses", "ring"):
            raise ValueError(f"Split: inner must be 'ulysses' or 'ring', got {self.inner!r}")
        if self.handoff and self.order != "plain":
            raise ValueError(f"Split: a handoff goes through the sequence in plain order, got {self.order!r}")

    @property
    def world(self) -> int:
        return self.cfg * self.ulysses * self.ring

    @property
    def kind(self) -> str:
        """ "one rank", "ulysses", "ring", "handoff", or "usp" for Ulysses with one of the others inside."""
        if self.ring == 1:
            return "one rank" if self.ulysses == 1 else "ulysses"
        if self.ulysses > 1:
            return "usp"
        return "handoff" if self.handoff else "ring"

    @property
    def strides(self) -> tuple[int, int]:
        """The distance in rank numbers between neighbours of a Ulysses group, and of a ring."""
        return (1, self.ulysses) if self.inner == "ulysses" else (self.ring, 1)

    @property
    def plainness(self) -> tuple[int, ...]:
        """Sorts splits that are equally fast: fewer kinds, then a small ring, then an order that moves no tokens."""
        kinds = (self.ulysses > 1) + (self.ring > 1)
        return kinds, self.ring, get_args(Order).index(self.order), self.inner == "ring"

    def ranks(self) -> Tensor:
        """Rank numbers by place in the mesh: int64 [cfg, ulysses, ring]."""
        every = torch.arange(self.world, device="cpu")
        if self.inner == "ring":
            return every.view(self.cfg, self.ulysses, self.ring)
        return every.view(self.cfg, self.ring, self.ulysses).transpose(1, 2)

    def mesh(self, device: str = "cpu") -> DeviceMesh:
        """The DeviceMesh of this split, dims ("cfg",) "ulysses", "ring": what `usp(op, mesh)` takes.

        Every rank of the process group must call it, and there must be as many as the split counts.
        """
        from torch.distributed.device_mesh import DeviceMesh

        names = ("cfg", "ulysses", "ring")
        if self.cfg == 1:
            return DeviceMesh(device, self.ranks()[0].contiguous(), mesh_dim_names=names[1:])
        return DeviceMesh(device, self.ranks().contiguous(), mesh_dim_names=names)

    def __str__(self) -> str:
        words = [f"cfg {self.cfg}"] if self.cfg > 1 else []
        words += [f"ulysses {self.ulysses}"] if self.ulysses > 1 else []
        if self.ring > 1:
            words.append(f"handoff {self.ring}" if self.handoff else f"ring {self.ring} {self.order}")
        text = " x ".join(words) or "one rank"
        return f"{text}, {self.inner} ranks adjacent" if self.kind == "usp" else text


def splits(shape: Shape, world: int) -> Iterator[Split]:
    """Every way to spread this work over so many ranks."""
    for cfg in (1, 2) if shape.rest.guidance and world % 2 == 0 else (1,):
        each = world // cfg
        for ulysses in range(1, each + 1):
            if each % ulysses:
                continue
            ring = each // ulysses
            orders = get_args(Order) if shape.causal and ring > 1 else ("plain",)
            for inner in ("ulysses", "ring") if ulysses > 1 and ring > 1 else ("ulysses",):
                for order in orders:
                    yield Split(ulysses, ring, order, cfg, inner, handoff=shape.recurrent and ring > 1)
