"""`foci bench`: records, pictures and changes; bad input as one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foci import cli
from foci.bench.record import Record, read
from foci.cli_bench import _line

QUICK = ["--shapes", "small", "--dtype", "float32", "--stages", "forward,both"]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_operators_are_timed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["scan", "decay", *QUICK, "--out", str(tmp_path / "found")], capsys)
    assert (code, err) == (0, "")
    assert "ceilings" in out and "of its budget" in out
    records = read(tmp_path / "found" / "records.jsonl")
    assert {(r.operator, r.stage) for r in records} == {(o, s) for o in ("scan", "linear") for s in ("forward", "both")}
    assert all(r.median and r.error is not None and r.machine and "torch" in r.versions and r.date for r in records)
    assert (tmp_path / "found" / "roofline.svg").read_text().startswith("<svg")
    assert "</html>" in (tmp_path / "found" / "index.html").read_text()


def test_a_limit_times_the_first_and_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where compiling took it all: on a GPU nothing was timed of the operator with the smallest share."""
    shapes = ["--shapes", "small,8x2048", *QUICK[2:]]
    code, out, _ = run(["scan", "decay", *shapes, "--limit", "-1", "--out", str(tmp_path)], capsys)
    [said] = [line for line in out.splitlines() if "left out" in line]
    assert code == 0 and said.startswith("left out, as the limit of -1 seconds was reached: scan 8x2048x2048, linear ")
    assert {(r.operator, r.problem) for r in read(tmp_path / "records.jsonl")} == {("scan", "small 1x256x256")}


def test_a_line_says_how_many_rounds_a_figure_is_of_where_they_are_fewer_than_usual() -> None:
    record = Record(
        "scan", "small", "foci", "float32", "cpu", "forward", median=1e-3, fast=1e-3, slow=2e-3, rounds=3, flops=1e6,
        floor=1e-4, error=0.5,
    )  # fmt: skip
    assert _line(record, 15).endswith("error 0.50 of its budget, 3 rounds")
    assert _line(replace(record, rounds=15), 15).endswith("error 0.50 of its budget")
    assert _line(replace(record, rounds=None), 15).endswith("error 0.50 of its budget")  # of an old file


def test_a_backend_by_name_and_no_peers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["softmax", *QUICK, "--backends", "chunked,aten", "--no-peers"], capsys)
    assert code == 0
    assert "foci chunked" in out and "foci aten" in out and "SDPA" not in out


def test_changes_are_told_and_a_regression_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["scan", *QUICK, "--out", str(tmp_path / "old")], capsys)
    old, new = tmp_path / "old" / "records.jsonl", tmp_path / "new.jsonl"
    rows = [json.loads(line) for line in old.read_text().splitlines()]
    for row in rows:  # a machine under load has spreads of its own
        row |= dict.fromkeys(("fast", "slow"), row["median"])
    old.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        row |= {name: 10 * row[name] for name in ("median", "fast", "slow")}
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = run(["--compare", str(old), str(new)], capsys)
    assert code == 1 and "10.00 x slower" in out and "2 compared, 2 slower" in out
    assert run(["--compare", str(new), str(old)], capsys)[0] == 0
    assert run(["--compare", str(old), str(old)], capsys)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name an operator"),
        (["nonsense"], "unknown operator 'nonsense'"),
        (["scan", "--dtype", "int8"], "--dtype must be one of"),
        (["scan", "--device", "tpu"], "--device tpu"),
        (["scan", "--shapes", "enormous"], "--shapes 'enormous': scan has 8x2048x2048"),
        (["scan", "--stages", "sideways"], "'sideways' is none of"),
        (["scan", "--backends", "magic", "--shapes", "small"], "unknown backend 'magic'"),
        (["--compare", "nothing", "nowhere"], "nothing"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(arguments, capsys)
    assert code == 2 and words in err and "Traceback" not in err
