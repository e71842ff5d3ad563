"""The summary of some tokens is the operator's own map of states, and its transpose its own gradient."""

from __future__ import annotations

from foci.ops.decay import summary
from foci.ops.decay.spec import SPEC
from tests.ops.summaries import InSummaries


class TestSummary(InSummaries):
    spec, module = SPEC, summary
