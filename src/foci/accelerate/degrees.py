"""Degrees: the number of ranks of each kind of parallelism, and the choice for ranks that are not assigned."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

DIMS = ("data", "cfg", "pipe", "ulysses", "ring")


@dataclass(frozen=True)
class Degrees:
    """The number of ranks of each kind of parallelism; None: foci chooses. `patches` and `warmup` are PipeFusion's."""

    ulysses: int | None = None
    ring: int | None = None
    cfg: int | None = None
    data: int | None = None
    pipe: int | None = None
    text: str = "auto"
    patches: int | None = None
    warmup: int | None = None

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in (*DIMS, "patches", "warmup")}
        for name, count in counts.items():
            least = 0 if name == "warmup" else 1
            if count is not None and count < least:
                raise ValueError(f"accelerate: --{name} must be at least {least}, got {count}")
        if self.cfg is not None and self.cfg > 2:
            raise ValueError(f"accelerate: --cfg must be 1 or 2, as guidance has two branches, got {self.cfg}")
        if self.text not in ("auto", "split", "replicated"):
            raise ValueError(f"accelerate: --text must be auto, split or replicated, got {self.text!r}")
        for name in ("patches", "warmup"):
            if counts[name] is not None and (self.pipe or 1) == 1:
                raise ValueError(f"accelerate: --{name} is an option of --pipe, which is {self.pipe or 1}")
        if self.text != "auto" and self.ulysses == self.ring == 1:
            raise ValueError("accelerate: --text is an option of --ulysses and --ring, which are 1")

    @property
    def by_name(self) -> dict[str, int]:
        """The size of every dimension, 1 if not given."""
        return {name: 1 if (given := getattr(self, name)) is None else given for name in DIMS}

    @property
    def undecided(self) -> bool:
        """Whether foci may choose ulysses or ring."""
        return self.ulysses is None or self.ring is None

    @property
    def size(self) -> int:
        """The product of the given sizes."""
        return math.prod(self.by_name.values())

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.by_name.items() if size > 1) or "one rank"

    def fill_world(self, world: int, heads: int) -> Degrees:
        """Assign all ranks of a world: the rest goes to Ulysses as far as it divides the heads, then to the ring.

        Raises ValueError where the degrees given do not divide the world, or leave no choice and miss it.
        """
        if world % self.size or (not self.undecided and self.size != world):
            raise ValueError(f"accelerate: {self} is {self.size} ranks, but there are {world}")
        rest = world // self.size
        ulysses = math.gcd(rest, heads) if self.ulysses is None and self.ring is None else rest
        if self.ulysses is None:
            return dataclasses.replace(self, ulysses=ulysses, ring=(self.ring or rest // ulysses))
        return dataclasses.replace(self, ring=rest) if self.ring is None else self
