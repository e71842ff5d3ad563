"""Helpers for Specs of modules: their yardstick of half precision, and the commonest shape error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from foci.core.spec import Outputs

UNMERGED = "heads are not merged before the output projection, which gets the channels of one head"


def is_unmerged(error: RuntimeError) -> bool:
    """Whether a matrix product failed because it got a fraction of the channels it takes."""
    found = re.search(r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", str(error))
    return found is not None and int(found[1]) < int(found[2]) and int(found[2]) % int(found[1]) == 0


def farther(reference: Callable[..., Outputs], module: str, times: float) -> Callable[..., Outputs]:
    """The `plain` of a Spec whose reference calls a module, the input named `module`.

    Its error is the module's own error in the working dtype, `times` as large: two correct implementations that round
    in another order differ by as much as either errs.
    """

    def plain(**inputs: Any) -> Outputs:
        own = reference(**inputs)
        exact = {f"held.{name}": value.double() for name, value in inputs[module].named_parameters()}
        wide = {name: _double(value) for name, value in inputs.items() if name != module}
        truth = functional_call(_Called(reference, module, inputs[module]), exact, (), wide)
        return tuple(right + times * (near - right) for near, right in zip(own, truth, strict=True))

    return plain


class _Called(nn.Module):
    """Wraps a reference as a module, so that functional_call can replace the parameters of the module it calls."""

    def __init__(self, reference: Callable[..., Outputs], name: str, held: nn.Module) -> None:
        super().__init__()
        self.reference, self.name, self.held = reference, name, held

    def forward(self, **inputs: Any) -> Outputs:
        return self.reference(**{self.name: self.held}, **inputs)


def _double(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_double(item) for item in value)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
