"""The whole job on transformers models with linear layers: every operator found, proved, applied from its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foci.accelerate import zoo
from foci.accelerate.apply import apply
from foci.accelerate.run import accelerate
from tests.integrations.linear_models import MODELS
from tests.integrations.transformers_models import tokens

OPERATORS = {
    "qwen3_next": {"delta", "softmax"},
    "kimi_linear": {"delta", "softmax"},
    "falcon_h1": {"linear", "softmax"},
    "jamba": {"selective_scan", "softmax"},
    "rwkv": {"scan"},
    "minimax": {"linear", "softmax"},
    "recurrent_gemma": {"scan", "softmax"},
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_plan_holds_every_operator_and_is_applied_from_its_file(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    done = accelerate(model, {"input_ids": tokens(2), "use_cache": False}, compile="off")
    assert {site.operator for site in done.plan.sites} == OPERATORS[name]
    assert all(row["error"] <= row["budget"] for row in done.plan.proof)
    assert {row["where"] for row in done.plan.proof} == {*done.plan.names, "whole model"}
    done.plan.save(tmp_path / "plan.json")
    expected = model(tokens(2)).logits
    done.restore()
    again = apply(model, tmp_path / "plan.json")
    assert set(again.sites) == set(done.plan.names)
    assert torch.equal(model(tokens(2)).logits, expected)
    again.restore()
    assert not any(method in vars(module) for module in model.modules() for method in ("forward", "_rnn_scan"))


@pytest.mark.parametrize(("name", "width"), [("tiny-qwen3-next", 128), ("tiny-kimi-linear", 64)])
def test_the_hybrids_of_the_zoo_are_long_and_mostly_linear(name: str, width: int) -> None:
    subject = zoo.load(name)
    assert subject.inputs["input_ids"].shape == (2, 512)
    assert subject.inputs["attention_mask"].sum(1).tolist() == [512, 341]
    assert subject.other is not None and subject.other["input_ids"].shape == (2, 768)
    linear = [module for module in subject.model.modules() if "Delta" in type(module).__name__]
    assert len(linear) == 6
    assert all(width in (module.norm if width == 128 else module.o_norm).weight.shape for module in linear)
