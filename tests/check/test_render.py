"""The table says what the report says, within its width."""

from __future__ import annotations

from dataclasses import replace

from foci.check.compare import Error
from foci.check.render import table
from foci.check.run import Failure, Report, Row

ROWS = (
    Row(2, "forward", 48, Error(3.1e-7, 1e-5)),
    Row(2, "gradients", 48, None, (Failure("dbias is None when bias.requires_grad", ("bias", "bias per head")),)),
    Row(11, "extreme gates", reason="the operator has no gates"),
)


def report(*rows: Row) -> Report:
    return Report("softmax", "mylib.flash", "cpu", ("float32",), rows, ("sink: its signature does not name it",), 2.4)


def test_every_row_and_every_sentence_is_there() -> None:
    text = table(report(*ROWS), 200)
    assert "3.1e-07 / 1.0e-05   ok" in text
    assert "FAIL dbias is None when bias.requires_grad [bias and 1 more]" in text
    assert "not tested: the operator has no gates" in text
    assert "not tested   sink: its signature does not name it" in text
    assert text.endswith("1 of 2 rows broken · 2 s")


def test_width_is_kept() -> None:
    assert max(map(len, table(report(*ROWS), 90).splitlines())) <= 90


def test_verdicts() -> None:
    assert table(report(ROWS[0])).endswith("every law holds · 2 s")
    assert table(report(ROWS[2])).endswith("nothing was tested · 2 s")


def test_what_was_chosen_stands_at_the_end() -> None:
    chosen = replace(report(ROWS[0]), asked={"laws": "2", "drawn": "40,7,21"})
    assert table(chosen).splitlines()[-2:] == [
        "only the laws of --laws 2 were asked",
        "only the cases of --drawn 40,7,21 were asked",
    ]
