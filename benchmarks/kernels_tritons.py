"""The kernels of foci by other Tritons than the one it is tested with, each in an environment of its own.

Each has a table of its own beside docs/kernels.jsonl, docs/kernels-<version>.jsonl. That a kernel spills there is no
fault, as its tiles were chosen by another compiler; that anything differs from its table is. A Triton that has no
table yet, as it has just come out, is held to what any GPU asks of a kernel alone.

A row says of what it was compiled: source, arguments, configuration, Triton, assembler and what the environment tells
them. With --check or --write what is still compiled of the same is taken from the table, so that only what has changed
since takes time, and a few of the others, of every day's own choice, so that no table is taken at its word for long.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import triton
from kernels_compile import say
from kernels_page import NAMES, Row, differences, name_of, table

from foci.core.tune import PROVEN

IDENTITIES = "identities"  # of a row: what its launches were compiled of (kernels_compile.identity)
DAYS = 31  # after so many every kernel has been compiled again


@dataclass(frozen=True)
class Others:
    """Tables of other Tritons beside `lines`, the one of this."""

    lines: Path

    def path(self, version: str) -> Path:
        return self.lines.with_stem(f"{self.lines.stem}-{version}")

    def tables(self) -> dict[str, list[Row]]:
        """Those that are kept, by version."""
        return dict(table(path) for path in self._kept())

    def _kept(self) -> list[Path]:
        return sorted(self.lines.parent.glob(self.path("*").name))

    def ask(self, version: str, command: Sequence[str], *, write: bool, check: bool, partly: bool = False) -> int:
        """Compile all, or `partly`, by this version and say what differs from this Triton's; 1 where no GPU could run
        something.

        With `check` what differs from the version's own table, if there is one, and 1 where anything does; and what
        its inside no longer has, which is wrong where foci takes that version for proven.
        """
        with tempfile.TemporaryDirectory(prefix="foci-triton-") as folder:
            out = Path(folder) / "lines.jsonl"
            if (python := _environment(Path(folder) / "venv", version)) is None:
                say(f"--triton {version}: pip could not install it; expected a version that there is, or newest")
                return 1
            known = ["--known", *kept] if (check or write) and (kept := self._kept()) else []
            ended = subprocess.run([python, *command, *known, "--out", out], check=False, stdout=subprocess.DEVNULL)
            made = out.read_text() if out.exists() else ""
            failed = _failing(python) if check else ""
        head, *rows = [json.loads(line) for line in made.splitlines()] or [{}]
        if not rows or ended.returncode not in (0, 1):  # 1: something is wrong, which the table says
            say(f"Triton {version} gave no table, exit code {ended.returncode}\n{failed}".rstrip())
            return 1
        own = self.path(head["triton"])
        beside, before = table(own if check and own.exists() else self.lines)
        after = rows
        if partly:  # or of more than a table has
            common = set(map(name_of, before)) & set(map(name_of, rows))
            before, after = ([row for row in each if name_of(row) in common] for each in (before, rows))
        lines = differences(before, after)
        print(f"Triton {beside}, as it is kept -> {head['triton']}: {len(after)} kernels, {len(lines)} differ")
        if write:
            own.write_text(made)
            say(f"wrote {own.name}; docs/kernels.md has it by: python benchmarks/kernels.py --write")
        wrong = head["wrong"] + (lines if check and beside == head["triton"] else [])
        if failed:
            said = f"Triton {head['triton']}: what foci takes from inside it is not as it was\n{failed}"
            if head["triton"][:4] in PROVEN:
                wrong.append(said)
            else:
                print(said)
        print("\n".join(wrong if check else [*head["wrong"], *lines]))
        return int(bool(wrong))


def recalled(paths: Iterable[Path], today: date) -> dict[str, Row]:
    """What tables tell of compilations, by what was compiled; but a few, others each day, which are made again."""
    found = {}
    for row in (row for path in paths for row in table(path)[1] if "stopped" not in row):
        record = {name: value for name, value in row.items() if name not in (*NAMES, "meta", "launches", IDENTITIES)}
        found |= dict.fromkeys(row[IDENTITIES], record)
    due = today.toordinal() % DAYS
    return {identity: record for identity, record in found.items() if int(identity, 16) % DAYS != due}


def _failing(python: Path) -> str:
    """What tests say, where one fails, of the code that is written against the inside of Triton."""
    tests = [f"tests/core/test_{name}.py" for name in ("ahead", "assembler", "replay", "tensor_maps", "tune")]
    command = [python, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], check=False, capture_output=True, text=True)
    return f"{ended.stdout}{ended.stderr}exit code {ended.returncode}" if ended.returncode else ""


def _environment(folder: Path, version: str) -> Path | None:
    """A Python with that Triton, and all else of this one: torch is not installed twice."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    package = "triton" if version == "newest" else f"triton=={version}"
    if subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", package], check=False).returncode:
        return None
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    # Its own packages are found first, then all of this environment's.
    ours = str(Path(triton.__file__).parents[1])
    (Path(theirs) / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return python
