"""On a GPU: every operator, forward and backward or a step, in a CUDA graph that is replayed on other values."""

from __future__ import annotations

import pytest
import torch

import foci
from foci.core import plans
from foci.ops.masks import Causal, Packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU, and there is none")
T, H, K, D, N = 192, 2, 64, 64, 16
DOCUMENTS = (0, 5, 70, T)


def inputs(operator: str) -> dict[str, torch.Tensor]:
    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    gates = -torch.rand(1, T, H, device="cuda")
    rows = {name: half(1, T, H, K) for name in "qkv"}
    if operator == "attention":
        return rows
    if operator == "linear_attention":
        return rows | {"log_decay": gates}
    if operator == "delta_rule":
        rows["k"] = torch.nn.functional.normalize(rows["k"], dim=-1)
        return rows | {"beta": -gates, "log_decay": gates}
    x = half(1, T, D)
    if operator == "scan":
        return {"x": x, "log_decay": -torch.rand(1, T, D, device="cuda")}
    return {"x": x, "dt": half(1, T, D).abs(), "A": -torch.rand(D, N, device="cuda")} | {k: half(1, T, N) for k in "BC"}


@pytest.mark.parametrize("before", [1, 4], ids=["noted", "played"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("operator", ["attention", "linear_attention", "delta_rule", "selective_scan", "scan"])
def test_a_captured_step_of_training_is_replayed_on_other_values(
    operator: str, packed: bool, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured is a call that is noted for its plan, made once before, or one that is played (core/plans.py)."""
    monkeypatch.setattr(plans, "_FUNCTION_PLANS", {})
    monkeypatch.setattr(plans, "_SEEN", set())
    monkeypatch.setattr(plans, "_GUARDED", {})
    function = getattr(foci, operator)
    leaves = {name: x.requires_grad_() for name, x in inputs(operator).items()}
    rest: dict[str, object] = {"backend": "triton"}
    if operator == "attention":
        rest["mask"] = Causal()
    if packed:
        offsets = torch.tensor(DOCUMENTS, dtype=torch.int32, device="cuda")
        rest |= {"mask": Causal() & Packed(offsets)} if operator == "attention" else {"offsets": offsets}

    def step() -> list[torch.Tensor]:
        out = function(**leaves, **rest)
        out = out[0] if isinstance(out, tuple) else out
        return [out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(before):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for name, x in inputs(operator).items():
            leaves[name].copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    for got, right in zip(captured, step(), strict=True):
        assert torch.equal(got, right)
    assert any(plan is not None for plan in plans._FUNCTION_PLANS.values())


def token(operator: str) -> dict[str, torch.Tensor]:
    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    B, slots, gates = 2, torch.tensor([3, 0], device="cuda"), -torch.rand(2, H, device="cuda")
    if operator == "scan_step":
        return {"x": half(B, D), "log_decay": -torch.rand(B, D, device="cuda"), "state": half(B, D).float()}
    if operator == "selective_scan_step":
        rows = {"x": half(B, D), "dt": half(B, D).abs(), "A": -torch.rand(D, N, device="cuda")}
        return rows | {"B": half(B, N), "C": half(B, N), "state": half(B, D, N).float()}
    rows = {name: torch.nn.functional.normalize(half(B, H, K), dim=-1) for name in "qkv"}
    rows |= {"log_decay": gates, "slots": slots, "state": half(5, H, K, K).float()}
    return rows | ({"beta": -gates} if operator == "delta_rule_step" else {})


@pytest.mark.parametrize("before", [1, 4], ids=["noted", "played"])
@pytest.mark.parametrize("operator", ["linear_attention_step", "delta_rule_step", "selective_scan_step", "scan_step"])
def test_a_captured_step_of_decoding_goes_on_from_the_state_that_is_there(
    operator: str, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_FUNCTION_PLANS", {})
    monkeypatch.setattr(plans, "_SEEN", set())
    monkeypatch.setattr(plans, "_GUARDED", {})
    monkeypatch.setattr(plans, "_OPERATOR_PLANS", {})
    function, held = getattr(foci, operator), token(operator)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(before):
            function(**held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(**held)
    for _ in range(3):
        for name, x in token(operator).items():
            held[name].copy_(x)
        other = {name: x.clone() for name, x in held.items()}
        for _ in range(2):
            graph.replay()
            right = function(**other)
        torch.cuda.synchronize()
        assert torch.equal(captured, right) and torch.equal(held["state"], other["state"])
    assert any(plan is not None for plan in plans._FUNCTION_PLANS.values())
