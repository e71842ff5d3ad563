"""The tables of docs/benchmarks.md say what the records of a GPU run say, the bad with the good."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks import gpu_page

from foci.bench.record import Record


def record(candidate: str, stage: str, median: float | None, refused: str = "") -> Record:
    return Record(
        "delta", "GDN", candidate, "bfloat16", "cuda", stage, median=median, host=5e-5, refused=refused,
        machine="a GPU", versions="torch 2.11.0", date="2026-11-21",
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


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no records"):
        gpu_page.page(tmp_path)
