"""Records: one line of JSON for each thing that was measured, or was not and why; and what became slower since."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One candidate on one problem in one pass ("forward", "backward" or "both"). Times in seconds, memory in bytes.

    `refused` says why there is no figure: the candidate cannot run the problem, or its result is outside the budget.
    `error` is the share of the error budget that the result uses, None where nothing could be compared; `without`
    names what the candidate gives no gradient of. `rounds`: of how many runs `median` is. `host` is the time until a
    call returns on a GPU. `floor` is the least time that the work takes at the ceilings of the machine (`machine`,
    `date`: where and when).
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
    peak: int | None = None
    flops: float | None = None
    bytes: float | None = None
    floor: float | None = None
    error: float | None = None
    refused: str = ""
    without: str = ""
    machine: str = ""
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


def read(path: Path) -> list[Record]:
    """The records of a file, or what is wrong with it and in which line."""
    known = {field.name for field in fields(Record)}
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values: dict[str, Any] = json.loads(line)
            found.append(Record(**{name: value for name, value in values.items() if name in known}))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number}: no record of foci bench: {error}") from error
    return found


@dataclass(frozen=True)
class Change:
    """The same thing measured twice. `ratio` is new over old; `beyond` the spread of both: it moved, not wavered."""

    record: Record
    ratio: float
    beyond: bool

    def __str__(self) -> str:
        what = f"{self.record.operator} {self.record.problem} {self.record.candidate} {self.record.stage}"
        word = "slower" if self.ratio > 1 else "faster"
        return f"{what:<70} {self.ratio:6.2f} x {word if self.beyond else 'within the spread'}"


def compare(old: Iterable[Record], new: Iterable[Record]) -> Iterator[Change]:
    """Every record that both have a time for. Beyond the spread: the middle runs of the two do not overlap."""
    before = {record.key: record for record in old if record.median}
    for record in new:
        was = before.get(record.key)
        if was is None or not record.median or not was.median:
            continue
        assert was.fast and was.slow and record.fast and record.slow
        beyond = record.fast > was.slow or record.slow < was.fast
        yield Change(record, record.median / was.median, beyond)


def lost(old: Iterable[Record], new: Iterable[Record]) -> list[str]:
    """What had a time and now is refused, with the reason."""
    refused = {record.key: record.refused for record in new if record.refused}
    return [f"{' '.join(r.key)}: now {refused[r.key]}" for r in old if r.median and r.key in refused]
