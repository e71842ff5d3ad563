"""Records: written and read back, and what changed between two files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from foci.bench.record import Record, Writer, compare, lost, moved, read

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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"median": float("nan")}, "median must be a number above 0, got nan"),
        ({"median": -1.0}, "median must be a number above 0, got -1.0"),
        ({"median": 0.0}, "median must be a number above 0, got 0.0"),
        ({"median": 10**400}, "median must be a number above 0, got 1000"),
        ({"median": "1e-3"}, "median must be a number above 0, got '1e-3'"),
        ({"slow": True}, "slow must be a number above 0, got True"),
        ({"fast": None}, "a median has its spread, fast and slow"),
        ({"median": 3.0, "fast": 0.5, "slow": 2.0}, "a median of 3 is not within its spread, 0.5 to 2"),
        ({"median": 1.0, "fast": 2.0, "slow": 0.5}, "a median of 1 is not within its spread, 2 to 0.5"),
        ({"host": float("inf")}, "host must be a number, 0 or above, got inf"),
        ({"candidate": " "}, "candidate must be a word, got ' '"),
        ({"stage": "sideways"}, "stage must be one of forward, backward, both, got 'sideways'"),
        ({"stage": ["both"]}, "stage must be one of forward, backward, both, got ['both']"),
        ({"machine": None}, "machine must be text, got None"),
    ],
)
def test_a_figure_that_cannot_be_measured_is_named_with_its_line(
    changed: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (asdict(ONE), asdict(ONE) | changed)))
    with pytest.raises(ValueError, match="no record of foci bench") as caught:
        read(path)
    assert str(caught.value) == f"{path}:2: no record of foci bench: {words}{'0' * 36 if 'got 1000' in words else ''}"


@pytest.mark.parametrize(
    "line", [b"[1,2]", b"3", b"null", b"{", b"\xff\xfe\x00bad", b"[" * 100_000, b'{"stage": "both"}']
)
def test_a_line_that_is_no_record_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(json.dumps(asdict(ONE)).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"records\.jsonl:2: no record of foci bench: ."):
        read(path)


def test_what_was_measured_twice_is_named_with_both_places(tmp_path: Path) -> None:
    """Also in two files: neither figure is more true than the other."""
    write([ONE, replace(ONE, median=2.05)], tmp_path / "one")
    with pytest.raises(
        ValueError, match=r"one:2: softmax small foci float32 cpu forward was measured in .*one:1 already"
    ):
        read(tmp_path / "one")
    write([ONE], tmp_path / "one")
    write([replace(ONE, stage="both"), ONE], tmp_path / "two")
    with pytest.raises(ValueError, match=r"two:2: .* was measured in .*one:1 already"):
        read(tmp_path / "one", tmp_path / "two")


def test_changes_are_paired_and_judged_by_their_spread() -> None:
    slower = replace(ONE, median=3.0, fast=2.9, slow=3.1)
    wavering = replace(ONE, median=2.05, fast=1.95, slow=2.2)
    (change,) = compare([ONE], [slower])
    assert (change.ratio, change.beyond) == (1.5, True)
    assert "1.50 x slower" in str(change)
    (change,) = compare([ONE], [wavering])
    assert not change.beyond and "within the spread" in str(change)
    assert list(compare([ONE], [replace(slower, problem="another")])) == []


def test_a_gpu_alone_is_compared_where_both_know_it() -> None:
    before, now = replace(ONE, alone=1.0), replace(ONE, alone=1.25)
    (change,) = compare([before], [now])
    assert change.ratio == 1.0 and str(change).endswith("within the spread, the GPU alone 1.25 x")
    (change,) = compare([ONE], [now])
    assert change.alone is None and str(change).endswith("within the spread")


def test_what_lost_its_time_is_named_with_the_reason() -> None:
    (line,) = lost([ONE], [replace(ONE, median=None, refused="wrong: 3 of the error budget")])
    assert "wrong: 3 of the error budget" in line
    assert lost([ONE], [ONE]) == []
    assert lost([replace(ONE, median=None, refused="out of memory")], []) == []


def test_what_is_absent_has_lost_its_time_too() -> None:
    both = replace(ONE, stage="both")
    assert lost([ONE, both], [ONE]) == ["softmax small foci float32 cpu both: now absent"]
    assert lost([both], [replace(both, median=None)]) == ["softmax small foci float32 cpu both: now without a time"]


def test_another_machine_or_other_versions_are_told() -> None:
    old = [replace(ONE, machine="A", versions="torch 1"), replace(ONE, machine="A", versions="torch 2")]
    assert moved(old, old[::-1]) == ""
    assert moved(old, [replace(ONE, machine="B", versions="torch 2")]) == (
        "machine A before, B now; versions torch 1 and torch 2 before, torch 2 now"
    )
    assert moved([ONE], [replace(ONE, machine="B")]) == "machine unknown before, B now"
    assert moved([replace(ONE, computer="A")], [replace(ONE, computer="B")]) == "computer A before, B now"
    assert moved([ONE], [replace(ONE, computer="B")]) == ""  # an older file, which does not know
