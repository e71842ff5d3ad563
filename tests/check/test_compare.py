"""The error budget: what passes, what does not, at its very edge."""

from __future__ import annotations

import math

import pytest
import torch

from foci.check.compare import (
    CAUSAL,
    LOGARITHM,
    RECURRENT,
    RELATIVE,
    VANISHED,
    changed,
    compare,
    difference,
    extent,
    rms,
    twice,
)

TRUTH = torch.linspace(-2, 2, 1001, dtype=torch.float64)
EXACT = torch.zeros_like(TRUTH)
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_relative_rms(dtype: torch.dtype) -> None:
    assert compare(TRUTH * (1 + 0.99 * RELATIVE), TRUTH, EXACT, dtype).ok
    found = compare(TRUTH * (1 + 1.01 * RELATIVE), TRUTH, EXACT, dtype)
    assert not found.ok and found.size == pytest.approx(1.01e-5) and found.budget == pytest.approx(1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_measured_on_a_plain_computation(dtype: torch.dtype) -> None:
    yardstick = torch.full_like(TRUTH, 1e-2)
    assert compare(TRUTH + 0.99e-2, TRUTH, yardstick, dtype).ok
    assert not compare(TRUTH + 1.01e-2, TRUTH, yardstick, dtype).ok, "RMS above 1 x"
    spike = TRUTH.clone()
    spike[0] += 2.1e-2
    assert not compare(spike, TRUTH, yardstick, dtype).ok, "max above 2 x"
    spike[0] -= 0.2e-2
    assert compare(spike, TRUTH, yardstick, dtype).ok


@pytest.mark.parametrize("dtype", HALVES)
def test_what_a_plain_computation_overflows_in_excuses_no_other_number(dtype: torch.dtype) -> None:
    yardstick = torch.full_like(TRUTH, 1e-2)
    yardstick[0] = torch.inf
    found = TRUTH + 0.99e-2
    found[0] = torch.inf
    assert compare(found, TRUTH, yardstick, dtype).ok
    found[1] += 1.0
    assert not compare(found, TRUTH, yardstick, dtype).ok
    found[1] = torch.nan
    assert not compare(found, TRUTH, yardstick, dtype).ok


@pytest.mark.parametrize("dtype", HALVES)
def test_beside_what_overflows_half_precision_is_held_to_no_more_than_float32_of_the_rest(dtype: torch.dtype) -> None:
    yardstick, truth = torch.zeros_like(TRUTH), TRUTH.clone()
    yardstick[0], truth[0] = torch.inf, 1e6
    found = truth * (1 + 0.9e-5)
    found[0] = torch.inf
    assert compare(found, truth, yardstick, dtype).ok
    found[1] += 1.0  # little beside 1e6
    assert not compare(found, truth, yardstick, dtype).ok


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_never_held_to_more_than_float32(dtype: torch.dtype) -> None:
    assert compare(TRUTH * (1 + 0.9 * RELATIVE), TRUTH, EXACT, dtype).ok


def test_recurrent_operators_have_their_own_half_budget() -> None:
    assert compare(TRUTH * (1 + 0.99 * RECURRENT), TRUTH, EXACT, torch.bfloat16, recurrent=True).ok
    assert not compare(TRUTH * (1 + 1.01 * RECURRENT), TRUTH, EXACT, torch.bfloat16, recurrent=True).ok
    assert not compare(TRUTH * (1 + 0.99 * RECURRENT), TRUTH, EXACT, torch.float32, recurrent=True).ok


def test_logarithms_have_an_absolute_budget() -> None:
    yardstick = torch.ones_like(TRUTH)
    assert compare(TRUTH + 0.99 * LOGARITHM, TRUTH, yardstick, torch.bfloat16, log=True).ok
    assert not compare(TRUTH + 1.01 * LOGARITHM, TRUTH, yardstick, torch.bfloat16, log=True).ok
    assert not compare(TRUTH + 5e-5, TRUTH, EXACT, torch.float32, log=True).ok


def test_equal_infinities_are_equal_and_others_are_infinitely_wrong() -> None:
    empty = torch.tensor([0.5, -torch.inf])
    assert compare(empty, empty, torch.zeros(2), torch.float32, log=True).ok
    for wrong in (0.0, torch.nan, torch.inf):
        found = compare(torch.tensor([0.5, wrong]), empty, torch.zeros(2), torch.float32, log=True)
        assert not found.ok and math.isinf(found.size)
    assert not compare(torch.tensor([0.5, torch.nan]), torch.tensor([0.5, 1.0]), torch.zeros(2), torch.float32).ok


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("large", [torch.inf, -torch.inf])
def test_an_infinity_in_the_truth_excuses_no_other_number(large: float, recurrent: bool, dtype: torch.dtype) -> None:
    truth = TRUTH.clone()
    truth[3] = large
    assert compare(truth, truth, EXACT, dtype, recurrent=recurrent).ok and changed(truth, truth, bitwise=False).ok
    for wrong in (5.0, torch.nan, torch.inf):
        found = truth.clone()
        found[7] = wrong
        assert not compare(found, truth, EXACT, dtype, recurrent=recurrent).ok
        assert not changed(found, truth, bitwise=False).ok
    lost = truth.clone()
    lost[3] = 1.0
    assert not compare(lost, truth, EXACT, dtype, recurrent=recurrent).ok


def test_budgets_are_those_that_the_docstrings_name() -> None:
    assert (RELATIVE, LOGARITHM, RECURRENT, CAUSAL, VANISHED) == (1e-5, 2e-4, 5e-3, 1e-6, 1e-6)


def test_what_was_nothing_must_stay_nothing() -> None:
    assert changed(EXACT, EXACT, bitwise=False).ok
    assert not changed(EXACT + 1e-30, EXACT, bitwise=False).ok
    assert not changed(EXACT, EXACT * torch.nan, bitwise=False).ok


def test_a_truth_that_cancels_to_nothing_is_measured_on_its_siblings() -> None:
    vanished = TRUTH * 1e-16
    noise = vanished + 1e-8
    assert not compare(noise, vanished, EXACT, torch.float32).ok
    assert compare(noise, vanished, EXACT, torch.float32, siblings=1.0).ok
    assert not compare(vanished + 1e-4, vanished, EXACT, torch.float32, siblings=1.0).ok


def test_zero_truth_has_no_budget_of_its_own() -> None:
    assert compare(EXACT, EXACT, EXACT, torch.float32).ok
    assert not compare(EXACT + 1e-30, EXACT, EXACT, torch.float32).ok


def test_nothing_is_always_right() -> None:
    none = torch.empty(0)
    assert compare(none, none, none, torch.float32).ok and changed(none, none, True).ok and twice(none, none, none).ok


def test_changed() -> None:
    assert changed(TRUTH, TRUTH, bitwise=True).ok
    assert not changed(TRUTH + 1e-15, TRUTH, bitwise=True).ok
    assert changed(TRUTH + 0.9 * CAUSAL, TRUTH, bitwise=False).ok
    assert not changed(TRUTH + 3 * CAUSAL, TRUTH, bitwise=False).ok
    assert changed(TRUTH * torch.inf, TRUTH * torch.inf, bitwise=True).ok


def test_a_number_larger_than_the_others_may_change_by_its_last_digit() -> None:
    before = torch.ones(4096)
    before[5] = 20.3
    for place, move, ok in ((5, 2.0**-19, True), (5, 3 * CAUSAL * 20.3, False), (7, 3 * CAUSAL, False)):
        after = before.clone()
        after[place] += move
        assert changed(after, before, bitwise=False).ok == ok and not changed(after, before, bitwise=True).ok
        assert float((after - before).abs().max()) > CAUSAL * rms(before)  # which was the bound of each number


def test_twice() -> None:
    assert twice(TRUTH + 2e-2, TRUTH + 1.01e-2, TRUTH).ok
    assert not twice(TRUTH + 2e-2, TRUTH + 0.99e-2, TRUTH).ok


def test_measures() -> None:
    assert rms(torch.tensor([3.0, 4.0])) == pytest.approx(math.sqrt(12.5))
    assert rms(torch.empty(0)) == extent(torch.empty(0)) == 0.0
    assert extent(torch.tensor([3, 4])) == rms(torch.tensor([3, 4]))
    assert rms(torch.tensor([3.0, torch.inf])) == torch.inf
    assert extent(torch.tensor([3.0, 4.0, torch.inf, -torch.inf])) == pytest.approx(2.5)
    inf = torch.inf
    assert difference(torch.tensor([-inf, 1.0, inf]), torch.tensor([-inf, 1.5, -inf])).tolist() == [0.0, 0.5, inf]
