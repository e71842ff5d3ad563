"""Our own function is a strict candidate, and a wrong one is told."""

from __future__ import annotations

from functools import partial

import foci
from foci.check.run import examine
from foci.ops.scan.conventions import adapt
from foci.ops.scan.spec import SPEC


def test_ours_keeps_the_quick_laws() -> None:
    ours = adapt(partial(foci.scan, backend="chunked"), name="ours")
    assert ours.strict and ours.not_tested == () and ours.name == "ours"
    quick = ["forward", "cut and merge", "packed = separate", "causality", "extreme gates", "bad input"]
    assert examine(SPEC, ours, only=quick, isolated=False).ok


def test_a_wrong_one_is_named() -> None:
    report = examine(SPEC, adapt(lambda x, g: foci.scan(x, g * 0.6931)[0]), only=["forward"], isolated=False)
    assert any("base 2" in failure.sentence for failure in report.failures)
