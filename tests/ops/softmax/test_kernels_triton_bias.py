"""Gradients of a bias: how tiles share their work, and sums of parts."""

from __future__ import annotations

import pytest
import torch
import triton  # noqa: F401  its interpreter is on or off from here

from foci.core.tune import TARGETS, interpreting, record_launches
from foci.ops.softmax import gpu
from foci.ops.softmax.kernels_triton_bias import total
from foci.ops.softmax.spec import SPEC

if not interpreting():
    pytest.skip("these run in Triton's interpreter: TRITON_INTERPRET=1", allow_module_level=True)


@pytest.mark.parametrize(("P", "N"), [(1, 1), (3, 5), (16, 64), (40, 130)])
def test_total(P: int, N: int) -> None:
    parts = torch.randn(P, N)
    found = total(parts, torch.empty(N, 1, dtype=torch.float16))
    assert found.shape == (N, 1)
    assert torch.allclose(found[:, 0].float(), parts.sum(0), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("shape", "launched"),
    [((4, 8, 1024, 1024), 1), ((8, 1024, 1024), 1), ((1024, 1024), 2), ((1024,), 2), ((8, 1, 1), 2), ((1,), 2)],
)
def test_a_bias_that_stands_for_much_is_shared_by_many_programs(shape: tuple[int, ...], launched: int) -> None:
    """At least a program for every processor, and then one launch more to add up."""
    q = torch.empty(4, 1024, 8, 64, dtype=torch.bfloat16, device="meta")
    call = SPEC.bind(q, q, q, bias=torch.empty(shape, device="meta"))
    outputs = tuple(output.empty(q) for output in SPEC.outputs(call))  # type: ignore[misc]
    with record_launches(TARGETS["sm_90"]) as seen:
        *_, dbias, _ = gpu.backward(call, outputs, outputs, [False, False, False, True, False])  # type: ignore[arg-type]
    assert dbias is not None and dbias.shape == shape and dbias.dtype == torch.float32
    of_bias = [launch for launch in seen if launch.kernel.__name__ in ("bias_kernel", "sum_kernel")]
    assert len(of_bias) == launched
    assert of_bias[0].grid[0] >= TARGETS["sm_90"].processors
