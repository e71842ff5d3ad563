"""The chunked backend is the reference, forward and every gradient, in every dtype."""

from __future__ import annotations

import pytest
import torch

from foci.bench.memory import peak_memory
from foci.ops.selective_scan.api import selective_scan
from foci.ops.selective_scan.probes import sized
from foci.ops.selective_scan.spec import SPEC
from tests.ops.recurrences import BUDGET, CPU, answers, error, exact


@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
@pytest.mark.parametrize("case", SPEC.cases, ids=lambda case: case.name)
def test_it_is_the_reference(case, dtype: torch.dtype) -> None:
    inputs = case.make(dtype, CPU, 0)
    truth = answers(selective_scan, SPEC, exact(inputs), "reference")
    for name, got in answers(selective_scan, SPEC, inputs, "chunked").items():
        assert error(got, truth[name]) <= BUDGET[dtype], name


@pytest.mark.parametrize("length", [0, 1, 2, 31, 32, 33, 64, 65])
def test_any_length(length: int) -> None:
    inputs = sized(length).make(torch.float64, CPU, 0)
    ours, right = ([*selective_scan(**inputs, return_state=True, backend=name)] for name in ("chunked", "reference"))
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize(("B", "T", "D", "K"), [(0, 3, 2, 2), (3, 0, 2, 2), (3, 2, 0, 2), (3, 2, 2, 0)])
def test_nothing_to_scan(B: int, T: int, D: int, K: int) -> None:
    x, key = torch.ones(B, T, D, requires_grad=True), torch.ones(B, T, K)
    out, final = selective_scan(x, x, torch.ones(D, K), key, key, return_state=True, backend="chunked")
    assert out.shape == x.shape and final.shape == (B, D, K)
    assert torch.autograd.grad(out.sum() + final.sum(), x)[0].shape == x.shape


def test_rows_go_in_groups_that_a_cache_can_hold() -> None:
    """Wide enough that two of the three rows make a group."""
    draw = torch.Generator().manual_seed(0)
    x, dt, B, C = (torch.rand(3, 33, n, generator=draw) for n in (4096, 4096, 4, 4))
    A = -torch.rand(4096, 4, generator=draw)
    ours, right = (selective_scan(x, dt, A, B, C, backend=name)[0] for name in ("chunked", "reference"))
    assert error(ours, right) <= 1e-6


def test_the_states_of_all_tokens_are_never_held() -> None:
    x, A, key = torch.ones(1, 1024, 64), -torch.ones(64, 16), torch.ones(1, 1024, 16)
    call, backend = SPEC.bind(x, x, A, key, key), SPEC.backend("chunked").load()
    every = 4 * x.numel() * 16
    assert peak_memory(lambda: backend.forward(call), CPU) < every / 2
    made = backend.forward(call)
    assert peak_memory(lambda: backend.backward(call, made, made, [True] * 5 + [False] * 2), CPU) < every


@pytest.mark.parametrize(("D", "K"), [(1, 4), (4, 1), (3, 2)])
def test_the_gradient_that_comes_in_is_not_touched(D: int, K: int) -> None:
    x, A, key = torch.ones(1, 9, D), -torch.ones(D, K), torch.ones(1, 9, K)
    call, backend = SPEC.bind(x, x, A, key, key), SPEC.backend("chunked").load()
    made, given = backend.forward(call), torch.ones(1, D, K)
    backend.backward(call, made, (torch.ones_like(x), given), [True] * 5 + [False] * 2)
    assert given.eq(1).all()
