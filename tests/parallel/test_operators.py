"""What a wrapper reads of an operator: letters from annotations, calls of one rank's tensors, and what is returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import foci
from foci.core.errors import ShapeError, Unsupported
from foci.core.world import World
from foci.parallel.handoff import handoff
from foci.parallel.operators import COUNT_INSTEAD, OPERATORS, Letters, Operator, operator_of
from foci.parallel.ring import ring

Worlds = Callable[[int], World]


def operator(function: object) -> Operator:
    found = operator_of(function)
    assert isinstance(found, Operator)
    return found


def tensors(T: int = 3, S: int = 3, H: int = 4, G: int = 2) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, T, H, 5), torch.randn(2, S, G, 5), torch.randn(2, S, G, 6)


def test_every_public_operator_is_known_and_its_letters_are_those_of_its_annotations() -> None:
    assert [each.name for each in OPERATORS] == [
        "attention", "attention_with_lse", "linear_attention", "delta_rule", "scan", "selective_scan"
    ]  # fmt: skip
    letters = operator(foci.attention).letters
    assert letters["q"] == Letters(("B", "T", "H", "K")) and letters["k"] == Letters(("B", "S", "G", "K"))
    assert letters["bias"] == Letters(("B", "H", "T", "S"), broadcast=True)
    assert operator(foci.delta_rule).letters["beta"] == Letters(("B", "T", "H"))
    assert operator(foci.attention).results == (Letters(("B", "T", "H", "V")), Letters(("B", "T", "H")))
    assert operator_of(torch.nn.functional.scaled_dot_product_attention) is None


def test_tokens_are_t_or_where_there_is_no_t_s() -> None:
    bias = Letters(("B", "H", "T", "S"), broadcast=True)
    assert bias.token(torch.zeros(2, 4, 3, 9)) == 2
    assert bias.token(torch.zeros(3, 9)) == 0
    assert bias.token(torch.zeros(9)) is None  # its columns are all keys, which nobody cuts
    assert Letters(("B", "S", "G", "K")).token(torch.zeros(2, 3, 4, 5)) == 1
    assert Letters(("N", "H", "K", "V")).token(torch.zeros(2, 3, 4, 5)) is None


def test_a_call_may_hold_the_columns_of_the_whole_sequence() -> None:
    q, k, v = tensors()
    bias, seen = torch.randn(4, 3, 9), torch.ones(3, 9, dtype=torch.bool)
    bound = operator(foci.attention).bind((q, k, v), {"bias": bias, "mask": foci.Causal() & foci.Dense(seen)})
    assert bound.call.bias is bias and bound.call.dense is seen and bound.call.causal_end
    with pytest.raises(ShapeError, match="bias has shape"):
        operator(foci.attention).bind((q, k, v), {"bias": torch.randn(4, 2, 9)})


def test_what_binds_runs_and_returns_as_the_function_does() -> None:
    q, k, v = tensors()
    for function in (foci.attention, foci.attention_with_lse):
        each = operator(function)
        bound = each.bind((q, k, v), {"scale": 0.3, "backend": "reference"})
        got, expected = each.returns(each.run(bound.call, bound.backend), bound), function(q, k, v, scale=0.3)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, expected)), strict=True):
            torch.testing.assert_close(one, other)
    each = operator(foci.linear_attention)
    for wanted in (True, False):
        bound = each.bind((k, k, v), {"return_state": wanted})
        out, state = each.returns(each.run(bound.call, None), bound)
        assert out.shape == v.shape and (state is not None) == wanted


def test_a_decay_per_head_is_known_from_one_of_a_single_token() -> None:
    k, v = torch.randn(1, 1, 2, 5), torch.randn(1, 1, 2, 6)
    each = operator(foci.linear_attention)
    for decay, token in ((-torch.ones(2), None), (-torch.ones(1, 1, 2), 1)):
        bound = each.bind((k, k, v), {"log_decay": decay})
        assert each.letters["log_decay"].token(bound.call.log_decay) == token
        expected = foci.linear_attention(k, k, v, log_decay=decay)[0]
        torch.testing.assert_close(each.run(bound.call, None)[0], expected)


def test_an_unknown_argument_is_refused_by_the_operators_name() -> None:
    with pytest.raises(TypeError, match="attention: got an unexpected keyword argument 'maks'"):
        operator(foci.attention).bind(tensors(), {"maks": None})


def test_facts_leave_out_what_may_differ_and_say_the_rest() -> None:
    each = operator(foci.attention)
    facts = [each.facts(each.bind(tensors(T, S), {"bias": torch.randn(T, 9)}).call) for T, S in ((3, 3), (2, 4))]
    assert facts[0] == facts[1] and facts[0]["q"] == "float32 [2, *, 4, 5]" and facts[0]["bias"] == "float32 [*, 9]"
    q, k, v = tensors()
    assert each.facts(each.bind((q.requires_grad_(), k, v), {}).call)["q"] == "float32 [2, *, 4, 5] with gradient"
    offsets = torch.tensor([0, 3])
    packed = each.bind(tuple(x[:1] for x in (q, k, v)), {"mask": foci.Packed(offsets), "dropout": 0.1})
    assert each.facts(packed.call)["q_offsets"] is offsets and "seed" not in each.facts(packed.call)
    assert each.tokens(each.bind(tensors(3, 4), {}).call) == {"q": 3, "k": 4, "v": 4}


def test_transforms_are_refused_where_arguments_are_bound() -> None:
    q, k, v = tensors()
    each = operator(foci.attention)
    with pytest.raises(Unsupported, match=r"attention: a wrapper over ranks cannot run under torch\.func"):
        torch.func.grad(lambda x: each.bind((x, k, v), {}).call.q.sum())(q)
    with pytest.raises(Unsupported, match="forward mode"):
        torch.func.jvp(lambda x: each.bind((x, k, v), {}).call.q, (q,), (q,))


def counted(split: Callable[..., Any], function: Callable[..., Any]) -> str:
    q = torch.ones(1, 4, 2, 8)
    with FlopCounterMode(display=False), pytest.warns(UserWarning, match="flop counter") as told:
        split(function, dist.group.WORLD)(q, q, q)
    return str(told[0].message)


@pytest.mark.parametrize(("split", "function"), [(ring, foci.attention), (handoff, foci.linear_attention)])
def test_who_counts_operations_is_told_that_those_of_pieces_are_missed(
    worlds: Worlds, split: Callable[..., Any], function: Callable[..., Any]
) -> None:
    for said in worlds(1).run(counted, split, function):
        assert said.startswith(
            f"{split.__name__} of {function.__name__}: torch's flop counter sees a part of its operations, or none; "
            f"count {COUNT_INSTEAD}"
        )
