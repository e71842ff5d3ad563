"""The pictures of records: every measured point is drawn, refusals are said, the page is whole."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from foci.bench.ceilings import Ceilings
from foci.bench.plot import colours, page, rate, roofline
from foci.bench.record import Record

TOP = Ceilings(1e12, 1e11)
ONE = Record(
    "softmax", "a < b", "foci", "float32", "cpu", "forward", median=2e-3, fast=1e-3, slow=3e-3, flops=1e9, bytes=1e6,
    floor=1e-3, peak=1 << 20, machine="a machine", versions="torch 2", date="today",
)  # fmt: skip
RECORDS = [
    ONE,
    replace(ONE, candidate="theirs", median=4e-3),
    replace(ONE, candidate="other", median=None, refused="wrong: 3 of the error budget"),
    replace(ONE, stage="both", alone=1.5e-3),
]


def test_a_roofline_has_a_dot_for_each_measured_forward() -> None:
    tree = ElementTree.fromstring(roofline(RECORDS, TOP))
    titles = [t.text for t in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["softmax a < b foci", "softmax a < b theirs"]


def test_faster_stands_higher_and_nothing_stands_above_the_picture() -> None:
    tree = ElementTree.fromstring(roofline(RECORDS, TOP))
    circles = [c for c in tree.iter("{http://www.w3.org/2000/svg}circle") if len(c)]
    heights = [float(c.get("cy", "nan")) for c in circles]
    assert 0 < heights[0] < heights[1] < 460


def test_the_page_says_everything() -> None:
    text = page(RECORDS, TOP)
    for words in ("a machine", "torch 2", "2.000 ms", "1.500 ms", "wrong: 3 of the error budget", "a &lt; b", "both"):
        assert words in text
    assert text.count("<tr>") == len(RECORDS)
    assert text.count("of the ceiling") == 1  # the names of the columns, for the one problem


def test_passes_stand_in_the_order_in_which_they_run() -> None:
    text = page([replace(ONE, stage=stage) for stage in ("both", "backward", "forward")], TOP)
    assert text.index("<td>forward") < text.index("<td>backward") < text.index("<td>both")


def test_no_records_make_an_empty_picture() -> None:
    assert "<svg" in roofline([], TOP) and "</html>" in page([], TOP)


def test_rates() -> None:
    said = [rate(x) for x in (1e15, 1.5e12, 2e9, 3e6, 4e3)]
    assert said == ["1 PFLOP/s", "1.5 TFLOP/s", "2 GFLOP/s", "3 MFLOP/s", "4 kFLOP/s"]


def test_no_two_candidates_of_a_run_have_one_colour() -> None:
    """On a GPU there are twelve."""
    found = colours([replace(ONE, candidate=f"peer {place}") for place in range(14)])
    assert len(set(found.values())) == 14
