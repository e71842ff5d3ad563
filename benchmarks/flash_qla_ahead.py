"""FlashQLA's kernels for an H200, compiled where there is no GPU: on one they take minutes of its time. See peers.sh.

    PYTHONPATH=SITE TILELANG_CACHE_DIR=FOLDER python benchmarks/flash_qla_ahead.py [SHAPE...]

SITE has flash_qla and tilelang; nvcc must be there. Every problem of `foci bench delta` that FlashQLA takes and whose
name has one of these words is put to it, forward and both directions, through the peer that the benchmark times.
TileLang compiles for the GPU that torch tells of, so torch is told to tell of one; launches do nothing, and tensors are
on the CPU. What it keeps in FOLDER it finds there on the GPU: the same code, target and versions make the same key.
"""

from __future__ import annotations

import contextlib
import sys
import time
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PEER = ("tilelang.contrib.nvcc", "tilelang.jit")  # which foci does not depend on
WIDTH = "x128"  # of heads, the only one that it has
CPU, GPU = torch.device("cpu"), torch.device("cuda")
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448
)


class OnCPU(TorchFunctionMode):
    """What is asked for on a GPU is made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            return CPU if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value

        return function(*map(moved, args), **{name: moved(value) for name, value in (kwargs or {}).items()})


def told() -> dict[str, Any]:
    """What torch says of an H200."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda index: contextlib.nullcontext(),
        "get_device_capability": lambda *index: (H200.major, H200.minor),
        "get_device_properties": lambda *index: H200,
        "is_current_stream_capturing": lambda: False,
    }


def stand_in() -> None:
    """From here on this process has an H200 that does nothing."""
    for name, answer in told().items():
        setattr(torch.cuda, name, answer)
    version = f"{H200.major}.{H200.minor}"
    nvcc, jit = map(import_module, PEER)
    nvcc.get_target_compute_version = lambda target=None: version
    jit.JITKernel.__call__ = lambda kernel, *arguments, **options: None


def main() -> int:
    stand_in()
    from foci.cli_bench_peers import peers
    from foci.ops import SPECS

    words = sys.argv[1:]
    (peer,) = (each for each in peers("delta", GPU) if each.name == "FlashQLA")
    shapes = [shape for shape in SPECS["delta"].shapes if WIDTH in shape.name and not peer.refuses(shape)]
    if unknown := [word for word in words if not any(word in shape.name for shape in shapes)]:
        names = ", ".join(shape.name for shape in shapes)
        raise SystemExit(f"SHAPE {', '.join(unknown)}: expected a part of a name among {names}")
    for shape in shapes:
        if words and not any(word in shape.name for word in words):
            continue
        began = time.perf_counter()
        given = shape.make(torch.bfloat16, CPU, 0)
        leaves = [x.requires_grad_() for name in ("q", "k", "v", "beta", "log_decay") for x in [given[name]]]
        with OnCPU():
            with torch.no_grad():
                peer.call(given)
            (out,) = peer.call(given)
            torch.autograd.grad(out, leaves, torch.zeros_like(out))
        print(f"{shape.name}: {time.perf_counter() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
