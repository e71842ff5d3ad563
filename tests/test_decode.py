"""benchmarks/decode.py gives no time for a wrong answer, nor for a state that nobody wrote."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import foci

CPU = torch.device("cpu")


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    found = importlib.import_module("decode")
    monkeypatch.setattr(found, "interleave", lambda ways, **_: pytest.fail("timed"))
    return found


@pytest.mark.parametrize("name", ["linear_attention_step", "delta_rule_step"])
def test_a_state_that_was_not_written_has_no_time(name: str, decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = getattr(foci, name)
    own = 4 if name == "delta_rule_step" else 3  # which of its arguments is the state
    monkeypatch.setattr(
        foci, name, lambda *given, **named: step(*given[:own], given[own].clone(), *given[own + 1 :], **named)
    )
    torch.manual_seed(0)
    word = "delta" if name == "delta_rule_step" else "linear"
    for each in decode.recurrent(CPU, 2, 2, 16):
        with pytest.raises((ValueError, pytest.fail.Exception)) as raised:  # type: ignore[attr-defined]
            decode.measure(each, CPU, 1e9)
        assert ("no time is given" in str(raised.value)) == each.name.startswith(word), each.name


@pytest.mark.parametrize("row", [0, 1])
def test_every_row_is_compared(row: int, decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = foci.attention

    def wrong(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        out = attention(q, *rest)
        if q.dtype == torch.bfloat16:
            out[row] = math.nan
        return out

    monkeypatch.setattr(foci, "attention", wrong)
    whole, paged = decode.softmax(CPU, 2, 64, 4, 2, 16)
    with pytest.raises(ValueError, match="off by inf: no time is given for it"):
        decode.measure(whole, CPU, 1e9)
    with pytest.raises(pytest.fail.Exception, match="timed"):  # type: ignore[attr-defined]
        decode.measure(paged, CPU, 1e9)


def test_an_error_that_is_no_number_is_the_worst(decode: Any) -> None:
    assert decode.worst(0.5, math.nan, 0.1) == math.inf and decode.worst(0.5, 0.1) == 0.5 and decode.worst() == 0.0
