"""Orders: every position once, shards joined again, positions said shortly; the same as in foci.parallel."""

from __future__ import annotations

import pytest
import torch

from foci.check.orders import ORDERS, cut, format_positions, join, places
from foci.parallel.balance import pieces


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 3, 12, 13, 24])
def test_every_position_is_held_once_and_where_foci_holds_it(order: str, size: int, length: int) -> None:
    parts = places(order, length, size)
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    for rank, part in enumerate(parts):
        assert part.tolist() == [at for piece in pieces(order, length, size, rank) for at in piece.positions]


def test_orders_by_example() -> None:
    assert [part.tolist() for part in places("plain", 8, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [part.tolist() for part in places("zigzag", 8, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part.tolist() for part in places("stripe", 8, 2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(ValueError, match="got 'sorted'"):
        places("sorted", 8, 2)


def test_shards_joined_are_the_whole() -> None:
    x, parts = torch.randn(2, 9, 3), places("zigzag", 9, 2)
    assert torch.equal(join(cut(x, 1, parts), 1, parts), x)
    assert join([x, x], 1, parts).shape == (2, 18, 3)  # shards of another length are laid end to end


def test_positions_as_people_write_them() -> None:
    assert format_positions(torch.tensor([3, 1, 2, 7])) == "1..3, 7"
    assert format_positions(torch.arange(0, 24, 2)) == "0, 2, 4, 6 and 8 more runs"
