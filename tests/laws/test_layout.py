"""Tests mirror source, and what README says exists does exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.laws._tree import House, Laws

LAWS = Laws()


@LAWS.law({"src/foci/core/errors.py": ""}, {"src/foci/cli.py": "", "tests/core/test_cli.py": ""})
def source_is_mirrored_by_tests(house: House) -> Iterator[str]:
    """src/foci/<room>/<file>.py is tested in tests/<room>/test_<file>.py."""
    paths = {module.path for module in house.python}
    for module in house.source:
        folder, _, file = module.path.removeprefix("src/foci/").rpartition("/")
        test = "/".join(["tests", *filter(None, [folder]), f"test_{file}"])
        if not file.startswith("__") and test not in paths:
            yield f"{module.path}: {test} is missing"


@LAWS.law({"tests/test_kernels_a.py": ""}, {"tests/ops/a/b/test_kernels_a.py": ""})
def kernels_tests_lie_where_they_are_run(house: House) -> Iterator[str]:
    """`make test` leaves files of that name to Triton's interpreter, which gets those of tests/ops and its rooms."""
    for module in house.python:
        name = re.fullmatch(r"tests/(.*/)?test_kernels_\w*\.py", module.path)
        if name and not re.fullmatch(r"ops/(\w+/)?", name[1] or ""):
            yield f"{module.path}: no command runs it"


def shown(house: House) -> Iterator[str]:
    """What README shows as code, line by line: fenced blocks and `inline`."""
    readme = house.root / "README.md"
    if readme.exists():
        for block, inline in re.findall(r"```.*?\n(.*?)```|`([^`\n]+)`", readme.read_text(), re.DOTALL):
            yield from (line.strip().removeprefix("$ ") for line in (block or inline).splitlines())


@LAWS.law({"README.md": "`make coffee`"}, {"README.md": "```\nmake coffee\n```", "Makefile": "test:\n"})
def readme_makes_only_what_there_is(house: House) -> Iterator[str]:
    makefile = house.root / "Makefile"
    targets = re.findall(r"^([\w-]+):", makefile.read_text(), re.MULTILINE) if makefile.exists() else []
    for line in shown(house):
        if (found := re.match(r"make ([\w-]+)", line)) and found[1] not in targets:
            yield f"README.md: {found[0]} is no target of the Makefile"


@LAWS.law({"README.md": "`foci brew`"}, {"README.md": "`foci brew`", "src/foci/cli.py": 'app.command("check")(f)'})
def readme_names_only_commands_there_are(house: House) -> Iterator[str]:
    text = "".join(module.text for module in house.source if re.fullmatch(r"src/foci/cli\w*\.py", module.path))
    commands = re.findall(r'\.command\("([\w-]+)"', text)
    for line in shown(house):
        if (found := re.match(r"foci ([a-z][\w-]*)", line)) and found[1] not in commands:
            yield f"README.md: {found[0]} is no command"


@LAWS.law({"README.md": "[guide](docs/guide.md)"}, {"docs/a.md": "![picture](img/a.png)"})
def links_lead_somewhere(house: House) -> Iterator[str]:
    for path in house.files:
        if path.suffix == ".md" and "assets" not in path.parts:
            for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", path.read_text()):
                if "://" not in target and not (path.parent / target).exists():
                    yield f"{path.relative_to(house.root)}: {target} does not exist"


test_house_obeys, test_law_can_fail = LAWS.tests()
