"""Small Diffusers models with random weights, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Small(NamedTuple):
    """A model, the arguments of its forward, and which of them are differentiable."""

    model: nn.Module
    inputs: dict[str, Any]
    differentiable: tuple[str, ...]

    def run(self) -> Tensor:
        return self.model(**self.inputs, return_dict=False)[0]

    def to(self, dtype: torch.dtype) -> Small:
        """The same model, changed, and its inputs in this dtype."""
        floating = {n: x for n, x in self.inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        inputs = self.inputs | {name: x.detach().to(dtype) for name, x in floating.items()}
        return self._replace(model=self.model.to(dtype), inputs=inputs)


def flux() -> Small:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=12,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(2, 16, 8),
        "encoder_hidden_states": torch.randn(2, 6, 24),
        "pooled_projections": torch.randn(2, 12),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.stack([torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4], -1),
        "txt_ids": torch.zeros(6, 3),
    }
    return Small(model, inputs, ("hidden_states", "encoder_hidden_states"))


def sd3() -> Small:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=24,
        caption_projection_dim=24,
        pooled_projection_dim=12,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 6, 24),
        "pooled_projections": torch.randn(2, 12),
        "timestep": torch.tensor([3.0, 7.0]),
    }
    return Small(model, inputs, ("hidden_states", "encoder_hidden_states"))


def pixart() -> Small:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=16,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        norm_num_groups=1,
        use_additional_conditions=False,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]),
        "timestep": torch.tensor([3, 7]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return Small(model, inputs, ("hidden_states", "encoder_hidden_states"))


def sana() -> Small:
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel(
        sample_size=4,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        num_cross_attention_heads=3,
        cross_attention_head_dim=8,
        cross_attention_dim=24,
        caption_channels=16,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 4, 4),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]),
        "timestep": torch.tensor([3, 7]),
    }
    return Small(model, inputs, ("hidden_states", "encoder_hidden_states"))


def dit() -> Small:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        in_channels=4,
        out_channels=4,
        num_embeds_ada_norm=20,
        norm_num_groups=1,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 2]),
    }
    return Small(model, inputs, ("hidden_states",))


def unet() -> Small:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=2,
    )
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 12),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]),
        "timestep": torch.tensor([3, 7]),
    }
    return Small(model, inputs, ("sample", "encoder_hidden_states"))


def wan() -> Small:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=3,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=16,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 6, 6),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 7, 24),
    }
    return Small(model, inputs, ("hidden_states", "encoder_hidden_states"))


def hunyuan() -> Small:
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=3,
        attention_head_dim=12,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=2,
        text_embed_dim=24,
        pooled_projection_dim=12,
        rope_axes_dim=(4, 4, 4),
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 6, 6),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 7, 24),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]),
        "pooled_projections": torch.randn(2, 12),
        "guidance": torch.tensor([3500.0, 3500.0]),
    }
    return Small(model, inputs, ("hidden_states", "encoder_hidden_states"))


def auraflow() -> Small:
    """Joins text and image itself, between its blocks."""
    from diffusers import AuraFlowTransformer2DModel

    model = AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_projection_dim=24,
        joint_attention_dim=24,
        out_channels=4,
        pos_embed_max_size=64,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 24),
        "timestep": torch.tensor([0.3, 0.7]),
    }
    return Small(model, inputs, ("hidden_states", "encoder_hidden_states"))


BUILDERS: dict[str, Callable[[], Small]] = {
    "flux": flux,
    "sd3": sd3,
    "pixart": pixart,
    "sana": sana,
    "dit": dit,
    "unet": unet,
    "wan": wan,
    "hunyuan": hunyuan,
    "auraflow": auraflow,
}


def build(name: str, seed: int = 0) -> Small:
    """A seeded small model in evaluation mode, with weights large enough that attention is not uniform."""
    torch.manual_seed(seed)
    small = BUILDERS[name]()
    small.model.eval()
    with torch.no_grad():
        for parameter in small.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return small
