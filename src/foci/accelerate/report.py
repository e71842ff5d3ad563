"""The report: one self-contained HTML page with the figures of plan.json, and the pictures."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foci.accelerate.calls import dims
from foci.accelerate.plan import Plan, SitePlan, write_atomically
from foci.accelerate.shown import Shown
from foci.core.errors import require

if TYPE_CHECKING:
    from PIL.Image import Image

_TEMPLATE = Path(__file__).parent / "report.html.j2"
_KINDS = {
    "out": "output",
    "lse": "log-sum-exp",
    "state": "final state",
    "gradient of q": "gradient of the queries",
    "gradient of k": "gradient of the keys",
    "gradient of v": "gradient of the values",
    "gradient of log_decay": "gradient of the decay",
    "gradient of beta": "gradient of the writing strengths",
    "gradient of state": "gradient of the first state",
}


@dataclass(frozen=True)
class Report:
    """A plan with the demonstrations before and after; `str()` gives the page."""

    plan: Plan
    before: Shown | None = None
    after: Shown | None = None

    def __str__(self) -> str:
        jinja = require("jinja2", extra="report")
        plotly = require("plotly.offline", extra="report")
        environment = jinja.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        environment.filters.update(sci=scientific, ms=milliseconds, size=size_text)
        plan = self.plan.as_dict()
        page: str = environment.from_string(_TEMPLATE.read_text()).render(
            plan=plan,
            headline=headline(self.plan),
            blocks=_blocks(self.plan),
            proof=_worst_of_each(self.plan.proof),
            pictures=[(title, _data_uri(image)) for title, image in self.pictures()],
            # "<" could end the script it stands in.
            data=json.dumps(plan).replace("<", "\\u003c"),
            plotly=plotly.get_plotlyjs(),
        )
        return page

    def pictures(self) -> list[tuple[str, Image]]:
        """Titles and images: before, after, and their difference with its magnification; [] without pictures."""
        if self.before is None or self.after is None or self.before.pictures is None or self.after.pictures is None:
            return []
        from foci.accelerate.digits import picture

        first, second = self.before.pictures, self.after.pictures
        difference = (first - second).abs()
        largest = difference.max().item()
        titles = (
            ("one process", f"over {self.plan.ranks['world']} ranks") if self.plan.ranks else ("original", "with foci")
        )
        rows = list(zip(titles, (picture(first), picture(second)), strict=True))
        if largest:
            shown = 2 * difference / largest - 1
            rows.append((f"difference, {1 / largest:.0e} times enlarged", picture(shown)))
        return rows

    def save(self, folder: Path) -> list[Path]:
        """Write report.html and, if there are pictures, digits.png, each atomically."""
        written = [write_atomically(folder / "report.html", str(self))]
        pictures = self.pictures()
        if pictures:
            written.append(write_atomically(folder / "digits.png", _png(stacked(pictures))))
        return written


def headline(plan: Plan) -> str:
    """The one sentence: what was done, how well it is proved, what it brought. Nothing is rounded up."""
    sites = len(plan.sites)
    outputs = [row["error"] for row in plan.proof if row["where"] == "whole model" and row["what"].startswith("output")]
    proved = f", proved to {scientific(max(outputs))}" if outputs else ""
    if plan.ranks:
        return f"{plan.model} gives the same results over {plan.ranks['world']} ranks{proved}, {_speed(plan)}."
    return (
        f"{plan.model} gives the same results with foci at its {sites} attention site{'s' * (sites > 1)}{proved}, "
        f"{_speed(plan)}."
    )


def _speed(plan: Plan) -> str:
    time = plan.timing
    if not time:
        return "not timed"
    ratio, low, high = time["ratio"], time["ratio_low"], time["ratio_high"]
    if plan.ranks:
        return f"and runs at {ratio:.2f} × the speed of one process here"
    if low > 1.02:
        words = f"and runs {ratio:.2f} × as fast"
    elif high < 0.98:
        words = f"and runs at {ratio:.2f} × the original's speed: routing alone gains nothing here"
    else:
        words = f"at the original's speed ({ratio:.2f} ×, no difference beyond noise)"
    compiled = plan.compile
    if compiled.mode != "off" and compiled.call and compiled.compiled_call:
        words += f"; compiled, {compiled.call / compiled.compiled_call:.2f} × as fast as that"
    return words


def scientific(value: float) -> str:
    """1.2·10⁻⁷, and 0 for 0."""
    if value == 0 or value != value or value in (float("inf"), float("-inf")):
        return f"{value:.0f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if mantissa == "1.0" else f"{mantissa.removesuffix('.0')}·{power}"


def milliseconds(seconds: float) -> str:
    """A time in a suitable unit."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def size_text(size: float) -> str:
    """Bytes in KiB, MiB or GiB."""
    if size < 2**17:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _blocks(plan: Plan) -> list[dict[str, Any]]:
    """The model's blocks in order, each with its sites, for the page's column."""
    blocks: dict[str, dict[str, Any]] = {}
    for site in plan.sites:
        name, rest = _split(site.name)
        block = blocks.setdefault(name, {"name": name, "kind": site.caller, "sites": [], "left": []})
        block["sites"].append({"label": rest, "calls": [_call_line(call) for call in site.calls], **_site(site)})
    for where, why in plan.skipped:
        name, rest = _split(where)
        block = blocks.setdefault(name, {"name": name, "kind": "", "sites": [], "left": []})
        block["left"].append({"label": rest or where, "why": why})
    return list(blocks.values())


def _split(name: str) -> tuple[str, str]:
    """A site's block and its name in there: the block ends with the first number."""
    found = re.match(r"(.*?\.\d+)(?:\.|$)(.*)", name)
    return (found[1], found[2]) if found else (name.rpartition(".")[0] or name, name.rpartition(".")[2])


def _site(site: SitePlan) -> dict[str, Any]:
    return {name: getattr(site, name) for name in ("name", "operator", "backend", "kind", "via", "others")}


def _call_line(call: Mapping[str, Any]) -> str:
    times = f"{call['count']} call{'s' * (call['count'] > 1)} a forward"
    return f"{dims(call['sizes'])} {call['dtype']}, {call['mask']}, {times}"


def _worst_of_each(proof: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every quantity the row with the largest error relative to its budget, the number of rows, and its index."""
    groups: dict[tuple[bool, str, str], list[int]] = {}
    for place, row in enumerate(proof):
        groups.setdefault((row["where"] == "whole model", row["what"], row["against"]), []).append(place)
    found = []
    for (whole, what, against), places in groups.items():
        place = max(places, key=lambda place: proof[place]["error"] / proof[place]["budget"])
        name = _KINDS.get(what, what)
        found.append(
            {**proof[place], "place": place, "count": len(places), "what": name, "against": against, "whole": whole}
        )
    return found


def _png(image: Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _data_uri(image: Image) -> str:
    return "data:image/png;base64," + base64.b64encode(_png(image)).decode()


def stacked(rows: list[tuple[str, Image]]) -> Image:
    """The images stacked vertically, each below its title."""
    pil = require("PIL.Image", extra="report")
    draw = require("PIL.ImageDraw", extra="report")
    font = require("PIL.ImageFont", extra="report").load_default(22)
    margin, line = 20, 40
    width = max(image.width for _, image in rows) + 2 * margin
    height = sum(image.height + line for _, image in rows) + margin
    page = pil.new("L", (width, height), 255)
    top = 0
    for title, image in rows:
        draw.Draw(page).text((margin + 8, top + 10), title, fill=90, font=font)
        page.paste(image, (margin, top + line))
        top += image.height + line
    return page
