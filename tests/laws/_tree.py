"""A source tree as the laws see it, and what makes a law a test: the house obeys, each planted violation does not."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef
IMPORTERS = {"import_module", "require", "__import__"}


@dataclass(frozen=True)
class Reference:
    """One import of a module by another, lazy ones and `import_module("...")` with a literal name included."""

    target: str
    line: int
    at_import: bool


class Module:
    """One Python file: `path` from the root, `name` as imported (foci.core.errors)."""

    def __init__(self, root: Path, path: Path) -> None:
        self.file = path
        self.path = path.relative_to(root).as_posix()
        self.text = path.read_text()
        self.tree = ast.parse(self.text, self.path)
        parts = list(Path(self.path.removeprefix("src/")).with_suffix("").parts)
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @cached_property
    def references(self) -> list[Reference]:
        return [
            Reference(target, line, at_import)
            for node, at_import in _walk(self.tree, True)
            for target, line in self._targets(node)
        ]

    def _targets(self, node: ast.AST) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = self.name.split(".")[: None if self.is_package else -1]
                base = ".".join([*here[: len(here) - node.level + 1], *([base] if base else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in IMPORTERS:
            yield from ((a.value, node.lineno) for a in node.args[:1] if isinstance(a, ast.Constant))


def _walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, with whether it runs at import: not in a function, nor for the type checker alone."""
    yield node, at_import
    if isinstance(node, Function | ast.Lambda) or (
        isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")
    ):
        at_import = False
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, at_import)


def dotted(node: ast.AST) -> str:
    """`torch.backends.cuda` from its nodes; "" for anything that is not a plain dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


class House:
    """The files below one root: the repository, or a temporary tree with a violation planted in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def files(self) -> list[Path]:
        """What git tracks or would track; everything, in a planted tree."""
        if not (self.root / ".git").exists():
            return sorted(path for path in self.root.rglob("*") if path.is_file())
        command = ["git", "-C", str(self.root), "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return sorted(path for name in names if (path := self.root / name).is_file())

    @cached_property
    def python(self) -> list[Module]:
        return [Module(self.root, path) for path in self.files if path.suffix == ".py"]

    @cached_property
    def source(self) -> list[Module]:
        return [module for module in self.python if module.path.startswith("src/foci/")]

    def known(self, target: str) -> str:
        """The module that `from package import name` really names: package.name, or package when name is no module."""
        names = {module.name for module in self.source}
        return target if target in names else target.rpartition(".")[0] if "." in target else target


Find = Callable[[House], Iterator[str]]


@dataclass
class Laws:
    """The laws of one test file. A law lists violations; it comes with planted trees, each of which must break it."""

    laws: list[tuple[Find, tuple[Mapping[str, str], ...]]] = field(default_factory=list)

    def law(self, *planted: Mapping[str, str]) -> Callable[[Find], Find]:
        """Register a law with small trees (text by path) that must break it."""

        def register(find: Find) -> Find:
            self.laws.append((find, planted))
            return find

        return register

    def tests(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """`test_house_obeys` and `test_law_can_fail`."""

        @pytest.mark.parametrize("find", [pytest.param(find, id=find.__name__) for find, _ in self.laws])
        def test_house_obeys(find: Find) -> None:
            broken = list(find(HOUSE))
            assert not broken, "\n".join(["", *broken])

        plants = [
            pytest.param(find, tree, id=f"{find.__name__}-{number}")
            for find, planted in self.laws
            for number, tree in enumerate(planted)
        ]

        @pytest.mark.parametrize(("find", "tree"), plants)
        def test_law_can_fail(find: Find, tree: Mapping[str, str], tmp_path: Path) -> None:
            for path, text in tree.items():
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_text(text)
            assert list(find(House(tmp_path)))

        return test_house_obeys, test_law_can_fail


HOUSE = House(ROOT)
