"""What the delta rule adds to the probes: its own bad arguments, and a future in which it stays bounded."""

from __future__ import annotations

import pytest
import torch

from foci.ops.delta.cases import CASES
from foci.ops.delta.probes import PROBES, sized
from foci.ops.delta.spec import SPEC
from tests.ops.in_slices import InProbes

CPU, F64 = torch.device("cpu"), torch.float64


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_future_is_bounded(case) -> None:
    inputs = case.make(F64, CPU, 0)
    found = PROBES.future(case, inputs)
    if inputs["v"].shape[1] == 1:
        assert found is None
        return
    assert found.inputs["beta"].max() <= 2
    assert torch.allclose(found.inputs["k"].norm(dim=-1), inputs["k"].norm(dim=-1))
    assert all(torch.isfinite(output).all() for output in SPEC.reference(**found.inputs))


class TestProbes(InProbes):
    spec = SPEC


def test_sized() -> None:
    for n in (0, 1, 65):
        assert sized(n).make(torch.float32, CPU, 0)["beta"].shape == (1, n, 2)
