"""Time functions against each other in one process, in turn, and quote medians, spreads and paired ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Sample:
    """Seconds of every round of one function."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """How many times longer one function took than another, round by round: the median and the middle half."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} x ({self.low:.2f} .. {self.high:.2f})"


def interleave(
    functions: Mapping[str, Callable[[], object]], rounds: int = 9, warmup: int = 1, device: str = "cpu"
) -> dict[str, Sample]:
    """Run every function once a round, so that a drift of the machine's speed falls on all of them alike.

    The order is reversed every other round: what runs second finds the caches warm from what ran first.
    """
    if rounds < 1:
        raise ValueError(f"interleave: rounds must be at least 1, got {rounds}")
    names = list(functions)
    for _ in range(warmup):
        for name in names:
            functions[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            seconds[name].append(_timed(functions[name], device))
    return {name: Sample(tuple(values)) for name, values in seconds.items()}


def ratio(ours: Sample, theirs: Sample) -> Ratio:
    """ours over theirs, paired by round."""
    pairs = sorted(a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True))
    last = len(pairs) - 1
    return Ratio(median(pairs), pairs[round(last * 0.25)], pairs[round(last * 0.75)])


def _timed(function: Callable[[], object], device: str) -> float:
    _settle(device)
    start = time.perf_counter()
    function()
    _settle(device)
    return time.perf_counter() - start


def _settle(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
