"""Orders put every position on one rank; shards go out and come back, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from foci.core.world import World
from foci.parallel import balance
from foci.parallel.balance import Piece, cut, length, pieces, shard, unshard

ORDERS = ("plain", "zigzag", "stripe")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_position_is_on_one_rank(order: balance.Order, size: int) -> None:
    for T in (0, 1, 2, 3, 5, 16, 17, 31, 64):
        held = [pieces(order, T, size, rank) for rank in range(size)]
        places = [place for each in held for piece in each for place in piece.positions]
        assert sorted(places) == list(range(T))
        assert all(piece.size for each in held for piece in each)
        lengths = [length(each) for each in held]
        assert max(lengths) - min(lengths) <= (2 if order == "zigzag" else 1)


def test_orders_as_they_are_drawn() -> None:
    assert [pieces("plain", 7, 3, rank) for rank in range(3)] == [[(0, 1, 3)], [(3, 1, 2)], [(5, 1, 2)]]
    assert pieces("zigzag", 12, 3, 0) == [(0, 1, 2), (10, 1, 2)]
    assert pieces("zigzag", 12, 3, 2) == [(4, 1, 4)]  # the two middle runs are neighbours
    assert pieces("stripe", 7, 3, 0) == [(0, 3, 3)]
    assert pieces("zigzag", 9, 1, 0) == pieces("stripe", 9, 1, 0) == [(0, 1, 9)]


@pytest.mark.parametrize("order", ["zigzag", "stripe"])
def test_orders_share_causal_work_evenly(order: balance.Order) -> None:
    work = [sum(t + 1 for piece in pieces(order, 64, 4, rank) for t in piece.positions) for rank in range(4)]
    assert max(work) < 1.1 * min(work)
    plain = [sum(t + 1 for piece in pieces("plain", 64, 4, rank) for t in piece.positions) for rank in range(4)]
    assert max(plain) > 5 * min(plain)


def test_cut_takes_local_positions() -> None:
    held = [Piece(0, 1, 3), Piece(20, 2, 3)]
    places = [place for piece in held for place in piece.positions]
    for start in range(7):
        for stop in range(start, 7):
            assert [p for piece in cut(held, start, stop) for p in piece.positions] == places[start:stop]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="order must be one of 'plain', 'zigzag', 'stripe', got 'ring'"):
        pieces("ring", 4, 2, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rank must be 0 to 1 \(size=2\), got 2"):
        pieces("plain", 4, 2, 2)


def goes_round(order: balance.Order, T: int, dim: int) -> None:
    group = dist.group.WORLD
    x = torch.randn(2, T, 3, dtype=torch.float64).movedim(1, dim).contiguous().requires_grad_()
    mine = shard(x, group, order, dim)
    places = balance.positions(T, group, order)
    assert torch.equal(mine, x.index_select(dim, places))
    back = unshard(mine, group, order, dim)
    assert torch.equal(back, x)
    weight = torch.randn_like(x) * (dist.get_rank() + 1)
    (grad,) = torch.autograd.grad((back * weight).sum(), x)
    dist.all_reduce(weight)  # the sum of all ranks' losses
    torch.testing.assert_close(grad, weight)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_a_tensor_goes_out_and_back(worlds: Callable[[int], World], size: int, order: balance.Order) -> None:
    for T in (1, 2, 12, 13):
        worlds(size).run(goes_round, order, T, 1)
    worlds(size).run(goes_round, order, 7, -1)
