"""The Spec: declared outputs are the real ones; the operator's answers are those of its equation."""

from __future__ import annotations

from foci.ops.decay.spec import SPEC
from tests.ops.in_slices import InSpec


class TestSpec(InSpec):
    spec = SPEC
