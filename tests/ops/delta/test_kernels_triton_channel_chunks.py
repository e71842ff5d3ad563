"""The first launch in bfloat16, gates per channel: near rows and far ones, and what later tokens change."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta import kernels_triton_channel_chunks as chunks
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, error, exact

CPU = torch.device("cpu")
PROBLEM = Delta("", B=1, T=128, H=2, K=40, V=16, decay="channel", state=True)


def gated(kind: str, problem: Delta = PROBLEM) -> dict[str, Any]:
    """Sums of gates that come to where rows are far on the way, gates that forget all, one channel that does; bands."""
    inputs: dict[str, Any] = problem.case.make(torch.bfloat16, CPU, 0)
    gates = inputs["log_decay"]
    if kind == "meeting":
        gates.copy_(-4.0 * torch.rand(gates.shape, generator=torch.Generator().manual_seed(7)))
    elif kind == "cut":
        gates[:, 20] = -torch.inf
    elif kind == "closed":
        gates.fill_(-torch.inf)
    elif kind == "bands":
        gates.copy_(-30.0 * torch.rand(gates.shape, generator=torch.Generator().manual_seed(7)))
    elif kind == "then open":
        gates[:, :60] = -torch.inf
    elif kind == "one channel":
        gates[:, 10:30, :, 1], gates[:, 70, :, 3] = -9.0, -90.0
    return inputs


def forward(inputs: dict[str, Any], keep: bool = False) -> tuple[Tensor, ...]:
    return tuple(x.cpu() for x in gpu.forward(bind(**there(inputs)), keep))


def holds(inputs: dict[str, Any]) -> None:
    truth = delta_rule(**exact(inputs), return_state=True, backend="chunked")
    for found, wanted in zip(forward(inputs), truth, strict=True):
        assert found.isfinite().all() and error(found, wanted) <= BUDGET[torch.bfloat16]


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("kind", ["open", "meeting", "cut", "one channel", "closed", "bands", "then open"])
def test_the_budget_holds_for_near_rows_and_far_ones(kind: str) -> None:
    holds(gated(kind))


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("kind", ["cut", "one channel"])
def test_a_token_that_forgets_all_is_near(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second launch is left out, which a sum of gates further off alone needs."""
    launch = chunks.launch
    monkeypatch.setattr(chunks, "launch", lambda *given, FAR, **more: FAR or launch(*given, FAR=FAR, **more))
    with contextlib.nullcontext() if kind == "cut" else pytest.raises(AssertionError):
        holds(gated(kind))


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("alike", ["independent", "correlated", "identical"])
@pytest.mark.parametrize(
    "problem",
    [
        replace(PROBLEM, T=70, G=1, erase=True),
        replace(PROBLEM, T=90, offsets=(0, 0, 1, 66, 66, 90)),
        replace(PROBLEM, T=64, H=1, K=130),
    ],
    ids=["another key erases", "packed", "wider than what is read back at once"],
)
def test_the_budget_holds(problem: Delta, alike: str) -> None:
    holds(gated("open", replace(problem, alike=alike, beta=2.0, full=alike != "independent")))


@pytest.mark.usefixtures("halves")
def test_what_is_kept_for_gradients_changes_no_bit() -> None:
    inputs = gated("one channel")
    for one, other in zip(forward(inputs), forward(inputs, True), strict=False):
        assert one.equal(other)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("late", [-torch.inf, -1e30, -70.0])
def test_what_comes_later_changes_no_bit(late: float) -> None:
    inputs = gated("open")
    later = inputs | {"log_decay": inputs["log_decay"].clone()}
    later["log_decay"][:, 37:] = late
    assert forward(inputs)[0][:, :37].equal(forward(later)[0][:, :37])


@pytest.mark.usefixtures("halves")
def test_what_comes_later_changes_no_bit_of_rows_that_are_nearly_far() -> None:
    inputs = gated("open")
    inputs["log_decay"][:, :37], inputs["log_decay"][:, 37:] = -3.5, 0.0
    later = inputs | {"log_decay": inputs["log_decay"].clone()}
    later["log_decay"][:, 37:] = -torch.inf
    assert forward(inputs)[0][:, :37].equal(forward(later)[0][:, :37])


@pytest.mark.parametrize("target", tune.TARGETS.values(), ids=list(tune.TARGETS))
def test_it_is_taken_in_bfloat16_alone(target: tune.Target) -> None:
    for dtype, name in (torch.bfloat16, "near_chunks_kernel"), (torch.float16, "chunks_kernel"):
        call = bind(**there(PROBLEM.case.make(dtype, CPU, 0)))
        with tune.record_launches(target) as launches:
            gpu.forward(call)
        assert [launch.kernel.fn.__name__ for launch in launches[:-1]] == [name] * 2
        assert [launch.meta["FAR"] for launch in launches[:-1]] == [False, True]
        # Of other warps other instructions make a product, and near rows would change with what comes later.
        assert launches[0].meta["num_warps"] == launches[1].meta["num_warps"]
