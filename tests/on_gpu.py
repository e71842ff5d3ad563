"""A plugin that turns tests of a CPU into tests of a GPU. Run it by hand where there is one.

    python -m pytest -p tests.on_gpu tests/integrations tests/nn tests/compat tests/accelerate tests/ops/softmax

Tensors that a test makes without saying where lie on the GPU, those of parameters and of a test module's constants
too, but under `with torch.device`; a CPU's generator draws the numbers that it draws elsewhere, and autocast is the
GPU's. Some tests cannot hold there: of what a CPU chooses or says, of values that are looked at on a CPU alone, of one
device beside another; nor what torch's compiler traces, where it makes tensors, as what makes them is none of torch's
own here.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

CPU, GPU = torch.device("cpu"), torch.device(os.environ.get("FOCI_TESTS_ON", "cuda:0"))
MADE = ["empty", "zeros", "ones", "full", "eye", "tensor", "arange", "linspace", "rand", "randn", "randint", "randperm"]
FILLS = ["normal_", "uniform_", "random_", "exponential_", "bernoulli_"]


def _asked() -> bool:
    """Whether one is, by `with torch.device`, that all lie somewhere."""
    return any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def placed(make: Any) -> Any:
    """A function that makes tensors, on the GPU where no device is named."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None or _asked():
            return make(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is None or generator.device.type != "cpu":
            return make(*args, **kwargs | {"device": GPU})
        here = kwargs | {"device": CPU, "requires_grad": False}
        return make(*args, **here).to(GPU).requires_grad_(kwargs.get("requires_grad", False))

    return made


def filled(fill: Any) -> Any:
    """A method that fills a tensor, by a CPU's generator with the CPU's numbers."""

    @functools.wraps(fill)
    def drawn(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        generator = kwargs.get("generator")
        if generator is None or generator.device.type == self.device.type:
            return fill(self, *args, **kwargs)
        with torch.no_grad():
            return self.copy_(fill(torch.empty(self.shape, dtype=self.dtype, device=CPU), *args, **kwargs))

    return drawn


class Autocast(torch.autocast):
    """The CPU's is the GPU's, of the CPU's default dtype."""

    def __init__(self, device_type: str, dtype: torch.dtype | None = None, **options: Any) -> None:
        if device_type == "cpu":
            device_type, dtype = GPU.type, dtype or torch.bfloat16
        super().__init__(device_type, dtype, **options)


def moved(value: Any) -> Any:
    """On the GPU, as are the tensors within."""
    if type(value) is Tensor and not value.is_meta:
        return value.detach().to(GPU).requires_grad_(value.requires_grad)
    if isinstance(value, torch.device):
        return GPU if value == CPU else value
    if type(value) is dict:
        return {key: moved(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(moved(part) for part in value)
    if type(value).__module__.startswith("foci.") and hasattr(value, "__dataclass_fields__"):
        value = copy.copy(value)
        for name in value.__dataclass_fields__:
            object.__setattr__(value, name, moved(getattr(value, name)))
    return value


def pytest_collection_finish(session: pytest.Session) -> None:
    for module in [module for name, module in sys.modules.items() if name.startswith("tests.") and name != __name__]:
        for name, value in [(name, value) for name, value in vars(module).items() if name.isupper()]:
            setattr(module, name, moved(value))
    for item in session.items:
        for name, value in (item.callspec.params if hasattr(item, "callspec") else {}).items():
            item.callspec.params[name] = moved(value)


@pytest.fixture(autouse=True)
def _on_gpu(_seed: None) -> Iterator[None]:
    with ExitStack() as stack:
        for place, names, wrap in ((torch, MADE, placed), (Tensor, FILLS, filled)):
            for name in names:
                stack.enter_context(mock.patch.object(place, name, wrap(getattr(place, name))))
        stack.enter_context(mock.patch.object(torch, "autocast", Autocast))
        yield
