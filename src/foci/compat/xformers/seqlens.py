"""SeqLens: where the blocks of a packed dimension start and how long they are, xFormers' three kinds in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import index

import torch
from torch import Tensor

from foci.core.errors import ShapeError


@dataclass(frozen=True)
class SeqLens:
    """N blocks: block n begins at seqstart_py[n] and has seqlen_py[n] tokens; seqstart_py[N] is the whole dimension.

    Kept as Python lists, so that no device is asked; `seqstart` and `seqlen` are the same as int32 tensors.
    """

    seqstart_py: list[int]
    seqlen_py: list[int]
    device: torch.device | None = None

    @classmethod
    def packed(cls, seqlens: Sequence[int], device: torch.device | None = None) -> SeqLens:
        """Blocks end to end."""
        sizes = _sizes(seqlens)
        return cls(list(accumulate(sizes, initial=0)), sizes, device)

    @classmethod
    def padded(cls, seqlens: Sequence[int], padding: int, device: torch.device | None = None) -> SeqLens:
        """Blocks of `padding` places each, filled from their starts."""
        sizes, (padding,) = _sizes(seqlens), _sizes([padding], "kv_padding")
        if max(sizes, default=0) > padding:
            raise ValueError(f"xformers: kv_seqlen has {max(sizes)}; expected at most kv_padding={padding}")
        return cls([padding * n for n in range(len(sizes) + 1)], sizes, device)

    @classmethod
    def gappy(cls, seqstarts: Sequence[int], seqlens: Sequence[int], device: torch.device | None = None) -> SeqLens:
        """Blocks anywhere; the last of `seqstarts` is the whole dimension."""
        starts, sizes = _sizes(seqstarts, "kv_seqstarts"), _sizes(seqlens)
        if len(starts) != len(sizes) + 1:
            raise ShapeError(f"xformers: kv_seqstarts has {len(starts)} entries; expected {len(sizes) + 1}")
        if any(start + size > starts[-1] for start, size in zip(starts, sizes, strict=False)):
            raise ValueError(f"xformers: a block ends behind {starts[-1]}, where kv_seqstarts says the keys end")
        return cls(starts, sizes, device)

    @property
    def seqstart(self) -> Tensor:
        return torch.tensor(self.seqstart_py, dtype=torch.int32, device=self.device)

    @property
    def seqlen(self) -> Tensor:
        return torch.tensor(self.seqlen_py, dtype=torch.int32, device=self.device)

    @property
    def max_seqlen(self) -> int:
        return max(self.seqlen_py, default=-1)

    @property
    def min_seqlen(self) -> int:
        return min(self.seqlen_py, default=-1)

    def to(self, device: torch.device) -> SeqLens:
        return replace(self, device=device)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Start and end of each block."""
        yield from ((start, start + size) for start, size in zip(self.seqstart_py, self.seqlen_py, strict=False))

    def slices(self) -> Iterator[slice]:
        yield from (slice(*interval) for interval in self.intervals())

    def full(self) -> bool:
        """Every place belongs to a block."""
        return self.seqlen_py == [after - before for before, after in pairwise(self.seqstart_py)]

    def in_order(self) -> bool:
        """No block reaches into the next."""
        return all(end <= after for (_, end), after in zip(self.intervals(), self.seqstart_py[1:], strict=True))

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """x [1, sum, ...] as a list of [B_n, T_n, ...]; `batch_sizes` says how many equal blocks make one tensor."""
        if not self.full():
            raise ValueError("xformers: split: there is room between the blocks; expected them end to end")
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            raise ShapeError(f"xformers: split: got {list(x.shape)}; expected [1, {self.seqstart_py[-1]}, ...]")
        counts = [1] * len(self.seqlen_py) if batch_sizes is None else list(batch_sizes)
        places = list(accumulate(counts, initial=0))
        cuts = [self.seqstart_py[place] for place in places]
        return [x[0, a:b].unflatten(0, (n, -1)) for n, (a, b) in zip(counts, pairwise(cuts), strict=True)]


def _sizes(values: Sequence[int], name: str = "seqlen") -> list[int]:
    if isinstance(values, Tensor):
        raise TypeError(f"xformers: {name} must be a sequence of ints, got a tensor (use .tolist())")
    try:
        found = [index(value) for value in values]
    except TypeError:
        raise TypeError(f"xformers: {name} must be ints, got {values!r}") from None
    if min(found, default=0) < 0:
        raise ValueError(f"xformers: {name} must not be negative, got {found}")
    return found
