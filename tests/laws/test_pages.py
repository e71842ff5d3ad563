"""What a room offers stands on its page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.laws._tree import House, Laws

LAWS = Laws()
PAGE = "docs/parallel.md"


def offered(house: House, path: str) -> list[str]:
    """The names in the `__all__` of a file."""
    for module in house.source:
        for node in module.tree.body if module.path == path else []:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
    return []


@LAWS.law(
    {"src/foci/parallel/__init__.py": '__all__ = ["ring"]'},
    {"src/foci/parallel/__init__.py": '__all__ = ["ring"]', PAGE: "# Sequence parallelism\n\nA ring is a ring.\n"},
    {"src/foci/parallel/__init__.py": '__all__ = ["ring"]', PAGE: "`string(op)` and `rings`"},
)
def every_name_of_parallel_is_on_its_page(house: House) -> Iterator[str]:
    """As code, in a block or `inline`."""
    page = house.root / PAGE
    text = page.read_text() if page.exists() else ""
    code = " ".join(block or inline for block, inline in re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", text, re.DOTALL))
    for name in offered(house, "src/foci/parallel/__init__.py"):
        if not re.search(rf"\b{name}\b", code):
            yield f"{PAGE}: foci.parallel offers {name}, which it does not show"


test_house_obeys, test_law_can_fail = LAWS.tests()
