"""`foci bench`: records, pictures and changes; bad input as one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import foci
from foci import cli, cli_bench
from foci.bench.record import Record, Writer, read
from foci.cli_bench import _line
from foci.core.device import machine
from foci.ops import FUNCTIONS, SPECS

QUICK = ["--shapes", "small", "--dtype", "float32", "--stages", "forward,both"]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_operators_are_timed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["scan", "decay", "scan", "linear", *QUICK[:-1], "forward,both,forward"]
    code, out, err = run([*twice, "--out", str(tmp_path / "found")], capsys)
    assert (code, err) == (0, "")
    assert "ceilings" in out and "of its budget" in out
    records = read(tmp_path / "found" / "records.jsonl")  # which refuses what is there twice
    assert {(r.operator, r.stage) for r in records} == {(o, s) for o in ("scan", "linear") for s in ("forward", "both")}
    assert all(r.median and r.error is not None and r.machine and "torch" in r.versions and r.date for r in records)
    assert {r.computer for r in records} == {machine().computer} and machine().cpu in records[0].computer
    assert (tmp_path / "found" / "roofline.svg").read_text().startswith("<svg")
    assert "</html>" in (tmp_path / "found" / "index.html").read_text()


def test_a_limit_times_the_first_and_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where compiling took it all: on a GPU nothing was timed of the operator with the smallest share."""
    shapes = ["--shapes", "small,8x2048", *QUICK[2:]]
    code, out, _ = run(["scan", "decay", *shapes, "--limit", "0", "--out", str(tmp_path)], capsys)
    [said] = [line for line in out.splitlines() if "left out" in line]
    assert code == 0 and said.startswith("left out, as the limit of 0 seconds was reached: scan 8x2048x2048, linear ")
    assert re.search(r"^seconds taken: scan compiled \d+\.\d, scan small 1x256x256 \d+\.\d, linear ", out, re.M)
    assert {(r.operator, r.problem) for r in read(tmp_path / "records.jsonl")} == {("scan", "small 1x256x256")}


def test_a_line_says_how_many_rounds_a_figure_is_of_where_they_are_fewer_than_usual() -> None:
    record = Record(
        "scan", "small", "foci", "float32", "cpu", "forward", median=1e-3, fast=1e-3, slow=2e-3, rounds=3, flops=1e6,
        floor=1e-4, error=0.5,
    )  # fmt: skip
    assert _line(record, 15).endswith("error 0.50 of its budget, 3 rounds")
    assert _line(replace(record, rounds=15), 15).endswith("error 0.50 of its budget")
    assert _line(replace(record, rounds=None), 15).endswith("error 0.50 of its budget")  # of an old file


def test_a_part_of_the_shapes_is_timed_of_each_operator_and_nothing_where_it_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[tuple[str, str]] = []
    monkeypatch.setattr(
        cli_bench, "sweep", lambda spec, candidates, cases, *rest: timed.append((spec.name, cases[0].name)) or []
    )
    for part in (1, 2, 3):
        assert run(["scan", "selective_scan", "--no-peers", "--part", f"{part}/3"], capsys)[0] == 0
    found = [(name, shape.name) for name in ("scan", "selective_scan") for shape in SPECS[name].shapes]
    assert sorted(timed) == sorted(found) and timed[:2] == [found[0], found[3]]
    timed.clear()
    (tmp_path / "records.jsonl").write_text("of another run")
    (tmp_path / "index.html").write_text("of another run")
    code, said, _ = run(["scan", "--part", "5/5", "--out", str(tmp_path)], capsys)
    assert (code, timed) == (0, []) and "scan: nothing to time: --part 5/5 has no shape\n" in said
    assert (tmp_path / "records.jsonl").read_text() == "" and "another run" not in (tmp_path / "index.html").read_text()


def test_a_run_that_is_cut_short_has_pictures_of_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an older run stood there, beside new records."""
    (tmp_path / "index.html").write_text("of another run")
    one = Record("scan", "cut short", "foci", "float32", "cpu", "forward", 1e-3, 1e-3, 1e-3, flops=1.0, bytes=1.0)

    def sweep(*given: object) -> Iterator[Record]:
        yield one
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_bench, "sweep", sweep)
    assert run(["scan", *QUICK, "--no-peers", "--out", str(tmp_path)], capsys)[0] == 130
    assert [each.problem for each in read(tmp_path / "records.jsonl")] == ["cut short"]
    page = (tmp_path / "index.html").read_text()
    assert "cut short" in page and "another run" not in page and page.endswith("</html>\n")


def test_a_backend_by_name_and_no_peers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["softmax", *QUICK, "--backends", "chunked,aten,chunked,", "--no-peers"], capsys)
    assert code == 0
    assert "foci chunked" in out and "foci aten" in out and "SDPA" not in out


def test_ours_is_what_users_call_for_the_shape() -> None:
    """The logarithm is another output, which peers do not give: it is asked for where its gradient is what is timed."""
    spec = SPECS["softmax"]
    for shape in spec.shapes:
        for named in ([], ["chunked"]):
            [ours] = cli_bench._ours(spec, named, shape)
            assert ours.outputs == (("out", "lse") if shape.name.startswith("dlse") else ("out",)), shape.name
    assert [each.outputs for each in cli_bench._ours(SPECS["scan"], [], SPECS["scan"].shapes[0])] == [("out", "state")]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(RuntimeError("torn\ntwo"), 1), (StopIteration("RuntimeError: torn"), 1), (foci.Unsupported("scan", ["no"]), 0)],
)
def test_one_of_ours_that_raises_is_exit_code_1(
    raised: Exception, expected: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(x: torch.Tensor, log_decay: torch.Tensor, *, return_state: bool = False) -> None:
        raise raised

    monkeypatch.setattr(cli_bench, "FUNCTIONS", FUNCTIONS | {"scan": torn})  # the judge has the true one
    code, out, _ = run(["scan", *QUICK, "--no-peers"], capsys)
    assert code == expected and ("RuntimeError: torn" in out) == bool(expected)


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


def test_other_conditions_and_what_is_gone_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Record(
        "scan", "small", "foci", "float32", "cpu", "forward", 1e-3, 1e-3, 1e-3, machine="A", versions="torch 2"
    )
    for name, records in (("old", [one, replace(one, stage="both")]), ("new", [replace(one, machine="B")])):
        with Writer(tmp_path / name) as file:
            for each in records:
                file.add(each)
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    code, out, err = run(["--compare", old, new], capsys)
    assert (code, err) == (1, "scan small foci float32 cpu both: now absent\n")
    assert out.startswith("not the same conditions: machine A before, B now\n") and "1.00 x" in out and "1 lost" in out
    assert run(["--compare", new, old], capsys)[0] == 0
    _, out, _ = run(["--compare", old, old], capsys)
    assert "conditions" not in out


def test_files_without_a_time_are_told_from_those_without_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Record("scan", "small", "foci", "float32", "cpu", "forward", refused="it cannot")
    for name, records in (("refused", [refused]), ("timed", [replace(refused, median=1e-3, fast=1e-3, slow=1e-3)])):
        with Writer(tmp_path / name) as file:
            file.add(records[0])
    (tmp_path / "empty").write_text("")
    paths = {name: str(tmp_path / name) for name in ("refused", "timed", "empty")}
    for old, new, words in (
        ("refused", "timed", "/refused has no time among its 1 records"),
        ("empty", "timed", "/empty has no record"),
        ("timed", "empty", "/empty has no record"),
    ):
        code, _, err = run(["--compare", paths[old], paths[new]], capsys)
        assert code == 2 and err.endswith(f"{words}\n")
    assert run(["--compare", paths["timed"], paths["refused"]], capsys)[0] == 1


def test_a_damaged_file_is_no_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").write_bytes(b"\xff\xfe\n")
    code, _, err = run(["--compare", str(tmp_path / "old"), str(tmp_path / "old")], capsys)
    assert code == 2 and f"{tmp_path}/old:1: no record of foci bench" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["scan", "--shapes", "nonsense"],
            "--shapes 'nonsense': expected what is in a shape's name; scan has 8x2048x2048",
        ),
        (
            ["scan", "--shapes", "nonsense,small"],
            "--shapes 'nonsense': expected what is in a shape's name; scan has 8x2048x2048",
        ),
        (
            ["scan", "linear", "--shapes", "small 1x256x256"],
            "--shapes 'small 1x256x256': expected what is in a shape's name; linear has GLA",
        ),
        (
            ["scan", "linear", "--shapes", "small,GLU"],
            "--shapes 'GLU': expected what is in a shape's name; scan has 8x2048x2048",
        ),
        (["scan", "softmax", "--shapes", "small", "--backends", "aten"], "--backends: scan: unknown backend 'aten'"),
        (["scan", "--shapes", "small", "--backends", ","], "--backends: scan: unknown backend ','"),
        (["scan", "--shapes", ","], "--shapes ',': expected what is in a shape's name; scan has 8x2048x2048"),
    ],
)
def test_what_one_operator_does_not_have_is_told_before_anything_is_measured(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And an older run's records are left as they are."""
    monkeypatch.setattr("foci.cli_bench.ceilings", lambda *_: pytest.fail("measured"))
    (tmp_path / "records.jsonl").write_text("older\n")
    code, out, err = run([*arguments, "--out", str(tmp_path)], capsys)
    assert (code, out) == (2, "") and words in err and (tmp_path / "records.jsonl").read_text() == "older\n"


@pytest.mark.parametrize("spoilt", [".", "records.jsonl", "index.html"])
def test_where_nothing_can_be_written_nothing_is_measured(
    spoilt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("foci.cli_bench.ceilings", lambda *_: pytest.fail("measured"))
    out = tmp_path / "out"
    if spoilt == ".":
        out.write_text("a file")
    else:
        (out / spoilt).mkdir(parents=True)
    code, said, err = run(["scan", "--shapes", "small", "--out", str(out)], capsys)
    assert (code, said) == (2, "") and f"--out {out}: " in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name an operator"),
        (["nonsense"], "unknown operator 'nonsense'"),
        (["scan", "--dtype", "int8"], "--dtype must be one of"),
        (["scan", "--device", "tpu"], "--device tpu"),
        (["scan", "--stages", "sideways"], "'sideways' is none of"),
        (["scan", "--stages", ","], "--stages must be some of forward, backward, both, got ','"),
        (["scan", "--limit", "nan"], "--limit must be seconds, 0 or more; got nan"),
        (["scan", "--part", "3/2"], "--part must be i/n, every nth from the ith, 1 <= i <= n, got '3/2'"),
        (["scan", "--part", "0/2"], "--part must be i/n, every nth from the ith, 1 <= i <= n, got '0/2'"),
        (["scan", "--limit", "-5"], "--limit must be seconds, 0 or more; got -5"),
        (["--compare", "nothing", "nowhere"], "--compare: nothing is no file of records: No such file or directory"),
        (["--compare", "/", "nowhere"], "--compare: / is no file of records: Is a directory"),
        (
            ["--compare", "a", "b", "scan", "--dtype", "bfloat16", "--no-peers"],
            "operators, --peers/--no-peers, --dtype",
        ),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(arguments, capsys)
    assert code == 2 and words in err and "Traceback" not in err
