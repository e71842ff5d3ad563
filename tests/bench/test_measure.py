"""Interleaved timing: order, pairing, what is timed, and that more work measures longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch

from foci.bench import measure
from foci.bench.measure import Sample, Way, clock, clock_on, host_seconds, interleave, ratio


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_ways_run_in_turn_each_behind_every_other_and_none_behind_itself(count: int) -> None:
    """What draws more power slows down whatever comes next: the first and the last ran twice in a row."""
    seen: list[str] = []
    names = "abcde"[:count]
    samples = interleave({name: Way(lambda name=name: seen.append(name)) for name in names}, rounds=15)
    timed = seen[1::2]  # short runs are made twice, once untimed
    assert timed == seen[::2]
    assert all(sorted(timed[i : i + count]) == list(names) for i in range(0, 15 * count, count))
    assert [len(sample.seconds) for sample in samples.values()] == [15] * count
    behind = Counter(pairwise(timed))
    assert all(behind[one, other] >= 1 for one, other in permutations(names, 2))
    assert not any(behind[one, one] for one in names)
    orders = [timed[i : i + count] for i in range(0, 15 * count, count)]
    assert all(one != other for one, other in pairwise(orders)) or count == 2


def test_a_way_runs_within_its_context() -> None:
    state = ["before"]

    @contextmanager
    def changed() -> Iterator[None]:
        state.append("within")
        yield
        state.pop()

    seen: list[str] = []
    look = lambda: seen.append(state[-1])  # noqa: E731
    interleave({"as it is": Way(look), "changed": Way(look, changed)}, rounds=1)
    assert sorted(seen) == ["before", "before", "within", "within"]
    assert state == ["before"]


def test_ratio_is_paired_by_round() -> None:
    # Both slow down tenfold half-way: the ratio of each round stays 2.
    measured = ratio(Sample((2.0, 20.0, 2.0)), Sample((1.0, 10.0, 1.0)))
    assert (measured.median, measured.low, measured.high) == (2.0, 2.0, 2.0)
    assert str(measured) == "2.00 x (2.00 .. 2.00)"


def test_more_work_takes_longer() -> None:
    ways = {"much": Way(lambda: sum(range(200_000))), "little": Way(lambda: sum(range(2_000)))}
    samples = interleave(ways, rounds=5)
    assert ratio(samples["much"], samples["little"]).median > 10


def test_long_runs_get_three_rounds() -> None:
    assert len(interleave({"a": Way(lambda: None)}, rounds=9, seconds=0.0)["a"].seconds) == 3


def test_what_is_far_behind_gets_three_rounds_and_the_others_all_of_them() -> None:
    taken = {"fast": [1.0, 2.0, 1.0], "near": [12.0, 19.0, 12.0], "far": [20.0, 30.0, 20.0]}
    turns = {name: iter([*times, *([times[0]] * 9)]) for name, times in taken.items()}
    ways = {name: Way(lambda name=name: name) for name in turns}
    found = interleave(ways, rounds=9, far=10.0, clock=lambda run: next(turns[run()]))  # type: ignore[call-overload]
    assert {name: len(sample.seconds) for name, sample in found.items()} == {"fast": 9, "near": 9, "far": 3}


def test_the_host_of_a_slow_call_is_asked_three_times() -> None:
    calls: list[int] = []
    host_seconds(lambda: calls.append(1), seconds=0.0)
    assert len(calls) == 3
    host_seconds(lambda: calls.append(1))
    assert len(calls) == 23


def test_no_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        interleave({"a": Way(lambda: None)}, rounds=0)


def test_a_quantile_is_one_of_the_runs() -> None:
    sample = Sample((5.0, 1.0, 3.0, 2.0, 4.0))
    assert (sample.quantile(0.0), sample.quantile(0.5), sample.quantile(1.0)) == (1.0, 3.0, 5.0)


def test_the_clock_can_be_another() -> None:
    taken = interleave({"a": Way(lambda: None)}, rounds=2, clock=lambda run: 7.0)
    assert taken["a"].seconds == (7.0, 7.0)
    assert clock_on(torch.device("cpu")) is clock
    assert clock_on(torch.device("cpu"), clean=True, asleep=1) is clock


def test_the_host_is_timed_call_by_call() -> None:
    runs: list[int] = []
    assert host_seconds(lambda: runs.append(1), rounds=3) >= 0
    assert len(runs) == 3


def test_a_gpu_is_timed_alone_where_it_sleeps_longer_than_the_host_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slept(device: torch.device, *, clean: bool = False, asleep: int = 0) -> Any:
        asked.append((device.type, asleep))
        return lambda run: run()

    monkeypatch.setattr(measure, "clock_on", slept)
    ways = {"ours": Way(lambda: 2e-4), "theirs": Way(lambda: 3e-4), "a loop": Way(lambda: 4e-2)}
    hosts = {"ours": 1e-4, "theirs": 1.2e-3, "a loop": 3e-2}
    assert measure.alone(ways, hosts, torch.device("cuda")) == {"ours": 2e-4, "theirs": 3e-4}
    assert asked == [("cuda", measure.ASLEEP)]
    assert measure.alone(ways, hosts, torch.device("cpu")) == {} and len(asked) == 1
