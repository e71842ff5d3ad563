"""A loop over shards in one process: what each makes of a state, handed on, is what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.parallel.operators import operator_of
from foci.parallel.state_passing import RankRecurrence, Run, StateMap, TokenSharding
from tests.parallel.recurrent import CPU, SPECS, lengths_of, parts_of


def test_rows_of_a_batch_pass_every_rank() -> None:
    sharding = TokenSharding((3, 0, 2), None)
    assert sharding.runs(0) == [Run(slice(None), 0, 3, True, True)]
    assert [sharding.is_empty(rank) for rank in range(3)] == [False, True, False]
    assert all(sharding.propagates(rank) for rank in range(3))


def test_documents_enter_and_leave() -> None:
    """Nine tokens on four ranks: a document that ends at a border, an empty one, and one over three ranks."""
    sharding = TokenSharding((3, 2, 0, 4), ((0, 3), (3, 3), (3, 8), (8, 9)))
    assert sharding.runs(0) == [Run(slice(0, 1), 0, 3, False, False)]
    assert sharding.runs(1) == [Run(slice(2, 3), 0, 2, False, True)]
    assert sharding.runs(2) == []
    assert sharding.runs(3) == [Run(slice(2, 3), 0, 3, True, False), Run(slice(3, 4), 3, 4, False, False)]
    assert [sharding.propagates(rank) for rank in range(4)] == [False, False, True, False]


def test_one_document_over_all_ranks_goes_through_the_middle() -> None:
    sharding = TokenSharding((2, 2, 2), ((0, 6),))
    assert [sharding.propagates(rank) for rank in range(3)] == [False, True, False]


def test_nothing_passes_a_link_without_a_transition() -> None:
    """Not even what is not finite: a document must not see the one before it."""
    state_map = StateMap(None, torch.ones(1, 2, 2, 2))
    assert torch.equal(state_map.apply(torch.full((1, 2, 2, 2), float("nan"))), torch.ones(1, 2, 2, 2))


def shards(function: str, inputs: dict[str, Any], lengths: list[int]) -> tuple[list[Any], list[RankRecurrence]]:
    """The bound call and the carries of every rank."""
    operator = operator_of(getattr(foci, function))
    assert operator is not None
    dims = parts_of(SPECS[function], inputs)
    offsets = inputs.get("offsets")
    documents = None if offsets is None else tuple(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    sharding = TokenSharding(tuple(lengths), documents)
    calls = []
    for rank, n in enumerate(lengths):
        mine = {k: x.narrow(dims[k], sharding.boundaries[rank], n) if k in dims else x for k, x in inputs.items()}
        calls.append(operator.operator.bind((), mine | {"return_state": True}).call)
    return calls, [RankRecurrence(operator.operator, sharding, rank) for rank in range(len(lengths))]


TAKEN = {
    "state", "packed", "packed, per channel", "packed, per head", "packed, states", "decay per head", "bonus", "erase",
    "no whole chunks, per channel",
}  # fmt: skip
CASES = [(function, case) for function, spec in SPECS.items() for case in spec.cases if case.name in TAKEN]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize(("function", "case"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_loop_over_shards_is_one_process(function: str, case: Any, size: int, seed: int) -> None:
    spec = SPECS[function]
    inputs = case.make(torch.float64, CPU, 0)
    dims = parts_of(spec, inputs)
    first = next(iter(dims))
    calls, ranks = shards(function, inputs, lengths_of(inputs[first].shape[dims[first]], size, seed))
    maps = [c.state_map(call) for c, call in zip(ranks, calls, strict=True)]
    entered = [c.entering_state(call, maps) for c, call in zip(ranks, calls, strict=True)]
    states = [c.run_states(call, carry) for c, call, (carry, _) in zip(ranks, calls, entered, strict=True)]
    made = [c.compute(call, s, None, True) for c, call, s in zip(ranks, calls, states, strict=True)]

    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items() if n in spec.differentiable}
    out, final = getattr(foci, function)(**inputs | leaves, return_state=True)
    torch.testing.assert_close(torch.cat([each[0] for each in made], 1), out.detach())
    packed = ranks[0].sharding.documents is not None
    ended = sum(c.final_states(call, m[1]) for c, call, m in zip(ranks, calls, made, strict=True))
    torch.testing.assert_close(ended if packed else entered[0][1], final.detach())

    d_out, d_final = torch.randn_like(out), torch.randn_like(final)
    expected = dict(zip(leaves, torch.autograd.grad((out, final), [*leaves.values()], (d_out, d_final)), strict=True))
    parts = d_out.split(list(ranks[0].sharding.lengths), 1)
    backs = [
        c.backward_map(call, None if state_map is None else state_map.transition, part, d_final)
        for c, call, state_map, part in zip(ranks, calls, maps, parts, strict=True)
    ]
    left = [c.leaving_gradient(call, backs, d_final) for c, call in zip(ranks, calls, strict=True)]
    needs = {n: n in leaves for n in spec.differentiable}
    found = [
        c.gradients(call, s, m, (part, c.final_state_gradients(call, behind, d_final)), needs)
        for c, call, s, m, part, (behind, _) in zip(ranks, calls, states, made, parts, left, strict=True)
    ]
    for name in leaves:
        pieces: list[Tensor] = [each[name] for each in found]  # type: ignore[misc]
        if name == "state":
            firsts = [
                c.initial_state_gradients(call, each, d_final)
                for c, call, each in zip(ranks, calls, pieces, strict=True)
            ]
            got: Any = sum(firsts) if packed else left[0][1]
        else:
            got = torch.cat(pieces, dims[name]) if name in dims else sum(pieces)
        torch.testing.assert_close(got.view_as(expected[name]), expected[name])


@pytest.mark.parametrize("name", ["state", "packed, states", "packed, per channel"])
def test_no_gradient_of_the_final_states_is_one_of_zeros(name: str) -> None:
    """And no state of a rank is none to tell, nor one gradient of it; maps are as large as they are said to be."""
    spec = SPECS["linear_attention"] if name != "packed, states" else SPECS["scan"]
    inputs = next(case for case in spec.cases if case.name == name).make(torch.float64, CPU, 0)
    first = inputs[next(iter(parts_of(spec, inputs)))]
    calls, ranks = shards(spec.function, inputs, lengths_of(first.shape[1], 3, 0))
    maps = [c.state_map(call) for c, call in zip(ranks, calls, strict=True)]
    made = [
        c.compute(call, c.run_states(call, c.zero_state(call)), None, False)
        for c, call in zip(ranks, calls, strict=True)
    ]
    d_outs = [torch.randn_like(out) for out, *_ in made]
    zeros = ranks[0].zero_states(calls[0])
    found = []
    for d_final in (None, zeros):
        backs = [
            c.backward_map(call, None if state_map is None else state_map.transition, d_out, d_final)
            for c, call, state_map, d_out in zip(ranks, calls, maps, d_outs, strict=True)
        ]
        left = [c.leaving_gradient(call, backs, d_final) for c, call in zip(ranks, calls, strict=True)]
        ends = [c.final_state_gradients(call, x, d_final) for c, call, (x, _) in zip(ranks, calls, left, strict=True)]
        found.append(
            [x for pair in left for x in pair]
            + ends
            + [state_map.offset for state_map in backs if state_map is not None]
        )
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    for c, call, state_map in zip(ranks, calls, maps, strict=True):
        assert torch.equal(c.final_states(call._replace(state=None), None), zeros)
        assert torch.equal(c.initial_state_gradients(call, None, None), zeros)
        transition, offset = c.map_shapes(call)
        assert state_map is not None and state_map.offset.numel() == torch.Size(offset).numel()
        assert state_map.transition is None or state_map.transition.shape == transition


@pytest.mark.parametrize("name", ["not causal, grouped heads", "not causal, packed"])
def test_without_an_order_every_rank_adds_its_own(name: str) -> None:
    """The middle one has no tokens."""
    spec = SPECS["linear_attention"]
    inputs = next(case for case in spec.cases if case.name == name).make(torch.float64, CPU, 0)
    T, (out, final) = inputs["q"].shape[1], foci.linear_attention(**inputs, return_state=True)
    calls, ranks = shards("linear_attention", inputs, [T - 5, 0, 5])
    total = sum(c.state_sums(call) for c, call in zip(ranks, calls, strict=True))
    torch.testing.assert_close(ranks[0].initial_states(calls[0], slice(None)) + total, final)
    state = ranks[0].initial_states(calls[0], slice(None)).requires_grad_()
    d_out = torch.randn_like(out)
    again = foci.linear_attention(**inputs | {"state": state})[0]
    (expected,) = torch.autograd.grad(again, state, d_out)
    parts = d_out.split([T - 5, 0, 5], 1)
    got = sum(c.gradient_sums(call, part) for c, call, part in zip(ranks, calls, parts, strict=True))
    torch.testing.assert_close(got, expected)


def test_a_backward_reads_outputs_as_declared_however_hooks_saved_them() -> None:
    spec = SPECS["linear_attention"]
    inputs = next(case for case in spec.cases if case.name == "state").make(torch.float32, CPU, 0)
    calls, ranks = shards(spec.function, inputs, [inputs["q"].shape[1]])
    call, recurrence, needs = calls[0], ranks[0], dict.fromkeys(spec.differentiable, False) | {"q": True, "k": True}
    made = recurrence.compute(call, call.state, None, True)
    grads = torch.randn_like(made[0]), torch.randn_like(made[1])
    expected = recurrence.gradients(call, call.state, made, grads, needs)
    found = recurrence.gradients(call, call.state, tuple(x.mT.contiguous().mT for x in made), grads, needs)
    assert all(torch.equal(found[name], expected[name]) for name in ("q", "k"))  # type: ignore[arg-type]
