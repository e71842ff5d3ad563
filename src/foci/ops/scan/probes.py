"""The probes of the elementwise scan: how the laws derive tests from a case."""

from __future__ import annotations

from foci.core.spec import Bad, Case, Probes
from foci.ops import recurrent
from foci.ops.scan.cases import case


def sized(length: int) -> Case:
    return case(f"T={length}", B=1, T=length, D=4)


BAD = (
    Bad("x of rank 2", "x", lambda i: i | {"x": i["x"][0]}),
    Bad("gates with fewer tokens", "log_decay", lambda i: i | {"log_decay": i["log_decay"][:, :-1]}),
    Bad("gates for all channels at once", "log_decay", lambda i: i | {"log_decay": i["log_decay"][..., :1]}, True),
    Bad("gates of whole numbers", "log_decay", lambda i: i | {"log_decay": i["log_decay"].long()}, strict=True),
    Bad("state of another batch", "state", lambda i: i | {"state": i["x"].new_zeros(3, 12)}),
    Bad("state of another width", "state", lambda i: i | {"state": i["x"].new_zeros(2, 13)}),
    *(bad for bad in recurrent.BAD if bad.argument == "offsets"),
)
PROBES = Probes(sized, recurrent.cut, recurrent.documents, recurrent.rows, recurrent.future, None, BAD)
