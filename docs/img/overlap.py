"""Draws parallel_overlap.svg, beside this file: what two ranks of a ring compute while blocks travel, from a trace.

    python docs/img/overlap.py

Runs causal attention forward and backward over two gloo ranks of one thread, 2048 tokens, 8 heads of 64, under
torch.profiler, and draws the quickest of five calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from chunks import STYLE, box, text
from torch.profiler import ProfilerActivity, profile, record_function

import foci
from foci.core.world import World
from foci.parallel import ring
from foci.parallel.exchange import Pending

WIDTH, LEFT, RIGHT = 880, 175, 20
KERNELS = "_scaled_dot_product_flash_attention_for_cpu"
OWN = """
  .work { fill: #6d8fe8 } .fly { fill: #8ecfb4 } .wait { fill: #c4432b } .axis { stroke: #8b949e; stroke-width: 1 }
  @media (prefers-color-scheme: dark) { .work { fill: #6384e0 } .fly { fill: #3f9b77 } .wait { fill: #e5705a } }"""
Spans = list[tuple[float, float]]


def trace() -> dict[str, Spans]:
    """Milliseconds from the start of a call, by what happened: kernels, messages in flight, a rank that waits."""
    wait = Pending.wait

    def watched(self: Pending) -> list[torch.Tensor]:
        with record_function("wait"):
            return wait(self)

    q, k, v = (torch.randn(1, 2048 // dist.get_world_size(), 8, 64, requires_grad=True) for _ in range(3))
    op = ring(foci.attention, dist.group.WORLD)

    def call() -> None:
        op(q, k, v, mask=foci.Causal()).sum().backward()

    Pending.wait = watched  # type: ignore[method-assign]
    try:
        call()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            call()
    finally:
        Pending.wait = wait  # type: ignore[method-assign]
    kinds = {"gloo:recv": "fly", "wait": "wait"}
    found: dict[str, Spans] = {"work": [], "fly": [], "wait": []}
    for event in recorded.events() or ():
        kind = "work" if KERNELS in event.name else kinds.get(event.name)
        length = event.time_range.end - event.time_range.start
        # Agreement and the exchange of statuses are gloo messages too, of a kilobyte, and not blocks.
        if kind is not None and not (kind == "fly" and length < 2000):
            found[kind].append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    start = min(first for spans in found.values() for first, _ in spans)
    return {kind: [(a - start, b - start) for a, b in spans] for kind, spans in found.items()}


def blocks_only(spans: Spans, waits: Spans) -> Spans:
    """Messages whose arrival some `wait` saw: the others are small ones, however long they took."""
    return [each for each in spans if any(first <= each[1] <= last + 0.5 for first, last in waits)]


def draw(ranks: list[dict[str, Spans]]) -> str:
    end = max(last for rank in ranks for spans in rank.values() for _, last in spans)
    scale = (WIDTH - LEFT - RIGHT) / end
    drawn = [text(20, 26, "Two ranks of a ring, causal, forward and backward: one traced call", "head")]
    for number, rank in enumerate(ranks):
        y = 50 + 90 * number
        drawn.append(text(20, y + 36, f"rank {number}"))
        for row, (kind, label) in enumerate((("work", "computes"), ("fly", "block on its way"), ("wait", "waits"))):
            spans = blocks_only(rank["fly"], rank["wait"]) if kind == "fly" else rank[kind]
            drawn.append(text(LEFT - 8, y + 11 + 24 * row, label, "small end"))
            drawn += [box(LEFT + a * scale, y + 24 * row, max(1.0, (b - a) * scale), 16, kind, 2) for a, b in spans]
    waited = [sum(b - a for a, b in rank["wait"]) for rank in ranks]
    flying = [sum(b - a for a, b in blocks_only(rank["fly"], rank["wait"])) for rank in ranks]
    words = "; ".join(
        f"rank {n}: blocks on their way {fly:.0f} ms, waited for {wait:.0f} ms"
        for n, (fly, wait) in enumerate(zip(flying, waited, strict=True))
    )
    drawn.append(text(20, 250, f"{end:.0f} ms in all. {words}.", "small"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 266" role="img">'
    return "\n".join([head, f"<style>{STYLE}{OWN}</style>", *drawn, "</svg>", ""])


def main() -> None:
    with World(2) as world:
        traces: list[list[dict[str, Any]]] = [world.run(trace) for _ in range(5)]
    best = min(traces, key=lambda ranks: max(last for rank in ranks for spans in rank.values() for _, last in spans))
    (Path(__file__).parent / "parallel_overlap.svg").write_text(draw(best))


if __name__ == "__main__":
    main()
