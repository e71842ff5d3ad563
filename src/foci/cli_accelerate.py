"""The `accelerate` command: progress for a person, one line a phase; final lines alone when piped; JSON when asked."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from foci.accelerate.degrees import Degrees
from foci.cli_options import hold_out
from foci.cli_ranks import Job, Ranks, require_default, teller, told, with_ranks
from foci.cli_ranks import run as over_ranks
from foci.core.device import machine, own_version


@with_ranks
def accelerate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A zoo name, a directory, or a hub id.")] = "digits-dit",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:0.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    compile: Annotated[str, typer.Option(help="auto (when it pays), on or off.")] = "auto",
    calls: Annotated[int, typer.Option(help="How many calls of the model compilation may take to pay.")] = 100,
    out: Annotated[Path, typer.Option(help="Folder for report.html and plan.json.")] = Path("out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
    ranks: Ranks = Ranks(None, Degrees()),
) -> None:
    """Find a model's attention, plan, prove, time, compile if it pays; write plan.json and report.html."""
    from rich.console import Console

    from foci.accelerate import zoo
    from foci.accelerate.run import accelerate as run

    if compile not in ("auto", "on", "off"):
        raise ValueError(f"--compile must be auto, on or off, got {compile!r}")
    if calls < 1:
        raise ValueError(f"--calls must be at least 1, got {calls}")
    _require_writable(out)
    if ranks.wanted:
        require_default({"compile": (compile, "auto"), "calls": (calls, 100)})
        plan = over_ranks(Job(model, device, dtype, out, as_json, ranks.degrees), ranks.world)
        if as_json and plan is not None:
            typer.echo(json.dumps(plan, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False, quiet=as_json, soft_wrap=True)
    console.print(f"[bold]foci {own_version()}[/bold] · {machine().line}\n")
    # A spinner needs a terminal; piped, each phase is its one final line.
    waiting: Any = console.status("loading") if console.is_terminal and not as_json else nullcontext()
    with waiting as spinner:
        subject = zoo.load(model, device=device, dtype=dtype)
        many = sum(parameter.numel() for parameter in subject.model.parameters())
        kind = type(subject.model).__name__
        console.print(f"[bold]{subject.name}[/bold]   {kind}, {many / 1e6:.1f} M parameters, {subject.note}")
        done = run(
            subject.model,
            subject.inputs,
            other_inputs=subject.other,
            compile=compile,  # type: ignore[arg-type]
            calls=calls,
            name=subject.name,
            note=subject.note,
            show=subject.show,
            progress=teller(console, spinner),
        )
        written = done.save(out)
    told(console, written)
    if as_json:
        typer.echo(json.dumps(done.plan.as_dict(), indent=2, ensure_ascii=False))


def _require_writable(folder: Path) -> None:
    """Before minutes of work. A folder that is made for it is removed again: a run that fails leaves nothing."""
    made = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    hold_out(folder, "report.html", "plan.json", "digits.png")
    for each in made:
        each.rmdir()
