"""The environment is made once, and where it cannot be made one line says why."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laws._tree import ROOT

TOOLS = ("sh", "cat", "cksum", "dirname", "grep", "sed", "env")


def make(tree: Path, pythons: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/environment in a copy of the project's roots, on a machine that has only these pythons."""
    (tree / "bin").mkdir()
    for tool in TOOLS:
        (tree / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    for name, script in pythons.items():
        (tree / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tree / "bin" / name).chmod(0o755)
    (tree / ".ci").mkdir()
    for path in (".ci/environment", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / path, tree / path)
    command = [str(tree / ".ci" / "environment")]
    environment |= {"PATH": str(tree / "bin")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


OLD = 'if [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi'
WITHOUT_VENV = f'case "$2" in *venv*) exit 1;; esac; exec {sys.executable} "$@"'


@pytest.mark.parametrize(
    ("pythons", "line"),
    [
        ({}, "foci: needs Python 3.11 or newer, and none was found (python3: absent)"),
        ({"python3": OLD}, "foci: needs Python 3.11 or newer, and none was found (python3: Python 3.9.2)"),
        (
            {"python3": OLD, "python3.12": "exit 127"},
            "foci: needs Python 3.11 or newer, and none was found (python3: Pyth",
        ),
        (
            {"python3": WITHOUT_VENV},
            "foci: python3 has no venv module; install it (Debian: apt-get install python3-venv)",
        ),
    ],
)
def test_a_missing_python_is_one_line(tmp_path: Path, pythons: dict[str, str], line: str) -> None:
    done = make(tmp_path, pythons)
    assert done.returncode == 1
    assert done.stderr.startswith(line)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert not (tmp_path / ".venv").exists()


def test_a_failed_download_is_one_line_and_is_tried_again(tmp_path: Path) -> None:
    python = {"python3": f'exec {sys.executable} "$@"'}
    done = make(tmp_path, python, PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    said = done.stderr.splitlines()
    assert done.returncode == 1
    assert len(said) == 2, done.stderr
    assert said[1].startswith("foci: the installation failed: ERROR: Could not find a version")
    assert not (tmp_path / ".venv" / ".installed").exists()
