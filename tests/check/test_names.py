"""Faults named by the wrong equation they match, and by none that the rest contradicts."""

from __future__ import annotations

from dataclasses import replace

import torch

from foci.check import names
from foci.check.exam import Exam
from foci.core.spec import Mistake
from tests.check import toy

F32 = torch.float32


def named(function, mistakes, wrong=(0, 1), right=()) -> list[str | None]:
    exam = Exam(replace(toy.SPEC, mistakes=mistakes), toy.candidate(function), torch.device("cpu"), (F32,))
    cases = toy.SPEC.cases
    found = names.name_mistakes(exam, "out", [cases[n] for n in wrong], [cases[n] for n in right], F32)
    return [found.get(cases[n]) for n in wrong]


def halves(x, gate):
    out, total = toy.reference(x, gate)
    return out / 2, total


def scaled(inputs, amount):
    out, total = toy.reference(**inputs)
    return out * (1 + amount), total


HALVED = toy.SPEC.mistakes[0]


def test_a_matching_mistake_names_the_fault() -> None:
    assert named(halves, (HALVED,)) == [toy.HALVED] * 2
    assert named(lambda x, gate: (toy.reference(x, gate)[0] / 3, toy.reference(x, gate)[1]), (HALVED,)) == [None] * 2


def test_a_mistake_that_equals_the_truth_names_nothing() -> None:
    right = Mistake("right", "this is right", lambda inputs: toy.reference(**inputs))
    assert named(halves, (right, HALVED)) == [toy.HALVED] * 2


def test_the_less_contradicted_mistake_is_believed() -> None:
    only_pairs = Mistake(
        "pairs", "halved for more than one row", lambda i: halves(**i) if len(i["x"]) > 1 else toy.reference(**i)
    )

    def halves_pairs(x, gate):
        return halves(x, gate) if len(x) > 1 else toy.reference(x, gate)

    assert named(halves_pairs, (HALVED, only_pairs), wrong=(0,), right=(1,)) == ["halved for more than one row"]


def test_an_amount_is_fitted() -> None:
    fitted = Mistake("scaled", "off by {:+.2%}", scaled, fits=True)
    assert named(lambda x, gate: scaled({"x": x, "gate": gate}, 0.031), (fitted,)) == ["off by +3.10%"] * 2


def test_a_mistake_that_finds_no_memory_names_nothing() -> None:
    def raises(inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert named(halves, (Mistake("large", "too large", raises), HALVED)) == [toy.HALVED] * 2
