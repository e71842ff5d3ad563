"""Whole pipelines over meshes of named dimensions: the pictures of one process, and every part counted and undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from foci.core.world import World
from foci.integrations.pipefusion import psnr

Worlds = Callable[[int], World]


def pictures() -> Any:
    """DiTPipeline, which batches both branches, with a decoder: from class labels to pictures."""
    import diffusers

    vae: Any = small_vae()
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=3, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=3, sample_size=8,
        num_embeds_ada_norm=1000, norm_num_groups=1,
    )  # fmt: skip
    seeded(transformer)
    pipeline = diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def draw() -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        found = pipeline([3, 7], generator=generator, num_inference_steps=3, output_type="np", guidance_scale=3.0)
        return torch.from_numpy(found.images)

    return pipeline, draw


def video() -> Any:
    """WanPipeline, which calls once a branch, with its own decoder: from embeddings to frames."""
    import diffusers

    from tests.integrations.test_parallel_vae import video_vae

    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=16, ffn_dim=32, num_layers=2, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    seeded(transformer)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = diffusers.WanPipeline(None, None, video_vae(), scheduler, transformer=transformer)  # type: ignore[arg-type]
    pipeline.set_progress_bar_config(disable=True)
    given, none = torch.randn(2, 1, 5, 8).unbind()

    def draw() -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        found = pipeline(
            prompt_embeds=given, negative_prompt_embeds=none, height=48, width=32, num_frames=5, num_inference_steps=3,
            generator=generator, output_type="np",
        )  # fmt: skip
        return torch.from_numpy(found.frames)

    return pipeline, draw


def digits() -> Any:
    from foci.accelerate.digits import load

    pipeline = load()
    return pipeline, lambda: pipeline([3, 7], steps=4)


def small_vae() -> nn.Module:
    from tests.integrations.test_parallel_vae import picture_vae

    return picture_vae(scaling_factor=0.5)


def seeded(model: nn.Module) -> None:
    torch.manual_seed(1)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.0 / parameter[0].numel() ** 0.5)


def put_in(pipeline: Any) -> list[Any]:
    """Whatever an install may put into modules, by module."""
    parts = [getattr(pipeline, name, None) for name in ("transformer", "vae")]
    modules = [module for part in parts if part is not None for module in part.modules()]
    kept = [(vars(module).get("forward"), getattr(module, "processor", None)) for module in modules]
    return [kept, [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules]]


def drawn(build: Callable[[], Any], degrees: dict[str, int], options: dict[str, Any]) -> Any:
    """On a rank: pictures over the mesh and of one process, the figures, what was sent, and whether all is undone."""
    from foci.integrations import parallel_pipeline
    from foci.integrations.mesh import make_mesh

    pipeline, draw = build()
    whole = draw()
    before = put_in(pipeline)
    with parallel_pipeline.install(pipeline, make_mesh(**degrees), **options) as spread:
        split = draw()
        facts, sent = spread.facts(), spread.sent.bytes
    return split, whole, facts, sent, put_in(pipeline) == before, spread.skipped


@pytest.mark.parametrize(
    ("build", "degrees"),
    [
        (pictures, {"cfg": 2, "ulysses": 2}),
        (pictures, {"data": 2, "cfg": 2}),
        (pictures, {"ring": 3}),
        (video, {"cfg": 2, "ulysses": 2}),
        (video, {"cfg": 2}),
        (digits, {"cfg": 2, "ring": 2}),
    ],
)
def test_the_same_pictures(worlds: Worlds, build: Any, degrees: dict[str, int]) -> None:
    size = 1
    for degree in degrees.values():
        size *= degree
    results = worlds(size).run(drawn, build, degrees, {})
    for split, whole, facts, sent, undone, skipped in results:
        assert torch.allclose(split, whole, rtol=0, atol=2e-5), (split - whole).abs().max()
        assert torch.equal(split, results[0][0])
        assert sent > 0 and undone and not skipped
        assert all(facts["degrees"][name] == degree for name, degree in degrees.items())
        if "cfg" in degrees:
            guided = facts["transformer: cfg"]
            assert (guided["pairs"] == 3) if build is video else (guided["batched"] >= 3)
            assert guided["alone"] == 0
        if build is not digits:
            assert facts["vae"]["decodes"] > 0


@pytest.mark.parametrize("degrees", [{"pipe": 2, "ulysses": 2}, {"cfg": 2, "pipe": 2}])
def test_patches_in_a_pipeline_are_near(worlds: Worlds, degrees: dict[str, int]) -> None:
    for split, whole, facts, _, undone, _ in worlds(4).run(drawn, digits, degrees, {"warmup": 2}):
        assert facts["transformer: pipe"]["exact"] == facts["transformer: pipe"]["approximate"] == 2
        assert psnr(split, whole) > 25 and undone
    for split, whole, *_ in worlds(4).run(drawn, digits, degrees, {"warmup": 4}):
        assert psnr(split, whole) > 100


def flux(degrees: dict[str, int]) -> Any:
    from foci.integrations import parallel_pipeline
    from foci.integrations.mesh import make_mesh
    from tests.integrations.models import build

    small = build("flux")
    model = small.model.double().requires_grad_(False)
    given = {k: v.double() if v.is_floating_point() else v for k, v in small.inputs.items()}
    later = {**given, "timestep": given["timestep"] - 0.001}
    whole, then = model(**given).sample, model(**later).sample
    with parallel_pipeline.install(model, make_mesh(**degrees), patches=3) as spread:
        exact = model(**given).sample
        near = model(**later).sample
        return exact, near, whole, then, spread.facts()


def test_joint_text_goes_with_the_first_patch_on_every_rank(worlds: Worlds) -> None:
    for exact, near, whole, then, facts in worlds(4).run(flux, {"pipe": 2, "ulysses": 2}):
        assert torch.allclose(exact, whole, rtol=0, atol=1e-12)
        assert 0 < (near - then).norm() < 0.5 * (then - whole).norm()
        assert facts["FluxTransformer2DModel: pipe"]["approximate"] == 1


def left() -> Any:
    import diffusers

    from foci.integrations import parallel_pipeline
    from foci.integrations.mesh import make_mesh

    pipeline, _ = digits()

    class WithVae:
        transformer = pipeline.transformer
        vae = diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8, 8), norm_num_groups=4, layers_per_block=1, latent_channels=4
        ).eval()

    with parallel_pipeline.install(WithVae(), make_mesh(cfg=2)) as spread:
        skipped = spread.skipped
    try:
        parallel_pipeline.install(object(), make_mesh(cfg=2))
    except ValueError as error:
        return skipped, str(error)


def test_what_is_left_and_what_is_refused(worlds: Worlds) -> None:
    for (skipped,), refused in worlds(2).run(left):
        assert skipped[0] == "vae" and "AutoencoderKLCogVideoX cannot be split by rows" in skipped[1]
        assert "pipeline is an object without transformer" in refused
