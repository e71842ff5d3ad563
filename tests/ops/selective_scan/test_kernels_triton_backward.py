"""The selective scan's Triton kernels, both directions, against the equation in float64, and how many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.ops.draw import Draw
from foci.ops.selective_scan import gpu
from foci.ops.selective_scan.api import selective_scan
from foci.ops.selective_scan.spec import SPEC
from tests.ops.in_scans import InScans
from tests.ops.recurrences import BUDGET, CPU
from tests.ops.selective_scan.problems import problem

TOKENS = ("x", "dt", "B", "C")


class TestSelectiveScan(InScans):
    spec, function, module = SPEC, staticmethod(selective_scan), gpu

    def problem(self, T: int, D: int = 5, B: int = 1, N: int | None = None) -> dict[str, Any]:
        return problem(T, D, B, N)

    def extreme(self, T: int) -> dict[str, Any]:
        """dt > 0 where A may be -inf: at 0 the gradient of dt is as large as a number can be, in each dtype another."""
        return problem(T, 3) | {"A": Draw(torch.float32, CPU, T).extremes(3, 3)}

    def spoiled(self, name: str, x: torch.Tensor, at: int) -> torch.Tensor:
        if name in TOKENS:
            x[:, at:] = 1e30 if name == "dt" else 1e2
        return x

    @pytest.mark.parametrize("K", [1, 16, 40, 512])
    def test_any_number_of_states(self, K: int) -> None:
        assert max(self.apart(problem(5, 3, K=K)).values()) < BUDGET[torch.float32]

    def test_launches(self) -> None:
        packed = self.problem(600, N=2) | {"offsets": torch.tensor([0, 300, 600])}
        last = ["backward_kernel", "totals_kernel"]
        assert self.launches(self.problem(100)) == (["forward_kernel"], last)
        for inputs, first in ((self.problem(600), ["ends_kernel"]), (packed, ["rest_kernel", "ends_kernel"])):
            assert self.launches(inputs) == ([*first, "forward_kernel"], [*first, *last])
