"""Pictures of records: a roofline as SVG, and a page with it, bars and every figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from foci.bench.ceilings import Ceilings
from foci.bench.record import STAGES, Record

_WIDTH, _HEIGHT, _LEFT, _BASE = 880, 460, 84, 400
_COLOURS = (
    "#c4432b", "#6d8fe8", "#3f9b77", "#c98a1b", "#8a63b8", "#5a6470", "#d98a9e", "#2aa5b8", "#9a5b2e", "#1f4e9c",
    "#a3b32c", "#e06fc4", "#0f6b4f", "#f0a878",
)  # fmt: skip
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #57606a } .head { font-size: 15px; font-weight: 600; fill: #24292f }
  .grid { stroke: #d8dee4 } .roof { stroke: #24292f; stroke-width: 2; fill: none }
  @media (prefers-color-scheme: dark) { text { fill: #9198a1 } .head { fill: #e6edf3 } .grid { stroke: #30363d }
    .roof { stroke: #e6edf3 } }"""
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>foci bench</title><style>
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto;
padding: 0 1rem } table { border-collapse: collapse; font-size: 13px; width: 100% } td, th { padding: 2px 8px;
text-align: left; border-bottom: 1px solid #8884 } td.n { text-align: right; font-variant-numeric: tabular-nums;
white-space: nowrap }
.bar { display: inline-block; height: 10px; border-radius: 2px } small, .no { color: #888 } svg { max-width: 100% }
th { font-weight: 400; color: #888 } th.n { text-align: right }
</style><h1>foci bench</h1>"""
_HEAD = "<tr class='names'><th>pass<th>of<th>" + "".join(
    f"<th class='n'>{name}" for name in ("median", "GPU alone", "speed", "of the ceiling", "peak memory", "host", "")
)


def measured(records: Sequence[Record]) -> list[Record]:
    return [each for each in records if each.median and each.floor]


def colours(records: Sequence[Record]) -> dict[str, str]:
    """A colour for each candidate, ours first."""
    names = sorted({each.candidate for each in records}, key=lambda name: (not name.startswith("foci"), name))
    return {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}


def roofline(records: Sequence[Record], top: Ceilings) -> str:
    """Operations a second over operations a byte, both on logarithmic axes, under what the machine can do; forward."""
    points = [each for each in measured(records) if each.stage == "forward" and each.flops and each.bytes]
    meet = top.flops / top.bytes
    intensities = [each.flops / each.bytes for each in points if each.flops and each.bytes] + [meet]
    low, high = math.log10(min(intensities) / 2), math.log10(max(intensities) * 2)
    rates = [each.flops / each.median for each in points if each.flops and each.median]
    ground = math.log10(min([*rates, top.flops / 100]) / 2)
    ceiling = math.log10(top.flops * 2)

    def x(intensity: float) -> float:
        return _LEFT + (math.log10(intensity) - low) / (high - low) * (_WIDTH - _LEFT - 190)

    def y(rate: float) -> float:
        return _BASE - (math.log10(rate) - ground) / (ceiling - ground) * (_BASE - 60)

    drawn = [_text(20, 28, "How near to what this machine can do", "head")]
    for power in range(math.ceil(ground), math.floor(ceiling) + 1):
        drawn.append(_line(_LEFT, y(10**power), _WIDTH - 190, y(10**power), "grid"))
        drawn.append(_text(8, y(10**power) + 4, rate(10**power)))
    for power in range(math.ceil(low), math.floor(high) + 1):
        drawn.append(_text(x(10**power) - 8, _BASE + 20, f"{10**power:g}"))
    left, right = 10**low, 10**high
    roof = f"{x(left):.1f},{y(top.bytes * left):.1f} {x(meet):.1f},{y(top.flops):.1f} {x(right):.1f},{y(top.flops):.1f}"
    drawn += [f'<polyline class="roof" points="{roof}"/>', _text(_LEFT, _BASE + 42, "operations a byte")]
    colour = colours(points)
    for each in points:
        assert each.flops and each.bytes and each.median
        title = f"<title>{escape(f'{each.operator} {each.problem} {each.candidate}')}</title>"
        place = f'cx="{x(each.flops / each.bytes):.1f}" cy="{y(each.flops / each.median):.1f}"'
        drawn.append(f'<circle {place} r="4" fill="{colour[each.candidate]}" fill-opacity=".75">{title}</circle>')
    for row, (name, fill) in enumerate(colour.items()):
        drawn.append(f'<circle cx="{_WIDTH - 172}" cy="{70 + 20 * row}" r="5" fill="{fill}"/>')
        drawn.append(_text(_WIDTH - 160, 74 + 20 * row, name))
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>{"".join(drawn)}</svg>\n'


def page(records: Sequence[Record], top: Ceilings) -> str:
    """The roofline, and for every problem and stage each candidate's time as a bar, or why it has none."""
    where = records[0] if records else None
    parts = [_PAGE]
    if where is not None:
        parts.append(f"<p>{escape(where.machine)}<br><small>{escape(where.versions)} · {where.date}</small></p>")
    parts.append(
        f"<p>Ceilings measured in the same run: {rate(top.flops)} and {top.bytes / 1e9:.4g} GB/s. No time is shown "
        "for a result outside its error budget. Where the host rules, calls in a row take its time.</p>"
    )
    parts.append(roofline(records, top))
    colour = colours(records)
    order = sorted(records, key=lambda each: (each.operator, each.problem, STAGES.index(each.stage)))
    for (operator, problem), rows in groupby(order, key=lambda each: (each.operator, each.problem)):
        parts.append(f"<h3>{escape(operator)} {escape(problem)}</h3><table>{_HEAD}")
        for _, group in groupby(list(rows), key=lambda each: each.stage):
            of_stage = sorted(group, key=lambda each: each.median or math.inf)
            slowest = max((each.median for each in of_stage if each.median), default=1.0)
            parts += [_row(each, slowest, colour[each.candidate]) for each in of_stage]
        parts.append("</table>")
    return "".join(parts) + "</html>\n"


def _row(each: Record, slowest: float, fill: str) -> str:
    head = f"<tr><td>{each.stage}</td><td>{escape(each.candidate)}</td>"
    if not each.median or not each.floor or not each.flops:
        return f'{head}<td colspan="8" class="no">{escape(each.refused)}</td></tr>'
    bar = f'<span class="bar" style="width:{220 * each.median / slowest:.0f}px;background:{fill}"></span>'
    host = "" if each.host is None else f"{each.host * 1e6:.0f} us{', which rules' * each.host_bound}"
    cells = (
        f"{each.median * 1e3:.3f} ms",
        "" if each.alone is None else f"{each.alone * 1e3:.3f} ms",
        rate(each.flops / each.median),
        f"{each.floor / each.median:.0%}",
        f"{(each.peak or 0) / 2**20:.0f} MiB",
        host,
        f"no gradient of {escape(each.without)}" if each.without else "",
    )
    return f"{head}<td>{bar}</td>" + "".join(f'<td class="n">{cell}</td>' for cell in cells) + "</tr>"


def rate(flops: float) -> str:
    """1.5e12 -> 1.5 TFLOP/s"""
    unit, size = next(((u, s) for u, s in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)) if flops >= s), ("k", 1e3))
    return f"{flops / size:.3g} {unit}FLOP/s"


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def _line(x0: float, y0: float, x1: float, y1: float, kind: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class="{kind}"/>'
