"""Compiling ahead: for a GPU that is not here, into Triton's cache; what dies or hangs takes nothing with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest
import torch

import foci
from foci.bench.tuning import Attempt
from foci.cli_tune_ahead import ahead, each, launchable
from foci.core.tune import TARGETS, Config
from foci.ops import SPECS


def answer(task: str) -> str:
    if task == "die":
        os.abort()
    if task == "hang":
        time.sleep(60)
    if task == "raise":
        raise RuntimeError("told again where it is wanted")
    return task


def test_each_task_answers_for_itself() -> None:
    tasks = ["one", "die", "raise", "hang", "two"]
    said = each(answer, tasks, workers=3, limit=8.0)
    assert said == ["one", "its compiler died (exit code -6)", "", "its compiler took more than 8 s", "two"]


def attended(task: str) -> str:
    q = torch.randn(4, 8, 256, 64)
    return f"{task} {len(torch.nn.functional.scaled_dot_product_attention(q, q, q))}"


def test_a_fork_waits_for_no_thread_of_its_parent() -> None:
    """OpenMP's threads are not forked, and the child of a process that has used them would wait for them."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert each(attended, [attended("here")], workers=1, limit=20.0, context="fork") == ["here 4 4"]
    finally:
        torch.set_num_threads(threads)


def test_past_the_limit_nothing_begins() -> None:
    assert each(answer, ["one", "two"], workers=2, until=time.monotonic() - 1) == ["", ""]


def test_a_candidate_lands_in_the_cache_and_one_that_does_not_fit_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes without the interpreter, which this one may be running."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = next(shape for shape in SPECS["scan"].shapes if shape.name.startswith("small"))
    narrow = TARGETS["sm_90"]._replace(shared=-1)
    for target, said in ((TARGETS["sm_90"], ""), (narrow, "0 bytes of shared memory, the GPU has -1")):
        compile_all = ahead("scan", torch.bfloat16, target, workers=1)
        place = ("scan_forward", "torch.bfloat16,False")
        assert compile_all([Attempt(case, "forward", place, Config({"BLOCK_D": 64, "BLOCK_T": 16}, 2, 2))]) == [said]
    compiled = [json.loads(path.read_text()) for path in tmp_path.glob("*/forward_kernel.json")]
    assert [(found["num_warps"], found["target"]["arch"]) for found in compiled] == [(2, 90)]


@pytest.mark.parametrize(("backend", "compiler"), [("cuda", True), ("cuda", False), ("hip", True)])
def test_a_launcher_is_made_where_a_compiler_of_c_makes_each(
    backend: str, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Triton 3.6 does, and for NVIDIA alone."""
    from triton.backends.nvidia import driver

    made: list[object] = []

    monkeypatch.setattr(driver, "CudaLauncher", lambda source, metadata: made.append(source))
    monkeypatch.delattr(driver, "make_launcher", raising=False)
    if compiler:
        monkeypatch.setattr(driver, "make_launcher", "C", raising=False)
    kernel = Namespace(src="kernel", metadata=Namespace(target=Namespace(backend=backend)))
    launchable(kernel)
    assert made == ["kernel"] * (compiler and backend == "cuda")


TUNED = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from foci.cli_tune_ahead import Offline, side_by_side
from autotuned import doubled

triton.runtime.driver.set_active(Offline(GPUTarget("cuda", 90, 32)))
before = type(doubled).prune_configs
x = torch.empty(64, device="meta")
doubled.nargs = {"x_ptr": x}
with side_by_side(2):
    kept = doubled.prune_configs({"n": 64, "grid": (1,), "warmup": False})
    assert doubled.do_bench.keywords == {"warmup": 5, "rep": 20}
assert len(kept) == 3 and type(doubled).prune_configs is before and "do_bench" not in vars(doubled)
"""


def test_kernels_that_tune_themselves_are_compiled_before_they_are_timed(tmp_path: Path) -> None:
    (tmp_path / "autotuned.py").write_text("""
import triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": block}, num_warps=2) for block in (16, 32, 64)], key=["n"])
@triton.jit
def doubled(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)
""")
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(tmp_path), str(Path(foci.__file__).parents[1])])
    variables |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path}
    ended = subprocess.run([sys.executable, "-c", TUNED], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert len([*tmp_path.glob("cache/*/doubled.cubin")]) == 3
