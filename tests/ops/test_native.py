"""The compiled recurrences: when they can be built and pay, and one token's step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.ops import native
from tests.ops.in_native import BUILT

B, G, H, K, V = 2, 2, 4, 20, 12


def refusal(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, found: Any) -> str:
    monkeypatch.setattr(target, name, lambda *_: found)
    native._build.cache_clear()
    try:
        reason = native._build()
    finally:
        monkeypatch.undo()
        native._build.cache_clear()
    assert isinstance(reason, str)
    return reason


def test_why_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "this is arm64" in refusal(monkeypatch, native.platform, "machine", "arm64")
    assert "there is no c++ to build it with" in refusal(monkeypatch, native.shutil, "which", None)
    assert "AVX2" in refusal(monkeypatch, torch.backends.cpu, "get_cpu_capability", "DEFAULT")


def test_a_compiler_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Error building extension\nlong log")

    monkeypatch.setattr(cpp_extension, "load", fails)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    native._build.cache_clear()
    try:
        assert native._build() == "it could not be built: Error building extension"
        q = torch.randn(1, 4, 4, 8)
        assert foci.explain("linear", q, q, q).chosen == "chunked"
        state = torch.zeros(1, 4, 8, 8)
        assert not native.can_step(state)
    finally:
        native._build.cache_clear()


def test_it_is_kept_in_the_folder_that_torch_keeps_extensions_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert native._folder() == tmp_path / "cache"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "elsewhere"))
    assert native._folder() == tmp_path / "elsewhere"


def test_few_heads_are_left_to_shared_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert native._idle(8) == ()
    assert native._idle(7) == ("7 heads and rows would keep 7 of 16 threads busy",)


def tokens(kind: str | None, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, G, K, generator=draw).to(dtype) for _ in range(2))
    found = {"q": q, "k": k, "v": torch.randn(B, H, V, generator=draw).to(dtype)}
    found["state"] = torch.randn(B, H, K, V, generator=draw)
    if kind is not None:
        shape = {"head": (H,), "token": (B, H), "channel": (B, H, K)}[kind]
        found["log_decay"] = -torch.rand(shape, generator=draw)
    return found


@BUILT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, "head", "token", "channel"])
@pytest.mark.parametrize("extra", [None, "bonus", "beta", "erase"])
def test_a_step_is_the_step_in_torch(
    extra: str | None, kind: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, function = tokens(kind, dtype), foci.linear_attention_step
    if extra == "bonus":
        inputs["bonus"] = torch.randn(H, K)
    elif extra is not None:
        inputs["beta"], function = torch.rand(B, H), foci.delta_rule_step
        if extra == "erase":
            inputs["erase"] = torch.randn(B, G, K).to(dtype)
    given = inputs.pop("state")
    states = [given.clone(), given.clone()]
    assert native.can_step(states[0])
    out = function(**inputs, state=states[0], scale=0.3)
    monkeypatch.setattr(native, "can_step", lambda state: False)
    wanted = function(**inputs, state=states[1], scale=0.3)
    assert out.dtype == wanted.dtype == dtype
    torch.testing.assert_close(out, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    torch.testing.assert_close(states[0], states[1], rtol=1e-5, atol=1e-5)


@BUILT
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_another_default_dtype_changes_no_bit(default: torch.dtype) -> None:
    """C++ writes float32, whatever the program makes its own tensors of."""
    inputs = tokens("token") | {"beta": torch.rand(B, H)}

    def answers() -> tuple[Tensor, ...]:
        leaves = {name: x.clone()[:, None].requires_grad_() for name, x in inputs.items() if name != "state"}
        whole, final = foci.delta_rule(**leaves, state=inputs["state"], return_state=True, backend="native")
        found = torch.autograd.grad((whole.sum(), final.sum()), [*leaves.values()])
        return whole, *found, foci.delta_rule_step(**inputs | {"state": inputs["state"].clone()})

    wanted = answers()
    torch.set_default_dtype(default)
    try:
        found = answers()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, wanted))


@BUILT
def test_a_step_is_seen_by_autograd_as_a_write() -> None:
    inputs = tokens("token")
    before = inputs["state"]._version
    foci.linear_attention_step(**inputs)
    assert inputs["state"]._version > before


@BUILT
def test_a_step_takes_any_state() -> None:
    """What C++ cannot write in place is written by torch, in place too."""
    inputs = tokens("token")
    plain = inputs.pop("state")
    turned = plain.transpose(2, 3).contiguous().transpose(2, 3)
    assert not native.can_step(turned)
    assert not native.can_step(plain.double())
    out = [foci.linear_attention_step(**inputs, state=state) for state in (plain, turned)]
    torch.testing.assert_close(*out)
    torch.testing.assert_close(plain, turned)


@pytest.mark.slow
@BUILT
def test_without_avx512() -> None:
    """The same answers from the library for AVX2, which a processor with AVX-512 can run too."""
    program = """
import torch, foci
assert torch.backends.cpu.get_cpu_capability() == "AVX2"
q, k, v, g = (torch.randn(1, 70, 4, 20) for _ in range(4))
for rest in ({"log_decay": -g.abs()}, {"log_decay": -g.abs()[..., 0]}):
    found, wanted = (foci.linear_attention(q, k, v, **rest, backend=b)[0] for b in ("native", "chunked"))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    unit = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.rand(1, 70, 4)
    found, wanted = (foci.delta_rule(q, unit, v, beta, **rest, backend=b)[0] for b in ("native", "chunked"))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
"""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=250)


def _recurrences(q: torch.Tensor) -> torch.Tensor:
    whole, _ = foci.linear_attention(q, q, q, log_decay=-q.abs())
    packed, _ = foci.delta_rule(q, q.softmax(-1), q, q[..., 0].sigmoid())
    return whole + packed


@pytest.mark.parametrize("threads", [1, 64])
def test_batch_and_heads_may_be_open_when_compiled(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch._dynamo.reset()
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(_recurrences, fullgraph=True, backend=count, dynamic=True)
    for B, T, H in ((2, 5, 4), (3, 7, 2), (4, 9, 3), (5, 6, 4)):
        q = torch.randn(B, T, H, 8)
        torch.testing.assert_close(compiled(q), _recurrences(q))
    assert len(graphs) == 1
