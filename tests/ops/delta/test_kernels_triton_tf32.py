"""A GPU's TF32 products cut digits off; the interpreter's do not. With that put into it the budgets still hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foci.core.tune import interpreting
from foci.ops.delta.api import delta_rule
from foci.ops.delta.spec import SPEC
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, answers, error, exact, inputs_of

from triton.runtime import interpreter  # isort: skip  after Triton's presence is known

if not interpreting():
    pytest.skip("a GPU cuts digits off by itself: there the other tests see it", allow_module_level=True)

PRODUCT = interpreter.InterpreterBuilder.create_dot


def _cut(x: Any) -> Any:
    if x.data.dtype != np.float32:
        return x
    return interpreter.TensorHandle((x.data.view(np.int32) & -8192).view(np.float32), x.dtype)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Products of float32 take 11 digits of each number where TF32 is asked; gives what was asked."""
    asked = []

    def product(self: Any, a: Any, b: Any, d: Any, input_precision: Any, most: Any) -> Any:
        if a.data.dtype == np.float32:
            asked.append(input_precision.name)
        if input_precision.name == "TF32":
            a, b = _cut(a), _cut(b)
        return PRODUCT(self, a, b, d, input_precision, most)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
    return asked


@pytest.mark.parametrize(
    "name",
    ["beta of 2", "identical keys, beta of 1", "correlated keys, beta of 2", "extreme gates per head", "everything"],
)
def test_the_budget_of_half_precision_holds(name: str, cut: list[str]) -> None:
    inputs: dict[str, Any] = inputs_of(SPEC, name, torch.float16)
    found = answers(delta_rule, SPEC, there(inputs), "triton")
    truth: dict[str, Tensor] = answers(delta_rule, SPEC, exact(inputs), "reference")
    errors = {n: error(found[n].cpu(), truth[n]) for n in truth if truth[n].numel()}
    assert "TF32" in cut
    assert all(e <= BUDGET[torch.float16] for e in errors.values()), errors
