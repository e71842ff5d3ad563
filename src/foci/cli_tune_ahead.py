"""Compiles what `foci tune` and `foci bench` are about to time, side by side, into Triton's cache on disk."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from foci.bench.tuning import META, Ahead, Attempt, Problem
from foci.core.assembler import assembling
from foci.core.spec import Case, Spec
from foci.core.tune import Config, Target, override_configs, record_launches
from foci.ops import SPECS

LIMIT = 90.0  # seconds that one compilation may take


class Task(NamedTuple):
    """An attempt in words that another process understands."""

    operator: str
    problem: str
    stage: str
    dtype: torch.dtype
    target: Target
    place: tuple[str, str]
    config: Config | None
    cache: str


class Offline:
    """What Triton asks of a driver to compile: which GPU it is for. No process but the one that times wakes the GPU."""

    def __init__(self, target: Any, device: int = 0) -> None:
        self.target, self.device = target, device

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def gpu(target: Target) -> Any:
    """The target in Triton's words."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(target.kind, target.architecture if target.kind == "hip" else target.arch, target.lanes)


def launchable(kernel: Any) -> None:
    """Have the launcher of a compiled kernel on disk beside it: Triton 3.6 has a compiler of C make one, 0.2 s each.

    Left to the launch, they would be made one after the other.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher") and kernel.metadata.target.backend == "cuda":  # from 3.7 one serves all
        driver.CudaLauncher(kernel.src, kernel.metadata)


def warm(spec: Spec, cases: Sequence[Case], dtype: torch.dtype, target: Target, *, workers: int) -> None:
    """Compile what the problems launch, forward and backward, as configured; in forks, which have imported it all."""
    attempts = [Attempt(case, stage, ("", "")) for case in cases for stage in ("forward", "backward")]
    ahead(spec.name, dtype, target, workers=workers, context="fork")(attempts)


@contextmanager
def side_by_side(workers: int) -> Iterator[None]:
    """Within it, kernels that tune themselves (peers' do) have their candidates compiled side by side beforehand.

    Otherwise hundreds are compiled one after the other. Which of them they take is still theirs to measure, for 20 ms
    each where Triton would take 100.
    """
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    plain, hurried = Autotuner.prune_configs, list[Any]()

    def prune(self: Any, kwargs: dict[str, Any]) -> Any:
        found = plain(self, kwargs)
        given, there = list(self.nargs.values()), Offline(*_current(driver))

        def work(config: Any) -> str:
            driver.set_active(there)
            launchable(self.fn.run(*given, **{**kwargs, **config.all_kwargs(), "warmup": True}))
            return ""

        if len(found) > 1:
            each(work, found, workers=workers, context="fork")  # arguments of a launch cannot be sent
        if self._do_bench is None:
            vars(self)["do_bench"] = partial(do_bench, warmup=5, rep=20)  # in place of what would be found once
            hurried.append(self)
        return found

    Autotuner.prune_configs = prune
    try:
        yield
    finally:
        Autotuner.prune_configs = plain
        for tuner in hurried:
            vars(tuner).pop("do_bench", None)


def _current(driver: Any) -> tuple[Any, int]:
    return driver.active.get_current_target(), driver.active.get_current_device()


def ahead(
    operator: str, dtype: torch.dtype, target: Target, *, workers: int, until: float = math.inf,
    context: str = "forkserver",
) -> Ahead:  # fmt: skip
    """What `search` asks to compile its attempts, at most `workers` at a time and none after `until` (monotonic)."""

    def compile_all(attempts: Sequence[Attempt]) -> list[str]:
        from triton import knobs

        where = str(knobs.cache.dir)
        tasks = [Task(operator, a.case.name, a.stage, dtype, target, a.place, a.config, where) for a in attempts]
        return each(compiled, tasks, workers=workers, until=until, context=context)

    return compile_all


def compiled(task: Task) -> str:
    """Compile the kernels of one attempt as they will be launched; why it cannot be launched, empty where it can."""
    import triton

    triton.runtime.driver.set_active(Offline(gpu(task.target)))
    triton.knobs.cache.dir = task.cache
    spec = SPECS[task.operator]
    assert spec.bind is not None
    case = next(shape for shape in spec.shapes if shape.name == task.problem)
    call = spec.bind(**case.make(task.dtype, META, 0))
    chosen = {} if task.config is None else {task.place: task.config}
    with record_launches(task.target) as launches, override_configs(chosen):
        run = Problem(spec, spec.backend("triton").load(), call).passes()[task.stage]
        launches.clear()
        run()
    kernels = []
    for launch in launches:
        if task.config is None or task.config.meta.items() <= launch.meta.items():
            with assembling(task.target.arch):
                kernels.append(launch.compiled())
            if (shared := kernels[-1].metadata.shared) > task.target.shared:
                return f"{shared} bytes of shared memory, the GPU has {task.target.shared}"
    for kernel in kernels:
        launchable(kernel)
    return ""


def each(
    work: Callable[[Any], str], tasks: Sequence[Any], *, workers: int, until: float = math.inf, limit: float = LIMIT,
    context: str = "forkserver",
) -> list[str]:  # fmt: skip
    """What `work` says of every task, each in a process of its own: a compiler that dies or hangs takes only its task.

    An exception says nothing here: the task will fail again where it is wanted, and is told there.
    """
    start: Any = multiprocessing.get_context(context)
    if context == "forkserver":
        start.set_forkserver_preload([__name__, "triton"])
    said = [""] * len(tasks)
    waiting = list(reversed(range(len(tasks))))
    running: dict[int, tuple[BaseProcess, Connection, float]] = {}
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and len(running) < workers:
                place = waiting.pop()
                here, there = start.Pipe(duplex=False)
                process = start.Process(target=_say, args=(work, tasks[place], there), daemon=True)
                process.start()
                there.close()
                running[place] = process, here, time.monotonic()
            wait([process.sentinel for process, *_ in running.values()], timeout=0.5)
            for place, (child, pipe, since) in list(running.items()):
                late = time.monotonic() - since > limit
                if not child.is_alive() or late:
                    said[place] = _verdict(child, pipe, f"its compiler took more than {limit:.0f} s" if late else "")
                    del running[place]
    finally:
        for child, pipe, _ in running.values():
            _verdict(child, pipe, "")
    return said


def _verdict(process: BaseProcess, here: Connection, late: str) -> str:
    """What a process said before it ended, or how it ended without a word."""
    process.kill()
    process.join()
    try:
        said: str = here.recv()
    except EOFError:
        said = late or f"its compiler died (exit code {process.exitcode})"
    here.close()
    return said


def _say(work: Callable[[Any], str], task: Any, pipe: Connection) -> None:
    """In the child, in silence: what a compiler prints of a candidate is not the user's concern. On one thread, since a
    fork has none of its parent's.
    """
    torch.set_num_threads(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        pipe.send(work(task))
    except Exception:  # whoever times the task compiles it again, and says why it fails
        pipe.send("")
