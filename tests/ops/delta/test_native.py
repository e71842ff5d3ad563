"""The compiled backend of delta_rule: what in_native.py asks."""

from __future__ import annotations

from foci.ops.delta import native
from foci.ops.delta.api import delta_rule
from foci.ops.delta.spec import SPEC
from tests.ops.in_native import BUILT, InNative


@BUILT
class TestInNative(InNative):
    spec, function, module = SPEC, staticmethod(delta_rule), native
