"""What the laws make kernels launch, compiled where there is no GPU, for a machine that has one and little time.

    python benchmarks/laws_packed.py [OPERATOR...] [--drawn 60,7,27] [--dtype bfloat16] [--target sm_90] \
        [--limit 3600] --out FILE.tar.xz
    python benchmarks/laws.py [OPERATOR...] [--drawn 60,7,27] --packed FILE.tar.xz          # there, of the same

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
from pathlib import Path

import triton
from arguments import above_0, drawing, file_to_write
from laws_ahead import compile_ahead, compile_large
from triton.runtime import cache

import laws
from foci.cli_tune import DTYPES
from foci.core.tune import TARGETS

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


def compile_and_pack(chosen: argparse.Namespace) -> None:
    """What was compiled when the time was over."""
    file: Path = chosen.out
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        by_version()
        specs, until = laws.specs_of(chosen.operators, chosen.drawn), time.monotonic() + chosen.limit
        large = (compile_large,) if chosen.drawn is None else ()
        for work in (*large, compile_ahead):  # the latter differentiates here, behind which nobody may fork to
            work(specs, DTYPES[chosen.dtype], TARGETS[chosen.target], until, print, launchers=False)
        print(f"{pack(Path(folder), file)} kernels, {file.stat().st_size / 1e6:.0f} MB")


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", type=laws.operator_of)
    parser.add_argument("--drawn", type=drawing, help="of so many drawn cases of each operator: N,SEED,ROOM")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--target", choices=list(TARGETS), default="sm_90")
    parser.add_argument("--limit", type=above_0, default=3600, help="seconds in all; what is not compiled is said")
    parser.add_argument("--out", type=file_to_write, required=True)
    chosen = parser.parse_args()
    chosen.operators = list(dict.fromkeys(chosen.operators or laws.PARTS))
    laws.hold(parser, chosen)
    compile_and_pack(chosen)


if __name__ == "__main__":
    run()
