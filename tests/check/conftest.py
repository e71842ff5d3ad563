"""Ranks for the checks of parallel functions, and one of those checks without the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from foci.check.across import examine_ranks
from foci.check.laws_ranks import dropout_law
from foci.check.orders import ORDERS, places
from foci.check.ranks import Given, Ranks, Roles
from foci.check.run import Report
from foci.core.world import World
from foci.ops.softmax import across
from foci.ops.softmax.across_mistakes import hypotheses
from foci.ops.softmax.conventions import adapt
from tests.conftest import PRELOAD


@pytest.fixture(scope="module")
def hasty() -> Iterator[Callable[[int], World]]:
    """Worlds whose ranks soon lose patience with each other."""
    started: dict[int, World] = {}

    def world(size: int) -> World:
        if size not in started:
            started[size] = World(size, timeout=4, limit=30, preload=PRELOAD)
        return started[size]

    yield world
    for each in started.values():
        each.close()


def make_ranks(world: World, function: Callable, order: str = "plain", layout: str = "bthd") -> Ranks:
    tokens = 2 if layout == "bhtd" else 1
    roles = Roles(across.split(layout), across.joined(layout), across.split("bthd"), tokens, across.share)
    return Ranks(world, Given(function), roles, partial(places, order, size=world.size), order)


@pytest.fixture(scope="module")
def over_ranks(worlds, hasty) -> Callable[..., Report]:
    """The report of a function over so many ranks, of these laws."""

    def examine(
        function: Callable,
        size: int,
        *laws: str,
        order: str = "plain",
        layout: str = "bthd",
        hangs: bool = False,
        only_cases: tuple[str, ...] = (),
        dtypes=None,
    ) -> Report:
        ranks = make_ranks((hasty if hangs else worlds)(size), function, order, layout)
        candidate = adapt(ranks, layout=layout, ranks=size)
        others = {name: partial(places, name, size=size) for name in ORDERS if name != order}
        spec = across.spec_for(size)
        if only_cases:
            spec = across.replace(spec, cases=tuple(case for case in spec.cases if case.name in only_cases))
        more = [dropout_law(across.shown(size), ranks.places, lambda: adapt(make_ranks(worlds(1), function)))]
        return examine_ranks(
            spec, ranks, candidate, only=laws or None, more=more, dtypes=dtypes,
            hypotheses=hypotheses(ranks.places, others, ranks.text_tokens),
        )  # fmt: skip

    return examine
