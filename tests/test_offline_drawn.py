"""benchmarks/kernels_drawn.py: what drawn calls launch is recorded as a GPU would be given it, and compiles."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels import backend_of, launches_of
from kernels_drawn import specimens

from foci.core.tune import TARGETS
from foci.ops import SPECS

KERNELS = Path(__file__).parents[1] / "benchmarks" / "kernels.py"


def test_every_operator_has_so_many_in_one_dtype_after_the_other() -> None:
    found = specimens("4,7")
    assert [each.operator for each in found] == [name for name in SPECS for _ in range(4)]
    assert [each.dtype for each in found[:4]] == [torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
    assert [each.name for each in found] == [each.name for each in specimens("4,7")]
    drawn, others = (
        {(each.operator, each.name.partition(": ")[2]) for each in some} for some in (found, specimens("4,8"))
    )
    assert len(drawn) == len(found) and not drawn & others


def test_forward_and_backward_of_each_are_recorded() -> None:
    for each in specimens("3,2"):
        assert backend_of(SPECS[each.operator]) is not None
        found = [direction for direction, _ in launches_of(each, TARGETS["sm_90"])]
        assert {"forward", "backward"} <= set(found), (each.operator, each.name)


def test_what_cannot_be_drawn_or_would_replace_the_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="--drawn must be how many"):
        specimens("none")
    command = [sys.executable, str(KERNELS), "--drawn", "1", "--write"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode and "of the whole table: without --script, --drawn," in done.stderr


@pytest.mark.slow
def test_they_compile_for_hopper_and_no_load_overtakes_a_product(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(KERNELS),
        "--drawn",
        "5,3",
        "--target",
        "sm_90",
        "--only",
        "softmax",
        "linear",
        "delta",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
