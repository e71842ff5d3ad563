"""The `bench` command: backends and peers on an operator's shapes, right before fast; records, pictures, changes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from foci.bench import record
from foci.bench.ceilings import Ceilings, ceilings
from foci.bench.plot import page, rate, roofline
from foci.bench.record import STAGES, Record
from foci.bench.sweep import Options, sweep
from foci.cli_bench_peers import peers, repeatable, unguarded
from foci.cli_bench_truth import Truth
from foci.cli_options import Option, backend_of, gathered, hold_limit, hold_out, part_of
from foci.cli_tune import DTYPES, shapes_of, specs_of, words_of
from foci.cli_tune_ahead import side_by_side, warm
from foci.core.device import installed, machine
from foci.core.spec import Candidate, Case, Spec
from foci.core.tune import target_of
from foci.ops import FUNCTIONS, SPECS
from foci.ops.softmax.api import attention

ALIASES = {"decay": "linear"}
_UNTOLD = {"softmax": attention}  # without the logarithm, which a user of no gradient through it does not ask for
_FILES = ("records.jsonl", "roofline.svg", "index.html")
_SLOWER = 1.05  # what --compare calls a regression, if it is beyond the spread of both as well


def _options(device: str, dtype: str, stages: str) -> Options:
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(
            f"--device {device}: " + ("there is no CUDA device here" if device == "cuda" else "cpu or cuda")
        )
    wanted = tuple(words_of(stages))
    if unknown := set(wanted) - set(STAGES):
        raise ValueError(f"--stages: {min(unknown)!r} is none of {', '.join(STAGES)}")
    if not wanted:
        raise ValueError(f"--stages must be some of {', '.join(STAGES)}, got {stages!r}")
    return Options(DTYPES[dtype], torch.device(device), stages=wanted)


_MEASURED = {
    "device": Option(str, "cpu or cuda.", "cpu"),
    "dtype": Option(str, f"{', '.join(DTYPES)}.", "bfloat16"),
    "stages": Option(str, "Joined by commas.", ",".join(STAGES)),
}


@partial(gathered, name="options", options=_MEASURED, make=_options)
def bench(
    context: typer.Context,
    operators: Annotated[list[str] | None, typer.Argument(metavar="OPERATOR...", help=", ".join(SPECS))] = None,
    shapes: Annotated[str, typer.Option(help="Only shapes whose name has one of these words, joined by commas.")] = "",
    part: Annotated[str, typer.Option(help="i/n: every nth of them, from the ith, as for one of n GPUs.")] = "1/1",
    backends: Annotated[str, typer.Option(help="Of ours, joined by commas; by default what foci chooses.")] = "",
    others: Annotated[bool, typer.Option("--peers/--no-peers", help="Time installed peers too.")] = True,
    limit: Annotated[
        float, typer.Option(help="No shape but the first begins after so many seconds; what is left out is said.")
    ] = math.inf,
    out: Annotated[Path | None, typer.Option(help="A folder for records, pictures and the page.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Two files of records: OLD NEW; alone.")] = None,
    *,
    options: Options,
) -> int:
    """Time operators against peers; with --compare tell what became slower. Exit code 1: that, or one of ours wrong."""
    if compare is not None:
        if beside := _beside(context, "compare"):
            raise ValueError(f"--compare times nothing: leave out {', '.join(beside)}")
        return _compare(*compare)
    hold_limit(limit)
    tasks = _tasks(operators or [], shapes, part_of("--part", part), backends)
    if out is not None:
        hold_out(out, *_FILES)
    top = ceilings(options.dtype, options.device)
    dtype = str(options.dtype).removeprefix("torch.")
    typer.echo(f"{machine().line}\nceilings: {rate(top.flops)} in {dtype}, {top.bytes / 1e9:.4g} GB/s\n")
    found: list[Record] = []
    ends, skipped, took = time.monotonic() + limit, list[str](), _Laps()
    with _written(out, found, top) as file, _ready(tasks, options):
        for spec, ours, chosen in tasks:
            if not chosen:
                typer.echo(f"{spec.name}: nothing to time: --part {part} has no shape")
                continue
            theirs = peers(spec.name, options.device) if others else []
            if not found or time.monotonic() < ends:
                _warm(spec, chosen, options)
            took.lap(f"{spec.name} compiled")
            for shape in chosen:
                if found and time.monotonic() > ends:  # compiling may have taken it all: one is timed
                    skipped.append(f"{spec.name} {shape.name}")
                    continue
                torch.compiler.reset()  # dynamo gives up, without a word, after eight graphs of one function
                candidates = [*_ours(spec, ours, shape), *theirs]
                for each in sweep(spec, candidates, [shape], options, top, Truth(spec)):
                    found.append(_placed(each))
                    typer.echo(_line(each, options.rounds))
                    if file is not None:
                        file.add(found[-1])
                took.lap(f"{spec.name} {shape.name}")
    if skipped:
        typer.echo(f"\nleft out, as the limit of {limit:g} seconds was reached: {', '.join(skipped)}\n{took}")
    if out is not None:
        typer.echo(f"\nwrote {out}/{', '.join(_FILES)}")
    return int(any(each.candidate.startswith("foci") and each.fault for each in found))


@contextmanager
def _written(out: Path | None, found: list[Record], top: Ceilings) -> Iterator[record.Writer | None]:
    """Records to a folder as they come; behind them, also where a run is cut short, the pictures of what was found."""
    if out is None:
        yield None
        return
    with record.Writer(out / _FILES[0]) as file:
        for name in _FILES[1:]:  # of an older run
            (out / name).unlink(missing_ok=True)
        try:
            yield file
        finally:
            for name, draw in zip(_FILES[1:], (roofline, page), strict=True):
                (out / name).write_text(draw(found, top), encoding="utf-8")


class _Task(NamedTuple):
    """One operator: the backends of ours that are named, if any are, on these shapes."""

    spec: Spec
    ours: list[str]
    shapes: list[Case]


def _tasks(operators: list[str], shapes: str, part: slice, backends: str) -> list[_Task]:
    """Each operator once, with its shapes in this part; what none has is an error before any is timed."""
    if not operators:
        raise ValueError(f"bench: name an operator ({', '.join(SPECS)}), or two files with --compare")
    specs = specs_of("bench", (ALIASES.get(name, name) for name in operators))
    named = (words_of(backends) or [backends]) if backends else []
    ours = [[backend_of("--backends", spec, name).name for name in named] for spec in specs]
    chosen = [found[part] for found in shapes_of(specs, shapes)]
    return [_Task(*each) for each in zip(specs, ours, chosen, strict=True)]


def _beside(context: typer.Context, option: str) -> list[str]:
    """What the command line gives beside this option, by the names it has there."""
    sources = {each: context.get_parameter_source(each.name or "") for each in context.command.params}
    given = [each for each, source in sources.items() if source and source.name != "DEFAULT" and each.name != option]
    return ["/".join([*each.opts, *each.secondary_opts]) for each in given]


class _Laps:
    """Where the time went, in words."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.monotonic()

    def lap(self, name: str) -> None:
        began, self.last = self.last, time.monotonic()
        self.seconds[name] = self.last - began

    def __str__(self) -> str:
        return "seconds taken: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())


@contextmanager
def _ready(tasks: list[_Task], options: Options) -> Iterator[None]:
    """On a GPU peers that tune themselves compile on every core, and none declines what would be judged anyway."""
    with ExitStack() as stack:
        stack.enter_context(repeatable())
        if options.device.type == "cuda" and installed("triton"):
            stack.enter_context(side_by_side(machine().cores))
            if any(task.spec.name in ("linear", "delta") for task in tasks if task.shapes):
                stack.enter_context(unguarded(typer.echo))
        yield


def _warm(spec: Spec, shapes: list[Case], options: Options) -> None:
    """Ours are compiled so before the first is timed."""
    triton = next((backend for backend in spec.backends if backend.name == "triton"), None)
    if options.device.type == "cuda" and triton is not None and not triton.missing():
        warm(spec, shapes, options.dtype, target_of(options.device), workers=machine().cores)


def _ours(spec: Spec, backends: list[str], shape: Case) -> list[Candidate]:
    """What foci chooses, or the backends that are named; through the public function that users call for this shape."""
    assert spec.adapt is not None
    told = any(f"d{log}" in shape.features for log in spec.logs)
    function = FUNCTIONS[spec.name] if told else _UNTOLD.get(spec.name, FUNCTIONS[spec.name])
    if not backends:
        return [spec.adapt(function, name="foci")]
    return [spec.adapt(partial(function, backend=name), name=f"foci {name}") for name in backends]


def _placed(each: Record) -> Record:
    """With where and when it was measured."""
    names = ("torch", "triton", "fla-core", "flash_qla", "tilelang", "flash-attn", "xformers", "transformers")
    versions = [f"{name} {version}" for name in names if (version := _version(name))]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    here = machine()
    return replace(each, machine=here.line, computer=here.computer, versions=", ".join(versions), date=now)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _line(each: Record, rounds: int) -> str:
    """A record in words; `rounds` is the usual number, and it is said where a figure is of fewer."""
    head = f"{each.operator} {each.problem}"
    head = f"{head:<40} {each.stage:<9}{each.candidate:<28}"
    if each.median is None or not each.floor or each.flops is None:
        return f"{head} -  {each.refused}"
    error = "not compared" if each.error is None else f"{each.error:.2f} of its budget"
    host = "" if each.host is None else f", host {each.host * 1e6:.0f} us{', which rules' * each.host_bound}"
    alone = "" if each.alone is None else f", the GPU alone {each.alone * 1e3:.3f} ms"
    few = f", {each.rounds} rounds" if each.rounds is not None and each.rounds < rounds else ""
    without = f", no gradient of {each.without}" if each.without else ""
    return (
        f"{head} {each.median * 1e3:9.3f} ms ({(each.fast or 0) * 1e3:.3f} .. {(each.slow or 0) * 1e3:.3f})  "
        f"{rate(each.flops / each.median):>12}, {each.floor / each.median:4.0%} of the ceiling, "
        f"{(each.peak or 0) / 2**20:.0f} MiB{host}{alone}, error {error}{few}{without}"
    )


def _records(path: Path) -> list[Record]:
    """What one file of --compare holds."""
    try:
        return record.read(path)
    except OSError as error:
        raise ValueError(f"--compare: {path} is no file of records: {error.strerror}") from error


def _compare(old: Path, new: Path) -> int:
    before, after = _records(old), _records(new)
    for path, records in ((old, [each for each in before if each.median]), (new, after)):
        if not records:
            what = f"time among its {len(before)} records" if path is old and before else "record"
            raise ValueError(f"--compare: {path} has no {what}")
    if not {each.key for each in before if each.median} & {each.key for each in after}:
        raise ValueError(f"--compare: {old} and {new} have no record in common")
    changes = sorted(record.compare(before, after), key=lambda change: -change.ratio)
    gone = record.lost(before, after)
    if elsewhere := record.moved(before, after):
        typer.echo(f"not the same conditions: {elsewhere}\n")
    for change in changes:
        typer.echo(str(change))
    for line in gone:
        print(line, file=sys.stderr)
    worse = [change for change in changes if change.beyond and change.ratio > _SLOWER]
    typer.echo(f"\n{len(changes)} compared, {len(worse)} slower by more than {_SLOWER - 1:.0%}, {len(gone)} lost")
    return int(bool(worse or gone))
