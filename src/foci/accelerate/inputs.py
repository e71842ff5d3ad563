"""Inputs to run a model with, made from its configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[Any, Callable[..., Tensor], int], dict[str, Any]]


def inputs_for(model: nn.Module, *, larger: bool = False, tokens: int = 48) -> dict[str, Any]:
    """Keyword arguments for the model's forward: a batch of two, with padding where the model knows it; seeded.

    `larger` gives the same call at another resolution or length, `tokens` is the length of a text. Raises ValueError
    for a model whose arguments are not known.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    config: Any = getattr(model, "config", None)
    bases = [base.__name__ for base in type(model).__mro__]
    make = next((_DIFFUSERS[name] for name in bases if name in _DIFFUSERS), None)
    if make is not None:
        return make(config, noise, 3 if larger else 2)
    main = getattr(model, "main_input_name", None)
    if main == "input_ids" and not getattr(config, "is_encoder_decoder", False):
        return _text(config, generator, tokens * 3 // 2 if larger else tokens)
    if main == "pixel_values" and not larger:
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": noise(2, getattr(config, "num_channels", 3), height, width)}
    if main == "pixel_values":
        return inputs_for(model)
    raise ValueError(
        f"accelerate: what the forward of {type(model).__name__} takes is not known here; "
        "call foci.accelerate(model, example_inputs) in Python"
    )


def _text(config: Any, generator: torch.Generator, length: int) -> dict[str, Any]:
    length = min(length, getattr(config, "max_position_embeddings", length))
    ids = torch.randint(config.vocab_size, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length * 2 // 3 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    # Without a cache: it is not compared, and its memory is not attention's.
    return inputs | ({"use_cache": False} if getattr(config, "use_cache", None) is not None else {})


def _padded(length: int) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length // 2 :] = 0
    return mask


def _side(config: Any, scale: int) -> int:
    size = config["sample_size"]
    size = min(size[0] if isinstance(size, list | tuple) else size, 64)
    return int(size * scale // 2) // 4 * 4


def _flux(config: Any, noise: Any, scale: int) -> dict[str, Any]:
    side, text = 4 * scale, 10
    places = torch.stack([torch.zeros(side * side), *(x.flatten() for x in _grid(side))], -1)
    inputs = {
        "hidden_states": noise(2, side * side, config["in_channels"]),
        "encoder_hidden_states": noise(2, text, config["joint_attention_dim"]),
        "pooled_projections": noise(2, config["pooled_projection_dim"]),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": places,
        "txt_ids": torch.zeros(text, 3),
    }
    return inputs | ({"guidance": torch.full((2,), 3.5)} if config.get("guidance_embeds") else {})


def _grid(side: int) -> tuple[Tensor, ...]:
    return torch.meshgrid(torch.arange(side).float(), torch.arange(side).float(), indexing="ij")


def _sd3(config: Any, noise: Any, scale: int) -> dict[str, Any]:
    side = min(_side(config, scale), config["pos_embed_max_size"] * config["patch_size"])
    return {
        "hidden_states": noise(2, config["in_channels"], side, side),
        "encoder_hidden_states": noise(2, 10, config["joint_attention_dim"]),
        "pooled_projections": noise(2, config["pooled_projection_dim"]),
        "timestep": torch.tensor([300.0, 700.0]),
    }


def _captioned(config: Any, noise: Any, scale: int) -> dict[str, Any]:
    side = _side(config, scale)
    return {
        "hidden_states": noise(2, config["in_channels"], side, side),
        "encoder_hidden_states": noise(2, 12, config["caption_channels"]),
        "encoder_attention_mask": _padded(12),
        "timestep": torch.tensor([300, 700]),
    }


def _pixart(config: Any, noise: Any, scale: int) -> dict[str, Any]:
    # Its own default of 1024-pixel conditions is for larger models than any without a tuned batch here.
    return _captioned(config, noise, scale) | {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


def _dit(config: Any, noise: Any, scale: int) -> dict[str, Any]:
    side = _side(config, scale)
    return {
        "hidden_states": noise(2, config["in_channels"], side, side),
        "timestep": torch.tensor([300, 700]),
        "class_labels": torch.tensor([1, 2]),
    }


def _unet(config: Any, noise: Any, scale: int) -> dict[str, Any]:
    side = _side(config, scale)
    width = config["cross_attention_dim"]
    inputs = {
        "sample": noise(2, config["in_channels"], side, side),
        "encoder_hidden_states": noise(2, 12, width[0] if isinstance(width, list | tuple) else width),
        "timestep": torch.tensor([300, 700]),
    }
    if config.get("addition_embed_type") == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        inputs["added_cond_kwargs"] = {"text_embeds": noise(2, pooled), "time_ids": torch.full((2, 6), 512.0)}
    else:
        inputs["encoder_attention_mask"] = _padded(12)
    return inputs


def _video(config: Any, noise: Any, scale: int) -> dict[str, Any]:
    frames, side = 2, 4 * scale
    return {
        "hidden_states": noise(2, config["in_channels"], frames, side, side),
        "timestep": torch.tensor([300, 700]),
        "encoder_hidden_states": noise(2, 10, config.get("text_dim") or config["text_embed_dim"]),
    }


def _hunyuan(config: Any, noise: Any, scale: int) -> dict[str, Any]:
    inputs = _video(config, noise, scale)
    inputs |= {"encoder_attention_mask": _padded(10), "pooled_projections": noise(2, config["pooled_projection_dim"])}
    return inputs | ({"guidance": torch.full((2,), 6000.0)} if config.get("guidance_embeds") else {})


_DIFFUSERS: Mapping[str, Make] = {
    "FluxTransformer2DModel": _flux,
    "SD3Transformer2DModel": _sd3,
    "PixArtTransformer2DModel": _pixart,
    "SanaTransformer2DModel": _captioned,
    "DiTTransformer2DModel": _dit,
    "UNet2DConditionModel": _unet,
    "WanTransformer3DModel": _video,
    "HunyuanVideoTransformer3DModel": _hunyuan,
}
