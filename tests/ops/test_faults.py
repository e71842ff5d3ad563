"""Faults that recurrences share: each argument's own, none where the argument is absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foci.core.spec import Mistake, Outputs
from foci.ops.decay import mistakes as linear
from foci.ops.decay.cases import CASES
from foci.ops.faults import walk

INPUTS = {case.name: case.make(torch.float64, torch.device("cpu"), 0) for case in CASES}
BY_NAME = {mistake.name: mistake for mistake in linear.MISTAKES}


def differs(mistake: Mistake, inputs: dict[str, Any], forward: Callable[[Any], Outputs]) -> bool:
    """Whether a mistake answers, in the right shapes, with something else."""
    made = mistake.compute(inputs, 0.01) if mistake.fits else mistake.compute(inputs)
    if made is None:
        return False
    right = forward(inputs)
    assert [tuple(m.shape) for m in made] == [tuple(t.shape) for t in right]
    return any(not torch.allclose(m, t, rtol=1e-6, atol=1e-6) for m, t in zip(made, right, strict=True))


@pytest.mark.parametrize(
    ("name", "shows", "hides"),
    [
        ("decay in base 2", "decay per head", "plain"),
        ("gate of the next token", "decay per token", "decay per head"),
        ("decay on the values", "decay per channel", "decay per token"),
        ("state ignored", "state", "decay per token"),
        ("state read transposed", "state", "not causal, grouped heads"),
        ("state of the first row", "state", "decay per token"),
        ("state of the first row", "state", "one chunk"),
        ("state of whole blocks of 16", "plain", "one chunk"),
        ("state of whole blocks of 64", "no whole chunks", "plain"),
        ("state of whole blocks of 16", "not causal", "packed"),
        ("state transposed", "plain", "odd widths"),
        ("state without the last token", "plain", "packed"),
        ("documents ignored", "packed", "plain"),
        ("heads interleaved", "grouped heads", "one key head"),
        ("scale ignored", "scale", "plain"),
        ("read before the write", "plain", "not causal"),
    ],
)
def test_a_fault_shows_where_its_argument_is(name: str, shows: str, hides: str) -> None:
    assert differs(BY_NAME[name], INPUTS[shows], linear.forward)
    assert not differs(BY_NAME[name], INPUTS[hides], linear.forward)


def test_faults_of_the_state_leave_the_output_right() -> None:
    for name in (
        "state of whole blocks of 16",
        "state transposed",
        "state without the last token",
        "state not handed on",
    ):
        out, state = BY_NAME[name].compute(INPUTS["decay per token"])
        right = linear.forward(INPUTS["decay per token"])
        assert torch.allclose(out, right[0]) and not torch.allclose(state, right[1])


def test_a_state_of_whole_blocks_is_that_of_the_tokens_before_the_rest() -> None:
    inputs = INPUTS["decay per token"]
    cut = {n: x[:, :16] if n in ("q", "k", "v", "log_decay") else x for n, x in inputs.items()}
    state = BY_NAME["state of whole blocks of 16"].compute(inputs)[1]
    torch.testing.assert_close(state, linear.forward(cut)[1])


def test_a_fitted_fault_is_right_at_zero() -> None:
    made = BY_NAME["scale off"].compute(INPUTS["scale"], 0.0)
    torch.testing.assert_close(made, linear.forward(INPUTS["scale"]))


def test_nothing_to_walk_gives_the_state_back() -> None:
    inputs = {n: x[:, :0] if n in ("q", "k", "v", "log_decay") else x for n, x in INPUTS["state"].items()}
    out, state = walk(inputs, linear.step)
    assert out.shape == (2, 0, 4, 16) and torch.equal(state, inputs["state"])
