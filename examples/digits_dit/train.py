"""Train digits-dit, the model the main job accelerates: a small Diffusers DiT on scikit-learn's digits, on the CPU.

python examples/digits_dit/train.py [--out DIR] [--docs DIR]    (needs foci[diffusers] and scikit-learn)

Flow matching: x_s = (1 - s) x + s noise, and the model learns the velocity noise - x. Coarse to fine: most steps run on
16 x 16 pictures (64 tokens, a quarter of the work), the last ones on 32 x 32; the position embedding is a function of
the place in the picture, so the same weights serve both.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from torch import Tensor

from foci.accelerate import digits

SEED = 2026
CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "in_channels": 1,
    "out_channels": 1,
    "num_layers": 6,
    "sample_size": digits.SIZE,
    "patch_size": 2,
    "num_embeds_ada_norm": digits.UNCONDITIONAL,  # Diffusers adds the embedding of "no class" itself
}


@dataclass(frozen=True)
class Stage:
    """A stretch of training on pictures of one size; `shift` moves the noise levels up with the number of pixels."""

    size: int
    steps: int
    shift: float
    batch: int = 32


STAGES = (Stage(size=16, steps=2400, shift=1.5), Stage(size=32, steps=900, shift=3.0))
LEARNING_RATE, WARMUP, EMA = 1e-3, 100, 0.998


def build() -> DiTTransformer2DModel:
    """The untrained model: every block starts as the identity and the output as zero (adaLN-zero)."""
    model = DiTTransformer2DModel(**CONFIG)
    for block in model.transformer_blocks:
        torch.nn.init.zeros_(block.norm1.linear.weight)
        torch.nn.init.zeros_(block.norm1.linear.bias)
        # Diffusers would drop labels in each block separately; guidance needs them dropped from the whole model.
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    torch.nn.init.zeros_(model.proj_out_2.weight)
    torch.nn.init.zeros_(model.proj_out_2.bias)
    return model


def flow_loss(model: DiTTransformer2DModel, x: Tensor, labels: Tensor, shift: float, rng: torch.Generator) -> Tensor:
    """Mean squared error of the velocity, at noise levels spread evenly over the batch and then shifted upwards."""
    even = (torch.arange(len(x)) + torch.rand(len(x), generator=rng)) / len(x)
    level = shift * even / (1 + (shift - 1) * even)
    noise = torch.randn(x.shape, generator=rng)
    s = level[:, None, None, None]
    velocity = model((1 - s) * x + s * noise, timestep=level * 1000, class_labels=labels).sample
    return F.mse_loss(velocity, noise - x)


def train_model() -> tuple[DiTTransformer2DModel, list[tuple[int, float, float]]]:
    """The averaged model and its curve: (step, training loss since the last entry, held-out loss)."""
    torch.manual_seed(SEED)
    rng = torch.Generator().manual_seed(SEED)
    (x, labels), (held_x, held_labels) = digits.real_digits("train"), digits.real_digits("test")
    model = build()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    total, step, curve, recent = sum(stage.steps for stage in STAGES), 0, [], []
    for stage in STAGES:
        small = F.avg_pool2d(x, digits.SIZE // stage.size)
        held_small = F.avg_pool2d(held_x, digits.SIZE // stage.size)[:128]
        for _ in range(stage.steps):
            rate = min(1.0, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * step / total))
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
            pick = torch.randint(len(x), (stage.batch,), generator=rng)
            given = torch.where(torch.rand(stage.batch, generator=rng) < 0.1, digits.UNCONDITIONAL, labels[pick])
            loss = flow_loss(model, small[pick], given, stage.shift, rng)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            decay = min(EMA, step / (step + 10))
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 1 - decay)
            recent.append(loss.item())
            if step % 50 == 0:
                with torch.no_grad():  # the same noise every time, so that entries compare
                    held = flow_loss(
                        average, held_small, held_labels[:128], stage.shift, torch.Generator().manual_seed(0)
                    )
                curve.append((step, sum(recent) / len(recent), held.item()))
                recent.clear()
                print(
                    f"step {step:5d}/{total}  {stage.size} px  loss {curve[-1][1]:.4f}  held-out {held:.4f}", flush=True
                )
    return average, curve


def train_reader() -> tuple[dict[str, Tensor], float]:
    """The classifier that reads the drawn digits, and its accuracy on real held-out ones."""
    rng = torch.Generator().manual_seed(SEED)
    (x, labels), (held_x, held_labels) = digits.real_digits("train"), digits.real_digits("test")
    shapes = {"first": (16, 1, 3, 3), "second": (32, 16, 3, 3), "last": (10, 512)}
    weights = {}
    for name, shape in shapes.items():
        scale = math.sqrt(2 / math.prod(shape[1:]))
        weights[name] = (torch.randn(shape, generator=rng) * scale).requires_grad_()
        weights[name + "_bias"] = torch.zeros(shape[0], requires_grad=True)
    steps = 1500
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=0.05)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        pick = torch.randint(len(x), (64,), generator=rng)
        moved = move(x[pick], rng)
        loss = F.cross_entropy(digits.reader_logits(moved, weights), labels[pick], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = {name: weight.detach() for name, weight in weights.items()}
    read = digits.reader_logits(held_x, weights).argmax(-1)
    return weights, (read == held_labels).float().mean().item()


def move(x: Tensor, rng: torch.Generator) -> Tensor:
    """Each picture turned, stretched and shifted a little."""
    change = (torch.rand(len(x), 6, generator=rng) - 0.5) * torch.tensor([0.2, 0.3, 0.2, 0.3, 0.2, 0.2])
    grid = F.affine_grid(change.view(-1, 2, 3) + torch.eye(2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x + 1, grid, align_corners=False) - 1  # outside is blank paper, -1


def curve_svg(curve: list[tuple[int, float, float]]) -> str:
    """Training and held-out loss against the step, as one small drawing without dependencies."""
    width, height, left, bottom, top = 720, 320, 56, 40, 20
    low, high = math.log(0.02), math.log(1.0)

    def place(step: float, loss: float) -> str:
        x = left + (width - left - 20) * step / curve[-1][0]
        y = top + (height - top - bottom) * (high - math.log(min(1.0, max(0.02, loss)))) / (high - low)
        return f"{x:.1f},{y:.1f}"

    def line(points: list[str], style: str) -> str:
        return f'<polyline points="{" ".join(points)}" fill="none" {style}/>'

    def text(at: str, words: str, anchor: str = "middle") -> str:
        x, y = at.split(",")
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'

    end, parts = curve[-1][0], []
    for loss in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        parts.append(line([place(0, loss), place(end, loss)], 'stroke="#ddd"'))
        x, y = place(0, loss).split(",")
        parts.append(text(f"{float(x) - 8},{float(y) + 4}", f"{loss:g}", "end"))
    change = STAGES[0].steps
    parts.append(line([place(change, 0.02), place(change, 1.0)], 'stroke="#bbb" stroke-dasharray="4 4"'))
    for step, words in ((0, "0"), (change, f"{change}: 16 px to 32 px"), (end, f"{end} steps")):
        x = place(step, 1.0).split(",")[0]
        parts.append(text(f"{x},{height - 16}", words, "end" if step == end else "middle"))
    for column, colour, name in ((1, "#4c78a8", "training"), (2, "#e45756", "held out (averaged weights)")):
        parts.append(line([place(entry[0], entry[column]) for entry in curve], f'stroke="{colour}" stroke-width="2"'))
        parts.append(f'<text x="{width - 24}" y="{top + 18 * column}" text-anchor="end" fill="{colour}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#444"><rect width="{width}" height="{height}" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    """Train both, write the files foci ships, then draw and read 200 digits with what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=digits.ASSETS, help="where the weights go")
    parser.add_argument("--docs", type=Path, default=Path("docs/img"), help="where the curve and the drawn digits go")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for folder in (options.out, options.docs):
        folder.mkdir(parents=True, exist_ok=True)

    reader, accuracy = train_reader()
    save_file(reader, options.out / "reader.safetensors")
    print(f"reader: {accuracy:.2%} of the held-out digits", flush=True)
    began = time.perf_counter()
    model, curve = train_model()
    seconds = time.perf_counter() - began
    model.half().save_pretrained(options.out)  # half precision on disk; load() widens it again
    FlowMatchEulerDiscreteScheduler(shift=STAGES[-1].shift).save_pretrained(options.out)
    (options.docs / "digits_dit_loss.svg").write_text(curve_svg(curve))

    pipe = digits.load(options.out)
    wanted = [i % 10 for i in range(200)]
    drawn = torch.cat([pipe(wanted[i : i + 20], seed=i) for i in range(0, 200, 20)])
    right = (digits.read_digits(drawn) == torch.tensor(wanted)).float().mean().item()
    digits.picture(drawn[:10]).save(options.docs / "digits_dit.png")
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(seconds),
        "training loss": round(curve[-1][1], 4),
        "held-out loss": round(curve[-1][2], 4),
        "reader on held-out digits": round(accuracy, 4),
        "drawn digits read right": round(right, 4),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
