"""The examples that start ranks by torchrun do what they say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.laws._tree import ROOT


@pytest.mark.parametrize(("ranks", "ulysses"), [(2, 1), (4, 2)])
def test_attend_equals_one_process(ranks: int, ulysses: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["examples/parallel/attend.py", "--ulysses", str(ulysses), "--tokens", "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = re.search(r"output off by (\S+), gradient by (\S+); ", done.stdout)
    assert said, done.stdout
    assert f"{ranks} ranks ({ulysses} Ulysses x {ranks // ulysses} ring)" in done.stdout
    assert max(map(float, said.groups())) < 1e-5


def test_the_script_for_slurm_is_a_script() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "examples/parallel/slurm.sh")], check=True)
