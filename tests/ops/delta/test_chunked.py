"""chunked against the equation in float64: every case, outputs and gradients; lengths, strides, what is kept."""

from __future__ import annotations

import pytest
import torch

from foci.ops.delta import chunked
from foci.ops.delta.api import delta_rule
from foci.ops.delta.spec import SPEC
from tests.ops.in_chunks import InChunks
from tests.ops.recurrences import BUDGET, answers, error, exact, inputs_of


@pytest.mark.parametrize("name", [case.name for case in SPEC.cases])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_equation(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(SPEC, name, dtype)
    found = answers(delta_rule, SPEC, inputs, "chunked")
    truth = answers(delta_rule, SPEC, exact(inputs), "reference")
    errors = {n: error(found[n], truth[n]) for n in truth if truth[n].numel()}
    assert all(e <= BUDGET[dtype] for e in errors.values()), errors


class TestInChunks(InChunks):
    spec, function, module = SPEC, staticmethod(delta_rule), chunked
