"""handoff on ranks is one process: every case, output and gradient; what it refuses, and how it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import foci
from foci.core.errors import Disagreement, RankError
from foci.core.world import World
from foci.parallel.balance import shard
from foci.parallel.group import Group
from foci.parallel.handoff import handoff
from foci.parallel.ulysses import ulysses
from tests.parallel.recurrent import SPECS, errors, lengths_of

Worlds = Callable[[int], World]
SLOW = pytest.mark.slow


def worst(found: list[dict[str, dict[str, float]]]) -> tuple[float, str]:
    """The largest error of any rank, and where it is."""
    every = [
        (error, f"rank {rank}, {case}: {name}")
        for rank, cases in enumerate(found)
        for case, tensors in cases.items()
        for name, error in tensors.items()
    ]
    assert every
    return max(every, key=lambda pair: float("inf") if pair[0] != pair[0] else pair[0])


@pytest.mark.parametrize(
    ("size", "seed"),
    [(1, 0), (2, 1), (3, 0), (4, 1)] + [pytest.param(*each, marks=SLOW) for each in [(2, 0), (3, 1), (6, 1), (8, 1)]],
)
@pytest.mark.parametrize("function", SPECS)
def test_every_case_is_one_process(worlds: Worlds, function: str, size: int, seed: int) -> None:
    """Cut evenly (seed 0) or anywhere, ranks without tokens too; in float64, so that only wrong is wrong."""
    error, where = worst(worlds(size).run(errors, function, torch.float64, seed))
    assert error <= 1e-10, where


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), pytest.param(torch.float16, 5e-3, marks=SLOW)],
    ids=str,
)
@pytest.mark.parametrize("function", SPECS)
def test_every_dtype_within_the_budget_of_one_process(
    worlds: Worlds, function: str, dtype: torch.dtype, most: float
) -> None:
    """Relative RMS against float64: what one process may have, four ranks may have, and no more."""
    error, where = worst(worlds(4).run(errors, function, dtype, 1))
    assert error <= most, where


def sent(function: str, T: int, wanted: bool) -> tuple[int, int]:
    """Bytes of tensors that this rank sends forward and backward."""
    group = Group.of(dist.group.WORLD)
    H, K, V = 2, 4, 3
    n = lengths_of(T, group.size, 0)[group.rank]
    q, k = (torch.randn(1, n, H, K, requires_grad=True) for _ in range(2))
    v, beta = torch.randn(1, n, H, V), torch.rand(1, n, H)
    call = (q, k, v, beta) if function == "delta_rule" else (q, k, v)
    out, _ = handoff(getattr(foci, function), group)(*call, return_state=wanted)
    forward = group.traffic.bytes
    out.sum().backward()
    return forward, group.traffic.bytes - forward


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("function", ["linear_attention", "delta_rule"])
def test_bytes_on_the_wire(worlds: Worlds, function: str, size: int) -> None:
    """A map of states goes to every rank behind, and one of gradients to every rank before; the final state to all."""
    H, K, V = 2, 4, 3
    one = 4 * H * (K * V + (K * K if function == "delta_rule" else 1))
    counted = worlds(size).run(sent, function, 4 * size, False)
    back = [one * rank for rank in range(size - 1)] + [4 * H * K * V * (size - 1)]  # behind the last is no gradient
    assert counted == [(one * (size - 1 - rank), back[rank]) for rank in range(size)]
    final = 4 * H * K * V  # its gradient is summed: 2 (n - 1) / n of it, the shares rounded to whole numbers
    for rank, (forward, backward) in enumerate(worlds(size).run(sent, function, 4 * size, True)):
        assert forward == one * (size - 1)
        assert abs(backward - one * rank - 2 * (size - 1) / size * final) <= 8 * size


def refused(kind: str) -> None:
    group = Group.of(dist.group.WORLD)
    q = torch.randn(1, 4, 2, 4)
    op = handoff(foci.linear_attention, group)
    if kind == "dtype":
        q = q.to(torch.bfloat16 if group.rank == 1 else torch.float32)
        op(q, q, q)
    elif kind == "offsets":
        op(q, q, q, offsets=torch.tensor([0, 3 + group.rank, 4 * group.size]))
    elif kind == "length":
        op(q, q, q, offsets=torch.tensor([0, 4]))
    elif kind == "one rank":
        op(q, q, q[:, :2] if group.rank == 2 else q)
    elif kind == "gradients":  # ranks that record nothing would not come to the backward of the others
        q.requires_grad_()
        with torch.set_grad_enabled(group.rank == 0):
            op(q, q, q)


def test_calls_that_do_not_fit_together_fail_on_all_ranks(worlds: Worlds) -> None:
    for kind, error, words in [
        ("dtype", Disagreement, "bfloat16 .* on rank 1"),
        ("offsets", Disagreement, "offsets"),
        ("length", ValueError, r"offsets must rise from 0 to T=12, got \[0, 4\]"),
        ("one rank", RankError, "rank 2 failed.*v has shape"),
        ("gradients", Disagreement, "gradients: True on rank 0; False on ranks 1, 2"),
    ]:
        outcomes = worlds(3).outcomes(refused, kind)
        assert len({str(each.error) for each in outcomes}) == 1
        with pytest.raises(error, match=words):
            raise outcomes[0].error


class Broken(Exception):
    """What a rank raises in a test."""


def breaks(direction: str) -> None:
    """Rank 1 raises inside its part of the work."""
    from foci.ops.decay import chunked

    group = Group.of(dist.group.WORLD)
    q = torch.randn(1, 4, 2, 4, requires_grad=True)
    original = getattr(chunked, direction)

    def broken(*args: Any) -> Any:
        raise Broken("on purpose")

    try:
        if group.rank == 1 and direction == "forward":
            chunked.forward = broken
        out, _ = handoff(foci.linear_attention, group)(q, q, q, backend="chunked")
        if group.rank == 1:
            chunked.backward = broken
        out.sum().backward()
    finally:
        setattr(chunked, direction, original)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_that_raises_is_named_on_all(worlds: Worlds, direction: str) -> None:
    for each in worlds(3).outcomes(breaks, direction):
        assert isinstance(each.error, RankError)
        assert str(each.error) == f"linear_attention: rank 1 failed in the {direction}: Broken: on purpose"


def compiled() -> None:
    group = Group.of(dist.group.WORLD)
    op = handoff(foci.linear_attention, group)

    def model(x: torch.Tensor) -> torch.Tensor:
        return op(x * 2, x, x)[0].sin()

    x = torch.randn(1, 3, 2, 4)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


def test_a_model_round_it_compiles(worlds: Worlds) -> None:
    worlds(2).run(compiled)


def autocasted() -> None:
    group = Group.of(dist.group.WORLD)
    q = torch.randn(1, 4, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = handoff(foci.delta_rule, group)(q, q, q, q[..., 0].sigmoid(), return_state=True)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32


def test_autocast(worlds: Worlds) -> None:
    worlds(2).run(autocasted)


def reference() -> None:
    """A backend that brings no backward of its own."""
    group = Group.of(dist.group.WORLD)
    torch.manual_seed(group.rank)
    q, k, v = (torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    op = handoff(foci.linear_attention, group)
    found = [
        torch.autograd.grad(op(q, k, v, backend=name)[0].square().sum(), (q, k, v)) for name in ("chunked", "reference")
    ]
    torch.testing.assert_close(*found)


def test_a_named_backend_runs(worlds: Worlds) -> None:
    worlds(2).run(reference)


def test_it_takes_recurrences_only() -> None:
    with pytest.raises(TypeError, match="handoff: op must be one of linear_attention"):
        handoff(foci.attention, None)
    with pytest.raises(TypeError, match="got print"):
        handoff(print, None)


def composed(function: str, H: int) -> None:
    """Ulysses round a handoff on a mesh of two by two: heads for tokens, then states from rank to rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "handoff"))
    op, B, T, K, V = getattr(foci, function), 2, 13, 4, 3
    draw = {
        "q": torch.randn(B, T, H, K), "k": torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1),
        "v": torch.randn(B, T, H, V), "log_decay": -torch.rand(H), "state": torch.randn(B, H, K, V),
    }  # fmt: skip
    if function == "delta_rule":
        draw["beta"] = torch.rand(B, T, H)
    given = {name: x.double().requires_grad_() for name, x in draw.items()}
    weights = torch.randn(B, T, H, V).double(), torch.randn(B, H, K, V).double()
    out, final = op(**given, return_state=True)
    expected = torch.autograd.grad((out, final), list(given.values()), weights)
    same = ("log_decay", "state")
    leaves = {n: x.detach() if n in same else shard(x.detach(), mesh, "plain") for n, x in given.items()}
    for x in leaves.values():
        x.requires_grad_()
    wrapped = ulysses(handoff(op, mesh["handoff"]), mesh["ulysses"])
    mine, last = wrapped(**leaves, return_state=True)
    torch.testing.assert_close(mine, shard(out, mesh, "plain"))
    torch.testing.assert_close(last, final)
    share = shard(weights[0], mesh, "plain"), weights[1] / 4
    found = torch.autograd.grad((mine, last), list(leaves.values()), share)
    for name, got, right in zip(leaves, found, expected, strict=True):
        right = right if name in same else shard(right, mesh, "plain")
        torch.testing.assert_close(got, right, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("function", "H"), [("linear_attention", 3), ("delta_rule", 4)])
def test_ulysses_goes_round_it(worlds: Worlds, function: str, H: int) -> None:
    worlds(4).run(composed, function, H)


def empty(function: str) -> None:
    """No tokens on any rank, no documents, documents without tokens."""
    group, op = Group.of(dist.group.WORLD), getattr(foci, function)
    for offsets in (None, torch.tensor([0]), torch.tensor([0, 0, 0])):
        rows = 1 if offsets is None else len(offsets) - 1
        q, v = torch.randn(1, 0, 2, 4, requires_grad=True), torch.randn(1, 0, 2, 3)
        state = torch.randn(rows, 2, 4, 3, requires_grad=True)
        call = (q, q, v, torch.rand(1, 0, 2)) if function == "delta_rule" else (q, q, v)
        out, final = handoff(op, group)(*call, offsets=offsets, state=state, return_state=True)
        assert out.shape == v.shape and torch.equal(final, state)
        (found,) = torch.autograd.grad(out.sum() + final.sum(), state)
        assert torch.equal(found, torch.full_like(found, group.size))


@pytest.mark.parametrize("function", ["linear_attention", "delta_rule"])
def test_no_tokens_at_all(worlds: Worlds, function: str) -> None:
    worlds(3).run(empty, function)


def of_the_final_state() -> None:
    """A loss of the final state alone, of sums over ranks of which one is empty."""
    group = Group.of(dist.group.WORLD)
    q = torch.randn(1, 3 * group.rank, 2, 4, requires_grad=True)
    _, final = handoff(foci.linear_attention, group)(q, q, q, causal=False, return_state=True)
    final.sum().backward()
    every = q.detach().sum(-1, keepdim=True)  # d(sum k v^T) = the sums of the other, for each rank's loss
    torch.testing.assert_close(q.grad, 2 * group.size * every.expand_as(q))


def test_a_loss_of_the_final_state_alone(worlds: Worlds) -> None:
    worlds(3).run(of_the_final_state)
