"""The probes of linear attention: how the laws derive tests from a case."""

from __future__ import annotations

from foci.core.spec import Bad, Case
from foci.ops.decay.cases import Linear
from foci.ops.recurrent import probes


def sized(length: int, decay: str = "channel") -> Case:
    return Linear(f"T={length}", B=1, T=length, H=2, K=8, decay=decay).case


BAD = (
    Bad("bonus of the wrong size", "bonus", lambda i: i | {"bonus": i["v"].new_zeros(99)}),
    Bad("gates without an order", "log_decay", lambda i: i | {"log_decay": i["v"].new_zeros(4), "causal": False}, True),
    Bad("a bonus without an order", "bonus", lambda i: i | {"bonus": i["v"].new_zeros(4, 16), "causal": False}, True),
    Bad("causal that is no boolean", "causal", lambda i: i | {"causal": "yes"}, strict=True),
)
PROBES = probes(sized, BAD)
