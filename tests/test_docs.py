"""Every example in docs/ that is written as a session is run, and prints what it says."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
import torch.distributed as dist

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_print_what_they_say(page: Path) -> None:
    assert doctest.testfile(str(page), module_relative=False).failed == 0
    assert not dist.is_initialized(), "the next test would begin in its group"


def test_the_operators_page_has_examples() -> None:
    page = next(page for page in PAGES if page.stem == "softmax")
    assert ">>> " in page.read_text()
