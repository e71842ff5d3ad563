"""Cut, unpacked and row by row: what is right passes, and each way of being wrong is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from foci.check.laws import NotTested
from foci.core.spec import Candidate, Inputs, Outputs, Spec
from foci.merge.affine import Affine
from foci.ops.delta.cases import CASES
from foci.ops.delta.probes import PROBES
from foci.ops.delta.spec import SPEC as DELTA
from foci.ops.masks import Mask
from foci.ops.softmax.api import attention_with_lse
from foci.ops.softmax.conventions import adapt
from foci.ops.softmax.spec import SPEC as SOFTMAX
from tests.check.effects_gallery import untrained_output_in_a_buffer
from tests.check.test_laws import ask, ours

FEW = ("state", "no whole chunks", "packed, per channel", "everything")
SPEC = replace(DELTA, cases=tuple(case for case in CASES if case.name in FEW), probes=PROBES, merge=Affine)


def test_cut_and_merge() -> None:
    assert ask("cut and merge", ours()) == []
    told = ask("cut and merge", ours(lambda out, lse: (out, lse * 1.4427)))
    assert told and "merged from two parts is not the whole" in told[0]


def test_cut_and_merge_needs_the_lse() -> None:
    with pytest.raises(NotTested, match="merging needs out and lse"):
        ask("cut and merge", adapt(lambda q, k, v: attention_with_lse(q, k, v)[0]))


def test_packed_is_separate() -> None:
    def without_borders(mask: Mask | None) -> Mask | None:
        parts = [p for p in getattr(mask, "parts", [mask]) if type(p).__name__ != "Packed"]
        return parts[0] if parts else None

    assert ask("packed = separate", ours()) == []
    told = ask("packed = separate", ours(seen=without_borders))
    assert told and "a packed document differs from itself alone" in told[0]


def test_a_row_that_is_wrong_alone_sees_no_others() -> None:
    def call(q, k, v):
        return attention_with_lse(q, k, v, scale=None if q.shape[0] > 1 else 1.1 * q.shape[-1] ** -0.5)[0]

    told = ask("batch slot", adapt(call))
    assert told and all("differs from itself alone: alone it is wrong" in sentence for sentence in told)


def test_rows_that_come_in_one_buffer_are_told_by_law_15_alone() -> None:
    assert ask("batch slot", adapt(untrained_output_in_a_buffer)) == []


def test_a_row_whose_digits_depend_on_others_sees_no_others() -> None:
    def call(q, k, v):
        out = attention_with_lse(q, k, v)[0]
        return out * (1 + 1e-7 * (q.shape[0] > 1))

    told = ask("batch slot", adapt(call), replace(SOFTMAX, batch_bitwise=True))
    assert told and all("its last digits depend on what is beside it" in sentence for sentence in told)


def recurrence(change=lambda inputs: inputs, after=lambda inputs, out, state: (out, state)) -> Candidate:
    """The delta rule with its arguments or its results changed."""

    def call(inputs: Inputs) -> Outputs:
        return after(inputs, *DELTA.reference(**change(dict(inputs))))

    return Candidate("delta", call)


def test_a_recurrence_resumes() -> None:
    assert ask("cut and merge", recurrence(), SPEC) == []

    def forgets(inputs: dict) -> dict:
        return {name: value for name, value in inputs.items() if name != "state"}

    told = ask("cut and merge", recurrence(forgets), SPEC)
    assert told and any("resumes from the state of the one before" in sentence for sentence in told)


def test_maps_are_combined() -> None:
    def twisted(inputs: Inputs, out: Tensor, state: Tensor) -> Outputs:
        """Right but where nothing is written: the transition alone is another."""
        return out, state if inputs["v"].any() else 0.5 * state

    told = ask("cut and merge", recurrence(after=twisted), SPEC)
    assert told and all("maps of the state, combined" in sentence for sentence in told)


@pytest.mark.parametrize("missing", ["merge", "transition"])
def test_without_a_merge_a_recurrence_is_still_resumed(missing: str) -> None:
    probes = replace(SPEC.probes, transition=None) if missing == "transition" else SPEC.probes
    spec: Spec = replace(SPEC, probes=probes, merge=None if missing == "merge" else SPEC.merge)
    assert ask("cut and merge", recurrence(), spec) == []


def test_documents_and_rows_are_put_in_their_places() -> None:
    for law in ("packed = separate", "batch slot"):
        assert ask(law, recurrence(), SPEC) == []

    def mixed(inputs: Inputs, out: Tensor, state: Tensor) -> Outputs:
        return out, state.flip(0) if inputs.get("offsets") is not None else state

    told = ask("packed = separate", recurrence(after=mixed), SPEC)
    assert told and all(sentence.startswith("state: a packed document differs") for sentence in told)
    told = ask("batch slot", recurrence(after=lambda i, out, state: (out, state + 1e-2 * state.mean())), SPEC)
    assert told and all(sentence.startswith("state: a row of the batch differs") for sentence in told)
