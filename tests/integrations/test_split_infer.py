"""foci.integrations.split_infer: plans found by watching sizes are those one would write, or there is a reason."""

from __future__ import annotations

import re

import pytest
import torch

from foci.core.errors import Unsupported
from foci.integrations.split_check import check
from foci.integrations.split_infer import infer
from foci.integrations.split_plan import plan_for
from tests.integrations.models import build

FOUND = {
    "dit": ["transformer_blocks.0: hidden_states, dimension 1"],
    "flux": [
        "transformer_blocks.0: hidden_states, dimension 1",
        "transformer_blocks.*.attn: image_rotary_emb, dimension 0",
        "single_transformer_blocks.*.attn: image_rotary_emb, dimension 0",
    ],
    "sd3": ["transformer_blocks.0: hidden_states, dimension 1"],
    "pixart": ["transformer_blocks.0: hidden_states, dimension 1"],
    "wan": ["blocks.0: hidden_states, dimension 1", "blocks.*.attn1: rotary_emb, dimension 1"],
    "hunyuan": [
        "transformer_blocks.0: hidden_states, dimension 1",
        "transformer_blocks.*: freqs_cis, dimension 0",
        "single_transformer_blocks.*: image_rotary_emb, dimension 0",
    ],
}


@pytest.mark.parametrize("name", FOUND)
def test_it_finds_what_a_person_would_write(name: str) -> None:
    small = build(name)
    plan, known = infer(small.model, small.inputs), plan_for(small.model)
    assert [str(cut) for cut in plan.cuts] == FOUND[name]
    assert plan.gathers == known.gathers
    assert dict(plan.sites) == dict(known.sites)
    check(small.model, small.inputs, plan, size=3, text="replicated")


def test_it_finds_the_plan_of_a_model_that_has_none() -> None:
    small = build("auraflow")
    plan = infer(small.model, small.inputs)
    assert str(plan).splitlines()[1:] == [
        "  split   joint_transformer_blocks.0: hidden_states, dimension 1",
        "  gather  proj_out: output, dimension 1",
        "  site    joint_transformer_blocks.*.attn: text in front of image, in one sequence",
        "  site    single_transformer_blocks.*.attn: text in front of image, in one sequence",
    ]
    check(small.model, small.inputs, plan, size=3, text="replicated")


def test_a_model_whose_attention_cannot_be_routed_is_not_understood() -> None:
    small = build("sana")
    with pytest.raises(Unsupported, match="no self attention over all its tokens"):
        infer(small.model, small.inputs)


def test_a_model_whose_blocks_get_no_tokens_is_not_understood() -> None:
    small = build("unet")
    with pytest.raises(Unsupported, match=re.escape("attn1 has 64 tokens, but down_blocks.0 gets")):
        infer(small.model, small.inputs)


def test_image_and_text_of_one_length_are_not_guessed() -> None:
    small = build("sd3")
    with pytest.raises(Unsupported, match="image and text both have 16 tokens"):
        infer(small.model, {**small.inputs, "encoder_hidden_states": torch.randn(2, 16, 24)})
