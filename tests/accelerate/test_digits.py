"""digits-dit: the shipped weights load, draw digits that are read as what was asked, and do so repeatably."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foci.accelerate import digits

pytest.importorskip("diffusers")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pipe() -> digits.DigitsPipeline:
    return digits.load()


def read_right(pipe: digits.DigitsPipeline, count: int) -> float:
    wanted = [i % 10 for i in range(count)]
    drawn = torch.cat([pipe(wanted[i : i + 20], seed=i) for i in range(0, count, 20)])
    return (digits.read_digits(drawn) == torch.tensor(wanted)).float().mean().item()


def test_what_is_shipped_is_small() -> None:
    weights = list(digits.ASSETS.glob("*.safetensors"))
    assert {path.name for path in weights} == {"diffusion_pytorch_model.safetensors", "reader.safetensors"}
    assert sum(path.stat().st_size for path in weights) <= 3_000_000
    assert (digits.ASSETS / "README.md").exists()


def test_the_loss_curve_is_in_the_docs() -> None:
    assert "polyline" in (DOCS / "img" / "digits_dit_loss.svg").read_text()
    assert "digits_dit_loss.svg" in (DOCS / "digits_dit.md").read_text()


def test_one_call_is_deterministic_and_has_256_tokens(pipe: digits.DigitsPipeline) -> None:
    assert not pipe.transformer.training
    inputs = digits.example_inputs()
    with torch.no_grad():
        first, second = (pipe.transformer(**inputs).sample for _ in range(2))
        tokens = pipe.transformer.pos_embed(inputs["hidden_states"])
    assert tokens.shape == (20, 256, 96)
    assert first.shape == inputs["hidden_states"].shape
    assert torch.equal(first, second)


def test_same_seed_same_picture_alone_or_in_a_batch(pipe: digits.DigitsPipeline) -> None:
    batch = pipe([3, 7, 5], seed=11, steps=4)
    assert torch.equal(batch, pipe([3, 7, 5], seed=11, steps=4))
    assert not torch.equal(batch, pipe([3, 7, 5], seed=12, steps=4))
    assert torch.allclose(batch[1:2], pipe([7], seed=12, steps=4), atol=1e-4)


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_nine_in_ten_are_read_as_their_class(pipe: digits.DigitsPipeline, count: int) -> None:
    assert read_right(pipe, count) >= 0.9


def test_the_reader_reads_real_digits() -> None:
    pytest.importorskip("sklearn")
    images, labels = digits.real_digits("test")
    assert images.shape == (359, 1, 32, 32)
    assert (digits.read_digits(images) == labels).float().mean() >= 0.98


def test_picture_is_a_row_of_ink_on_white() -> None:
    drawn = digits.picture(torch.full((10, 1, 32, 32), -1.0), scale=2, gap=2)
    assert drawn.size == (10 * 36 * 2, 36 * 2)
    assert drawn.getextrema() == (255, 255)


@pytest.mark.parametrize("labels", [[], [10], [3, -1]])
def test_only_digits_can_be_drawn(pipe: digits.DigitsPipeline, labels: list[int]) -> None:
    with pytest.raises(ValueError, match="labels must be digits 0 to 9"):
        pipe(labels)
