"""A backend's first output by an op of torch: where it is taken, and that a call like one before is not bound again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from foci.core import plans
from foci.core.fast_path import (
    BackendRunner,
    CallTemplate,
    must_be_one_op,
    torch_op,
    with_placeholders,
    wrap_backend,
    wrap_compute,
    wrap_run,
)
from foci.core.library import Runner
from tests.core.test_library import SPEC, Call, draw

CALL = Call(torch.randn(2, 3), torch.randn(3), None, 3.0, None, True)


class Rows(Tensor):
    """A subclass."""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The backend of the toy operator; its `torch_op` is there for a call with a weight."""
    module = SPEC.backend("opaque").load()

    def compute(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (x.mul(3.0) * weight + torch.is_autocast_enabled("cpu"),)

    monkeypatch.setattr(module, "torch_op", lambda call: None if call.weight is None else compute, raising=False)
    return module


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on tensors of the CPU are looked up too, in caches that are empty at first."""
    monkeypatch.setattr(plans, "_current_device", lambda: -1)
    monkeypatch.setattr(plans, "on_gpu", lambda x: True)
    monkeypatch.setattr(plans, "_GUARDED", {})
    monkeypatch.setattr(plans, "_OPERATOR_PLANS", {})


def test_it_makes_of_the_tensors_the_first_output(toy: ModuleType) -> None:
    compute = torch_op(SPEC.backend("opaque"), CALL)
    assert compute is not None
    (found,) = compute(*CALL[:2])
    assert found.equal(3.0 * CALL.x * CALL.weight)


def test_some_calls_and_some_backends_have_none(toy: ModuleType) -> None:
    assert torch_op(SPEC.backend("opaque"), CALL._replace(weight=None)) is None
    assert torch_op(SPEC.backend("plain"), CALL) is None


def test_autocast_rounds_nothing_in_it(toy: ModuleType) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compute = torch_op(SPEC.backend("opaque"), CALL)
        assert compute is not None and compute(*CALL[:2])[0].equal(3.0 * CALL.x * CALL.weight)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_graph_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def within(x: Tensor) -> Tensor:
        seen.append(must_be_one_op(CALL))
        return x + 1

    assert not must_be_one_op(CALL) and must_be_one_op(CALL._replace(x=CALL.x.as_subclass(Rows)))
    torch.func.vmap(within)(CALL.x)
    torch.func.grad(lambda x: within(x).sum())(CALL.x)
    torch.jit.trace(within, CALL.x, check_trace=False)
    for early in (False, True):
        make_fx(within, pre_dispatch=early)(CALL.x)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        within(CALL.x)
    assert seen == [True] * 6 and not must_be_one_op(CALL)


@pytest.mark.parametrize("way", [_Mode, lambda: torch.device("cpu"), torch.profiler.profile, torch.no_grad])
def test_who_watches_makes_no_graph(way: Callable[[], Any]) -> None:
    """Else a checkpoint that is computed again without a mode would save other tensors."""
    with way():
        assert not must_be_one_op(CALL)


@pytest.mark.parametrize("way", [nullcontext, torch.no_grad])
def test_a_call_like_one_before_is_not_bound_again(way: Callable[[], Any], toy: ModuleType, as_on_a_gpu: None) -> None:
    bound: list[Tensor] = []

    def bind(x: Tensor, weight: Tensor | None, factor: float) -> Call:
        bound.append(x)
        return CALL._replace(x=x, weight=weight, factor=factor)

    run, weight = Runner.__new__(Runner), draw(3)
    run.spec, run._runners = SPEC, {}
    with way():
        for place in range(4):
            x = draw(2, 3).requires_grad_()
            (found,) = run.given(bind, (x, weight), {"factor": 3.0}, "opaque", single=True)
            assert torch.allclose(found, 3.0 * x * weight) and found.requires_grad == (way is nullcontext)
            assert len(bound) == 1, place


def test_what_is_made_of_a_tensor_that_was_given_is_made_every_time(toy: ModuleType, as_on_a_gpu: None) -> None:
    """Such as autocast's: it is no view of what was given."""
    run = Runner.__new__(Runner)
    run.spec, run._runners = SPEC, {}
    for _ in range(4):
        x, weight = draw(2, 3), draw(3)
        (found,) = run.given(lambda x, weight: CALL._replace(x=x + 1, weight=weight), (x, weight), {}, "opaque", True)
        assert torch.allclose(found, 3.0 * (x + 1) * weight)


def test_a_call_whose_tensors_are_those_that_were_given_is_computed_of_them() -> None:
    x, weight, other = torch.ones(2, 3), torch.ones(3), torch.ones(2, 3)

    def compute(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (x * weight,)

    through = wrap_compute((x, None, weight), CALL._replace(x=x, weight=weight), compute)
    assert through is not None and through(None, [2 * other, weight])[0].equal(2 * other)
    for call in (CALL._replace(x=other, weight=weight), CALL._replace(x=x, weight=None)):
        assert wrap_compute((x, weight), call, compute) is None


def test_what_is_a_view_of_all_that_was_given_is_viewed_again_and_nothing_else_is_taken() -> None:
    x, weight = torch.randn(2, 3), torch.randn(1, 3)
    seen: list[Any] = []

    def run(play: Any, rest: CallTemplate, values: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append((play, rest))
        return values

    call = CALL._replace(x=x, weight=weight.view(3))
    through = wrap_run((x, 7, weight), call, run, backward=len)
    assert through is not None
    given = [torch.randn(2, 3), torch.randn(1, 3)]
    kept = list(given)
    values = through(None, given)
    assert [each is mine for each, mine in zip(given, kept, strict=True)] == [True, True]
    assert values[0] is given[0] and values[1].shape == (3,) and values[1].data_ptr() == given[1].data_ptr()
    assert values[2:] == call[2:] and with_placeholders(call)[:2] == [Tensor, Tensor]
    assert seen[0][0] is None and seen[0][1].shared and seen[0][1].backward is len and not CallTemplate(call).shared
    square = torch.randn(3, 3)
    for given_x, taken in (
        (x, torch.randn(6)), (x, x[:1]), (x, x[1:].view(3)), (square, square.mT[:]), (x, x.double()),
        (x, x.view(6)[::2]), (x.view(torch.int32), x.view(6)),
    ):  # fmt: skip
        assert wrap_run((given_x, weight), CALL._replace(x=taken, weight=weight), run) is None
    assert wrap_run((x,), call, run) is None and wrap_run((x, weight), call, None) is None


@pytest.mark.parametrize("train", [False, True])
def test_a_backend_that_specializes_is_asked_once_and_takes_gradients_its_own_way(
    monkeypatch: pytest.MonkeyPatch, train: bool
) -> None:
    """Under autocast neither way is rounded; the way back not even where autocast was off before."""
    backend = SPEC.backend("opaque")
    x, weight = torch.randn(2, 3, requires_grad=train), torch.randn(3)
    call, told = CALL._replace(x=x, weight=weight), []

    def specialize(call: Any) -> tuple[Any, Any]:
        return (lambda call: ("forward", plans.autocast_dtype(call[0]))), (
            lambda call: ("backward", plans.autocast_dtype(call[0]))
        )

    def training(forward: Any, rest: CallTemplate, call: Any) -> Any:
        told.append(rest.backward)
        return ("trained", *forward())

    monkeypatch.setattr(backend.load(), "specialize", specialize, raising=False)
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            through = wrap_backend(
                BackendRunner(lambda call: ("plain", type(call)), training), backend, (x, weight), call
            )
            assert through is not None
            assert through(None, [x, weight]) == (("trained",) if train else ()) + ("forward", None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [back(call) for back in told] == [("backward", None)] * 2 * train
    for way, module in (
        (BackendRunner(lambda call: ("plain", type(call))), "opaque"),
        (BackendRunner(lambda call: ("plain", type(call)), training), "plain"),
    ):
        through = wrap_backend(way, SPEC.backend(module), (x, weight), call)
        assert through is not None and through(None, [x, weight]) == ("plain", Call)
