"""A rank that raises or is killed inside any wrapper, forward or backward, fails all others by its name; none hangs."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import foci
from foci.core.errors import Disagreement, RankError
from foci.core.world import Lost, Raised, World
from foci.parallel.exchange import Session
from foci.parallel.handoff import handoff
from foci.parallel.joint import joint
from foci.parallel.ring import ring
from foci.parallel.ulysses import ulysses, usp

WRAPPERS = {"ring": 3, "ulysses": 3, "handoff": 3, "joint": 3, "usp": 4}  # and the ranks that each is tried on
VICTIM = 1


def make(kind: str) -> tuple[Callable[..., Any], list[Tensor], dict[str, Any]]:
    """A wrapper with this rank's inputs: three tokens, four heads."""
    world = dist.group.WORLD
    torch.manual_seed(dist.get_rank())
    inputs = [torch.randn(1, 3, 4, 8, requires_grad=True) for _ in range(3)]
    causal = {"mask": foci.Causal()}
    if kind == "handoff":
        return handoff(foci.linear_attention, world), inputs, {"return_state": True}
    if kind == "joint":
        torch.manual_seed(0)
        text = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
        return joint(ring(foci.attention, world)), inputs + text, {}
    if kind == "usp":
        return usp(foci.attention, square(), order="plain"), inputs, causal
    wrap = {"ring": lambda: ring(foci.attention, world, "plain"), "ulysses": lambda: ulysses(foci.attention, world)}
    return wrap[kind](), inputs, causal


@functools.cache
def square() -> Any:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))


def forward(kind: str) -> Tensor:
    op, inputs, options = make(kind)
    result = op(*inputs, **options)
    return torch.cat([each.flatten() for each in (result if isinstance(result, tuple) else (result,))])


class Watch:
    """Counts what this rank does, and lets the n-th of its works fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None, how: str) -> None:
        self.count = itertools.count()
        self.seen = 0
        original = Session.compute

        def compute(session: Session, function: Callable[..., Any], *args: Any) -> Any:
            self.seen = next(self.count) + 1
            if self.seen - 1 == at and dist.get_rank() == VICTIM:
                return original(session, raise_ if how == "raised" else kill)
            return original(session, function, *args)

        monkeypatch.setattr(Session, "compute", compute)


def raise_() -> None:
    raise ValueError("out of luck")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def attempt(kind: str, how: str, direction: str, place: int) -> bool:
    """Whether all is well again after the failure; raises what the failure raises where the group is no more."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Watch(patch, None, how)
        out = forward(kind)
        works = counted.seen
        out.sum().backward()
        both = counted.seen
    first = (0, works) if direction == "forward" else (works, both)
    assert first[0] < first[1], f"{kind} does no work in the {direction}"
    with pytest.MonkeyPatch.context() as patch:
        Watch(patch, range(*first)[min(place, first[1] - first[0] - 1)], how)
        if how == "killed":
            forward(kind).sum().backward()
        with pytest.raises(RankError, match="ValueError: out of luck") as raised:
            forward(kind).sum().backward()
    assert (raised.value.rank, raised.value.direction) == (VICTIM, direction), str(raised.value)
    if dist.get_rank() == VICTIM:
        cause: BaseException | None = raised.value
        while isinstance(cause, RankError):  # of the group, of the group within
            cause = cause.__cause__
        assert isinstance(cause, ValueError)
    return torch.equal(forward(kind), out)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("place", [0, 1, -1], ids=["first", "second", "last"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_rank_that_raises(worlds: Callable[[int], World], kind: str, direction: str, place: int) -> None:
    assert worlds(WRAPPERS[kind]).run(attempt, kind, "raised", direction, place) == [True] * WRAPPERS[kind]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_rank_that_is_killed(worlds: Callable[[int], World], kind: str, direction: str) -> None:
    outcomes = worlds(WRAPPERS[kind]).outcomes(attempt, kind, "killed", direction, -1)
    named(outcomes)
    assert {each.error.direction for each in outcomes} == {direction}


def die_between(kind: str, when: str) -> None:
    out = forward(kind)
    if dist.get_rank() == VICTIM:
        kill()
    if when == "before the backward":
        out.sum().backward()
    else:
        forward(kind)


@pytest.mark.parametrize("when", ["before the backward", "before the next forward"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_rank_that_is_killed_between(worlds: Callable[[int], World], kind: str, when: str) -> None:
    named(worlds(WRAPPERS[kind]).outcomes(die_between, kind, when))


def named(outcomes: list[Any]) -> None:
    assert isinstance(outcomes.pop(VICTIM), Lost)
    for each in outcomes:
        assert isinstance(each, Raised) and isinstance(each.error, RankError), each
        assert each.error.rank == VICTIM and "it is gone" in str(each.error), str(each.error)


def call_differently(kind: str, what: str) -> None:
    op, inputs, options = make(kind)
    if dist.get_rank() == VICTIM:
        if what == "dtype":
            inputs = [x.double() for x in inputs]
        elif what == "heads":
            inputs = [x[:, :, :2] for x in inputs]
        elif what == "batch":
            inputs = [torch.cat([x, x]) for x in inputs]
        elif what == "gradient":
            inputs = [x.detach() for x in inputs]
        elif what == "scale":
            options = {**options, "scale": 0.5}
        elif what == "mask":
            options = {**options, "mask": foci.Causal() & foci.Window(2, 0)}
        elif what == "wrapper":
            op = ring(foci.attention, dist.group.WORLD, "zigzag") if kind == "ulysses" else op
    op(*inputs, **options)


@pytest.mark.parametrize("what", ["dtype", "heads", "batch", "gradient", "scale", "mask", "wrapper"])
@pytest.mark.parametrize("kind", ["ring", "ulysses", "handoff"])
def test_calls_that_differ_are_refused_alike(worlds: Callable[[int], World], kind: str, what: str) -> None:
    if (kind, what) in {("handoff", "mask"), ("handoff", "wrapper"), ("ring", "wrapper")}:
        return
    outcomes = worlds(3).outcomes(call_differently, kind, what)
    assert all(isinstance(each, Raised) and isinstance(each.error, Disagreement) for each in outcomes), outcomes
    assert len({str(each.error) for each in outcomes}) == 1
    assert "on ranks 0, 2;" in str(outcomes[0].error)
