"""The selective scan's Triton kernels, both directions, against the equation in float64, and how many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core.tune import TARGETS
from foci.ops.draw import Draw
from foci.ops.selective_scan import gpu
from foci.ops.selective_scan.api import selective_scan
from foci.ops.selective_scan.kernels_triton_backward import rule
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


def test_rates_without_end_leave_what_a_step_of_0_keeps() -> None:
    """A of -inf counts as half the lowest number there: two keys of opposite sign cancel, and are not inf less inf."""
    state, A = torch.tensor([[[1.5, -1.5, 1.0]]]), torch.tensor([[-torch.inf, -torch.inf, -1.0]])
    none, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 3)
    found = []
    for backend in ("triton", "chunked"):
        dt = none.clone().requires_grad_()
        selective_scan(none, dt, A, one, one, state=state, backend=backend)[0].sum().backward()
        found.append(dt.grad)
    assert found[0] is not None and found[0].item() == -1.0 and found[0].equal(found[1])


@pytest.mark.parametrize(
    ("K", "walks", "tiles"),
    [(16, 64, (16, 1)), (16, 1, (8, 1)), (128, 8, (2, 1)), (256, 8, (2, 2)), (512, 8, (2, 4))],
)
def test_one_warp_has_the_states_of_two_channels_and_few_walks_have_less(
    K: int, walks: int, tiles: tuple[int, int]
) -> None:
    config = rule(1024, K, walks, TARGETS["sm_90"])
    assert (config["BLOCK_D"], config.warps) == tiles
