"""Affine: stretches of a recurrence combine exactly, diagonal and dense mixed, and with their gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from foci import Affine, Partial, fold
from foci.merge.algebra import scan

K, V = 3, 2


def draw(kind: str) -> Affine:
    shape = {"token": (2, 1), "channel": (2, K), "dense": (2, K, K)}[kind]
    return Affine(torch.randn(shape, dtype=torch.float64), torch.randn(2, K, V, dtype=torch.float64))


KINDS = ("token", "channel", "dense")


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=3)))
def test_a_fold_does_what_its_parts_do_one_after_the_other(kinds: tuple[str, ...]) -> None:
    parts = [draw(kind) for kind in kinds]
    state = torch.randn(2, K, V, dtype=torch.float64)
    expected = state
    for part in parts:
        expected = part.apply(expected)
    torch.testing.assert_close(fold(parts).apply(state), expected)
    torch.testing.assert_close(parts[0].combine(parts[1].combine(parts[2])).apply(state), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_neutral_changes_nothing(kind: str) -> None:
    part = draw(kind)
    for both in (part.combine(part.neutral()), part.neutral().combine(part)):
        torch.testing.assert_close(both.transition.expand_as(part.transition), part.transition)
        torch.testing.assert_close(both.offset, part.offset)


def test_an_exclusive_scan_gives_the_state_before_each_part() -> None:
    parts = [draw("channel") for _ in range(4)]
    state = torch.randn(2, K, V, dtype=torch.float64)
    for before, part in zip(scan(parts, inclusive=False), parts, strict=True):
        torch.testing.assert_close(before.apply(state), state_of(parts, part, state))


def state_of(parts: list[Affine], last: Affine, state: Tensor) -> Tensor:
    for part in parts:
        if part is last:
            break
        state = part.apply(state)
    return state


def test_a_gate_that_forgets_forgets() -> None:
    part = Affine(torch.zeros(2, K), torch.ones(2, K, V))
    assert torch.equal(part.apply(torch.full((2, K, V), 1e30)), torch.ones(2, K, V))


@pytest.mark.parametrize(("first", "second"), list(itertools.product(KINDS, repeat=2)))
def test_gradients(first: str, second: str) -> None:
    one, two = draw(first), draw(second)
    inputs = [x.requires_grad_() for x in (*one, *two)]
    assert gradcheck(lambda a, b, c, d: Affine(a, b).combine(Affine(c, d)).offset, inputs)


def test_parts_of_other_shapes_are_refused_not_broadcast() -> None:
    part, other = draw("channel"), Affine(torch.zeros(1, K), torch.zeros(1, K, V))
    with pytest.raises(ValueError, match=r"Affine: a part has offset \[1, 3, 2\]; expected \[2, 3, 2\]"):
        fold([part, other])


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_shape_is_refused_not_broadcast(kind: str) -> None:
    for wrong in ((K, V), (2, 1, V), (2, K, 1), (5, 2, K, V)):
        with pytest.raises(ValueError, match=r"Affine: state has shape \[.*\]; expected \[2, 3, 2\], the offset's"):
            draw(kind).apply(torch.zeros(wrong, dtype=torch.float64))


def test_parts_of_another_kind_are_named() -> None:
    with pytest.raises(TypeError, match=r"Affine: a part is of type Partial; expected a foci\.Affine"):
        fold([draw("dense"), Partial(torch.zeros(2, K, V), torch.zeros(2, K))])
