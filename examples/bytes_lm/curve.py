"""Draw the learning curves of bytes-lm and its twin from what train.py wrote.

python examples/bytes_lm/curve.py [--work DIR] [--to docs/img/bytes_lm_loss.svg]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 320, 56, 40, 20
LOW, HIGH = 1.0, 4.0
COLOURS = {"hybrid": "#4c78a8", "twin": "#e45756"}
NAMES = {"hybrid": "hybrid", "twin": "softmax-only twin"}


def draw(records: dict[str, dict[str, Any]]) -> str:
    """Bits per byte against steps: thin the training stretches, thick with dots the validation files."""
    end = max(record["curve"][-1]["step"] for record in records.values())

    def place(step: float, bits: float) -> str:
        x = LEFT + (WIDTH - LEFT - 20) * step / end
        y = TOP + (HEIGHT - TOP - BOTTOM) * (HIGH - min(HIGH, max(LOW, bits))) / (HIGH - LOW)
        return f"{x:.1f},{y:.1f}"

    def line(points: list[str], style: str) -> str:
        return f'<polyline points="{" ".join(points)}" fill="none" {style}/>'

    parts = []
    for bits in (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0):
        parts.append(line([place(0, bits), place(end, bits)], 'stroke="#ddd"'))
        y = place(0, bits).split(",")[1]
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4}" text-anchor="end">{bits:g}</text>')
    for step in range(0, end + 1, 200):
        x = place(step, LOW).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 16}" text-anchor="middle">{step}</text>')
    for row, (kind, record) in enumerate(records.items()):
        colour = COLOURS[kind]
        training = [place(entry["step"], entry["training"]) for entry in record["curve"]]
        held = [place(entry["step"], entry["validation"]) for entry in record["curve"] if "validation" in entry]
        parts.append(line(training, f'stroke="{colour}" stroke-opacity="0.5"'))
        parts.append(line(held, f'stroke="{colour}" stroke-width="2"'))
        parts += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in held]
        words = f"{NAMES[kind]}: {record['validation']['256']:.3f} bits per byte at the end"
        parts.append(
            f'<text x="{WIDTH - 24}" y="{TOP + 18 * (row + 1)}" text-anchor="end" fill="{colour}">{words}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#444"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("out/bytes_lm"))
    parser.add_argument("--to", type=Path, default=Path("docs/img/bytes_lm_loss.svg"))
    given = parser.parse_args()
    given.to.write_text(draw({kind: json.loads((given.work / f"{kind}.json").read_text()) for kind in COLOURS}))


if __name__ == "__main__":
    main()
