"""Demonstrations run before and after: digits drawn, text continued, sentences embedded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from foci.accelerate.digits import DigitsPipeline

SAMPLES, BATCH = 200, 40
PROMPT = "class Tree:\n    def __init__(self"
STEPS, QUICK = 25, 6  # sampling steps of the ten digits shown, and of the 200 that are classified


@dataclass(frozen=True)
class Shown:
    """One demonstration: pictures in [-1, 1] or lines of text, the tensor they come from, and facts for the report."""

    kind: str
    pictures: Tensor | None = None
    lines: tuple[str, ...] = ()
    values: Tensor | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def draw_digits(pipeline: DigitsPipeline, progress: Callable[[str], None]) -> Shown:
    """Ten digits to look at, and 200 in fewer steps that a small classifier reads; each from its own fixed noise."""
    from foci.accelerate.digits import read_digits

    labels = [place % 10 for place in range(SAMPLES)]
    progress("ten digits")
    start = time.perf_counter()
    ten = pipeline(labels[:10], steps=STEPS).cpu()
    seconds = time.perf_counter() - start
    drawn: list[Tensor] = []
    for first in range(0, SAMPLES, BATCH):
        progress(f"{first} of {SAMPLES} digits to read")
        drawn.append(pipeline(labels[first : first + BATCH], seed=first, steps=QUICK).cpu())
    many = torch.cat(drawn)
    right = int((read_digits(many) == torch.tensor(labels, device="cpu")).sum())
    facts = {"samples": SAMPLES, "right": right, "steps": STEPS, "reading_steps": QUICK, "seconds": seconds}
    return Shown("images", pictures=ten, values=torch.cat([ten, many]), facts=facts)


@torch.no_grad()
def show_continuation(model: Any) -> Shown:
    """Greedy continuation of two prompts of token ids, the second padded on the left, with a cache."""
    device = next(model.parameters()).device
    ids = torch.tensor([[3, 14, 15, 92, 65, 35], [0, 0, 27, 18, 28, 45]], device=device) % model.config.vocab_size
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]], device=device)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
    lines = tuple(" ".join(str(token) for token in row.tolist()) for row in out[:, ids.shape[1] :])
    return Shown("text", lines=lines, values=out, facts={"tokens": int(out[:, ids.shape[1] :].numel())})


def write_code(model: Any, progress: Callable[[str], None], length: int = 120) -> Shown:
    """Greedy code from a prompt; if foci chooses the backends, also the cost of a byte in a short and a long context.

    The cost is compared with a softmax-only model of equal size, with random weights, as those do not change the cost.
    """
    from foci.accelerate import bytes_lm
    from foci.integrations.layers import find_sites

    progress("writing code")
    start = time.perf_counter()
    text = bytes_lm.write(model, PROMPT, tokens=length, temperature=0)
    seconds = time.perf_counter() - start
    facts: dict[str, Any] = {"tokens": len(text.encode()) - len(PROMPT), "seconds": seconds}
    if all(layer.backend is None for layer in find_sites(model).values()):
        progress("the cost of a byte in a short and a long context, beside the softmax-only twin")
        twin = bytes_lm.untrained(bytes_lm.TWIN).to(model.device, model.dtype).eval()
        facts["cost"] = bytes_lm.cost({"hybrid": model, "softmax-only twin": twin}, bytes_lm.CONTEXTS)
        facts["remark"] = "; ".join(_cost_text(facts["cost"], name) for name in ("hybrid", "softmax-only twin"))
    return Shown("text", lines=tuple(text.splitlines()), values=bytes_lm.as_bytes(text), facts=facts)


def _cost_text(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """`hybrid 210 and 208 tokens/s behind 256 and 8192, cache 0.6 and 0.6 MiB`."""
    mine = [row for row in rows if row["model"] == name]
    speeds, sizes, contexts = (
        " and ".join(words)
        for words in (
            [f"{1e3 / row['milliseconds']:.0f}" for row in mine],
            [f"{row['cache'] / 2**20:.1f}" for row in mine],
            [str(row["context"]) for row in mine],
        )
    )
    return f"{name} {speeds} tokens/s behind {contexts}, cache {sizes} MiB"


@torch.no_grad()
def embed_sentences(model: nn.Module, inputs: Mapping[str, Tensor], sentences: Sequence[str]) -> Shown:
    """Mean-pooled, normalised embeddings, and each sentence's nearest neighbour."""
    given = {name: tensor.to(next(model.parameters()).device) for name, tensor in inputs.items()}
    hidden = model(**given).last_hidden_state
    real = given["attention_mask"][..., None]
    pooled = torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1).float()
    likeness = pooled @ pooled.T
    likeness.fill_diagonal_(-1)
    score, nearest = likeness.max(-1)
    lines = tuple(
        f"{sentence}  →  {sentences[place]}  ({value:.6f})"
        for sentence, place, value in zip(sentences, nearest.tolist(), score.tolist(), strict=True)
    )
    return Shown("text", lines=lines, values=pooled, facts={"sentences": len(sentences)})
