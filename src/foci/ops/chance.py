"""Chance: choices of a problem that nobody chose, the same for the same name."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from foci.core.spec import Case, accumulator

One = TypeVar("One")

WIDTHS = (64, 128, 128, 256)  # of heads as models have them, for which GPUs have kernels of their own
WIDEST = 512
FEW = 4  # an RMS of one number is none: of fewer, each a sum that may cancel, no gradient is drawn
EDGE = 16  # blocks of kernels are multiples of it
LONGEST = 8192  # tokens: the truth of a recurrence goes through them one by one
SHARES = (1, 1, 1, 2, 3, 4, 8, 16)  # heads that read one key head
ROWS = (1, 1, 1, 2, 3, 5, 8)


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

    def rows(self, most: int) -> int:
        return max(1, min(self.one(*ROWS), most))

    def size(self, most: int, least: int = 1) -> int:
        """`least` to `most`, each doubling as likely as another; half of them what blocks fit, or one more or less."""
        most = max(1, most)
        least = min(least, most)
        size = int(2 ** self._random.uniform(math.log2(least), math.log2(most + 1)))
        if size > EDGE and self.yes():
            size = round(size / EDGE) * EDGE + self.one(-1, 0, 0, 1)
        return max(least, min(size, most))

    def tokens(self, most: int) -> int:
        """A length: in one problem of ten fewer than a block has, half of these 1."""
        if self.yes(0.1):
            return self.one(1, self.size(min(most, EDGE - 1)))
        return self.size(min(most, max(EDGE, self.room >> 12)), EDGE)

    def widths(self, most: int) -> tuple[int, int]:
        """Of keys and of values, most of them alike: a model's on a GPU, else any from 4 on."""
        models = [width for width in WIDTHS if width <= most and self.room >= 2**26]
        K, V = (self.one(*models) if models and self.yes(0.7) else self.size(min(WIDEST, most), 4) for _ in range(2))
        return (K, K) if self.yes(0.7) else (K, V)

    def heads(self, most: int) -> tuple[int, int]:
        """Of keys, and of queries or values that share them, perhaps one of all; often as many as there is room for."""
        heads = max(1, most) if self.yes(0.3) else self.size(most)
        share = min(heads, self.one(*SHARES, heads))
        return heads // share, heads // share * share

    def cuts(self, tokens: int) -> tuple[int, ...]:
        """Offsets of this problem's documents, some of them empty."""
        inner = [self.between(0, tokens) for _ in range(self.documents - 1)]
        return (0, *sorted(self.one(*inner) if self.yes(0.2) else place for place in inner), tokens)

    def packed(self, rows: int, tokens: int) -> tuple[int, ...]:
        """Such offsets in half of the problems of one row, in others none."""
        return self.cuts(tokens) if rows == 1 and self.yes() else ()


def varied(
    chance: Chance, case: Case, wide: Iterable[str] = (), narrow: Iterable[str] = (), turned: Iterable[str] = ()
) -> Case:
    """The case with some of its arguments in another dtype, or laid otherwise in memory, as its name then tells.

    `wide`: those that may be in the dtype of states, `narrow`: in that of the first. `turned`: those that may lie head
    by head, all or none. Offsets may be int32.
    """
    widened, narrowed = (tuple(name for name in names if chance.yes(0.3)) for names in (wide, narrow))
    heads = tuple(turned) if chance.yes(0.3) else ()
    int32 = "offsets" if "offsets=" in case.name and chance.yes() else ""

    def make(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
        made = case.make(dtype, device, seed)
        if widened:
            wider = case.make(accumulator(dtype), device, seed)
            made |= {name: wider[name] for name in widened}
        made |= {name: made[name].to(dtype) for name in narrowed}
        made |= {name: made[name].transpose(1, 2).contiguous().transpose(1, 2) for name in heads}
        return made | ({int32: made[int32].int()} if int32 else {})

    said = {"wide": ",".join(widened), "narrow": ",".join(narrowed), "turned": bool(heads), "int32": bool(int32)}
    return replace(case, name=" ".join((case.name, *words(said))), make=make)


def words(chosen: Mapping[str, Any]) -> list[str]:
    """What was chosen, in a word each; what is absent or false is left out."""
    present = {
        key: getattr(x, "__name__", x) for key, x in chosen.items() if x not in (None, "", ()) and x is not False
    }
    return [key if x is True else f"{key}={x}".replace(", ", ",") for key, x in present.items()]


def told(name: str, chosen: Mapping[str, Any], features: Iterable[str] = ()) -> str:
    """The name of a drawn case, from which a reader sees what it is."""
    return f"{name}: {' '.join((*features, *words(chosen)))}"
