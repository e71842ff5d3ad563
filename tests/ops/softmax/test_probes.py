"""Parts are cases of their own, the reference keeps every law, and each probe passes over what it does not fit."""

from __future__ import annotations

import pytest
import torch

from foci.merge.algebra import fold
from foci.merge.partial import Partial
from foci.ops.masks import Band, Packed
from foci.ops.softmax.cases import CASES
from foci.ops.softmax.cases import case as made
from foci.ops.softmax.probes import BAD, cut, documents, future, poison, rows, sized
from foci.ops.softmax.spec import SPEC

CPU, F64 = torch.device("cpu"), torch.float64
IDS = {"ids": lambda case: case.name}


def reference(inputs):
    return SPEC.reference(**inputs)


LOW, HIGH = torch.tensor([-3, -1]), torch.tensor([0, 2])
# What only drawn cases have: bands, of each row or document its own.
BANDED = (
    made("band", "band", extra=lambda d: {"mask": Band(-3, 2)}),
    made("band per row", "band", extra=lambda d: {"mask": Band(LOW, HIGH)}),
    made("band per document", "band", B=1, extra=lambda d: {"mask": Packed(d.integers(0, 8, 19)) & Band(LOW, HIGH)}),
)


@pytest.mark.parametrize("case", [c for c in (*CASES, *BANDED) if "dropout" not in c.features], **IDS)
def test_parts_make_the_whole(case) -> None:
    inputs = case.make(F64, CPU, 0)
    whole = reference(inputs)
    pieces = [reference(part.case.make(F64, CPU, 0)) for part in cut(case, inputs)]
    if pieces:
        torch.testing.assert_close(tuple(fold([Partial(*piece) for piece in pieces])), whole)
    for take in (documents, rows):
        for part in take(case, inputs):
            for alone, together in zip(reference(part.case.make(F64, CPU, 0)), whole, strict=True):
                torch.testing.assert_close(alone, together[part.place])


def test_parts_keep_what_is_wider_than_the_rest() -> None:
    """A bias in float32 beside q in bfloat16, as only drawn cases have it: its parts were rounded."""
    problem = made("bias", "bias", extra=lambda d: {"bias": d.normal(2, 1, 19, 19).float()})
    inputs = problem.make(torch.bfloat16, CPU, 0)
    for part in (*cut(problem, inputs), *rows(problem, inputs)):
        taken = part.case.make(torch.bfloat16, CPU, 0)
        assert (taken["q"].dtype, taken["bias"].dtype) == (torch.bfloat16, torch.float32)


def test_they_apply_where_they_should() -> None:
    by_name = {case.name: case for case in CASES}

    def taken(probe, name):
        return probe(by_name[name], by_name[name].make(F64, CPU, 0))

    assert len(taken(cut, "plain")) == 2 and len(taken(rows, "plain")) == 2
    assert len(taken(documents, "packed")) == 3, "the empty document has no query"
    assert taken(documents, "plain") == () and taken(rows, "packed") == () and taken(cut, "dropout") == ()
    assert taken(future, "plain") is None and taken(future, "causal") is not None
    assert taken(poison, "plain") is None and taken(poison, "padding") is not None


@pytest.mark.parametrize("case", [c for c in CASES if "causal" in c.features], **IDS)
def test_the_future_is_changed_and_does_not_matter(case) -> None:
    inputs = case.make(F64, CPU, 0)
    found = future(case, inputs)
    assert found is not None and not torch.equal(found.inputs["q"], inputs["q"])
    for before, after in zip(reference(inputs), reference(found.inputs), strict=True):
        assert torch.equal(before[found.place], after[found.place])


def test_poison_is_nan_and_does_not_matter() -> None:
    for case in CASES:
        inputs = case.make(F64, CPU, 0)
        spoiled = poison(case, inputs)
        if spoiled is not None:
            assert any(spoiled[name].isnan().any() for name in "qkv")
            torch.testing.assert_close(reference(spoiled), reference(inputs))


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_input_is_refused_by_name(bad) -> None:
    with pytest.raises((ValueError, TypeError), match=bad.argument):
        reference(bad.change(CASES[0].make(F64, CPU, 0)))


def test_sized() -> None:
    for n in (0, 1, 33):
        assert sized(n).make(torch.float32, CPU, 0)["q"].shape == (1, n, 2, 16)
