"""Ranks run what they are given; what fails in one is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from foci.core.errors import Disagreement, RankError
from foci.core.world import Lost, Raised, World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, timeout=10.0, limit=60.0) as world:
        yield world


def add(x: torch.Tensor, number: int) -> tuple[int, torch.Tensor, int, float]:
    x = x * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return dist.get_rank(), x + number, torch.get_num_threads(), torch.rand(()).item()


def raise_on(ranks: tuple[int, ...]) -> int:
    if dist.get_rank() in ranks:
        raise ValueError("no such thing")
    return os.getpid()


def report_of_another() -> None:
    if dist.get_rank() == 0:
        raise RankError("attention", 1, "ValueError: no", step=2, direction="backward")
    raise ValueError("no")


def disagree() -> None:
    raise Disagreement("attention", {"dtype": {0: "float32", 1: "bfloat16"}})


def wait_for_the_one_that_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("before the others")
    dist.barrier()


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on(rank: int) -> int:
    if dist.get_rank() == rank:
        time.sleep(60)
    return os.getpid()


def unpicklable() -> object:
    return lambda: None


class Odd(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd")


def raise_odd() -> None:
    raise Odd(1, 2)


def test_results_come_by_rank(world: World) -> None:
    for _ in range(2):
        results = world.run(add, torch.ones(2), 5)
        assert [rank for rank, *_ in results] == [0, 1]
        assert all(torch.equal(x, torch.full((2,), 8.0)) and threads == 1 for _, x, threads, _ in results)
        assert len({drawn for *_, drawn in results}) == 1  # from one seed, each time


def test_an_error_comes_back_with_its_rank_and_traceback(world: World) -> None:
    with pytest.raises(ValueError, match="no such thing") as raised:
        world.run(raise_on, (1,))
    assert "on rank 1 of 2" in raised.value.__notes__[0]
    assert "in raise_on" in raised.value.__notes__[0]


def test_the_error_itself_goes_before_reports_of_it(world: World) -> None:
    with pytest.raises(ValueError, match="no"):
        world.run(report_of_another)
    first, second = world.outcomes(report_of_another)
    assert isinstance(first, Raised) and isinstance(second, Raised)
    assert (first.error.rank, first.error.step, first.error.direction) == (1, 2, "backward")  # type: ignore[attr-defined]


def test_ranks_live_on_after_what_all_raise_and_are_new_after_an_error_of_one(world: World) -> None:
    before = world.run(raise_on, ())
    assert all(isinstance(each, Raised) for each in world.outcomes(disagree))
    assert world.run(raise_on, ()) == before
    assert not isinstance(world.outcomes(raise_on, (1,))[0], Raised)
    assert not set(world.run(raise_on, ())) & set(before)


def test_the_first_error_is_raised_and_none_waits_for_the_rank_it_ended(world: World) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="before the others") as raised:
        world.run(wait_for_the_one_that_raises)
    assert "on rank 1 of 2" in raised.value.__notes__[0]
    assert time.monotonic() - start < 8  # the group's timeout is 10 s


def test_a_rank_that_died_idle_is_replaced(world: World) -> None:
    os.kill(world.run(raise_on, ())[1], signal.SIGKILL)
    while all(child.is_alive() for child, _ in world._ranks):
        time.sleep(0.01)
    assert len(world.run(raise_on, ())) == 2


def test_a_dead_rank_is_named_and_the_world_goes_on(world: World) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"die: rank 1 failed: it was killed \(SIGKILL\)") as raised:
        world.run(die)
    assert raised.value.rank == 1
    assert time.monotonic() - start < 10
    assert len(world.run(add, torch.ones(2), 0)) == 2


def test_a_silent_rank_is_stopped() -> None:
    with World(2, limit=3.0) as world:
        assert isinstance(world.outcomes(sleep_on, 1)[1], Lost)
        with pytest.raises(RankError, match="rank 0 failed: it gave no answer for 3 s"):
            world.run(sleep_on, 0)
        assert len(world.run(raise_on, ())) == 2


def test_what_cannot_be_pickled_is_an_error_of_words(world: World) -> None:
    with pytest.raises(RuntimeError, match="its result cannot be pickled"):
        world.run(unpicklable)
    with pytest.raises(RuntimeError, match="Odd: odd"):
        world.run(raise_odd)


def test_a_closed_world_leaves_no_process() -> None:
    with World(2) as world:
        pids = world.run(raise_on, ())
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_world_has_ranks() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        World(0)
