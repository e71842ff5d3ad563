"""What the first call of each operator takes, forward and backward, with nothing compiled before. Run it by hand.

    python benchmarks/first_call.py [--only NAME]

Each operator runs in a process of its own with an empty Triton cache, on a GPU, all beside each other (--one-by-one: in
turn, as a user meets it). `forward` and `backward` are the seconds of the first call until the GPU is done, torch, foci
and the GPU's context being there before; `again` is both a second time; then the kernels by the seconds they took.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

OPERATORS = ("per token", "per channel", "delta", "softmax causal", "selective_scan", "scan")


def problem(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The operator, and a small problem of it in bfloat16."""
    import foci
    from foci.ops.masks import Causal

    B, T, H, K, D, N = 1, 512, 4, 128, 512, 16

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_()

    def gate(*shape: int) -> torch.Tensor:
        return (-torch.rand(shape, device="cuda")).requires_grad_()

    rows = {each: half(B, T, H, K) for each in "qkv"}
    tokens = {each: half(B, T, D) for each in ("x", "dt")} | {each: half(B, T, N) for each in "BC"}
    return {
        "per token": (foci.linear_attention, {**rows, "log_decay": gate(B, T, H)}),
        "per channel": (foci.linear_attention, {**rows, "log_decay": gate(B, T, H, K)}),
        "delta": (foci.delta_rule, {**rows, "beta": torch.rand(B, T, H, device="cuda"), "log_decay": gate(B, T, H)}),
        "softmax causal": (foci.attention, {**rows, "mask": Causal(), "backend": "triton"}),
        "selective_scan": (foci.selective_scan, {**tokens, "A": gate(D, N)}),
        "scan": (foci.scan, {"x": tokens["x"], "log_decay": gate(B, T, D)}),
    }[name]


def one(name: str) -> None:
    """Print one row of the table."""
    from foci.core import tune

    taken: list[tuple[float, str]] = []
    start = tune._start

    def timed(kernel: Any, *rest: Any) -> None:
        began = time.perf_counter()
        start(kernel, *rest)
        taken.append((time.perf_counter() - began, kernel.__name__))

    tune._start = timed
    function, given = problem(name)
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
    forward, backward, again = marks[1] - marks[0], marks[2] - marks[1], marks[5] - marks[3]
    kernels = ", ".join(f"{kernel} {seconds:.1f}" for seconds, kernel in sorted(taken, reverse=True) if seconds > 0.05)
    print(f"{name:16}{forward:8.1f}{backward:9.1f}{again:9.4f}  {kernels}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators whose name holds this")
    parser.add_argument("--one-by-one", action="store_true", help="no two processes at a time")
    parser.add_argument("--one", choices=OPERATORS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        one(chosen.one)
        return
    print(f"torch {torch.__version__}, seconds\n{'':16} forward backward    again  kernels", flush=True)
    running = []
    with tempfile.TemporaryDirectory() as folder:
        for name in OPERATORS:
            if chosen.only in name:
                empty = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/{name.replace(' ', '_')}"}
                running.append(subprocess.Popen([sys.executable, __file__, "--one", name], env=empty))
                if chosen.one_by_one:
                    running[-1].wait()
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit(1)


if __name__ == "__main__":
    main()
