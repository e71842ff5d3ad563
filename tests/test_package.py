"""The wheel has every file of the source that is not Python, and what is installed from it finds them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from foci.core import tune

ROOT = Path(__file__).parents[1]
ASK = """
from foci.core import tune
print(tune.__file__)
print(*sorted(path.name for path in tune.TABLES.glob("*.json")))
"""


def test_the_wheel_has_every_file_and_the_measured_tables_are_found_in_it(tmp_path: Path) -> None:
    source, wheels, there = (tmp_path / name for name in ("source", "wheels", "there"))
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    table = source / "src" / "foci" / "core" / "tuned" / "nvidia_h1.json"
    table.parent.mkdir(exist_ok=True)
    table.write_text('{"gpu": "NVIDIA H1", "target": "sm_90", "kernels": {}}')
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-w", str(wheels), str(source)], check=True, capture_output=True)
    with zipfile.ZipFile(next(wheels.glob("foci-*.whl"))) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(there)
    paths = [path for path in (source / "src" / "foci").rglob("*") if path.is_file()]
    files = {path.relative_to(source / "src").as_posix() for path in paths}
    assert "foci/core/tuned/nvidia_h1.json" in files and files <= names
    ran = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(there)},
    )  # fmt: skip
    file, tables = ran.stdout.splitlines()
    assert Path(file).is_relative_to(there)
    assert tables.split() == sorted([*(path.name for path in tune.TABLES.glob("*.json")), "nvidia_h1.json"])
