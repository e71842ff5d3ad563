"""The `check` command: an operator of foci's or anything that claims to be one, through the laws."""

from __future__ import annotations

import faulthandler
import importlib
import io
import math
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import torch
import typer

from foci.check import isolate
from foci.check.laws_graph import LAWS
from foci.check.render import table
from foci.check.run import Limits, Report, examine
from foci.cli_options import Option, backend_of, gathered, hold_file, part_of
from foci.core.errors import a_type
from foci.core.spec import Aside, Candidate, Spec, run_in_process
from foci.core.tune import interpreting
from foci.ops import FUNCTIONS, SPECS

# The operators of [B, T, H, D], which others lay out otherwise; tiny calls tell what a callable takes.
LAYOUTS = ("softmax", "linear", "delta")
LIKE = (*FUNCTIONS, "layer", "processor", "transformers")
_INTERPRETER = ", and TRITON_INTERPRET=1 in the environment runs its kernels in Triton's interpreter, in float32"
WHAT = f"{', '.join(FUNCTIONS)}, or your own: package.module:name."


# The truth of a drawn case keeps 2^room numbers at most, on a CPU and a GPU: of float64 16 MiB and 4 GiB.
ROOM = {"cpu": 21, "cuda": 29}
ROOMS = range(14, 35)
MOST_DRAWN = 100_000


class Asked(NamedTuple):
    """Which laws are asked, and of which cases."""

    laws: str | None = None
    cases: str | None = None
    drawn: str | None = None

    def given(self) -> dict[str, str]:
        """What was chosen, by option."""
        return {option: text for option, text in self._asdict().items() if text is not None}


class Drawing(NamedTuple):
    """What --drawn says: how many cases, the seed, the room of each. These three alone say what is drawn."""

    cases: int
    seed: int
    room: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


_ASKED = {
    "laws": Option(str, "Only laws of these numbers, joined with commas: 1,2,9."),
    "cases": Option(str, "Only every fourth case, from the second: 2/4."),
    "drawn": Option(
        str,
        "Of so many cases that nobody chose, in place of foci's own; after commas the seed and the room, 2^29 numbers "
        "on a GPU and 2^21 on a CPU: 40,7,29.",
    ),
}


class Across(NamedTuple):
    """What was asked for over ranks: how many, and of what is foci's own how tokens lie and what is round it."""

    world: int = 1
    order: str = ""
    wrap: str = ""


_RANKS = {
    "world": Option(int, "Run it over so many ranks: a parallel attention of [B,T/ranks,H,D].", 1),
    "order": Option(str, "With --world: how tokens lie, plain, zigzag or stripe.", ""),
    "wrap": Option(str, "With --world, round foci's own: ring, ulysses, usp, handoff.", ""),
}


@contextmanager
def ending_in_a_verdict() -> Iterator[None]:
    """Within it what is checked cannot end the command: its exit code, such as 0, would pass for a verdict.

    That is SystemExit and os._exit, the latter of this process: a child may end as it likes, and its parent tells
    (check/isolate.py). Not seen are the exit of C, exec, and what ends the process after the verdict, as it exits.
    """
    process, leave = os.getpid(), os._exit

    def tell(status: int) -> NoReturn:
        if os.getpid() == process:
            caller = sys._getframe(1)
            where = f"{caller.f_code.co_filename}, line {caller.f_lineno}"
            print(f"foci check: {where}: os._exit({status}) before there was a verdict", file=sys.stderr, flush=True)
            status = 2
        leave(status)

    os._exit = tell
    try:
        yield
    except SystemExit as error:
        raise ValueError(f"what is checked ended the check before there was a verdict: SystemExit: {error}") from error
    finally:
        os._exit = leave


@partial(gathered, name="ranks", options=_RANKS, make=Across)
@partial(gathered, name="asked", options=_ASKED, make=Asked)
@ending_in_a_verdict()
def check(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=WHAT)],
    like: Annotated[str, typer.Option(help=f"What yours is: {', '.join(LIKE)}.")] = "",
    layout: Annotated[str, typer.Option(help="Of q, k, v in yours: bthd (default) or bhtd.")] = "",
    backend: Annotated[str | None, typer.Option(help="One backend of ours; each that is for use, by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Joined with commas; by default float32 and bfloat16.")] = "",
    limit: Annotated[
        str,
        typer.Option(
            help="Seconds after which a case is taken to hang: 120; with --world what a rank waits, 10. After a comma, "
            "without --world, seconds for each backend in all, past which laws are left unasked."
        ),
    ] = "",
    asked: Asked = Asked(),
    as_json: Annotated[str, typer.Option("--json", metavar="PATH", help="Write the report here; - prints it.")] = "",
    ranks: Across = Across(),
) -> int:
    """Ask every law of an attention; exit code 1 when one is broken."""
    _require_device(device)
    limits, only = _limits(limit), _laws(asked.laws)
    chosen: dict[str, Any] = {} if only is None else {"only": only}
    if as_json not in ("", "-"):
        hold_file("--json", Path(as_json))
    if ranks.world != 1:
        for option in asked.given():
            raise ValueError(f"--{option} does not apply with --world: over ranks others are asked, without numbers")
        if limits.within != math.inf:
            raise ValueError(f"--limit takes one number with --world, what a rank waits: got {limit}")
        waits = limits.silence if limit else None
        return _across(what, like, layout, ranks, backend, device, dtype, waits, as_json)
    for option, given in (("--order", ranks.order), ("--wrap", ranks.wrap)):
        if given:
            raise ValueError(f"{option} is for ranks: give --world as well")
    if what in FUNCTIONS:
        spec, candidates = SPECS[what], _ours(what, backend, device)
        for option, given in (("--like", like), ("--layout", layout)):
            if given:
                raise ValueError(f"{option} is for an attention of yours; {what!r} is foci's own")
    else:
        began = time.monotonic()
        spec, candidate = _theirs(what, like, layout, partial(_aside, device, limits))
        candidates, limits = [candidate], limits._replace(within=limits.within - (time.monotonic() - began))
        if backend is not None:
            raise ValueError("--backend chooses among foci's own; it does not apply to an attention of yours")
    dtypes = _dtypes(dtype) or ((torch.float32,) if interpreting() else None)  # where bfloat16 is computed wrongly
    if asked.drawn is not None:
        drawing = drawing_of(asked.drawn, device)
        spec, asked = drawn(spec, drawing), asked._replace(drawn=str(drawing))
    spec, reports = of_cases(spec, asked.cases), []
    for candidate in candidates:
        progress = _teller() if sys.stderr.isatty() else lambda step: None
        report = examine(spec, candidate, device=device, dtypes=dtypes, limits=limits, progress=progress, **chosen)
        progress("")
        reports.append(replace(report, asked=asked.given()))
        if as_json != "-":
            typer.echo(table(reports[-1]) + "\n")
    if as_json:
        _write(reports, as_json)
    return max(report.exit_code for report in reports)


def _across(
    what: str, like: str, layout: str, ranks: Across, backend: str | None, device: str, dtype: str,
    limit: float | None, as_json: str,
) -> int:  # fmt: skip
    """The same over ranks."""
    from foci.cli_check_ranks import check_ranks

    if backend is not None or device != "cpu":
        raise ValueError("--backend and --device do not apply with --world: ranks are processes on the CPU")
    if what in FUNCTIONS and (like or layout):
        raise ValueError(f"--like and --layout are for an attention of yours; {what!r} is foci's own")
    if what not in FUNCTIONS:
        _callable(what, like)
    progress = _teller() if sys.stderr.isatty() else lambda step: None
    report = check_ranks(
        what, like, layout, *ranks, dtypes=_dtypes(dtype), limit=limit, progress=progress
    )  # fmt: skip
    progress("")
    if as_json != "-":
        typer.echo(table(report) + "\n")
    if as_json:
        _write([report], as_json)
    return report.exit_code


def _require_device(name: str) -> None:
    """Asked in a child: a process that has counted its GPUs can no longer fork one that uses them."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not (index.isascii() and index.isdigit())):
        raise ValueError(f"--device must be cpu or cuda, or one of several such as cuda:1, got {name!r}")
    if kind == "cuda":
        told = isolate.stream(lambda send: send(torch.cuda.is_available() and torch.cuda.device_count()), 60)
        count = next((each for each in told if isinstance(each, int)), 0)
        if count <= int(index or 0):
            raise ValueError(f"--device {name}: this machine has {f'{count} of them' if count else 'no CUDA device'}")


def _ours(name: str, backend: str | None, device: str) -> list[Candidate]:
    """Backends as candidates. A recurrence's reference is a loop that nobody compiles, and is asked by name only.

    Those that need a GPU are not asked without one; which others run on a GPU is not asked here: it would wake it.
    """
    spec = SPECS[name]
    assert spec.adapt is not None and spec.bind is not None
    hidden = {"reference"} if spec.recurrent else set()
    chosen = [b for b in spec.backends if not b.missing() and b.name not in hidden]
    if backend is not None:
        chosen = [backend_of("--backend", spec, backend).ready()]
    if device == "cpu":
        plain = spec.bind(**spec.cases[0].make(torch.float32, torch.device(device), 0))
        refused = {b.name: reasons for b in chosen if (reasons := b.reasons(plain))}
        if backend in refused:
            gpu = "; --device cuda asks it there" if chosen[0].needs else ""
            raise ValueError(f"--backend {backend}: {'; '.join(refused[backend])}{gpu}{_INTERPRETER * bool(gpu)}")
        chosen = [b for b in chosen if b.name not in refused]
    return [candidate_of(spec, FUNCTIONS[name], b.name, device) for b in chosen]


def candidate_of(spec: Spec, function: Callable[..., Any], backend: str, device: str) -> Candidate:
    """It with this backend. What it gives and takes is asked of the CPU: the GPU is left to the child that needs it.

    There of the reference, which all backends answer as: another might have to be built first.
    """
    assert spec.adapt is not None
    if device == "cpu":
        return spec.adapt(partial(function, backend=backend), name=f"foci {backend}")
    fixed = {"backend": "reference"}

    @wraps(function)
    def ours(*args: Any, **options: Any) -> Any:
        return function(*args, **options, **fixed)

    candidate = spec.adapt(ours, name=f"foci {backend}")
    fixed["backend"] = backend
    return candidate


def _aside(device: str, limits: Limits) -> Aside:
    """Where tiny calls of theirs are made: in a child where laws are, which what they imported may have ruled out."""
    if isolate.why_unable(device):
        return run_in_process
    return partial(isolate.aside, limit=limits.silence, ends=time.monotonic() + limits.within)


def _theirs(target: str, like: str, layout: str, aside: Callable[[], Aside]) -> tuple[Spec, Candidate]:
    """The Spec that someone's attention is held to, and it as a candidate."""
    if like not in LIKE:
        named = f"got {like!r}" if like else f"and {target!r} is no operator of foci's ({', '.join(FUNCTIONS)})"
        raise ValueError(f"--like must be one of {', '.join(LIKE)}; {named}")
    if layout and like not in LAYOUTS:
        raise ValueError(f"--layout is for {', '.join(LAYOUTS)}; it does not apply to --like {like}")
    thing = _callable(target, like)
    spec = _spec(like, thing)
    assert spec.adapt is not None
    if like not in LAYOUTS:
        return spec, spec.adapt(thing, name=target)
    return spec, spec.adapt(thing, name=target, layout=layout or "bthd", aside=aside())


def _callable(target: str, like: str) -> Any:
    thing = _load(target)
    if like not in ("processor", "layer") and not callable(thing):
        raise ValueError(f"{target} is {a_type(thing)}; expected a callable")
    return thing


def _spec(like: str, thing: Any) -> Spec:
    if like == "processor":
        from foci.integrations.processor_spec import spec_for

        return spec_for(thing)
    if like == "transformers":
        from foci.integrations.transformers_spec import SPEC

        return SPEC
    if like == "layer":
        from foci.nn.spec import spec_for as layer_spec

        return layer_spec(thing)
    return SPECS[like]


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"expected package.module:name, got {target!r}")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: what lies here can be named
    try:
        with _telling_what_dies():
            found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a script without a main guard ends itself
        raise ValueError(f"cannot import {module}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name}")
        found = getattr(found, part)
    return found


@contextmanager
def _telling_what_dies() -> Iterator[None]:
    """Within it Python tells which line kills the interpreter, as no parent process is there to (check/isolate.py).

    Where what ran within it turned faulthandler on by itself, it stays on.
    """
    if faulthandler.is_enabled() or sys.__stderr__ is None:
        yield
        return
    ours = io.FileIO(sys.__stderr__.fileno(), "w", closefd=False)
    in_use = weakref.ref(ours)
    faulthandler.enable(ours)
    del ours  # faulthandler alone holds it now, until it is given another or turned off
    try:
        yield
    finally:
        if in_use() is not None:
            faulthandler.disable()


def _limits(text: str) -> Limits:
    """ "120" or "120,300"."""
    words, most, found = list(filter(None, text.split(","))), len(Limits._fields), []
    if text and not words:
        raise ValueError(f"--limit: {text!r} has no number of seconds; expected one, or {most} joined with a comma")
    if len(words) > most:
        raise ValueError(f"--limit takes at most {most} numbers of seconds, got {len(words)}: {text}")
    for word in words:
        try:
            found.append(float(word))
        except ValueError:
            found.append(math.nan)
        if not found[-1] > 0:
            raise ValueError(f"--limit must be a positive number of seconds, got {word.strip()}")
    return Limits(*found)


def _laws(text: str | None) -> list[str] | None:
    """The names of the laws of these numbers; None for all."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = list(dict.fromkeys(str(law.number) for law in LAWS))
    for word in words:
        if word not in known:
            raise ValueError(f"--laws: there is no law {word!r}; they are {', '.join(known)} (docs/check.md)")
    if not words:
        raise ValueError(f"--laws: {text!r} names no law; expected numbers of {', '.join(known)} (docs/check.md)")
    return [law.name for law in LAWS if str(law.number) in words]


def drawing_of(text: str, device: str) -> Drawing:
    """ "40", "40,7" or "40,7,29"."""
    usual = ("", "0", str(ROOM[device.partition(":")[0]]))
    words = [*text.split(","), *usual[text.count(",") + 1 :]]
    known = len(words) == len(usual) and all(re.fullmatch("[0-9]{1,9}", word) for word in words)
    found = Drawing(*map(int, words)) if known else None
    if found is None or not (1 <= found.cases <= MOST_DRAWN and found.room in ROOMS):
        raise ValueError(
            f"--drawn must be how many, 1 to {MOST_DRAWN}, and after commas the seed, of 9 digits at most, and the "
            f"room, {ROOMS[0]} to {ROOMS[-1]}: 40 or 40,7 or 40,7,29; got {text[:40]!r}"
        )
    return found


def drawn(spec: Spec, drawing: Drawing) -> Spec:
    """With so many drawn cases in place of its own; of bad inputs, which are made of its own first case, none."""
    if spec.drawn is None:
        raise ValueError(f"--drawn is for {', '.join(FUNCTIONS)} and what is --like them: of others no case is drawn")
    cases = tuple(spec.drawn(f"{drawing.seed}.{i}", 2**drawing.room) for i in range(1, drawing.cases + 1))
    return replace(spec, cases=cases, large=(), probes=replace(spec.probes, bad=()))


def of_cases(spec: Spec, text: str | None) -> Spec:
    """Its cases that i/n means: every nth, from the ith; all without. Bad inputs are asked with the first."""
    if text is None:
        return spec
    chosen = part_of("--cases", text, len(spec.cases))
    # Bad inputs are the first case's, spoiled: of another's, offsets that decrease would not fit its state.
    probes = spec.probes if chosen.start == 0 else replace(spec.probes, bad=())
    return replace(spec, cases=spec.cases[chosen], large=spec.large[chosen], probes=probes)


def _dtypes(text: str) -> tuple[torch.dtype, ...] | None:
    known = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ValueError(f"--dtype must be among {', '.join(known)}; got {word!r}")
    if text and not words:
        raise ValueError(f"--dtype: {text!r} names no dtype; expected some of {', '.join(known)}")
    return tuple(known[word] for word in words) or None


def _teller() -> Any:
    """One line on the terminal that says what is being asked, wiped at the end."""
    return lambda step: print(f"\r\033[K{step}", end="", file=sys.stderr, flush=True)


def _write(reports: list[Report], path: str) -> None:
    text = (
        "[" + ",\n".join(report.to_json() for report in reports) + "]\n" if len(reports) > 1 else reports[0].to_json()
    )
    if path == "-":
        typer.echo(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")
