"""Every law of every operator on one GPU, as much as the time allows. Run it by hand.

    python benchmarks/laws.py [OPERATOR...] [--dtype bfloat16] [--limit 150] [--out FOLDER]

Most of that time goes into compiling. So first the kernels that the cases launch are compiled, side by side, into
Triton's cache, their launchers too; then `foci check --cases` runs for parts of the cases, one process each, as many at
once as the GPU has room for: few, as kernels of several processes take turns on it, and the truth is a loop of short
ones. It prints what was broken, and a line for each operator: how many laws of a part hold, are broken, were not asked.
FOLDER gets each part's table and its JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kernels_compile import identity

from foci.bench.tuning import META
from foci.check import isolate
from foci.check.exam import ROOM, UNROOMY, Exam
from foci.check.laws_graph import LAWS
from foci.check.run import OVER
from foci.cli import main
from foci.cli_check import of_cases
from foci.cli_tune import DTYPES
from foci.cli_tune_ahead import Offline, each, gpu, launchable
from foci.core.assembler import assembling
from foci.core.device import cores
from foci.core.spec import Candidate, Case, Spec
from foci.core.tune import Launch, Target, recording, target_of
from foci.ops import SPECS

# Parts of the cases, i/n of `foci check --cases`: together as many as an H200 has room for, what else it may be asked
# beside them too (benchmarks/h200.sh).
PARTS = {"softmax": 2, "linear": 3, "delta": 3, "selective_scan": 1, "scan": 1}
SHARE = 0.45  # of the time at most, that compiling before the laws may take
SPARE = 10.0  # seconds before the end: a part finds its GPU in some, and writes what it knows in others
STOPPED = 124  # exit code of a part that was out of time


class Part(NamedTuple):
    """A part of an operator's cases, as `--cases` has it, and the process that asks all laws of them."""

    operator: str
    cases: str
    report: Path
    process: BaseProcess

    def rows(self) -> list[dict[str, Any]]:
        """What its laws found; a law of which there is no word was not asked."""
        with suppress(FileNotFoundError, json.JSONDecodeError):
            report: dict[str, Any] = json.loads(self.report.read_text())
            small = any(each.startswith(UNROOMY) for each in report["not_tested"])
            return [row | {"cases": self.cases, "small": small} for row in report["rows"]]
        left: list[dict[str, Any]] = []
        if self.process.exitcode not in (STOPPED, -signal.SIGTERM, -signal.SIGKILL):  # it was not out of time: it died
            said = self.report.with_suffix(".txt").read_text(errors="replace").strip().splitlines()[-1:]
            failure = {"sentence": f"exit code {self.process.exitcode}: {''.join(said)}", "cases": []}
            left = [{"number": 0, "law": "not asked", "verdict": "FAIL", "failures": [failure], "cases": self.cases}]
        unasked = {"verdict": "not tested", "reason": OVER, "cases": self.cases}
        return left + [{"number": law.number, "law": law.name} | unasked for law in LAWS]


def parts_of(operators: Sequence[str]) -> list[tuple[str, str]]:
    """(operator, i/n) of every part; the first of each operator first, for a GPU without room for all."""
    parts = [(i, operator) for operator in operators for i in range(1, PARTS[operator] + 1)]
    return [(operator, f"{i}/{PARTS[operator]}") for i, operator in sorted(parts, key=itemgetter(0))]


def launches(
    spec: Spec, case: Case, dtype: torch.dtype, target: Target, through: str = "", leaf: str = ""
) -> list[Launch]:  # fmt: skip
    """What the laws make a case launch: forward as it is, forward that keeps, and backward.

    Gradients come `through` one output where it is named, and go to one `leaf`; otherwise through and to all.
    """
    assert spec.bind is not None and spec.outputs is not None
    module, call = spec.backend("triton").load(), spec.bind(**case.make(dtype, META, 0))
    with recording(target) as found:
        module.forward(call)
        outputs = module.forward(call, *((True,) if hasattr(module, "kept") else ()))
        given = zip(spec.output_names, outputs[: len(spec.outputs(call))], strict=True)
        grads = tuple(torch.ones_like(output) if through in ("", name) else None for name, output in given)
        needs = [getattr(call, name) is not None and leaf in ("", name) for name in spec.differentiable]
        if any(needs):
            module.backward(call, outputs, grads, needs)
    return found


def launched(spec: Spec, dtype: torch.dtype, target: Target) -> Iterator[Launch]:
    """What the laws make all its cases launch, the large ones too.

    Of few cases gradients come through one output alone, and of the first that has a leaf they go there alone.
    """
    few = [*Exam(spec, Candidate(spec.name, lambda inputs: ()), META, (dtype,)).few(lambda case: True)]
    every = (*spec.cases, *spec.large)
    holders = {leaf: case for case in reversed(every) for leaf in case.make(dtype, META, 0)}
    asked = [(case, "", "") for case in every]
    asked += [(case, output, "") for output in spec.output_names for case in few]
    asked += [(holders[leaf], "", leaf) for leaf in spec.differentiable if leaf in holders]
    for case, *only in asked:
        with suppress(Exception):  # whatever it is, the laws meet it again and say so
            yield from launches(spec, case, dtype, target, *only)


def compile_ahead(operators: Sequence[str], dtype: torch.dtype, target: Target, until: float) -> tuple[int, int]:
    """Compile what all cases launch, the backwards first, as they take longest; how many there are, how many fail."""
    from triton.runtime import driver

    kernels: dict[str, Launch] = {}
    for operator, cases in parts_of(operators):
        for launch in launched(of_cases(SPECS[operator], cases), dtype, target):
            kernels.setdefault(identity(launch, target), launch)
    ordered = sorted(kernels.values(), key=lambda launch: "backward" not in launch.kernel.__name__)

    def work(launch: Launch) -> str:
        driver.set_active(Offline(gpu(target)))
        with assembling(target.arch):
            launchable(launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.meta))
        return ""

    said = each(work, ordered, workers=cores(), until=until, context="fork")  # launches cannot be sent
    return len(ordered), sum(map(bool, said))


def ask(operator: str, cases: str, chosen: argparse.Namespace, until: float) -> Part:
    """Begin to ask all laws of a part of the cases, in a fork of this process: it has imported everything."""
    report = Path(chosen.out) / f"check_{operator}_{chosen.dtype}_{cases.replace('/', 'of')}.json"
    process = multiprocessing.get_context("fork").Process(target=_asked, args=(operator, cases, chosen, report, until))
    process.start()
    return Part(operator, cases, report, process)


def _asked(operator: str, cases: str, chosen: argparse.Namespace, report: Path, until: float) -> None:
    """The process of a part. Its laws are asked in a child of its own, so that what it knows is written in time."""
    torch.set_num_threads(1)  # a fork has none of its parent's
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # as an exception, which ends the child too
    within = max(1.0, until - time.monotonic() - SPARE)
    with report.with_suffix(".txt").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    backend = "triton" if chosen.device == "cuda" else "chunked"
    main([
        "check", operator, "--backend", backend, "--device", chosen.device, "--dtype", chosen.dtype,
        "--cases", cases, "--limit", f"120,{within:.0f}", "--json", str(report),
    ])  # fmt: skip


def ask_each(chosen: argparse.Namespace, most: int, until: float) -> list[Part]:
    """Begin to ask of every part of the cases, at most of so many at once until time is over."""
    parts: list[Part] = []
    for operator, cases in parts_of(chosen.operators):
        while sum(part.process.is_alive() for part in parts) >= most and time.monotonic() < until:
            time.sleep(0.1)
        parts.append(ask(operator, cases, chosen, until))
    return parts


def finish(parts: Sequence[Part], until: float) -> None:
    """Wait for all, and for none past `until`."""
    for part in parts:
        part.process.join(max(0.1, until - time.monotonic()))
        part.process.terminate()
        part.process.join(5)
        part.process.kill()
        part.process.join()


def summary(operator: str, dtype: str, parts: Sequence[Part]) -> Iterator[str]:
    """What was broken, then how many rows hold, are broken, were not asked and do not apply."""
    rows = [row for part in parts for row in part.rows()]
    held = [row for row in rows if row["verdict"] == "ok"]
    broken = [row for row in rows if row["verdict"] == "FAIL"]
    unasked = [row for row in rows if row["verdict"] == "not tested" and row["reason"] == OVER]
    for row in broken:
        for failure in row["failures"]:
            law = f"{row['number']} {row['law']} of cases {row['cases']}"
            yield f"FAIL {operator} {dtype} {law}: {failure['sentence']} {failure['cases'][:4]}"
    laws: dict[str, list[str]] = {}
    for row in unasked:
        laws.setdefault(f"{row['number']} {row['law']}", []).append(row["cases"])
    named = ", ".join(law + f" of {' '.join(of)}" * (len(of) < len(parts)) for law, of in laws.items())
    rest = len(rows) - len(held) - len(broken) - len(unasked)
    small = sorted({row["cases"] for row in rows if row.get("small")})
    yield (
        f"{operator} {dtype}: {len(held)} held, {len(broken)} broken, {len(unasked)} not asked"
        f"{f' ({named})' * bool(unasked)}, {rest} do not apply"
        f"{f'; without large cases, for which there was no room: {chr(32).join(small)}' * bool(small)}"
    )


def _gpu() -> tuple[Target, int]:
    """The GPU as kernels know it, and how many processes it has room for; of a child: what has used one cannot fork."""

    def asked(send: Callable[[Any], None]) -> None:
        send((tuple(target_of(torch.device("cuda", 0))), torch.cuda.mem_get_info(0)[0] // ROOM))

    try:
        found = next(iter(isolate.stream(asked, 60)))
    except Exception as error:
        raise SystemExit(
            f"laws.py: no GPU that can be asked: {error}; --device cpu asks the laws without one"
        ) from None
    if isinstance(found, isolate.Died):
        raise SystemExit(f"laws.py: the GPU cannot be asked: {found.reason}")
    target, room = found
    return Target(*target), max(1, room)


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r}; expected seconds above 0")
    return value


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=_seconds, default=150.0, help="seconds in all")
    parser.add_argument("--out", default="", help="a folder for each part's table and JSON")
    chosen = parser.parse_args()
    if unknown := set(chosen.operators) - set(PARTS):
        parser.error(f"unknown operator {min(unknown)!r}; expected among {', '.join(PARTS)}")
    began = time.monotonic()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whoever asks of GPUs leaves them to forks
    importlib.import_module("torch._dynamo")  # once, in place of once in every part
    until, most = began + chosen.limit, sys.maxsize
    with tempfile.TemporaryDirectory() as folder:
        chosen.out = chosen.out or folder
        Path(chosen.out).mkdir(parents=True, exist_ok=True)
        if chosen.device == "cuda":
            target, most = _gpu()
            count, failed = compile_ahead(
                chosen.operators, DTYPES[chosen.dtype], target, began + SHARE * chosen.limit
            )  # fmt: skip
            print(f"{count} kernels, {failed} not compiled, after {time.monotonic() - began:.0f} s", flush=True)
        parts = ask_each(chosen, most, until)
        finish(parts, until)
        lines = [
            line for o in chosen.operators for line in summary(o, chosen.dtype, [p for p in parts if p.operator == o])
        ]
    print("\n".join(sorted(lines, key=lambda line: line.startswith("FAIL"), reverse=True)))
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    sys.exit(any("FAIL" in line or ": 0 held" in line for line in lines))


if __name__ == "__main__":
    run()
