"""Records: written and read back, and what changed between two files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from foci.bench.record import Record, Writer, compare, lost, read

ONE = Record(
    "softmax", "small", "foci", "float32", "cpu", "forward", median=2.0, fast=1.9, slow=2.1,
    flops=4.0, bytes=2.0, floor=1.0,
)  # fmt: skip


def write(records: list[Record], path: Path) -> None:
    with Writer(path) as file:
        for record in records:
            file.add(record)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    refused = replace(ONE, candidate="theirs", median=None, refused="softcap is not supported")
    write([ONE, refused], tmp_path / "deep" / "records.jsonl")
    assert read(tmp_path / "deep" / "records.jsonl") == [ONE, refused]


def test_a_later_field_does_not_break_an_older_foci(tmp_path: Path) -> None:
    write([ONE], tmp_path / "records.jsonl")
    text = (tmp_path / "records.jsonl").read_text().replace("{", '{"invented": 1, ', 1)
    (tmp_path / "records.jsonl").write_text(text)
    assert read(tmp_path / "records.jsonl") == [ONE]


def test_the_host_rules_where_it_takes_longer_than_the_gpu() -> None:
    assert replace(ONE, host=2.5).host_bound
    assert not replace(ONE, host=1.0).host_bound and not ONE.host_bound


def test_what_is_no_record_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"operator": "softmax"}\n')
    with pytest.raises(ValueError, match=r"records\.jsonl:1: no record"):
        read(tmp_path / "records.jsonl")


def test_changes_are_paired_and_judged_by_their_spread() -> None:
    slower = replace(ONE, median=3.0, fast=2.9, slow=3.1)
    wavering = replace(ONE, median=2.05, fast=1.95, slow=2.2)
    (change,) = compare([ONE], [slower])
    assert (change.ratio, change.beyond) == (1.5, True)
    assert "1.50 x slower" in str(change)
    (change,) = compare([ONE], [wavering])
    assert not change.beyond and "within the spread" in str(change)
    assert list(compare([ONE], [replace(slower, problem="another")])) == []


def test_what_lost_its_time_is_named_with_the_reason() -> None:
    (line,) = lost([ONE], [replace(ONE, median=None, refused="wrong: 3 of the error budget")])
    assert "wrong: 3 of the error budget" in line
    assert lost([ONE], [ONE]) == []
