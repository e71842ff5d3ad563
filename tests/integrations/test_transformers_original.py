"""foci in models by their original implementation: who makes the masks, and what those who compute with them find."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foci.core.errors import Unsupported
from foci.integrations.transformers import install
from tests.integrations.transformers_models import computing, drawn, padding, relative, tokens

BUDGET = 1e-5


class Config(transformers.PreTrainedConfig):
    model_type = "own"

    def __init__(self, hidden_size: int = 32, num_attention_heads: int = 4, num_hidden_layers: int = 1, **more) -> None:
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**more)


def eager(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: object
) -> tuple:
    logits = q @ k.mT * scaling
    return ((logits if mask is None else logits + mask).softmax(-1) @ v).transpose(1, 2), None


class Attention(nn.Module):
    """Without is_causal, as transformers' own functions allow: a None from sdpa's masks means causal."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.qkv = config, nn.Linear(32, 96)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k, v, mask, scaling=8**-0.5)[0].flatten(2)


class Masks(nn.Module):
    """No PreTrainedModel, and its configuration has a name of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.settings = config

    def forward(self, x: Tensor) -> Tensor | None:
        return create_causal_mask(config=self.settings, inputs_embeds=x, attention_mask=None, past_key_values=None)


class Inner(transformers.PreTrainedModel):
    config_class, _supports_sdpa = Config, True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.attention = Attention(config)
        self.post_init()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.attention(x, mask)


class Own(transformers.PreTrainedModel):
    """Masks from a helper beside the layers, for a layer of its own and for another model."""

    config_class, _supports_sdpa = Config, True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.masks, self.attention, self.inner = Masks(config), Attention(config), Inner(config)
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        mask = self.masks(x)
        return self.inner(self.attention(x, mask), mask)


def own(implementation: str) -> nn.Module:
    config = Config()
    config._attn_implementation = implementation
    return drawn(Own(config))


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_whatever_holds_a_configuration_in_a_whole_model_makes_focis_masks(implementation: str) -> None:
    x = torch.randn(2, 6, 32)
    model, expected = own(implementation), own("eager")(x)
    held = model.masks.settings
    with install(model):
        assert model.masks.settings is model.config is model.inner.config is not held
        assert relative(model(x), expected) < BUDGET
    assert model.masks.settings is model.config is held


@torch.no_grad()
def test_where_another_part_keeps_sdpas_masks_none_is_not_taken_for_nothing_hidden() -> None:
    x, plan = torch.randn(2, 6, 32), {"inner.attention": "reference"}
    expected = own("eager")(x)
    model = own("eager")
    with install(model, plan) as handle:
        assert handle.sites == ("inner.attention",)
        assert relative(model(x), expected) < BUDGET
    model = own("sdpa")
    with install(model, plan), pytest.raises(Unsupported, match="a part of the model that keeps transformers' masks"):
        model(x)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_that_asks_whether_its_mask_is_boolean_equals_sdpa(padded: bool) -> None:
    """Nemotron-ASR's streaming encoder: of a mask of floats it hides what may be seen, and eager gives NaN."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.NemotronAsrStreamingEncoderConfig(**sizes, num_mel_bins=16, subsampling_conv_channels=8)
    model = drawn(transformers.AutoModel.from_config(config, attn_implementation="sdpa"))
    frames, real = torch.randn(2, 160, 16), torch.ones(2, 160, dtype=torch.bool)
    real[1, 100:] = False
    inputs = {"attention_mask": real} if padded else {}
    expected = model(frames, **inputs)[0]
    kept = (slice(None), slice(None, 12)) if padded else ...
    assert expected[kept].isfinite().all()
    with install(model) as handle:
        assert relative(model(frames, **inputs)[0][kept], expected[kept]) < BUDGET
    assert len(handle.sites) == 2


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["doge", "beit", "beit_shared"])
def test_a_model_that_computes_with_its_mask_equals_eager_from_sdpa_too(name: str, compiled: bool) -> None:
    """transformers' sdpa adds a boolean mask to BEiT's bias, as 0 and 1: there padding is seen."""
    model, real = computing(name), padding("left").bool()
    inputs = {"input_ids": tokens(), "attention_mask": real.long(), "use_cache": False}
    if name != "doge":
        real = torch.ones(3, 17, dtype=torch.bool)
        real[1, 9:] = False
        inputs = {"pixel_values": torch.randn(3, 3, 32, 32), "attention_mask": real.long()}
    expected = model(**inputs)[0][real]
    model.set_attn_implementation("sdpa")
    assert name == "doge" or relative(model(**inputs)[0][real], expected) > 0.01
    torch._dynamo.reset()
    with install(model):
        run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        assert relative(run(**inputs)[0][real], expected) < BUDGET


def test_a_boolean_originals_name_is_not_written_down(tmp_path) -> None:
    model = own("sdpa")
    with install(model):
        model.save_pretrained(tmp_path)
    assert "foci" not in (tmp_path / "config.json").read_text()
