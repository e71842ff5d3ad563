"""A ring needs its share of memory and no more: at 32k tokens over 4 ranks, a quarter of one process, and 30 %."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import foci
from foci.core.world import World
from foci.parallel import ring

TOKENS = 32768
M_MMAP_THRESHOLD = -3  # of malloc.h


def resident(which: str) -> int:
    """Kilobytes of this process: VmRSS now, VmHWM at most since it was last reset."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def peak(split: bool, backward: bool) -> int:
    """Kilobytes that one call needs at most, its inputs, gradients and all scratch memory included.

    The window spares the test an hour of arithmetic. In stripes every rank still needs the keys of every other. Blocks
    from 1 MB on are the system's again once freed: what malloc keeps of them hangs on when the other ranks answered,
    and was up to a quarter of the backward's peak.
    """
    op = ring(foci.attention, dist.group.WORLD, "stripe") if split else foci.attention
    mask = foci.Causal() & foci.Window(255, 0)

    def call(T: int) -> None:
        q, k, v = (torch.randn(1, T, heads, 64, requires_grad=backward) for heads in (16, 2, 2))
        out = op(q, k, v, mask=mask, backend="chunked")
        if backward:
            out.backward(torch.ones(()).expand_as(out))

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    call(64)  # what is imported and allocated once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    call(TOKENS // dist.get_world_size() if split else TOKENS)
    return resident("VmHWM") - before


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_rank_needs_its_share(worlds: Callable[[int], World], backward: bool) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this platform does not say what a process needed at most")
    (whole,) = worlds(1).run(peak, False, backward)
    shares = worlds(4).run(peak, True, backward)
    assert whole > 300_000, "too small to tell from what any call needs"
    assert max(shares) <= 1.3 * whole / 4, f"{max(shares)} kB on a rank, {whole} kB in one process"
