"""Reports over ranks: the laws that are asked, and a word on those that are not."""

from __future__ import annotations

from foci.check.across import LAWS, LEFT_OUT
from foci.check.run import LAWS as ALL
from tests.check import ranks_gallery


def test_every_law_is_asked_or_named_as_left_out(over_ranks) -> None:
    report = over_ranks(ranks_gallery.right, 2, only_cases=("plain",))
    assert report.ok and [row.law for row in report.rows] == [*LAWS, "dropout over ranks"]
    assert LEFT_OUT in report.not_tested
    left = {law.name for law in ALL} - set(LAWS)
    assert left - {"gradcheck", "fake tensors", "custom ops", "bad input"} == {
        "unwritten memory, strides, excluded NaN", "compiled = eager", "graphs over six lengths",
        "autocast and mixed dtypes",
    }  # fmt: skip


def test_one_sentence_for_one_cause_in_all_its_cases(over_ranks) -> None:
    report = over_ranks(ranks_gallery.local_mask, 3, "forward")
    (failure,) = report.failures
    assert len(failure.cases) >= 4 and "positions within the block" in failure.sentence
