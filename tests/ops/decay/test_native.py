"""The compiled backend against the equation: every case, outputs and gradients, and what in_native.py asks."""

from __future__ import annotations

import pytest
import torch

from foci.core.select import explain
from foci.ops.decay import native
from foci.ops.decay.api import linear_attention
from foci.ops.decay.spec import SPEC
from tests.ops.in_native import BUILT, InNative
from tests.ops.recurrences import BUDGET, answers, error, exact, inputs_of

pytestmark = BUILT


@pytest.mark.parametrize("name", [case.name for case in SPEC.cases])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_equation_or_is_refused(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(SPEC, name, dtype)
    assert SPEC.bind is not None
    call = SPEC.bind(**inputs)
    if native.reasons(call):
        assert explain(SPEC, call).chosen == "chunked"
        return
    found = answers(linear_attention, SPEC, inputs, "native")
    truth = answers(linear_attention, SPEC, exact(inputs), "reference")
    errors = {n: error(found[n], truth[n]) for n in truth if truth[n].numel()}
    assert all(e <= BUDGET[dtype] for e in errors.values()), errors


class TestInNative(InNative):
    spec, function, module = SPEC, staticmethod(linear_attention), native
