"""Orders put every position on one rank; shards go out and come back, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from foci.core.errors import Disagreement, RankError
from foci.core.world import World
from foci.parallel import balance
from foci.parallel.balance import Piece, cut, length, pieces, positions, shard, unshard
from foci.parallel.group import Group

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


def test_what_counts_tokens_and_dimensions_is_whole(worlds: Callable[[int], World]) -> None:
    worlds(1).run(counted)


def counted() -> None:
    group = dist.group.WORLD
    for T in (True, 8.0, "8", -1):
        with pytest.raises(ValueError, match=f"^positions: T must be a whole number, at least 0, got {T!r}"):
            balance.positions(T, group)  # type: ignore[arg-type]
    for function in (shard, unshard):
        for dim in ("a", 1.0, True, 3):
            with pytest.raises(ValueError, match=f"{function.__name__}: dim must be one of the 3 .*, got {dim!r}"):
                function(torch.zeros(1, 4, 2), group, dim=dim)


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


class Averaged(torch.autograd.Function):
    """What data parallelism does: every rank takes the same loss, and the sum of all of them is divided again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] / dist.get_world_size()


def cubes(x: torch.Tensor, group: Any, order: balance.Order) -> torch.Tensor:
    mine = shard(Averaged.apply(x), group, order)
    return unshard(mine**3, group, order)


def slope(x: torch.Tensor, group: Any, order: balance.Order) -> torch.Tensor:
    (found,) = torch.autograd.grad(cubes(x, group, order).sum(), x, create_graph=True)
    return found


def check_gradients(order: balance.Order, T: int, shape: tuple[int, int] | None) -> None:
    group = dist.group.WORLD if shape is None else dist.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    x = torch.randn(1, T, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cubes, (x, group, order))
    assert torch.autograd.gradcheck(slope, (x, group, order))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_right_to_the_second_order(
    worlds: Callable[[int], World], size: int, order: balance.Order
) -> None:
    worlds(size).run(check_gradients, order, 5, None)


def placed(x: torch.Tensor, order: balance.Order) -> torch.Tensor:
    group = dist.group.WORLD
    mine = shard(x.sin(), group, order)
    return unshard(mine * positions(x.shape[1], group, order)[:, None] + mine**2, group, order).cos()


def check_compiled(order: balance.Order) -> None:
    x = torch.randn(1, 5, 2, dtype=torch.float64, requires_grad=True)
    out, expected = torch.compile(placed, backend="aot_eager")(x, order), placed(x, order)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)))


@pytest.mark.parametrize("order", ORDERS)
def test_a_model_round_them_compiles(worlds: Callable[[int], World], order: balance.Order) -> None:
    """Dynamo cannot look into a process group, and had ended with an error of its own."""
    worlds(2).run(check_compiled, order)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_on_a_mesh(worlds: Callable[[int], World], order: balance.Order) -> None:
    worlds(4).run(check_gradients, order, 5, (2, 2))


def go_round_a_mesh(shape: tuple[int, int], order: balance.Order, T: int) -> list[int]:
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ulysses", "ring"))
    x = torch.randn(2, T, 3, dtype=torch.float64)
    mine = shard(x, mesh, order)
    places = balance.positions(T, mesh, order)
    assert torch.equal(mine, x[:, places])
    assert torch.equal(unshard(mine, mesh, order), x)
    ring, ulysses = mesh["ring"], mesh["ulysses"]
    whole = balance.positions(T, ring, order)  # what a ring rank holds, cut in runs
    start = sum(len(range(place, len(whole), shape[0])) for place in range(ulysses.get_local_rank()))
    assert torch.equal(whole[start : start + len(places)], places)
    return places.tolist()


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("order", ORDERS)
def test_a_mesh_cuts_the_ring_and_then_its_shares(
    worlds: Callable[[int], World], shape: tuple[int, int], order: balance.Order
) -> None:
    for T in (2, 24, 25):
        held = worlds(shape[0] * shape[1]).run(go_round_a_mesh, shape, order, T)
        assert sorted(place for places in held for place in places) == list(range(T))


def go_round_halves(order: balance.Order) -> None:
    """Two groups at once, each of ranks that are not the first of the world, with data of their own."""
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    odd = dist.new_group([1, 3]), dist.new_group([0, 2])
    for group, members in (
        (mesh["ring"], [rank - rank % 2, rank - rank % 2 + 1]),
        (odd[1 - rank % 2], [rank % 2, rank % 2 + 2]),
    ):
        x = torch.full((1, 7, 1), float(members[0])) + torch.arange(7.0)[None, :, None]
        assert torch.equal(unshard(shard(x, group, order), group, order), x)
        assert list(Group.of(group).ranks) == members


@pytest.mark.parametrize("order", ORDERS)
def test_groups_that_are_not_the_world(worlds: Callable[[int], World], order: balance.Order) -> None:
    worlds(4).run(go_round_halves, order)


def join_what_does_not_fit(order: balance.Order) -> None:
    unshard(torch.zeros(1, 2 + (dist.get_rank() == 1), 1), dist.group.WORLD, order)


def test_shards_that_are_not_of_one_tensor_are_refused(worlds: Callable[[int], World]) -> None:
    for each in worlds(3).outcomes(join_what_does_not_fit, "zigzag"):
        assert isinstance(each.error, ValueError)
        assert "unshard: the ranks hold [2, 3, 2] positions; order 'zigzag' of T=7 gives [3, 2, 2]" in str(each.error)


def join_other_dtypes() -> None:
    dtype = torch.float32 if dist.get_rank() else torch.float64
    unshard(torch.zeros(1, 2, 1, dtype=dtype), dist.group.WORLD)


def test_shards_of_other_dtypes_are_a_disagreement(worlds: Callable[[int], World]) -> None:
    messages = {str(each.error) for each in worlds(3).outcomes(join_other_dtypes)}
    (message,) = messages
    assert "dtype: torch.float64 on rank 0; torch.float32 on ranks 1, 2" in message


def join_what_one_rank_has_wrong(kind: str, everyone: bool) -> None:
    """Of a group, or of a mesh of groups, rank 1 alone, or every rank."""
    two = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring")) if "mesh" in kind else None
    wrong = everyone or dist.get_rank() == 1
    x = torch.zeros(1, 2, 1, dtype=torch.float64 if wrong and "dtype" in kind else torch.float32)
    order = "spiral" if wrong and "order" in kind else "plain"
    unshard(x, two or dist.group.WORLD, order, 7 if wrong and "dim" in kind else 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("dim", "ValueError: unshard: dim must be one of the 3 dimensions of x, got 7"),
        ("dim on a mesh", "ValueError: unshard: dim must be one of the 3 dimensions of x, got 7"),
        ("order", "ValueError: order must be one of 'plain', 'zigzag', 'stripe', got 'spiral'"),
        ("order on a mesh", "ValueError: order must be one of 'plain', 'zigzag', 'stripe', got 'spiral'"),
    ],
)
def test_what_one_rank_has_wrong_is_told_to_all(worlds: Callable[[int], World], kind: str, sentence: str) -> None:
    """They waited for it until the group's timeout, and heard then that it did not answer."""
    for each in worlds(4).outcomes(join_what_one_rank_has_wrong, kind, False):
        assert isinstance(each.error, RankError) and each.error.rank == 1 and sentence in str(each.error), each
    for each in worlds(4).outcomes(join_what_one_rank_has_wrong, kind, True):
        assert f"{type(each.error).__name__}: {each.error}" == sentence


def test_groups_of_a_mesh_hear_that_those_of_another_disagree(worlds: Callable[[int], World]) -> None:
    first, second, *others = worlds(4).outcomes(join_what_one_rank_has_wrong, "dtype on a mesh", False)
    assert str(first.error) == str(second.error) and isinstance(first.error, Disagreement)
    for each in others:
        assert isinstance(each.error, RankError) and "Disagreement: unshard: ranks disagree" in str(each.error), each
