"""What is shown is what the model does: digits that are read, tokens that follow, sentences that are near."""

from __future__ import annotations

import pytest
import torch

from foci.accelerate import digits, shown, zoo
from foci.accelerate.run import compare_shown


def test_digits_are_drawn_from_fixed_noise_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SAMPLES": 10, "BATCH": 10, "STEPS": 4, "QUICK": 4}.items():
        monkeypatch.setattr(shown, name, value)
    said: list[str] = []
    pipeline = digits.load()
    first = shown.draw_digits(pipeline, said.append)
    assert said == ["ten digits", "0 of 10 digits to read"]
    assert first.pictures is not None and first.pictures.shape == (10, 1, 32, 32)
    assert first.facts["samples"] == 10 and first.facts["right"] >= 8
    facts = compare_shown(first, shown.draw_digits(pipeline, said.append))
    assert facts["difference"] == 0.0
    assert facts["sentence"].endswith("every pixel equal to the last bit")


def test_a_difference_is_told() -> None:
    facts = {"samples": 4, "right": 3}
    before = shown.Shown("images", torch.zeros(2), values=torch.zeros(2), facts=facts)
    after = shown.Shown("images", torch.zeros(2), values=torch.tensor([0.0, 0.25]), facts=facts | {"right": 2})
    told = compare_shown(before, after)
    assert told["difference"] == 0.25
    assert "75.0 % read right before, 50.0 % after, pixels differ by at most 2e-01" in told["sentence"]


def test_continuation_is_greedy_and_padded() -> None:
    subject = zoo.load("llama")
    once, again = shown.show_continuation(subject.model), shown.show_continuation(subject.model)
    assert once.lines == again.lines and once.facts == {"tokens": 48}
    other = shown.Shown("text", lines=("1 2", "3"), values=once.values, facts=once.facts)
    assert "NOT the same" in compare_shown(once, other)["sentence"]
