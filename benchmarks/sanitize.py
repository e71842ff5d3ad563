"""Every kernel of ours under NVIDIA's compute-sanitizer on one GPU. Run it by hand.

    python benchmarks/sanitize.py [OPERATOR[:i/n]...] [--tool memcheck,racecheck,...] [--limit SECONDS] [--out FOLDER]

    memcheck   an access outside of what was allocated, or misaligned
    racecheck  a hazard in shared memory: two accesses that no barrier orders
    initcheck  a read of global memory that nothing has written
    synccheck  a barrier that not all threads reach

What runs are the cases of each operator, the large ones too, forward and backward, and its steps of decoding; no
numbers are compared, which is what laws.py is for. Each tensor is an allocation of its own, so that what lies behind
it is nobody's. Unwatched run torch's kernels (initcheck of CUDA 13.5 and later knows all the same what they write), and
what goes by TMA, of which the tools take a box of rows that lie apart for one piece. So initcheck, to which what TMA
has written is unwritten, is asked `--without-tma`, of walks that load and store themselves; memcheck too.

Each part of the cases runs once without a tool, which compiles its kernels, then in a process for each tool, all at
once. A tool is also asked of a kernel in CUDA that does what the tool is there to find: one that sees nothing there is
not believed. FOLDER gets what the tools said.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from arguments import above_0
from torch import Tensor

import foci
from foci.cli_check import FUNCTIONS, candidate_of, of_cases
from foci.cli_tune import DTYPES
from foci.core import tune
from foci.core.spec import Case, Spec
from foci.ops import SPECS
from foci.ops.layer_parts import Norm, convolve, convolve_step, gate, turn, weigh
from laws import operator_of, parts_of

OURS = "^_?[a-z][a-z0-9_]*_kernel$"  # Triton leaves a kernel its name; torch's are mangled (_ZN..)
PLANTED = "planted"
WATCHED = "COMPUTE-SANITIZER"  # how what a tool says begins
HAZARDS = {
    "memcheck": "out[n + threadIdx.x] = 1.0f;",
    "racecheck": "shared[threadIdx.x] = n; out[threadIdx.x] = shared[(threadIdx.x + 32) % 64];",
    "initcheck": "out[threadIdx.x] = fresh[threadIdx.x];",
    "synccheck": "if (threadIdx.x % 2) __syncwarp(0x55555555); out[threadIdx.x] = n;",
}
OPTIONS = {"memcheck": ["--padding", "512"], "racecheck": ["--racecheck-report", "analysis"]}
FOUND = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
FAULT = re.compile(r"=+ (?:Error: |Warning: )?(\S.*)\n=+ +(?:at|and) (\S.*)")
NOT_ITS_NAME = re.compile(r" \[\d+ hazards\]|\+0x[0-9a-f]+|0x[0-9a-f]+ ")


def hazard(tool: str) -> None:
    """The kernel that this tool is to find fault with."""
    from torch.cuda import _compile_kernel  # type: ignore[attr-defined]

    source = f"""extern "C" __global__ void {PLANTED}_kernel(float* out, const float* fresh, int n) {{
        __shared__ float shared[64];
        {HAZARDS[tool]}
    }}"""
    out, fresh = (torch.empty(64, device="cuda") for _ in range(2))
    _compile_kernel(source, f"{PLANTED}_kernel")((1, 1, 1), (64, 1, 1), (out, fresh, 64))
    torch.cuda.synchronize()


def runs(spec: Spec, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """What there is to run of an operator, each with its name."""
    for case in (*spec.cases, *spec.large):
        yield case.name, partial(_both, spec, case, dtype)
    yield "one token", partial(STEPS[spec.name], dtype)
    if spec.name == "linear":
        yield "parts of layers", partial(_parts, dtype)


def _both(spec: Spec, case: Case, dtype: torch.dtype) -> None:
    """Forward as it is, and with gradients of all outputs, and of those that are no logarithms."""
    candidate = candidate_of(spec, FUNCTIONS[spec.name], "triton", "cuda")
    inputs = case.make(dtype, torch.device("cuda"), 0)
    with torch.no_grad():
        candidate.call(inputs)
    leaves = [inputs[name].requires_grad_() for name in spec.differentiable if isinstance(inputs.get(name), Tensor)]
    for left in dict.fromkeys(((), spec.logs)):
        given = dict(zip(candidate.outputs or spec.output_names, candidate.call(inputs), strict=True))
        outputs = [x for name, x in given.items() if name not in left and x.requires_grad]
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs], allow_unused=True)


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def _of_slots() -> Tensor:
    """Of three rows one of padding."""
    return torch.tensor([1, -1, 3], device="cuda")


def _linear(dtype: torch.dtype) -> None:
    q, k, v = _normal(3, 2, 64, dtype=dtype), _normal(3, 2, 64, dtype=dtype), _normal(3, 4, 96, dtype=dtype)
    for shape in ((4,), (3, 4), (3, 4, 64)):
        foci.linear_attention_step(q, k, v, _normal(5, 4, 64, 96), log_decay=-_normal(*shape).abs(), slots=_of_slots())


def _delta(dtype: torch.dtype) -> None:
    q, k, v = _normal(3, 2, 64, dtype=dtype), _normal(3, 2, 64, dtype=dtype) / 8, _normal(3, 4, 96, dtype=dtype)
    for shape in ((4,), (3, 4), (3, 4, 64)):
        gates, beta = -_normal(*shape).abs(), torch.rand(3, 4, device="cuda")
        foci.delta_rule_step(q, k, v, beta, _normal(5, 4, 64, 96), log_decay=gates, slots=_of_slots())


def _scan(dtype: torch.dtype) -> None:
    foci.scan_step(_normal(3, 70, dtype=dtype), -_normal(3, 70).abs(), _normal(3, 70))


def _selective_scan(dtype: torch.dtype) -> None:
    x, dt = _normal(3, 70, dtype=dtype), torch.rand(3, 70, device="cuda").to(dtype)
    b, c = (_normal(3, 16, dtype=dtype) for _ in range(2))
    foci.selective_scan_step(x, dt, -_normal(70, 16).abs(), b, c, _normal(3, 70, 16), skip=_normal(70))


def _paged(dtype: torch.dtype) -> None:
    """Rows of 1, of no and of 300 keys in pages of 16, of 64 and of 128 channels, one token and four."""
    table = torch.randperm(60, device="cuda").view(3, 20).int()
    lengths = torch.tensor([4, 0, 300], device="cuda", dtype=torch.int32)
    for tokens, width in ((1, 64), (1, 128), (4, 128)):
        k, v = (_normal(60, 16, 2, width, dtype=dtype) for _ in range(2))
        foci.attention_paged(_normal(3, tokens, 8, width, dtype=dtype), k, v, table, lengths, backend="triton")


def _parts(dtype: torch.dtype) -> None:
    """What layers have round an operator (ops/layer_parts.py), forward and backward, of sizes that fill no block.

    127 tokens: a stretch of a convolution's backward begins behind them.
    """
    x, other = (_normal(2, 127, 3, 84, dtype=dtype).requires_grad_() for _ in range(2))
    weight, taps, bias = (_normal(*shape, dtype=dtype).requires_grad_() for shape in ((84,), (252, 1, 4), (252,)))
    before, a_log = _normal(2, 3, 252, dtype=dtype).requires_grad_(), _normal(3).requires_grad_()
    ages = torch.cat([torch.arange(n, device="cuda") for n in (2, 0, 65, 60)])
    rows = x.flatten(2)
    found = [
        convolve(rows, taps, bias, "silu", before=before),
        convolve(rows[:1], taps, bias, "silu", ages=ages),
        turn(x, torch.arange(127, device="cuda"), 1e4, 60),
        Norm(mean=False)(x),
        Norm(3, activation="silu", gate_first=True)(x, weight, other),
        gate(rows, bias, a_log, -1.0),
        gate(x, weight, weight, -1.0),
        gate(rows, None, None, -0.125, True),
        weigh(rows, a_log),
        weigh(rows, x[..., 0]),
    ]
    leaves = [x, other, weight, taps, bias, before, a_log]
    torch.autograd.grad(found, leaves, [torch.ones_like(y) for y in found])
    with torch.no_grad():
        convolve_step(x[:, 0].flatten(1), before, taps, bias, "silu")


STEPS: dict[str, Callable[[torch.dtype], None]] = {
    "softmax": _paged, "linear": _linear, "delta": _delta, "scan": _scan, "selective_scan": _selective_scan,
}  # fmt: skip


def work(operator: str, cases: str, dtype: torch.dtype) -> None:
    """The process of a part: what it ran is printed as it goes, so that a time that is over tells how far it came."""
    began = time.monotonic()
    for name, run in runs(of_cases(SPECS[operator], cases), dtype):
        run()
        torch.cuda.synchronize()
        print(f"RAN {operator} {name} ({time.monotonic() - began:.1f} s)", flush=True)
    print("ALL", flush=True)


def command(tool: str | None, task: list[str], chosen: argparse.Namespace) -> list[str]:
    here = [sys.executable, __file__, "--work", *task, "--dtype", chosen.dtype, *["--without-tma"] * chosen.without_tma]
    if tool is None:
        return here
    few = ["--print-limit", "10000", "--num-callers-host", "1"]
    return ["compute-sanitizer", "--tool", tool, "--kernel-name", f"regex={OURS}", *few, *OPTIONS.get(tool, []), *here]


def side_by_side(tasks: dict[str, list[str]], folder: Path, until: float) -> dict[str, str]:
    """What each command said by then, by its name."""
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    begun = {}
    for name, words in tasks.items():
        with (folder / f"{name}.txt").open("w") as said:
            begun[name] = subprocess.Popen(
                words, stdout=said, stderr=subprocess.STDOUT, env=os.environ | alone, start_new_session=True
            )
    for process in begun.values():
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGTERM)
    for process in begun.values():
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
    return {name: (folder / f"{name}.txt").read_text(errors="replace") for name in begun}


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To the tool and to the program that it watches."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def faults(said: str) -> int | None:
    """How many a tool counted; None where it did not come to its end."""
    counted = [int(one or other) for one, other in FOUND.findall(said)]
    return sum(counted) if counted else None


def clean(said: str) -> bool:
    """Whether all of a part ran, and a tool that watched came to its end and has found nothing."""
    return "\nALL" in said and (WATCHED not in said or faults(said) == 0)


def found_in(said: str) -> Counter[str]:
    """What a tool saw and where, each as often as it was said."""
    return Counter(NOT_ITS_NAME.sub("", f"{what} {where}") for what, where in FAULT.findall(said))


def line(name: str, said: str) -> str:
    """How many faults, how much of a part ran, and what did not come to its end: the part, or the tool behind it."""
    count, ended = faults(said), "\nALL" in said
    found = "not counted" if count is None else count or "no"
    if ended:
        end = ", then the tool did not end" if WATCHED in said and count is None else ""
    else:
        over = "it failed" if "\nTraceback" in f"\n{said}" else "its time was over"
        end = f", then {over}" if count is None else ", then it ended"
    return f"{name}: {found} faults, {said.count('RAN ')} ran{end}"


def hold_parts(parser: argparse.ArgumentParser, parts: Sequence[tuple[str, str]]) -> None:
    """Refuses parts that an operator does not have, before any process would find it out."""
    for operator, cases in parts:
        try:
            of_cases(SPECS[operator], cases)
        except ValueError as error:
            parser.error(f"{operator}: {error}")


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", type=operator_of, help=", ".join(SPECS))
    parser.add_argument("--tool", default=",".join(HAZARDS), help="joined by commas")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--without-tma", action="store_true", help="launched is what tensors get that TMA cannot read")
    parser.add_argument("--limit", type=above_0, default=500, help="seconds in all")
    parser.add_argument("--out", default="", help="a folder for what the tools said")
    parser.add_argument("--work", nargs=2, metavar=("WHAT", "PART"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work:
        what, part = chosen.work
        if chosen.without_tma:
            tune.by_tma = lambda x: False  # before kernels are imported
        return hazard(part) if what == PLANTED else work(what, part, DTYPES[chosen.dtype])
    tools = chosen.tool.split(",")
    if unknown := [tool for tool in tools if tool not in HAZARDS]:
        parser.error(f"--tool: unknown {unknown[0]!r}; expected among {', '.join(HAZARDS)}")
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        raise SystemExit("sanitize.py: it needs a GPU and CUDA's compute-sanitizer, one of which is not here")
    parts = parts_of(chosen.operators or SPECS)
    hold_parts(parser, parts)
    until = time.monotonic() + chosen.limit
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(chosen.out or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        named = {f"{operator}_{cases.replace('/', 'of')}": [operator, cases] for operator, cases in parts}
        plain = {f"plain_{name}": command(None, task, chosen) for name, task in named.items()}
        found = side_by_side(plain, folder, until)
        tasks = {f"{tool}_{PLANTED}": command(tool, [PLANTED, tool], chosen) for tool in tools}
        for tool in tools:
            tasks |= {f"{tool}_{name}": command(tool, task, chosen) for name, task in named.items()}
        found |= side_by_side(tasks, folder, until)
    blind = [tool for tool in tools if not faults(found[f"{tool}_{PLANTED}"])]
    for name, said in found.items():
        print(line(name, said))
        if PLANTED not in name:
            print("".join(f"  {count} x {fault}\n" for fault, count in found_in(said).most_common()), end="")
    for tool in blind:
        print(f"{tool} sees nothing in a kernel that was made for it: what it says of the others is not believed")
    sys.exit(bool(blind) or not all(clean(said) for name, said in found.items() if PLANTED not in name))


if __name__ == "__main__":
    run()
