"""Kernels of a first call are compiled in threads beside each other, as the call will want them, and asked for once."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foci.cli_tune_ahead import Offline, gpu
from foci.core import ahead
from foci.core.assembler import assembling, retry_failed_passes
from foci.core.device import cores
from foci.core.tune import TARGETS, record_launches
from foci.ops import SPECS

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not hasattr(triton, "AsyncCompileMode") or cores() < 2,
    reason="this Triton compiles in no threads, or there is one processor",
)
SPEC = SPECS["linear"]
CASES = [(spec, case) for spec in SPECS.values() for case in spec.cases]
DEVICE = 77  # none that another test compiles for


class Driver(Offline):
    """One whose launchers note whose they are and in which thread they are made, and want to know of the kernel."""

    def __init__(self) -> None:
        super().__init__(gpu(TARGETS["sm_90"]), DEVICE)
        self.launchers: list[tuple[str, int]] = []

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        assert metadata.name == source.name
        self.launchers.append((source.name, threading.get_ident()))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    monkeypatch.setattr(ahead, "_SEEN", set())
    monkeypatch.setattr(ahead, "target_of", lambda device: TARGETS["sm_90"])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return driver


def call(T: int = 128, K: int = 16) -> Any:
    rows = {name: torch.zeros(1, T, 2, K, dtype=torch.float16) for name in "qkv"}
    assert SPEC.bind is not None
    return SPEC.bind(**rows)


def kernels_of(call: Any) -> list[Any]:
    """The launches of a forward, of two kernels that are not in Triton's memory."""
    with record_launches(TARGETS["sm_90"]) as launches:
        SPEC.backend("triton").load().forward(call)
    assert len({id(launch.kernel) for launch in launches}) == 2
    for launch in launches:
        launch.kernel.device_caches[DEVICE][0].clear()
    return launches


@pytest.fixture
def found_on_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every compilation whether it was done before."""
    found: list[bool] = []

    def listener(*, cache_hit: bool, **_: Any) -> None:
        found.append(cache_hit)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    return found


def watching(
    monkeypatch: pytest.MonkeyPatch, launches: list[Any], before: Callable[[], Any], after: Callable[[], Any] = int
) -> None:
    """`before` and `after` go around each kernel's compilation, once however often it is asked again."""
    for launch in launches:

        def compile(*given: Any, plain: Any = launch.kernel.compile, **named: Any) -> Any:
            before()
            made = retry_failed_passes(lambda: plain(*given, **named))
            after()
            return made

        monkeypatch.setattr(launch.kernel, "compile", compile)


def test_what_a_call_launches_is_there_when_it_comes_and_was_made_beside_each_other(
    monkeypatch: pytest.MonkeyPatch, found_on_disk: list[bool]
) -> None:
    launches, threads = kernels_of(call()), set[int]()
    both = threading.Barrier(2, timeout=60)
    with monkeypatch.context() as patch:
        watching(patch, launches, lambda: (both.wait(), threads.add(threading.get_ident())))  # each waits for the other
        assert ahead.compile_ahead(SPEC.backend("triton").load().forward, call(), True) == ""
    assert len(threads) == 2 and threading.get_ident() not in threads
    assert found_on_disk == [False, False]
    assert not any(launch.kernel.device_caches[DEVICE][0] for launch in launches)  # in memory Triton has what it had
    for launch in launches:
        with assembling(90):
            launch.compiled()
    assert found_on_disk == [False, False, True, True]


def test_launchers_are_made_where_kernels_are_and_not_of_those_that_fail(
    monkeypatch: pytest.MonkeyPatch, offline: Driver
) -> None:
    """Triton 3.6 has a compiler of C make each: one after another when they are launched, it would be seconds."""
    launches = kernels_of(call())

    def full() -> None:
        raise OSError(28, "No space left on device")

    watching(monkeypatch, launches[:1], full)
    assert "No space left" in ahead.compile_ahead(SPEC.backend("triton").load().forward, call(), True)
    ((name, thread),) = offline.launchers
    assert name == launches[1].kernel.__name__ and thread != threading.get_ident()


def test_launchers_are_made_beside_their_kernels_where_threads_are_free_and_once(
    monkeypatch: pytest.MonkeyPatch, offline: Driver
) -> None:
    """They are of the signature alone: behind the longest kernel its launcher would be waited for."""
    launches, made, all_made = kernels_of(call()), list[str](), threading.Event()

    def launcher(source: Any, metadata: Any) -> None:
        assert metadata.num_ctas is None and getattr(metadata, "tensordesc_meta", ()) is None
        made.append(source.name)
        if len(made) == 2:
            all_made.set()

    def before() -> None:
        assert all_made.wait(60)

    monkeypatch.setattr(ahead, "cores", lambda: 4)
    monkeypatch.setattr(offline, "launcher_cls", launcher)
    watching(monkeypatch, launches, before)
    assert ahead.compile_ahead(SPEC.backend("triton").load().forward, call(), True) == ""
    assert sorted(made) == sorted(launch.kernel.__name__ for launch in launches)


def test_what_shows_no_source_has_its_launcher_made_behind_it(monkeypatch: pytest.MonkeyPatch, offline: Driver) -> None:
    launches = kernels_of(call())
    assert ahead._source(int) is None and ahead._source(lambda: launches) is None
    src = SimpleNamespace(signature={"x": "i32", "strides": ("i32",)})
    assert ahead._source(lambda: src) is src
    src.signature["y"] = "tensordesc<bf16[64, 64]>"  # how it is to be given only the compiled kernel says
    assert ahead._source(lambda: src) is None
    monkeypatch.setattr(ahead, "cores", lambda: 4)
    monkeypatch.setattr(ahead, "_source", lambda compile_fn: None)
    assert ahead.compile_ahead(SPEC.backend("triton").load().forward, call(), True) == ""
    assert sorted(name for name, _ in offline.launchers) == sorted(launch.kernel.__name__ for launch in launches)


def test_a_launcher_that_fails_is_left_to_the_launch(
    monkeypatch: pytest.MonkeyPatch, offline: Driver, found_on_disk: list[bool]
) -> None:
    def fails(source: Any, metadata: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    launches = kernels_of(call())
    monkeypatch.setattr(offline, "launcher_cls", fails)
    said = ahead.compile_ahead(SPEC.backend("triton").load().forward, call(), True)
    assert said == "RuntimeError: Failed to find C compiler"
    for launch in launches:
        with assembling(90):
            launch.compiled()
    assert found_on_disk == [False, False, True, True]


def test_what_is_launched_last_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, begun = kernels_of(call()), list[str]()
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor", lambda most: ThreadPoolExecutor(1))
    for launch in launches:
        name = launch.kernel.__name__
        monkeypatch.setattr(launch.kernel, "compile", lambda *_, name=name, **__: begun.append(name))
    ahead.compile_ahead(SPEC.backend("triton").load().forward, call(), True)
    assert begun == [launch.kernel.__name__ for launch in reversed(launches)]


def test_who_is_interrupted_leaves_no_mode_behind_and_to_each_thread_its_assembler(
    monkeypatch: pytest.MonkeyPatch, found_on_disk: list[bool]
) -> None:
    """Else Triton would take the older assembler's code from then on (core/assembler.py)."""
    launches, gone, used = kernels_of(call()), threading.Event(), list[str]()
    done = threading.Barrier(3, timeout=60)

    started = threading.Barrier(3, timeout=60)  # else what has not begun is cancelled

    def interrupted(futures: Any) -> None:
        started.wait()
        raise KeyboardInterrupt

    def after() -> None:
        used.append(triton.knobs.nvidia.ptxas.version)
        done.wait()

    before = triton.knobs.nvidia.ptxas.version
    monkeypatch.setattr("concurrent.futures.wait", interrupted)
    with monkeypatch.context() as patch:
        watching(patch, launches, lambda: (started.wait(), gone.wait(60)), after)
        with pytest.raises(KeyboardInterrupt):
            ahead.compile_ahead(SPEC.backend("triton").load().forward, call(), True)
        gone.set()
        done.wait()
    with assembling(90):
        assert used == [triton.knobs.nvidia.ptxas.version] * 2
        for launch in launches:
            launch.compiled()
    assert found_on_disk == [False, False, True, True]
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(60)
    assert triton.knobs.nvidia.ptxas.version == before


def test_what_python_refuses_a_thread_once_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, found_on_disk: list[bool]
) -> None:
    """As 3.11 does where two make syntax trees at once (core/assembler.py)."""
    kernels_of(call())
    refused = set[int]()

    def parse(*given: Any, plain: Any = ast.parse, **named: Any) -> Any:
        thread = threading.get_ident()
        if thread != threading.main_thread().ident and thread not in refused:
            refused.add(thread)
            raise SystemError("AST constructor recursion depth mismatch (before=84, after=66)")
        return plain(*given, **named)

    monkeypatch.setattr(ast, "parse", parse)
    assert ahead.compile_ahead(SPEC.backend("triton").load().forward, call(), True) == ""
    assert refused and found_on_disk == [False, False]


def test_a_compilation_that_fails_fails_where_it_is_wanted_and_not_once_it_is_cured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = kernels_of(call())

    def full() -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        watching(patch, launches, full)
        said = ahead.compile_ahead(SPEC.backend("triton").load().forward, call(), True)
        assert said == "OSError: [Errno 28] No space left on device"
        for launch in launches:
            with pytest.raises(OSError, match="No space left"):
                launch.compiled()
    for launch in launches:
        assert launch.compiled().metadata.shared >= 0


def test_where_hooks_listen_or_a_mode_is_the_users_own_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, launches = SPEC.backend("triton").load().forward, kernels_of(call())
    watching(monkeypatch, launches, lambda: pytest.fail("nothing is to be compiled"))
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: None)
        assert ahead.compile_ahead(forward, call(), True) == ""
    with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool):
        assert "already active" in ahead.compile_ahead(forward, call(), True)


@pytest.mark.parametrize(("spec", "case"), CASES, ids=lambda value: value.name)
def test_without_numbers_every_call_launches_what_it_launches_with_them(spec: Any, case: Any) -> None:
    """Else other kernels would be compiled than those that are wanted."""
    module = spec.backend("triton").load()
    call, keeps = spec.bind(**case.make(torch.float16, torch.device("cpu"), 0)), (True,) * hasattr(module, "kept")
    with record_launches(TARGETS["sm_90"]):
        outputs = module.forward(call, *keeps)
    grads = tuple(torch.ones_like(out) for out in outputs[: len(spec.output_names)])
    needs = [getattr(call, name) is not None for name in spec.differentiable]
    for compute, given in ((module.forward, (call, *keeps)), (module.backward, (call, outputs, grads, needs))):
        with record_launches(TARGETS["sm_90"]) as right:
            compute(*given)
        with record_launches(TARGETS["sm_90"]) as found:
            compute(*map(ahead.to_meta, given))
        assert right and list(map(told, found)) == list(map(told, right))


def told(launch: Any) -> Any:
    def of(x: Any) -> Any:
        return (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) if isinstance(x, torch.Tensor) else x

    return launch.kernel, launch.grid, [*map(of, launch.arguments)], launch.meta


def test_tensors_that_begin_anywhere_are_asked_of_as_they_lie() -> None:
    def compute(call: Any) -> None:
        assert [x.data_ptr() % 16 for x in (call.q, call.k, call.v)] == [2, 0, 6]

    x = torch.zeros(3, 1 * 70 * 2 * 16 + 8, dtype=torch.float16)
    q, k, v = (x[row, at:][: 70 * 2 * 16].view(1, 70, 2, 16) for row, at in enumerate((1, 0, 3)))
    assert SPEC.bind is not None
    assert ahead.compile_ahead(compute, SPEC.bind(q=q, k=k, v=v)) == ""


def test_it_is_asked_once_of_calls_that_differ_in_rows_and_tokens_alone() -> None:
    asked: list[tuple[str, int]] = []

    def compute(call: Any, keep: bool) -> None:
        asked.append((call.q.device.type, call.q.shape[1]))

    for T, K, keep in ((128, 16, True), (64, 16, True), (64, 32, True), (64, 32, False), (128, 32, False)):
        assert ahead.compile_ahead(compute, call(T, K), keep) == ""
    assert asked == [("meta", 128), ("meta", 64), ("meta", 64)]


def test_what_goes_wrong_is_left_to_the_call() -> None:
    def fails(call: Any) -> None:
        raise RuntimeError("the call will say this")

    assert ahead.compile_ahead(fails, call()) == "RuntimeError: the call will say this"


def test_a_call_of_one_kernel_compiles_it_when_it_launches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rows = SPECS["softmax"], {name: torch.zeros(1, 64, 2, 16, dtype=torch.float16) for name in "qkv"}
    assert spec.bind is not None
    monkeypatch.setattr(ahead, "assembling", lambda arch: pytest.fail("nothing is to be compiled"))
    assert ahead.compile_ahead(spec.backend("triton").load().forward, spec.bind(**rows)) == ""
