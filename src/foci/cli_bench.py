"""The `bench` command: backends and peers on an operator's shapes, right before fast; records, pictures, changes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer

from foci.bench import record
from foci.bench.ceilings import ceilings
from foci.bench.plot import page, rate, roofline
from foci.bench.record import Record
from foci.bench.sweep import STAGES, Options, sweep
from foci.cli_bench_peers import peers, repeatable, unguarded
from foci.cli_bench_truth import Truth
from foci.cli_check import FUNCTIONS
from foci.cli_tune import DTYPES, cases
from foci.cli_tune_ahead import side_by_side, warm
from foci.core.device import installed, machine
from foci.core.spec import Candidate, Case, Spec
from foci.core.tune import target_of
from foci.ops import SPECS

ALIASES = {"decay": "linear"}
_SLOWER = 1.05  # what --compare calls a regression, if it is beyond the spread of both as well


def bench(
    operators: Annotated[list[str] | None, typer.Argument(metavar="OPERATOR...", help=", ".join(SPECS))] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "bfloat16",
    shapes: Annotated[str, typer.Option(help="Only shapes whose name has one of these words, joined by commas.")] = "",
    stages: Annotated[str, typer.Option(help="Joined by commas.")] = ",".join(STAGES),
    backends: Annotated[str, typer.Option(help="Of ours, joined by commas; by default what foci chooses.")] = "",
    others: Annotated[bool, typer.Option("--peers/--no-peers", help="Time installed peers too.")] = True,
    limit: Annotated[
        float, typer.Option(help="No shape but the first begins after so many seconds; what is left out is said.")
    ] = math.inf,
    out: Annotated[Path | None, typer.Option(help="A folder for records, pictures and the page.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Two files of records: OLD NEW.")] = None,
) -> int:
    """Time operators against peers; with --compare tell what became slower. Exit code 1: a regression."""
    if compare is not None:
        return _compare(*compare)
    if not operators:
        raise ValueError(f"bench: name an operator ({', '.join(SPECS)}), or two files with --compare")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(
            f"--device {device}: " + ("there is no CUDA device here" if device == "cuda" else "cpu or cuda")
        )
    wanted = tuple(word.strip() for word in stages.split(",") if word.strip())
    if unknown := set(wanted) - set(STAGES):
        raise ValueError(f"--stages: {min(unknown)!r} is none of {', '.join(STAGES)}")
    options = Options(DTYPES[dtype], torch.device(device), stages=wanted)
    specs = [_spec(name) for name in operators]
    top = ceilings(options.dtype, options.device)
    typer.echo(f"{machine().line}\nceilings: {rate(top.flops)} in {dtype}, {top.bytes / 1e9:.4g} GB/s\n")
    found: list[Record] = []
    ends, skipped = time.monotonic() + limit, list[str]()
    with nullcontext() if out is None else record.Writer(out / "records.jsonl") as file, _ready(specs, options):
        for spec in specs:
            candidates = [*_ours(spec, backends), *(peers(spec.name, options.device) if others else [])]
            if not found or time.monotonic() < ends:
                _warm(spec, cases(spec, shapes), options)
            for shape in cases(spec, shapes):
                if found and time.monotonic() > ends:  # compiling may have taken it all: one is timed
                    skipped.append(f"{spec.name} {shape.name}")
                    continue
                torch.compiler.reset()  # dynamo gives up, without a word, after eight graphs of one function
                for each in sweep(spec, candidates, [shape], options, top, Truth(spec)):
                    found.append(_placed(each))
                    typer.echo(_line(each, options.rounds))
                    if file is not None:
                        file.add(found[-1])
    if skipped:
        typer.echo(f"\nleft out, as the limit of {limit:g} seconds was reached: {', '.join(skipped)}")
    if out is not None:
        (out / "roofline.svg").write_text(roofline(found, top), encoding="utf-8")
        (out / "index.html").write_text(page(found, top), encoding="utf-8")
        typer.echo(f"\nwrote {out}/records.jsonl, roofline.svg, index.html")
    return int(any(each.candidate.startswith("foci") and each.refused.startswith("wrong") for each in found))


@contextmanager
def _ready(specs: list[Spec], options: Options) -> Iterator[None]:
    """On a GPU peers that tune themselves compile on every core, and none declines what would be judged anyway."""
    with ExitStack() as stack:
        stack.enter_context(repeatable())
        if options.device.type == "cuda" and installed("triton"):
            stack.enter_context(side_by_side(machine().cores))
            if any(spec.name in ("linear", "delta") for spec in specs):
                stack.enter_context(unguarded(typer.echo))
        yield


def _warm(spec: Spec, shapes: list[Case], options: Options) -> None:
    """Ours are compiled so before the first is timed."""
    triton = next((backend for backend in spec.backends if backend.name == "triton"), None)
    if options.device.type == "cuda" and triton is not None and not triton.missing():
        warm(spec, shapes, options.dtype, target_of(options.device), workers=machine().cores)


def _spec(name: str) -> Spec:
    name = ALIASES.get(name, name)
    if name not in SPECS:
        raise ValueError(f"bench: unknown operator {name!r}; expected one of {', '.join(SPECS)}")
    return SPECS[name]


def _ours(spec: Spec, backends: str) -> list[Candidate]:
    """What foci chooses, or the backends that are named; through the public function, as users call it."""
    assert spec.adapt is not None
    function = FUNCTIONS[spec.name]
    if not backends:
        return [spec.adapt(function, name="foci")]
    chosen = [spec.backend(name.strip()) for name in backends.split(",")]
    return [spec.adapt(partial(function, backend=b.name), name=f"foci {b.name}") for b in chosen]


def _placed(each: Record) -> Record:
    """With where and when it was measured."""
    names = ("torch", "triton", "fla-core", "flash-attn", "xformers", "transformers")
    versions = [f"{name} {version}" for name in names if (version := _version(name))]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return replace(each, machine=machine().line, versions=", ".join(versions), date=now)


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
    few = f", {each.rounds} rounds" if each.rounds is not None and each.rounds < rounds else ""
    without = f", no gradient of {each.without}" if each.without else ""
    return (
        f"{head} {each.median * 1e3:9.3f} ms ({(each.fast or 0) * 1e3:.3f} .. {(each.slow or 0) * 1e3:.3f})  "
        f"{rate(each.flops / each.median):>12}, {each.floor / each.median:4.0%} of the ceiling, "
        f"{(each.peak or 0) / 2**20:.0f} MiB{host}, error {error}{few}{without}"
    )


def _compare(old: Path, new: Path) -> int:
    before, after = record.read(old), record.read(new)
    changes = sorted(record.compare(before, after), key=lambda change: -change.ratio)
    gone = record.lost(before, after)
    if not changes and not gone:
        raise ValueError(f"--compare: {old} and {new} have no record in common")
    for change in changes:
        typer.echo(str(change))
    for line in gone:
        print(line, file=sys.stderr)
    worse = [change for change in changes if change.beyond and change.ratio > _SLOWER]
    typer.echo(f"\n{len(changes)} compared, {len(worse)} slower by more than {_SLOWER - 1:.0%}, {len(gone)} lost")
    return int(bool(worse or gone))
