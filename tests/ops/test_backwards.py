"""The way back: states as the forward left them or made again, gradients gathered in the order of their names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foci.core.spec import Backend, Spec
from foci.ops import SPECS
from foci.ops.backwards import Found, walk
from foci.ops.decay.call import bind
from foci.ops.slabs import Slab, kept, sequences, slabs
from tests.ops.recurrences import inputs_of

NAMES = ("q", "k", "v", "log_decay", "bonus", "state")
T, H, K, V = 150, 2, 3, 4


def call(offsets: Tensor | None = None) -> object:
    q, v = torch.randn(1, T, 1, K), torch.randn(1, T, H, V)
    return bind(q, q, v, log_decay=-torch.rand(H), bonus=torch.randn(H, K), offsets=offsets)


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 0, 70, 150])])
def test_slabs_come_last_to_first_each_with_its_state(offsets: Tensor | None) -> None:
    problem = call(offsets)
    starts: Tensor = kept(problem).empty(problem.v)  # type: ignore[attr-defined]

    def carry(slab: Slab, state: Tensor) -> None:
        state += slab.stop - slab.start  # the state counts the tokens

    if offsets is None:
        _, _, state = next(sequences(None, torch.zeros(1, H, K, V), T))
        for place, slab in enumerate(slabs(0, T, H)):
            starts[place] = state
            carry(slab, state)
    seen = []

    def back(slab: Slab, state: Tensor, d_state: Tensor, d_out: Tensor) -> None:
        seen.append((slab.start, slab.stop, float(state.flatten()[0])))
        d_state += 1

    d = walk("linear_attention", problem, starts, (None, None), carry, back)
    first = 0 if offsets is None else 70
    whole = (first, first + 128 if offsets is None else first + 64, 0.0)
    assert whole in seen
    assert all(seen_start - (first if seen_start >= first else 0) == tokens for seen_start, _, tokens in seen)
    assert d.shape == ((1 if offsets is None else 3), H, K, V)
    assert float(d.sum()) == len(seen) * H * K * V


def test_gradients_stand_in_order_like_their_tensors() -> None:
    problem = call()
    found = Found(problem, NAMES, [True, False, True, True, True, False])
    slab = Slab(0, T, 1, 256)
    found.put("q", torch.ones(H, 256, K), slab)
    found.put("k", torch.ones(H, 256, K), slab)  # not needed: no place for it
    found.put("v", torch.ones(H, 256, V), slab)
    found.put("log_decay", torch.ones(H, 256, 1), slab)
    found.there["bonus"] += 5
    q, k, v, log_decay, bonus, state = found.gradients(torch.zeros(1, H, K, V))
    assert k is None
    assert state is None
    assert q is not None and torch.equal(q, torch.full((1, T, 1, K), 2.0))  # two heads read one
    assert v is not None and torch.equal(v, torch.ones(1, T, H, V))
    assert log_decay is not None and torch.equal(log_decay, torch.full((1, 1, H, 1), float(T)))  # summed over tokens
    assert bonus is not None and torch.equal(bonus, torch.full((H, K), 5.0))


OWN = [
    (spec, each)
    for spec in SPECS.values()
    for each in spec.backends
    if spec.recurrent and each.name != "triton" and hasattr(each.load(), "backward")
]


def nothing(x: Tensor) -> None:
    return None


def bits(x: Tensor) -> Tensor:
    """As what is kept has room that nobody writes, where NaN may stand."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("spec", "backend"), OWN, ids=lambda each: each.name)
def test_a_gradient_that_is_not_given_is_one_of_zeros_and_none_is_written_to(
    spec: Spec, backend: Backend, packed: bool
) -> None:
    """Nor are the inputs, the outputs, or what a state begins with."""
    names = {case.name for case in spec.cases} & ({"everything", "packed, states"} if packed else {"state"})
    inputs = inputs_of(spec, min(names), torch.float32)
    assert spec.bind is not None and inputs["state"] is not None and (inputs.get("offsets") is not None) == packed
    call = spec.bind(**inputs)
    if native := backend.reasons(call):
        pytest.skip(native[0])
    module = backend.load()
    outputs = module.forward(call, True) if hasattr(module, "kept") else module.forward(call)
    given = torch.randn_like(outputs[0]), torch.randn_like(outputs[1])
    needs = [getattr(call, name) is not None for name in spec.differentiable]
    tensors = [x for x in (*call, *outputs, *given) if isinstance(x, Tensor)]
    before = [bits(x).clone() for x in tensors]
    for place in (0, 1):
        none, zeros = (
            [x if i == place else other(x) for i, x in enumerate(given)] for other in (nothing, torch.zeros_like)
        )
        pairs = zip(*(module.backward(call, outputs, tuple(each), needs) for each in (none, zeros)), strict=True)
        assert all(ours is None if theirs is None else torch.equal(ours, theirs) for ours, theirs in pairs)
    assert all(torch.equal(bits(x), y) for x, y in zip(tensors, before, strict=True))
