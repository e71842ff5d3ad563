"""The probes of the selective scan: how the laws derive tests from a case."""

from __future__ import annotations

from dataclasses import replace

from foci.core.spec import Bad, Case, Future, Inputs, Probes
from foci.ops import recurrent
from foci.ops.selective_scan.cases import case


def sized(length: int) -> Case:
    return case(f"T={length}", B=1, T=length, D=4, K=3)


def future(case: Case, inputs: Inputs) -> Future | None:
    """Another future, of which no step is negative."""
    found = recurrent.future(case, inputs)
    return None if found is None else replace(found, inputs=found.inputs | {"dt": found.inputs["dt"].abs()})


BAD = (
    Bad("x of rank 2", "x", lambda i: i | {"x": i["x"][0]}),
    Bad("dt with fewer tokens", "dt", lambda i: i | {"dt": i["dt"][:, :-1]}),
    Bad("dt for all channels at once", "dt", lambda i: i | {"dt": i["dt"][..., :1]}, strict=True),
    Bad("A of another state", "B", lambda i: i | {"A": i["A"][:, :-1]}),
    Bad("A for all channels at once", "A", lambda i: i | {"A": i["A"][:1]}, strict=True),
    Bad("B of whole numbers", "B", lambda i: i | {"B": i["B"].long()}, strict=True),
    Bad("C of another state", "C", lambda i: i | {"C": i["C"][..., :-1]}),
    Bad("skip of the wrong size", "skip", lambda i: i | {"skip": i["x"].new_zeros(13)}),
    Bad("state of another batch", "state", lambda i: i | {"state": i["x"].new_zeros(3, 12, 4)}),
    Bad("state transposed", "state", lambda i: i | {"state": i["x"].new_zeros(2, 4, 12)}),
    *(bad for bad in recurrent.BAD if bad.argument == "offsets"),
)
PROBES = Probes(sized, recurrent.cut, recurrent.documents, recurrent.rows, future, None, BAD)
