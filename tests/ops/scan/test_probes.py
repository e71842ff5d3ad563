"""Parts are cases of their own and make the whole; the future does not matter; bad input is refused by name."""

from __future__ import annotations

import torch

from foci.ops.scan.probes import sized
from foci.ops.scan.spec import SPEC
from tests.ops.in_slices import InScanProbes
from tests.ops.recurrences import CPU


class TestProbes(InScanProbes):
    spec = SPEC

    def test_sized(self) -> None:
        for n in (0, 1, 33):
            assert sized(n).make(torch.float32, CPU, 0)["x"].shape == (1, n, 4)
