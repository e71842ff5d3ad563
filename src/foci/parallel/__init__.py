"""Sequence parallelism: wrappers, operator in, operator out, for ranks that share a sequence."""

from __future__ import annotations

from foci.core.errors import Disagreement, RankError
from foci.parallel.balance import positions, shard, unshard
from foci.parallel.group import Group
from foci.parallel.handoff import handoff
from foci.parallel.joint import joint
from foci.parallel.ring import ring
from foci.parallel.ulysses import ulysses, usp

__all__ = [
    "Disagreement",
    "Group",
    "RankError",
    "handoff",
    "joint",
    "positions",
    "ring",
    "shard",
    "ulysses",
    "unshard",
    "usp",
]
