"""The timing record: pairs, medians, ratio and its spread; memory counted as it is held."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from foci.accelerate.timing import interleave, peak_memory


def test_record_has_its_shape_and_the_order_changes() -> None:
    seen: list[str] = []
    state = ["original"]

    @contextmanager
    def changed():
        state[0] = "changed"
        yield
        state[0] = "original"

    record = interleave(lambda: seen.append(state[0]), changed, pairs=5)
    assert len(record["original"]) == len(record["changed"]) == record["pairs"] == 5
    assert record["ratio_low"] <= record["ratio"] <= record["ratio_high"]
    assert record["threads"] == torch.get_num_threads()
    assert [place for place, turn in enumerate(seen[::2]) if turn == "original"] == [0, 3, 4, 7, 8]


def test_long_runs_get_three_pairs() -> None:
    @contextmanager
    def changed():
        yield

    assert interleave(lambda: None, changed, pairs=9, seconds=0.0)["pairs"] == 3


def test_peak_is_what_is_held_at_once() -> None:
    there = torch.zeros(1000, 1000)

    def run() -> torch.Tensor:
        x = there.view(1000, 1000)
        for _ in range(5):
            x = x + 1
        return x

    assert peak_memory(run, torch.device("cpu")) == 8_000_000
