"""What the scripts here ask of their command lines before they measure or compile."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from foci.cli_check import Drawing, drawing_of


def above_0(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number above 0")
    return int(text)


def file_to_write(text: str) -> Path:
    """A path, for argparse: of a file that can be written, in a folder that is there."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: expected a file in a folder that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: it cannot be written")
    return path


def drawing(text: str) -> Drawing:
    """N,SEED,ROOM of `foci check --drawn`, for argparse; without a room a GPU's."""
    try:
        return drawing_of(text, "cuda")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
