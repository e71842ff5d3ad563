"""Time functions against each other in one process, in turn, and quote medians, spreads and paired ratios."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch

# A run shorter than this (seconds) is made once untimed when its turn comes: another one has had the caches.
_SHORT = 1.0
_FLUSH = 1 << 28  # bytes: more than any L2 cache holds
_LEAST = 3  # rounds, however long they take
ASLEEP = 6_000_000  # cycles: 3 ms of a GPU
_AWAKE = 2e-3  # seconds of the host at most, that so many cycles cover


@dataclass(frozen=True)
class Way:
    """One way to do some work: `run` is timed, entering and leaving `within()` is not."""

    run: Callable[[], object]
    within: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Sample:
    """Seconds of every round of one way."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    def quantile(self, share: float) -> float:
        """The run that this share of the runs do not exceed."""
        return sorted(self.seconds)[round(share * (len(self.seconds) - 1))]


@dataclass(frozen=True)
class Ratio:
    """How many times longer one way took than another, round by round: the median and the middle half."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} x ({self.low:.2f} .. {self.high:.2f})"


def clock(run: Callable[[], object]) -> float:
    """Seconds of one run, the accelerator's queue included."""
    _settle()
    start = time.perf_counter()
    run()
    _settle()
    return time.perf_counter() - start


def clock_on(device: torch.device, *, clean: bool = False, asleep: int = 0) -> Callable[[Callable[[], object]], float]:
    """The clock of a device. On CUDA its own events, behind a write that leaves nothing of the run in the L2 cache.

    What was written goes from there to memory while the run takes place, 50 MB on an H200. `clean`: behind a read.
    `asleep`: for so many cycles the GPU does nothing before the run, whose kernels wait in its queue meanwhile: where
    Python needs no longer to launch them, the time is theirs alone.
    """
    if device.type != "cuda":
        return clock
    flush = torch.zeros(_FLUSH // 4, device=device)
    fill = flush.sum if clean else flush.zero_

    def timed(run: Callable[[], object]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        fill()
        if asleep:
            torch.cuda._sleep(asleep)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    return timed


def host_seconds(run: Callable[[], object], rounds: int = 20, seconds: float = 0.25) -> float:
    """Seconds until one call returns, the accelerator's queue empty before and not waited for: the median.

    Once calls have taken `seconds` together there are no more, after three at least.
    """
    taken: list[float] = []
    for _ in range(rounds):
        if len(taken) >= _LEAST and sum(taken) >= seconds:
            break
        _settle()
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return median(taken)


def interleave(
    ways: Mapping[str, Way],
    *,
    rounds: int = 9,
    seconds: float = math.inf,
    far: float = math.inf,
    clock: Callable[[Callable[[], object]], float] = clock,
) -> dict[str, Sample]:
    """Run every way once a round, so that a drift of the machine's speed falls on all of them alike.

    The order of a round is drawn, the same in every call, another than the round before's where there are three ways
    or more, and none runs twice in a row: a GPU runs slower behind what draws more power, and in an order that is
    reversed every other round the first and the last would. When the timed runs have taken `seconds` together no
    further round begins, after three at least. A way whose first three rounds all took `far` times the fastest way's
    slowest gets no more: to know of it that it is so slow, they are enough. `clock(run)` gives the seconds of a run
    (`clock_on`).
    """
    if rounds < 1:
        raise ValueError(f"interleave: rounds must be at least 1, got {rounds}")
    taken: dict[str, list[float]] = {name: [] for name in ways}
    draw, order = random.Random(0), list[str]()
    for turn in range(rounds):
        if turn >= _LEAST and sum(map(sum, taken.values())) >= seconds:
            break
        if turn == _LEAST and far < math.inf:
            fastest = min(max(times) for times in taken.values())
            ways = {name: way for name, way in ways.items() if min(taken[name]) < far * fastest}
        before, order = order, draw.sample(list(ways), len(ways))
        while len(ways) > 1 and (order[:1] == before[-1:] or (len(ways) > 2 and order == before)):
            order = draw.sample(list(ways), len(ways))
        for name in order:
            way, times = ways[name], taken[name]
            with way.within():
                if not times or times[-1] < _SHORT:
                    way.run()
                times.append(clock(way.run))
    return {name: Sample(tuple(times)) for name, times in taken.items()}


def alone(
    ways: Mapping[str, Way], hosts: Mapping[str, float], device: torch.device, rounds: int = 7
) -> dict[str, float]:
    """Seconds of a GPU alone, by name: all of a run is launched before the first kernel begins, as in a CUDA graph.

    Of those ways whose host takes less than the GPU sleeps for that (`hosts`: seconds of a call); medians of `rounds`.
    """
    quick = {name: ways[name] for name, host in hosts.items() if host < _AWAKE}
    taken = interleave(quick, rounds=rounds, clock=clock_on(device, asleep=ASLEEP)) if device.type == "cuda" else {}
    return {name: sample.median for name, sample in taken.items()}


def ratio(ours: Sample, theirs: Sample) -> Ratio:
    """ours over theirs, paired by round."""
    pairs = sorted(a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True))
    last = len(pairs) - 1
    return Ratio(median(pairs), pairs[round(last * 0.25)], pairs[round(last * 0.75)])


def _settle() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
