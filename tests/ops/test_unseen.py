"""Values that the compiler or vmap hides are checked when a call runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foci.ops.unseen import insist, unseen


def twice(x: Tensor) -> Tensor:
    insist((x < 5).all(), "x must be below 5")
    return x * 2


def test_seen_and_unseen() -> None:
    x = torch.arange(3)
    assert not unseen(x)
    torch.func.vmap(lambda row: [pytest.fail("seen") for _ in range(not unseen(x, row))] or row)(x)
    assert torch.equal(twice(x), x * 2)
    with pytest.raises(ValueError, match="x must be below 5"):
        twice(x + 5)


def test_any_row_of_a_vmap() -> None:
    rows = torch.arange(6).view(2, 3)
    with pytest.raises(ValueError, match="x must be below 5"):
        torch.func.vmap(twice)(rows)
    with pytest.raises(ValueError, match="x must be below 5"):
        torch.func.vmap(torch.func.vmap(twice))(rows[None])
    assert torch.equal(torch.func.vmap(twice)(rows.clamp(max=4)), rows.clamp(max=4) * 2)


def test_rows_of_a_vmap_that_are_differentiated() -> None:
    """The flag is wrapped by the gradient's level, and that by vmap's."""

    def slope(x: Tensor, n: Tensor) -> Tensor:
        return torch.func.grad(lambda x: twice(n * torch.ones_like(x, dtype=n.dtype)).sum() + x.sum())(x)

    x, n = torch.randn(2, 3), torch.arange(6).view(2, 3)
    assert torch.equal(torch.func.vmap(slope)(x, n.clamp(max=4)), torch.ones(2, 3))
    with pytest.raises(ValueError, match="x must be below 5"):
        torch.func.vmap(slope)(x, n)


def test_compiled_it_raises_when_it_runs() -> None:
    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.arange(3)), torch.arange(3) * 2)
    with pytest.raises(RuntimeError, match="x must be below 5"):
        compiled(torch.arange(3) + 5)


def test_what_cannot_be_traced_is_left_out() -> None:
    compiled = torch.compile(torch.func.vmap(twice), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.arange(6).view(2, 3)), torch.arange(6).view(2, 3) * 2)
    assert insist(torch.zeros((), dtype=torch.bool, device="meta"), "a GPU is not waited for") is None
