"""The probes of the delta rule: how the laws derive tests from a case."""

from __future__ import annotations

from foci.core.spec import Bad, Case
from foci.ops.delta.cases import Delta
from foci.ops.recurrent import probes


def sized(length: int, decay: str = "channel") -> Case:
    return Delta(f"T={length}", B=1, T=length, H=2, K=8, decay=decay).case


BAD = (
    Bad("beta with fewer tokens", "beta", lambda i: i | {"beta": i["beta"][:, :-1]}),
    Bad("beta of rank 4", "beta", lambda i: i | {"beta": i["beta"][..., None]}, strict=True),
    Bad("erase of another width", "erase", lambda i: i | {"erase": i["k"][..., :-1]}),
)
PROBES = probes(sized, BAD)
