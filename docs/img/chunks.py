"""Draws how the recurrences are computed in chunks: linear_chunks.svg and delta_chunks.svg, beside this file."""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 880, 330
STYLE = """
  text { font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #24292f }
  .small { font-size: 12px; fill: #59636e }
  .head { font-size: 14px; font-weight: 600 }
  .math { font: italic 14px Georgia, 'Times New Roman', serif }
  .middle { text-anchor: middle } .end { text-anchor: end }
  .line { stroke: #59636e; stroke-width: 1.5; fill: none } .dash { stroke-dasharray: 3 3 }
  .tip { fill: #59636e }
  .state { fill: #fff1d6; stroke: #c98a1b; stroke-width: 1.5 }
  .chunk { fill: #eef3ff; stroke: #6d8fe8; stroke-width: 1.5 }
  .token { fill: #6d8fe8 } .none { fill: #f3f4f6 } .own { fill: #dfe3ea }
  .mark { fill: none; stroke: #c4432b; stroke-width: 2 }
  .m1 { fill: #cfdcff } .m2 { fill: #9fb9ff } .m4 { fill: #6d8fe8 } .new { fill: #8ecfb4 } .old { fill: #d3efe3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9da7b3 } .line { stroke: #9da7b3 } .tip { fill: #9da7b3 }
    .state { fill: #3d3015; stroke: #e0a63c } .chunk { fill: #1b2640; stroke: #7f9ff0 } .token { fill: #7f9ff0 }
    .none { fill: #1c2128 } .own { fill: #3a424d } .mark { stroke: #ff8a70 }
    .m1 { fill: #26365f } .m2 { fill: #3c5599 } .m4 { fill: #6384e0 } .new { fill: #2f7d5f } .old { fill: #1d4235 }
  }"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, round_: float = 6) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{round_}" class="{kind}"/>'


def arrow(*points: tuple[float, float], kind: str = "") -> str:
    path = " L".join(f"{x},{y}" for x, y in points)
    return f'<path d="M{path}" class="line {kind}" marker-end="url(#tip)"/>'


def matrix(x: float, y: float, cell: float, kinds: list[list[str]]) -> list[str]:
    """A square of cells, row by row, each of a kind."""
    return [
        box(x + column * cell, y + row * cell, cell - 1.5, cell - 1.5, kind, 2)
        for row, cells in enumerate(kinds)
        for column, kind in enumerate(cells)
    ]


def chain(inside: str, down: str, up: str) -> list[str]:
    """States at the borders of three chunks: what reads them, what writes them."""
    drawn = [text(20, 26, "From chunk to chunk", "head")]
    for n in range(4):
        x = 22 + 150 * n
        drawn += [
            box(x, 50, 46, 46, "state"),
            text(x + 23, 78, f"S<tspan dy='4' font-size='10'>{n}</tspan>", "math middle"),
        ]
        if n == 3:
            continue
        drawn += [arrow((x + 50, 73), (x + 144, 73)), text(x + 97, 65, "total", "small middle")]
        drawn += [box(x + 43, 158, 110, 58, "chunk"), text(x + 98, 206, inside, "math middle")]
        drawn += [box(x + 50 + 12.2 * t, 167, 9.5, 16, "token", 2) for t in range(8)]
        drawn += [arrow((x + 30, 100), (x + 62, 152)), text(x + 38, 134, down, "small end")]
        drawn += [arrow((x + 132, 153), (x + 162, 102)), text(x + 140, 134, up, "small end")]
    return drawn


def level(t: int, s: int) -> str:
    """The kind of a pair: above the diagonal, on it, or the size of the halves that part t from s."""
    return "none" if s > t else "own" if s == t else f"m{1 << ((t ^ s).bit_length() - 1)}"


def linear() -> list[str]:
    x, y, cell = 604, 50, 21
    drawn = chain("A v", "rise q", "fall k")
    drawn += [
        text(20, 252, "o = A v + (rise q) S", "math"), text(200, 252, "S ← total S + (fall k)ᵀ v", "math"),
        text(20, 282, "The state is kept at the borders only, in float32. All chunks of a stretch are matrix", "small"),
        text(20, 300, "products side by side; only S goes from one chunk to the next.", "small"),
        text(x - 40, 26, "Within a chunk: A by halving", "head"),
        *matrix(x, y, cell, [[level(t, s) for s in range(8)] for t in range(8)]),
        box(x + cell, y + 6 * cell, cell - 1.5, cell - 1.5, "mark", 2),
        text(x - 8, y + 6 * cell + 15, "t", "math end"), text(x + 1.5 * cell, y - 6, "s", "math middle"),
    ]  # fmt: skip
    for row, (kind, words) in enumerate((("own", "itself"), ("m1", "halves of 1"), ("m2", "of 2"), ("m4", "of 4"))):
        drawn += [
            box(x + 8.7 * cell, y + 26 * row, 14, 14, kind, 2),
            text(x + 9.6 * cell, y + 12 + 26 * row, words, "small"),
        ]
    ground, place = 248, [x + cell * (n + 0.5) for n in range(8)]
    path = ground + 24
    middle = (place[3] + place[4]) / 2
    drawn += [box(at - 5, ground, 10, 14, "token", 2) for at in place]
    drawn += [
        f'<path d="M{middle},{ground - 8} V{ground + 40}" class="line dash"/>',
        arrow((place[1], path), (middle - 3, path)), arrow((middle + 3, path), (place[6], path)),
        text((place[1] + middle) / 2, ground + 40, "fall", "small middle"),
        text((place[6] + middle) / 2, ground + 40, "rise", "small middle"),
        text(x - 40, 318, "s and t meet at the middle: fall · rise, each ≤ 1", "small"),
    ]  # fmt: skip
    return drawn


def triangle(x: float, y: float, half: float, words: tuple[str, str, str], kinds: tuple[str, str]) -> list[str]:
    """[[P, 0], [Q, R]], P and R triangles, Q the square below the diagonal."""
    drawn = [box(x, y, 2 * half, 2 * half, "none", 3), box(x, y + half, half - 1, half, kinds[1], 2)]
    for n in (0, 1):
        left, top = x + n * half, y + n * half
        drawn.append(f'<path d="M{left},{top} V{top + half - 1 + n} H{left + half - 1} z" class="{kinds[0]}"/>')
        drawn.append(text(left + 0.3 * half, top + 0.82 * half, words[n], "math middle"))
    return [*drawn, text(x + half / 2, y + 1.58 * half, words[2], "math middle")]


def delta() -> list[str]:
    x, y, half = 600, 58, 52
    right = x + 2 * half + 48
    drawn = chain("d, A d", "rise", "fall w")
    drawn += [
        text(20, 248, "(I + E) d = v − (rise e) S", "math"), text(215, 248, "o = A d + (rise q) S", "math"),
        text(375, 248, "S ← total S + (fall w)ᵀ d", "math"),
        text(20, 278, "w = β k is what a token writes along, e what it reads first, d the errors it writes.", "small"),
        text(20, 296, "A and E are decayed products of q and e with w, by halving as in linear attention;", "small"),
        text(20, 314, "X = (I + E)⁻¹ is applied to v and to rise e at once, before any state is known.", "small"),
        text(x - 6, 26, "The triangle, block by block", "head"),
        *triangle(x, y, half, ("P", "R", "Q"), ("m1", "m4")),
        *triangle(right, y, half, ("P′", "R′", "−R′QP′"), ("old", "new")),
        arrow((x + 2 * half + 8, y + half), (right - 8, y + half)),
        text(x + 2 * half + 23, y + half - 8, "⁻¹", "middle"),
    ]  # fmt: skip
    drawn += [
        text(x - 6, 196, "Blocks of 1, 2, 4 … C/2, each made of the last.", "small"),
        text(x - 6, 214, "Nothing multiplied is larger than the answer,", "small"),
        text(x - 6, 232, "so equal keys and β = 2 are safe.", "small"),
    ]
    return drawn


def svg(title: str, drawn: list[str]) -> str:
    head = '<path d="M0,0 L7,3.5 L0,7 z" class="tip"/>'
    tip = f'<marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3.5" orient="auto">{head}</marker>'
    lines = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">\n'
        f"<title>{title}</title>\n<style>{STYLE}\n</style>\n<defs>{tip}</defs>\n{lines}\n</svg>\n"
    )


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "linear_chunks.svg").write_text(svg("Linear attention in chunks", linear()))
    (here / "delta_chunks.svg").write_text(svg("The delta rule in chunks", delta()))
