"""The public functions: what they return, choose and refuse."""

from __future__ import annotations

import torch

from foci.ops.delta.api import delta_rule
from foci.ops.delta.spec import SPEC
from tests.ops.in_slices import B, H, InApi, T


class TestApi(InApi):
    spec, function = SPEC, staticmethod(delta_rule)
    more = (torch.rand(B, T, H, generator=torch.Generator().manual_seed(1)),)  # no test has begun, nor its seed
