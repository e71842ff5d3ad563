"""FLA's own references and signatures, read from its wheel, which is never installed.

Installed, fla-core would be picked up by transformers for every gated delta model, on a machine without a GPU too,
where its kernels cannot run. So the wheel is downloaded once into pytest's cache, its naive modules (torch and einops
alone) are executed by path, and its signatures are read without executing anything.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


class Peer:
    """The files of FLA's wheel, by path below `fla/ops`."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._modules: dict[str, types.ModuleType] = {}

    def text(self, path: str) -> str:
        return self._archive.read(f"fla/ops/{path}").decode()

    def naive(self, path: str, name: str) -> Callable[..., Any]:
        """A function of a module that needs nothing of FLA's."""
        if path not in self._modules:
            module = types.ModuleType(path)
            exec(compile(self.text(path), path, "exec"), module.__dict__)
            self._modules[path] = module
        function: Callable[..., Any] = getattr(self._modules[path], name)
        return function

    def extract(self, path: str, name: str) -> Callable[..., Any]:
        """One function of a module that cannot be imported here; it may use torch and F."""
        definition = self.definition(path, name)
        room: dict[str, Any] = {}
        source = f"import torch\nimport torch.nn.functional as F\n{ast.unparse(definition)}"
        exec(compile(source, path, "exec"), room)
        function: Callable[..., Any] = room[name]
        return function

    def definition(self, path: str, name: str) -> ast.FunctionDef:
        for node in ast.parse(self.text(path)).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        raise LookupError(f"{path} has no function {name}")

    @cached_property
    def public(self) -> dict[str, str]:
        """The operators that each family's __init__ gives away (chunk_gla), and the path of each."""
        found: dict[str, str] = {}
        for entry in self._archive.namelist():
            path = entry.removeprefix("fla/ops/")
            if re.fullmatch(r"fla/ops/\w+/(\w+/)?__init__\.py", entry) and "/backends/" not in path:
                for node in ast.parse(self.text(path)).body:
                    if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                        home = f"{path.removesuffix('__init__.py')}{node.module.replace('.', '/')}.py"
                        names = [alias.name for alias in node.names]
                        found |= {name: home for name in names if re.match("(chunk|fused|parallel)_", name)}
        return found


def cached(folder: Path) -> Path | None:
    """The wheel that requirements.txt means, where it has been downloaded before."""
    digests = re.findall(r"sha256:(\w+)", REQUIREMENTS.read_text())
    wheels = folder.glob("*.whl")
    return next((wheel for wheel in wheels if hashlib.sha256(wheel.read_bytes()).hexdigest() in digests), None)


def download(folder: Path) -> str:
    """Fetch the wheel, and give what pip said."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"),
        *("--retries=1", "--timeout=20", "--dest", str(folder), "--requirement", str(REQUIREMENTS)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "pip download took more than two minutes"
    return (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]


@pytest.fixture(scope="session")
def fla(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    pytest.importorskip("einops", reason="FLA's references need einops: pip install -e '.[test]'")
    cache = getattr(request.config, "cache", None)  # absent under -p no:cacheprovider
    folder = tmp_path_factory.mktemp("fla") if cache is None else Path(cache.mkdir("fla-core"))
    said = "" if cached(folder) else download(folder)
    wheel = cached(folder)
    if wheel is None:
        pytest.skip(f"FLA's references are not here, and cannot be downloaded: {said}")
    return Peer(zipfile.ZipFile(wheel))
