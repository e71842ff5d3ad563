"""What benchmarks/h200.sh found, as the tables of docs/benchmarks.md; the records themselves go to docs/gpu.jsonl.

    python benchmarks/gpu_page.py FOLDER [--write]

FOLDER is gpu.tgz unpacked. A row is one of ours on one problem: its milliseconds, and how many times as long the
fastest peer takes (1.5 x: we are faster, 0.9 x: it is). A peer that gives fewer gradients, or whose result could not be
compared, is said to, and the fastest that does all stands after it. Where the GPU's time alone, Python hidden, says
something else by a twentieth, it stands behind them. What was refused or wrong has its reason, and what was left out
for want of time is named. A page is of one machine.

With --write a run is added to what the docs have: the records of a shape's stage take the place of those there, as
ratios are of one run, and what it says of decoding and of laws takes that of older words. Which ways have no figure
any more is said; what was left out says nothing of the docs' page.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path

from foci.bench.record import Record, measurable, read
from foci.ops import SPECS

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- by benchmarks/gpu_page.py --write -->", "<!-- end -->"
STAGES = ("forward", "backward", "both")
FOUND = re.compile(r"^FAIL |\d+ held, \d+ broken")
STEP = ("gpu_us", "share", "clean_us", "clean_share", "host_us")  # numbers that a step of decoding has


def ours(record: Record) -> bool:
    """Whether it is one of foci's backends."""
    return record.candidate.split()[0] == "foci"


def cell(mine: Record, peers: list[Record]) -> str:
    """Our time, and what the fastest peer of the same stage takes in it; while one does less, the next one's too."""
    if mine.median is None:
        return mine.refused or "-"
    text, last = f"{mine.median * 1e3:.3f} ms{_notes(mine)}", ""
    timed = [peer for peer in peers if peer.median is not None and peer.stage == mine.stage]
    for peer in sorted(timed, key=lambda peer: peer.median or 0.0):
        text += f", {(peer.median or 0.0) / mine.median:.2f} x {peer.candidate}{_notes(peer)}"
        last = peer.candidate
        if not peer.without and peer.error is not None:
            break
    return text + _alone(mine, timed, last)


def _alone(mine: Record, peers: list[Record], told: str) -> str:
    """What the fastest peer takes where nobody waits for Python, if that is another figure by a twentieth."""
    known = [(peer.alone, peer) for peer in peers if peer.alone and not peer.without and peer.error is not None]
    if not known or not mine.alone or not mine.median:
        return ""
    least, peer = min(known, key=itemgetter(0))
    ratio, called = least / mine.alone, (peer.median or 0.0) / mine.median
    name = f" x {peer.candidate}" * (peer.candidate != told)
    return "" if abs(ratio - called) <= called / 20 else f"; alone {ratio:.2f}{name}"


def _notes(record: Record) -> str:
    """What a time alone would hide. Host-bound: calls in a row take the host's time, not the GPU's."""
    notes = {
        f"no gradient of {record.without}": record.without,
        "not compared": record.error is None,
        "host-bound": record.host_bound,
    }
    said = ", ".join(note for note, holds in notes.items() if holds)
    return f" ({said})" if said else ""


def tables(records: list[Record]) -> Iterator[str]:
    """A table for each operator in each dtype."""
    for operator, dtype in dict.fromkeys((record.operator, record.dtype) for record in records):
        here = [record for record in records if (record.operator, record.dtype) == (operator, dtype)]
        yield f"\n### {operator}, {dtype}\n\n| problem | ours | forward | backward | both | host, forward and both |"
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


def heading(records: list[Record]) -> str:
    """When and where they were measured; which operators with which versions, where these differ."""
    gpus = (record.machine.rpartition(" · ")[2] or "a machine without a name" for record in records)
    places = dict.fromkeys(f"{gpu}, {record.device}" for gpu, record in zip(gpus, records, strict=True))
    if len(places) > 1:
        raise ValueError(f"a page is of one machine, and these records are of {len(places)}: {'; '.join(places)}")
    dates = sorted(record.date for record in records)
    found: dict[str, list[str]] = {}
    for record in records:
        found.setdefault(record.versions, []).append(record.operator)
    versions = [
        each + f" ({', '.join(dict.fromkeys(operators))})" * (len(found) > 1) for each, operators in found.items()
    ]
    where = dict.fromkeys(record.machine for record in records)
    return f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}: {'; '.join((*where, *versions))}."


def lines_of(path: Path) -> list[str]:
    """The lines of a file, or which of them is no text."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: no text: {error}") from error
    return found


def untimed(folder: Path) -> Iterator[str]:
    """What `foci bench` says that it left out, an operator a line."""
    said = [
        f"- {_named(path)}: {line}"
        for path in sorted(folder.glob("bench_*.txt"))
        for line in lines_of(path)
        if "left out" in line
    ]
    if said:
        yield "\n### not timed\n"
        yield from said


def decoding(path: Path) -> Iterator[str]:
    """One token a row: the share of a copy's bandwidth."""
    try:
        rows = json.loads("\n".join(lines_of(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: no JSON: {error}") from error
    if rows == []:  # every step failed
        return
    yield "\n### decoding\n\nOf a copy's bandwidth, the cache filled before by a write or (clean) by a read.\n"
    yield "| step | on the GPU | of a copy | clean | of a copy | host |\n| --- | --- | --- | --- | --- | --- |"
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        known = row if isinstance(row, dict) else {}
        if bad := [name for name in STEP if not measurable(known.get(name))]:
            raise ValueError(f"{path}: row {number} has no number of {', '.join(bad)}: {row!r:.60}")
        times = f"{row['gpu_us']:.0f} us | {row['share']:.0%} | {row['clean_us']:.0f} us | {row['clean_share']:.0%}"
        yield f"| {row.get('name', '-')} | {times} | {row['host_us']:.0f} us |"


def laws(folder: Path) -> Iterator[str]:
    """What benchmarks/laws.py said: what was broken, and of each operator how many rows held."""
    paths = [path for path in sorted(folder.glob("laws_*.txt")) if lines_of(path)]
    for dtype in dict.fromkeys(map(_named, paths)):
        yield f"\n### laws, {dtype}\n\n```"
        for path in paths:
            if _named(path) == dtype:
                said = lines_of(path)
                yield from [line for line in said if FOUND.search(line)] or said[-1:]
        yield "```"


def _named(path: Path) -> str:
    """Of what a file tells: laws_bfloat16.txt, or laws_bfloat16.1.txt of one of several GPUs."""
    return path.stem.split("_", 1)[1].split(".")[0]


def placed(record: Record) -> tuple[str, int]:
    """Its operator, and the place of its problem among those timed; one that is timed no more comes behind."""
    shapes = SPECS[record.operator].shapes if record.operator in SPECS else ()
    names = [shape.name for shape in shapes]
    return record.operator, names.index(record.problem) if record.problem in names else len(names)


def records_of(folder: Path) -> list[Record]:
    """All that a run found; what is damaged is named with its file and line."""
    records = sorted(read(*sorted(folder.glob("*/records.jsonl"))), key=placed)
    if not records:
        raise ValueError(f"{folder}: no records; expected gpu.tgz of benchmarks/h200.sh, unpacked")
    return records


def asked(folder: Path) -> str:
    """What a run says of decoding and of laws."""
    return "\n".join([*(decoding(folder / "decode.json") if (folder / "decode.json").exists() else ()), *laws(folder)])


def page(folder: Path) -> str:
    """A run by itself."""
    records = records_of(folder)
    return "\n".join([heading(records), *tables(records), *untimed(folder), asked(folder)])


def added(folder: Path, text: str, known: list[Record]) -> tuple[str, list[Record]]:
    """The docs' page, which is `text`, and its records, `known`, with a run in it."""
    found = records_of(folder)
    anew = {(record.operator, record.problem, record.dtype, record.stage) for record in found}
    kept = [each for each in known if (each.operator, each.problem, each.dtype, each.stage) not in anew]
    records = sorted([*kept, *found], key=placed)
    said, now = _sections(text, ("decoding", "laws, ")), _sections(asked(folder))
    said |= {title: _merged(said.get(title, ""), section) for title, section in now.items()}
    return "\n".join([heading(records), *tables(records), *said.values()]), records


def _sections(text: str, titles: tuple[str, ...] = ("",)) -> dict[str, str]:
    """What stands below headings that begin so, by heading."""
    parts = (part.rstrip() for part in text.split("\n### ")[1:])
    return {part.splitlines()[0]: f"\n### {part}" for part in parts if part.startswith(titles)}


def _merged(old: str, new: str) -> str:
    """A section of this run, with lines of the older one in it that tell of an operator or a step that it has not."""
    lines, anew = new.splitlines(), set(map(_of, new.splitlines()))
    kept = [line for line in old.splitlines() if _of(line) not in anew]
    told = (place for place, line in enumerate(lines) if _of(line) not in ("", "| step", "| ---"))
    first = next(told, len(lines) - 1)  # laws that were not asked tell of no operator
    return "\n".join([*lines[:first], *kept, *lines[first:]])


def _of(line: str) -> str:
    """The step of decoding, or the operator, that a line tells of."""
    found = re.match(rf"(?:FAIL )?({'|'.join(SPECS)}) |(\| [^|]+) \|", line)
    return (found[1] or found[2]) if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gpu.tgz, unpacked")
    parser.add_argument("--write", action="store_true", help="add it to docs/; else it is printed")
    chosen = parser.parse_args()
    path, lines = DOCS / "benchmarks.md", DOCS / "gpu.jsonl"
    try:
        if not chosen.write:
            print(page(chosen.folder))
            return
        whole, known = path.read_text(encoding="utf-8"), read(lines)
        if (whole.count(BEGIN), whole.count(END)) != (1, 1):
            raise ValueError(f"{path}: expected one table between {BEGIN} and {END}")
        before, rest = whole.split(BEGIN)
        old, after = rest.split(END)
        text, records = added(chosen.folder, old, known)
    except (ValueError, OSError) as error:
        sys.exit(f"gpu_page.py: {error}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    lines.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records), encoding="utf-8")
    timed, now = ({each.key for each in some if each.median} for some in (known, records))
    gone = sorted(" ".join(key) for key in timed - now)
    print("\n".join([f"{len(records)} records", *(f"no figure any more: {each}" for each in gone)]))


if __name__ == "__main__":
    main()
