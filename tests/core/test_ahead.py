"""Kernels of a first call are compiled in threads beside each other, as the call will want them, and asked for once."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from foci.cli_tune_ahead import Offline, gpu
from foci.core import ahead
from foci.core.tune import TARGETS, recording
from foci.ops import SPECS

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not hasattr(triton, "AsyncCompileMode") or len(os.sched_getaffinity(0)) < 2,
    reason="this Triton compiles in no threads, or there is one processor",
)
SPEC = SPECS["linear"]
CASES = [(spec, case) for spec in SPECS.values() for case in spec.cases]
DEVICE = 77  # none that another test compiles for


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ahead, "_SEEN", set())
    monkeypatch.setattr(ahead, "target_of", lambda device: TARGETS["sm_90"])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", Offline(gpu(TARGETS["sm_90"]), DEVICE))


def call(T: int = 128, K: int = 16) -> Any:
    rows = {name: torch.zeros(1, T, 2, K, dtype=torch.float16) for name in "qkv"}
    assert SPEC.bind is not None
    return SPEC.bind(**rows)


def test_what_a_call_launches_is_there_when_it_comes_and_was_made_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = SPEC.backend("triton").load().forward
    with recording(TARGETS["sm_90"]) as launches:
        forward(call())
    kernels = [launch.kernel for launch in launches]
    assert len(set(map(id, kernels))) == 2
    threads: list[tuple[int, int]] = []
    both = threading.Barrier(2, timeout=60)
    for kernel in kernels:
        kernel.device_caches[DEVICE]  # it asks which compiler there is when it is asked for the first time

        def compile(*given: Any, plain: Any = kernel.compile, **named: Any) -> Any:
            both.wait()  # goes on when the other is being compiled too
            threads.append(threading.get_ident())
            return plain(*given, **named)

        monkeypatch.setattr(kernel, "compile", compile)
    assert ahead.compiled_ahead(forward, call(), True) == ""
    assert len(set(threads)) == 2 and threading.get_ident() not in threads
    for kernel, grid, arguments, meta in launches:
        kernel.warmup(*arguments, grid=grid, **meta)
    assert len(threads) == 2


@pytest.mark.parametrize(("spec", "case"), CASES, ids=lambda value: value.name)
def test_without_numbers_every_call_launches_what_it_launches_with_them(spec: Any, case: Any) -> None:
    """Else other kernels would be compiled than those that are wanted."""
    module = spec.backend("triton").load()
    call, keeps = spec.bind(**case.make(torch.float16, torch.device("cpu"), 0)), (True,) * hasattr(module, "kept")
    with recording(TARGETS["sm_90"]):
        outputs = module.forward(call, *keeps)
    grads = tuple(torch.ones_like(out) for out in outputs[: len(spec.output_names)])
    needs = [getattr(call, name) is not None for name in spec.differentiable]
    for compute, given in ((module.forward, (call, *keeps)), (module.backward, (call, outputs, grads, needs))):
        with recording(TARGETS["sm_90"]) as right:
            compute(*given)
        with recording(TARGETS["sm_90"]) as found:
            compute(*map(ahead._meta, given))
        assert right and list(map(told, found)) == list(map(told, right))


def told(launch: Any) -> Any:
    arguments = [(x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in launch.arguments]
    return launch.kernel, launch.grid, arguments, launch.meta


def test_it_is_asked_once_of_calls_that_differ_in_rows_and_tokens_alone() -> None:
    asked: list[tuple[str, int]] = []

    def compute(call: Any, keep: bool) -> None:
        asked.append((call.q.device.type, call.q.shape[1]))

    for T, K, keep in ((128, 16, True), (64, 16, True), (64, 32, True), (64, 32, False), (128, 32, False)):
        assert ahead.compiled_ahead(compute, call(T, K), keep) == ""
    assert asked == [("meta", 128), ("meta", 64), ("meta", 64)]


def test_what_goes_wrong_is_left_to_the_call() -> None:
    def fails(call: Any) -> None:
        raise RuntimeError("the call will say this")

    assert ahead.compiled_ahead(fails, call()) == "RuntimeError: the call will say this"


def test_a_call_of_one_kernel_compiles_it_when_it_launches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rows = SPECS["softmax"], {name: torch.zeros(1, 64, 2, 16, dtype=torch.float16) for name in "qkv"}
    assert spec.bind is not None
    monkeypatch.setattr(ahead, "assembling", lambda arch: pytest.fail("nothing is to be compiled"))
    assert ahead.compiled_ahead(spec.backend("triton").load().forward, spec.bind(**rows)) == ""
