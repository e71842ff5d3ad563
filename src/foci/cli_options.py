"""What commands share of their options: those that belong together reach them as one argument; what is refused."""

from __future__ import annotations

import functools
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from foci.core.spec import Backend, Spec


class Option(NamedTuple):
    """One option: its type, its line of help, what it is where it is not given."""

    kind: Any
    words: str
    default: Any = None


def gathered(
    command: Callable[..., Any], name: str, options: Mapping[str, Option], make: Callable[..., Any]
) -> Callable[..., Any]:
    """The command with these options in place of its argument `name`, which becomes `make(**options)`."""

    @functools.wraps(command)
    def wrapper(**given: Any) -> Any:
        told = {option: given.pop(option) for option in options}
        return command(**given, **{name: make(**told)})

    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != name]
    more = [
        inspect.Parameter(
            option,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default,
            annotation=Annotated[one.kind, typer.Option(help=one.words)],
        )
        for option, one in options.items()
    ]
    wrapper.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
    return wrapper


def hold_limit(limit: float) -> None:
    """Seconds for all of a command; infinity is no limit, and NaN no number of seconds."""
    if not limit >= 0:
        raise ValueError(f"--limit must be seconds, 0 or more; got {limit:g}")


def part_of(option: str, text: str, most: int | None = None) -> slice:
    """What i/n takes of a sequence: every nth, from the ith; n is at most `most`, where it is told."""
    first, _, step = text.partition("/")
    known = re.fullmatch("[0-9]{1,9}/[0-9]{1,9}", text) and 1 <= int(first) <= int(step)
    if not known or (most is not None and int(step) > most):
        bound = "" if most is None else f" <= {most}"
        raise ValueError(f"{option} must be i/n, every nth from the ith, 1 <= i <= n{bound}, got {text!r}")
    return slice(int(first) - 1, None, int(step))


def backend_of(option: str, spec: Spec, name: str) -> Backend:
    """The operator's backend of this name, or a sentence with the option and the names there are."""
    try:
        return spec.backend(name)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def hold_file(option: str, path: Path) -> None:
    """A file can be written there: asked before anything is measured. Nothing is made or changed."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {folder}")
    if path.is_dir():
        raise ValueError(f"{option} {path}: that is a folder; expected a file")
    if not (os.access(path, os.W_OK) if path.exists() else os.access(folder, os.W_OK | os.X_OK)):
        raise ValueError(f"{option} {path}: no permission to write it")


def hold_out(out: Path, *names: str) -> None:
    """These files can be written to this folder, which is made: asked before anything is measured.

    What an older run left there stays as it is.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
        for path in (out / name for name in names):
            if path.exists():
                path.open("r+b").close()
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}: {error.filename}") from error
