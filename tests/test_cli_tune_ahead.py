"""Compiling ahead: for a GPU that is not here, into Triton's cache; what dies or hangs takes nothing with it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from foci.bench.tuning import Attempt
from foci.cli_tune_ahead import ahead, each
from foci.core.tune import TARGETS, Config
from foci.ops import SPECS


def answer(task: str) -> str:
    if task == "die":
        os.abort()
    if task == "hang":
        time.sleep(60)
    if task == "raise":
        raise RuntimeError("told again where it is wanted")
    return task


def test_each_task_answers_for_itself() -> None:
    tasks = ["one", "die", "raise", "hang", "two"]
    said = each(answer, tasks, workers=3, limit=8.0)
    assert said == ["one", "its compiler died (exit code -6)", "", "its compiler took more than 8 s", "two"]


def test_past_the_limit_nothing_begins() -> None:
    assert each(answer, ["one", "two"], workers=2, until=time.monotonic() - 1) == ["", ""]


def test_a_candidate_lands_in_the_cache_and_one_that_does_not_fit_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes without the interpreter, which this one may be running."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = next(shape for shape in SPECS["scan"].shapes if shape.name.startswith("small"))
    narrow = TARGETS["sm_90"]._replace(shared=-1)
    for target, said in ((TARGETS["sm_90"], ""), (narrow, "0 bytes of shared memory, the GPU has -1")):
        compile_all = ahead("scan", torch.bfloat16, target, workers=1)
        place = ("scan_forward", "torch.bfloat16")
        assert compile_all([Attempt(case, "forward", place, Config({"BLOCK_D": 64, "BLOCK_T": 16}, 2, 2))]) == [said]
    compiled = [json.loads(path.read_text()) for path in tmp_path.glob("*/forward_kernel.json")]
    assert [(found["num_warps"], found["target"]["arch"]) for found in compiled] == [(2, 90)]
