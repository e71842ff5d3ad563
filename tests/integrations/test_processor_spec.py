"""foci.integrations.processor_spec: every planted fault of a processor is caught and named, right ones pass."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_processor as library
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor, nn

from foci.check.run import Report, examine
from foci.integrations.diffusers import install
from foci.integrations.processor_spec import KINDS, spec_for

NUMBERS = ("forward", "gradients", "batch slot")


def report(processor: Any, *laws: str) -> Report:
    spec = spec_for(processor)
    return examine(spec, spec.adapt(processor), dtypes=(torch.float32,), only=laws or NUMBERS, isolated=False)


def faults(processor: Any, *laws: str) -> str:
    return "\n".join(failure.sentence for failure in report(processor, *laws).failures)


def heads(attn: Any, x: Tensor) -> Tensor:
    return x.unflatten(-1, (attn.heads, -1))


def turn(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def flux(
    attn, image, text, mask, rotary, attend=F.scaled_dot_product_attention, merge=lambda out: turn(out).flatten(2)
):
    """Flux's attention, with the places where people go wrong as parameters."""
    query, key = attn.norm_q(heads(attn, attn.to_q(image))), attn.norm_k(heads(attn, attn.to_k(image)))
    value = heads(attn, attn.to_v(image))
    if text is not None:
        query = torch.cat([attn.norm_added_q(heads(attn, attn.add_q_proj(text))), query], 1)
        key = torch.cat([attn.norm_added_k(heads(attn, attn.add_k_proj(text))), key], 1)
        value = torch.cat([heads(attn, attn.add_v_proj(text)), value], 1)
    if rotary is not None:
        query, key = (apply_rotary_emb(x, rotary, sequence_dim=1) for x in (query, key))
    out = merge(attend(turn(query), turn(key), turn(value), attn_mask=mask))
    if text is None:
        return out
    words, pixels = out.split([text.shape[1], image.shape[1]], 1)
    return attn.to_out[0](pixels), attn.to_add_out(words)


class Right:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


class RightModule(nn.Module):
    def forward(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


class CallOnlyModule(nn.Module):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


class ForwardOnly:
    def forward(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


class MaskIgnored:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return flux(attn, hidden_states, encoder_hidden_states, None, image_rotary_emb)


class OldSignature:
    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, image_rotary_emb=None
    ):
        return flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


class TooFew:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        return flux(attn, hidden_states, encoder_hidden_states, attention_mask, None)


class Swapped:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        found = flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return found[::-1] if isinstance(found, tuple) else found


class OneTensor:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        found = flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return found[0] if isinstance(found, tuple) else found


class TransposeForgotten:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        def merge(out):
            return out.reshape(out.shape[0], out.shape[2], -1)

        return flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, merge=merge)


class Unmerged:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, merge=turn)


class Unscaled:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        attend = functools.partial(F.scaled_dot_product_attention, scale=1.0)
        return flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, attend)


class Detached:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        def attend(q, k, v, attn_mask):
            arrays = (torch.from_numpy(x.detach().numpy()) for x in (q, k, v))
            return F.scaled_dot_product_attention(*arrays, attn_mask=attn_mask)

        return flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, attend)


class Counting:
    def __init__(self) -> None:
        self.step = 0

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        self.step += 1
        found = flux(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return found if self.step < 10_000 else None


class Wrapper:
    """Hands everything on, without functools.wraps."""

    def __init__(self) -> None:
        self.inner = library.HunyuanAttnProcessor2_0()

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def closed_over(inner: Any) -> Any:
    return lambda *args, **kwargs: inner(*args, **kwargs)


class HunyuanForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = library.HunyuanAttnProcessor2_0()

    def forward(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return self.inner(attn, hidden_states, encoder_hidden_states, attention_mask, None, image_rotary_emb)


@pytest.mark.parametrize(
    "processor",
    [
        Right,
        RightModule,
        FluxAttnProcessor,
        library.AttnProcessor2_0,
        library.AttnProcessor,
        library.JointAttnProcessor2_0,
        library.HunyuanAttnProcessor2_0,
    ],
)
def test_right_ones_pass(processor: type) -> None:
    found = report(processor)
    assert found.ok, found.failures


def test_half_precision_is_no_false_alarm() -> None:
    spec = spec_for(library.AttnProcessor)  # the literal one, without the fused kernel
    candidate = spec.adapt(library.AttnProcessor)
    found = examine(spec, candidate, dtypes=(torch.bfloat16,), only=("forward", "gradients"), isolated=False)
    assert found.ok, found.failures


@pytest.mark.parametrize(
    "processor, sentence",
    [
        (ForwardOnly, "it has only forward, and Diffusers calls the processor itself"),
        (CallOnlyModule, "forward hooks never fire"),
        (Wrapper, "image_rotary_emb does not arrive"),
        (HunyuanForward, "image_rotary_emb does not arrive"),
        (OldSignature, "image_rotary_emb does not arrive"),
        (TooFew, "Add image_rotary_emb=None to __call__"),
        (MaskIgnored, "attention_mask is ignored: padding is attended to"),
        (Swapped, "it returns the text before the image"),
        (OneTensor, "it returns one tensor where the block unpacks"),
        (TransposeForgotten, "heads are merged without moving them behind the tokens"),
        (Unmerged, "heads are not merged before the output projection"),
        (Unscaled, "the logits are not divided by sqrt(head_dim)"),
        (Detached, "dsite.to_q.weight is None when site.to_q.weight.requires_grad: a trained"),
    ],
)
def test_every_fault_is_named(processor: type, sentence: str) -> None:
    assert sentence in faults(processor)


def test_a_counter_that_compiles_every_call_is_named() -> None:
    assert "6 equal calls compile 6 times" in faults(Counting, "compiled = eager")


def test_foci_itself_passes() -> None:
    site = KINDS["Flux"].make(frozenset({"text"}))
    install(site)
    assert report(site.processor).ok


@pytest.mark.parametrize(
    "processor, kind",
    [
        (Right, "Flux"),
        (FluxAttnProcessor, "Flux"),
        (library.JointAttnProcessor2_0, "SD3"),
        (library.HunyuanAttnProcessor2_0, "HunyuanDiT"),
        (Wrapper, "HunyuanDiT"),
        (library.AttnProcessor2_0, "UNet"),
        (closed_over(library.JointAttnProcessor2_0()), "SD3"),
    ],
)
def test_the_kind_of_site_is_read_from_the_code(processor: Any, kind: str) -> None:
    assert kind in spec_for(processor).name


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_made_on_any_device(kind: str) -> None:
    cases = spec_for(library.AttnProcessor2_0, kind).cases
    for case in cases:
        made = case.make(torch.float32, torch.device("meta"), 0)
        places = {x.device.type for x in (*made["site"].parameters(), *made.values()) if isinstance(x, Tensor)}
        assert places == {"meta"}, case.name
        with torch.device("meta"):
            assert case.make(torch.float32, torch.device("cpu"), 0)["hidden_states"].device.type == "cpu"


def test_the_kind_can_be_said() -> None:
    assert "SD3" in spec_for(Wrapper, "SD3").name
    with pytest.raises(ValueError, match=r"kind is 'Mochi'; expected one of .*'Flux'"):
        spec_for(Wrapper, "Mochi")


def test_a_class_that_needs_arguments() -> None:
    with pytest.raises(ValueError, match=r"IPAdapterAttnProcessor cannot be made without arguments .* name an object"):
        spec_for(library.IPAdapterAttnProcessor)
