"""A callable of q, k and v as an operator: what it may take and return, and parameters hidden in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foci.core.errors import ShapeError, Unsupported
from foci.parallel.opaque import opaque
from foci.parallel.operators import Letters


def mean(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
    return scale * v.mean(1, keepdim=True).expand(-1, q.shape[1], -1, -1).repeat_interleave(q.shape[2] // v.shape[2], 2)


def tensors(H: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, H, 5), torch.randn(2, 6, 2, 5), torch.randn(2, 6, 2, 7)


def test_it_runs_what_it_was_given() -> None:
    q, k, v = tensors()
    operator = opaque(mean)
    assert operator.name == "mean" and operator.results == (Letters(("B", "T", "H", "V")),)
    bound = operator.bind((q, k), {"v": v, "scale": 2.0})
    torch.testing.assert_close(operator.returns(operator.run(bound.call, None), bound), mean(q, k, v, 2.0))
    assert operator.facts(bound.call)["scale"] == 2.0 and operator.tokens(bound.call) == {"q": 3, "k": 6, "v": 6}


def test_what_cannot_be_told_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(TypeError, match="2 of q, k, v were given"):
        opaque(mean).bind((q, k), {})
    with pytest.raises(ShapeError, match="k has 2 heads but q has 3"):
        opaque(mean).bind((q[:, :, :3], k, v), {})
    with pytest.raises(ShapeError, match="k has shape"):
        opaque(mean).bind((q, k[..., :2], v), {})
    with pytest.raises(Unsupported, match="scale is a tensor"):
        opaque(mean).bind((q, k, v), {"scale": torch.ones(())})


def test_what_it_returns_is_checked() -> None:
    q, k, v = tensors()
    for wrong, said in (
        (lambda q, k, v: mean(q, k, v)[:, :2], r"torch.float32 \[2, 2, 4, 7\]; expected torch.float32 \[2, 3, 4, 7\]"),
        (lambda q, k, v: mean(q, k, v).double(), "torch.float64"),
        (lambda q, k, v: (mean(q, k, v), None), "a tuple"),
    ):
        operator = opaque(wrong)
        with pytest.raises(TypeError, match=said):
            operator.run(operator.bind((q, k, v), {}).call, None)


def test_a_hidden_parameter_is_found_however_deep() -> None:
    q, k, v = tensors()
    table = torch.ones(7, requires_grad=True)
    operator = opaque(lambda q, k, v: mean(q, k, v * table.exp()).relu())
    call = operator.bind((q, k, v), {}).call
    with pytest.raises(Unsupported, match=r"depends on a tensor \[7\] that wants a gradient"):
        operator.run(call, None)
    with torch.no_grad():
        assert operator.run(call, None)[0].shape == (2, 3, 4, 7)
