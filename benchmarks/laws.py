"""Every law of every operator on one GPU, as much as the time allows. Run it by hand.

    python benchmarks/laws.py [OPERATOR...] [--dtype bfloat16] [--limit 150] [--out FOLDER]

Most of that time goes into compiling. So first the kernels that the cases launch are compiled, side by side, into
Triton's cache; then `foci check --laws` runs for groups of laws, one process each and all at once. It prints what was
broken, and a line for each operator: how many rows hold, are broken, were not asked. FOLDER gets each group's table and
its JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kernels_compile import identity

from foci.bench.tuning import META
from foci.check import isolate
from foci.check.exam import ROOM
from foci.check.laws_graph import LAWS
from foci.check.run import OVER
from foci.cli_tune import DTYPES
from foci.cli_tune_ahead import Offline, each, gpu
from foci.core.assembler import assembling
from foci.core.device import cores
from foci.core.spec import Case, Spec
from foci.core.tune import Launch, Target, recording, target_of
from foci.ops import SPECS

# The more distinct kernels the cases of an operator launch, the more processes: 117 of softmax, 296 of linear
# attention, 279 of the delta rule, 57 of the selective scan, 24 of the scan. Laws of a group launch much the same.
# Of the delta rule some take longest, which is Python's time: parts of the cases each, i/n of `foci check --cases`.
GROUPS = {
    "softmax": ("1,2,3", "4,5,6,7", "8,9,15", "10,11,12,13,14"),
    "linear": ("1,2,3", "4,5,6,7", "8,9,15", "10,11,12,13,14"),
    "delta": (
        *("1,2,3", "5,6,7", "9,15", "10,11,13,14"),
        *("4 1/2", "4 2/2", "8 1/4", "8 2/4", "8 3/4", "8 4/4", "12 1/3", "12 2/3", "12 3/3"),
    ),
    "selective_scan": ("1,2,3,4,5", "6,7,8,9,15", "10,11,12,13,14"),
    "scan": ("1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",),
}
SHARE = 0.45  # of the time at most, that compiling before the laws may take


def apart(laws: str) -> tuple[str, str]:
    """The numbers of a group of laws, and of which cases, "" for all."""
    numbers, _, cases = laws.partition(" ")
    return numbers, cases


class Group(NamedTuple):
    """Some laws of an operator, of all cases or a part of them, and the process that asks them."""

    operator: str
    laws: str
    report: Path
    process: subprocess.Popen[bytes]

    @property
    def numbers(self) -> list[int]:
        return [int(number) for number in apart(self.laws)[0].split(",")]

    @property
    def part(self) -> str:
        """Of which cases its rows are, as words behind a law's name."""
        _, cases = apart(self.laws)
        return f" of cases {cases}" if cases else ""

    def rows(self) -> list[dict[str, Any]]:
        """What its laws found; a law of which there is no word was not asked."""
        with suppress(FileNotFoundError, json.JSONDecodeError):
            rows: list[dict[str, Any]] = json.loads(self.report.read_text())["rows"]
            return [row | {"law": row["law"] + self.part} for row in rows]
        left: list[dict[str, Any]] = []
        if self.process.returncode != -signal.SIGKILL:  # it was not out of time: it died
            said = self.report.with_suffix(".txt").read_text(errors="replace").strip().splitlines()[-1:]
            failure = {"sentence": f"exit code {self.process.returncode}: {''.join(said)}", "cases": []}
            left = [{"number": self.laws, "law": "not asked", "verdict": "FAIL", "failures": [failure]}]
        laws = [law for law in LAWS if law.number in self.numbers]
        unasked = {"verdict": "not tested", "reason": OVER}
        return left + [{"number": law.number, "law": law.name + self.part} | unasked for law in laws]


def launches(spec: Spec, case: Case, dtype: torch.dtype, target: Target) -> list[Launch]:
    """What the laws make a case launch: forward as it is, forward that keeps, and backward from every output."""
    assert spec.bind is not None and spec.outputs is not None
    module, call = spec.backend("triton").load(), spec.bind(**case.make(dtype, META, 0))
    with recording(target) as found:
        module.forward(call)
        outputs = module.forward(call, *((True,) if hasattr(module, "kept") else ()))
        grads = tuple(torch.ones_like(output) for output in outputs[: len(spec.outputs(call))])
        needs = [getattr(call, name) is not None for name in spec.differentiable]
        module.backward(call, outputs, grads, needs)
    return found


def launched(spec: Spec, dtype: torch.dtype, target: Target) -> Iterator[Launch]:
    """What the laws make all cases launch, the large ones too."""
    for case in (*spec.cases, *spec.large):
        with suppress(Exception):  # whatever it is, the laws meet it again and say so
            yield from launches(spec, case, dtype, target)


def compile_ahead(operators: Sequence[str], dtype: torch.dtype, target: Target, until: float) -> tuple[int, int]:
    """Compile what all cases launch, the backwards first, as they take longest; how many there are, how many fail."""
    from triton.runtime import driver

    kernels: dict[str, Launch] = {}
    for operator in operators:
        for launch in launched(SPECS[operator], dtype, target):
            kernels.setdefault(identity(launch, target), launch)
    ordered = sorted(kernels.values(), key=lambda launch: "backward" not in launch.kernel.__name__)

    def work(launch: Launch) -> str:
        driver.set_active(Offline(gpu(target)))
        with assembling(target.arch):
            launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.meta)
        return ""

    said = each(work, ordered, workers=cores(), until=until, context="fork")  # launches cannot be sent
    return len(ordered), sum(map(bool, said))


def ask(operator: str, laws: str, chosen: argparse.Namespace, dtype: str, until: float) -> Group:
    """Begin to ask a group of laws."""
    name = f"check_{operator}_{dtype}_{laws.split(',')[0]}".replace(" ", "_").replace("/", "of")
    numbers, cases = apart(laws)
    report = Path(chosen.out) / f"{name}.json"
    within = max(10.0, until - time.monotonic() - 5)
    backend = "triton" if chosen.device == "cuda" else "chunked"
    command = [
        sys.executable, "-m", "foci", "check", operator, "--backend", backend, "--device", chosen.device,
        "--dtype", dtype, "--laws", numbers, "--limit", f"120,{within:.0f}", "--json", str(report),
        *(("--cases", cases) if cases else ()),
    ]  # fmt: skip
    with report.with_suffix(".txt").open("wb") as said:
        return Group(operator, laws, report, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT))


def ask_each(chosen: argparse.Namespace, most: int, until: float) -> list[Group]:
    """Begin to ask every group of laws, at most so many at once until time is over."""
    groups: list[Group] = []
    for operator, laws in [(name, laws) for name in chosen.operators for laws in GROUPS[name]]:
        while sum(group.process.poll() is None for group in groups) >= most and time.monotonic() < until:
            time.sleep(0.1)
        groups.append(ask(operator, laws, chosen, chosen.dtype, until))
    return groups


def finish(groups: Sequence[Group], until: float) -> None:
    """Wait for all, and for none past `until`."""
    for group in groups:
        with suppress(subprocess.TimeoutExpired):
            group.process.wait(max(0.1, until - time.monotonic()))
        group.process.kill()
        group.process.wait()


def summary(operator: str, dtype: str, groups: Sequence[Group]) -> Iterator[str]:
    """What was broken, then how many rows hold, are broken, were not asked and do not apply."""
    rows = [row for group in groups for row in group.rows()]
    held = [row for row in rows if row["verdict"] == "ok"]
    broken = [row for row in rows if row["verdict"] == "FAIL"]
    unasked = [row for row in rows if row["verdict"] == "not tested" and row["reason"] == OVER]
    for row in broken:
        for failure in row["failures"]:
            yield f"FAIL {operator} {dtype} {row['number']} {row['law']}: {failure['sentence']} {failure['cases'][:4]}"
    named = ", ".join(f"{row['number']} {row['law']}" for row in unasked)
    rest = len(rows) - len(held) - len(broken) - len(unasked)
    yield (
        f"{operator} {dtype}: {len(held)} held, {len(broken)} broken, {len(unasked)} not asked"
        f"{f' ({named})' * bool(unasked)}, {rest} do not apply"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", default=list(GROUPS), help=", ".join(GROUPS))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=_seconds, default=150.0, help="seconds in all")
    parser.add_argument("--out", default="", help="a folder for each group's table and JSON")
    chosen = parser.parse_args()
    if unknown := set(chosen.operators) - set(GROUPS):
        parser.error(f"unknown operator {min(unknown)!r}; expected among {', '.join(GROUPS)}")
    began = time.monotonic()
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
        groups = ask_each(chosen, most, until)
        finish(groups, until)
        lines = [
            line for o in chosen.operators for line in summary(o, chosen.dtype, [g for g in groups if g.operator == o])
        ]
    print("\n".join(sorted(lines, key=lambda line: line.startswith("FAIL"), reverse=True)))
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    sys.exit(any("FAIL" in line or ": 0 held" in line for line in lines))


if __name__ == "__main__":
    main()
