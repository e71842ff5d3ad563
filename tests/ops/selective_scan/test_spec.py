"""The Spec: declared outputs are real, the ops keep their schema, and the work is counted."""

from __future__ import annotations

import torch

from foci.ops import SPECS
from foci.ops.selective_scan.api import selective_scan
from foci.ops.selective_scan.spec import SPEC, work
from tests.ops.in_slices import InScanSpec


class TestSpec(InScanSpec):
    spec, function = SPEC, staticmethod(selective_scan)


def test_it_is_listed() -> None:
    assert SPECS["selective_scan"] is SPEC
    assert [backend.name for backend in SPEC.backends] == ["native", "triton", "chunked", "reference"]


def test_work_counts_every_state_of_every_token_and_no_state_in_memory() -> None:
    x, A, B = torch.zeros(2, 3, 4), torch.zeros(4, 5), torch.zeros(2, 3, 5)
    done = work(SPEC.bind(x, x, A, B, B))
    assert done.flops == 7 * 2 * 3 * 4 * 5
    assert done.bytes == 4 * (3 * x.numel() + A.numel() + 2 * B.numel())
