"""The inverse of the triangle, where power series fail: keys alike, beta of 2."""

from __future__ import annotations

import pytest
import torch

from foci.ops.delta.triangle import inverse


@pytest.mark.parametrize("C", [1, 2, 8, 64])
def test_inverse(C: int) -> None:
    N = torch.randn(3, C, C, dtype=torch.float64) / C**0.5
    found = inverse(N)
    eye = torch.eye(C, dtype=torch.float64).expand_as(N)
    torch.testing.assert_close((eye + N.tril(-1)) @ found, eye)
    assert torch.equal(found, found.tril())


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("cosine", [0.9, 1.0])
def test_keys_alike(cosine: float, beta: float) -> None:
    k = cosine**0.5 * torch.eye(65)[0] + (1 - cosine) ** 0.5 * torch.eye(65)[1:]
    N = (beta * k @ k.T)[None]
    wanted = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + N.double().tril(-1))
    error = (inverse(N) - wanted).norm() / wanted.norm()
    assert error < 1e-5
    powers = torch.eye(64)  # the series (I - N)(I + N^2)(I + N^4)..., which is exact on paper
    power = -N[0].tril(-1)
    for _ in range(6):
        powers, power = powers + power @ powers, power @ power
    if cosine == 1.0 and beta == 2.0:
        assert not (powers - wanted[0]).norm() / wanted.norm() < 1
