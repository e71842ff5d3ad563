"""ring: equal to one process, forward and every gradient, whatever the mask, order, lengths and number of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import foci
from foci.core.errors import Disagreement, RankError
from foci.core.world import Lost, Raised, World
from foci.parallel.balance import Order, positions, shard
from foci.parallel.group import Group
from foci.parallel.operators import Runs
from foci.parallel.ring import ring
from tests.parallel.matrix import by_name, prove

Worlds = Callable[[int], World]
ORDERS = ("zigzag", "stripe", "plain")


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["everything", "cross", "packed", "dropout"])
def test_equal_to_one_process(worlds: Worlds, name: str, size: int) -> None:
    prove(worlds(size), "ring zigzag", by_name(name))


def _in_turns(name: str, kind: str) -> Any:
    """The same with blocks that count as large, and parts of one head at a time."""
    from tests.parallel import matrix

    module: Any = import_module("foci.parallel.ring")  # the name in foci.parallel is the function
    case = by_name(name)
    large, copied = module._LARGE, module._COPIED
    module._LARGE, module._COPIED = (0 if kind == "turns" else large), (1 if kind == "heads" else copied)
    try:
        return matrix.on_rank(name, "ring zigzag", torch.float64, matrix.shapes_of(case))
    finally:
        module._LARGE, module._COPIED = large, copied


@pytest.mark.parametrize("kind", ["turns", "heads"])
@pytest.mark.parametrize("name", ["everything", "GQA", "uneven heads", "bias", "one key head"])
def test_large_blocks_go_in_turns(worlds: Worlds, name: str, kind: str) -> None:
    """Some heads after the others: the same numbers, dropout and all."""
    pairs = zip(worlds(3).run(_in_turns, name, kind), worlds(3).run(_in_turns, name, "whole"), strict=True)
    for ours, whole in pairs:
        for tensor, expected in whole.items():
            assert torch.allclose(ours[tensor], expected, rtol=1e-10, atol=1e-12), tensor


def problem(T: int = 12, H: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, T, H, 8, generator=draw, dtype=torch.float64).to(dtype) for _ in range(3))
    return q, k, v


def world_ring(op: Any = foci.attention, order: str = "zigzag") -> Any:
    return ring(op, dist.group.WORLD, cast(Order, order))


def _lengths(lengths: list[int]) -> Tensor:
    rank, start = dist.get_rank(), sum(lengths[: dist.get_rank()])
    q, k, v = (x[:, start : start + lengths[rank]] for x in problem(sum(lengths)))
    out: Tensor = world_ring(order="plain")(q, k, v, mask=foci.Causal())
    return out


def test_plain_order_takes_shards_of_any_lengths(worlds: Worlds) -> None:
    lengths = [5, 0, 4]
    whole = foci.attention(*problem(sum(lengths)), mask=foci.Causal())
    assert torch.allclose(torch.cat(worlds(3).run(_lengths, lengths), 1), whole, atol=1e-12)


def _answers(op: Any, T: int, shape: tuple[int, ...], needs: bool, mine: list[int]) -> list[Tensor]:
    """out, dq of tokens `mine` and gradients of a sink, of which one is none, and of a bias of so many dimensions."""
    draw = torch.Generator().manual_seed(7)
    q, k, v = (x[:, mine].requires_grad_() for x in problem(T))
    bias = torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_(needs)
    sink = torch.tensor([0.3, -torch.inf], dtype=torch.float64, requires_grad=True)
    mask = foci.Lengths(
        torch.tensor([T]), torch.tensor([T - 1])
    )  # the last row sees nothing, and has no sink in one head
    out = op(q, k, v, bias=bias, sink=sink, mask=mask)
    leaves = [q, sink, *[bias] * needs]
    weight = torch.randn(1, T, 2, 8, generator=draw, dtype=torch.float64)[:, mine]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def _bias_of(T: int, shape: tuple[int, ...], needs: bool) -> list[Tensor]:
    held = positions(T, dist.group.WORLD, "plain").tolist()
    return _answers(world_ring(order="plain"), T, shape, needs, held)


@pytest.mark.parametrize(
    ("size", "T", "shape", "needs"),
    [
        (3, 7, (), True), (3, 7, (7,), True), (3, 7, (1, 7), True), (3, 7, (2, 1, 1), True), (2, 4, (2, 1, 4), True),
        (3, 3, (1, 3), False), (1, 1, (1, 1), True), (2, 2, (2,), True),
    ],
)  # fmt: skip
def test_a_bias_of_any_dimensions(worlds: Worlds, size: int, T: int, shape: tuple[int, ...], needs: bool) -> None:
    """One row for all, or none. Where a rank has one token, it is told from its own only where a gradient is."""
    found = worlds(size).run(_bias_of, T, shape, needs)
    out, dq, *same = _answers(foci.attention, T, shape, needs, list(range(T)))
    for place, whole in ((0, out), (1, dq)):
        torch.testing.assert_close(torch.cat([each[place] for each in found], 1), whole)
    for each in found:
        torch.testing.assert_close(each[2:], same)


def _wrong_lengths() -> None:
    world_ring()(*(x[:, : 4 + dist.get_rank()] for x in problem()))


def test_other_orders_say_which_lengths_are_theirs(worlds: Worlds) -> None:
    with pytest.raises(ValueError, match=r"hold \[4, 5, 6\] tokens of q; order 'zigzag' of 15 gives .*shard\("):
        worlds(3).run(_wrong_lengths)


def _traffic(order: str, mask: Any, backward: bool) -> tuple[int, int]:
    group = Group.of(dist.group.WORLD)
    q, k, v = (shard(x, group, cast(Order, order)).requires_grad_() for x in problem(dtype=torch.bfloat16))
    before = group.traffic.bytes
    out = ring(foci.attention, group, cast(Order, order))(q, k, v, mask=mask)
    forward = group.traffic.bytes - before
    if backward:
        out.float().sum().backward()
    return forward, group.traffic.bytes - before - forward


def test_the_wire_carries_each_block_once(worlds: Worlds) -> None:
    """Forward: k and v to each other rank. Backward: them again, and as many float32 gradients."""
    block = 2 * 3 * 2 * 8  # k and v: 12 tokens over 4 ranks, 2 heads of 8
    assert worlds(4).run(_traffic, "zigzag", foci.Causal(), True) == [(3 * 2 * block, 3 * (2 + 4) * block)] * 4
    assert worlds(4).run(_traffic, "plain", foci.Window(2, 0), True) == [(2 * block, (2 + 4) * block)] * 4


def _peak(backend: str | None, backward: bool) -> int:
    """Bytes at most of what one causal call allocates, its inputs too: of 4,096 tokens, with all that is constant an
    eighth of what it is, as if there were 32,768.
    """
    from foci.ops.softmax import chunked

    module: Any = import_module("foci.parallel.ring")
    constants = [(chunked, "_TILE"), (module, "_LARGE"), (module, "_COPIED")]
    before = [getattr(owner, name) for owner, name in constants]
    for owner, name in constants:
        setattr(owner, name, getattr(owner, name) // 8)
    try:
        size = dist.get_world_size()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            q, k, v = (torch.randn(1, 4096 // size, 4, 64, requires_grad=backward) for _ in range(3))
            op = foci.attention if size == 1 else world_ring()
            out = op(q, k, v, mask=foci.Causal(), backend=backend)
            if backward:
                out.backward(torch.ones_like(out))
    finally:
        for (owner, name), value in zip(constants, before, strict=True):
            setattr(owner, name, value)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("backend", ["chunked", None])
def test_a_rank_holds_little_more_than_its_share(worlds: Worlds, backend: str | None, backward: bool) -> None:
    """Over four ranks at most 1.3 quarters of one process's peak."""
    whole = worlds(1).run(_peak, "chunked", backward)[0]
    assert max(worlds(4).run(_peak, backend, backward)) <= 1.3 * whole / 4


def _half(order: str) -> dict[str, Tensor]:
    q, k, v = (shard(x, dist.group.WORLD, cast(Order, order)) for x in problem(48, dtype=torch.bfloat16))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = world_ring(order=order)(*leaves, mask=foci.Causal())
    out.float().sin().sum().backward()
    places = positions(48, dist.group.WORLD, cast(Order, order))
    return {"places": places, "out": out.detach(), **{n: x.grad for n, x in zip("qkv", leaves, strict=True)}}  # type: ignore[dict-item]


def _joined(ranks: list[dict[str, Tensor]], name: str) -> Tensor:
    whole = torch.empty(1, 48, *ranks[0][name].shape[2:], dtype=ranks[0][name].dtype)
    for each in ranks:
        whole[:, each["places"]] = each[name]
    return whole


@pytest.mark.parametrize("order", ORDERS)
def test_half_precision_loses_nothing_to_the_ring(worlds: Worlds, order: str) -> None:
    """The error against float64 is that of one process, however many ranks: sums travel in float32."""
    inputs = problem(48, dtype=torch.bfloat16)

    def errors(found: dict[str, Tensor]) -> dict[str, float]:
        leaves = [x.double().requires_grad_() for x in inputs]
        out = foci.attention(*leaves, mask=foci.Causal(), backend="reference")
        out.sin().sum().backward()
        truth = {"out": out.detach(), **{n: x.grad for n, x in zip("qkv", leaves, strict=True)}}
        return {n: float((found[n].double() - truth[n]).square().mean().sqrt()) for n in truth}

    leaves = [x.detach().requires_grad_() for x in inputs]
    out = foci.attention(*leaves, mask=foci.Causal(), backend="chunked")
    out.float().sin().sum().backward()
    one = errors({"out": out.detach(), **{n: x.grad for n, x in zip("qkv", leaves, strict=True)}})  # type: ignore[dict-item]
    for size in (2, 4, 8):
        ranks = worlds(size).run(_half, order)
        ours = errors({name: _joined(ranks, name) for name in one})
        for name, error in ours.items():
            assert error <= 1.02 * one[name], f"{name}, {size} ranks: {error:.2e}, one process {one[name]:.2e}"


def _generators_apart() -> Tensor:
    torch.manual_seed(dist.get_rank())
    q, k, v = (shard(x, dist.group.WORLD) for x in problem())
    out: Tensor = world_ring()(q, k, v, dropout=0.5)
    return out


def test_dropout_is_that_of_the_first_rank(worlds: Worlds) -> None:
    torch.manual_seed(0)
    whole = foci.attention(*problem(), dropout=0.5)
    places = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    for each, out in zip(places, worlds(3).run(_generators_apart), strict=True):
        assert torch.allclose(out, whole[:, each], atol=1e-12)


def _one_rank_other(change: str) -> None:
    q, k, v = (shard(x, dist.group.WORLD, "plain") for x in problem())
    odd = dist.get_rank() == 1
    options: dict[str, Any] = {}
    order = "plain"
    if change == "mask":
        options["mask"] = foci.Window(3 + odd, 0)
    elif change == "lengths of padding":
        options["mask"] = foci.Lengths(torch.tensor([9 + odd]))
    elif change == "heads":
        q, k, v = (x[:, :, : 1 + odd] for x in (q, k, v))
    elif change == "dtype":
        q, k, v = (x.float() if odd else x for x in (q, k, v))
    elif change == "gradient":
        q = q.requires_grad_(odd)
    elif change == "order":
        order = "zigzag" if odd else "plain"
    elif change == "backend":
        options["backend"] = "chunked" if odd else None
    world_ring(order=order)(q, k, v, **options)


@pytest.mark.parametrize("change", ["mask", "lengths of padding", "heads", "dtype", "gradient", "order", "backend"])
def test_ranks_that_are_called_differently_all_say_so(worlds: Worlds, change: str) -> None:
    found = worlds(3).outcomes(_one_rank_other, change)
    assert len({str(each.error) for each in found}) == 1  # type: ignore[union-attr]
    assert all(isinstance(each.error, Disagreement) for each in found)  # type: ignore[union-attr]


def _mistake(kind: str) -> None:
    q, k, v = (shard(x, dist.group.WORLD) for x in problem())
    T = q.shape[1]
    if kind == "columns":
        world_ring()(q, k, v, bias=torch.zeros(T, T))
    elif kind == "rows":
        world_ring()(q, k, v, bias=torch.zeros(12, 12))
    elif kind == "lengths":
        world_ring()(q, k, v, mask=foci.Lengths(torch.tensor([13])))
    elif kind == "offsets":
        world_ring()(q, k, v, mask=foci.Packed(torch.tensor([0, 13])))
    elif kind == "reference":
        world_ring()(q, k, v, backend="reference")
    elif kind == "aten":
        world_ring()(q, k, v, softcap=1.0, backend="aten")
    elif kind == "one row":
        q, k, v = (x[:, :1] for x in (q, k, v))
        world_ring(order="plain")(q, k, v, bias=torch.zeros(1, 3, requires_grad=True))


MISTAKES = {
    "columns": (foci.ShapeError, r"bias has shape \[12, 4\], so S would be 4; expected 1 or S=12"),
    "rows": (foci.ShapeError, r"bias has shape \[12, \d+\], so T would be 12"),
    "lengths": (ValueError, r"kv_lengths\[0\] is 13; expected 0 to 12"),
    "offsets": (ValueError, r"q_offsets ends at 13, past the 12 tokens"),
    "reference": (foci.Unsupported, "attention in parts"),
    "aten": (foci.Unsupported, "softcap is not supported"),
    "one row": (ValueError, "one row on each of 3 ranks"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_process_s_error_on_every_rank(worlds: Worlds, kind: str) -> None:
    error, words = MISTAKES[kind]
    with pytest.raises(error, match=words):
        worlds(3).run(_mistake, kind)


def _one_rank_raises() -> None:
    q, k, v = (shard(x, dist.group.WORLD) for x in problem())
    world_ring()(q, k, v if dist.get_rank() != 2 else v[:, :1])


def test_a_mistake_of_one_rank_is_told_to_all(worlds: Worlds) -> None:
    found = worlds(3).outcomes(_one_rank_raises)
    assert all(isinstance(each.error, RankError) and each.error.rank == 2 for each in found)  # type: ignore[union-attr]
    assert "ShapeError: attention: v has shape" in str(found[0].error)  # type: ignore[union-attr]


def _ends(where: str) -> str:
    """Rank 1 ends without a word: at a block of the forward or of the backward, or between the two."""
    from foci.ops.softmax import chunked

    q, k, v = (shard(x, dist.group.WORLD).requires_grad_() for x in problem())
    ending = dist.get_rank() == 1
    calls = [0]

    def die(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            os._exit(3)

    if ending and where in ("forward", "backward"):
        setattr(chunked, f"{where}_part", die)
    out = world_ring()(q, k, v, backend="chunked")
    if ending and where == "between":
        os._exit(3)
    out.sum().backward()
    return "no error"


@pytest.mark.parametrize("where", ["forward", "between", "backward"])
def test_a_rank_that_ends_is_named_by_the_others(worlds: Worlds, where: str) -> None:
    started = time.monotonic()
    found = worlds(3).outcomes(_ends, where)
    assert isinstance(found[1], Lost) and found[1].died
    for each in (found[0], found[2]):
        assert isinstance(each, Raised) and isinstance(each.error, RankError)
        assert each.error.rank == 1 and "gone" in str(each.error)
    assert time.monotonic() - started < 60  # not the limit of a function, which ends what hangs


def _bad_ops() -> list[str]:
    found = []
    for op, order in (
        (foci.linear_attention, "plain"), (world_ring(), "plain"), (max, "plain"), (foci.attention, "spiral"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="ring: ") as caught:
            world_ring(op, order)
        found.append(str(caught.value))
    return found


def test_only_softmax_goes_in_a_ring(worlds: Worlds) -> None:
    found = worlds(1).run(_bad_ops)[0]
    assert "got linear_attention; it has a state to hand on: handoff(op, group)" in found[0]
    assert "a ring goes inside" in found[1]
    assert "got max" in found[2]
    assert "order must be one of 'plain', 'zigzag', 'stripe', got 'spiral'" in found[3]


def _differentiated_twice() -> None:
    q, k, v = (shard(x, dist.group.WORLD).requires_grad_() for x in problem())
    (grad,) = torch.autograd.grad(world_ring()(q, k, v).sum(), q, create_graph=True)
    grad.sum().backward()


def _under_grad() -> None:
    q, k, v = (shard(x, dist.group.WORLD) for x in problem())
    torch.func.grad(lambda x: world_ring()(x, k, v).sum())(q)


@pytest.mark.parametrize(
    ("function", "words"), [(_differentiated_twice, "second derivative"), (_under_grad, "torch.func")]
)
def test_what_it_cannot_do_it_refuses(worlds: Worlds, function: Any, words: str) -> None:
    with pytest.raises(foci.Unsupported, match=words):
        worlds(2).run(function)


def _is_value() -> bool:
    one, other = world_ring(), world_ring()
    return isinstance(one, Runs) and one == other.__class__(one.inner, one.group, one.order) and one is not other


def test_a_wrapper_is_a_value(worlds: Worlds) -> None:
    assert worlds(1).run(_is_value) == [True]


def _under(kind: str) -> tuple[Tensor, ...]:
    q, k, v = (shard(x.float(), dist.group.WORLD).requires_grad_() for x in problem())
    op = world_ring()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = op(q * 1.5, k, v, mask=foci.Causal()).tanh()
        return out

    if kind == "compile":
        out = torch.compile(block, backend="aot_eager")(q, k, v)
    elif kind == "checkpoint":
        out = torch.utils.checkpoint.checkpoint(block, q, k, v, use_reentrant=False)
    elif kind == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = block(q, k, v)
        assert out.dtype == torch.bfloat16
    else:
        out = block(q, k, v)
    out.float().square().sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach().float(), q.grad, k.grad, v.grad


@pytest.mark.parametrize(("kind", "budget"), [("compile", 1e-6), ("checkpoint", 0.0), ("autocast", 3e-2)])
def test_under_what_a_model_does(worlds: Worlds, kind: str, budget: float) -> None:
    for ours, plain in zip(worlds(2).run(_under, kind), worlds(2).run(_under, "nothing"), strict=True):
        for got, expected in zip(ours, plain, strict=True):
            assert float((got - expected).abs().max()) <= budget * float(expected.abs().max())
