"""The bytes that a rank counts are those of the formula: every wrapper and operator, forward and backward, uneven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foci.core.world import World
from foci.parallel.balance import cut, length, pieces
from foci.parallel.group import Group
from foci.parallel.handoff import handoff
from foci.parallel.ring import ring
from foci.parallel.split import Split
from foci.parallel.ulysses import ulysses
from foci.parallel.wire_bytes import Wire, distances, pairs, places, sent, tokens
from foci.parallel.workload import Shape

Worlds = Callable[[int], World]
Counts = dict[tuple[int, int], tuple[int, int]]


def groups_of(split: Split) -> tuple[Group, Group, tuple[int, int]]:
    """This rank's Ulysses group, its ring, and its place in both."""
    names = "ulysses", "ring"
    mesh = split.mesh()
    u, r = (mesh.get_local_rank(name) for name in names)
    return Group.of(mesh["ulysses"]), Group.of(mesh["ring"]), (u, r)


def held(shape: Shape, split: Split, place: tuple[int, int], count: int) -> torch.Tensor:
    """The positions of this rank, of so many."""
    u, r = place
    lengths = tokens(count, split)[r]
    mine = cut(pieces(split.order, count, split.ring, r), sum(lengths[:u]), sum(lengths[: u + 1]))
    assert length(mine) == lengths[u]
    return torch.tensor([p for piece in mine for p in piece.positions], dtype=torch.int64)


def counted(shape: Shape, split: Split) -> tuple[tuple[int, int], int, int]:
    outer, inner, place = groups_of(split)
    op: Any = shape.function.function
    if split.ring > 1:
        op = handoff(op, inner) if split.handoff else ring(op, inner, split.order)
    if split.ulysses > 1:
        op = ulysses(op, outer)
    whole, keywords = shape.inputs("cpu")
    names = list(shape.function.spec.call._fields)[: len(whole)]

    def local(name: str, tensor: torch.Tensor) -> torch.Tensor:
        # A decay [B, T, H] is bound with one dimension more; what a user gives has its tokens in place 1.
        dim = 1 if name == "log_decay" else shape.function.letters[name].token(tensor)
        if dim is not None:
            tensor = tensor.index_select(dim, held(shape, split, place, tensor.shape[dim]))
        return tensor.detach().requires_grad_()

    args = [local(name, tensor) for name, tensor in zip(names, whole, strict=True)]
    options = {n: local(n, x) if isinstance(x, torch.Tensor) else x for n, x in keywords.items()}
    found = op(*args, **options)
    out = found if isinstance(found, torch.Tensor) else found[0]
    forward = outer.traffic.bytes + inner.traffic.bytes
    out.sum().backward()
    return place, forward, outer.traffic.bytes + inner.traffic.bytes - forward


CASES = [
    ("attention", Split(3), {"T": 17, "H": 4, "G": 2}),
    ("attention", Split(2), {"T": 9, "S": 14, "H": 3, "V": 6}),
    ("attention", Split(4), {"T": 3, "H": 2}),
    ("linear_attention", Split(3), {"T": 17, "H": 4, "G": 2}),
    ("delta_rule", Split(2), {"T": 9, "H": 4}),
    ("scan", Split(3), {"T": 10, "H": 7}),
    ("selective_scan", Split(2), {"T": 9, "H": 5}),
    ("attention", Split(1, 3, "zigzag"), {"T": 17, "H": 4, "G": 2, "causal": True}),
    ("attention", Split(1, 4, "stripe"), {"T": 3, "H": 2, "V": 6, "causal": True}),
    ("attention", Split(1, 3), {"T": 9, "S": 14, "H": 2}),
    ("attention", Split(1, 4), {"T": 24, "H": 2, "causal": True, "window": 4}),
    ("attention", Split(2, 2, "zigzag"), {"T": 19, "H": 3, "causal": True}),
    ("attention", Split(2, 2, inner="ring"), {"T": 19, "H": 6, "G": 3}),
    ("linear_attention", Split(1, 3, handoff=True), {"T": 17, "H": 4, "G": 2}),
    ("delta_rule", Split(1, 4, handoff=True), {"T": 3, "H": 2, "V": 6}),
    ("scan", Split(1, 3, handoff=True), {"T": 10, "H": 7}),
    ("selective_scan", Split(1, 2, handoff=True), {"T": 9, "H": 5}),
    ("delta_rule", Split(2, 2, handoff=True), {"T": 11, "H": 3}),
    ("selective_scan", Split(2, 2, handoff=True), {"T": 9, "H": 5}),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{CASES[n][1]}".replace(" ", "-"))
def test_a_rank_sends_what_the_formula_says(worlds: Worlds, number: int) -> None:
    operator, split, sizes = CASES[number]
    dtype = (torch.float32, torch.bfloat16)[number % 2]  # what is summed travels in float32 whatever the dtype
    shape = Shape(**({"K": 4, "B": 2} | sizes), operator=operator, dtype=dtype, backward=True)
    found = {place: passes for place, *passes in worlds(split.world).run(counted, shape, split)}
    for place in places(split):
        told = [sent(shape, split, place, backward=backward).total for backward in (False, True)]
        assert found[place] == told, place
    assert set(found) == set(places(split))


def test_without_ranks_nothing_is_sent() -> None:
    for backward in (False, True):
        assert sent(Shape(9, 2, 4), Split(), backward=backward) == Wire()


@pytest.mark.parametrize("rank", [1, (5, 7), (-1, -1), (0,), (0, 1.0), None])
def test_a_rank_is_a_pair_of_the_split_s(rank: Any) -> None:
    with pytest.raises(ValueError, match=r"^sent: rank must be a pair, .* of 2 x 4 ranks, got"):
        sent(Shape(64, 2, 4), Split(2, 4), rank)


def test_a_window_keeps_blocks_at_home() -> None:
    far = sent(Shape(64, 2, 4, causal=True), Split(1, 8), (0, 7))
    near = sent(Shape(64, 2, 4, causal=True, window=7), Split(1, 8), (0, 7))
    assert len(far.blocks) == 7 and near.blocks == far.blocks[:1]


def test_calls_of_a_step_are_those_of_the_plan() -> None:
    """Without a mask one; causal zigzag three at home (two diagonals and the early keys of the late queries)."""
    full, causal = Shape(64, 2, 4), Shape(64, 2, 4, causal=True)
    assert all(pairs(full, order, 4) == (1, 1, 1, 1) for order in ("plain", "zigzag", "stripe"))
    assert pairs(causal, "plain", 4) == pairs(causal, "stripe", 4) == (1, 1, 1, 1)
    assert pairs(causal, "zigzag", 4)[0] == 3
    for ranks in (4, 16):
        assert len(pairs(causal, "zigzag", ranks)) == len(distances(causal, "zigzag", ranks)) == ranks
