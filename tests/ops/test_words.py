"""A callable is asked in the words that its signature has, and refuses what it has none for."""

from __future__ import annotations

import pytest
import torch

import foci
from foci.ops import words
from foci.ops.scan.spec import SPEC
from tests.ops.recurrences import inputs_of


def theirs(x, g, initial_state=None, output_final_state=False):
    """A recurrence in a peer's words, without documents."""
    return foci.scan(x, g, state=initial_state, return_state=output_final_state)


def test_their_words_are_used() -> None:
    candidate = words.adapt(theirs, ("x", "log_decay"), words.REST)
    inputs = inputs_of(SPEC, "state")
    assert candidate.name == "theirs" and candidate.outputs == ("out", "state") and not candidate.strict
    torch.testing.assert_close(candidate.call(inputs), SPEC.reference(**inputs))
    refused = {case.name for case in SPEC.cases if candidate.refuses(case)}
    assert refused == {case.name for case in SPEC.cases if "packed" in case.features}
    assert candidate.not_tested == ("offsets: its signature names none of them",)
    with pytest.raises(NotImplementedError, match="does not name"):
        candidate.call(inputs_of(SPEC, "packed"))


def test_one_output_is_taken_as_such() -> None:
    inputs = inputs_of(SPEC, "plain")
    for function in (lambda x, g: foci.scan(x, g), lambda x, g: foci.scan(x, g)[0]):
        candidate = words.adapt(function, ("x", "log_decay"), words.REST)
        assert candidate.outputs == ("out",) and "the final state" in candidate.not_tested
        torch.testing.assert_close(candidate.call(inputs)[0], SPEC.reference(**inputs)[0])
