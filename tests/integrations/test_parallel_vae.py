"""A decoder split by rows gives what one process gives: uneven heights, every layer that reaches beyond the cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foci.core.errors import RankError, Unsupported
from foci.core.world import World
from foci.integrations import parallel_vae

Worlds = Callable[[int], World]


def picture_vae(**changes: Any) -> nn.Module:
    from diffusers import AutoencoderKL

    config = {
        "block_out_channels": (8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "sample_size": 32,
    }
    return seeded(AutoencoderKL, {**config, **changes})


def tiny_vae() -> nn.Module:
    from diffusers import AutoencoderTiny

    blocks = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    return seeded(AutoencoderTiny, {**blocks, "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)})


def video_vae() -> nn.Module:
    from diffusers import AutoencoderKLWan

    config = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    scales = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return seeded(AutoencoderKLWan, {**config, **scales, "temperal_downsample": [False, True, True]})


def residual_vae() -> nn.Module:
    """Wan 2.2's, whose blocks also repeat pixels past the convolutions."""
    from diffusers import AutoencoderKLWan

    config = {"base_dim": 4, "decoder_base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    scales = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "is_residual": True}
    return seeded(AutoencoderKLWan, {**config, **scales, "temperal_downsample": [False, True, True]})


def qwen_vae() -> nn.Module:
    from diffusers import AutoencoderKLQwenImage

    config = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    return seeded(AutoencoderKLQwenImage, {**config, "temperal_downsample": [False, True, True]})


def seeded(cls: Any, config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = cls(**config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.0 / parameter[0].numel() ** 0.5)
        else:
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def decoded(build: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, options: str) -> Any:
    """On a rank: how far the split decode is from the whole one, the layers that exchange, whether all is undone."""
    import torch.distributed as dist

    vae: Any = build().to(dtype)
    if options:
        getattr(vae, options)()
    z = torch.randn(shape, dtype=dtype)
    whole = vae.decode(z, return_dict=False)[0]
    with parallel_vae.install(vae, dist.group.WORLD) as handle:
        split = vae.decode(z).sample
        rows = handle.rows.counts[dist.get_rank()]
    undone = not any("forward" in vars(module) for module in vae.modules())
    return split, whole, handle.facts(), undone, rows


@pytest.mark.parametrize(
    ("size", "build", "shape"),
    [
        (2, picture_vae, (2, 4, 7, 5)),
        (3, picture_vae, (1, 4, 8, 6)),
        (4, picture_vae, (1, 4, 4, 4)),
        (3, tiny_vae, (2, 4, 7, 5)),
        (2, video_vae, (1, 4, 3, 5, 4)),
        (3, video_vae, (1, 4, 2, 4, 3)),
        (2, residual_vae, (1, 4, 3, 3, 2)),
        (3, qwen_vae, (1, 4, 1, 5, 3)),
    ],
)
def test_equal_to_one_process(worlds: Worlds, size: int, build: Callable[[], nn.Module], shape: Any) -> None:
    results = worlds(size).run(decoded, build, shape, torch.float64, "")
    for split, whole, facts, undone, rows in results:
        assert (split - whole).abs().max() <= 1e-13 * whole.abs().max() + 1e-13
        assert facts["decodes"] >= 1 and facts["layers"] > 3 and undone
        assert rows in (shape[-2] // size, shape[-2] // size + 1)
    assert all(torch.equal(result[0], results[0][0]) for result in results)


def test_float32_rounds_as_one_process_does(worlds: Worlds) -> None:
    exact = decoded_alone((1, 4, 7, 5))
    for split, whole, *_ in worlds(3).run(decoded, picture_vae, (1, 4, 7, 5), torch.float32, ""):
        assert distance(split, exact) <= 2 * distance(whole, exact)


def distance(x: Tensor, exact: Tensor) -> float:
    return (x - exact).norm().item() / exact.norm().item()


def decoded_alone(shape: tuple[int, ...]) -> Tensor:
    vae: Any = picture_vae()
    z = torch.randn(shape)
    result: Tensor = vae.double().decode(z.double()).sample
    return result


@pytest.mark.parametrize("options", ["enable_slicing", "enable_tiling"])
def test_slices_and_tiles_are_split_too(worlds: Worlds, options: str) -> None:
    for split, whole, facts, _, _ in worlds(2).run(decoded, picture_vae, (2, 4, 11, 9), torch.float64, options):
        assert (split - whole).abs().max() <= 1e-12 * whole.abs().max()
        assert facts["decodes"] > 1


def test_fewer_rows_than_ranks_are_decoded_whole(worlds: Worlds) -> None:
    def too_few(result: Any) -> bool:
        return bool(torch.equal(result[0], result[1])) and result[2]["decodes"] == 0

    assert all(too_few((*r[:3],)) for r in worlds(3).run(decoded_whole, (1, 4, 2, 6)))


def decoded_whole(shape: tuple[int, ...]) -> Any:
    import torch.distributed as dist

    vae: Any = picture_vae()
    z = torch.randn(shape)
    whole = vae.decode(z).sample
    with parallel_vae.install(vae, dist.group.WORLD) as handle:
        return vae.decode(z).sample, whole, handle.facts()


def refusals() -> list[str]:
    import torch.distributed as dist
    from diffusers import AutoencoderKLCogVideoX

    found = []
    video = AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), norm_num_groups=4, layers_per_block=1, latent_channels=4
    ).eval()
    plain: Any = picture_vae()
    trained: Any = picture_vae().train()
    for act in (
        lambda: parallel_vae.install(video, dist.group.WORLD),
        lambda: parallel_vae.install(trained, dist.group.WORLD),
        lambda: parallel_vae.install(nn.Linear(2, 2), dist.group.WORLD),
        lambda: (
            parallel_vae.install(plain, dist.group.WORLD) and plain.decode(torch.randn(1, 4, 4, 4).requires_grad_())
        ),
    ):
        try:
            act()
            found.append("accepted")
        except (Unsupported, ValueError) as error:
            found.append(str(error))
    return found


def test_what_cannot_be_split_is_refused_by_name(worlds: Worlds) -> None:
    unknown, training, no_decoder, gradient = worlds(2).run(refusals)[0]
    assert "CogVideoX" in unknown and "it is not known what rows it reads" in unknown
    assert "call .eval() first" in training
    assert "expected an autoencoder with a decoder" in no_decoder
    assert "no gradients" in gradient


def disagreeing() -> Any:
    import torch.distributed as dist

    vae: Any = picture_vae()
    parallel_vae.install(vae, dist.group.WORLD)
    return vae.decode(torch.randn(1, 4, 5 + dist.get_rank(), 4))


def test_ranks_with_different_latents_say_so(worlds: Worlds) -> None:
    with pytest.raises(ValueError, match=r"parallel_vae: ranks disagree(.|\n)*latent: \(1, 4, 5, 4\) on rank 0"):
        worlds(2).run(disagreeing)


def dying() -> Any:
    import os

    import torch.distributed as dist

    vae: Any = picture_vae()
    parallel_vae.install(vae, dist.group.WORLD)
    if dist.get_rank() == 1:
        vae.decoder.mid_block.register_forward_pre_hook(lambda *_: os._exit(7))
    return vae.decode(torch.randn(1, 4, 6, 4))


def test_a_rank_that_ends_makes_the_others_fail(worlds: Worlds) -> None:
    outcomes = worlds(3).outcomes(dying)
    assert "rank 1" in str(outcomes[0].error) and isinstance(outcomes[0].error, RankError)
    assert str(outcomes[0].error) == str(outcomes[2].error)


def test_a_copy_of_the_decoder_is_of_the_original(worlds: Worlds) -> None:
    for copied, whole, unlike in worlds(2).run(copying):
        assert torch.equal(copied, whole) and unlike


def copying() -> Any:
    import torch.distributed as dist

    vae: Any = picture_vae()
    z = torch.randn(1, 4, 5, 4)
    whole = vae.decode(z).sample
    with parallel_vae.install(vae, dist.group.WORLD) as handle:
        twin = copy.deepcopy(vae)
        for parameter in vae.parameters():
            parameter.zero_()
        return twin.decode(z).sample, whole, handle.facts()["decodes"] == 0
