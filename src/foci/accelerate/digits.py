"""digits-dit, the embedded model of the main job: load it, draw digits with it, read them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from foci.core.errors import require

if TYPE_CHECKING:
    from PIL.Image import Image

ASSETS = Path(__file__).parent / "assets" / "digits_dit"
SIZE = 32  # pixels a side; patches of 2 x 2 make 256 tokens
UNCONDITIONAL = 10  # the eleventh class: no class at all, the other half of classifier-free guidance


@dataclass(frozen=True)
class DigitsPipeline:
    """A class-conditional Diffusers transformer with its scheduler, drawing digits with classifier-free guidance."""

    transformer: Any
    scheduler: Any

    @torch.no_grad()
    def __call__(
        self, labels: Sequence[int], *, seed: int = 0, steps: int = 25, guidance: float = 2.0
    ) -> Float[Tensor, "N 1 32 32"]:
        """Draw one picture per label, values in [-1, 1].

        Picture i starts from the noise of seed + i, whatever else is in the batch, so a digit can be drawn again alone.
        `guidance` pushes towards the class: v = v_none + guidance * (v_class - v_none); 1 is none.
        """
        if not labels or any(label not in range(10) for label in labels):
            raise ValueError(f"digits: labels must be digits 0 to 9, at least one, got {list(labels)}")
        weight = next(self.transformer.parameters())
        seeds = (torch.Generator().manual_seed(seed + place) for place in range(len(labels)))
        noise = [torch.randn(1, SIZE, SIZE, generator=generator, device="cpu") for generator in seeds]
        pictures = torch.stack(noise).to(weight.device)
        classes = torch.tensor([*labels, *[UNCONDITIONAL] * len(labels)], device=weight.device)
        # A scheduler counts its own steps: a fresh one per call leaves self untouched.
        scheduler = type(self.scheduler).from_config(self.scheduler.config)
        scheduler.set_timesteps(steps, device=weight.device)
        for time in scheduler.timesteps:
            pair = torch.cat([pictures, pictures]).to(weight.dtype)
            velocity = self.transformer(pair, timestep=time.expand(len(pair)), class_labels=classes).sample.float()
            given, none = velocity.chunk(2)
            pictures = scheduler.step(none + guidance * (given - none), time, pictures).prev_sample
        return pictures.clamp(-1, 1)


def load(folder: Path = ASSETS) -> DigitsPipeline:
    """The trained model and its scheduler from the files foci ships, in float32 and eval mode; no network."""
    diffusers = require("diffusers", extra="accelerate")
    transformer = diffusers.DiTTransformer2DModel.from_pretrained(
        folder, torch_dtype=torch.float32, low_cpu_mem_usage=False, local_files_only=True
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder, local_files_only=True)
    # eval: in training mode every block of this model drops class labels at random, each for itself
    return DigitsPipeline(transformer.eval(), scheduler)


def example_inputs(*, seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments of one transformer call as sampling makes it: ten digits, with and without their class."""
    noise = torch.randn(10, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(seed), device="cpu")
    return {
        "hidden_states": torch.cat([noise, noise]),
        "timestep": torch.full((20,), 500.0, device="cpu"),
        "class_labels": torch.tensor([*range(10), *[UNCONDITIONAL] * 10], device="cpu"),
    }


def read_digits(images: Float[Tensor, "N 1 32 32"]) -> Int[Tensor, " N"]:
    """Read pictures in [-1, 1] with a small convolutional classifier trained on the same data."""
    from safetensors.torch import load_file

    return reader_logits(images.cpu().float(), load_file(ASSETS / "reader.safetensors")).argmax(-1)


def reader_logits(images: Float[Tensor, "N 1 32 32"], weights: dict[str, Tensor]) -> Float[Tensor, "N 10"]:
    """The classifier itself, as a function of its weights: two convolutions and a linear layer."""
    x = F.avg_pool2d(images, 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, weights["first"], weights["first_bias"], padding=1)), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, weights["second"], weights["second_bias"], padding=1)), 2)
    return F.linear(x.flatten(1), weights["last"], weights["last_bias"])


def real_digits(split: Literal["train", "test"]) -> tuple[Float[Tensor, "N 1 32 32"], Int[Tensor, " N"]]:
    """scikit-learn's handwritten digits as the model saw them: 8 x 8 enlarged to 32 x 32, every fifth one held out."""
    data = require("sklearn.datasets", extra="accelerate").load_digits()
    small = torch.from_numpy(data.images).float()[:, None] / 16
    # The originals touch their frame: a margin of one pixel before the enlargement, so that no stroke is cut off.
    large = F.interpolate(F.pad(small, (1, 1, 1, 1)), scale_factor=3, mode="bicubic", align_corners=False)
    ink = ((F.pad(large, (1, 1, 1, 1)) - 0.2) / 0.6).clamp(0, 1)
    pictures = 2 * ink * ink * (3 - 2 * ink) - 1  # smoothstep: enlarged strokes get their edges back
    held_out = torch.arange(len(pictures), device="cpu") % 5 == 4
    chosen = held_out if split == "test" else ~held_out
    return pictures[chosen], torch.from_numpy(data.target)[chosen]


def picture(images: Float[Tensor, "N 1 32 32"], *, scale: int = 4, gap: int = 2) -> Image:
    """The pictures side by side, dark ink on white, each pixel enlarged `scale` times."""
    pil = require("PIL.Image", extra="accelerate")
    framed = F.pad(images.detach().cpu().float().clamp(-1, 1), (gap, gap, gap, gap), value=-1.0)
    row = torch.cat(list(framed[:, 0]), dim=1)
    grey = ((1 - row) * 127.5).round().to(torch.uint8)
    drawn = pil.fromarray(grey.numpy())
    return drawn.resize((drawn.width * scale, drawn.height * scale), pil.Resampling.BICUBIC)
