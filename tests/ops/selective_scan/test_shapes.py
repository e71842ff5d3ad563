"""The shapes that benchmarks time are calls of the operator."""

from __future__ import annotations

from foci.ops.selective_scan.spec import SPEC
from tests.ops.shapes import check


def test_shapes_are_calls() -> None:
    check(SPEC)
