"""What goes over the wire arrives, is counted, and differentiates; when a rank fails all say which and where."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from foci.core.errors import RankError
from foci.core.world import Lost, Raised, World
from foci.parallel.exchange import Doing, all_gather, all_reduce, all_to_all, gather, replicated, shift, swap
from foci.parallel.group import Group


def here() -> Group:
    return Group.of(dist.group.WORLD)


def block(rank: int) -> list[torch.Tensor]:
    """Blocks of unequal sizes, odd numbers of bytes, and none at all on rank 0."""
    return [torch.full((3, rank), float(rank)), torch.full((rank,), rank, dtype=torch.bfloat16)]


def rotate(by: int) -> int:
    group = here()
    blocks = block(group.rank)
    with Doing(group, "attention", "forward") as doing:
        for doing.step in range(1, group.size + 1):
            source = (group.rank - by * doing.step) % group.size
            blocks = shift(blocks, [each.shape for each in block(source)], by, doing).wait()
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(blocks, block(source), strict=True))
    return group.traffic.bytes


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("by", [1, -1, 2])
def test_blocks_go_round(worlds: Callable[[int], World], size: int, by: int) -> None:
    counted = worlds(size).run(rotate, by)
    if by != 2:  # every block was once on every rank, and left each
        assert counted == [sum(14 * rank for rank in range(size)) * (size > 1)] * size


def collect() -> None:
    group = here()
    n, r = group.size, group.rank
    with Doing(group, "attention") as doing:
        swapped = all_to_all([torch.full((r, to), float(r)) for to in range(n)], [(s, r) for s in range(n)], doing)
        assert all(torch.equal(each, torch.full((s, r), float(s))) for s, each in enumerate(swapped))
        gathered = all_gather(torch.full((r,), r), [(s,) for s in range(n)], doing)
        assert all(torch.equal(each, torch.full((s,), s)) for s, each in enumerate(gathered))
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            total = all_reduce(torch.arange(5, dtype=dtype) * (r + 1), doing)
            assert torch.equal(total, torch.arange(5, dtype=dtype) * (n * (n + 1) // 2))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives(worlds: Callable[[int], World], size: int) -> None:
    worlds(size).run(collect)


def differentiate() -> None:
    group = here()
    n, r = group.size, group.rank
    torch.manual_seed(r)
    parts = [torch.randn(2, to + 1, dtype=torch.float64, requires_grad=True) for to in range(n)]
    swapped = swap(parts, [(2, r + 1)] * n, group, "attention")
    weights = [torch.full_like(each, 1.0 + 10 * r + s) for s, each in enumerate(swapped)]
    grads = torch.autograd.grad(sum((a * b).sum() for a, b in zip(swapped, weights, strict=True)), parts)
    assert all(torch.equal(grad, torch.full_like(grad, 1.0 + 10 * to + r)) for to, grad in enumerate(grads))

    x = torch.randn(r + 1, dtype=torch.float64, requires_grad=True)
    gathered = gather(x, [(s + 1,) for s in range(n)], group, "attention")
    (grad,) = torch.autograd.grad(sum((each * (r + 1)).sum() for each in gathered), x)
    assert torch.equal(grad, torch.full_like(x, n * (n + 1) / 2))

    y = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad((replicated(y, group, "attention") * (r + 1)).sum(), y)
    assert torch.equal(grad, torch.full_like(y, n * (n + 1) / 2))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients(worlds: Callable[[int], World], size: int) -> None:
    worlds(size).run(differentiate)


def fail(rank: int, step: int, how: str) -> None:
    """A ring in which one rank fails at one step; every rank must still hear all of it."""
    group = here()

    def attend() -> None:
        if (group.rank, doing.step) == (rank, step):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such key")

    blocks = block(group.rank)
    with Doing(group, "attention", "forward") as doing:
        for doing.step in range(group.size):
            source = (group.rank - doing.step - 1) % group.size
            pending = shift(blocks, [each.shape for each in block(source)], 1, doing)
            doing.work(attend)
            blocks = pending.wait()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_rank_that_raises_is_named_on_all(worlds: Callable[[int], World], size: int, place: str) -> None:
    rank, step = (0, 0) if place == "first" else (size - 1, size - 1)
    outcomes = worlds(size).outcomes(fail, rank, step, "raised")
    expected = f"attention: rank {rank} failed in step {step} of the forward: ValueError: no such key"
    assert [str(each.error) for each in outcomes] == [expected] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_that_dies_is_named_by_all_others_at_once(worlds: Callable[[int], World], size: int) -> None:
    start = time.monotonic()
    outcomes = worlds(size).outcomes(fail, 1, 1, "killed")
    assert time.monotonic() - start < 10  # the group's timeout is 20 s
    assert isinstance(outcomes.pop(1), Lost)
    for each in outcomes:
        assert isinstance(each, Raised) and isinstance(each.error, RankError)
        assert (each.error.rank, each.error.direction) == (1, "forward")
        assert "it is gone" in str(each.error)
