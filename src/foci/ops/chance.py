"""Chance: random choices for drawn test problems, seeded by the problem's name."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from foci.core.spec import Case, accumulator

One = TypeVar("One")

WIDTHS = (64, 128, 128, 256)  # head dimensions of models, for which GPUs have special kernels
WIDEST = 512
FEW = 4  # smallest number of elements of a gradient: the RMS of fewer, each a sum that may cancel, is meaningless
EDGE = 16  # kernels' block sizes are multiples of it
LONGEST = 8192  # tokens: the reference of a recurrence loops over them
SHARES = (1, 1, 1, 2, 3, 4, 8, 16)  # heads that read one key head
ROWS = (1, 1, 1, 2, 3, 5, 8)


class Chance:
    """Random choices of one problem. `room`: how many numbers its reference may hold at once, which bounds its sizes.

    `documents`: the number of its documents if it is packed.
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
        """Log-uniform from `least` to `most`; half of the larger ones are a multiple of EDGE, or one more or less."""
        most = max(1, most)
        least = min(least, most)
        size = int(2 ** self._random.uniform(math.log2(least), math.log2(most + 1)))
        if size > EDGE and self.yes():
            size = round(size / EDGE) * EDGE + self.one(-1, 0, 0, 1)
        return max(least, min(size, most))

    def tokens(self, most: int) -> int:
        """A length; in one of ten problems shorter than a block, and in half of these 1."""
        if self.yes(0.1):
            return self.one(1, self.size(min(most, EDGE - 1)))
        return self.size(min(most, max(EDGE, self.room >> 12)), EDGE)

    def widths(self, most: int) -> tuple[int, int]:
        """Head dimensions K and V, mostly equal: those of models on a GPU, else any from 4 on."""
        models = [width for width in WIDTHS if width <= most and self.room >= 2**26]
        K, V = (self.one(*models) if models and self.yes(0.7) else self.size(min(WIDEST, most), 4) for _ in range(2))
        return (K, K) if self.yes(0.7) else (K, V)

    def heads(self, most: int) -> tuple[int, int]:
        """Numbers of key heads and of the heads that share them, in the extreme all one; often as many as fit."""
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
    """The case with some arguments in another dtype or memory layout, which its name then says.

    `wide`: arguments that may have the dtype of states; `narrow`: that of the inputs. `turned`: arguments that may have
    heads before tokens in memory, all or none. Offsets may be int32.
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
    """The choices as words, without absent or false ones."""
    present = {
        key: getattr(x, "__name__", x) for key, x in chosen.items() if x not in (None, "", ()) and x is not False
    }
    return [key if x is True else f"{key}={x}".replace(", ", ",") for key, x in present.items()]


def told(name: str, chosen: Mapping[str, Any], features: Iterable[str] = ()) -> str:
    """The name of a drawn case, which lists its choices."""
    return f"{name}: {' '.join((*features, *words(chosen)))}"
