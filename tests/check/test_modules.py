"""foci.check.modules: a module's own rounding as yardstick, and the error that says heads were not merged."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foci.check.modules import farther, is_unmerged


def reference(layer: nn.Module, x: Tensor) -> tuple[Tensor]:
    return (layer(x),)


def test_the_yardstick_is_so_many_times_as_far_from_the_truth_and_differentiable() -> None:
    layer = nn.Linear(32, 8).to(torch.bfloat16)
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    (plain,) = farther(reference, "layer", 2)(layer=layer, x=x)
    truth = x.double() @ layer.weight.double().T + layer.bias.double()
    own = layer(x)
    assert plain.dtype == torch.float64
    torch.testing.assert_close(plain - truth, 2 * (own.double() - truth))
    assert torch.autograd.grad(plain.sum(), layer.weight)[0].any()
    assert layer.weight.dtype == torch.bfloat16


def error_of(*shapes: tuple[int, int]) -> RuntimeError:
    try:
        torch.randn(shapes[0]) @ torch.randn(shapes[1])
    except RuntimeError as error:
        return error
    raise AssertionError("the product exists")


def test_a_projection_that_gets_one_head_is_told_from_other_wrong_shapes() -> None:
    assert is_unmerged(error_of((6, 8), (32, 32)))
    assert not is_unmerged(error_of((6, 9), (32, 32)))
    assert not is_unmerged(error_of((6, 64), (32, 32)))
    assert not is_unmerged(RuntimeError("out of memory"))
