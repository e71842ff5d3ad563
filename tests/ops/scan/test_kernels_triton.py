"""The scan's Triton kernels against the equation in float64, and how many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.check.memory import strided
from foci.core.tune import TARGETS, record_launches
from foci.ops.draw import Draw
from foci.ops.scan import gpu
from foci.ops.scan.api import scan
from foci.ops.scan.spec import SPEC
from foci.ops.scan.step import forward as step
from tests.ops.in_scans import InScans
from tests.ops.in_triton import DEVICE, DTYPES, there
from tests.ops.recurrences import CPU, error


class TestScan(InScans):
    spec, function, module = SPEC, staticmethod(scan), gpu

    def problem(self, T: int, D: int = 5, B: int = 1, N: int | None = None) -> dict[str, Any]:
        draw = Draw(torch.float32, CPU, T)
        return {"x": draw.normal(B, T, D), "log_decay": draw.gates(B, T, D), "state": draw.state(N or B, D)}

    def extreme(self, T: int) -> dict[str, Any]:
        return self.problem(T, 3) | {"log_decay": Draw(torch.float32, CPU, T).extremes(1, T, 3)}

    def spoiled(self, name: str, x: torch.Tensor, at: int) -> torch.Tensor:
        if name != "state":
            x[:, at:] = -torch.inf if name == "log_decay" else 1e4
        return x

    def test_launches(self) -> None:
        packed = self.problem(600, N=2) | {"offsets": torch.tensor([0, 300, 600])}
        assert self.launches(self.problem(100)) == (["forward_kernel"], ["backward_kernel"])
        for inputs, first in ((self.problem(600), ["ends_kernel"]), (packed, ["rest_kernel", "ends_kernel"])):
            assert self.launches(inputs) == ([*first, "forward_kernel"], [*first, "backward_kernel"])


@pytest.mark.parametrize(
    ("B", "T", "D", "channels", "stretch"),
    [(8, 2048, 2048, 32, 0), (1, 8192, 4096, 64, 256), (1, 900, 4096, 64, 32), (1, 127, 256, 32, 0)],
)
def test_few_sequences_are_cut_and_have_two_channels_a_thread(
    B: int, T: int, D: int, channels: int, stretch: int
) -> None:
    x = torch.empty(B, T, D, dtype=torch.bfloat16, device="meta")
    call = SPEC.bind(x=x, log_decay=x)  # type: ignore[misc]
    with record_launches(TARGETS["sm_90"]) as seen:
        outputs = gpu.forward(call)
        gpu.backward(call, outputs, outputs, [True, True, False])
    assert {(launch.meta["BLOCK_D"], launch.meta["STRETCH"]) for launch in seen} == {(channels, stretch)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_one_launch_in_place(dtype: torch.dtype) -> None:
    draw = Draw(dtype, CPU, 0)
    x, gates, state = draw.normal(3, 70), draw.extremes(3, 70), draw.state(3, 140)[:, ::2]
    expected, wanted = step(x, gates, held := state.clone()), held
    x, gates, found = (each for each in there({"x": x, "g": gates, "s": state.to(DEVICE)}).values())
    out = gpu.step(x.expand(3, 70), gates, found)
    assert out.dtype == dtype
    assert error(out.cpu(), expected) < 1e-3 and error(found.cpu(), wanted) < 1e-6


def test_a_step_of_any_strides() -> None:
    draw = Draw(torch.float32, CPU, 0)
    x, gates, state = draw.normal(3, 70), draw.extremes(3, 70), draw.state(3, 70)
    expected, wanted = step(x, gates, held := state.clone()), held
    mine = strided(there({"x": x, "g": gates, "s": state}))
    assert error(gpu.step(*mine.values()).cpu(), expected) < 1e-6 and error(mine["s"].cpu(), wanted) < 1e-6
