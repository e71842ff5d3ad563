"""benchmarks/laws_packed.py: what is packed is found where it is used, by another process, and by that Triton alone."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("triton")

import laws_packed

import laws

ROOT = Path(__file__).parents[1]

ONE_KERNEL = """
import sys
from pathlib import Path
import torch, triton
import laws_ahead, laws_packed
from foci.core.tune import TARGETS
from foci.ops import SPECS

what, folder, file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if what == "pack":
    triton.knobs.cache.dir = str(folder)
    laws_packed.by_version()
else:
    laws_packed.use(file, folder)
there = set(folder.rglob("*"))
launch = laws_ahead._of_shapes(SPECS["scan"], SPECS["scan"].cases[0], torch.float32, [TARGETS["sm_90"]])[0][1]
assert laws_ahead.compiled(launch, TARGETS["sm_90"], launcher=False)
print(len(set(folder.rglob("*.ptx")) - there), "compiled,", *([laws_packed.pack(folder, file)] * (what == "pack")))
"""


def run(what: str, folder: Path, file: Path) -> str:
    command = [sys.executable, "-c", ONE_KERNEL, what, str(folder), str(file)]
    path = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}", "PATH": "/usr/bin:/bin", "HOME": str(folder.parent)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=path).stdout.strip()


def test_what_was_packed_is_not_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    assert run("pack", tmp_path / "made", tmp_path / "packed.tar.xz") == "1 compiled, 1"
    with tarfile.open(tmp_path / "packed.tar.xz") as packed:
        assert {Path(name).suffix for name in packed.getnames()} == {"", ".cubin", ".json"}
    shutil.rmtree(tmp_path / "made")  # where it is used there is no such folder
    assert run("use", tmp_path / "there", tmp_path / "packed.tar.xz") == "0 compiled,"


def test_what_another_triton_made_is_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "packed.tar.xz"
    with tarfile.open(file, "w:xz") as packed:
        said = tarfile.TarInfo(laws_packed.VERSION)
        said.size = 5
        packed.addfile(said, io.BytesIO(b"1.2.3"))
    with pytest.raises(SystemExit, match=r"is of Triton 1\.2\.3; expected 3\."):
        laws_packed.use(file, tmp_path / "there")


@pytest.mark.parametrize("file", ["nowhere.tar.xz", __file__])
def test_what_is_no_such_file_is_named(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["laws.py", "scan", "--device", "cpu", "--packed", file])
    with pytest.raises(SystemExit, match=f"--packed {file}: expected a file that laws_packed.py has made"):
        laws.run()
