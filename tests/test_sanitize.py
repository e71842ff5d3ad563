"""benchmarks/sanitize.py: what a tool said is counted and named, and every kernel of ours is one that it watches."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

RACES = """========= COMPUTE-SANITIZER
RAN delta plain (1.0 s)
========= Error: Race reported between Write access at walk_kernel+0x9920 in walks.py:202
=========     and Read access at walk_kernel+0x10240 in walks.py:232 [256 hazards]
=========
========= Error: Race reported between Write access at walk_kernel+0x9920 in walks.py:202
=========     and Read access at walk_kernel+0x10260 in walks.py:232 [8 hazards]
=========
RAN delta one token (2.0 s)
ALL
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
READS = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at walk_kernel+0x160 in memory.py:15
=========     by thread (1,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
"""


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("sanitize")


def test_findings_of_one_place_are_one(sanitize: Any) -> None:
    write, read = "Write access at walk_kernel in walks.py:202", "Read access at walk_kernel in walks.py:232"
    assert sanitize.found_in(RACES) == {f"Race reported between {write} {read}": 2}
    assert sanitize.found_in(READS) == {"Invalid __global__ read of size 4 bytes walk_kernel in memory.py:15": 1}


def test_a_tool_that_came_to_no_end_has_found_nothing_out(sanitize: Any) -> None:
    cut = RACES.partition("ALL")[0]
    assert (sanitize.faults(RACES), sanitize.faults(READS), sanitize.faults(cut)) == (2, 1, None)
    whole = RACES.replace("2 hazards", "0 hazards")
    hung = whole.partition("========= RACECHECK")[0]
    assert not sanitize.clean(hung) and sanitize.line("hung", hung).endswith("2 ran, then the tool did not end")
    assert sanitize.clean("RAN a b (1 s)\nALL\n"), "no tool watched"
    assert [sanitize.clean(said) for said in (whole, whole.replace("ALL", ""), RACES, READS, cut)] == [
        True,
        *[False] * 4,
    ]
    assert sanitize.line("race", RACES) == "race: 2 faults, 2 ran"
    assert sanitize.line("read", READS) == "read: 1 faults, 0 ran, then it ended"
    assert sanitize.line("cut", cut) == "cut: not counted faults, 2 ran, then its time was over"
    failed = "RAN a b (1 s)\nTraceback (most recent call last):\nValueError: no\n"
    assert sanitize.line("failed", failed) == "failed: not counted faults, 1 ran, then it failed"


@pytest.mark.parametrize(("part", "known"), [("1/1", True), ("39/39", True), ("1/4000", False), ("3/2", False)])
def test_parts_that_there_are_not_are_refused(
    part: str, known: bool, sanitize: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    if known:
        return sanitize.hold_parts(parser, [("delta", part)])
    with pytest.raises(SystemExit):
        sanitize.hold_parts(parser, [("delta", "1/1"), ("delta", part)])
    assert "delta: --cases must be i/n, every nth from the ith, 1 <= i <= n" in capsys.readouterr().err


def test_every_kernel_is_watched_and_none_of_torchs(sanitize: Any) -> None:
    calls = [
        node
        for path in (ROOT / "src/foci/ops").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("launch", "tune.launch")
    ]
    names = {ast.unparse(call.args[0]).rpartition(".")[2] for call in calls}
    watched = re.compile(sanitize.OURS)
    assert len(calls) > 40
    assert {name for name in names if not watched.search(name)} == set()
    assert not watched.search("_ZN2at6native29vectorized_elementwise_kernelILi4EEEvT_")
    assert watched.search(f"{sanitize.PLANTED}_kernel")
