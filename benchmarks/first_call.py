"""What the first call of each operator takes, forward and backward, with nothing compiled before. Run it by hand.

    python benchmarks/first_call.py [--only NAME] [--one-by-one]
    .venv/bin/python benchmarks/first_call.py --offline      # without a GPU: what compiling takes
    .venv/bin/python benchmarks/first_call.py --stages       # and which of Triton's stages it takes for each kernel

Each operator runs in a process of its own with an empty Triton cache, on a GPU, all beside each other (--one-by-one: in
turn, as a user meets it). `forward` and `backward` are the seconds of the first call until the GPU is done; `again` is
both a second time; then the kernels by the seconds they took. Counted is all that the call does, not what is there
before it: torch, foci, the GPU's context, and what torch and Triton do once a process, whichever kernel comes first.
That is the first line: torch's first backward of its own that is given a gradient (it imports sympy), Triton's import,
its driver (a module in C, made by gcc once a machine), and the reading of its own library, by which kernels are kept.

--offline: kernels are compiled for sm_90 as a call on a GPU has them compiled, and a driver that launches nothing takes
them; once side by side as it is (core/ahead.py), once one after the other, in turn, with all of this machine's
processors. Medians of --rounds processes. Here too Triton has read its library before.

--stages: the same one after the other, by kernels: `Python` is what becomes of their source, with the interpreter's
lock held, and what Triton looks up before; all other stages let go of it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

ITSELF = "torch and Triton"
OPERATORS = ("per token", "per channel", "delta", "KDA", "softmax causal", "selective_scan", "scan")


def problem(name: str, device: str = "cuda") -> tuple[Callable[..., Any], dict[str, Any]]:
    """The operator, and a small problem of it in bfloat16."""
    import foci
    from foci.ops.masks import Causal

    B, T, H, K, D, N = 1, 512, 4, 128, 512, 16

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_()

    def gate(*shape: int) -> torch.Tensor:
        return (-torch.rand(shape, device=device)).requires_grad_()

    rows, beta = {each: half(B, T, H, K) for each in "qkv"}, torch.rand(B, T, H, device=device)
    tokens = {each: half(B, T, D) for each in ("x", "dt")} | {each: half(B, T, N) for each in "BC"}
    return {
        "per token": (foci.linear_attention, {**rows, "log_decay": gate(B, T, H)}),
        "per channel": (foci.linear_attention, {**rows, "log_decay": gate(B, T, H, K)}),
        "delta": (foci.delta_rule, {**rows, "beta": beta, "log_decay": gate(B, T, H)}),
        "KDA": (foci.delta_rule, {**rows, "beta": beta, "log_decay": gate(B, T, H, K)}),
        "softmax causal": (foci.attention, {**rows, "mask": Causal()}),
        "selective_scan": (foci.selective_scan, {**tokens, "A": gate(D, N)}),
        "scan": (foci.scan, {"x": tokens["x"], "log_decay": gate(B, T, D)}),
    }[name]


def itself() -> dict[str, float]:
    """The seconds of what torch and Triton do once a process, and once a machine, on a GPU."""
    x = torch.ones(1, device="cuda", requires_grad=True)
    double = 2 * x
    torch.cuda.synchronize()
    marks = [time.perf_counter()]
    double.backward(torch.ones_like(double))
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    import triton

    marks.append(time.perf_counter())
    driver = triton.runtime.driver.active
    driver.get_current_target()  # until it is asked for something it is not made
    marks.append(time.perf_counter())
    read_library()
    marks.append(time.perf_counter())
    said = ("torch's first gradient", "Triton's import", "its driver", "its library read")
    return dict(zip(said, (b - a for a, b in itertools.pairwise(marks)), strict=True))


def read_library() -> None:
    """Have Triton read all of its library, once a process: what it keeps on disk is found by that."""
    from triton.runtime.cache import triton_key

    triton_key()


def one(name: str) -> None:
    """Print one row of the table."""
    from foci.core import tune

    before = itself()
    if name == ITSELF:
        return print(f"{name}:", ", ".join(f"{what} {seconds:.1f}" for what, seconds in before.items()), flush=True)
    taken: list[tuple[float, str]] = []
    start = tune._start

    def timed(kernel: Any, *rest: Any) -> None:
        began = time.perf_counter()
        start(kernel, *rest)
        taken.append((time.perf_counter() - began, kernel.__name__))

    tune._start = timed
    function, given = problem(name)
    given["backend"] = "triton"
    torch.cuda.synchronize()
    marks = []
    for _ in range(2):
        marks.append(time.perf_counter())
        out = function(**given)
        out = out[0] if isinstance(out, tuple) else out
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
        for leaf in (x for x in given.values() if isinstance(x, torch.Tensor)):
            leaf.grad = None  # the second time adds to nothing either
    forward, backward, again = marks[1] - marks[0], marks[2] - marks[1], marks[5] - marks[3]
    kernels = ", ".join(f"{kernel} {seconds:.1f}" for seconds, kernel in sorted(taken, reverse=True) if seconds > 0.05)
    print(f"{name:16}{forward:8.1f}{backward:9.1f}{again:9.4f}  {kernels}", flush=True)


def offline(name: str, beside: bool) -> tuple[float, float]:
    """The seconds of a forward and of a backward whose kernels nobody compiled before."""
    from unittest.mock import patch

    from host import playing, pretending

    from foci.core import library
    from foci.ops import SPECS

    function, given = problem(name, "cpu")
    operator = next(spec for spec in SPECS.values() if spec.function == function.__name__)
    backend, call = operator.backend("triton"), operator.bind(**given)
    module, keeps = backend.load(), hasattr(backend.load(), "kept")
    alone = patch.object(library, "compile_ahead", lambda *_: "")
    read_library()
    with pretending(), playing(), torch.no_grad(), contextlib.nullcontext() if beside else alone:
        began = time.perf_counter()
        outputs = library._run_backend(backend, module.forward, call, *(True,) * keeps)
        forward = time.perf_counter()
        grads = (torch.ones_like(outputs[0]), *(None,) * (len(operator.output_names) - 1))
        needs = [getattr(call, argument) is not None for argument in operator.differentiable]
        library._run_backend(backend, module.backward, call, outputs, grads, needs)
    return forward - began, time.perf_counter() - forward


def stages(name: str) -> None:
    """Print the seconds of each kernel's stages."""
    import triton

    def told(*, src: Any, times: Any, **_: Any) -> None:
        taken = (times.ir_initialization, *(microseconds for _, microseconds in times.lowering_stages))
        print(f"{name:16}{src.name:26}", *(f"{1e-6 * each:7.2f}" for each in taken), flush=True)

    triton.knobs.compilation.listener = told
    offline(name, False)


def on_gpu(only: str, in_turn: bool) -> bool:
    """The table on a GPU; whether all went well."""
    running = []
    with tempfile.TemporaryDirectory() as folder:
        for name in (ITSELF, *(name for name in OPERATORS if only in name)):
            empty = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/{name.replace(' ', '_')}"}
            running.append(subprocess.Popen([sys.executable, __file__, "--one", name], env=empty))
            if in_turn or name == ITSELF:
                running[-1].wait()
            if name == ITSELF:
                print(f"{'':16} forward backward    again  kernels", flush=True)
        codes = [process.wait() for process in running]
    return not any(codes)


def all_offline(only: str, rounds: int) -> None:
    """The table of --offline."""
    from foci.core.device import cores

    print(f"torch {torch.__version__}, {cores()} processors, seconds: one by one -> side by side")
    for name in OPERATORS:
        if only not in name:
            continue
        found: dict[str, list[list[float]]] = {"after": [], "beside": []}
        for how in ("after", "beside") * rounds:
            with tempfile.TemporaryDirectory() as folder:
                found[how].append(_asked(name, how, folder))
        middle = {how: [statistics.median(column) for column in zip(*rows, strict=True)] for how, rows in found.items()}
        said = [f"{a:5.1f} -> {b:.1f}" for a, b in zip(middle["after"], middle["beside"], strict=True)]
        print(f"{name:16} forward {said[0]}   backward {said[1]}", flush=True)


def all_stages(only: str) -> None:
    """The table of --stages."""
    print(f"{'':42}", *(f"{stage:>7}" for stage in ("Python", "ttir", "ttgir", "llir", "ptx", "cubin")), flush=True)
    for name in OPERATORS:
        if only in name:
            with tempfile.TemporaryDirectory() as folder:
                print(_said(name, "stages", folder), end="", flush=True)


def _asked(name: str, how: str, folder: str) -> list[float]:
    return [float(word) for word in _said(name, how, folder).split()]


def _said(name: str, how: str, folder: str) -> str:
    command, empty = [sys.executable, __file__, "--one", name, "--how", how], {**os.environ, "TRITON_CACHE_DIR": folder}
    return subprocess.run(command, env=empty, stdout=subprocess.PIPE, check=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators whose name holds this")
    parser.add_argument("--one-by-one", action="store_true", help="no two processes at a time")
    parser.add_argument("--one", choices=(ITSELF, *OPERATORS), help=argparse.SUPPRESS)
    parser.add_argument("--how", choices=("after", "beside", "stages"), help=argparse.SUPPRESS)
    parser.add_argument("--offline", action="store_true", help="compile, and launch nothing")
    parser.add_argument("--stages", action="store_true", help="compile kernel by kernel, and launch nothing")
    parser.add_argument("--rounds", type=int, help="of --offline, 3 by default")
    chosen = parser.parse_args()
    if chosen.offline + chosen.stages + chosen.one_by_one > 1:
        parser.error("expected one of --offline, --stages and --one-by-one")
    if chosen.rounds is not None and (not chosen.offline or chosen.rounds < 1):
        parser.error(f"--rounds {chosen.rounds}: expected 1 at least, with --offline")
    if not any(chosen.only in name for name in OPERATORS):
        parser.error(f"--only {chosen.only}: expected a part of a name among {', '.join(OPERATORS)}")
    if not (chosen.offline or chosen.stages or chosen.how or torch.cuda.is_available()):
        raise SystemExit("first_call.py: it needs a GPU, and there is none here; --offline and --stages do without one")
    if chosen.one and chosen.how == "stages":
        return stages(chosen.one)
    if chosen.one:
        return print(*offline(chosen.one, chosen.how == "beside")) if chosen.how else one(chosen.one)
    if chosen.stages:
        return all_stages(chosen.only)
    if chosen.offline:
        return all_offline(chosen.only, chosen.rounds or 3)
    print(f"torch {torch.__version__}, seconds", flush=True)
    if not on_gpu(chosen.only, chosen.one_by_one):
        sys.exit(1)


if __name__ == "__main__":
    main()
