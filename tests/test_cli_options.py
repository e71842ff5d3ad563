"""Gathered options: a command line has each by its name, the command all of them as one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from foci.cli_options import Option, gathered, hold_file, hold_limit, hold_out


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


def test_a_file_to_write_is_no_folder_lies_in_one_and_is_left_as_it_is(tmp_path: Path, monkeypatch) -> None:
    hold_file("--json", tmp_path / "new.json")
    (tmp_path / "old.json").write_text("old")
    hold_file("--json", tmp_path / "old.json")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"] and (tmp_path / "old.json").read_text() == "old"
    for path, sentence in ((tmp_path, "that is a folder"), (tmp_path / "no" / "it", "there is no folder ")):
        with pytest.raises(ValueError, match=f"--json {path}: {sentence}"):
            hold_file("--json", path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for name in ("new.json", "old.json"):
        with pytest.raises(ValueError, match=f"{name}: no permission to write it"):
            hold_file("--json", tmp_path / name)


def test_a_limit_is_seconds_or_none() -> None:
    for limit in (0.0, 2.5, math.inf):
        hold_limit(limit)
    for limit in (math.nan, -1.0, -math.inf):
        with pytest.raises(ValueError, match="--limit must be seconds, 0 or more; got"):
            hold_limit(limit)


def test_a_folder_that_can_be_written_is_made_and_what_it_has_is_left(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("older")
    hold_out(tmp_path, "old", "new")
    hold_out(tmp_path / "deep" / "deeper", "new")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["deep", "old"]
    assert (tmp_path / "old").read_text() == "older" and (tmp_path / "deep" / "deeper").is_dir()
    with pytest.raises(ValueError, match=f"--out {tmp_path / 'old' / 'in it'}: Not a directory"):
        hold_out(tmp_path / "old" / "in it")
