"""Interleaved timing: order, pairing, and that a slower function measures slower."""

from __future__ import annotations

import pytest

from foci.bench.measure import Sample, interleave, ratio


def test_functions_run_in_turn_and_the_order_flips() -> None:
    seen: list[str] = []
    samples = interleave({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, rounds=2, warmup=1)
    assert seen == ["a", "b", "a", "b", "b", "a"]
    assert [len(sample.seconds) for sample in samples.values()] == [2, 2]


def test_ratio_is_paired_by_round() -> None:
    # Both slow down tenfold half-way: the ratio of each round stays 2.
    measured = ratio(Sample((2.0, 20.0, 2.0)), Sample((1.0, 10.0, 1.0)))
    assert (measured.median, measured.low, measured.high) == (2.0, 2.0, 2.0)
    assert str(measured) == "2.00 x (2.00 .. 2.00)"


def test_more_work_takes_longer() -> None:
    samples = interleave({"much": lambda: sum(range(200_000)), "little": lambda: sum(range(2_000))}, rounds=5)
    assert ratio(samples["much"], samples["little"]).median > 10


def test_no_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        interleave({"a": lambda: None}, rounds=0)
