"""The public functions: what they return, choose and refuse."""

from __future__ import annotations

from foci.ops.decay.api import linear_attention
from foci.ops.decay.spec import SPEC
from tests.ops.in_slices import InApi


class TestApi(InApi):
    spec, function = SPEC, staticmethod(linear_attention)
