"""The summary of some tokens is the operator's own map of states, and its transpose its own gradient."""

from __future__ import annotations

import pytest

from foci.ops.scan import summary
from foci.ops.scan.spec import SPEC
from tests.ops import summaries


@pytest.mark.parametrize("name", summaries.cases_of(SPEC))
def test_ahead_is_the_final_state(name: str) -> None:
    summaries.agree_ahead(SPEC, summary, name)


@pytest.mark.parametrize("name", summaries.cases_of(SPEC))
def test_back_is_the_gradient_of_the_state(name: str) -> None:
    summaries.agree_back(SPEC, summary, name)


def test_no_tokens_change_nothing() -> None:
    summaries.agree_empty(SPEC, summary)
