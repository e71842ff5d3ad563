"""The `tune` command: measures launch configurations on this GPU and writes the table that goes before the rules."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from foci.bench.measure import clock_on
from foci.bench.tuning import Place, Row, kernels_of, search, write
from foci.cli_options import hold_limit, hold_out
from foci.cli_tune_ahead import ahead
from foci.core.device import machine, own_version
from foci.core.spec import Case, Spec
from foci.core.tune import file_name, target_of
from foci.ops import SPECS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def tune(
    operators: Annotated[list[str], typer.Argument(metavar="OPERATOR...", help=", ".join(SPECS))],
    shapes: Annotated[str, typer.Option(help="Only shapes whose name has one of these words, joined by commas.")] = "",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bfloat16",
    limit: Annotated[
        float, typer.Option(help="Seconds in all; what most shapes use is measured first, what is left out is said.")
    ] = math.inf,
    out: Annotated[Path, typer.Option(help="The folder of the table; one that is there is added to.")] = Path("tuned"),
) -> int:
    """Measure candidates for every kernel on this GPU; what beats the rule of thumb is written to a table."""
    specs = specs_of("tune", operators)
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    hold_limit(limit)
    chosen = list(zip(specs, shapes_of(specs, shapes), strict=True))
    if not machine().gpus:
        raise ValueError("tune: there is no GPU here, and configurations can only be measured on the GPU they are for")
    device = torch.device("cuda", torch.cuda.current_device())
    table = f"{file_name(machine().gpus[device.index].name)}.json"
    hold_out(out, table)
    kernels_of(out / table)  # what cannot be added to is told before anything is measured
    ends = time.monotonic() + limit
    for place, (spec, problems) in enumerate(chosen):
        now = time.monotonic()
        _tune(spec, problems, DTYPES[dtype], device, now + (ends - now) / (len(chosen) - place), out)
    return 0


def _tune(spec: Spec, problems: list[Case], dtype: torch.dtype, device: torch.device, until: float, out: Path) -> None:
    """One operator. The table is written at every find: a run that is cut short loses only what it was measuring."""
    target = target_of(device)
    rows: dict[Place, Row] = {}

    def save() -> Path:
        return write(out, rows, target, versions(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))

    side_by_side = ahead(spec.name, dtype, target, workers=machine().cores, until=until)
    for place, row in search(
        spec, spec.backend("triton").load(), problems, dtype, device,
        clock=clock_on(device), tell=typer.echo, ahead=side_by_side, until=until,
    ):  # fmt: skip
        rows[place] = row
        save()
    typer.echo(f"{spec.name}: {len(rows)} configurations beat the rule; {save() if rows else 'nothing is written'}")


def specs_of(command: str, operators: Iterable[str]) -> list[Spec]:
    """The operators of these names, each once."""
    names = dict.fromkeys(operators)
    if unknown := [name for name in names if name not in SPECS]:
        raise ValueError(f"{command}: unknown operator {unknown[0]!r}; expected one of {', '.join(SPECS)}")
    return [SPECS[name] for name in names]


def words_of(text: str) -> list[str]:
    """The words that commas join, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def shapes_of(specs: Sequence[Spec], words: str) -> list[list[Case]]:
    """Each operator's shapes whose names have one of the words, in the words' order; all of them where none is given.

    A word may be for one operator alone, but not for none; nor may an operator have no shape.
    """
    asked = words_of(words) if words else [""]
    found = [{shape.name: shape for word in asked for shape in spec.shapes if word in shape.name} for spec in specs]
    wrong = [(words, [spec]) for spec, there in zip(specs, found, strict=True) if not there]
    wrong += [(word, [*specs]) for word in asked if not any(word in name for there in found for name in there)]
    for word, those in wrong:
        there = "; ".join(f"{spec.name} has {', '.join(shape.name for shape in spec.shapes)}" for spec in those)
        raise ValueError(f"--shapes {word!r}: expected what is in a shape's name; {there}")
    return [list(each.values()) for each in found]


def versions() -> dict[str, str]:
    """What a table depends on beside the GPU."""
    found: dict[str, Any] = {"foci": own_version(), "torch": torch.__version__, "triton": None}
    found["triton"] = machine().packages["triton"]
    found["cuda" if torch.version.cuda else "hip"] = torch.version.cuda or torch.version.hip
    return {name: version for name, version in found.items() if version}
