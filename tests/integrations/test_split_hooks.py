"""foci.integrations.split_hooks: on one rank of two, what is cut and what is refused; copies whole; undone exactly."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core.errors import Unsupported
from foci.integrations.diffusers import attention_sites
from foci.integrations.split_hooks import Hooked, hook
from foci.integrations.split_plan import PLANS, Cut, Kind, plan_for
from foci.ops.masks import Dense
from foci.ops.softmax.api import attention
from tests.integrations.models import Small, build


class Half:
    """The second of two ranks, which attends at home and gathers zeros: what it is given is what is looked at."""

    rank = 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    def runs(self, tokens: int) -> list[tuple[int, int]]:
        middle = (tokens + 1) // 2
        return [(0, middle), (middle, tokens)]

    def enter(self, arguments: dict[str, Any]) -> None:
        self.calls.clear()

    def gather(self, module: str, x: Tensor, dim: int, tokens: int) -> Tensor:
        return x.new_zeros(*x.shape[:dim], tokens, *x.shape[dim + 1 :])

    def attend(self, site: str, kind: Kind) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, *, text: int | None = None, **options: Any) -> Tensor:
            self.calls.append((site, tuple(q.shape), {"text": text, **options}))
            return attention(q, k, v, scale=options["scale"])

        return attend


def halved(small: Small, text: str = "auto") -> tuple[Half, Hooked]:
    half = Half()
    return half, hook(small.model, plan_for(small.model), half, text)


def test_text_and_image_are_cut_alike_or_the_text_stays() -> None:
    small = build("flux")
    for text, rows, told in (("split", 3 + 8, None), ("replicated", 6 + 8, 6)):
        half, hooked = halved(small, text)
        small.run()
        hooked.restore()
        assert [(shape[1], options["text"]) for _, shape, options in half.calls] == [(rows, told)] * 4


def test_masks_of_the_whole_sequence_follow_the_order_of_the_ranks() -> None:
    small = build("hunyuan")
    half, hooked = halved(small, "split")
    small.run()
    mask = next(options["mask"] for site, _, options in half.calls if site == "transformer_blocks.0.attn")
    assert isinstance(mask, Dense)
    hooked.restore()
    # Ranks hold image 0:9 with text 0:4, and image 9:18 with text 4:7; of the second row's text 3 tokens are real.
    assert mask.allowed[1].flatten().tolist() == [True] * 9 + [True] * 3 + [False] + [True] * 9 + [False] * 3


def test_a_copy_is_whole_and_restore_is_exact() -> None:
    small = build("sd3")
    expected = small.run()
    processors = [module.processor for _, module, _ in attention_sites(small.model)]
    _, hooked = halved(small)
    assert not torch.equal(small.run(), expected)
    assert torch.equal(small._replace(model=copy.deepcopy(small.model)).run(), expected)
    hooked.restore()
    hooked.restore()
    assert torch.equal(small.run(), expected)
    assert all(module.processor is processors[i] for i, (_, module, _) in enumerate(attention_sites(small.model)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in small.model.modules())


def test_a_split_model_is_not_split_again() -> None:
    small = build("dit")
    _, hooked = halved(small)
    with pytest.raises(ValueError, match="already routed by foci"):
        halved(small)
    hooked.restore()


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("dit", "half", "text must be 'auto', 'split' or 'replicated', got 'half'"),
        ("wan", "split", "text='split', but the plan for WanTransformer3DModel does not say where its text is cut"),
    ],
)
def test_how_text_is_treated_must_be_possible(name: str, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        halved(build(name), text)


def test_text_too_short_for_the_models_code_stays_or_is_refused() -> None:
    small = build("hunyuan")
    small.inputs["encoder_hidden_states"] = small.inputs["encoder_hidden_states"][:, :1]
    small.inputs["encoder_attention_mask"] = small.inputs["encoder_attention_mask"][:, :1]
    half, hooked = halved(small)
    small.run()
    assert half.calls[-1][2]["text"] == 1
    hooked.restore()
    _, hooked = halved(small, "split")
    with pytest.raises(ValueError, match="1 text tokens are too few for 2 ranks"):
        small.run()
    hooked.restore()


def test_a_refused_argument_is_named() -> None:
    small = build("pixart")
    _, hooked = halved(small)
    small.inputs["attention_mask"] = torch.ones(2, 16)
    with pytest.raises(ValueError, match="attention_mask was given, but the plan for PixArtTransformer2DModel refuses"):
        small.run()
    hooked.restore()


def test_tensors_that_disagree_on_the_tokens_are_named() -> None:
    small = build("flux")
    _, hooked = halved(small)
    small.inputs["img_ids"] = small.inputs["img_ids"][:12]
    with pytest.raises(ValueError, match=r"FluxTransformer2DModel: img_ids has 12 image tokens, but .* has 16"):
        small.run()
    hooked.restore()


def test_a_model_without_attention_sites_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no attention site"):
        hook(torch.nn.Linear(2, 2), PLANS["DiTTransformer2DModel"], Half())


def test_attention_that_cannot_be_routed_is_refused() -> None:
    small = build("sana")
    plan = dataclasses.replace(
        PLANS["PixArtTransformer2DModel"], cuts=(Cut("patch_embed", 0, 1),), gathers=(), model="Sana"
    )
    with pytest.raises(Unsupported, match="cannot be split: attention in it is not routed"):
        hook(small.model, plan, Half())


def test_a_site_that_attends_twice_or_to_other_keys_is_refused() -> None:
    from diffusers.models.attention_processor import AttnProcessor2_0

    class Twice(AttnProcessor2_0):
        def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            super().__call__(attn, hidden_states)
            return super().__call__(attn, hidden_states)

    small = build("dit")
    small.model.transformer_blocks[0].attn1.processor = Twice()
    _, hooked = halved(small)
    with pytest.raises(Unsupported, match=r"transformer_blocks\.0\.attn1:\n  - it calls attention twice"):
        small.run()
    hooked.restore()
