"""A Split says where each rank stands, and every split of a world is there once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foci.core.world import World
from foci.parallel.split import Split, splits
from foci.parallel.workload import Rest, Shape

Worlds = Callable[[int], World]


def test_neighbours_are_the_inner_kind() -> None:
    split = Split(2, 3, inner="ulysses")
    assert split.ranks()[0].tolist() == [[0, 2, 4], [1, 3, 5]] and split.strides == (1, 2)
    split = Split(2, 3, inner="ring")
    assert split.ranks()[0].tolist() == [[0, 1, 2], [3, 4, 5]] and split.strides == (3, 1)


@pytest.mark.parametrize("inner", ["ulysses", "ring"])
def test_strides_are_how_far_apart_the_ranks_lie(inner: str) -> None:
    split = Split(3, 4, inner=inner, cfg=2)
    ranks = split.ranks()
    assert sorted(ranks.flatten().tolist()) == list(range(24))
    assert (ranks.diff(dim=1) == split.strides[0]).all() and (ranks.diff(dim=2) == split.strides[1]).all()


def test_every_split_of_a_world() -> None:
    found = list(splits(Shape(64, 8, 4), 6))
    assert {(each.ulysses, each.ring) for each in found} == {(1, 6), (2, 3), (3, 2), (6, 1)}
    assert len(set(found)) == len(found) and {each.order for each in found} == {"plain"}
    causal = list(splits(Shape(64, 8, 4, causal=True), 6))
    assert {each.order for each in causal if each.ring > 1} == {"plain", "zigzag", "stripe"}
    guided = list(splits(Shape(64, 8, 4, rest=Rest(guidance=True)), 6))
    assert {each.cfg for each in guided} == {1, 2} and all(each.world == 6 for each in guided)
    recurrent = list(splits(Shape(64, 8, 4, operator="delta_rule"), 4))
    assert {each.kind for each in recurrent} == {"handoff", "usp", "ulysses"}
    assert all(each.handoff == (each.ring > 1) for each in recurrent)


def mesh_of(split: Split, default: str = "cpu") -> tuple[tuple[str, ...], list[int]]:
    with torch.device(default):
        mesh = split.mesh()
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names, mesh.mesh.flatten().tolist()


def test_the_mesh_is_made_of_it(worlds: Worlds) -> None:
    for split in (Split(2, 2), Split(2, 2, inner="ring"), Split(2, 1, cfg=2)):
        names, ranks = worlds(4).run(mesh_of, split)[3]
        assert names == (("cfg",) if split.cfg > 1 else ()) + ("ulysses", "ring")
        assert torch.equal(torch.tensor(ranks), split.ranks().flatten())
    assert worlds(4).run(mesh_of, split, "meta") == worlds(4).run(mesh_of, split)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"ulysses": 0}, "ulysses"), ({"ulysses": 2.0}, "ulysses must be a whole number, at least 1, got 2.0"),
     ({"order": "spiral"}, "order"), ({"inner": "cfg"}, "inner"),
     ({"handoff": True, "ring": 2, "order": "zigzag"}, "plain order")],
)  # fmt: skip
def test_what_does_not_fit_is_named(wrong: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Split(**wrong)


def test_it_reads_well() -> None:
    assert str(Split()) == "one rank"
    assert str(Split(4)) == "ulysses 4"
    assert str(Split(1, 4, handoff=True)) == "handoff 4"
    assert str(Split(2, 4, "zigzag", cfg=2, inner="ring")) == "cfg 2 x ulysses 2 x ring 4 zigzag, ring ranks adjacent"
