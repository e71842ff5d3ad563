"""Calls of the recurrences: found in a model, repeated from their arguments, in words, cut to one head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foci.accelerate.calls import (
    arguments,
    dims,
    in_float64,
    letters,
    mask_text,
    one_head,
    reference_elements,
    run_on_backend,
    spec_of,
)
from foci.accelerate.sites import attention_calls
from foci.ops import SPECS

RECURRENCES = ("linear", "delta", "scan", "selective_scan")


def _cases() -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}: {case.name}")
        for name in RECURRENCES
        for case in SPECS[name].cases[:6]
    ]  # fmt: skip


def _call(name: str, case: Any) -> Any:
    given = case.make(torch.float64, torch.device("cpu"), 0)
    bind = SPECS[name].bind
    assert bind is not None
    return bind(**given)


@pytest.mark.parametrize(("name", "case"), _cases())
def test_arguments_repeat_the_call(name: str, case: Any) -> None:
    call = _call(name, case)
    assert spec_of(call).name == name
    again = type(call)(*SPECS[name].bind(**arguments(call)))
    for one, other in zip(run_on_backend(call, "reference"), run_on_backend(again, "reference"), strict=True):
        assert torch.equal(one, other)
    assert in_float64(call)[0].dtype == torch.float64
    assert reference_elements(call) > 0


@pytest.mark.parametrize(("name", "case"), _cases())
def test_one_head_is_a_part_of_the_whole(name: str, case: Any) -> None:
    call = _call(name, case)
    part = one_head(call)
    out, whole = run_on_backend(part, "reference")[0], run_on_backend(call, "reference")[0]
    torch.testing.assert_close(out, whole[tuple(slice(size) for size in out.shape)])


def test_sizes_and_features_in_words() -> None:
    q, v, beta = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 4, 8), torch.rand(2, 5, 4)
    bind = SPECS["delta"].bind
    call = bind(q, q, v, beta, log_decay=-beta, state=torch.zeros(2, 4, 8, 8))
    assert dims(letters(call)) == "B2 T5 G2 H4 K8"
    assert mask_text(call) == "decay per head & state"
    assert mask_text(bind(q, q, v, beta)) == "no decay"
    assert reference_elements(call) == 2 * 5 * 4 * 8 * 8


class Mixer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        call = SPECS["delta"].bind(x, x, x, x[..., 0].sigmoid())
        return run_on_backend(call, "chunked")[0]


def test_a_recurrence_that_runs_is_seen_with_its_arguments() -> None:
    x = torch.randn(1, 5, 2, 8)
    seen = attention_calls(nn.Sequential(Mixer()), lambda: Mixer()(x))
    assert [event.via for event in seen] == ["foci"]
    assert spec_of(seen[0].call).name == "delta"
    assert torch.equal(seen[0].call.q, x)
