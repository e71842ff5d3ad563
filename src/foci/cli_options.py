"""Options of a command that belong together reach it as one argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import typer


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
