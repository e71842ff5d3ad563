"""Effects are told once for all gradients; what says no is no fault (what is wrong: tests/check/effects_gallery.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.check.run import LAWS, examine
from foci.ops.softmax.conventions import adapt
from foci.ops.softmax.spec import SPEC
from tests.check import effects_gallery
from tests.check.effects_gallery import EFFECTS, ByHand, probabilities_in_a_workspace
from tests.check.gallery import no_maximum_subtracted, right
from tests.check.test_laws import ask

EAGER = [law.name for law in LAWS if law.number not in (1, 12, 14)]  # those that compare one number with another


class Once(ByHand):
    """Frees what it kept, and says so when it is asked again."""

    forward = staticmethod(ByHand.forward)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        if ctx.p is None:
            raise RuntimeError("its backward runs once")
        grads = ByHand.backward(ctx, dout)
        ctx.p = None
        return grads


def test_a_backward_by_hand_passes() -> None:
    assert ask(EFFECTS, adapt(lambda q, k, v: ByHand.apply(q, k, v))) == []


def test_a_second_backward_may_raise() -> None:
    assert ask(EFFECTS, adapt(lambda q, k, v: Once.apply(q, k, v))) == []


def test_a_backward_that_a_call_in_between_breaks_is_told_with_its_error() -> None:
    current: list[Tensor] = []

    class Latest(ByHand):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = ByHand.forward(ctx, q, k, v)
            current[:] = [ctx.p]
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
            if ctx.p is not current[0]:
                raise KeyError("another call's")
            return ByHand.backward(ctx, dout)

    [told] = set(ask(EFFECTS, adapt(lambda q, k, v: Latest.apply(q, k, v))))
    assert "another call before the backward" in told and "another call's" in told


def test_one_sentence_names_all_gradients() -> None:
    (told,) = set(ask(EFFECTS, adapt(probabilities_in_a_workspace)))
    assert told.startswith("dq, dk, dv: another call before the backward")


def test_a_refusal_without_gradients_is_none_of_a_fault() -> None:
    def only_trained(q, k, v):
        if not torch.is_grad_enabled():
            raise NotImplementedError("no inference")
        return right(q, k, v)[0]

    assert ask(EFFECTS, adapt(only_trained)) == []


def test_numbers_that_are_none_are_no_other_numbers() -> None:
    assert ask(EFFECTS, adapt(no_maximum_subtracted)) == []


def test_rows_of_nan_are_not_told_as_overwritten() -> None:
    def empty_rows(q, k, v, *, causal=False):
        logits = torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
        if causal:
            T, S = logits.shape[2:]
            logits = logits.masked_fill(torch.ones(T, S, dtype=torch.bool).triu(S - T + 1), -torch.inf)
        return torch.einsum("bhts,bshv->bthv", logits.softmax(-1), v)

    assert ask(EFFECTS, adapt(empty_rows)) == []


@pytest.mark.parametrize("name", ["inference_forgets_causality", "untrained_output_in_a_buffer"])
def test_a_fault_of_the_untrained_is_told_once_and_by_no_other_law(name: str) -> None:
    candidate = adapt(getattr(effects_gallery, name))
    report = examine(SPEC, candidate, only=EAGER, dtypes=(torch.float32,), isolated=False)
    assert [(row.law, len(row.failures)) for row in report.rows if row.failures] == [(EFFECTS, 1)]
