"""The compiled recurrences: when they can be built and pay, and one token's step."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.ops import native
from tests.ops.in_native import BUILT

B, G, H, K, V = 2, 2, 4, 20, 12


def forget() -> None:
    native._build.cache_clear()
    native._built.cache_clear()


@contextmanager
def not_yet_built() -> Iterator[None]:
    forget()
    try:
        yield
    finally:
        forget()


def refusal(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, found: Any) -> str:
    with not_yet_built(), monkeypatch.context() as patch:
        patch.setattr(target, name, lambda *_: found)
        reason = native._build()
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
    with not_yet_built():
        assert native._build() == "it could not be built: Error building extension"
        q = torch.randn(1, 4, 4, 8)
        assert foci.explain("linear", q, q, q).chosen == "chunked"
        state = torch.zeros(1, 4, 8, 8)
        assert not native.can_step(state)


@BUILT
@pytest.mark.parametrize("fails", [False, True])
def test_one_thread_builds_and_the_others_wait(fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builds: list[Path] = []
    found: list[object] = []

    def slow(name: str, flags: list[str], ready: Path) -> None:
        builds.append(ready)
        time.sleep(0.3)  # all others ask meanwhile
        if fails:
            raise RuntimeError("no room left")
        ready.touch()

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_compile", slow)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: [path])
    with not_yet_built():
        begin = threading.Barrier(8)
        threads = [threading.Thread(target=lambda: (begin.wait(), found.append(native._build()))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(builds) == 1
    assert len(found) == 8 and all(each is found[0] for each in found)
    assert found[0] == ("it could not be built: no room left" if fails else [str(builds[0])])


ASKS = """
import ctypes, sys
from pathlib import Path
from torch.utils import cpp_extension
from foci.ops import native

def build(name, *args, build_directory, **rest):
    print("builds", flush=True)
    sys.stdin.readline()
    made = Path(build_directory, f"{name}.so")
    made.touch()
    return made

cpp_extension.load, ctypes.CDLL = build, lambda path: path
sys.stdin.readline()
print("asks", flush=True)
print("has", native._build(), flush=True)
"""


@BUILT
@pytest.mark.parametrize("killed", [False, True])
def test_one_process_builds_and_the_others_wait(killed: bool, tmp_path: Path) -> None:
    """Also for one that is killed while it builds: the next builds in its place."""
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", ASKS], stdin=pipe, stdout=pipe, text=True, env=environment)

    with start() as builder, start() as waits:
        assert builder.stdin and builder.stdout and waits.stdin and waits.stdout
        for process, says in ((builder, ("asks", "builds")), (waits, ("asks",))):
            process.stdin.write("ask\n")
            process.stdin.flush()
            assert [process.stdout.readline().strip() for _ in says] == [*says]
        assert select.select([waits.stdout], [], [], 0.5) == ([], [], [])
        if killed:
            builder.kill()
            assert waits.stdout.readline() == "builds\n"
        last = waits if killed else builder
        last.stdin.write("go\n")
        last.stdin.flush()
        assert waits.stdout.readline().startswith(f"has {tmp_path}")
        assert waits.wait() == 0


TRIES = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@BUILT
def test_the_lock_of_another_user_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a folder of several users it cannot be written: nobody else built, not even after a build that failed."""
    path, opens = tmp_path / "native.lock", Path.open
    path.touch()

    def denied(self: Path, mode: str = "r") -> Any:
        if mode != "r":
            raise PermissionError(f"Permission denied: {self}")
        return opens(self, mode)

    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(native.os, "access", lambda *_: False)  # who runs tests may be allowed everything
    with native._one_process(path):
        assert "BlockingIOError" in subprocess.run([sys.executable, "-c", TRIES, path], stderr=-1, text=True).stderr
    subprocess.run([sys.executable, "-c", TRIES, path], check=True)


def test_without_locks_it_is_built_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fcntl

    def fails(*_: object) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "lockf", fails)
    said = r"native.lock cannot be locked \(No locks available\): processes build"
    with pytest.warns(match=said), native._one_process(tmp_path / "native.lock"):
        pass


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
