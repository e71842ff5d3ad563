"""Gathered options: a command line has each by its name, the command all of them as one."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.testing import CliRunner

from foci.cli_options import Option, gathered


def command(what: str, loud: Annotated[bool, typer.Option(help="Shout.")] = False, ways: dict | None = None) -> None:
    """Say what was given."""
    said = f"{what} {ways}"
    typer.echo(said.upper() if loud else said)


def test_a_command_line_has_every_option_and_the_command_one_argument() -> None:
    options = {"ring": Option(int, "Ranks round.", 1), "text": Option(str, "Which.", "auto")}
    app = typer.Typer()
    app.command()(gathered(command, "ways", options, dict))
    ask = CliRunner().invoke
    assert ask(app, ["it"]).output == "it {'ring': 1, 'text': 'auto'}\n"
    assert ask(app, ["it", "--ring", "4", "--loud"]).output == "IT {'RING': 4, 'TEXT': 'AUTO'}\n"
    shown = ask(app, ["--help"]).output
    assert all(word in shown for word in ("--ring", "Ranks round.", "--text", "--loud", "Say what was given."))
    assert "--ways" not in shown
