"""set_seq_parallel_pg, as a value and for the length of a `with`: nothing is set for the whole process."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any

import torch.distributed as dist

from foci.ops.arguments import switch

_CURRENT: ContextVar[SequenceParallel | None] = ContextVar("foci.compat.yunchang.groups", default=None)


class SequenceParallel:
    """The two groups of this rank. As a context manager: those that layers made within it take."""

    def __init__(self, ulysses: dist.ProcessGroup, ring: dist.ProcessGroup) -> None:
        self.ULYSSES_PG, self.RING_PG = ulysses, ring
        self._tokens: list[Token[SequenceParallel | None]] = []

    def __enter__(self) -> SequenceParallel:
        self._tokens.append(_CURRENT.set(self))
        return self

    def __exit__(self, *error: Any) -> None:
        _CURRENT.reset(self._tokens.pop())


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True
) -> SequenceParallel:
    """Make the groups of a world of data x (ring x Ulysses) ranks; every rank calls it alike. Their value is returned.

        with set_seq_parallel_pg(2, 2, rank, world_size):
            layer = LongContextAttention()                      # or LongContextAttention(groups=the value)

    use_ulysses_low: neighbouring ranks form a Ulysses group (what the orders of EXTRACT_FUNC_DICT expect), else a ring.
    Unlike yunchang's this keeps nothing for the process: a value that is dropped sets nothing. Raises ValueError for
    degrees that do not divide the world, or for a rank or world size that are not this process's.
    """
    degree = sp_ulysses_degree * sp_ring_degree
    if min(sp_ulysses_degree, sp_ring_degree) < 1 or world_size % degree:
        raise ValueError(
            f"set_seq_parallel_pg: sp_ulysses_degree={sp_ulysses_degree} times sp_ring_degree={sp_ring_degree} must "
            f"divide world_size={world_size}"
        )
    if (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"set_seq_parallel_pg: rank={rank} of world_size={world_size}; this process is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}"
        )
    found: dict[str, Any] = {}
    low_first = switch("set_seq_parallel_pg", "use_ulysses_low", use_ulysses_low)
    low, high = (sp_ulysses_degree, sp_ring_degree) if low_first else (sp_ring_degree, sp_ulysses_degree)
    for start in range(0, world_size, degree):
        runs = [list(range(start + i * low, start + (i + 1) * low)) for i in range(high)]
        strides = [list(range(start + i, start + degree, low)) for i in range(low)]
        names = ("ulysses", "ring") if low_first else ("ring", "ulysses")
        for name, members in zip(names, (runs, strides), strict=True):
            for ranks in members:
                group = dist.new_group(ranks)
                if rank in ranks:
                    found[name] = group
    return SequenceParallel(found["ulysses"], found["ring"])


def current(groups: SequenceParallel | None) -> SequenceParallel:
    """The groups given, or those of the `with` around; raises RuntimeError where there are none."""
    found = _CURRENT.get() if groups is None else groups
    if found is None:
        raise RuntimeError(
            "yunchang: no groups; make the layer within `with set_seq_parallel_pg(...):`, or give it as `groups=` what "
            "that returned"
        )
    return found
