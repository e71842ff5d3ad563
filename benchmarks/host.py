"""What a call costs the host: Python before a kernel starts, per operator, without a GPU. Run it by hand.

    .venv/bin/python benchmarks/host.py [--only softmax] [--rounds 30] [--profile]
    .venv/bin/python benchmarks/host.py --against ../before   # `played` of another tree of foci and of this, in turn

Kernels are compiled for sm_90 as ever (Triton keeps them), and a driver that launches nothing takes them: tensors lie
on the CPU, the launcher itself is not in the numbers (a few microseconds in C). In place of torch's fused kernels there
is only the memory of what they give. Columns, in microseconds a call:

    whole     the public call, launches and all
    Triton    what it takes of it from core/tune.py: launch to the launcher in C
    hosts     the rest of the backend's forward or backward, torch's operators not counted: the goal is 10 a launch
    torch     the operators of torch that the host calls (empty, expand, ...), run again alone
    dispatch  what is left: binding of arguments, choice of a backend, the op, autograd (of one token: in `hosts`)
    played    the public call from the third of its kind on, by its plan (core/plans.py); the others are of calls as
              they are written, which the first ones are
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from kernels_compile import _Offline, gpu
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia.driver import CudaLauncher

import foci
from foci.core import plans, replay, tune
from foci.core.device import Platform
from foci.ops.masks import Causal
from foci.ops.softmax import aten, aten_cuda
from foci.ops.softmax.paged import attention_paged

WAYS = ("forward", "training forward", "backward")
COLUMNS = ("whole", "Triton", "hosts", "torch", "dispatch", "played")
HOPPER = Platform("cuda", (2, 13), (13, 0), (9, 20), (9, 0))
TARGET = tune.TARGETS["sm_90"]._replace(name="NVIDIA H200")


class Nothing(_Offline):
    """A driver whose launches do nothing."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": TARGET.shared},
        load_binary=lambda *_: (1, 1, 0, 0, 1024),
    )

    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> Callable[..., None]:
        """Triton's own, but for what it launches; without the memory that a kernel's descriptors ask for."""
        launcher = CudaLauncher.__new__(CudaLauncher)
        launcher.launch, launcher.arg_annotations, launcher.kernel_signature = (lambda *_: None), (), b""
        launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, False
        launcher.global_scratch_size = launcher.profile_scratch_size = 0
        launcher.global_scratch_align = launcher.profile_scratch_align = 1
        return launcher


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """CPU tensors pass for a GPU's."""
    triton.runtime.driver.set_active(Nothing(gpu(TARGET)))
    with contextlib.ExitStack() as stack:
        for place in ("ops.gpu.interpreting", "core.tune.interpreting"):
            stack.enter_context(patch(f"foci.{place}", lambda: True))
        for place in ("gpu.can_step", "scan.step.can_step", "selective_scan.step.can_step"):
            stack.enter_context(patch(f"foci.ops.{place}", lambda state: True))
        stack.enter_context(patch.dict(tune.TARGETS, sm_90=TARGET))
        stack.enter_context(patch.object(aten, "_kernels", lambda call: aten_cuda.CUDA_KERNELS[:1]))
        stack.enter_context(patch.object(aten_cuda, "platform", lambda device: HOPPER))
        stack.enter_context(
            patch.multiple(aten_cuda.Cudnn, refused=lambda *_: [], _forward=fused, _backward=fused_back)
        )
        yield


def fused(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """One op to autograd, as torch's own is, where a gradient is wanted."""
    trains = torch.is_grad_enabled() and q.requires_grad
    out = torch.addcmul(q, k, v) if trains else torch.empty_like(q)
    return out, q.new_empty((*q.shape[:3], 1), dtype=torch.float32)


def fused_back(self: Any, dout: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.empty_like, given[:3]))


@contextlib.contextmanager
def playing() -> Iterator[None]:
    """Calls are played by their plans."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(tune, "launches_normally", lambda: True))
        stack.enter_context(patch.object(plans, "_current_device", lambda: -1))
        stack.enter_context(patch.object(plans, "on_gpu", lambda x: True))
        stack.enter_context(patch.object(replay, "_stream", lambda device: 0))
        yield


@dataclass
class Timed:
    """One thing to time: `call` is the public one; `host` is the backend's function alone, where there is one."""

    name: str
    call: Callable[[], Any]
    host: Callable[[], Any]
    gradients: bool = False


def half(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=grad)


def small(*shape: int, grad: bool = False) -> torch.Tensor:
    return (-torch.rand(shape)).requires_grad_(grad)


def inputs(grad: bool) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """A small problem of every operator."""
    B, T, H, K, D, N = 2, 128, 4, 64, 64, 16
    rows = {name: half(B, T, H, K, grad=grad) for name in "qkv"}
    brain = {name: half(B, T, H, K, grad=grad, dtype=torch.bfloat16) for name in "qkv"}  # not emulated on a CPU
    gates = {"beta": (-small(B, T, H)).requires_grad_(grad), "log_decay": small(B, T, H, grad=grad)}
    channels = {"x": half(B, T, D, grad=grad), "dt": half(B, T, D, grad=grad), "A": small(D, N, grad=grad)}
    channels |= {name: half(B, T, N, grad=grad) for name in "BC"}
    return {
        "softmax": (foci.attention, rows | {"mask": Causal()}),
        "softmax by aten": (foci.attention, brain | {"mask": Causal()}),
        "linear": (foci.linear_attention, rows | {"log_decay": gates["log_decay"]}),
        "delta": (foci.delta_rule, rows | gates),
        "scan": (foci.scan, {"x": half(B, T, D, grad=grad), "log_decay": small(B, T, D, grad=grad)}),
        "selective_scan": (foci.selective_scan, channels),
    }


def names() -> list[str]:
    """Of all problems; nothing is compiled for it."""
    return [f"{name} {way}" for name in inputs(grad=False) for way in WAYS] + [*tokens()]


def problems() -> Iterator[Timed]:
    """Forward without gradients and with, backward, and one token."""
    from foci.ops import SPECS

    for name, (function, given) in inputs(grad=False).items():
        spec, backend = SPECS[name.split()[0]], "aten" if name.endswith(" aten") else "triton"
        module, call = spec.backend(backend).load(), spec.bind(**given)
        keeps = (True,) if hasattr(module, "kept") else ()
        forward, training, backward = (f"{name} {way}" for way in WAYS)
        yield Timed(
            forward,
            lambda f=function, g=given, b=backend: f(**g, backend=b),
            lambda m=module, c=call: m.forward(c),
        )
        _, leaves = inputs(grad=True)[name]
        yield Timed(
            training,
            lambda f=function, g=leaves, b=backend: f(**g, backend=b),
            lambda m=module, c=call, k=keeps: m.forward(c, *k),
            gradients=True,
        )
        wanted = [x for x in leaves.values() if isinstance(x, torch.Tensor)]
        for _ in range(4):  # the last by its plan, where plans are played
            out = function(**leaves, backend=backend)
        out = out[0] if isinstance(out, tuple) else out
        dout = torch.randn_like(out)
        kept = module.forward(call, *keeps)
        grads = (dout, *(None,) * (len(spec.output_names) - 1))
        needs = [getattr(spec.bind(**leaves), each, None) is not None for each in spec.differentiable]
        yield Timed(
            backward,
            lambda o=out, w=wanted, d=dout: torch.autograd.grad(o, w, d, retain_graph=True),
            lambda m=module, c=call, k=kept, g=grads, n=needs: m.backward(c, k, g, n),
            gradients=True,
        )
    for name, step in tokens().items():
        yield Timed(name, step, step)


def tokens() -> dict[str, Callable[[], Any]]:
    """One token of every operator."""
    B, H, K, D, N = 2, 4, 64, 64, 16
    table, lengths = torch.arange(8, dtype=torch.int32).view(2, 4), torch.full((B,), 200, dtype=torch.int32)
    row = {name: half(B, H, K) for name in "qkv"}
    decay, beta, state = small(B, H), -small(B, H), small(B, H, K, K)
    return {
        "softmax one token": lambda q=half(B, 1, H, K), k=half(B, 256, H, K), v=half(B, 256, H, K): foci.attention(
            q, k, v, backend="triton"
        ),
        "softmax one token, paged": lambda q=half(B, 1, H, K), k=half(8, 64, H, K), v=half(8, 64, H, K): (
            attention_paged(q, k, v, table, lengths, backend="triton")
        ),
        "linear step": lambda: foci.linear_attention_step(**row, log_decay=decay, state=state),
        "delta step": lambda: foci.delta_rule_step(**row, beta=beta, log_decay=decay, state=state),
        "scan step": lambda x=half(B, D), g=small(B, D), s=small(B, D): foci.scan_step(x, g, s),
        "selective_scan step": lambda x=[half(B, D), half(B, D), small(D, N), half(B, N), half(B, N), small(B, D, N)]: (
            foci.selective_scan_step(*x)
        ),
    }


class _Noted(TorchDispatchMode):
    """The operators of torch that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def microseconds(call: Callable[[], Any], times: int = 20) -> float:
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times * 1e6


def measured(it: Timed, rounds: int) -> dict[str, float]:
    """Lower quartiles of this thread's own time, what is compared run in turn: a shared machine has bad seconds."""
    counts: list[Any] = []
    with patch.object(tune, "_start", lambda *given: counts.append(given)):
        it.call()
    with _Noted() as noted:
        it.host()
    views = [call for call in noted.calls if "foci" not in str(call[0])]

    def replay() -> None:
        for func, args, named in views:
            func(*args, **named)

    times: dict[str, list[float]] = {"whole": [], "unlaunched": [], "host": [], "torch": [], "played": []}
    stub = patch.object(tune, "_start", lambda *given: None)
    with contextlib.nullcontext() if it.gradients else torch.no_grad():
        for _ in range(rounds):
            times["whole"].append(microseconds(it.call))
            with stub:
                times["unlaunched"].append(microseconds(it.call))
                times["host"].append(microseconds(it.host))
            times["torch"].append(microseconds(replay))
            with playing():
                for _ in range(3):
                    it.call()
                times["played"].append(microseconds(it.call))
    found = {name: statistics.quantiles(values, n=4)[0] for name, values in times.items()}
    return {
        "launches": len(counts),
        "whole": found["whole"],
        "Triton": found["whole"] - found["unlaunched"],
        "hosts": found["host"] - found["torch"],
        "torch": found["torch"],
        "dispatch": found["unlaunched"] - found["host"],
        "played": found["played"],
    }


def answering(only: str) -> None:
    """Say which problems there are, then of each that is asked for the least time that it takes when it is played."""
    with pretending(), playing():
        its = {it.name: it for it in problems() if only in it.name}
        print(*its, sep="|", flush=True)
        for line in sys.stdin:
            it = its[line.strip()]
            with contextlib.nullcontext() if it.gradients else torch.no_grad():
                for _ in range(3):
                    it.call()
                print(min(microseconds(it.call) for _ in range(25)), flush=True)


def against(other: Path, only: str, rounds: int) -> None:
    """Two processes, each with its own tree, asked in turn, and the least of many times."""
    trees = (other, Path(__file__).parents[1])
    asked = [
        subprocess.Popen(
            [sys.executable, str(tree / "benchmarks" / "host.py"), "--answer", "--only", only], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(tree.resolve() / "src")},
        )
        for tree in trees
    ]  # fmt: skip
    names = [each.stdout.readline().strip().split("|") for each in asked if each.stdout]
    best: dict[tuple[str, int], float] = {}
    for name in names[0] * rounds:
        for place, each in enumerate(asked):
            assert each.stdin and each.stdout
            print(name, file=each.stdin, flush=True)
            best[name, place] = min(best.get((name, place), float("inf")), float(each.stdout.readline()))
    for each in asked:
        each.communicate()
    for name in names[0]:
        print(f"{name:32}{best[name, 0]:8.1f} -> {best[name, 1]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="problems whose name holds this")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="say which functions take the time of each problem")
    parser.add_argument("--against", type=Path, help="the folder of another tree")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.against is not None and chosen.profile:
        parser.error("--profile is of this tree, without --against")
    if chosen.against is not None and not (chosen.against / "src" / "foci" / "__init__.py").is_file():
        parser.error(f"--against {chosen.against}: expected the folder of another tree of foci, with src/foci in it")
    if chosen.rounds < 2:
        parser.error(f"--rounds {chosen.rounds}: expected 2 at least")
    if not any(chosen.only in name for name in names()):
        parser.error(f"--only {chosen.only}: expected a part of a name among {', '.join(names())}")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if chosen.answer:
        return answering(chosen.only)
    if chosen.against is not None:
        return against(chosen.against, chosen.only, chosen.rounds)
    with pretending():
        print(f"torch {torch.__version__} · triton {triton.__version__}")
        print(f"{'':32}launches   whole  Triton   hosts   torch dispatch  played  hosts/launch")
        for it in problems():
            if chosen.only not in it.name:
                continue
            for _ in range(3):
                it.call()
            row = measured(it, chosen.rounds)
            numbers = "".join(
                f"{row[name]:8.1f}" for name in ("whole", "Triton", "hosts", "torch", "dispatch", "played")
            )
            print(
                f"{it.name:32}{row['launches']:8.0f}{numbers}{row['hosts'] / max(1, row['launches']):14.1f}", flush=True
            )
            if chosen.profile:
                with cProfile.Profile() as profile:
                    microseconds(it.call, 500)
                profile.print_stats("tottime")


if __name__ == "__main__":
    main()
