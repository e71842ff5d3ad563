"""One thread, which problems this small are faster on, and a GPU that is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from foci.core import device
from foci.ops.softmax import aten_cuda
from tests.ops.softmax.fused import stand_in


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons ask the ledger about the tensors' platform: say it is a Hopper card with today's libraries."""
    place = device.Platform("cuda", (2, 13, 0), (13, 0), (9, 20, 0), (9, 0))
    monkeypatch.setattr(aten_cuda, "platform", lambda _: place)


@pytest.fixture
def counted(hopper: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors pass for a GPU's, in float64; which kernels are asked for reasons."""
    return stand_in(monkeypatch)
