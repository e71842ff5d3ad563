"""The cases: named once, the same for the same seed, and what they say of themselves is true."""

from __future__ import annotations

from foci.ops.selective_scan.spec import SPEC
from tests.ops.in_slices import InScanCases


class TestCases(InScanCases):
    spec = SPEC
