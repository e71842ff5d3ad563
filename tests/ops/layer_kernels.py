"""Parts of layers by kernels against torch's operations in float64, for tests of both files of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.in_triton import DEVICE
from tests.ops.recurrences import error

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What a kernel does not write is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def by_kernel(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ in ("_KeptBackward", "_TurnedBackward")


def apart(
    run: Callable[..., Tensor], leaves: list[Tensor | None], flat: bool = False, gives: torch.dtype | None = None
) -> list[float]:
    """How far values and gradients are from those in float64, by which no kernel runs; flat: of a sum."""
    given = [None if x is None else x.detach().to(DEVICE).requires_grad_() for x in leaves]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    found, truth = run(*given), run(*exact)
    assert by_kernel(found) and not by_kernel(truth)
    assert found.dtype == (given[0].dtype if gives is None else gives)  # type: ignore[union-attr]
    dy = torch.ones(1, 1).expand(truth.shape) if flat else torch.randn(truth.shape).to(found.dtype)
    wanted = [x for x in exact if x is not None]
    expected = torch.autograd.grad(truth, wanted, dy.double())
    got = torch.autograd.grad(found, [x for x in given if x is not None], dy.to(found))
    assert all(a.dtype == b.dtype for a, b in zip(got, (x for x in given if x is not None), strict=True))
    pairs = zip((found, *got), (truth, *expected), strict=True)
    return [error(a.detach().cpu(), b.detach()) for a, b in pairs]


def drawn(B: int, T: int, D: int, size: int, dtype: torch.dtype, bias: bool = True) -> list[Tensor | None]:
    """Tokens, weights and bias of a convolution."""
    torch.manual_seed(size + T)
    x, weight = torch.randn(B, T, D), torch.randn(D, 1, size)
    return [x.to(dtype), weight.to(dtype), torch.randn(D).to(dtype) if bias else None]
