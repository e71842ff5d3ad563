"""Chance: choices of a problem that nobody chose, the same for the same name."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

One = TypeVar("One")

WIDTHS = (64, 128, 128, 256)  # of heads as models have them, for which GPUs have kernels of their own
EDGE = 16  # blocks of kernels are multiples of it
LONGEST = 8192  # tokens: the truth of a recurrence goes through them one by one


class Chance:
    """What a problem is like. `room`: how many numbers its truth may keep at once, which bounds its sizes.

    `documents`: how many it has if it is packed.
    """

    def __init__(self, name: str, room: int) -> None:
        self._random, self.room = random.Random(name), room
        self.documents = self.size(9)

    def yes(self, share: float = 0.5) -> bool:
        return self._random.random() < share

    def one(self, *choices: One) -> One:
        return self._random.choice(choices)

    def between(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def rows(self) -> int:
        return self.one(1, 1, 2, 3)

    def size(self, most: int) -> int:
        """1 to `most`, each doubling as likely as another; half of them what blocks fit, or one more or less."""
        size = int(2 ** self._random.uniform(0, math.log2(most + 1)))
        if size > EDGE and self.yes():
            size = round(size / EDGE) * EDGE + self.one(-1, 0, 0, 1)
        return max(1, min(size, most))

    def tokens(self, each: int) -> int:
        """A length, where the truth keeps `each` numbers for a token."""
        return self.size(max(1, min(LONGEST, self.room >> 12, self.room // each)))

    def width(self) -> int:
        """Of heads: a model's where there is room for many, else any from 4 on, most of them small."""
        many = self.room >= 2**26
        return self.one(*WIDTHS) if many and self.yes(0.7) else max(4, self.size(200 if many else 40))

    def heads(self, most: int) -> tuple[int, int]:
        """Of keys, and of queries or values that share them."""
        groups = self.one(1, 1, 2, 3, 4, 8)
        heads = groups * self.size(max(1, most // groups))
        return (heads, heads) if self.yes() else (heads // groups, heads)

    def cuts(self, tokens: int) -> tuple[int, ...]:
        """Offsets of this problem's documents, some of them empty."""
        inner = [self.between(0, tokens) for _ in range(self.documents - 1)]
        return (0, *sorted(self.one(*inner) if self.yes(0.2) else place for place in inner), tokens)

    def packed(self, rows: int, tokens: int) -> tuple[int, ...]:
        """Such offsets in half of the problems of one row, in others none."""
        return self.cuts(tokens) if rows == 1 and self.yes() else ()


def told(name: str, chosen: Mapping[str, Any], features: Iterable[str] = ()) -> str:
    """The name of a drawn case, from which a reader sees what it is; what is absent or false is left out."""
    present = {key: getattr(x, "__name__", x) for key, x in chosen.items() if not (x is None or x is False or x == ())}
    words = (key if x is True else f"{key}={x}".replace(", ", ",") for key, x in present.items())
    return f"{name}: {' '.join((*features, *words))}"
