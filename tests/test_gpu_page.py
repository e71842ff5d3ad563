"""The tables of docs/benchmarks.md say what the records of a GPU run say, the bad with the good."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks import gpu_page

from foci.bench.record import Record


def record(candidate: str, stage: str, median: float | None, refused: str = "") -> Record:
    return Record(
        "delta", "GDN", candidate, "bfloat16", "cuda", stage, median, median, median, host=5e-5, error=0.5,
        refused=refused, machine="a GPU", versions="torch 2.11.0", date="2026-11-21",
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What benchmarks/h200.sh leaves: faster in one stage, slower in another, wrong in the third."""
    found = [
        record("foci", "forward", 1e-3), record("FLA", "forward", 2e-3), record("torch", "forward", 9e-3),
        record("foci", "backward", 4e-3), record("FLA", "backward", 2e-3),
        record("foci", "both", None, "wrong: 2.0 of the error budget"), record("FLA", "both", 4e-3),
    ]  # fmt: skip
    (tmp_path / "delta").mkdir()
    (tmp_path / "delta" / "records.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in found))
    step = {"name": "a step", "gpu_us": 72.0, "host_us": 66.0, "share": 0.889, "error": 1e-3}
    (tmp_path / "decode.json").write_text(json.dumps([step]))
    said = "9 kernels\nFAIL delta bfloat16 2 forward: wrong\ndelta bfloat16: 7 held, 1 broken, 0 not asked\n30 s\n"
    (tmp_path / "laws_bfloat16.txt").write_text(said)
    return tmp_path


def test_a_row_has_our_time_and_the_fastest_peer_s_ratio_to_it(folder: Path) -> None:
    text, lines = gpu_page.page(folder)
    assert "| GDN | foci | 1.000 ms, 2.00 x FLA | 4.000 ms, 0.50 x FLA | wrong: 2.0 of the error budget |" in text
    assert text.startswith("2026-11-21: a GPU; torch 2.11.0.") and len(lines) == 7


def test_decoding_and_laws_stand_below(folder: Path) -> None:
    text, _ = gpu_page.page(folder)
    assert "| a step | 72 us | 89% | 66 us |" in text
    laws = "FAIL delta bfloat16 2 forward: wrong\ndelta bfloat16: 7 held, 1 broken, 0 not asked"
    assert text.endswith(f"### laws, bfloat16\n\n```\n{laws}\n```")


def test_what_was_not_timed_is_named_also_where_an_operator_has_no_record(folder: Path) -> None:
    said = "left out, as the limit of 5 seconds was reached: scan 8x2048x2048, scan small 1x256x256"
    (folder / "bench_scan.txt").write_text(f"ceilings: 802 TFLOP/s\n\n{said}\n")
    assert f"\n### not timed\n\n- scan: {said}\n" in gpu_page.page(folder)[0]


@pytest.mark.parametrize("operators", ["delta linear softmax selective_scan scan", "scan", "selective_scan scan"])
@pytest.mark.parametrize("seconds", [60, 190, 300])
def test_every_operator_has_time_to_be_compiled_and_all_of_it_is_given(
    operators: str, seconds: int, tmp_path: Path
) -> None:
    """benchmarks/h200.sh with an interpreter that only says what it was asked: 5 of 190 seconds once timed no scan."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    python.chmod(0o755)
    asked = {"PYTHON": str(python), "OPERATORS": operators, "BENCH": str(seconds), "PATH": os.environ["PATH"]}
    script = Path(gpu_page.__file__).with_name("h200.sh")
    ended = subprocess.run(["bash", str(script), str(tmp_path / "out"), "bench"], env=asked, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"foci bench (\w+) .*--limit (\d+) ", (tmp_path / "asked").read_text())
    limits = {operator: int(limit) for operator, limit in found}
    assert list(limits) == operators.split()
    assert min(limits.values()) >= min(15, seconds // len(limits))
    assert seconds - len(limits) <= sum(limits.values()) <= seconds


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no records"):
        gpu_page.page(tmp_path)
