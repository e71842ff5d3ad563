"""The selective scan's Triton kernels, forward and one token, against the equation in float64."""

from __future__ import annotations

import pytest
import torch

from foci.check.memory import strided
from foci.ops.draw import Draw
from foci.ops.selective_scan import gpu
from foci.ops.selective_scan.api import selective_scan
from foci.ops.selective_scan.spec import SPEC
from foci.ops.selective_scan.step import forward as step
from tests.ops.in_triton import DTYPES, there
from tests.ops.recurrences import BUDGET, CPU, error, exact
from tests.ops.selective_scan.problems import problem


@pytest.mark.parametrize("K", [1, 2, 5, 16, 33, 130, 512])
def test_any_number_of_states(K: int) -> None:
    inputs = problem(9, 3, K=K)
    found = selective_scan(**there(inputs), return_state=True, backend="triton")
    truth = selective_scan(**exact(inputs), return_state=True, backend="reference")
    assert all(error(a.cpu(), b) < BUDGET[torch.float32] for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_states_are_kept_where_they_were(packed: bool) -> None:
    """In the slots of their documents, so that nobody has to count the tokens before."""
    inputs = problem(70, N=2)
    inputs |= {"offsets": torch.tensor([0, 0, 70])} if packed else {"state": inputs["state"][1:]}
    _, _, kept = gpu.forward(SPEC.bind(**there(inputs)), True)
    assert tuple(kept.shape) == gpu.kept(SPEC.bind(**inputs)).shape
    for place in range(3):
        tokens = {n: x[:, : place * gpu.KEEP] for n, x in inputs.items() if n in ("x", "dt", "B", "C")}
        short = {"A": inputs["A"], "state": inputs["state"][-1:]} | tokens
        state = selective_scan(**exact(short), return_state=True, backend="chunked")[1]
        assert error(kept[place + packed].cpu(), state[0]) < BUDGET[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [1, 16, 20])
def test_a_step_is_one_launch_in_place(dtype: torch.dtype, K: int) -> None:
    draw = Draw(dtype, CPU, 0)
    inputs = {"x": draw.normal(3, 7), "dt": draw.uniform(3, 7), "A": draw.extremes(7, K), "B": draw.normal(3, K)}
    inputs |= {"C": draw.normal(3, K), "state": draw.state(3, 2 * K, 7)[:, ::2].transpose(1, 2), "skip": draw.normal(7)}
    held = inputs["state"].clone()
    for skip in (inputs["skip"], None):
        mine = there(inputs | {"skip": skip, "state": held.clone()})
        out = gpu.step(**mine)
        expected = step(**inputs | {"skip": skip, "state": (state := held.clone())})
        assert out.dtype == dtype
        assert error(out.cpu(), expected) < 1e-3 and error(mine["state"].cpu(), state) < 1e-6


def test_a_step_of_any_strides() -> None:
    draw, K = Draw(torch.float32, CPU, 0), 20
    inputs = {"x": draw.normal(3, 7), "dt": draw.uniform(3, 7), "A": draw.extremes(7, K), "B": draw.normal(3, K)}
    inputs |= {"C": draw.normal(3, K), "state": draw.state(3, 7, K), "skip": draw.normal(7)}
    mine = strided(there(inputs))
    mine["skip"] = mine["skip"].repeat_interleave(2)[::2]
    expected, out = step(**inputs), gpu.step(**mine)
    assert error(out.cpu(), expected) < 1e-3 and error(mine["state"].cpu(), inputs["state"]) < 1e-6
