"""Draws parallel_orders.svg and parallel_forecast.svg, beside this file: who holds which tokens, and how far it scales.

    python docs/img/parallel.py

The second is a simulation: `foci.parallel.forecast` on datasheet figures. Nothing in it was measured.
"""

from __future__ import annotations

import math
from pathlib import Path

from chunks import STYLE, box, text

from foci.parallel.balance import pieces
from foci.parallel.forecast import forecast, refusal
from foci.parallel.links import preset
from foci.parallel.split import Split, splits
from foci.parallel.workload import Rest, Shape

WIDTH = 880
OWN = """
  .r0 { fill: #6d8fe8 } .r1 { fill: #8ecfb4 } .r2 { fill: #e8b04b } .r3 { fill: #d98a9e }
  .grid { stroke: #d8dee4; stroke-width: 1 } .best { stroke: #24292f; stroke-width: 2.5; fill: none }
  .ulysses { stroke: #6d8fe8; stroke-width: 2; fill: none } .ring { stroke: #c98a1b; stroke-width: 2; fill: none }
  .plain { stroke: #c4432b; stroke-width: 2; fill: none } .dot { fill: #24292f }
  .tu { fill: #6d8fe8 } .tr { fill: #c98a1b } .tp { fill: #c4432b }
  @media (prefers-color-scheme: dark) {
    .grid { stroke: #30363d } .best { stroke: #e6edf3 } .dot { fill: #e6edf3 }
    .r0 { fill: #6384e0 } .r1 { fill: #3f9b77 } .r2 { fill: #b98a34 } .r3 { fill: #a8566c }
  }"""
MODEL = Shape(2**20, 32, 128, G=8, causal=True, backward=True, rest=Rest(layers=32, flops=14e9))
PICTURE = Shape(65536 + 512, 24, 128, rest=Rest(layers=57, flops=2 * 57 * 12 * 3072**2, steps=28))
NODE = 8


def orders() -> list[str]:
    """24 tokens over 4 ranks in each order; what each rank computes under a causal mask, as a bar."""
    drawn = [text(20, 26, "24 tokens over 4 ranks", "head"), text(610, 26, "Work of each rank, causal", "head")]
    for row, order in enumerate(("plain", "zigzag", "stripe")):
        y = 50 + 62 * row
        drawn.append(text(20, y + 19, order))
        work = []
        for rank in range(4):
            held = [p for piece in pieces(order, 24, 4, rank) for p in piece.positions]
            drawn += [box(90 + 20 * p, y, 17, 26, f"r{rank}", 2) for p in held]
            drawn += [text(90 + 20 * p + 8.5, y + 17, str(rank), "small middle") for p in held]
            work.append(sum(p + 1 for p in held))
        for rank, pairs in enumerate(work):
            drawn.append(box(610, y + 10 * rank - 6, 1.1 * pairs, 8, f"r{rank}", 2))
        drawn.append(text(610 + 1.1 * max(work) + 8, y + 17, f"most {max(work)}, even {sum(work) / 4:g}", "small"))
    drawn.append(
        text(
            20,
            252,
            "A ring goes at the pace of its busiest rank: in plain order, nearly twice the even share.",
            "small",
        )
    )
    drawn.append(text(20, 270, "With no mask all orders are alike, and plain moves no token.", "small"))
    return drawn


def lines(shape: Shape) -> dict[str, list[tuple[int, float]]]:
    """Share of ideal speed by number of ranks, for the best split of each kind."""
    links, compute = preset("h100", node=NODE)
    alone = forecast(shape, Split(), links, compute).seconds
    kinds = {"best": None, "ulysses": "ulysses", "ring": "ring", "plain": "ring"}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in kinds}
    for power in range(11):
        world = 2**power
        each = [split for split in splits(shape, world) if refusal(shape, split) is None]
        for name, kind in kinds.items():
            own = [s for s in each if world == 1 or kind in (None, s.kind)]
            own = [s for s in own if (s.order == "plain") == (name == "plain") or s.ring == 1 or name == "best"]
            if not shape.causal:
                own = [s for s in each if world == 1 or kind in (None, s.kind)] if name != "plain" else []
            if own:
                best = min(forecast(shape, split, links, compute).seconds for split in own)
                found[name].append((world, alone / best / world))
    return found


def chart(x: float, title: str, below: str, shape: Shape) -> list[str]:
    wide, high, top = 340, 190, 52

    def place(world: int, share: float) -> tuple[float, float]:
        return x + wide * math.log2(world) / 10, top + high * (1 - share)

    drawn = [text(x, 26, title, "head"), text(x, 42, below, "small")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = place(1, share)
        drawn += [f'<path d="M{x},{y} H{x + wide}" class="grid"/>', text(x - 6, y + 4, f"{share:.0%}", "small end")]
    for power in range(0, 11, 2):
        drawn.append(text(place(2**power, 0)[0], top + high + 18, str(2**power), "small middle"))
    for name, points in lines(shape).items():
        path = " L".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        if len(points) > 1:
            drawn.append(f'<path d="M{path}" class="{name}"/>')
        if name == "best":
            drawn += ['<circle cx="{:.1f}" cy="{:.1f}" r="3" class="dot"/>'.format(*place(*point)) for point in points]
    return drawn


def forecasts() -> list[str]:
    drawn = chart(60, "A step of an 8B model, 1M tokens", "32 layers, causal, forward and backward", MODEL)
    drawn += chart(510, "A picture of 4096 x 4096, FLUX.1", "57 blocks of 24 heads, 28 steps", PICTURE)
    for n, (words, kind) in enumerate(
        (("best split", ""), ("Ulysses alone", "tu"), ("ring alone, balanced", "tr"), ("ring alone, plain order", "tp"))
    ):
        drawn.append(text(60 + 195 * n, 294, words, kind))
    words = (
        "Share of ideal speed by number of H100s: datasheet figures, nodes of 8, 400 Gbit/s a GPU between. Simulated."
    )
    drawn.append(text(60, 316, words, "small"))
    return drawn


def svg(title: str, height: int, drawn: list[str]) -> str:
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">\n'
        f"<title>{title}</title>\n<style>{STYLE}{OWN}\n</style>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "parallel_orders.svg").write_text(svg("Which rank holds which token", 285, orders()))
    (here / "parallel_forecast.svg").write_text(svg("How far a split scales", 330, forecasts()))
