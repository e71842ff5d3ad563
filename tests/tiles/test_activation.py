"""Activations and their slopes are torch's, far from 0 too."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import interpreting
from foci.tiles.activation import activate, slope, softplus

if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1, which `make test` sets for these", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")
TORCH = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid, None: lambda x: x * 1}


@triton.jit
def _both(x_ptr, y_ptr, dy_ptr, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, activate(x, NAME))
    tl.store(dy_ptr + i, slope(x, NAME))


@pytest.mark.parametrize("name", TORCH)
def test_values_and_slopes(name: str | None) -> None:
    x = torch.tensor([0.0, -0.0, 1e-3, -1e-3, 0.5, -0.5, 1, -1.2785, 3, -3, 12, -12, 60, -60, 300, -300], device=DEVICE)
    y, dy = torch.empty_like(x), torch.empty_like(x)
    _both[(1,)](x, y, dy, name)
    leaf = x.double().requires_grad_()
    truth = TORCH[name](leaf)
    torch.testing.assert_close(y.double(), truth.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(dy.double(), torch.autograd.grad(truth.sum(), leaf)[0], rtol=1e-5, atol=1e-6)


@triton.jit
def _softplus(x_ptr, y_ptr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 16)
    tl.store(y_ptr + i, softplus(tl.load(x_ptr + i)))


def test_a_softplus_keeps_its_digits_far_below_0() -> None:
    x = torch.tensor([0.0, 1e-3, -1e-3, 0.5, -0.5, 1, -1, 3, -3, 12, -12, 20, -20, -80, 300, -300], device=DEVICE)
    y = torch.empty_like(x)
    _softplus[(1,)](x, y)
    truth = torch.nn.functional.softplus(x.double(), threshold=1e3)
    torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-38)
