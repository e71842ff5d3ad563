"""The turned walks, forward and backward: that they are taken where they fit, and the budget there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core import tune
from foci.core.tune import Config, interpreting
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from foci.ops.delta.spec import SPEC
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, answers, error, exact, unasked

from foci.ops.delta import kernels_triton_channel_walks as walks  # isort: skip  after Triton's presence is known

if not interpreting():
    pytest.skip("a GPU takes them for more heads than tests have: `foci check` asks there", allow_module_level=True)

CPU = torch.device("cpu")
# So many columns of states as the interpreter's four processors take at once.
PROBLEMS = (
    Delta("state", B=1, T=70, H=2, K=128, V=128, decay="channel", state=True),
    Delta("whole", B=2, T=128, H=2, K=128, V=128, decay="channel", alike="correlated", beta=2.0, full=True),
    Delta(
        "packed", B=1, T=90, H=1, K=128, V=104, decay="channel", offsets=(0, 66, 90), state=True, erase=True,
        beta=2.0,
    ),
)  # fmt: skip


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_the_budget_holds_and_they_are_taken(problem: Delta, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("forward", "backward"):
        real = getattr(walks, name)
        monkeypatch.setattr(walks, name, lambda *given, real=real, name=name: (taken.append(name), real(*given)))
    inputs: dict[str, Any] = problem.case.make(torch.bfloat16, CPU, 0)
    found = answers(delta_rule, SPEC, there(inputs), "triton")
    truth = answers(delta_rule, SPEC, exact(inputs), "reference")
    errors = {n: error(found[n], truth[n]) for n in truth if truth[n].numel()}
    assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors
    assert set(taken) == {"forward", "backward"}


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("B", [1, 3])
def test_without_a_state_or_gradients_outputs_are_the_same(B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where programs would take turns, inference walks twice as many columns at once.

    The interpreter's products are numpy's, and of another width they are added up in another order on some processors:
    3e-8 of the final state, nothing of the output, of which a number here and there may round otherwise.
    """
    inputs = Delta("", B=B, T=70, H=2, K=128, V=128, decay="channel").case.make(torch.bfloat16, CPU, 0)
    call, taken, real = bind(**there(inputs)), list[int](), walks.forward
    monkeypatch.setattr(walks, "forward", lambda *given: (taken.append(given[-1]["BLOCK_V"]), real(*given)))
    for one, other in zip(gpu.forward(call), gpu.forward(call, True), strict=False):
        assert one.equal(other) if B == 1 else error(one, other) <= (1e-6 if one.dtype == torch.float32 else 1e-4)
    assert taken == [64 if B == 1 else 128, 64]
    unasked(SPEC, gpu.forward, call)


def test_where_they_fit() -> None:
    hopper, before = tune.TARGETS["sm_90"], tune.TARGETS["sm_80"]
    some, many = (Config({"BLOCK_K": 128, "BLOCK_V": columns}) for columns in (64, 128))
    assert walks.fits(128, 128, some, hopper, 64) and walks.fits(128, 200, some, hopper, 128)
    assert walks.fits(128, 128, many, hopper, 128) and not walks.fits(128, 128, many, hopper, 64)
    assert not walks.fits(128, 128, some, before, 64)
    assert not walks.fits(100, 128, some, hopper, 64) and not walks.fits(128, 100, some, hopper, 64)
    assert not walks.fits(128, 128, Config({"BLOCK_K": 128, "BLOCK_V": 32}), hopper, 64)
