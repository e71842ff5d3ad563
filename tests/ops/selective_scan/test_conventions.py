"""Our own function is a strict candidate, and a wrong one is told."""

from __future__ import annotations

from functools import partial

import foci
from foci.check.run import examine
from foci.ops.selective_scan.conventions import adapt
from foci.ops.selective_scan.spec import SPEC


def test_ours_keeps_the_quick_laws() -> None:
    ours = adapt(partial(foci.selective_scan, backend="chunked"), name="ours")
    assert ours.strict and ours.not_tested == () and ours.name == "ours"
    quick = ["forward", "cut and merge", "packed = separate", "causality", "extreme gates", "bad input"]
    assert examine(SPEC, ours, only=quick, isolated=False).ok


def test_a_wrong_one_is_named() -> None:
    def swapped(x, dt, A, B, C, D=None):
        return foci.selective_scan(x, dt, A, C, B, skip=D)[0]

    report = examine(SPEC, adapt(swapped), only=["forward"], isolated=False)
    assert any("B and C are exchanged" in failure.sentence for failure in report.failures)
