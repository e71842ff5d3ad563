"""Every law of every operator on one GPU, as much as the time allows. Run it by hand.

    python benchmarks/laws.py [OPERATOR...] [--dtype bfloat16] [--limit 150] [--packed FILE] [--out FOLDER]
    python benchmarks/laws.py delta:2/3 linear           # of the delta rule's cases every third, from the second
    python benchmarks/laws.py --drawn 60,7,27 --laws 2   # that law alone, of sixty cases of each that nobody chose

Most of that time goes into compiling. So the kernels that the laws launch (laws_ahead.py) are compiled side by side, a
while before and then beside them; `foci check --cases` runs for parts of the cases, one process each, as many at
once as the GPU has room for: few, as kernels of several processes take turns on it, and the truth is a loop of short
ones. What laws_packed.py has compiled elsewhere is taken from FILE. It prints what was broken, and a line for each
operator: how many laws of a part hold, are broken, were not asked. FOLDER gets each part's table and its JSON.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from arguments import drawing
from laws_ahead import compile_ahead, compile_large

from foci.check import isolate
from foci.check.exam import NO_MEMORY
from foci.check.laws_graph import LAWS
from foci.check.run import OUT_OF_TIME
from foci.cli import main
from foci.cli_check import Drawing, drawn, of_cases
from foci.cli_options import part_of
from foci.cli_tune import DTYPES
from foci.core.spec import Spec
from foci.core.tune import Target, target_of
from foci.ops import SPECS

# Parts of the cases, i/n of `foci check --cases`: an H200 has room for eight of them at once.
PARTS = {"softmax": 2, "linear": 3, "delta": 3, "selective_scan": 1, "scan": 1}
# GiB that a part holds in the mean, with what torch keeps: an H100 has 78.
EACH = {"softmax": 14, "linear": 30, "delta": 25, "selective_scan": 14, "scan": 14}
GRADIENTS = 7  # times the room of a drawn case: what its truth keeps with gradients
SHARE = 0.45  # of the time at most, that compiling before the laws may take
LONG = 250.0  # seconds, in less of which an H200's host would compile large cases' kernels in place of other ones
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
            small = any(each.startswith(NO_MEMORY) for each in report["not_tested"])
            return [row | {"cases": self.cases, "small": small} for row in report["rows"]]
        left: list[dict[str, Any]] = []
        if self.process.exitcode not in (STOPPED, -signal.SIGTERM, -signal.SIGKILL):  # it was not out of time: it died
            text = self.report.with_suffix(".txt")
            said = (text.read_text(errors="replace") if text.exists() else "").strip().splitlines()[-1:]
            failure = {"sentence": f"exit code {self.process.exitcode}: {''.join(said)}", "cases": []}
            left = [{"number": 0, "law": "not asked", "verdict": "FAIL", "failures": [failure], "cases": self.cases}]
        unasked = {"verdict": "not tested", "reason": OUT_OF_TIME, "cases": self.cases}
        return left + [{"number": law.number, "law": law.name} | unasked for law in LAWS]


def parts_of(operators: Sequence[str]) -> list[tuple[str, str]]:
    """(operator, i/n) of every part; the first of each operator first, for a GPU without room for all."""
    parts = []
    for name, _, part in (operator.partition(":") for operator in operators):
        parts += [(name, part)] if part else [(name, f"{i}/{PARTS[name]}") for i in range(1, PARTS[name] + 1)]
    return sorted(dict.fromkeys(parts), key=lambda part: int(part[1].partition("/")[0]))


def specs_of(operators: Sequence[str], drawing: Drawing | None) -> list[Spec]:
    """What each part asks: its cases, or drawn ones, whose numbers take as long to draw as large cases' do."""
    if drawing is None:
        return [of_cases(SPECS[operator], cases) for operator, cases in parts_of(operators)]
    parts = [of_cases(drawn(SPECS[operator], drawing), cases) for operator, cases in parts_of(operators)]
    return [replace(spec, cases=(), large=spec.cases) for spec in parts]


@contextmanager
def compiling(chosen: argparse.Namespace, target: Target, began: float) -> Iterator[None]:
    """What the laws launch is compiled: ahead for a share of the time, then beside what is done within."""
    until, beside = began + chosen.limit, list[tuple[BaseProcess, Connection]]()
    large = chosen.limit >= LONG and chosen.packed is None and chosen.drawn is None  # whoever packed has found them
    for work in (compile_ahead, compile_large) if large else (compile_ahead,):
        here, there = multiprocessing.Pipe(duplex=False)
        told = (work, chosen, target, until, there)
        process = multiprocessing.get_context("fork").Process(target=_compiling, args=told)
        process.start()
        there.close()
        beside.append((process, here))
    for _, here in beside:
        here.poll(max(0.0, began + SHARE * chosen.limit - time.monotonic()))
    try:
        yield
    finally:
        for process, here in beside:
            stop(process, 0.0)
            try:
                print(here.recv(), flush=True)
            except EOFError:
                said = "not all kernels were compiled before the end: laws compiled those that they met first"
                print(said, flush=True)


def _compiling(
    work: Callable[..., None], chosen: argparse.Namespace, target: Target, until: float, pipe: Connection
) -> None:
    _alone()
    work(specs_of(chosen.operators, chosen.drawn), DTYPES[chosen.dtype], target, until, pipe.send)


def _alone() -> None:
    """In a fork: it has none of its parent's threads, and who stops it stops its children too."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))


def ask(operator: str, cases: str, chosen: argparse.Namespace, until: float) -> Part:
    """Begin to ask all laws of a part of the cases, in a fork of this process: it has imported everything."""
    report = Path(chosen.out) / f"check_{operator}_{chosen.dtype}_{cases.replace('/', 'of')}.json"
    for older in (report, report.with_suffix(".txt")):  # of another run, in the same folder
        older.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_asked, args=(operator, cases, chosen, report, until))
    process.start()
    return Part(operator, cases, report, process)


def _asked(operator: str, cases: str, chosen: argparse.Namespace, report: Path, until: float) -> None:
    """The process of a part. Its laws are asked in a child of its own, so that what it knows is written in time."""
    _alone()
    within = max(1.0, until - time.monotonic() - SPARE)
    with report.with_suffix(".txt").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    backend = "triton" if chosen.device == "cuda" else "chunked"
    asked = [f"--{option}={text}" for option in ("drawn", "laws") if (text := getattr(chosen, option)) is not None]
    main([
        "check", operator, "--backend", backend, "--device", chosen.device, "--dtype", chosen.dtype,
        "--cases", cases, "--limit", f"120,{within:.0f}", "--json", str(report), *asked,
    ])  # fmt: skip


def ask_each(chosen: argparse.Namespace, room: float, until: float) -> list[Part]:
    """Begin to ask of every part of the cases, of one at least and of as many at once as have `room`, in GiB."""
    parts: list[Part] = []
    for operator, cases in parts_of(chosen.operators):
        while (held := _held(parts, chosen.drawn)) and time.monotonic() < until:
            if held + _each(operator, chosen.drawn) <= room:
                break
            time.sleep(0.1)
        parts.append(ask(operator, cases, chosen, until))
    return parts


def _held(parts: Sequence[Part], drawing: Drawing | None) -> float:
    return sum(_each(part.operator, drawing) for part in parts if part.process.is_alive())


def _each(operator: str, drawing: Drawing | None) -> float:
    """GiB of a part."""
    return EACH[operator] if drawing is None else GRADIENTS * 2.0 ** (drawing.room - 27) + 1


def finish(parts: Sequence[Part], until: float) -> None:
    """Wait for all, and for none past `until`."""
    for part in parts:
        stop(part.process, max(0.1, until - time.monotonic()))


def stop(process: BaseProcess, patience: float) -> None:
    """Wait so long for it to end, then end it."""
    process.join(patience)
    process.terminate()
    process.join(5)
    process.kill()
    process.join()


def summary(operator: str, dtype: str, parts: Sequence[Part]) -> Iterator[str]:
    """What was broken, then how many rows hold, are broken, were not asked and do not apply, and what took longest."""
    rows = [row for part in parts for row in part.rows()]
    held = [row for row in rows if row["verdict"] == "ok"]
    broken = [row for row in rows if row["verdict"] == "FAIL"]
    unasked = [row for row in rows if row["verdict"] == "not tested" and row["reason"].startswith(OUT_OF_TIME)]
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
    slow = max(rows, key=lambda row: float(row.get("seconds", 0.0)), default={})
    if slow.get("seconds"):
        where = f", {slow['reason']}" * (slow["verdict"] == "not tested")
        yield f"  longest: {slow['number']} {slow['law']} of {slow['cases']}, {slow['seconds']:.0f} s{where}"


def _gpu() -> tuple[Target, float]:
    """The GPU as kernels know it, and its free GiB; asked by a child, as a process that has used one cannot fork."""

    def asked(send: Callable[[Any], None]) -> None:
        if not torch.cuda.is_available():
            return send(None)
        send((tuple(target_of(torch.device("cuda", 0))), torch.cuda.mem_get_info(0)[0] / 2**30))

    try:
        found = next(iter(isolate.stream(asked, 60)))
    except Exception as error:
        raise SystemExit(
            f"laws.py: no GPU that can be asked: {error}; --device cpu asks the laws without one"
        ) from None
    if found is None:
        raise SystemExit("laws.py: there is no GPU here; --device cpu asks the laws without one")
    if isinstance(found, isolate.Died):
        raise SystemExit(f"laws.py: the GPU cannot be asked: {found.reason}")
    target, room = found
    return Target(*target), room


def _number(text: str) -> float:
    """What is none at all is no number of anything."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def operator_of(text: str) -> str:
    """OPERATOR, or OPERATOR:i/n, for argparse."""
    name, mark, part = text.partition(":")
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"unknown operator {name!r}; expected among {', '.join(PARTS)}")
    if not mark:
        return name
    try:
        part_of(f"{name}:", part)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return f"{name}:{'/'.join(str(int(number)) for number in part.split('/'))}"


def hold(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """No part without a case is begun."""
    try:
        specs_of(chosen.operators, chosen.drawn)
    except ValueError as error:
        parser.error(str(error))


def _seconds(text: str) -> float:
    value = _number(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r}; expected seconds above 0")
    return value


def _room(text: str) -> float:
    value = _number(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}; expected GiB, 0 or more")
    return value


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", type=operator_of, help=", ".join(PARTS))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=_seconds, default=150.0, help="seconds in all")
    parser.add_argument("--leave", type=_room, default=0.0, help="GiB of the GPU that others need beside the laws")
    parser.add_argument("--drawn", type=drawing, help="of so many drawn cases of each operator: N,SEED,ROOM")
    parser.add_argument("--laws", help="only laws of these numbers, joined with commas")
    parser.add_argument("--packed", type=Path, help="kernels that laws_packed.py has compiled")
    parser.add_argument("--out", default="", help="a folder for each part's table and JSON")
    chosen = parser.parse_args()
    chosen.operators = list(dict.fromkeys(chosen.operators or PARTS))
    hold(parser, chosen)
    began = time.monotonic()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whoever asks of GPUs leaves them to forks
    importlib.import_module("torch._dynamo")  # once, in place of once in every part
    until, room = began + chosen.limit, math.inf
    with tempfile.TemporaryDirectory() as folder:
        chosen.out = chosen.out or folder
        Path(chosen.out).mkdir(parents=True, exist_ok=True)
        if chosen.packed is not None:
            importlib.import_module("laws_packed").use(chosen.packed, Path(folder, "kernels"))
        ahead: AbstractContextManager[None] = nullcontext()
        if chosen.device == "cuda":
            target, room = _gpu()
            room -= chosen.leave
            ahead = compiling(chosen, target, began)
        with ahead:
            parts = ask_each(chosen, room, until)
            finish(parts, until)
        lines = [
            line
            for operator in dict.fromkeys(part.operator for part in parts)
            for line in summary(operator, chosen.dtype, [part for part in parts if part.operator == operator])
        ]
    print("\n".join(sorted(lines, key=lambda line: line.startswith("FAIL"), reverse=True)))
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    sys.exit(any("FAIL" in line or ": 0 held" in line for line in lines))


if __name__ == "__main__":
    run()
