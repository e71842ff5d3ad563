"""Hopper's kernels are assembled by the newest assembler there is; the user's choice wins, and nothing else changes."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import Any

import pytest
import torch

from foci.cli_tune_ahead import Offline, gpu
from foci.core import assembler
from foci.core.assembler import HOPPER, NAMED, _forget, assembling, describe_ptxas, ptxas_for, retry_failed_passes
from foci.core.tune import TARGETS

triton = pytest.importorskip("triton")
nvidia = triton.knobs.nvidia


def versions() -> list[tuple[int, ...]]:
    return [tuple(map(int, tool.version.split("."))) for tool in (nvidia.ptxas, nvidia.ptxas_blackwell)]


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAMED, raising=False)


def test_hopper_gets_the_newest_that_triton_brings_and_everything_is_as_before_afterwards() -> None:
    before, environment, newest = nvidia.ptxas.path, dict(os.environ), max(versions())
    with assembling(HOPPER):
        assert versions()[0] == newest
    assert nvidia.ptxas.path == before and dict(os.environ) == environment


def test_also_after_a_compiler_that_fails() -> None:
    before, environment = nvidia.ptxas.path, dict(os.environ)
    with pytest.raises(RuntimeError, match="no"), assembling(HOPPER):
        raise RuntimeError("no")
    assert nvidia.ptxas.path == before and dict(os.environ) == environment


@pytest.mark.parametrize("arch", [target.arch for name, target in TARGETS.items() if name != "sm_90"])
def test_no_other_architecture_is_touched(arch: int) -> None:
    before = nvidia.ptxas.path, nvidia.ptxas_blackwell.path
    with assembling(arch):
        assert (nvidia.ptxas.path, nvidia.ptxas_blackwell.path) == before and NAMED not in os.environ
    assert ptxas_for(arch) is None


def test_the_assembler_that_a_user_names_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = nvidia.ptxas.path
    monkeypatch.setenv(NAMED, theirs)
    with assembling(HOPPER):
        assert nvidia.ptxas.path == theirs
    assert os.environ[NAMED] == theirs and describe_ptxas() == f"{theirs}, as {NAMED} says"


def test_so_does_one_that_is_chosen_through_triton() -> None:
    with nvidia.scope():
        nvidia.ptxas = theirs = nvidia.ptxas.path
        with assembling(HOPPER):
            assert nvidia.ptxas.path == theirs


def test_within_another_it_stays() -> None:
    with assembling(HOPPER):
        first = nvidia.ptxas.path
        with assembling(HOPPER):
            assert nvidia.ptxas.path == first
        assert nvidia.ptxas.path == first


def test_who_compiles_beside_another_gets_it_for_the_whole_time() -> None:
    """Also when the one who came first has gone; the last takes the choice back."""
    before, environment, newest, seen = nvidia.ptxas.path, dict(os.environ), max(versions()), []
    both = threading.Barrier(2, timeout=10)

    def first() -> None:
        with assembling(HOPPER):
            both.wait()

    def second() -> None:
        with assembling(HOPPER):
            both.wait()
            one.join(10)
            seen.append(versions()[0])

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    two.start()
    two.join(20)
    assert seen == [newest] and not one.is_alive()
    assert nvidia.ptxas.path == before and dict(os.environ) == environment


def test_without_triton_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(assembler.sys.modules, "triton")
    with assembling(HOPPER):
        assert ptxas_for(HOPPER) is None and describe_ptxas() == "Triton's own choice"


def test_a_kernel_is_really_assembled_by_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine code names its assembler."""
    jit = triton.runtime.jit.JITFunction(_nothing)
    monkeypatch.setattr(triton.runtime.driver, "_active", Offline(gpu(TARGETS["sm_90"])), raising=False)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        with assembling(HOPPER):
            compiled = jit.warmup(torch.float32, grid=(1,))
    newest = ".".join(map(str, max(versions())))
    signed = {found.decode() for found in re.findall(rb"release (\d+\.\d+)", compiled.asm["cubin"])}
    if not signed:
        pytest.skip(f"ptxas {newest} does not sign what it assembles")
    assert signed == {newest}


def test_what_another_assembler_made_of_a_kernel_before_is_not_found_on_disk(tmp_path, monkeypatch) -> None:
    """Whichever kernel a process compiled first: Triton asks an assembler's version once, and finds kernels by it."""
    if versions()[0] == max(versions()):
        pytest.skip("Triton's own choice is the newest already")
    monkeypatch.setattr(triton.runtime.driver, "_active", Offline(gpu(TARGETS["sm_90"])), raising=False)

    def compiled() -> Any:
        return triton.runtime.jit.JITFunction(_nothing).warmup(torch.float32, grid=(1,))

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        _forget()
        other = compiled()  # as of a foci that did not choose, or of someone else's kernels in this process
        with assembling(HOPPER):
            ours = compiled()
        assert ours.hash != other.hash and _ptx(ours) > _ptx(other)
        assert compiled().hash == other.hash  # nor is ours given to whoever wants Triton's choice
        with assembling(HOPPER):
            assert compiled().hash == ours.hash


def _ptx(kernel: Any) -> tuple[int, ...]:
    """The version of its PTX, which is the newest that its assembler knows."""
    return tuple(map(int, re.search(r"\.version (\d+)\.(\d+)", kernel.asm["ptx"]).groups()))


def _nothing(x_ptr) -> None:
    triton.language.store(x_ptr, 1.0)


@pytest.mark.parametrize(
    ("fails", "error", "says", "asked"),
    [
        (2, RuntimeError, "PassManager::run failed", 3),
        (9, RuntimeError, "PassManager::run failed", 4),
        (2, SystemError, "AST constructor recursion depth mismatch", 3),
        (9, RuntimeError, "no", 1),
        (9, SystemError, "no", 1),
    ],
)
def test_passes_that_fail_once_are_run_again(fails: int, error: type[Exception], says: str, asked: int) -> None:
    calls = []

    def ask() -> str:
        calls.append(1)
        if len(calls) <= fails:
            raise error(says)
        return "made"

    with pytest.raises(error, match=says) if fails == 9 else contextlib.nullcontext():
        assert retry_failed_passes(ask) == "made"
    assert len(calls) == asked
