"""What PipeFusion costs in quality, and what splitting a decoder by rows and a sampler over a mesh brings in time.

    python benchmarks/pipeline_parallel.py                                       # quality, gloo ranks on this machine
    torchrun --nproc-per-node 4 benchmarks/pipeline_parallel.py --cuda           # time and memory, a rank a GPU, NCCL

Quality: pictures drawn with PipeFusion against the same pictures of one process (PSNR), by stages, patches and steps of
warm-up; for the trained digits-dit also how many digits are read right. PixArt and Flux have random weights, whose
answers jump from step to step as no trained model's do: their rows show the direction, not what a picture loses.
Time: a transformer of PixArt's size and the decoder of Stable Diffusion, random weights, bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from arguments import above_0, file_to_write
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from foci.accelerate import digits, zoo
from foci.bench.measure import clock
from foci.core.device import machine
from foci.core.world import World
from foci.integrations import parallel_pipeline, parallel_vae, pipefusion
from foci.integrations.pipefusion import psnr

STEPS = {"digits-dit": 25, "pixart": 20, "flux": 20}
STAGES = {"digits-dit": (2, 4), "pixart": (2, 3), "flux": (2, 4)}  # the small PixArt has three blocks
BIG = {
    "num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8, "num_layers": 28,
    "sample_size": 128, "patch_size": 2, "cross_attention_dim": 1152, "caption_channels": 4096, "norm_num_groups": 32,
    "use_additional_conditions": False,
}  # fmt: skip
VAE = {
    "block_out_channels": (128, 256, 512, 512), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 2, "latent_channels": 4, "sample_size": 1024,
}  # fmt: skip


def sampler(name: str) -> tuple[Any, Callable[[], Tensor]]:
    """A model and what draws with it: always from the same noise, in the same steps."""
    steps = STEPS[name]
    if name == "digits-dit":
        pipeline = digits.load()
        return pipeline.transformer, lambda: pipeline(range(10), steps=steps)
    subject = zoo.load(name)
    scale = 1.0 if name == "flux" else 1000.0

    @torch.no_grad()
    def draw() -> Tensor:
        x = subject.inputs["hidden_states"]
        for step in range(steps):
            time = torch.full((len(x),), (1 - step / steps) * scale)
            answer = subject.model(**{**subject.inputs, "hidden_states": x, "timestep": time}).sample
            x = x - answer[:, : x.shape[1]] / steps
        return x

    return subject.model, draw


def quality(name: str, settings: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """On a rank: for each (patches, warm-up), how near the pictures are to those of one process."""
    model, draw = sampler(name)
    alone = draw()
    rows = []
    for patches, warmup in settings:
        with pipefusion.install(model, dist.group.WORLD, patches=patches, warmup=warmup) as handle:
            drawn = draw()
        span = 2.0 if name == "digits-dit" else (alone.max() - alone.min()).item()
        row = {"model": name, **handle.facts(), "psnr": psnr(drawn, alone, span)}
        if name == "digits-dit":
            row["read"] = int((digits.read_digits(drawn) == torch.arange(10)).sum())
        rows.append(row)
    return rows


def on_this_machine(models: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print("| model | stages | patches | exact steps | PSNR (dB) | digits read right |\n|---|---|---|---|---|---|")
    for name in models:
        steps = STEPS[name]
        for size in STAGES[name]:
            with World(size, timeout=120.0, limit=1200.0) as world:
                settings = [(patches, warmup) for patches in (size, 4 * size) for warmup in (1, 4, steps)]
                for row in world.run(quality, name, settings)[0]:
                    rows.append(row)
                    read = f"{row['read']} of 10" if "read" in row else ""
                    near = "equal" if math.isinf(row["psnr"]) else f"{row['psnr']:.1f}"
                    print(f"| {name} | {size} | {row['patches']} | {row['exact']} of {steps} | {near} | {read} |")
    return rows


def timed(run: Callable[[], Any], rounds: int) -> tuple[float, int]:
    """Median seconds of the slowest rank, and the peak of memory of this one beyond what lay there."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, seconds = torch.cuda.memory_allocated(), []

    def whole() -> None:
        run()
        torch.cuda.synchronize()

    for _ in range(rounds):
        dist.barrier()
        took = torch.tensor([clock(whole)], device="cuda")
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(took.item())
    return median(seconds), torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def on_gpus(rounds: int, decoder_only: bool) -> list[dict[str, Any]]:
    """A decoder by rows, against float32; a sampler over meshes, against one GPU in bfloat16."""
    import diffusers

    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    rows: list[dict[str, Any]] = []

    def line(what: str, setting: str, seconds: float, memory: int, error: float) -> None:
        rows.append({"what": what, "setting": setting, "seconds": seconds, "memory": memory, "error": error})
        if rank == 0:
            print(f"| {what} | {setting} | {seconds * 1e3:.1f} | {memory / 2**30:.2f} | {error:.1e} |", flush=True)

    if rank == 0:
        print("| what | setting | ms | GiB per rank | relative error |\n|---|---|---|---|---|")
    torch.manual_seed(0)
    vae: Any = diffusers.AutoencoderKL(**VAE).to("cuda", torch.bfloat16).eval()
    for pixels in (1024, 2048):
        z = torch.randn(1, 4, pixels // 8, pixels // 8, device="cuda", dtype=torch.bfloat16)
        exact = vae.float().decode(z.float()).sample
        vae.to(torch.bfloat16)
        what = f"decoder, {pixels} px"
        line(what, "one GPU", *timed(lambda z=z: vae.decode(z), rounds), relative(vae.decode(z).sample, exact))
        with parallel_vae.install(vae, dist.group.WORLD):
            error = relative(vae.decode(z).sample, exact)
            line(what, f"rows over {size}", *timed(lambda z=z: vae.decode(z), rounds), error)
            in_float32 = relative(vae.float().decode(z.float()).sample, exact)
            line(what, f"rows over {size}, float32", *timed(lambda z=z: vae.decode(z.float()), 1), in_float32)
            vae.to(torch.bfloat16)
    if not decoder_only:
        sampling(line, rounds, size)
    dist.destroy_process_group()
    return rows


def sampling(line: Callable[..., None], rounds: int, size: int) -> None:
    import diffusers

    torch.manual_seed(0)
    model: Any = diffusers.PixArtTransformer2DModel(**BIG)
    zoo.randomize(model)
    model = model.to("cuda", torch.bfloat16).eval()
    given = {
        "encoder_hidden_states": torch.randn(2, 120, 4096, device="cuda", dtype=torch.bfloat16),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    for pixels in (1024, 2048):
        noise = torch.randn(1, 4, pixels // 8, pixels // 8, device="cuda", dtype=torch.bfloat16)

        def draw(noise: Tensor = noise) -> Tensor:
            """Eight steps with both branches of guidance in one batch."""
            x = noise
            for step in range(8):
                time = torch.full((2,), 1000.0 - 125 * step, device="cuda")
                none, answer = model(torch.cat([x, x]), timestep=time, **given).sample[:, :4].chunk(2)
                x = x - (none + 2 * (answer - none)) / 8
            return x

        what = f"8 steps, {pixels} px"
        whole = draw()
        line(what, "one GPU", *timed(draw, rounds), 0.0)
        for degrees in (
            {"cfg": 2, "ulysses": size // 2},
            {"ulysses": size},
            {"pipe": size},
            {"cfg": 2, "pipe": size // 2},
        ):
            for times in (1, 2) if "pipe" in degrees else (0,):
                patches = times * degrees.get("pipe", 0) or None
                with parallel_pipeline.install(model, mesh_of(degrees), patches=patches):
                    error = relative(draw(), whole)
                    setting = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
                    line(what, setting + (f", {patches} patches" if patches else ""), *timed(draw, rounds), error)


def mesh_of(degrees: dict[str, int]) -> DeviceMesh:
    """Adjacent ranks share tokens."""
    names = ("cfg", "pipe", "ulysses", "ring")
    return init_device_mesh("cuda", tuple(degrees.get(name, 1) for name in names), mesh_dim_names=names)


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x - exact).float().norm() / exact.float().norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(STEPS))
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--rounds", type=above_0, default=5)
    parser.add_argument("--decoder-only", action="store_true", help="with --cuda")
    parser.add_argument("--out", type=file_to_write)
    options = parser.parse_args()
    if unknown := [name for name in options.models.split(",") if name not in STEPS]:
        parser.error(f"argument --models: {unknown[0]!r}; expected some of {', '.join(STEPS)}, joined by commas")
    if options.decoder_only and not options.cuda:
        parser.error("argument --decoder-only: expected --cuda beside it")
    rows = on_gpus(options.rounds, options.decoder_only) if options.cuda else on_this_machine(options.models.split(","))
    if options.out:
        options.out.write_text(json.dumps({"machine": machine().line, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
