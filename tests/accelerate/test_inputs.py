"""Inputs made from a configuration alone: every model of the zoo runs on them, at two sizes."""

from __future__ import annotations

import pytest
import torch

from foci.accelerate import zoo
from foci.accelerate.inputs import inputs_for


@pytest.mark.parametrize("name", [name for name in zoo.NAMES if name != "minilm"])
def test_both_sizes_run(name: str) -> None:
    subject = zoo.load(name)
    with torch.no_grad():
        first = subject.model(**subject.inputs)[0]
        assert first.isfinite().all()
        assert subject.other is not None
        assert subject.model(**subject.other)[0].shape != first.shape


def test_unknown_forward_asks_for_inputs() -> None:
    with pytest.raises(ValueError, match=r"the forward of Linear takes is not known here"):
        inputs_for(torch.nn.Linear(2, 2))


def test_inputs_are_the_same_each_time_and_padded_where_the_model_knows_it() -> None:
    model = zoo.load("pixart").model
    one, other = inputs_for(model), inputs_for(model)
    assert torch.equal(one["hidden_states"], other["hidden_states"])
    assert one["encoder_attention_mask"].tolist() == [[1] * 12, [1] * 6 + [0] * 6]
    assert inputs_for(model, larger=True)["hidden_states"].shape[-1] > one["hidden_states"].shape[-1]


def test_text_has_padding_and_no_cache() -> None:
    inputs = inputs_for(zoo.load("llama").model)
    assert inputs["use_cache"] is False
    assert inputs["attention_mask"].sum(-1).tolist() == [48, 32]
