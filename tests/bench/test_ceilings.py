"""What a machine can do is measured: a product and a copy, and the floor that follows from them."""

from __future__ import annotations

import torch

from foci.bench.ceilings import Ceilings, ceilings


def test_the_floor_is_the_slower_of_work_and_traffic() -> None:
    top = Ceilings(flops=100.0, bytes=10.0)
    assert top.floor(1000.0, 1.0) == 10.0
    assert top.floor(1.0, 1000.0) == 100.0


def test_ceilings_of_this_machine() -> None:
    top = ceilings(torch.float32, torch.device("cpu"), rounds=3)
    assert 1e8 < top.flops < 1e15
    assert 1e8 < top.bytes < 1e14
