"""Records: one line of JSON for each thing that was measured, or was not and why; and what became slower since."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

STAGES = ("forward", "backward", "both")


@dataclass(frozen=True)
class Record:
    """One candidate on one problem in one pass of STAGES. Times in seconds, memory in bytes.

    `refused` says why there is no figure: the candidate cannot run the problem, or its result is outside the budget.
    `fault`: "wrong" of such a result, the class of an error that was raised; none of what is declined.
    `error` is the share of the error budget that the result uses, None where nothing could be compared; `without`
    names what the candidate gives no gradient of. `rounds`: of how many runs `median` is. `host` is the time until a
    call returns on a GPU; `alone` that of the GPU, where all is launched before the first kernel begins, as in a CUDA
    graph, None where the host takes too long for that. `floor` is the least time that the work takes at the ceilings of
    the machine (`machine`, `computer`, `date`: where and when).
    """

    operator: str
    problem: str
    candidate: str
    dtype: str
    device: str
    stage: str
    median: float | None = None
    fast: float | None = None
    slow: float | None = None
    rounds: int | None = None
    host: float | None = None
    alone: float | None = None
    peak: int | None = None
    flops: float | None = None
    bytes: float | None = None
    floor: float | None = None
    error: float | None = None
    refused: str = ""
    fault: str = ""
    without: str = ""
    machine: str = ""
    computer: str = ""
    versions: str = ""
    date: str = ""

    @property
    def host_bound(self) -> bool:
        """Calls in a row take the host's time: it is longer than what the GPU needs (median: behind a queue)."""
        return self.host is not None and self.median is not None and self.host > self.median

    @property
    def key(self) -> tuple[str, ...]:
        """What must agree for two records to be compared."""
        return self.operator, self.problem, self.candidate, self.dtype, self.device, self.stage


class Writer:
    """A new file of records, a line as soon as it is measured: a run that is cut short loses nothing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", encoding="utf-8")

    def add(self, record: Record) -> None:
        self.file.write(json.dumps(asdict(record)) + "\n")
        self.file.flush()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


def read(*paths: Path) -> list[Record]:
    """The records of these files, each thing measured once; or what is wrong with them, in which file and line."""
    found: dict[tuple[str, ...], tuple[Record, str]] = {}
    for path in paths:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            place = f"{path}:{number}"
            try:
                record = _record(json.loads(line.decode("utf-8")))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: no record of foci bench: {error}") from error
            if record.key in found:
                raise ValueError(f"{place}: {' '.join(record.key)} was measured in {found[record.key][1]} already")
            found[record.key] = record, place
    return [record for record, _ in found.values()]


def _record(values: Any) -> Record:
    """A record of what a line held. Fields that a later foci has are left out."""
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {json.dumps(values):.40}")
    known = {field.name: field for field in fields(Record)}
    if missing := [name for name, field in known.items() if field.default is MISSING and name not in values]:
        raise ValueError(f"it has no {', '.join(missing)}")
    for name, field in known.items():
        _hold(name, values.get(name, field.default), field.default)
    record = Record(**{name: values[name] for name in known if name in values})
    if record.median is not None:
        if record.fast is None or record.slow is None:
            raise ValueError("a median has its spread, fast and slow")
        if not record.fast <= record.median <= record.slow:
            told = f"{record.fast:g} to {record.slow:g}"
            raise ValueError(f"a median of {record.median:g} is not within its spread, {told}")
    return record


def _hold(name: str, value: Any, default: Any) -> None:
    """Names are words, notes are text (their default is), figures numbers that can be measured, or absent."""
    if name == "stage":
        fits, wanted = value in STAGES, f"one of {', '.join(STAGES)}"
    elif default is MISSING:
        fits, wanted = isinstance(value, str) and bool(value.strip()), "a word"
    elif default is not None:
        fits, wanted = isinstance(value, str), "text"
    elif name in ("median", "fast", "slow"):
        fits, wanted = value is None or (measurable(value) and value > 0), "a number above 0"
    else:
        fits, wanted = value is None or measurable(value), "a number, 0 or above"
    if not fits:
        raise ValueError(f"{name} must be {wanted}, got {value!r:.40}")


def measurable(value: Any) -> bool:
    """Whether it is a finite number that is not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


@dataclass(frozen=True)
class Change:
    """The same thing measured twice. `ratio` is new over old; `beyond` the spread of both: it moved, not wavered.

    `alone`: the same of a GPU alone, where both know it.
    """

    record: Record
    ratio: float
    beyond: bool
    alone: float | None = None

    def __str__(self) -> str:
        what = f"{self.record.operator} {self.record.problem} {self.record.candidate} {self.record.stage}"
        word = "slower" if self.ratio > 1 else "faster"
        alone = "" if self.alone is None else f", the GPU alone {self.alone:.2f} x"
        return f"{what:<70} {self.ratio:6.2f} x {word if self.beyond else 'within the spread'}{alone}"


def compare(old: Iterable[Record], new: Iterable[Record]) -> Iterator[Change]:
    """Every record that both have a time for. Beyond the spread: the middle runs of the two do not overlap."""
    before = {record.key: record for record in old if record.median}
    for record in new:
        was = before.get(record.key)
        if was is None or not record.median or not was.median:
            continue
        assert was.fast and was.slow and record.fast and record.slow
        beyond = record.fast > was.slow or record.slow < was.fast
        alone = record.alone / was.alone if record.alone and was.alone else None
        yield Change(record, record.median / was.median, beyond, alone)


def lost(old: Iterable[Record], new: Iterable[Record]) -> list[str]:
    """What had a time and now has none: refused, with the reason, or absent."""
    now = {record.key: record for record in new}
    return [
        f"{' '.join(was.key)}: now {(now[was.key].refused or 'without a time') if was.key in now else 'absent'}"
        for was in old
        if was.median and not (was.key in now and now[was.key].median)
    ]


def moved(old: Sequence[Record], new: Sequence[Record]) -> str:
    """In which machine or versions two files differ, and a ratio between them may be of these; empty: in none."""
    said = []
    told = all(each.computer for each in (*old, *new))  # older files have none
    for name in ("machine", "computer", "versions") if told else ("machine", "versions"):
        was, now = (" and ".join(sorted({getattr(each, name) or "unknown" for each in x})) for x in (old, new))
        if was != now:
            said.append(f"{name} {was} before, {now} now")
    return "; ".join(said)
