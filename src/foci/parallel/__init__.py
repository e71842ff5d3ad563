"""Sequence parallelism: wrappers, operator in, operator out, for ranks that share a sequence."""

from __future__ import annotations

from foci.core.errors import Disagreement, RankError
from foci.parallel.balance import positions, shard, unshard
from foci.parallel.forecast import Plan, plan_parallel
from foci.parallel.group import Group
from foci.parallel.handoff import handoff
from foci.parallel.joint import joint
from foci.parallel.links import Compute, Link, Links, preset
from foci.parallel.measure import measure_compute, measure_links
from foci.parallel.ring import ring
from foci.parallel.split import Split
from foci.parallel.ulysses import ulysses, usp
from foci.parallel.wire_bytes import sent
from foci.parallel.workload import Rest, Shape

__all__ = [
    "Compute", "Disagreement", "Group", "Link", "Links", "Plan", "RankError", "Rest", "Shape", "Split",
    "handoff", "joint", "measure_compute", "measure_links", "plan_parallel", "positions", "preset", "ring", "sent",
    "shard", "ulysses", "unshard", "usp",
]  # fmt: skip
