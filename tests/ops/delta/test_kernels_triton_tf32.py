"""A GPU's products cut digits off; the interpreter's do not. With that put into it the budgets still hold.

So they do in bfloat16, which the interpreter computes wrongly by itself: there it is put right, and TMA is played too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foci.core.tune import interpreting
from foci.ops.delta import pieces
from foci.ops.delta.api import delta_rule
from foci.ops.delta.cases import Delta
from foci.ops.delta.spec import SPEC
from foci.ops.stretches import cut_into
from tests.ops.in_bfloat16 import PRODUCT, by_three, halves, shortened  # noqa: F401  a fixture
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, answers, error, exact, inputs_of

from triton.runtime import interpreter  # isort: skip  after Triton's presence is known

if not interpreting():
    pytest.skip("a GPU cuts digits off by itself: there the other tests see it", allow_module_level=True)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Products of float32 take 11 digits of each number where TF32 is asked, else 16; gives what was asked.

    By three of TF32 the interpreter makes what a GPU makes by three of bfloat16, of float16's tiles.
    """
    asked = []

    def product(self: Any, a: Any, b: Any, d: Any, input_precision: Any, most: Any) -> Any:
        if a.data.dtype == np.float32:
            asked.append(input_precision.name)
            if input_precision.name == "TF32x3":
                return by_three(a, b, d, input_precision, most)
        if input_precision.name == "TF32":
            a, b = shortened(a), shortened(b)
        return PRODUCT(self, a, b, d, input_precision, most)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
    return asked


@pytest.mark.parametrize(
    "name",
    [
        "beta of 2", "identical keys, beta of 1", "identical keys, beta of 2", "correlated keys, beta of 2",
        "extreme gates per head", "everything",
    ],
)  # fmt: skip
def test_the_budget_of_half_precision_holds(name: str, cut: list[str]) -> None:
    """In float16 ten times over: but for sums of gates per channel, parted before, no product is of one TF32."""
    inputs: dict[str, Any] = inputs_of(SPEC, name, torch.float16)
    found = answers(delta_rule, SPEC, there(inputs), "triton")
    truth: dict[str, Tensor] = answers(delta_rule, SPEC, exact(inputs), "reference")
    errors = {n: error(found[n].cpu(), truth[n]) for n in truth if truth[n].numel()}
    channels = inputs.get("log_decay", inputs["beta"]).dim() == 4
    assert "TF32x3" in cut and ("TF32" in cut) == channels
    assert all(e <= BUDGET[torch.float16] / 10 for e in errors.values()), errors


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize(
    "problem",
    [
        Delta("whole chunks", B=2, T=128, H=4, G=2, K=16, V=16, decay="token", state=True),
        Delta("token", B=1, T=150, H=2, G=1, K=16, V=24, decay="token", state=True),
        Delta("channel", B=1, T=70, H=2, K=16, V=16, decay="channel", state=True),
        Delta("packed", B=1, T=150, H=1, K=16, V=8, decay="token", erase=True, offsets=(0, 3, 3, 140, 150), state=True),
        Delta("padded", B=1, T=70, H=1, K=20, V=12, beta=2.0),
        Delta("correlated", B=1, T=200, H=1, K=16, V=16, alike="correlated", beta=2.0, full=True),
    ],
    ids=lambda problem: problem.name,
)
def test_the_budget_of_bfloat16_holds(problem: Delta) -> None:
    inputs: dict[str, Any] = problem.case.make(torch.bfloat16, torch.device("cpu"), 0)
    found = answers(delta_rule, SPEC, inputs, "triton")
    truth: dict[str, Tensor] = answers(delta_rule, SPEC, exact(inputs), "reference")
    errors = {n: error(found[n], truth[n]) for n in truth if truth[n].numel()}
    assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("decay", ["token", ""])
def test_it_holds_in_pieces_that_begin_by_maps(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole chunks and several heads, so that a map for TMA has the next head's values where these have none."""
    monkeypatch.setattr(pieces, "cut", lambda N, B, T, packed, *_: cut_into(128, N, T, packed))
    inputs: dict[str, Any] = Delta("", B=2, T=384, H=4, G=2, K=16, V=16, decay=decay, state=True).case.make(
        torch.bfloat16, torch.device("cpu"), 0
    )
    found = answers(delta_rule, SPEC, inputs, "triton")
    truth: dict[str, Tensor] = answers(delta_rule, SPEC, exact(inputs), "reference")
    errors = {n: error(found[n], truth[n]) for n in truth if truth[n].numel()}
    assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors
