"""A covering part of the matrix: every wrapper meets every case, and every case several worlds; `slow` has the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foci.core.world import World
from foci.ops.softmax.spec import SPEC
from tests.ops.softmax.problems import assert_budget
from tests.parallel.matrix import (
    BUDGET,
    CASES,
    RECURRENT,
    WORLDS,
    WRAPPERS,
    applies,
    by_name,
    errors,
    found_on,
    prove,
    truth,
    wrapper,
)

Worlds = Callable[[int], World]


def runs(every: bool) -> list[tuple[str, str, int]]:
    """(wrapper, case, ranks): one world for each pair, taken in turn so that each wrapper meets all; or the others."""
    found = []
    for each in WRAPPERS:
        cases = [case for case in (*CASES, *RECURRENT) if case.function in each.functions]
        worlds = [size for size in WORLDS if size > 1 and each.size in (0, size)]
        small = [size for size in worlds if size <= 4] or worlds
        for number, case in enumerate(cases):
            chosen = small[number % len(small)]
            # Products of two wrappers are each one's own; a fifth of their cases is enough to see that they fit.
            now = not each.size or (number + len(each.name)) % 5 == 0
            found += [(each.name, case.name, size) for size in worlds if every != (now and size == chosen)]
    return found


@pytest.mark.parametrize(("place", "name", "size"), runs(every=False))
def test_equal_to_one_process(worlds: Worlds, place: str, name: str, size: int) -> None:
    prove(worlds(size), place, by_name(name))


@pytest.mark.parametrize("name", ["full", "causal", "packed", "padding", "bias", "sink", "GQA", "everything", "cross"])
@pytest.mark.parametrize(
    ("place", "size"),
    [("ring zigzag", 2), ("ring zigzag", 8), ("ring stripe", 4), ("ulysses", 4), ("usp 2x2 zigzag", 4)],
)
def test_half_precision_keeps_the_budget_of_one_process(worlds: Worlds, place: str, size: int, name: str) -> None:
    """bfloat16: maximum error <= 2 x and RMS error <= 1 x that of a plain computation, lse within 2e-4, at any size."""
    case, names = by_name(name), {"output 0": "out", "output 1": "lse"}
    found = found_on(worlds(size), wrapper(place), case, torch.bfloat16)
    exact, plain = truth(case, torch.bfloat16), truth(case, torch.bfloat16, SPEC.plain)
    assert_budget(*({names.get(key, key): x for key, x in each.items()} for each in (found, exact, plain)))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "size"), sorted({(place, size) for place, _, size in runs(every=True)}))
def test_the_rest_is_too(worlds: Worlds, place: str, size: int) -> None:
    for other, name, ranks in runs(every=True):
        if (other, ranks) == (place, size):
            prove(worlds(size), place, by_name(name))


def test_the_part_covers() -> None:
    """Every case in every wrapper that is not a product, every world that is not slow."""
    part = runs(every=False)
    for each in WRAPPERS:
        for case in (*CASES, *RECURRENT):
            if applies(each, case, 2) and not each.size:
                assert any((place, name) == (each.name, case.name) for place, name, _ in part)
    assert {size for _, _, size in part} >= {2, 3, 4, 6, 8}


def test_a_wrong_answer_is_seen(worlds: Worlds) -> None:
    """Each tensor one place off, or a gradient missing on one rank."""
    exact = truth(by_name("causal"), torch.float64)
    shifted = {name: x.roll(1, 1) for name, x in exact.items()}
    assert all(error > 0.1 for error in errors(shifted, exact).values())
    found = found_on(worlds(2), wrapper("ring plain"), by_name("causal"))
    found["dk"][:, 20:] = 0.0
    assert [name for name, error in errors(found, exact).items() if error > BUDGET] == ["dk"]
