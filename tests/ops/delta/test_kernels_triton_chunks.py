"""The first launch in bfloat16: heads of any width; what later tokens and gradients change; where it is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from foci.ops.draw import Draw
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, error, exact

CPU = torch.device("cpu")


def inputs_of(problem: Delta) -> dict[str, Any]:
    inputs: dict[str, Any] = problem.case.make(torch.bfloat16, CPU, 0)
    return inputs


def forward(inputs: dict[str, Any], keep: bool = False) -> tuple[Tensor, ...]:
    return tuple(x.cpu() for x in gpu.forward(bind(**there(inputs)), keep))


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("alike", ["independent", "correlated", "identical"])
@pytest.mark.parametrize(
    "problem",
    [
        Delta("", B=2, T=128, H=4, G=2, K=64, V=16, decay="token"),
        Delta("", B=1, T=70, H=1, K=130, V=16, decay="token", erase=True, state=True),
        Delta("", B=1, T=64, H=1, K=256, V=8),
        Delta("", B=1, T=64, H=1, K=20, V=8, decay="token", gates=Draw.extremes),
        Delta("", B=1, T=90, H=2, K=16, V=8, decay="token", offsets=(0, 0, 1, 66, 66, 90), state=True),
        Delta("", B=1, T=65, H=1, K=264, V=8, decay="token"),  # too wide for it
    ],
    ids=lambda problem: f"K={problem.K}",
)
def test_the_budget_holds(problem: Delta, alike: str) -> None:
    inputs = inputs_of(replace(problem, alike=alike, beta=2.0, full=alike != "independent"))
    truth = delta_rule(**exact(inputs), return_state=True, backend="chunked")
    for found, wanted in zip(forward(inputs), truth, strict=True):
        assert found.isfinite().all() and error(found, wanted) <= BUDGET[torch.bfloat16]


@pytest.mark.usefixtures("halves")
def test_what_is_kept_for_gradients_changes_no_bit() -> None:
    inputs = inputs_of(Delta("", B=1, T=130, H=2, G=1, K=32, V=16, decay="token", state=True))
    for one, other in zip(forward(inputs), forward(inputs, True), strict=False):
        assert one.equal(other)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("start", [5, 17, 37, 50])
def test_what_comes_later_changes_no_bit(start: int) -> None:
    inputs = inputs_of(Delta("", B=1, T=64, H=1, K=16, V=8, alike="correlated", decay="token", beta=2.0, full=True))
    later = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    for name in ("q", "k", "v", "beta"):
        later[name][:, start:] *= -0.5
    later["log_decay"][:, start:] = -torch.inf
    assert forward(inputs)[0][:, :start].equal(forward(later)[0][:, :start])


@pytest.mark.parametrize(("target", "widest"), [("sm_80", 128), ("sm_90", 256), ("sm_120", 256), ("gfx942", 0)])
def test_where_it_is_taken(target: str, widest: int) -> None:
    for K in (64, 128, 256, 512):
        for dtype, decay in (torch.bfloat16, "token"), (torch.bfloat16, ""), (torch.float16, "token"):
            call = bind(**there(Delta("", B=1, T=70, H=1, K=K, V=64, decay=decay).case.make(dtype, CPU, 0)))
            with tune.record_launches(tune.TARGETS[target]) as launches:
                gpu.forward(call)
            wanted = "token_chunks_kernel" if dtype == torch.bfloat16 and widest >= K else "chunks_kernel"
            assert launches[0].kernel.fn.__name__ == wanted
