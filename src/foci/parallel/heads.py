"""Which heads each rank computes, and how each tensor of a call is split when tokens are exchanged for heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foci.core.spec import accumulator

Run = tuple[int, int]


class Share(NamedTuple):
    """The heads first:last of all that one rank computes, and the key heads (also first:last) that these read.

    `repeat`: the index of a key head for each of the local call's, some repeated, where the rank's first or last key
    head serves fewer of its heads than the others; None where the ordinary rule (head h reads h // (H/G)) suffices.
    """

    heads: Run
    keys: Run
    repeat: tuple[int, ...] | None = None


def shares(H: int, G: int, ranks: int) -> list[Share]:
    """H heads over the ranks, as evenly as possible; with fewer heads than ranks the last ranks have none.

    G key heads (H a multiple of G; 0 where there are none): a rank needs those that its heads read, so one key head may
    go to several ranks. No rank has more than ceil(H / ranks) heads, whatever G is.
    """
    found, each = [], H // G if G else 1
    small, more = divmod(H, ranks)
    for rank in range(ranks):
        start = rank * small + min(rank, more)
        stop = start + small + (rank < more)
        if start == stop or not G:
            found.append(Share((start, stop), (0, 0)))
            continue
        keys = start // each, (stop - 1) // each + 1
        counts = [min(stop, (g + 1) * each) - max(start, g * each) for g in range(*keys)]
        common = math.gcd(*counts)
        repeat = tuple(place for place, count in enumerate(counts) for _ in range(count // common))
        found.append(Share((start, stop), keys, None if len(repeat) == len(counts) else repeat))
    return found


class Route(NamedTuple):
    """The all-to-all of one tensor between its sharding by tokens (holders) and by heads (computers).

    `shape`, `dtype`: of the tensor as sharded by tokens on this rank. `token`: its token dimension (None: replicated),
    `lengths`: tokens on each rank. `head`: its head dimension (None: every rank needs all), `runs`: first:last head of
    each rank.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    token: int | None
    lengths: tuple[int, ...]
    head: int | None
    runs: tuple[Run, ...]

    @property
    def ranks(self) -> int:
        return len(self.runs)

    def message_shape(self, holder: int, computer: int) -> tuple[int, ...]:
        """The shape of the message between a rank that holds tokens and a rank that computes heads."""
        shape = list(self.shape)
        if self.token is not None:
            shape[self.token] = self.lengths[holder]
        if self.head is not None:
            start, stop = self.runs[computer]
            shape[self.head] = stop - start
        return tuple(shape)

    def shape_by_heads(self, computer: int) -> tuple[int, ...]:
        """The shape as sharded by heads: all tokens of the heads of a rank."""
        shape = list(self.message_shape(0, computer))
        if self.token is not None:
            shape[self.token] = sum(self.lengths)
        return tuple(shape)

    def split_by_heads(self, x: Tensor) -> list[Tensor]:
        """Split this rank's tokens by heads: one part for each rank that computes them."""
        if self.head is None:
            return [x] * self.ranks
        return [x.narrow(self.head, start, stop - start) for start, stop in self.runs]

    def join_tokens(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of all ranks along tokens; the sum if there is no token dimension."""
        return _sum(parts) if self.token is None else torch.cat(list(parts), self.token)

    def split_by_tokens(self, y: Tensor) -> list[Tensor]:
        """Split this rank's heads by tokens: one part for each rank that holds them."""
        return [y] * self.ranks if self.token is None else list(y.split(self.lengths, self.token))

    def join_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of all ranks along heads; a head computed by two ranks is summed."""
        if self.head is None:
            return _sum(parts)
        ends = [0, *(stop for _, stop in self.runs)]
        if all(start == end for (start, _), end in zip(self.runs, ends, strict=False)):
            return torch.cat(list(parts), self.head)
        shape = list(parts[0].shape)
        shape[self.head] = self.shape[self.head]
        whole = parts[0].new_zeros(shape, dtype=accumulator(self.dtype))
        for part, (start, stop) in zip(parts, self.runs, strict=True):
            whole.narrow(self.head, start, stop - start).add_(part)
        return whole.to(self.dtype)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in rank order, in float32 at least: bitwise the same on every rank, and rounded only once."""
    total = parts[0].to(accumulator(parts[0].dtype), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)
