"""foci.integrations.processors: what is wrong with a custom processor is said before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from foci.integrations.diffusers import install
from foci.integrations.processors import ProcessorError, call_sites, check, return_arities
from tests.integrations.models import build


class Missing:
    pass


class ShortFlux:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        return hidden_states, encoder_hidden_states


class OldFlux:
    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, image_rotary_emb=None
    ):
        return hidden_states, encoder_hidden_states


class OneTensor:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        hidden_states = attn.to_out[0](hidden_states)
        return hidden_states


class Wrapper:
    def __call__(self, *args, **kwargs):
        return args[1]


class NoMask:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None):
        return hidden_states


class Fine:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return hidden_states, encoder_hidden_states


class FineForward(nn.Module):
    def forward(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return hidden_states, encoder_hidden_states


class UnwrittenModule(nn.Module):
    pass


def refused(name: str, processor: Any) -> str:
    """The message with which installation is refused; nothing has changed then."""
    model = build(name).model
    sites = [module for module in model.modules() if hasattr(module, "processor")]
    for site in sites:
        site.processor = processor
    with pytest.raises(ProcessorError) as caught:
        install(model)
    assert all(site.processor is processor for site in sites)
    return str(caught.value)


FLUX = "transformer_blocks.0.attn"


@pytest.mark.parametrize("processor", [Missing(), UnwrittenModule()])
def test_no_method(processor: Any) -> None:
    assert refused("flux", processor).startswith(
        f"{type(processor).__name__}: {FLUX} calls it, but it has neither __call__ nor forward. "
        "Add __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None"
    )


def test_too_few_parameters() -> None:
    message = refused("flux", ShortFlux())
    assert message.startswith(f"ShortFlux: {FLUX} cannot call its __call__: too many positional arguments.")
    assert message.endswith("Add image_rotary_emb=None to __call__.")


def test_an_argument_in_anothers_place() -> None:
    assert refused("flux", OldFlux()) == (
        f"OldFlux: {FLUX} passes image_rotary_emb in the place of temb: it would land there silently. Name the "
        "parameter image_rotary_emb, in the order of attn, hidden_states, encoder_hidden_states, attention_mask, "
        "image_rotary_emb."
    )


def test_one_tensor_for_two() -> None:
    assert refused("flux", OneTensor()) == (
        f"OneTensor: {FLUX} is called for 2 tensors, but it returns one: Python would unpack the batch, silently when "
        "it holds 2. Return hidden_states, encoder_hidden_states, in this order."
    )


def test_a_mask_that_cannot_arrive() -> None:
    assert refused("dit", NoMask()).endswith("Add attention_mask=None to __call__.")


class Block(nn.Module):
    """A block that passes rotary embeddings by keyword through Diffusers' own Attention, as HunyuanDiT's does."""

    def __init__(self, processor: Any) -> None:
        from diffusers.models.attention_processor import Attention

        super().__init__()
        self.attn1 = Attention(query_dim=8, heads=2, dim_head=4)
        self.attn1.set_processor(processor)

    def forward(self, hidden_states: Any, rotary: Any) -> Any:
        return self.attn1(hidden_states, image_rotary_emb=rotary)


@pytest.mark.parametrize(
    "processor, advice",
    [
        (ShortFlux(), "Add image_rotary_emb=None to __call__."),
        (Wrapper(), "Diffusers delivers only what __call__ names: write the parameters out, or use functools.wraps."),
    ],
)
def test_a_keyword_that_diffusers_would_drop(processor: Any, advice: str) -> None:
    block = Block(processor)
    with pytest.raises(ProcessorError) as caught:
        check(processor, "blocks.0.attn1", block.attn1, call_sites(block, "attn1"))
    assert str(caught.value) == (
        f"{type(processor).__name__}: blocks.0.attn1 calls it with image_rotary_emb=..., which its __call__ does not "
        f"name: Diffusers would drop it and the model would lose its positions. {advice}"
    )


@pytest.mark.parametrize("processor", [Fine(), FineForward()])
def test_a_processor_that_names_everything_passes(processor: Any) -> None:
    block, flux = Block(processor), build("flux").model.transformer_blocks[0]
    check(processor, "attn1", block.attn1, call_sites(block, "attn1"))
    check(processor, "attn", flux.attn, call_sites(flux, "attn"))


def test_the_librarys_own_processors_all_pass() -> None:
    for name in ("flux", "sd3", "pixart", "sana", "dit", "unet"):
        model = build(name).model
        for path, module in model.named_modules():
            if hasattr(module, "processor"):
                parent, _, attribute = path.rpartition(".")
                check(module.processor, path, module, call_sites(model.get_submodule(parent), attribute))


def test_how_a_block_calls_its_attention() -> None:
    flux, sd3 = build("flux").model, build("sd3").model
    (joint,) = call_sites(flux.transformer_blocks[0], "attn")
    assert joint == (("hidden_states", "encoder_hidden_states", "image_rotary_emb"), 2)
    (single,) = call_sites(flux.single_transformer_blocks[0], "attn")
    assert single.unpacks == 1
    assert {call.unpacks for call in call_sites(sd3.transformer_blocks[1], "attn")} == {2}
    assert call_sites(None, "attn") == []


def test_what_cannot_be_told_is_not_claimed() -> None:
    assert return_arities(Fine().__call__) == {2}
    assert return_arities(OneTensor().__call__) == {1}
    assert return_arities(Wrapper().__call__) == set()
    assert return_arities(print) == set()
