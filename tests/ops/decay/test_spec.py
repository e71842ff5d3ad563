"""The Spec: declared outputs are the real ones; the operator's answers are those of its equation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foci.core.spec import Case
from foci.ops import SPECS
from foci.ops.decay.call import bind
from foci.ops.decay.spec import SPEC

CPU = torch.device("cpu")


def test_it_is_listed_under_its_name() -> None:
    assert SPECS[SPEC.name] is SPEC
    assert SPEC.recurrent


@pytest.mark.parametrize("case", SPEC.cases, ids=lambda case: case.name)
def test_declared_outputs_are_real(case: Case) -> None:
    call = bind(**case.make(torch.float32, CPU, 0))
    assert SPEC.outputs is not None
    for backend in (each for each in SPEC.backends if not each.reasons(call)):
        made = backend.load().forward(call)
        for output, tensor in zip(SPEC.outputs(call), made, strict=True):
            assert (output.shape, output.dtype) == (tuple(tensor.shape), tensor.dtype)
            assert tensor.is_contiguous()


def test_the_reference_is_the_equation_and_plain_stays_in_its_dtype() -> None:
    inputs = SPEC.cases[0].make(torch.float64, CPU, 0)
    torch.testing.assert_close(SPEC.reference(**inputs), SPEC.plain(**inputs))
    half = {n: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
    exact, rough = SPEC.reference(**half)[0].double(), SPEC.plain(**half)[0].double()
    assert 0 < (exact - rough).norm() / exact.norm() < 0.2
