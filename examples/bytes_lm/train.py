"""Train bytes-lm, the hybrid language model, and its softmax-only twin on Python's standard library, on the CPU.

python examples/bytes_lm/train.py hybrid|twin [--steps N] [--work DIR] [--out DIR]    (needs foci[transformers])

Both read the same stretches in the same order, for the same number of steps. The rate rises for 50 steps, stays, and
falls to zero over the last 30 %; a checkpoint every 100 steps is enough to go on from, also to another end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.accelerate import bytes_lm

SEED = 2026
BATCH, LENGTH = 16, 256
WARMUP, FALL = 50, 0.3
RATE, ADAM_RATE, DECAY = 4e-3, 3e-3, 0.05


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embedding, head, gates, norms and convolutions."""
    inner = [p for p in model.blocks.parameters() if p.dim() == 2 and min(p.shape) >= 16]
    known = {id(p) for p in inner}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(inner, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def rate(step: int, steps: int) -> float:
    """The share of the full learning rate at a step."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / (FALL * steps))


def batch(text: Tensor, step: int) -> Tensor:
    """The stretches of a step: a function of the step alone, so that both models, and a resumed one, read the same."""
    rng = torch.Generator().manual_seed(SEED + step)
    starts = torch.randint(text.numel() - LENGTH - 1, (BATCH,), generator=rng)
    return torch.stack([text[start : start + LENGTH + 1].long() for start in starts.tolist()])


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """Mean cross entropy of the next byte in nats; products in bfloat16, sums, norms and states in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def train(kind: str, steps: int, work: Path) -> tuple[Any, list[dict[str, float]]]:
    """The model and its curve; goes on from the latest checkpoint in `work` that is not past the end."""
    text = bytes_lm.text_of(bytes_lm.library_files("train"))
    held = bytes_lm.text_of(bytes_lm.library_files("validation"))
    some = held[: 64 * LENGTH * 4 + 1]
    model = bytes_lm.untrained(bytes_lm.HYBRID if kind == "hybrid" else bytes_lm.TWIN, seed=SEED).train()
    makers = optimizers(model)
    full = [group["lr"] for optimizer in makers for group in optimizer.param_groups]
    curve: list[dict[str, float]] = []
    first, seconds, processor = resume(kind, steps, work, model, makers, curve)
    recent: list[float] = []
    for step in range(first, steps):
        start, busy = time.perf_counter(), time.process_time()
        for group, peak in zip((g for o in makers for g in o.param_groups), full, strict=True):
            group["lr"] = peak * rate(step, steps)
        loss = loss_of(model, batch(text, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in makers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item() / math.log(2))
        seconds += time.perf_counter() - start
        processor += time.process_time() - busy
        done = step + 1
        if done % 25 == 0 or done == steps:
            entry = {"step": done, "training": sum(recent) / len(recent), "seconds": seconds, "processor": processor}
            recent.clear()
            if done % 100 == 0 or done == steps:
                model.eval()
                entry["validation"] = bytes_lm.bits_per_byte(model, some, LENGTH)
                model.train()
            curve.append(entry)
            print(json.dumps({"kind": kind, **entry, "load": os.getloadavg()[0]}), flush=True)
            if done % 100 == 0:
                torch.save(
                    {"model": model.state_dict(), "optimizers": [o.state_dict() for o in makers], "curve": curve},
                    work / f"{kind}-{done}.pt",
                )
    return model.eval(), curve


def resume(
    kind: str, steps: int, work: Path, model: Any, makers: list[torch.optim.Optimizer], curve: list[dict[str, float]]
) -> tuple[int, float, float]:
    """Load the latest checkpoint from before the rate falls: the step to go on with and the time spent so far."""
    places = [int(path.stem.rpartition("-")[2]) for path in work.glob(f"{kind}-*.pt")]
    latest = max((step for step in places if step <= (1 - FALL) * steps), default=0)
    if not latest:
        return 0, 0.0, 0.0
    saved = torch.load(work / f"{kind}-{latest}.pt")
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(makers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    curve.extend(saved["curve"])
    return latest, curve[-1]["seconds"], curve[-1]["processor"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["hybrid", "twin"])
    parser.add_argument("--steps", type=int, default=750)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("out/bytes_lm"))
    parser.add_argument("--out", type=Path, default=None, help="where the trained model goes, in bfloat16")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.work.mkdir(parents=True, exist_ok=True)
    model, curve = train(given.kind, given.steps, given.work)
    held = bytes_lm.text_of(bytes_lm.library_files("validation"))
    rounded = model.bfloat16().float()  # what is shipped
    record = {
        "kind": given.kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": given.steps,
        "bytes": given.steps * BATCH * LENGTH,
        "threads": given.threads,
        "validation": {str(length): bytes_lm.bits_per_byte(rounded, held, length) for length in (256, 1024)},
        "validation_bytes": held.numel(),
        "curve": curve,
    }
    (given.work / f"{given.kind}.json").write_text(json.dumps(record, indent=1) + "\n")
    (given.out or given.work / given.kind).mkdir(parents=True, exist_ok=True)
    rounded.bfloat16().save_pretrained(given.out or given.work / given.kind)
    print(json.dumps({key: value for key, value in record.items() if key != "curve"}, indent=1))


if __name__ == "__main__":
    main()
