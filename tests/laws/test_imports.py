"""Imports run downwards, without circles; optional packages stay where they are needed and are imported when used."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from tests.laws._tree import House, Laws, Module

LAWS = Laws()
STEPS = (
    {"core", "merge", "tiles"},
    {"ops", "check", "bench"},
    {"nn", "parallel"},
    {"integrations", "compat"},
    {"accelerate"},
    {"cli"},
    {"face"},
)
ALWAYS_THERE = {"torch", "numpy", "jaxtyping", "foci", *sys.stdlib_module_names}
# Where a package that foci does not depend on may appear. It is imported inside functions, but in files that are
# themselves imported when used: kernels, and the commands behind cli.py.
_KERNELS = r"tiles/|ops/(\w+/)?kernels_\w+\.py"
OPTIONAL = re.compile(rf"src/foci/({_KERNELS}|integrations/|accelerate/|bench/plot\.py|cli\w*\.py)")
WHOLE = re.compile(rf"src/foci/({_KERNELS}|cli_\w+\.py)")
KERNELS = re.compile(rf"src/foci/({_KERNELS})")


def room_of(name: str) -> str:
    """The room of a module by its dotted name: cli_check is of the room cli; foci itself and __main__ are the face."""
    room = [*name.split("."), "face"][1]
    return "cli" if re.match(r"cli(_|$)", room) else "face" if room == "__main__" else room


def step_of(name: str) -> int:
    return next((step for step, rooms in enumerate(STEPS) if room_of(name) in rooms), -1)


def inner(house: House) -> Iterator[tuple[Module, str, int]]:
    """Every import of one of our modules by another: who, whom, and on which line."""
    for module in house.source:
        for reference in module.references:
            if reference.target.split(".")[0] == "foci" and (target := house.known(reference.target)) != module.name:
                yield module, target, reference.line


@LAWS.law(
    {"src/foci/core/a.py": "from foci.ops.masks import Causal"},
    {"src/foci/merge/a.py": "def f():\n    import foci.core.errors"},
    {"src/foci/check/a.py": "from ..bench import measure"},
    {"src/foci/ops/masks.py": "import foci"},
    {"src/foci/cli.py": "from importlib import import_module\nimport_module('foci.__main__')"},
    {"src/foci/attic/a.py": "import foci.core.errors"},
)
def imports_run_downwards(house: House) -> Iterator[str]:
    for module, target, line in inner(house):
        mine, theirs = step_of(module.name), step_of(target)
        if mine < 0:
            yield f"{module.path}: {room_of(module.name)} is no room of the house"
        elif room_of(module.name) != room_of(target) and mine <= theirs:
            yield f"{module.path}:{line}: {room_of(module.name)} must not import {target}"


@LAWS.law(
    {"src/foci/ops/softmax/a.py": "from foci.ops.decay.reference import run"},
    {"src/foci/ops/delta/a.py": "def f():\n    from ..softmax import api", "src/foci/ops/softmax/api.py": ""},
    {"src/foci/ops/masks.py": "from foci.ops.softmax.call import Call"},
    {"src/foci/ops/softmax/b.py": "from foci.ops import SPECS"},
)
def slices_of_ops_do_not_meet(house: House) -> Iterator[str]:
    """Shared files < slices < the list of operators, and no slice knows another: what two need goes down a floor."""
    slices = {module.path.split("/")[3] for module in house.source if re.match(r"src/foci/ops/\w+/", module.path)}

    def floor(name: str) -> tuple[int, str]:
        parts = name.split(".")[2:]
        return (2, "") if not parts else (1, parts[0]) if len(parts) > 1 or parts[0] in slices else (0, "")

    for module, target, line in inner(house):
        if room_of(module.name) == room_of(target) == "ops":
            mine, theirs = floor(module.name), floor(target)
            if mine != theirs and mine[0] <= theirs[0]:
                yield f"{module.path}:{line}: must not import {target}; what two slices need goes down a floor"


@LAWS.law({"src/foci/core/a.py": "import foci.core.b", "src/foci/core/b.py": "def f():\n    from foci.core import a"})
def no_circles(house: House) -> Iterator[str]:
    graph: dict[str, set[str]] = {}
    for module, target, _ in inner(house):
        graph.setdefault(module.name, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "imports run in a circle: " + " <- ".join(error.args[1])


@LAWS.law(
    {"src/foci/ops/softmax/kernels_triton.py": "from foci.core.errors import Unsupported"},
    {"src/foci/ops/kernels_triton_step.py": "from foci.ops.gpu import CHUNK"},
    {"src/foci/tiles/softmax.py": "import torch"},
    {"src/foci/merge/a.py": "import numpy"},
)
def ground_stays_small(house: House) -> Iterator[str]:
    """Kernels import only core.tune and tiles; tiles never torch; merge imports torch alone."""
    for module in house.source:
        for reference in module.references:
            root = reference.target.split(".")[0]
            ours, room = root == "foci", room_of(module.name)
            bad = (
                (KERNELS.match(module.path) and ours and not re.match(r"foci\.(core\.tune|tiles)\b", reference.target))
                or (room == "tiles" and root == "torch")
                or (room == "merge" and not ours and root != "torch" and root not in sys.stdlib_module_names)
            )
            if bad:
                yield f"{module.path}:{reference.line}: must not import {reference.target}"


@LAWS.law(
    {"src/foci/core/a.py": "def f():\n    import triton"},
    {"src/foci/check/a.py": "from foci.core.errors import require\ndef f():\n    require('rich.table', extra='cli')"},
    {"src/foci/cli.py": "import typer"},
    {"src/foci/integrations/a.py": "try:\n    import diffusers\nexcept ImportError:\n    diffusers = None"},
)
def optional_packages_are_imported_when_used(house: House) -> Iterator[str]:
    for module in house.source:
        for reference in module.references:
            root = reference.target.split(".")[0]
            if root in ALWAYS_THERE:
                continue
            if not OPTIONAL.match(module.path):
                yield f"{module.path}:{reference.line}: {root} is optional and has no place here"
            elif reference.at_import and not WHOLE.match(module.path):
                yield f"{module.path}:{reference.line}: import {root} inside the function that uses it"


@LAWS.law(
    {"src/foci/integrations/a.py": "def f():\n    import xformers"},
    {"examples/a.py": "import requests", "pyproject.toml": "[project]\ndependencies = ['torch']"},
)
def every_package_is_declared(house: House) -> Iterator[str]:
    """What the package, its examples and benchmarks import is a dependency or in an extra of pyproject.toml."""
    file = house.root / "pyproject.toml"
    project = tomllib.loads(file.read_text())["project"] if file.exists() else {}
    extras = project.get("optional-dependencies", {}).values()
    declared = {re.split(r"[^\w-]", line)[0] for group in (project.get("dependencies", []), *extras) for line in group}
    named = {"PIL": "pillow", "sklearn": "scikit-learn"}
    for module in house.python:
        for reference in () if module.path.startswith("tests/") else module.references:
            root = reference.target.split(".")[0]
            local = root in {"foci", "tests"} or (module.file.parent / f"{root}.py").exists()
            known = local or root in sys.stdlib_module_names or named.get(root, root.replace("_", "-")) in declared
            if not known:
                yield f"{module.path}:{reference.line}: {root} is not declared in pyproject.toml"


test_house_obeys, test_law_can_fail = LAWS.tests()
