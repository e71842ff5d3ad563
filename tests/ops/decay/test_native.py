"""The compiled backend of linear_attention: what in_native.py asks."""

from __future__ import annotations

from foci.ops.decay import native
from foci.ops.decay.api import linear_attention
from foci.ops.decay.spec import SPEC
from tests.ops.in_native import BUILT, InNative


@BUILT
class TestInNative(InNative):
    spec, function, module = SPEC, staticmethod(linear_attention), native
