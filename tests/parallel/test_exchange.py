"""What goes over the wire arrives, is counted, and differentiates; when a rank fails all say which and where."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import foci
from foci.core.errors import RankError
from foci.core.world import Lost, Raised, World
from foci.parallel.balance import shard
from foci.parallel.exchange import (
    Session,
    all_gather,
    all_reduce,
    all_to_all,
    divide_gradient,
    exchange,
    gather,
    shift,
    sum_gradient,
    swap,
)
from foci.parallel.group import RAISED, STATUS, Failure, Group
from foci.parallel.joint import joint
from foci.parallel.ring import ring


def here() -> Group:
    return Group.of(dist.group.WORLD)


def block(rank: int) -> list[torch.Tensor]:
    """Blocks of unequal sizes, odd numbers of bytes, and none at all on rank 0."""
    return [torch.full((3, rank), float(rank)), torch.full((rank,), rank, dtype=torch.bfloat16)]


def rotate(by: int) -> int:
    group = here()
    blocks = block(group.rank)
    with Session(group, "attention", "forward") as session:
        for session.step in range(1, group.size + 1):
            source = (group.rank - by * session.step) % group.size
            blocks = shift(blocks, [each.shape for each in block(source)], by, session).wait()
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
    with Session(group, "attention") as session:
        before = group.traffic.bytes, group.traffic.messages, group.traffic.control
        swapped = all_to_all([torch.full((r, to), float(r)) for to in range(n)], [(s, r) for s in range(n)], session)
        counted = group.traffic.bytes, group.traffic.messages, group.traffic.control
        sent = 4 * r * sum(to for to in range(n) if to != r), n - 1, (n - 1) * STATUS
        assert [now - then for now, then in zip(counted, before, strict=True)] == list(sent)
        assert all(torch.equal(each, torch.full((s, r), float(s))) for s, each in enumerate(swapped))
        gathered = all_gather(torch.full((r,), r), [(s,) for s in range(n)], session)
        assert all(torch.equal(each, torch.full((s,), s)) for s, each in enumerate(gathered))
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            mine = torch.arange(5, dtype=dtype) * (r + 1)
            total = all_reduce(mine, session)
            assert torch.equal(total, torch.arange(5, dtype=dtype) * (n * (n + 1) // 2))
            total += 1  # which is no view of it
            assert torch.equal(mine, torch.arange(5, dtype=dtype) * (r + 1)), "what was given stays"
        half = torch.full((3,), 1.0 if r else 256.0, dtype=torch.bfloat16)  # whose sums would lose what is small
        assert torch.equal(all_reduce(half, session), torch.full((3,), 255.0 + n).bfloat16())
        together = exchange([[half, torch.full((to,), float(r))] for to in range(n)], [[(3,), (r,)]] * n, session)
        assert all(torch.equal(each[1], torch.full((r,), float(s))) for s, each in enumerate(together))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives(worlds: Callable[[int], World], size: int) -> None:
    worlds(size).run(collect)


def test_the_first_failure_that_is_heard_of_counts() -> None:
    """Where and when it was, if that is known; else here and now."""
    blamed = []

    def blame(rank: int, error: Exception, step: int | None, direction: str | None) -> Failure:
        blamed.append((rank, step, direction))
        return Failure(RAISED, rank, step, direction, str(error))

    def session() -> Session:
        made = Session(SimpleNamespace(root_cause=blame), "attention", "forward")  # type: ignore[arg-type]
        made.step = 3
        return made

    vague, known = Failure(RAISED, 1, None, None, "vague"), Failure(RAISED, 2, 7, "backward", "known")
    for first, then, right in ((vague, known, vague._replace(step=3, direction="forward")), (known, vague, known)):
        hears = session()
        for each in (None, first, then):
            hears.record_failure(each)
        assert hears.failure == right
        hears.record_lost_rank(4, RuntimeError("gone"))
        assert hears.failure == right and hears.lost_ranks == {4} and blamed == []
    loses = session()
    loses.record_lost_rank(4, RuntimeError("gone"))
    assert blamed == [(4, 3, "forward")] and loses.failure == Failure(RAISED, 4, 3, "forward", "gone")


def test_an_error_of_the_only_rank_is_its_own() -> None:
    error = ValueError("mine")

    def fails() -> None:
        raise error

    with (
        pytest.raises(ValueError, match="mine") as told,
        Session(SimpleNamespace(size=1, host=True, rank=0, ranks=[0]), "attention") as session,
    ):  # type: ignore[arg-type]
        assert session.compute(fails) is None and session.compute(len, "never") is None
    assert told.value is error


def test_a_share_of_a_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    shared = divide_gradient(x, 4)
    assert shared.equal(x)
    assert torch.equal(torch.autograd.grad(shared.sum(), x)[0], torch.full((3,), 0.25))


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
    (grad,) = torch.autograd.grad((sum_gradient(y, group, "attention") * (r + 1)).sum(), y)
    assert torch.equal(grad, torch.full_like(y, n * (n + 1) / 2))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients(worlds: Callable[[int], World], size: int) -> None:
    worlds(size).run(differentiate)


def keep_what_is_the_users(size: int) -> torch.Tensor:
    """A tensor that lies in its storage just as one that arrived would lie in its message."""
    group = here()
    storage = torch.arange(float(size + 128))
    with Session(group, "attention") as session:
        (first,) = shift([storage[:size]], [(size,)], 1, session).wait()
        first *= 2  # what arrived may be written to, and leaves as it then is
        (second,) = shift([first], [(size,)], 1, session).wait()
        assert torch.equal(second, torch.arange(float(size)) * 2)
        (third,) = shift([storage[:size]], [(size,)], 1, session).wait()  # beside one that arrived
        assert torch.equal(third, torch.arange(float(size)))
    return storage


def test_a_users_tensor_is_not_written_to(worlds: Callable[[int], World]) -> None:
    for storage in worlds(2).run(keep_what_is_the_users, 128):
        assert torch.equal(storage, torch.arange(256.0))


def leave_in_another_form() -> None:
    """Of two tensors that came in one message some, in another order, turned, or beside one that lies as the second."""
    group = here()
    beside = torch.arange(32.0)[16:].view(4, 4)

    def made(rank: int) -> list[torch.Tensor]:
        return [torch.arange(16.0).view(4, 4) + 100 * rank, torch.arange(16.0).view(4, 4) - 100 * rank]

    for form in (
        lambda x, y: [x],
        lambda x, y: [y],
        lambda x, y: [y, x],
        lambda x, y: [x, x],
        lambda x, y: [x.T, y],
        lambda x, y: [x[:2], y],
        lambda x, y: [x, beside],
        lambda x, y: [x, y],
    ):
        with Session(group, "attention") as session:
            came = shift(made(group.rank), [(4, 4)] * 2, 1, session).wait()
            before = [each.clone() for each in came]
            sent = form(*came)
            found = shift(sent, [each.shape for each in sent], 1, session).wait()
        for got, right in zip(found, form(*made((group.rank - 2) % group.size)), strict=True):
            assert torch.equal(got, right)
        assert all(torch.equal(each, kept) for each, kept in zip(came, before, strict=True))


def test_what_arrived_may_leave_in_another_form(worlds: Callable[[int], World]) -> None:
    worlds(3).run(leave_in_another_form)


def fail(rank: int, step: int, how: str) -> None:
    """A ring in which one rank fails at one step, before the first or after the last; all must hear of it."""
    group = here()

    def attend() -> None:
        if (group.rank, session.step) == (rank, step):
            if how == "raised":
                raise ValueError("no such key")
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])

    blocks = block(group.rank)
    with Session(group, "attention", "forward") as session:
        for session.step in range(-1, group.size):
            if session.step < 0:
                session.compute(attend)
                session.agree({"dtype": "float32"})
                continue
            source = (group.rank - session.step - 1) % group.size
            pending = shift(blocks, [each.shape for each in block(source)], 1, session)
            session.compute(attend)
            blocks = pending.wait()


def wake_after(rank: int, step: int) -> None:
    """One rank stops; rank 0 wakes it when all others have raised."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid of {dist.get_rank()}", str(os.getpid()))
    pids = [int(store.get(f"pid of {other}")) for other in range(dist.get_world_size())]  # waits longer than the group
    try:
        fail(rank, step, "stopped")
    finally:
        raised = store.add("raised", 1)
        if dist.get_rank() == 0:
            while raised < len(pids) - 1:
                time.sleep(0.05)
                raised = store.add("raised", 0)
            os.kill(pids[rank], signal.SIGCONT)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("place", ["before", "first", "last"])
def test_a_rank_that_raises_is_named_on_all(worlds: Callable[[int], World], size: int, place: str) -> None:
    rank, step = {"before": (1, -1), "first": (0, 0), "last": (size - 1, size - 1)}[place]
    outcomes = worlds(size).outcomes(fail, rank, step, "raised")
    where = f"in step {step} of the forward" if step >= 0 else "in the forward"
    expected = f"attention: rank {rank} failed {where}: ValueError: no such key"
    assert [str(each.error) for each in outcomes] == [expected] * size


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("step", [-1, 0, 1])
def test_a_rank_that_dies_is_named_by_all_others_at_once(worlds: Callable[[int], World], size: int, step: int) -> None:
    outcomes = worlds(size).outcomes(fail, 1, step, "killed")
    assert isinstance(outcomes.pop(1), Lost)
    for each in outcomes:
        assert isinstance(each, Raised) and isinstance(each.error, RankError)
        assert each.error.rank == 1
        assert "it is gone" in str(each.error)  # after the timeout it would be silent


@pytest.mark.parametrize("step", [-1, 1])
def test_a_rank_that_falls_silent_is_named_by_all_even_itself(step: int) -> None:
    with World(4, timeout=6.0) as world:
        for each in world.outcomes(wake_after, 2, step):
            assert isinstance(each, Raised) and isinstance(each.error, RankError)
            assert each.error.rank == 2
            assert "did not answer within the group's timeout" in str(each.error)


def fail_alike() -> None:
    group = here()
    with Session(group, "attention", "forward") as session:
        session.compute(int, f"{group.rank} is no number")
        session.agree({})


def test_where_every_rank_fails_by_itself_each_raises_its_own(worlds: Callable[[int], World]) -> None:
    for rank, each in enumerate(worlds(3).outcomes(fail_alike)):
        assert isinstance(each.error, ValueError)
        assert f"{rank} is no number" in str(each.error)


def fail_outside() -> None:
    """Between exchanges, where no `work` stands by."""
    group = here()
    with Session(group, "attention", "forward") as session:
        if group.rank == 0:
            raise ValueError("a slip")
        all_reduce(torch.ones(3), session)


def test_a_rank_that_leaves_says_why(worlds: Callable[[int], World]) -> None:
    first, *others = worlds(3).outcomes(fail_outside)
    assert isinstance(first.error, ValueError)
    for each in others:
        assert str(each.error) == "attention: rank 0 failed in the forward: ValueError: a slip"


def fail_in_backward(how: str) -> str:
    group = here()
    x = torch.ones(group.size, 3, requires_grad=True)
    swapped = swap(list(x.unbind()), [(3,)] * group.size, group, "attention")

    def hook(grad: torch.Tensor) -> None:
        if group.rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank == 1:
            raise ValueError("no gradient today")

    for each in swapped:
        each.register_hook(hook)
    if how == "between" and group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.stack(swapped).sum().backward()
    return "well"


@pytest.mark.parametrize("how", ["killed", "between", "raised"])
def test_a_backward_that_a_rank_does_not_reach_names_it(worlds: Callable[[int], World], how: str) -> None:
    outcomes = worlds(3).outcomes(fail_in_backward, how)
    assert isinstance(outcomes.pop(1), Raised if how == "raised" else Lost)
    for each in outcomes:
        assert isinstance(each.error, RankError)
        assert (each.error.rank, each.error.direction) == (1, "backward")
        assert "it is gone" in str(each.error)


def fail_in_half() -> str:
    """Two groups at once, of ranks that are not neighbours; a rank of one fails."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = Group.of(halves[dist.get_rank() % 2])
    with Session(group, "attention", "forward") as session:
        session.step = 0
        (other,) = shift([torch.tensor([dist.get_rank()])], [(1,)], 1, session).wait()
        session.compute(int, "no number" if dist.get_rank() == 3 else "1")
    return f"{dist.get_rank()} met {other.item()}"


def test_a_failure_names_the_rank_of_the_world_and_stays_in_its_group(worlds: Callable[[int], World]) -> None:
    outcomes = worlds(4).outcomes(fail_in_half)
    assert (outcomes[0], outcomes[2]) == ("0 met 2", "2 met 0")
    for rank in (1, 3):
        error = outcomes[rank].error
        assert isinstance(error, RankError)
        assert str(error).startswith("attention: rank 3 failed in step 0 of the forward: ValueError: invalid literal")


def attended(device: str) -> list[torch.Tensor]:
    """A ring under a mask of documents, and text beside an image, where the program makes tensors elsewhere."""
    group, offsets, lengths = dist.group.WORLD, torch.tensor([0, 3, 9]), torch.tensor([10])
    x = torch.randn(1, 9, 2, 4, requires_grad=True)
    text = torch.randn(1, 2, 2, 4)
    with torch.device(device):
        mine = shard(x, group)
        out = ring(foci.attention, group)(mine, mine, mine, mask=foci.Packed(offsets) & foci.Window(2, 1))
        both = joint(ring(foci.attention, group))(out, out, out, text, text, text, mask=foci.Lengths(lengths))
        torch.cat(both, 1).square().sum().backward()
    assert x.grad is not None
    return [each.detach() for each in (*both, x.grad)]


@pytest.mark.parametrize("size", [1, 2])
def test_messages_are_the_host_s_whatever_the_default_device(worlds: Callable[[int], World], size: int) -> None:
    torch.testing.assert_close(worlds(size).run(attended, "meta"), worlds(size).run(attended, "cpu"), rtol=0, atol=0)
