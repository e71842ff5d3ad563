"""The forecast against what can be counted by hand, and the plan: the fastest that fits, with reasons that are true."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foci.bench.memory import peak_memory
from foci.core.world import World
from foci.parallel.balance import pieces
from foci.parallel.forecast import LOSSES, WORK, Plan, forecast, live_shares, memory, plan_parallel, size, time
from foci.parallel.group import Group
from foci.parallel.links import Compute, Link, Links, preset
from foci.parallel.ring import ring
from foci.parallel.split import Split
from foci.parallel.ulysses import ulysses
from foci.parallel.workload import Rest, Shape

FREE = Links(Link(0, math.inf), Link(0, math.inf))
PLAIN = Compute(rate=1e9, dense=1e9, stream=math.inf, memory=math.inf)
LLAMA = Shape(2**17, 32, 128, G=8, causal=True, backward=True, rest=Rest(layers=32, flops=16e9))


@pytest.mark.parametrize("order", ["plain", "zigzag", "stripe"])
@pytest.mark.parametrize("ring", [1, 2, 3, 8])
@pytest.mark.parametrize("window", [None, 100])
def test_live_shares_are_those_of_the_pieces(order: str, ring: int, window: int | None) -> None:
    """Counted pair by pair on 240 tokens, for the busiest rank of each step."""
    T = 240
    held = [torch.tensor([p for piece in pieces(order, T, ring, r) for p in piece.positions]) for r in range(ring)]
    shape = Shape(T, 1, 1, causal=True, window=window)
    for step, share in enumerate(live_shares(shape, order, ring)):
        counted = []
        for rank, rows in enumerate(held):
            ago = rows[:, None] - held[(rank - step) % ring][None, :]
            seen = (ago >= 0) if window is None else (ago >= 0) & (ago <= window)
            counted.append(seen.double().mean().item())
        assert share == pytest.approx(max(counted), abs=0.03), step


def test_where_links_are_free_work_is_shared_evenly() -> None:
    alone = forecast(LLAMA, Split(), FREE, PLAIN).seconds
    for split in (Split(8), Split(2, 4, "zigzag"), Split(1, 8, "stripe")):
        assert alone / forecast(LLAMA, split, FREE, PLAIN).seconds == pytest.approx(8, rel=0.02)
    # In plain order the last rank has work at every step: 8 - 1/2 blocks where 8 / 2 would be even.
    plain = forecast(LLAMA, Split(1, 8), FREE, PLAIN)
    assert plain.terms["attention"] + plain.terms["idle"] == pytest.approx(plain.terms["attention"] * 7.5 / 4, rel=0.01)


def test_heads_that_do_not_divide_leave_ranks_idle() -> None:
    told = forecast(Shape(1024, 6, 64), Split(4), FREE, PLAIN)
    assert told.terms["idle"] == pytest.approx(told.terms["attention"] / 3)


def test_a_transfer_is_seen_only_as_far_as_it_outlasts_the_work() -> None:
    shape = Shape(1024, 4, 64)
    step = forecast(shape, Split(1, 4), FREE, PLAIN).terms["attention"] / 4
    block = 2 * 1024 // 4 * 4 * 64 * 2
    for lasts, seen in ((0.5, 0.0), (3.0, 2.0)):
        link = Link(0, block / (lasts * step))
        told = forecast(shape, Split(1, 4), Links(link, link), PLAIN)
        assert told.terms["ring"] == pytest.approx(3 * seen * step)
    link = Link(0, block / (0.5 * step))  # what a processor that does one thing at a time sees
    told = forecast(shape, Split(1, 4), Links(link, link, overlap=0.0), PLAIN)
    assert told.terms["ring"] == pytest.approx(3 * 0.5 * step)


def test_a_far_link_puts_ulysses_inside_the_node() -> None:
    plan = plan_parallel(LLAMA, 64, *preset("h100", node=8))
    assert plan.split.ulysses > 1 and plan.split.inner == "ulysses" and plan.split.ulysses <= 8
    assert plan.split.order in ("zigzag", "stripe")


def test_the_best_is_the_fastest_that_fits() -> None:
    plan = plan_parallel(LLAMA, 8, *preset("h100"))
    assert all(plan.best.seconds <= 1.01 * other.seconds for other in plan.others)
    least = min((*plan.others, plan.best), key=lambda each: each.memory)
    most = max((*plan.others, plan.best), key=lambda each: each.memory)
    assert least.memory < most.memory
    tight = plan_parallel(LLAMA, 8, preset("h100")[0], replace(preset("h100")[1], memory=least.memory))
    assert tight.best.memory <= least.memory and most.split in [split for split, _ in tight.refused]


def test_a_tie_goes_to_what_is_simpler() -> None:
    assert plan_parallel(Shape(1024, 8, 64), 4, FREE, PLAIN).split == Split(4)
    assert plan_parallel(Shape(1024, 8, 64, causal=True), 1, FREE, PLAIN).split == Split()


def test_refusals_say_why() -> None:
    plan = plan_parallel(Shape(4096, 6, 64), 8, *preset("a100"))
    reasons = dict(plan.refused)
    assert reasons[Split(8)] == "6 heads over 8 ranks leave 2 with nothing to do"
    with pytest.raises(ValueError, match="a rank would hold"):
        plan_parallel(Shape(4096, 8, 64, rest=Rest(weights=10**12)), 4, *preset("a100"))
    with pytest.raises(ValueError, match="without a token"):
        plan_parallel(Shape(2, 8, 64), 4, *preset("a100"))
    for world in (0, 2.5, True):
        with pytest.raises(ValueError, match="world must be an int"):
            plan_parallel(LLAMA, world, *preset("a100"))
    with pytest.raises(TypeError, match="links must be a Links"):
        plan_parallel(LLAMA, 4, preset("a100"), PLAIN)
    with pytest.raises(TypeError, match="shape must be a Shape"):
        plan_parallel("B1,T4096", 4, *preset("a100"))


def test_branches_of_guidance_share_the_ranks_before_the_sequence_does() -> None:
    shape = Shape(4096, 16, 72, rest=Rest(layers=28, flops=1e9, steps=20, guidance=True))
    plan = plan_parallel(shape, 4, *preset("l20"))
    assert plan.split.cfg == 2
    single = forecast(shape, Split(), FREE, PLAIN)
    assert single.seconds == pytest.approx(2 * forecast(shape, Split(cfg=2), FREE, PLAIN).seconds)


@pytest.mark.parametrize("operator", ["linear_attention", "delta_rule", "scan", "selective_scan"])
def test_recurrences_hand_states_on(operator: str) -> None:
    shape = Shape(2**17, 16, 64, operator=operator, backward=True)
    plan = plan_parallel(shape, 8, *preset("h100"))
    kinds = {each.split.kind for each in (plan.best, *plan.others)}
    assert "handoff" in kinds and "ring" not in kinds
    told = forecast(shape, Split(1, 8, handoff=True), *preset("h100"))
    assert told.terms["handoff"] > 0 and told.terms["ring"] == 0


def held_by(shape: Shape, split: Split) -> int:
    """Bytes of tensors that a rank holds at most in one call, its own q, k and v included."""
    mesh = split.mesh()
    op: Any = shape.function.function
    op = ring(op, Group.of(mesh["ring"]), "zigzag") if split.ring > 1 else ulysses(op, Group.of(mesh["ulysses"]))
    tensors, options = shape.only(T=shape.T // split.world).inputs("cpu")
    for tensor in tensors:
        tensor.requires_grad_(shape.backward)

    def run() -> object:
        out = op(*tensors, **options)
        return torch.autograd.grad(out, tensors, torch.ones_like(out)) if shape.backward else out

    run()
    return peak_memory(run, torch.device("cpu")) + sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def test_memory_is_what_a_rank_holds(worlds: Callable[[int], World], dtype: torch.dtype, backward: bool) -> None:
    """Within a quarter: what it leaves out is the scratch of the backend."""
    shape = Shape(2048, 4, 64, G=2, causal=True, dtype=dtype, backward=backward)
    for split in (Split(2), Split(1, 2, "zigzag")):
        counted = max(worlds(2).run(held_by, shape, split))
        assert 0.75 <= memory(shape, split) / counted <= 1.25, split


def test_layers_keep_what_the_backward_needs() -> None:
    shape = Shape(2048, 4, 64, backward=True)
    more = replace(shape, rest=Rest(layers=3, weights=1000, kept=8))
    own = memory(more, Split(1, 2)) - memory(shape, Split(1, 2)) - 1000 - 8 * 1024
    assert own / 2 == pytest.approx(1024 * 4 * (64 * 4 * 2 + 64 * 4 + 4))  # q, k, v, out; out in float32 as well; lse


def test_it_explains_itself() -> None:
    plan = plan_parallel(LLAMA, 64, *preset("h100", node=8))
    text = str(plan)
    for head in ("plan", "for", "forecast", "gain", "memory", "wire", "because", "instead", "refused", "figures"):
        assert f"\n{head} " in f"\n{text}", head
    assert str(plan.split) in text and "datasheet" in text
    largest = max((name for name in plan.best.terms if name not in WORK), key=lambda name: plan.best.terms[name])
    assert f"{largest} is the largest loss" in text
    assert set(plan.best.terms) <= {*WORK, *LOSSES}
    assert isinstance(plan, Plan) and plan.gain < 64


def test_numbers_are_written_to_be_read() -> None:
    assert [time(t) for t in (90.0, 0.0123, 4.5e-5, 3e-8)] == ["90 s", "12.3 ms", "45 us", "30 ns"]
    assert [size(n) for n in (5, 2**10, 3 * 2**20, 2**34)] == ["5 B", "1 KiB", "3 MiB", "16 GiB"]
