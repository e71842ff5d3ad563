"""Flags of a launch that another begins beside: found where they are, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.tiles.turns import begin_next, flagged, wait_for_last
from tests.ops.in_triton import DEVICE


@triton.jit
def kernel(out_ptr, flags_ptr, count, stride, BESIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    begin_next(BESIDE)
    tl.store(out_ptr, flagged(flags_ptr, count, stride))
    wait_for_last(BESIDE)


@pytest.mark.parametrize(("count", "stride"), [(0, 3), (1, 1), (63, 2), (64, 5), (65, 3), (200, 7)])
def test_the_flags_of_one_head_are_seen_and_no_other(count: int, stride: int) -> None:
    """Of `stride` heads side by side: this one's, each in its turn, then all of the others and what lies behind."""
    flags, out = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in ((count + 2, stride), (1,)))
    for place in range(count):
        flags.zero_()[place, 0] = 1
        kernel[(1,)](out, flags, count, stride, BESIDE=False)
        assert out.item() == 1
    flags[:, 1:], flags[:count, 0], flags[count:] = 1, 0, 1
    kernel[(1,)](out, flags, count, stride, BESIDE=False)
    assert out.item() == 0
