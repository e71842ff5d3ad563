"""Which positions the ranks of a wrapper hold, for one group or nested groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foci.parallel.balance import Order, Piece, cut, length, pieces
from foci.parallel.group import Group
from foci.parallel.operators import Operator


def groups_of(wrapped: Any) -> list[Group]:
    """The groups of a wrapper, outermost first: a shard of one group is split again over the groups before it."""
    if isinstance(wrapped, Operator):
        return []
    return [wrapped.group, *groups_of(getattr(wrapped, "inner", wrapped.operator))]


def order_of(wrapped: Any) -> Order:
    """The order in which the innermost group shards the sequence."""
    if isinstance(wrapped, Operator):
        return "plain"
    inner = order_of(wrapped.inner)
    found: Order = getattr(wrapped, "order", inner)
    return found


def shard_index(groups: Sequence[Group]) -> int:
    """This rank's index in the order of the ranks' shards."""
    place = 0
    for group in reversed(groups):
        place = place * group.size + group.rank
    return place


def pieces_by_rank(groups: Sequence[Group], order: Order, counts: Sequence[int]) -> list[list[Piece]]:
    """The pieces of the whole sequence on each rank, from their counts; in plain order any lengths are allowed.

    Raises ValueError if the counts are not those of the order.
    """
    if order == "plain" or not groups:
        ends = list(accumulate(counts))
        return [[Piece(end - count, 1, count)] if count else [] for end, count in zip(ends, counts, strict=True)]
    ring, total = groups[-1].size, sum(counts)
    each = len(counts) // ring
    found = []
    for rank in range(ring):
        held, start = pieces(order, total, ring, rank), 0
        mine = counts[rank * each : (rank + 1) * each]
        if sum(mine) != length(held):
            raise ValueError(
                f"the ranks hold {list(counts)} tokens; order {order!r} of {total} gives {length(held)} to rank "
                f"{rank} of {ring}"
            )
        for count in mine:
            found.append(cut(held, start, start + count))
            start += count
    return found


def positions_of(held: Sequence[Piece]) -> Tensor:
    """The positions of pieces, int64, in their order."""
    runs = [torch.arange(each.positions.start, each.positions.stop, each.step, device="cpu") for each in held]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64, device="cpu")
