"""Hopper's kernels are assembled by the oldest that is right; the user's choice wins, and nothing else changes."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foci.cli_tune_ahead import Offline, gpu
from foci.core import assembler
from foci.core.assembler import (
    HOPPER,
    SETTINGS,
    _forget,
    _refusal,
    assembling,
    describe_ptxas,
    ptxas_for,
    refusal,
    retry_failed_passes,
    setting,
)  # fmt: skip
from foci.core.tune import TARGETS

triton = pytest.importorskip("triton")
nvidia = triton.knobs.nvidia


SETTING = setting()
NAMED = SETTINGS[SETTING]
OURS = min(assembler._version(tool) for name in SETTINGS if assembler._right(tool := getattr(nvidia, name)))


def used() -> tuple[int, ...]:
    """The version of that which Triton takes for Hopper."""
    return assembler._version(getattr(nvidia, SETTING))


def path() -> str:
    return getattr(nvidia, SETTING).path


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in SETTINGS.values():
        monkeypatch.delenv(name, raising=False)
    _refusal.cache_clear()
    setting.cache_clear()
    yield
    _refusal.cache_clear()
    setting.cache_clear()


def brings(monkeypatch: pytest.MonkeyPatch, driver: int | None, **tools: str) -> None:
    """As if Triton brought ptxas of these versions by these settings, and the driver were of this CUDA."""

    class Nvidia:
        def __getattr__(self, name: str) -> SimpleNamespace:
            if name not in tools:
                raise RuntimeError(f"Cannot find {name}")
            return SimpleNamespace(path=name, version=tools[name])

    monkeypatch.setattr(triton.knobs, "nvidia", Nvidia())
    monkeypatch.setattr(assembler, "_driver", lambda: driver)


def test_hopper_gets_the_oldest_that_is_right_and_everything_is_as_before_afterwards() -> None:
    before, environment = path(), dict(os.environ)
    with assembling(HOPPER):
        assert used() == OURS
    assert path() == before and dict(os.environ) == environment


def test_it_is_set_where_triton_looks_for_it() -> None:
    """Since 3.9 where Blackwell's is."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    with assembling(HOPPER):
        assert compiler.get_ptxas(HOPPER).version == ".".join(map(str, OURS))
    assert (SETTING == "ptxas") == (tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))


def test_the_setting_is_known_whatever_it_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their paths both were taken for Blackwell's where a user names one ptxas for all, and for good."""
    for name in SETTINGS.values():
        monkeypatch.setenv(name, nvidia.ptxas_blackwell.path)
    setting.cache_clear()
    assert setting() == SETTING


def test_a_triton_without_nvidias_backend_refuses_nothing_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(assembler.sys.modules, "triton.backends.nvidia.compiler")
    setting.cache_clear()
    assert setting() == "ptxas" and refusal() is None and describe_ptxas()


def test_also_after_a_compiler_that_fails() -> None:
    before, environment = path(), dict(os.environ)
    with pytest.raises(RuntimeError, match="no"), assembling(HOPPER):
        raise RuntimeError("no")
    assert path() == before and dict(os.environ) == environment


@pytest.mark.parametrize("arch", [target.arch for name, target in TARGETS.items() if name != "sm_90"])
def test_no_other_architecture_is_touched(arch: int) -> None:
    before = nvidia.ptxas.path, nvidia.ptxas_blackwell.path
    with assembling(arch):
        assert (nvidia.ptxas.path, nvidia.ptxas_blackwell.path) == before
    assert ptxas_for(arch) is None


def test_the_assembler_that_a_user_names_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = path()
    monkeypatch.setenv(NAMED, theirs)
    with assembling(HOPPER):
        assert path() == theirs
    assert os.environ[NAMED] == theirs
    monkeypatch.setenv(NAMED, right := nvidia.ptxas_blackwell.path)
    assert describe_ptxas() == f"{right}, as {NAMED} says"


def test_so_does_one_that_is_chosen_through_triton() -> None:
    with nvidia.scope():
        setattr(nvidia, SETTING, theirs := path())
        with assembling(HOPPER):
            assert path() == theirs


def test_within_another_it_stays() -> None:
    with assembling(HOPPER):
        first = path()
        with assembling(HOPPER):
            assert path() == first
        assert path() == first


def test_who_compiles_beside_another_gets_it_for_the_whole_time() -> None:
    """Also when the one who came first has gone; the last takes the choice back."""
    before, environment, seen = path(), dict(os.environ), []
    both = threading.Barrier(2, timeout=10)

    def first() -> None:
        with assembling(HOPPER):
            both.wait()

    def second() -> None:
        with assembling(HOPPER):
            both.wait()
            one.join(10)
            seen.append(used())

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    two.start()
    two.join(20)
    assert seen == [OURS] and not one.is_alive()
    assert path() == before and dict(os.environ) == environment


@pytest.mark.parametrize(
    ("driver", "tools", "expected"),
    [
        (13, {"ptxas": "12.8", "ptxas_blackwell": "13.1"}, "13.1"),
        (None, {"ptxas": "12.8", "ptxas_blackwell": "13.1"}, "13.1"),
        (12, {"ptxas": "12.9", "ptxas_blackwell": "13.4"}, "12.9"),
        (13, {"ptxas": "12.9", "ptxas_blackwell": "13.4"}, "12.9"),
        (13, {"ptxas": "13.0", "ptxas_blackwell": "13.4"}, "13.4"),
        (12, {"ptxas_blackwell": "12.9"}, "12.9"),
        (None, {"ptxas": "12.9"}, "12.9"),
        (13, {"ptxas": "12.9", "ptxas_blackwell": "13.0"}, "12.9"),
    ],
)
def test_the_oldest_that_is_right_is_one_that_is_there_and_that_the_driver_loads(
    driver: int | None, tools: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    brings(monkeypatch, driver, **tools)
    assert ptxas_for(HOPPER).version == expected and refusal() is None


@pytest.mark.parametrize(
    ("driver", "tools", "what"),
    [
        (12, {"ptxas": "12.8", "ptxas_blackwell": "13.1"}, "ptxas 12.8, and Hopper needs {}, of CUDA 12 at most, as"),
        (None, {"ptxas": "12.8"}, "ptxas 12.8, and Hopper needs {}: others miscompile"),
        (None, {"ptxas": "12.8", "ptxas_blackwell": "13.0"}, "ptxas 12.8, and Hopper needs {}: others miscompile"),
        (None, {}, "no ptxas, and Hopper needs {}: others miscompile"),
        (12, dict.fromkeys(SETTINGS, "13.1"), "ptxas 13.1, and Hopper needs {}, of CUDA 12 at most, as the driver"),
    ],
)
def test_where_none_is_right_hopper_is_refused(
    driver: int | None, tools: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    brings(monkeypatch, driver, **tools)
    assert (
        f"Triton brings {what.format('12.9 or newer but 13.0')}" in refusal()
        and describe_ptxas() == f"none: {refusal()}"
    )


def test_so_is_one_that_a_user_names_and_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    brings(monkeypatch, None, **dict.fromkeys(SETTINGS, "13.1") | {SETTING: "12.8"})
    assert refusal() is None
    monkeypatch.setenv(NAMED, SETTING)  # as `brings` calls its path
    assert refusal().startswith(f"{NAMED} names ptxas 12.8, and Hopper needs 12.9 or newer")
    monkeypatch.setenv(NAMED, "/none")  # Triton takes its own then
    assert refusal().startswith(f"{NAMED} names none that runs, /none; Triton brings ptxas 12.8, and Hopper needs")
    brings(monkeypatch, None, **{SETTING: "12.9"})
    _refusal.cache_clear()
    assert refusal() is None and describe_ptxas() == f"ptxas 12.9: {NAMED} names none that runs"


def test_a_driver_that_is_not_there_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assembler._driver.cache_clear()
    assert assembler._driver() is None
    assembler._driver.cache_clear()


def test_who_finds_none_leaves_no_choice_undone_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that one would take Triton's choice for its own, and be miscompiled in silence."""
    with monkeypatch.context() as patched:
        patched.setattr(assembler, "ptxas_for", lambda arch: (_ for _ in ()).throw(RuntimeError("none")))
        with pytest.raises(RuntimeError, match="none"), assembling(HOPPER):
            pass
    with assembling(HOPPER):
        assert used() == OURS


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
    ours = ".".join(map(str, OURS))
    signed = {found.decode() for found in re.findall(rb"release (\d+\.\d+)", compiled.asm["cubin"])}
    if not signed:
        pytest.skip(f"ptxas {ours} does not sign what it assembles")
    assert signed == {ours}


def test_what_another_assembler_made_of_a_kernel_before_is_not_found_on_disk(tmp_path, monkeypatch) -> None:
    """Whichever kernel a process compiled first: Triton asks an assembler's version once, and finds kernels by it."""
    if used() == OURS:
        pytest.skip("Triton's own choice is ours already")
    monkeypatch.setattr(triton.runtime.driver, "_active", Offline(gpu(TARGETS["sm_90"])), raising=False)

    def compiled() -> Any:
        return triton.runtime.jit.JITFunction(_nothing).warmup(torch.float32, grid=(1,))

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        _forget()
        other = compiled()  # as of a foci that did not choose, or of someone else's kernels in this process
        with assembling(HOPPER):
            ours = compiled()
        assert ours.hash != other.hash and _ptx(ours) != _ptx(other)
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
