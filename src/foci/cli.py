"""The `foci` command: accelerate | bench | check | generate | tune | explain | doctor. Bad input: code 2."""

from __future__ import annotations

import sys

from foci.core.errors import MissingExtra, require

# What a user can cause; anything else is our fault and keeps its traceback.
MISTAKES = (ValueError, NotImplementedError, MissingExtra, OSError)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: 0 well, 1 the command's own verdict is no, 2 it was asked wrongly, 130 interrupted."""
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
    except MISTAKES as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    typer = require("typer", extra="cli")
    from foci.cli_commands import app

    command = typer.main.get_command(app)
    try:
        # Without standalone mode an error comes back as an exception: one line, not a box.
        return int(command.main(arguments, prog_name="foci", standalone_mode=False) or 0)
    except Exception as error:
        # click moves its exceptions about between versions; what makes one is that it can format itself.
        if not hasattr(error, "format_message"):
            raise
        print(f"foci: {error.format_message()}", file=sys.stderr)
        return 2
