"""The part of `foci accelerate` that goes over ranks: its options, starting the ranks or being one of torchrun's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foci.accelerate.degrees import Degrees
from foci.cli_options import Option, gathered
from foci.core.device import machine, own_version
from foci.core.world import World

_OPTIONS = {
    "world": Option(
        int | None, "Start so many ranks on this machine; what of them is left goes to --ulysses and --ring."
    ),
    "ulysses": Option(int | None, "Ranks that exchange heads for tokens."),
    "ring": Option(int | None, "Ranks that pass keys and values round."),
    "cfg": Option(int | None, "2: the branches of guidance on two halves of the ranks."),
    "data": Option(int | None, "Ranks that share the rows of the batch."),
    "pipe": Option(int | None, "Ranks that share the blocks, patch by patch (PipeFusion; approximate after warm-up)."),
    "text": Option(str, "Text in joint attention: auto, split or replicated.", "auto"),
    "patches": Option(int | None, "Patches of --pipe."),
    "warmup": Option(int | None, "Exact first steps of --pipe."),
}


@dataclasses.dataclass(frozen=True)
class Ranks:
    """What was asked for on the command line: `world` ranks to start, and the degrees of parallelism."""

    world: int | None
    degrees: Degrees

    @property
    def wanted(self) -> bool:
        """Whether this run is one over ranks."""
        return self.world is not None or self.degrees != Degrees() or launched()


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank is told."""

    model: str
    device: str
    dtype: str
    out: Path
    as_json: bool
    degrees: Degrees


def with_ranks(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of a run over ranks, which reach it as one argument, `ranks`."""
    return gathered(command, "ranks", _OPTIONS, lambda world, **degrees: Ranks(world, Degrees(**degrees)))


def launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def run(job: Job, world: int | None) -> dict[str, Any] | None:
    """Run a job over ranks, those of torchrun or ones that are started here; gives the plan as plain values.

    None on torchrun's ranks but the first.

    Raises ValueError, before anything starts, for ranks that nobody starts, started twice, or degrees that miss them;
    and for a model, device or dtype that there is not, before it is loaded.
    """
    from foci.accelerate import zoo

    if launched():
        if world is not None:
            raise ValueError(
                f"accelerate: --world {world} starts ranks, but torchrun has started this one already; leave it away"
            )
        zoo.known(job.model, device=job.device, dtype=job.dtype)
        return _as_launched(job)
    if world is None:
        job.degrees.fill_world(job.degrees.size, heads=1)  # an error here comes before that there are no ranks
        raise ValueError(
            f"accelerate: {job.degrees} needs {job.degrees.size} ranks, and this is a single process; start it with "
            f"torchrun --nproc-per-node {job.degrees.size} -m foci accelerate ..., or let foci start them: --world "
            f"{job.degrees.size}"
        )
    _require_possible(job, world)
    zoo.known(job.model, device=job.device, dtype=job.dtype)
    with World(
        world, timeout=600.0, limit=6 * 3600.0, preload=("foci.parallel", "diffusers.models.transformers")
    ) as here:
        plan: dict[str, Any] = here.run(on_rank, job)[0]
    return plan


def _require_possible(job: Job, world: int) -> None:
    if world < 1:
        raise ValueError(f"accelerate: --world must be at least 1, got {world}")
    if job.device.partition(":")[0] != "cpu":
        raise ValueError(
            f"accelerate: --world starts ranks on the CPU, and --device is {job.device}; for GPUs use torchrun "
            f"--nproc-per-node {world} -m foci accelerate ..."
        )
    job.degrees.fill_world(world, heads=1)


def _as_launched(job: Job) -> dict[str, Any] | None:
    cuda = torch.device(job.device).type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        if cuda:
            # One GPU each: by the number of the rank on its machine.
            place = dist.get_node_local_rank()
            torch.cuda.set_device(place)
            job = dataclasses.replace(job, device=f"cuda:{place}")
        plan = on_rank(job)
        return plan if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def on_rank(job: Job) -> dict[str, Any]:
    """What each rank does; rank 0 tells of it and writes the report."""
    from rich.console import Console

    from foci.accelerate import zoo
    from foci.accelerate.ranks import accelerate_over_ranks

    first = dist.get_rank() == 0
    console = Console(highlight=False, quiet=job.as_json or not first, soft_wrap=True)
    subject = zoo.load(job.model, device=job.device, dtype=job.dtype)
    many = sum(parameter.numel() for parameter in subject.model.parameters())
    threads = f"{dist.get_world_size()} ranks of {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    console.print(f"[bold]foci {own_version()}[/bold] · {machine().line} · {threads}\n")
    kind = type(subject.model).__name__
    console.print(f"[bold]{subject.name}[/bold]   {kind}, {many / 1e6:.1f} M parameters, {subject.note}")
    done = accelerate_over_ranks(subject, job.degrees, progress=teller(console, None))
    if first:
        written = done.save(job.out)
        told(console, written)
    plan = done.plan.as_dict()
    done.restore()
    return plan


def teller(console: Any, spinner: Any) -> Callable[[str, str, bool], None]:
    """Tells of phases: one line for each that is finished, and what is going on beside a spinner."""
    from rich.markup import escape

    def tell(phase: str, text: str, finished: bool) -> None:
        if finished:
            console.print(f"[green]{phase:<7}[/green]  {escape(text)}")
        elif spinner is not None:
            spinner.update(f"{phase:<7}  {escape(text)}")

    return tell


def told(console: Any, written: list[Path]) -> None:
    """Tell which files were written, the report first."""
    paths = sorted(written, key=lambda path: (path.name != "report.html", path.name))
    console.print(f"[green]wrote  [/green]  {'   '.join(map(str, paths))}")


def require_default(given: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ValueError for an option, by name with its value and default, that a run over ranks would ignore."""
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(f"accelerate: --{name} {value} is not for a run over ranks, which compiles nothing")
