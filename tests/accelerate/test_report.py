"""The page in a real browser: two widths, light and dark, nothing on the console, every figure equal to plan.json."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foci.accelerate.plan import CompilePlan
from foci.accelerate.report import Report, headline, scientific, stacked
from foci.accelerate.run import Accelerated
from foci.accelerate.shown import Shown
from tests.accelerate.browser import CHROMIUM, Browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def page(bert: Accelerated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything in it: pictures, text, something left, numbers left out, a compilation measured."""
    folder = tmp_path_factory.mktemp("report")
    compiled = CompilePlan(
        mode="blocks",
        sentence="12.0 s once, saves 40.0 ms a call",
        calls=400,
        cost=12.0,
        call=0.1,
        compiled_call=0.06,
        break_even=300,
        graphs=1,
        breaks=0,
        error=1e-7,
        budget=1e-5,
        graphs_two_resolutions=2,
    )
    proof = [row | {"left_out": 12} if row["where"] == "whole model" else row for row in bert.plan.proof]
    plan = dataclasses.replace(
        bert.plan,
        compile=compiled,
        proof=proof,
        skipped=[["pooler.attn", "Own </script> calls <b>nothing</b>"], ["text_encoder", "beside the transformer"]],
        demo={"sentence": "two lines", "lines_before": ["a < b"], "lines_after": ["a < b"]},
    )
    pictures = torch.rand(10, 1, 32, 32) * 2 - 1
    before, after = (Shown("images", pictures=x) for x in (pictures, pictures + 1e-6))
    Accelerated(None, plan, before, after).save(folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


def at(plan: Any, path: str) -> Any:
    """What stands in plan.json at a dotted path."""
    for step in path.split("."):
        plan = len(plan) if step == "length" else plan[int(step)] if isinstance(plan, list) else plan[step]
    return plan


@needs_browser
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_in_a_browser(page: Path, browser: Browser, width: int, scheme: str) -> None:
    browser.open(page, width, 900, scheme)
    assert browser.complaints == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelectorAll('.plot .main-svg').length") >= 3
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(paper.removeprefix("rgb(").split(",")[0]) > 128) == (scheme == "light")
    plan = json.loads((page.parent / "plan.json").read_text())
    figures = browser.evaluate(
        "[...document.querySelectorAll('[data-from]')].map(x => [x.dataset.from, x.dataset.value])"
    )
    assert len(figures) > 30
    assert {name: json.loads(value) for name, value in figures} == {name: at(plan, name) for name, _ in figures}
    assert browser.evaluate("JSON.parse(document.getElementById('plan').textContent)") == plan
    drawn = browser.evaluate("document.getElementById('plot-time').data.map(trace => trace.x)")
    expected = [[1e3 * s for s in plan["timing"][name]] for name in ("original", "changed")]
    assert [drawn[0], drawn[2]] == [pytest.approx(one) for one in expected]


@needs_browser
def test_hovering_shows_the_reasons_inside_the_window(page: Path, browser: Browser) -> None:
    for width in (1200, 390):
        browser.open(page, width, 900, "light")
        assert browser.evaluate("getComputedStyle(document.querySelector('.site .card')).display") == "none"
        browser.evaluate("document.querySelector('.site').focus()")
        box = browser.evaluate(
            "(b => [b.left, b.right])(document.querySelector('.site .card').getBoundingClientRect())"
        )
        text = browser.evaluate("document.querySelector('.site .card').innerText")
        assert 0 <= box[0] < box[1] <= width
        assert "B2 T48 H4 K16" in text and "not chunked" in text and "not reference" in text


@needs_browser
def test_colours_follow_the_system_while_the_page_is_open(page: Path, browser: Browser) -> None:
    browser.open(page, 1200, 900, "light")
    colour = "document.getElementById('plot-time').data[2].marker.color"
    light = browser.evaluate(colour)
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    until = time.monotonic() + 20
    while browser.evaluate(colour) == light:
        assert time.monotonic() < until, "the figures kept the colours of the light page"
        time.sleep(0.05)
    assert browser.complaints == []


def test_page_is_self_contained_and_escapes_what_it_is_given(page: Path) -> None:
    text = page.read_text()
    own = text.split("<script>")[0]
    assert "https://" not in own and 'src="data:image/png' in own
    assert "Own &lt;/script&gt;" in own and "<b>nothing" not in own


def test_numbers_that_the_proof_leaves_out_stand_beside_their_comparison(page: Path) -> None:
    """In the table of the worst, and in that of all."""
    text, proof = page.read_text(), json.loads((page.parent / "plan.json").read_text())["proof"]
    places = [place for place, row in enumerate(proof) if row["left_out"]]
    assert places and len(places) < len(proof)
    for place, row in enumerate(proof):
        said = f'but <span class="fig" data-from="proof.{place}.left_out" data-value="12">12</span> numbers, not finite'
        rows = [line for line in text.splitlines() if said in line]
        assert len(rows) == (2 if row["left_out"] else 0) and all(f"<td>{row['against']}</td>" in line for line in rows)


def test_headline_never_rounds_up(bert: Accelerated) -> None:
    def says(ratio: float, low: float, high: float) -> str:
        timing = bert.plan.timing | {"ratio": ratio, "ratio_low": low, "ratio_high": high}
        return headline(dataclasses.replace(bert.plan, timing=timing))

    assert "at the original's speed (1.01 ×, no difference beyond noise)" in says(1.01, 0.97, 1.05)
    assert "runs 1.10 × as fast" in says(1.10, 1.07, 1.12)
    assert "routing alone gains nothing" in says(0.9, 0.88, 0.93)


def test_numbers_as_people_write_them() -> None:
    assert [scientific(x) for x in (0.0, 1e-5, 2.74e-7)] == ["0", "10⁻⁵", "2.7·10⁻⁷"]


def test_pictures_before_after_and_difference() -> None:
    first = torch.zeros(10, 1, 32, 32)
    second = first.clone()
    second[0, 0, 3, 4] = 0.001
    plan: Any = SimpleNamespace(ranks={})
    titles = [title for title, _ in Report(plan, Shown("images", first), Shown("images", second)).pictures()]
    assert titles == ["original", "with foci", "difference, 1e+03 times enlarged"]
    rows = Report(plan, Shown("images", first), Shown("images", first)).pictures()
    assert [title for title, _ in rows] == ["original", "with foci"]
    assert stacked(rows).width > rows[0][1].width
    assert Report(plan).pictures() == []
