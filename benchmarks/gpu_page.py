"""What benchmarks/h200.sh found, as the tables of docs/benchmarks.md; the records themselves go to docs/gpu.jsonl.

    python benchmarks/gpu_page.py FOLDER [--write]

FOLDER is gpu.tgz unpacked. A row is one of ours on one problem: its milliseconds, and how many times as long the
fastest peer takes (1.5 x: we are faster, 0.9 x: it is). What was refused or wrong has its reason, and what was left out
for want of time is named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foci.bench.record import Record, read

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- by benchmarks/gpu_page.py --write -->", "<!-- end -->"
STAGES = ("forward", "backward", "both")
FOUND = re.compile(r"^FAIL |\d+ held, \d+ broken")


def ours(record: Record) -> bool:
    """Whether it is one of foci's backends."""
    return record.candidate.split()[0] == "foci"


def cell(mine: Record, peers: list[Record]) -> str:
    """Our time, and what the fastest peer of the same stage takes in it."""
    if mine.median is None:
        return mine.refused or "-"
    text = f"{mine.median * 1e3:.3f} ms{_of_host(mine)}"
    timed = [peer for peer in peers if peer.median is not None and peer.stage == mine.stage]
    if timed:
        best = min(timed, key=lambda peer: peer.median or 0.0)
        text += f", {(best.median or 0.0) / mine.median:.2f} x {best.candidate}{_of_host(best)}"
    return text


def _of_host(record: Record) -> str:
    """Calls in a row that take the host's time, not the GPU's, are said to."""
    return " (host-bound)" if record.host_bound else ""


def tables(records: list[Record]) -> Iterator[str]:
    """A table for each operator."""
    for operator in dict.fromkeys(record.operator for record in records):
        here = [record for record in records if record.operator == operator]
        yield f"\n### {operator}\n\n| problem | ours | forward | backward | both | host, forward and both |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for problem in dict.fromkeys(record.problem for record in here):
            same = [record for record in here if record.problem == problem]
            peers = [record for record in same if not ours(record)]
            for candidate in dict.fromkeys(record.candidate for record in same if ours(record)):
                mine = {record.stage: record for record in same if record.candidate == candidate}
                cells = [cell(mine[stage], peers) if stage in mine else "-" for stage in STAGES]
                if len(set(cells)) == 1:
                    cells = [cells[0], "", ""]
                hosts = [mine[stage].host for stage in ("forward", "both") if stage in mine]
                host = ", ".join("-" if value is None else f"{value * 1e6:.0f} us" for value in hosts)
                yield f"| {problem} | {candidate} | {' | '.join(cells)} | {host} |"


def untimed(folder: Path) -> Iterator[str]:
    """What `foci bench` says that it left out, an operator a line."""
    said = [
        f"- {path.stem.removeprefix('bench_')}: {line}"
        for path in sorted(folder.glob("bench_*.txt"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if "left out" in line
    ]
    if said:
        yield "\n### not timed\n"
        yield from said


def decoding(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One token a row: the share of a copy's bandwidth."""
    yield "\n### decoding\n\n| step | on the GPU | of a copy's bandwidth | host |\n| --- | --- | --- | --- |"
    for row in rows:
        yield f"| {row['name']} | {row['gpu_us']:.0f} us | {row['share']:.0%} | {row['host_us']:.0f} us |"


def laws(folder: Path) -> Iterator[str]:
    """What benchmarks/laws.py said: what was broken, and of each operator how many rows held."""
    for path in sorted(folder.glob("laws_*.txt")):
        yield f"\n### laws, {path.stem.removeprefix('laws_')}\n\n```"
        said = path.read_text(encoding="utf-8").splitlines()
        yield from [line for line in said if FOUND.search(line)] or said[-1:]
        yield "```"


def page(folder: Path) -> tuple[str, list[str]]:
    """The text between the marks, and the lines of docs/gpu.jsonl."""
    files = sorted(folder.glob("*/records.jsonl"))
    try:
        records = [record for path in files for record in read(path)]
    except ValueError as error:
        sys.exit(str(error))
    if not records:
        sys.exit(f"{folder}: no records; expected gpu.tgz of benchmarks/h200.sh, unpacked")
    dates, where = sorted(record.date for record in records), f"{records[0].machine}; {records[0].versions}"
    lines = [f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}: {where}.", *tables(records), *untimed(folder)]
    if (folder / "decode.json").exists():
        lines += decoding(json.loads((folder / "decode.json").read_text(encoding="utf-8")))
    lines += laws(folder)
    return "\n".join(lines), [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gpu.tgz, unpacked")
    parser.add_argument("--write", action="store_true", help="into docs/; else it is printed")
    chosen = parser.parse_args()
    text, lines = page(chosen.folder)
    if not chosen.write:
        print(text)
        return
    path = DOCS / "benchmarks.md"
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    (DOCS / "gpu.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
