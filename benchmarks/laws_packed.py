"""What the laws make kernels launch, compiled where there is no GPU, for a machine that has one and little time.

    python benchmarks/laws_packed.py [OPERATOR...] [--dtype bfloat16] [--target sm_90] [--limit 3600] --out FILE.tar.xz
    python benchmarks/laws.py [OPERATOR...] --packed FILE.tar.xz          # there, of the same operators

Triton finds what it keeps by all of its own files, its library for one version of Python among them. Here it is found
by Triton's version alone, which must be the same there; and by the kernel's source, as ever: of one that has changed
since nothing is taken. Launchers are made there, if this Triton has some made (3.6).
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import triton
from arguments import above_0, file_to_write
from laws_ahead import compile_ahead, compile_large
from triton.runtime import cache

import laws
from foci.cli_check import of_cases
from foci.cli_tune import DTYPES
from foci.core.tune import TARGETS
from foci.ops import SPECS

VERSION = "triton"  # the file that says of which Triton they are
KEPT = (".cubin", ".hsaco", ".json")  # what a launch reads


def by_version() -> None:
    """From here on this process, and its forks, find what Triton keeps by Triton's version."""
    cache.triton_key = lambda: f"foci's laws, Triton {triton.__version__}"


def pack(folder: Path, file: Path) -> int:
    """All kernels of a cache; how many."""
    kernels = [path for path in sorted(folder.rglob("*")) if path.suffix in KEPT]
    (folder / VERSION).write_text(triton.__version__)
    with tarfile.open(file, "w:xz") as packed:
        for path in (folder / VERSION, *kernels):
            packed.add(path, path.relative_to(folder))
    return sum(path.suffix != ".json" for path in kernels)


def use(file: Path, folder: Path) -> None:
    """Unpack it to `folder`, which Triton's cache is from here on, in this process and its children."""
    try:
        with tarfile.open(file) as packed:
            packed.extractall(folder, filter="data")
        made = (folder / VERSION).read_text()
    except (tarfile.ReadError, EOFError, FileNotFoundError):
        raise SystemExit(f"laws.py: --packed {file}: expected a file that laws_packed.py has made") from None
    if made != triton.__version__:
        raise SystemExit(f"laws.py: --packed {file} is of Triton {made}; expected {triton.__version__}, as here")
    for group in folder.rglob("__grp__*.json"):  # which say where their files lay when they were made
        known = json.loads(group.read_text())
        known["child_paths"] = {name: str(group.parent / name) for name in known["child_paths"]}
        group.write_text(json.dumps(known))
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    by_version()


def compile_and_pack(operators: Sequence[str], dtype: str, target: str, limit: float, file: Path) -> None:
    """What was compiled when so many seconds were over."""
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        by_version()
        specs = [of_cases(SPECS[operator], cases) for operator, cases in laws.parts_of(operators)]
        until = time.monotonic() + limit
        for work in (compile_large, compile_ahead):  # the latter differentiates here, behind which nobody may fork to
            work(specs, DTYPES[dtype], TARGETS[target], until, print, launchers=False)
        print(f"{pack(Path(folder), file)} kernels, {file.stat().st_size / 1e6:.0f} MB")


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--target", choices=list(TARGETS), default="sm_90")
    parser.add_argument("--limit", type=above_0, default=3600, help="seconds in all; what is not compiled is said")
    parser.add_argument("--out", type=file_to_write, required=True)
    chosen = parser.parse_args()
    if unknown := set(chosen.operators) - set(laws.PARTS):
        parser.error(f"unknown operator {min(unknown)!r}; expected among {', '.join(laws.PARTS)}")
    compile_and_pack(chosen.operators or list(laws.PARTS), chosen.dtype, chosen.target, chosen.limit, chosen.out)


if __name__ == "__main__":
    run()
