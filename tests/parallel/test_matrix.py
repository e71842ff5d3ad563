"""A covering part of the matrix: every wrapper meets every case, and every case several worlds; `slow` has the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foci.core.world import World
from tests.parallel.matrix import CASES, RECURRENT, WORLDS, WRAPPERS, Case, Wrapper, applies, by_name, prove, wrapper

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


def test_a_wrong_wrapper_is_seen(worlds: Worlds) -> None:
    """Cutting by one order and computing by another must not pass."""
    from tests.parallel import matrix

    assert isinstance(wrapper("ring plain"), Wrapper) and isinstance(matrix.CASES[0], Case)
    truth = matrix.truth(by_name("causal"), torch.float64)
    shifted = {name: x.roll(1, 1) for name, x in truth.items()}
    assert all(error > 0.1 for error in matrix.errors(shifted, truth).values())
