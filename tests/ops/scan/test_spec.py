"""The Spec: declared outputs are real, the ops keep their schema, and the work is counted."""

from __future__ import annotations

import pytest
import torch

from foci.ops import SPECS
from foci.ops.scan.api import scan
from foci.ops.scan.spec import SPEC, outputs, work
from tests.ops.recurrences import CPU, answers, inputs_of


def test_it_is_listed() -> None:
    assert SPECS["scan"] is SPEC
    assert [backend.name for backend in SPEC.backends] == ["triton", "chunked", "reference"]


@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
@pytest.mark.parametrize("case", SPEC.cases, ids=lambda case: case.name)
def test_declared_shapes_dtypes_and_strides_are_real(case, dtype: torch.dtype) -> None:
    inputs = case.make(dtype, CPU, 0)
    for backend in ("chunked", "reference"):
        found = answers(scan, SPEC, inputs, backend)
        for declared in outputs(SPEC.bind(**inputs)):
            real = found[declared.name]
            assert (tuple(real.shape), real.dtype) == (declared.shape, declared.dtype), (backend, declared.name)
            assert real.is_contiguous(), (backend, declared.name)
        for name in SPEC.differentiable:
            if name in inputs:
                assert found[f"d{name}"].shape == inputs[name].shape, (backend, name)
                assert found[f"d{name}"].dtype == inputs[name].dtype, (backend, name)


def test_the_ops_keep_their_schema() -> None:
    call = SPEC.bind(**inputs_of(SPEC, "packed", torch.float32))
    made, tests = SPEC.backend("chunked").load().forward(call), ("test_schema", "test_faketensor")
    needs = [getattr(call, name) is not None for name in SPEC.differentiable]
    ops = torch.ops.foci
    torch.library.opcheck(ops.scan_chunked_fwd.default, tuple(call), test_utils=tests)
    torch.library.opcheck(ops.scan_chunked_bwd.default, (*made, *made, needs, *call), test_utils=tests)


def test_work_counts_a_multiply_add_a_number_and_each_byte_once() -> None:
    x = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    done = work(SPEC.bind(x, x.float()))
    assert done.flops == 2 * x.numel() and done.bytes == (2 + 4 + 2) * x.numel()
