"""A link's seconds, who shares a node, and presets that are a maker's figures."""

from __future__ import annotations

import pytest

from foci.parallel.links import ATTAINED_COMPUTE, ATTAINED_LINK, SHEETS, Compute, Link, Links, preset

NEAR, FAR = Link(1e-6, 1e9), Link(1e-3, 1e6)


def test_a_message_costs_its_latency_and_its_bytes() -> None:
    assert NEAR.seconds(1e9) == pytest.approx(1.000001)
    assert NEAR.seconds(0) == 0


def test_who_shares_a_node() -> None:
    links = Links(NEAR, NEAR, node=8, far=FAR)
    assert [links.inside(*each) for each in ((8, 1), (4, 2), (4, 4), (16, 1), (2, 8))] == [8, 4, 2, 8, 1]
    assert Links(NEAR, NEAR).inside(1000, 1) == 1000


def test_a_ring_is_as_slow_as_its_slowest_hop_and_an_exchange_as_its_share_outside() -> None:
    links = Links(NEAR, NEAR, node=4, far=FAR)
    assert links.shifting(1e6, 4, 1) == NEAR.seconds(1e6)
    assert links.shifting(1e6, 8, 1) == FAR.seconds(1e6) == links.shifting(1e6, 2, 4)
    # Of 7 others 4 are outside the node.
    assert links.swapping(7e6, 8, 1) == pytest.approx(FAR.seconds(4e6))
    assert links.swapping(7e6, 4, 1) == NEAR.seconds(7e6)


@pytest.mark.parametrize("name", SHEETS)
def test_presets_are_the_makers_figures_at_one_stated_share(name: str) -> None:
    links, compute = preset(name, node=8)
    sheet = SHEETS[name]
    assert compute.rate == compute.dense == sheet.flops * ATTAINED_COMPUTE
    assert links.shift.bandwidth == sheet.link * ATTAINED_LINK and links.far is not None
    assert sheet.of in links.source and "datasheet" in compute.source
    assert preset(name)[0].node is None


def test_what_does_not_fit_is_named() -> None:
    for wrong, name in (
        (lambda: Link(-1, 1), "latency"), (lambda: Link(0, 0), "bandwidth"), (lambda: preset("b300"), "b300"),
        (lambda: Links(NEAR, NEAR, node=8), "far"), (lambda: Links(NEAR, NEAR, overlap=1.5), "overlap"),
        (lambda: Links(NEAR, NEAR, node=0, far=FAR), "node"), (lambda: Links(NEAR, NEAR, agree=-1), "agree"),
        (lambda: preset("h100", node=1.5), "node must be a whole number, at least 1, got 1.5"),
        (lambda: Compute(0, 1, 1, 1), "rate"), (lambda: Compute(1, 1, 1, 1, call=-1), "call"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            wrong()
    for link, name in (
        (lambda: Links((1, 2), NEAR), "shift"), (lambda: Links(NEAR, None), "swap"),
        (lambda: Links(NEAR, NEAR, node=2, far=3), "far"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"^Links: {name} must be a Link, got"):
            link()
