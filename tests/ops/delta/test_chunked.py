"""chunked against the equation in float64: every case, outputs and gradients; lengths, strides, what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from foci.ops.delta import chunked
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.spec import SPEC
from tests.ops.recurrences import BUDGET, answers, error, exact, inputs_of

NAMES = [case.name for case in SPEC.cases]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_equation(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(SPEC, name, dtype)
    found = answers(delta_rule, SPEC, inputs, "chunked")
    truth = answers(delta_rule, SPEC, exact(inputs), "reference")
    errors = {n: error(found[n], truth[n]) for n in truth if truth[n].numel()}
    assert all(e <= BUDGET[dtype] for e in errors.values()), errors


def problem(T: int, D: int | None = None) -> dict[str, Any]:
    inputs = {n: torch.randn(1, T, 2, 8, dtype=torch.float64) for n in "qkv"}
    inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
    shape = (1, T, 2) if D is None else (1, T, 2, D)
    return inputs | {"log_decay": -torch.rand(shape, dtype=torch.float64), "beta": torch.rand(1, T, 2).double()}


@pytest.mark.parametrize("D", [None, 8])
@pytest.mark.parametrize("T", [0, 1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_any_length(T: int, D: int | None) -> None:
    inputs = problem(T, D)
    found, truth = (answers(delta_rule, SPEC, inputs, b) if T else None for b in ("chunked", "reference"))
    if T == 0:
        out, state = delta_rule(**inputs, return_state=True)
        assert out.shape == (1, 0, 2, 8)
        assert state is not None
        assert not state.any()
    else:
        assert all(error(found[n], truth[n]) < 1e-12 for n in truth)


def test_many_slabs_with_and_without_states_kept() -> None:
    # 40 heads: a slab holds one chunk of each
    inputs = {n: x.expand(20, *x.shape[1:]).clone() for n, x in problem(200).items()}
    call = bind(**inputs)
    kept = chunked.forward(call, True)[2]
    assert kept.shape == (6, 40, 8, 8)  # four slabs, and room for two more
    assert not kept[0].any()
    assert len(chunked.forward(call)) == 2
    _, before = delta_rule(**{n: x[:, :192] for n, x in inputs.items()}, return_state=True)
    torch.testing.assert_close(kept[3], before.flatten(0, 1))
    found, truth = (answers(delta_rule, SPEC, inputs, backend) for backend in ("chunked", "reference"))
    assert all(error(found[n], truth[n]) < 1e-12 for n in truth)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "log_decay"])
def test_a_gradient_alone_is_the_same(wanted: str) -> None:
    inputs = problem(70, 8)
    every = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    delta_rule(**every)[0].square().sum().backward()
    alone = inputs | {wanted: inputs[wanted].clone().requires_grad_()}
    delta_rule(**alone)[0].square().sum().backward()
    torch.testing.assert_close(alone[wanted].grad, every[wanted].grad, rtol=0, atol=0)


def test_any_strides() -> None:
    fused = torch.randn(2, 70, 3, 4, 8)
    q, k, v = fused.unbind(2)
    rest = {"beta": torch.rand(2, 4, 70).transpose(1, 2)} if "beta" in SPEC.differentiable else {}
    packed = {n: x.contiguous() for n, x in {"q": q, "k": k, "v": v, **rest}.items()}
    assert torch.equal(delta_rule(q, k, v, **rest)[0], delta_rule(**packed)[0])
    leaf = fused.clone().requires_grad_()
    delta_rule(*leaf.unbind(2), **rest)[0].sum().backward()  # the gradient comes with stride 0
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_under_checkpointing() -> None:
    inputs = {n: x.requires_grad_() for n, x in problem(70).items()}
    plain = torch.autograd.grad(delta_rule(**inputs)[0].square().sum(), list(inputs.values()))
    again = checkpoint(lambda: delta_rule(**inputs)[0], use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(again.square().sum(), list(inputs.values())), strict=True):
        assert torch.equal(a, b)


def test_states_are_kept_at_the_borders_of_slabs_only() -> None:
    T = 4096
    inputs = {n: x.float() for n, x in problem(T).items()}
    call = bind(**inputs)
    assert chunked.kept(call).shape == (6, 2, 8, 8)  # four slabs, and room for two more
    assert chunked.kept(call._replace(offsets=torch.tensor([0, T]))).shape == (0, 2, 8, 8)
    assert chunked.reasons(call) == []
