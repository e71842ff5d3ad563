"""The Spec: declared outputs are real, the ops keep their schema, and the work is counted."""

from __future__ import annotations

import torch

from foci.ops import SPECS
from foci.ops.scan.api import scan
from foci.ops.scan.spec import SPEC, work
from tests.ops.in_slices import InScanSpec


class TestSpec(InScanSpec):
    spec, function = SPEC, staticmethod(scan)


def test_it_is_listed() -> None:
    assert SPECS["scan"] is SPEC
    assert [backend.name for backend in SPEC.backends] == ["triton", "chunked", "reference"]


def test_work_counts_a_multiply_add_a_number_and_each_byte_once() -> None:
    x = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    done = work(SPEC.bind(x, x.float()))
    assert done.flops == 2 * x.numel() and done.bytes == (2 + 4 + 2) * x.numel()
