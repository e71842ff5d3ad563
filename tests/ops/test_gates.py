"""Gates: decayed products of a chunk against sums in the exponent, and where those sums would fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foci.ops.gates import Gates

M, R, K = 3, 2, 5
EXTREMES = torch.tensor([0.0, -1e-6, -20.0, -1e4, -torch.inf], dtype=torch.float64)


def draw(C: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    g = -2 * torch.rand(M, C, D, dtype=torch.float64)
    return g, torch.randn(M, C, R, K, dtype=torch.float64), torch.randn(M, C, K, dtype=torch.float64)


def sums(g: Tensor, own: bool) -> tuple[Tensor, Tensor]:
    """The exponent at each row and each column of a pair, from the chunk's start."""
    through = g.cumsum(1)
    return through if own else through - g, through


def literal(g: Tensor, x: Tensor, y: Tensor, own: bool) -> Tensor:
    """A[t,r,s], one pair of tokens after the other."""
    C = g.shape[1]
    A = x.new_zeros(M, C, R, C)
    for t in range(C):
        for s in range(t + 1 if own else t):
            weight = torch.exp(g[:, s + 1 : (t + 1 if own else t)].sum(1))
            A[:, t, :, s] = (x[:, t] * y[:, None, s] * weight[:, None]).sum(-1)
    return A


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("D", [1, K])
@pytest.mark.parametrize("C", [1, 2, 8, 16])
def test_products_and_ends(C: int, D: int, own: bool) -> None:
    g, x, y = draw(C, D)
    gates = Gates(g, own)
    torch.testing.assert_close(gates.pairs(x, y), literal(g, x, y, own))
    row, column = sums(g, own)
    torch.testing.assert_close(gates.rise, row.exp())
    torch.testing.assert_close(gates.fall, (column[:, -1:] - column).exp())
    torch.testing.assert_close(gates.total, column[:, -1].exp())


@pytest.mark.parametrize("gate", [-1e-6, -3.3e-4, -1e-2, -torch.inf])
def test_the_decay_of_a_chunk_is_rounded_once(gate: float) -> None:
    g = torch.full((1, 64, K), gate)
    found, true = Gates(g).total.double(), g.double().sum(1).exp()
    torch.testing.assert_close(found, true, rtol=1e-7, atol=0)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("D", [1, K])
def test_extreme_gates_are_exact_where_sums_cancel(D: int, own: bool) -> None:
    _, x, y = draw(16, D)
    g = EXTREMES[torch.randint(0, 5, (M, 16, D))]
    expected = literal(g, x, y, own)
    found = Gates(g.float(), own).pairs(x.float(), y.float())
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-6)
    row, column = sums(g, own)
    assert not (row[:, :, None] - column[:, None]).isfinite().all()  # or this would be no test


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("D", [1, K])
@pytest.mark.parametrize("C", [1, 4, 16])
def test_gradients_of_the_products(C: int, D: int, own: bool) -> None:
    leaves = [z.requires_grad_() for z in draw(C, D)]
    A = literal(*leaves, own) + 0 * sum(z.sum() for z in leaves)  # one token may have no pair
    dA = torch.randn_like(A)
    expected = torch.autograd.grad(A, leaves, dA, allow_unused=True)
    g, x, y = (z.detach() for z in leaves)
    gates = Gates(g, own)
    dx, dy, dg = gates.pairs_backward(dA, gates.pairs(x, y), x, y)
    for found, wanted in zip((dg, dx, dy), expected, strict=True):
        torch.testing.assert_close(found, torch.zeros_like(found) if wanted is None else wanted)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("D", [1, K])
def test_gradients_of_the_ends(D: int, own: bool) -> None:
    g = draw(8, D)[0].requires_grad_()
    row, column = sums(g, own)
    ends = row.exp(), (column[:, -1:] - column).exp(), column[:, -1].exp()
    given = [torch.randn(*end.shape[:-1], K, dtype=torch.float64) for end in ends]
    (expected,) = torch.autograd.grad([end.expand_as(x) for end, x in zip(ends, given, strict=True)], g, given)
    rise, fall, _ = ends
    found = Gates(g.detach(), own).backward(given[0] * rise.detach(), given[1] * fall.detach(), given[2])
    torch.testing.assert_close(found, expected)


def test_the_future_does_not_choose_how_the_past_is_rounded() -> None:
    g, x, y = (z.float() for z in draw(16, K))
    late = torch.where(torch.arange(16)[:, None] >= 8, -torch.inf, g)
    assert torch.equal(Gates(g).pairs(x, y)[:, :8], Gates(late).pairs(x, y)[:, :8])
