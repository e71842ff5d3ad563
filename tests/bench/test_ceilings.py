"""What a machine can do is measured: a product and a copy, and the floor that follows from them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from foci.bench.ceilings import Ceilings, ceilings


def test_the_floor_is_the_slower_of_work_and_traffic() -> None:
    top = Ceilings(flops=100.0, bytes=10.0)
    assert top.floor(1000.0, 1.0) == 10.0
    assert top.floor(1.0, 1000.0) == 100.0


def test_ceilings_of_this_machine() -> None:
    top = ceilings(torch.float32, torch.device("cpu"), rounds=3)
    assert 1e8 < top.flops < 1e15
    assert 1e8 < top.bytes < 1e14


def test_no_product_is_waited_for_where_a_dtype_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a CPU without instructions for it took nine seconds a product of 1536, and eight of them."""
    sides, plain = list[int](), torch.mm

    def slow(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        sides.append(len(a))
        if a.dtype == torch.bfloat16:
            time.sleep(0.02 * (len(a) / 192) ** 3)
        return plain(a[:64, :64], b[:64, :64])

    monkeypatch.setattr(torch, "mm", slow)
    top = ceilings(torch.bfloat16, torch.device("cpu"), rounds=3)
    assert set(sides) == {192} and 0 < top.flops <= 2 * 192**3 / 0.02
    sides.clear()
    ceilings(torch.float32, torch.device("cpu"), rounds=3)
    assert set(sides) == {192, 384, 768, 1536} and sides[-1] == 1536
