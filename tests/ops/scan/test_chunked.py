"""The chunked backend is the reference, forward and every gradient, in every dtype."""

from __future__ import annotations

import pytest
import torch

from foci.bench.memory import peak_memory
from foci.ops.scan.api import scan
from foci.ops.scan.probes import sized
from foci.ops.scan.spec import SPEC
from tests.ops.recurrences import BUDGET, CPU, answers, error, exact


@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
@pytest.mark.parametrize("case", SPEC.cases, ids=lambda case: case.name)
def test_it_is_the_reference(case, dtype: torch.dtype) -> None:
    inputs = case.make(dtype, CPU, 0)
    truth = answers(scan, SPEC, exact(inputs), "reference")
    for name, got in answers(scan, SPEC, inputs, "chunked").items():
        assert error(got, truth[name]) <= BUDGET[dtype], name


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 15, 16, 17, 24, 25, 26, 99, 100, 101])
def test_any_length(length: int) -> None:
    inputs = sized(length).make(torch.float64, CPU, 0)
    ours, right = ([*scan(**inputs, return_state=True, backend=name)] for name in ("chunked", "reference"))
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("gate", [-3.3e-4, -1e-5])
def test_long_memories_stay_within_the_budget(gate: float, spread: float) -> None:
    """Products of decays just below 1 are rounded in one direction, whether the gates are equal or not."""
    draw = torch.Generator().manual_seed(0)
    x, noise = torch.rand(1, 8192, 3, generator=draw), torch.rand(1, 8192, 3, generator=draw) - 0.5
    inputs = {"x": x, "log_decay": gate * (1 + 2 * spread * noise)}
    found, truth = (answers(scan, SPEC, each, "chunked") for each in (inputs, exact(inputs)))
    errors = {n: error(found[n], truth[n]) for n in truth}
    assert max(errors.values()) < BUDGET[torch.float32], errors


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_nothing_to_scan(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, requires_grad=True)
    out, final = scan(x, torch.zeros(shape), return_state=True, backend="chunked")
    assert out.shape == shape and final.shape == (shape[0], shape[2])
    assert torch.autograd.grad(out.sum() + final.sum(), x)[0].shape == shape


def test_the_gradients_that_come_in_are_not_touched() -> None:
    x, given = torch.ones(1, 9, 2), (torch.ones(1, 9, 2), torch.ones(1, 2))
    call, backend = SPEC.bind(x, -x), SPEC.backend("chunked").load()
    backend.backward(call, backend.forward(call), given, [True, True, False])
    assert given[0].eq(1).all() and given[1].eq(1).all() and x.eq(1).all()


def test_gates_that_vanish_within_a_piece_leave_no_trace() -> None:
    """Products of decays underflow to 0, where a difference of sums would have been inf - inf."""
    gates = torch.full((1, 400, 3), -50.0)
    gates[:, ::7], gates[:, ::11] = 0.0, -torch.inf
    inputs = {"x": torch.randn(1, 400, 3), "log_decay": gates, "state": torch.randn(1, 3)}
    truth = answers(scan, SPEC, exact(inputs), "reference")
    for name, got in answers(scan, SPEC, inputs, "chunked").items():
        assert error(got, truth[name]) <= 1e-6, name


def test_memory_is_linear_in_tokens() -> None:
    def held(length: int) -> int:
        x = torch.ones(1, length, 16)
        call = SPEC.bind(x, -x)
        return peak_memory(lambda: SPEC.backend("chunked").load().forward(call), CPU)

    assert held(2048) <= 2.1 * held(1024)
