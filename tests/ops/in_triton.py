"""What the Triton kernels of a recurrence promise: run by the interpreter (TRITON_INTERPRET=1) or on a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import triton  # noqa: F401  its interpreter is on or off from here

from foci.core.spec import Spec
from foci.core.tune import Launch, interpreting
from tests.ops.recurrences import BUDGET, answers, error, exact, inputs_of, told_of_nothing, unasked

if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1, which `make test` sets for these", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def there(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs on the device where kernels run."""
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def given(launch: Launch) -> dict[str, Any]:
    """A recorded launch's arguments by the kernel's names of them."""
    return dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))


class InTriton:
    """Every case of the Spec against the equation; a subclass says of which operator, and adds its own lengths."""

    spec: Spec
    function: Any
    module: ModuleType  # the backend's: ops/<operator>/gpu.py

    def apart(self, inputs: dict[str, Any], truth_by: str = "reference") -> dict[str, float]:
        """How far outputs and gradients of the kernels are from those of the equation in float64, by name."""
        found = answers(self.function, self.spec, there(inputs), "triton")
        truth = answers(self.function, self.spec, exact(inputs), truth_by)
        return {n: error(found[n].cpu(), truth[n]) for n in truth if truth[n].numel()}

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_case_equals_the_equation_or_is_refused(self, dtype: torch.dtype) -> None:
        assert self.spec.bind is not None
        ran = 0
        for case in self.spec.cases:
            inputs = inputs_of(self.spec, case.name, dtype)
            if self.module.reasons(self.spec.bind(**there(inputs))):
                assert 0 in self.spec.bind(**inputs).sizes, case.name
                continue
            errors = self.apart(inputs)
            ran += 1
            assert all(e <= BUDGET[dtype] for e in errors.values()), (case.name, errors)
        assert ran > 3

    def test_a_state_that_nobody_asks_for_is_not_made(self) -> None:
        """Though in no other kernel: where it would be stored, 0 is told."""
        assert self.spec.bind is not None
        ran = 0
        for case in self.spec.cases:
            call = self.spec.bind(**there(inputs_of(self.spec, case.name, torch.float16)))
            if not self.module.reasons(call):
                state = unasked(self.spec, self.module.forward, call)
                assert state.untyped_storage().nbytes() == 0 or not getattr(call, "causal", True), case.name
                assert told_of_nothing(self.spec, "triton", call), case.name
                ran += 1
        assert ran > 3
