"""Compiles every Triton kernel for every target without a GPU: registers, spills, memory, instructions, launches.

    python benchmarks/kernels.py [--only linear ...] [--target sm_90 ...] [--all] [--script FILE.py | --drawn 20,7]
                                 [--check | --write] [--triton 3.6.0 newest] [--out FILE.jsonl] [--workers 2]

Every operator's backend named "triton" runs forward and backward on meta tensors, which launches nothing and tells
what would be launched (core/tune.py: recording); each launch is compiled with exactly its arguments and the
configuration that the target selects, and again where a measured table of the package chooses otherwise for its GPU
(kernels_tables.py). --only takes words found in an operator's, variant's or kernel's name. --script compiles what a
file of yours launches instead, --drawn what calls launch that nobody chose (kernels_drawn.py), whose spills are no
fault. --check fails on a spill without a reason, a limit exceeded, a missing matrix instruction, or a table that
differs from docs/kernels.md; --write writes that table. --triton asks other Tritons, each with a table of its own
(kernels_tritons.py). A kernel that has not changed is not compiled again (out/kernels).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported; the interpreter compiles nothing

import torch
import triton
from arguments import above_0, file_to_write
from kernels_compile import compile_all, faults, identity, meta_of, say
from kernels_drawn import specimens
from kernels_page import Row, differences, page, sentence, table
from kernels_specimens import SPECIMENS, Specimen
from kernels_spills import SPILLS, outlived
from kernels_tables import shipped, stale
from kernels_tritons import IDENTITIES, Others, recalled

from foci.core import tune
from foci.core.spec import Spec
from foci.core.tune import TARGETS, ConfigRequest, Launch, Target, override_configs, record_launches
from foci.ops import SPECS

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "out" / "kernels"
PAGE, LINES = ROOT / "docs" / "kernels.md", ROOT / "docs" / "kernels.jsonl"


@dataclass
class Found:
    """What was recorded and compiled: rows as they stand in the table, what is wrong, and spills without a reason."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    spills: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of a processor, for all compilations


def backend_of(spec: Spec) -> ModuleType | None:
    """The operator's Triton backend; one that is written and not yet in the Spec is taken too."""
    registered = [backend.module for backend in spec.backends if backend.name == "triton"]
    assert spec.call is not None
    name = registered[0] if registered else f"{spec.call.__module__.rpartition('.')[0]}.gpu"
    return importlib.import_module(name) if registered or find_spec(name) else None


def launches_of(specimen: Specimen, target: Target) -> Iterator[tuple[str, Launch]]:
    """(direction, launch) for all that a forward and a backward of this call would launch; none without a backend."""
    if specimen.run is not None:
        with record_launches(target) as seen:
            specimen.run(**specimen.make(specimen.dtype))
        yield from ((specimen.direction, launch) for launch in seen)
        return
    spec = SPECS[specimen.operator]
    if (module := backend_of(spec)) is None:
        return
    assert spec.bind is not None and spec.outputs is not None
    call = spec.bind(**specimen.make(specimen.dtype))
    keeps = hasattr(module, "kept")
    with record_launches(target) as seen:
        outputs = module.forward(call, True) if keeps else module.forward(call)
    yield from (("forward", launch) for launch in seen)
    if keeps:  # of what is asked for by hand all, else what is compiled to another kernel
        known = set() if specimen.where == "asked" else {identity(launch, target) for launch in seen}
        with record_launches(target) as seen:
            module.forward(call)
        yield from (("inference", launch) for launch in seen if identity(launch, target) not in known)
    grads = tuple(
        out.empty(call[0]) if place == 0 or specimen.where == "asked" else None
        for place, out in enumerate(spec.outputs(call))
    )
    needs = [getattr(call, name) is not None for name in spec.differentiable]
    with record_launches(target) as seen:
        module.backward(call, outputs, grads, needs)
    yield from (("backward", launch) for launch in seen)


def recorded(options: argparse.Namespace) -> tuple[list[tuple[dict[str, Any], Launch]], list[str]]:
    """Every launch to compile, with its row's names, and every call that could not even be recorded."""
    rows, wrong = [], []
    if options.script:
        for target in options.target:
            with record_launches(TARGETS[target]) as seen:
                try:
                    runpy.run_path(str(options.script), run_name="__main__")
                except SystemExit as ended:  # as a script ends that says how it went
                    wrong += [f"--script {options.script}: it ended with {ended.code}"] if ended.code else []
            rows += [(_names("script", options.script.stem, "launched", target, launch), launch) for launch in seen]
        none = f"--script {options.script}: it launches no kernel through foci.core.tune.launch"
        return rows, wrong if rows else [*wrong, none]
    asked: dict[Target, dict[tuple[str, str], ConfigRequest]] = {gpu: {} for gpu in shipped()}
    for specimen in options.drawn or SPECIMENS:
        for target in targets_of(specimen, options):
            try:
                for label, direction, launch in launched(specimen, target, asked):
                    rows.append((_names(specimen.operator, label, direction, target, launch), launch))
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                cause = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
                wrong.append(f"{specimen.operator}, {specimen.label}, {target}: not recorded: {cause}")
    if not (options.only or options.drawn):
        wrong += [line for gpu in asked if gpu.architecture in options.target for line in stale(gpu, asked[gpu])]
    return rows, wrong


def launched(
    specimen: Specimen, target: str, asked: dict[Target, dict[tuple[str, str], ConfigRequest]]
) -> Iterator[tuple[str, str, Launch]]:
    """(label, direction, launch) as the rules say; then what a GPU's table makes another kernel of, labelled by it.

    What was asked of `configure` for such a GPU is added to `asked`.
    """
    by_rule = list(launches_of(specimen, TARGETS[target]))
    yield from ((specimen.label, *pair) for pair in by_rule)
    for gpu in (gpu for gpu in asked if gpu.architecture == target):
        known = {identity(launch, gpu) for _, launch in by_rule}
        with override_configs({}) as there:
            by_table = list(launches_of(specimen, gpu))
        asked[gpu] |= there
        for direction, launch in by_table:
            if identity(launch, gpu) not in known:
                yield f"{specimen.label}, {gpu.name}", direction, launch


def targets_of(specimen: Specimen, options: argparse.Namespace) -> list[str]:
    """For which of the targets asked for: of the whole table, those it stands there for."""
    partly = options.only or options.drawn or options.target != list(TARGETS)
    if options.all or (specimen.where != "asked" and partly):
        return list(options.target)
    return {"everywhere": list(options.target), "sm_90": ["sm_90"], "asked": []}[specimen.where]


def _names(operator: str, variant: str, direction: str, target: str, launch: Launch) -> dict[str, Any]:
    kernel = launch.kernel.fn.__name__
    return {
        "operator": operator, "variant": variant, "direction": direction, "kernel": kernel, "target": target,
        "meta": meta_of(launch),
    }  # fmt: skip


def wanted(names: dict[str, Any], words: list[str]) -> bool:
    text = " ".join(names[key] for key in ("operator", "variant", "kernel"))
    return not words or any(word in text for word in words)


def measure(options: argparse.Namespace) -> Found:
    """Record, compile, and judge."""
    launches, wrong = recorded(options)
    if options.only:
        # What could not be recorded may have had any kernel of its operator.
        wrong = [line for line in wrong if any(word in line or word not in SPECS for word in options.only)]
        none = [
            f"--only {word}: no operator, variant or kernel that is asked for has such a name"
            for word in options.only
            if not wrong and not any(wanted(names, [word]) for names, _ in launches)
        ]
        if none:
            raise SystemExit("\n".join(none))
    launches = [(names, launch) for names, launch in launches if wanted(names, options.only)]
    jobs = [(launch, TARGETS[names["target"]]) for names, launch in launches]
    known = {key: record for told in options.known for key, record in told.items()}
    records = compile_all(jobs, CACHE, known=known, workers=options.workers, tell=say)
    if known:
        say(f"{len(records.keys() & known)} of {len(records)} compilations are told by their table")
    found, seen = Found(wrong=wrong), dict[str, dict[str, Any]]()
    for names, launch in launches:
        target = TARGETS[names["target"]]
        record = records[identity(launch, target)]
        row = names | {key: value for key, value in record.items() if key != "seconds"}
        found.seconds += record.get("seconds", 0.0)
        line = seen.setdefault(json.dumps(row), row | {"launches": 0, IDENTITIES: []})
        line["launches"] += 1
        line[IDENTITIES] = sorted({*line[IDENTITIES], identity(launch, target)})
        if line["launches"] > 1:
            continue
        where = f"{names['operator']}, {names['variant']}: {names['kernel']} on {names['target']}"
        found.wrong += [f"{where}: {fault}" for fault in faults(record, target)]
        if record.get("spills") and (names["operator"], names["kernel"], names["target"]) not in SPILLS:
            config = ", ".join(f"{name} {value}" for name, value in names["meta"].items())
            found.spills.append(f"{where}: spills {record['spills']} bytes ({config})")
    found.rows = list(seen.values())
    return found


def lines_of(found: Found) -> str:
    """A table as a file has it; what no GPU could run is said in its first line."""
    head = {"triton": triton.__version__, "by": "benchmarks/kernels.py", "wrong": found.wrong}
    return "\n".join(json.dumps(line) for line in (head, *found.rows)) + "\n"


def paged(rows: list[Row], version: str, others: Others) -> str:
    """The page with its table made new."""
    try:
        return page(PAGE.read_text(), rows, version, SPILLS, others.tables())
    except ValueError as error:
        raise SystemExit(f"docs/kernels.md: {error}") from None


def check(found: Found, others: Others) -> list[str]:
    """What is wrong, and where the pages are not what was just compiled."""
    wrong = [*found.wrong, *found.spills, *outlived(found.rows)]
    version, rows = table(LINES)
    if version != triton.__version__:
        return [*wrong, f"docs/kernels.jsonl is of Triton {version}, this is {triton.__version__}"]
    stale = differences(rows, found.rows)
    if not stale and PAGE.read_text() != paged(rows, version, others):
        stale = ["docs/kernels.md: the table is not that of docs/kernels.jsonl"]
    if stale:
        wrong += [*stale, "if that is right: python benchmarks/kernels.py --write"]
    return wrong


def _known(text: str) -> dict[str, Row]:
    """What this table tells of compilations."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    try:
        return recalled([Path(text)], date.today())
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(
            f"{text}: expected a table with identities, as --out writes: {cause}"
        ) from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--target", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument(
        "--all", action="store_true", help="every specimen, dtype and direction, not only the main ones"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--script", type=Path, metavar="FILE.py")
    instead.add_argument("--drawn", type=specimens, default=[], metavar="N,SEED", help="as `foci check` takes it")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true")
    either.add_argument("--write", action="store_true")
    parser.add_argument("--triton", nargs="+", default=[], metavar="VERSION", help="other versions, newest among them")
    parser.add_argument("--out", type=file_to_write, metavar="FILE.jsonl")
    parser.add_argument("--known", type=_known, nargs="+", default=[], metavar="FILE.jsonl", help="tables to take from")
    parser.add_argument("--workers", type=above_0, default=2)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.target = list(dict.fromkeys(options.target))
    torch.set_num_threads(1)
    tune.PROVEN = (*tune.PROVEN, triton.__version__[:4])  # what would run by this Triton once a GPU has proven it
    partly = options.script or options.drawn or options.only or options.all or options.target != list(TARGETS)
    if (options.check or options.write) and partly:
        raise SystemExit(
            "--check and --write are of the whole table: without --script, --drawn, --only, --all, --target"
        )
    if options.script and not options.script.is_file():
        raise SystemExit(f"--script {options.script}: there is no such file")
    if options.triton and (options.script or options.drawn or options.out or options.known):
        raise SystemExit(
            "--triton asks for the package's kernels and keeps their table: without --script, --drawn, --out, --known"
        )
    others = Others(LINES)
    if options.check:
        try:  # before anything is compiled; --write makes what was cut anew
            table(LINES), others.tables()
        except ValueError as error:
            raise SystemExit(str(error)) from None
    if options.triton:
        words = ["--target", *options.target, *(["--only", *options.only] if options.only else [])]
        words += ["--all"] * options.all + ["--workers", str(options.workers)]
        return max(
            others.ask(version, [__file__, *words], write=options.write, check=options.check, partly=bool(partly))
            for version in options.triton
        )
    found = measure(options)
    if options.out:
        options.out.write_text(lines_of(found))
    if options.write:
        for row in found.rows:
            del row[IDENTITIES]  # this Triton compiles all of them anew
        text = paged(found.rows, triton.__version__, others)
        LINES.write_text(lines_of(found))
        PAGE.write_text(text)
        say(f"wrote {len(found.rows)} rows")
        found.wrong += outlived(found.rows)
    if options.check:
        found.wrong = check(found, others)
    else:
        found.wrong += [] if options.drawn else found.spills
        print("\n".join(sentence(row) for row in found.rows))
    print("\n".join(["", *found.wrong, ""]) if found.wrong else "nothing wrong")
    print(f"{len(found.rows)} kernels, {found.seconds:.0f} s of compilation on one processor")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
