"""A step of training that is played gives the numbers of one that is not, to the last bit: real kernels, interpreted.

CPU tensors pass for a GPU's, and a launch that was noted is interpreted on whatever lies at the addresses it is given.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import foci
from foci.core import library, plans, replay, tune
from foci.core.tune import interpreting
from foci.ops import layer_parts
from foci.ops.masks import Causal, Packed

pytest.importorskip("triton")
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(not interpreting(), reason="on a GPU tests/core/test_library_graph.py plays plans")
T, H, K = 70, 2, 16


class Noted:
    """A compiled kernel's stand-in: interprets the kernel on what lies at addresses, of the dtypes that were noted."""

    function = packed_metadata = None

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], meta: dict[str, Any]) -> None:
        self.kernel, self.meta = kernel, meta
        self.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in arguments]

    def run(self, *given: Any) -> None:
        grid, arguments = given[:3], given[9:]
        found = [x if dtype is None else _at(x, dtype) for x, dtype in zip(arguments, self.dtypes, strict=True)]
        self.kernel[grid](*found, **self.meta)


def _at(address: int, dtype: torch.dtype) -> Tensor:
    """A tensor that begins there; kernels go on from it by strides of their own."""
    if not address:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


def start(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: Any, device: torch.device) -> None:
    meta = {name: value for name, value in meta.items() if name != "launch_pdl"}
    if "BESIDE" in meta:  # the interpreter runs one launch behind the other and knows no word for more
        meta["BESIDE"] = False
    with _disable_current_modes():  # what the interpreter asks of torch is nothing that the call does
        kernel[grid](*arguments, **meta)
    if (callback := tune.LAUNCH_CALLBACK.get()) is not None:
        callback(kernel, Noted(kernel, arguments, meta), (*grid, 1, 1)[:3], arguments)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("_FUNCTION_PLANS", {}), ("_SEEN", set()), ("_GUARDED", {}), ("_OPERATOR_PLANS", {})):
        monkeypatch.setattr(plans, name, found)
    monkeypatch.setattr(tune, "interpreting", lambda: False)
    builder = interpreter.interpreter_builder
    known = (*builder.options.allowed_dot_input_precisions, "bf16x3")  # as a GPU's Triton knows it: float16 asks for it
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, allowed_dot_input_precisions=known))
    monkeypatch.setattr(tune, "_start", start)
    monkeypatch.setattr(plans, "_current_device", lambda: -1)
    monkeypatch.setattr(plans, "on_gpu", lambda x: isinstance(x, Tensor))
    monkeypatch.setattr(replay, "_stream", lambda device: 0)
    monkeypatch.setattr(library, "compile_ahead", lambda *_: "")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for every call whose arguments were checked."""
    found: list[str] = []
    for function in FUNCTIONS:
        module = sys.modules[function.__module__]
        name = "bound" if hasattr(module, "bound") else "bind"

        def bind(*given: Any, plain: Any = getattr(module, name), **named: Any) -> Any:
            found.append("checked")
            return plain(*given, **named)

        monkeypatch.setattr(module, name, bind)
    return found


def half(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float16).requires_grad_()


def gate(*shape: int) -> Tensor:
    return (-torch.rand(shape)).requires_grad_()


def rows() -> dict[str, Any]:
    return {name: half(1, T, H, K) for name in "qkv"} | {"backend": "triton"}


def normal(k: Tensor) -> Tensor:
    return torch.nn.functional.normalize(k.detach().float(), dim=-1).to(k.dtype).requires_grad_()


OFFSETS = torch.tensor([0, 5, 40, T], dtype=torch.int32)
FUNCTIONS = (foci.attention, foci.linear_attention, foci.delta_rule, foci.scan, foci.selective_scan)
PROBLEMS: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    "softmax": (foci.attention, lambda: rows() | {"mask": Causal(), "sink": gate(H)}),
    "softmax, packed": (foci.attention, lambda: rows() | {"mask": Causal() & Packed(OFFSETS.clone())}),
    "no decay": (foci.linear_attention, rows),
    "per head": (foci.linear_attention, lambda: rows() | {"log_decay": gate(H)}),
    "per token, state": (
        foci.linear_attention,
        lambda: rows() | {"log_decay": gate(1, T, H), "state": gate(1, H, K, K), "return_state": True},
    ),
    "per channel, bonus": (
        foci.linear_attention, lambda: rows() | {"log_decay": gate(1, T, H, K), "bonus": gate(H, K)}
    ),
    "packed, gates need none": (
        foci.linear_attention,
        lambda: rows() | {"log_decay": gate(1, T, H).detach(), "offsets": OFFSETS.clone()},
    ),
    "delta": (
        foci.delta_rule,
        lambda: rows() | {"k": normal(half(1, T, H, K)), "log_decay": gate(1, T, H), "beta": (-gate(1, T, H)).detach()},
    ),
    "delta, per channel": (
        foci.delta_rule,
        lambda: rows()
        | {"k": normal(half(1, T, H, K)), "log_decay": gate(1, T, H, K), "beta": torch.rand(1, T, H).requires_grad_()}
        | {"return_state": True},
    ),
    "scan": (foci.scan, lambda: {"x": half(1, T, 16), "log_decay": gate(1, T, 16), "backend": "triton"}),
    "selective_scan": (
        foci.selective_scan,
        lambda: {"x": half(1, T, 16), "dt": half(1, T, 16), "A": gate(16, 4), "backend": "triton"}
        | {name: half(1, T, 4) for name in "BC"},
    ),
}  # fmt: skip


def leaves(given: dict[str, Any]) -> list[Tensor]:
    return [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]


def trained(function: Any, given: dict[str, Any]) -> list[Tensor]:
    """All results and, through all of them, all gradients."""
    outs, draw = results(function, given), torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=draw).to(out.dtype) for out in outs]
    return [*outs, *torch.autograd.grad(outs, leaves(given), grads)]


def results(function: Any, given: dict[str, Any]) -> list[Tensor]:
    outs = function(**given)
    return [x for x in (outs if isinstance(outs, tuple) else (outs,)) if x is not None]


def written(run: Callable[[], Any]) -> Any:
    """What it gives where no plan is played or made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_usable", lambda: False)
        return run()


def same(found: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_played_step_of_training_is_the_step(name: str, bound: list[str]) -> None:
    function, make = PROBLEMS[name]
    for turn in range(4):
        given = make()
        right = written(lambda given=given: trained(function, given))
        bound.clear()
        assert same(trained(function, given), right), turn
        assert len(bound) == (turn < 2)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_played_call_without_gradients_is_the_call(name: str, bound: list[str]) -> None:
    function, make = PROBLEMS[name]
    for turn in range(4):
        given = {argument: x.detach() if isinstance(x, Tensor) else x for argument, x in make().items()}
        right = written(lambda given=given: results(function, given))
        bound.clear()
        assert same(results(function, given), right), turn
        assert len(bound) == (turn < 2)


def test_gradients_reach_what_the_tensors_were_made_of_and_add_up() -> None:
    """One tensor in two places, tensors that are no leaves, and a second backward through the same graph."""
    function, weight = foci.linear_attention, half(K, K)

    def step(x: Tensor, gates: Tensor) -> list[Tensor]:
        q = x @ weight
        out, _ = function(q, q, x * 2, log_decay=-gates.exp(), backend="triton")
        first = torch.autograd.grad(out.float().sin().sum(), (x, weight, gates), retain_graph=True)
        return [*first, *torch.autograd.grad(out.float().cos().sum(), (x, weight, gates))]

    for _ in range(4):
        x, gates = half(1, T, H, K), gate(1, T, H)
        right = written(lambda x=x, gates=gates: step(x, gates))
        assert same(step(x, gates), right)
    assert any(plan is not None and plan.wrapper is not None for plan in plans._OPERATOR_PLANS.values())


def test_under_checkpointing_a_call_is_made_again_and_gives_the_same() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return foci.linear_attention(q, k, v, backend="triton")[0].float().square().sum()

    for _ in range(4):
        given = leaves(rows())
        right = torch.autograd.grad(written(lambda given=given: loss(*given)), given)
        assert same([*torch.autograd.grad(checkpoint(loss, *given, use_reentrant=False), given)], [*right])


def test_a_tensor_that_was_written_after_the_call_is_found_out_and_a_second_derivative_refused() -> None:
    for turn in range(4):
        given = rows() | {"v": half(1, T, H, K) * 1}
        out, _ = foci.linear_attention(**given)
        given["v"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        given = rows()
        out, _ = foci.linear_attention(**given)
        (first,) = torch.autograd.grad(out.float().square().sum(), given["q"], create_graph=True)
        with pytest.raises(foci.Unsupported, match="second derivative"):
            torch.autograd.grad(first.sum(), given["q"])
        assert turn < 2 or any(plan is not None for plan in plans._OPERATOR_PLANS.values())


def test_what_autograd_is_told_of_an_output_is_the_same() -> None:
    saved: list[tuple[int, ...]] = []
    kinds = []
    for _ in range(4):
        given = rows() | {"return_state": True}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append((*x.shape,)) or x, lambda x: x):
            out, state = foci.linear_attention(**given)
        kinds.append((out.grad_fn.name(), state.requires_grad, out.is_leaf, out._is_view(), out._version, tuple(saved)))
        saved.clear()
    assert len(set(kinds)) == 1


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_parts_of_layers_are_played(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and without gradients; not where rows must be copied first, and no less right."""
    played: list[int] = []
    replay_plan = plans.replay_plan
    monkeypatch.setattr(plans, "replay_plan", lambda *given: played.append(1) or replay_plan(*given))
    monkeypatch.setattr(layer_parts, "unsuitable", lambda *_: [])
    places = torch.arange(T)[None]

    def given() -> list[Tensor]:
        x, gates = (half(K, T).t() if turned else half(T, K) for _ in range(2))
        return [x, gates, half(K), half(K, 1, 3), half(K), half(K // 2)]

    def step(x: Tensor, gates: Tensor, weight: Tensor, taps: Tensor, bias: Tensor, rates: Tensor) -> list[Tensor]:
        y = layer_parts.Norm(2, activation="silu")(x, weight, gates)
        z = layer_parts.turn(layer_parts.convolve(x[None], taps, bias, "silu")[:, :, None], places, 1e4, 4)
        return [y, z, layer_parts.gate(x, bias, rates, -1.0), layer_parts.weigh(x, rates)]

    for turn in range(4):
        leaves = given()

        def trained(leaves: list[Tensor] = leaves) -> list[Tensor]:
            outs = step(*leaves)
            return [*outs, *torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs])]

        right = written(trained)
        played.clear()
        assert same(trained(), right), turn
        assert len(played) == (0 if turn < 2 else 4 if turned else 10)
    with torch.no_grad():
        for _ in range(4):
            leaves = given()
            played.clear()
            assert same(step(*leaves), written(lambda leaves=leaves: step(*leaves)))
            assert len(played) == (2 if turned else 5)


def test_a_played_step_of_a_convolution_changes_its_own_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where autograd sees it, and unchecked. A turned tail has its own plan; a token that lies in its tail, none."""
    played: list[int] = []
    checked: list[int] = []
    replay_plan, reads = plans.replay_plan, layer_parts._reads
    monkeypatch.setattr(layer_parts, "_reads", lambda *given: checked.append(1) or reads(*given))
    monkeypatch.setattr(plans, "replay_plan", lambda *given: played.append(1) or replay_plan(*given))
    monkeypatch.setattr(layer_parts, "unsuitable", lambda *_: [])
    taps, bias = torch.randn(K, 1, 4), torch.randn(K)
    with torch.no_grad():
        for turn in range(4):
            for kind in ("whole", "one of many", "turned", "in its tail"):
                before, x = torch.randn(3, 3, K), torch.randn(3, K)
                tail = torch.cat([before, before])[3:] if kind == "one of many" else before.clone()
                tail = before.mT.contiguous().mT if kind == "turned" else tail
                x = tail[:, 1] if kind == "in its tail" else x
                joined, version = torch.cat([before, x[:, None]], 1), tail._version
                right = layer_parts.convolve(joined.double(), taps.double(), bias.double(), "silu")[:, -1].float()
                played.clear(), checked.clear()
                y = layer_parts.convolve_step(x, tail, taps, bias, "silu")
                torch.testing.assert_close(y, right)
                assert torch.equal(tail, joined[:, 1:]) and tail._version > version
                assert len(played) == (turn > (kind == "turned") and kind != "in its tail"), (turn, kind)
                assert not played or not checked
