"""Links and compute are measured on a real group, come out the same on every rank, and say where they are from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from foci.core.world import World
from foci.parallel.links import Compute, Links
from foci.parallel.measure import measure_compute, measure_links
from foci.parallel.workload import Shape

Worlds = Callable[[int], World]


def links_here(size: int) -> Links:
    return measure_links(dist.group.WORLD, size=size, rounds=3)


def links_of_nodes() -> Links:
    """Two nodes of two ranks, told to be nodes."""
    pair = dist.new_group([0, 1]), dist.new_group([2, 3])
    return measure_links(dist.group.WORLD, node=pair[dist.get_rank() // 2], size=2**16, rounds=3)


def compute_here(shape: Shape) -> Compute:
    return measure_compute(shape, dist.group.WORLD, tokens=32, rounds=3)


def refused(kind: str) -> str:
    with pytest.raises(ValueError) as caught:
        measure_links(dist.group.WORLD)
    return str(caught.value)


def test_links_are_the_same_value_on_every_rank_and_grow_with_the_message(worlds: Worlds) -> None:
    found = worlds(3).run(links_here, 2**18)
    links = found[0]
    assert links.node is None and links.far is None
    assert 0 <= links.overlap <= 1
    for link in (links.shift, links.swap):
        assert 0 < link.latency < 1
        assert link.seconds(2**20) > link.seconds(2**10) > link.latency
    # The slowest rank's time counts, and all know it: what each rank plans with is the same.
    assert {(each.shift, each.swap, each.agree, each.overlap) for each in found} == {
        (links.shift, links.swap, links.agree, links.overlap)
    }
    assert "3 ranks" in links.source


def test_ranks_of_a_node_are_measured_apart_from_the_way_between_nodes(worlds: Worlds) -> None:
    links = worlds(4).run(links_of_nodes)[0]
    assert links.node == 2 and links.far is not None
    assert links.inside(4, 1) == 2 and links.inside(2, 2) == 1


def test_compute_of_each_operator(worlds: Worlds) -> None:
    for operator in ("attention", "linear_attention"):
        first, second = worlds(2).run(compute_here, Shape(64, 2, 8, operator=operator, dtype=torch.float32))
        assert first == second
        assert first.rate > 0 and first.dense > 0 and first.stream > 0 and first.memory > 2**20
        assert operator in first.source


def test_compute_of_one_process() -> None:
    shape = Shape(32, 2, 8, operator="selective_scan", dtype=torch.float32)
    assert measure_compute(shape, tokens=16, rounds=1).rate > 0


def test_a_lone_rank_has_no_links(worlds: Worlds) -> None:
    assert "two ranks" in worlds(1).run(refused, "lone")[0]
