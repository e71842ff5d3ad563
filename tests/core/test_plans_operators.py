"""Every operator's calls have a plan, packed ones too: they do nothing but take memory and launch on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.cli_check import FUNCTIONS
from foci.core import plans, tune
from foci.ops import SPECS

pytest.importorskip("triton")
CASES = [(spec, case) for spec in SPECS.values() for case in spec.cases]


class Compiled:
    """A kernel that does nothing; what a call then gives is never looked at."""

    function = packed_metadata = None

    def run(self, *arguments: Any) -> None:
        return None


def start(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: Any, device: torch.device) -> None:
    if (noting := tune.NOTING.get()) is not None:
        noting(kernel, Compiled(), grid, arguments)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors pass for a GPU's."""
    monkeypatch.setattr("foci.ops.gpu.interpreting", lambda: True)
    monkeypatch.setattr(tune, "interpreting", lambda: False)
    monkeypatch.setattr(tune, "_start", start)
    monkeypatch.setattr(plans, "_here", lambda: -1)
    monkeypatch.setattr(plans, "_stream", lambda device: 0)
    monkeypatch.setattr(plans, "_PLANS", {})
    monkeypatch.setattr(plans, "_SEEN", set())


@pytest.mark.parametrize(("spec", "case"), CASES, ids=lambda value: value.name)
def test_a_call_and_its_backward_have_a_plan(spec: Any, case: Any) -> None:
    """What has none runs through the module's Python every time: a question that torch answers is enough."""
    given = case.make(torch.float16, torch.device("cpu"), 0)
    wanted = [x.requires_grad_() for x in given.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for _ in range(3):
        out = FUNCTIONS[spec.name](**given, backend="triton")[0]
        torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
    assert [(kind.__name__, plan is not None) for (kind, *_), plan in plans._PLANS.items()] == [
        ("forward", True),
        ("backward", True),
    ]
