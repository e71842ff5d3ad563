"""A saved plan goes into a model of the same kind, comes out exactly, and is refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from foci.accelerate import zoo
from foci.accelerate.apply import apply, library_of, route
from foci.accelerate.run import Accelerated, accelerate
from foci.core.errors import Unsupported


def test_applied_equals_original_and_restores_exactly(bert: Accelerated, tmp_path: Path) -> None:
    path = bert.plan.save(tmp_path / "plan.json")
    subject = zoo.load("bert")
    model, config = subject.model, subject.model.config
    with torch.no_grad():
        before = model(**subject.inputs).last_hidden_state
        with apply(model, path) as applied:
            assert list(applied.sites) == bert.plan.names
            assert model.config is not config
            torch.testing.assert_close(model(**subject.inputs).last_hidden_state, before, rtol=1e-5, atol=1e-5)
        assert model.config is config
        assert torch.equal(model(**subject.inputs).last_hidden_state, before)
    applied.restore()


def test_diffusers_processors_are_the_very_objects_again() -> None:
    subject = zoo.load("pixart")
    processors = dict(subject.model.attn_processors)
    done = accelerate(subject.model, subject.inputs, compile="off")
    assert all(subject.model.attn_processors[name] is not own for name, own in processors.items())
    done.restore()
    assert all(subject.model.attn_processors[name] is own for name, own in processors.items())
    with apply(subject.model, done.plan):
        pass
    assert all(subject.model.attn_processors[name] is own for name, own in processors.items())


def test_a_plan_goes_into_the_pipeline_it_was_made_on() -> None:
    subject = zoo.load("pixart")
    pipeline = SimpleNamespace(components={"transformer": subject.model, "vae": nn.Linear(2, 2)})
    done = accelerate(subject.model, subject.inputs, compile="off")
    done.restore()
    processors = dict(subject.model.attn_processors)
    with apply(pipeline, done.plan) as applied:
        assert list(applied.sites) == done.plan.names
        assert all(subject.model.attn_processors[name] is not own for name, own in processors.items())
    assert all(subject.model.attn_processors[name] is own for name, own in processors.items())
    with pytest.raises(ValueError, match=r"apply: SimpleNamespace has no transformer or unet; it has \['vae'\]"):
        apply(SimpleNamespace(components={"vae": nn.Linear(2, 2)}), done.plan)
    with pytest.raises(ValueError, match=r"apply: model is a int; expected an nn.Module or a Diffusers pipeline"):
        apply(3, done.plan)


def test_foreign_plan_is_refused_before_anything_changes(bert: Accelerated) -> None:
    model = zoo.load("llama").model
    config = model.config
    with pytest.raises(ValueError, match="another model"):
        apply(model, bert.plan)
    assert model.config is config


def test_model_without_attention() -> None:
    assert library_of(nn.Linear(2, 2)) is None
    with pytest.raises(Unsupported, match=r"Linear has no attention that foci can route"):
        route(nn.Linear(2, 2))


def test_a_language_model_may_make_calls_that_the_plan_never_saw() -> None:
    subject = zoo.load("llama")
    model, ids = subject.model, subject.inputs["input_ids"]
    done = accelerate(model, subject.inputs, compile="off")
    with torch.no_grad():
        whole = model(ids).logits
        cache = model(ids[:, :20], use_cache=True).past_key_values
        # 28 queries over 48 keys: aten, which the plan names, cannot run these.
        rest = model(ids[:, 20:], past_key_values=cache, use_cache=True).logits
    done.restore()
    torch.testing.assert_close(rest, whole[:, 20:], rtol=1e-4, atol=1e-5)


def test_a_plan_of_some_sites_leaves_the_others_and_an_impossible_one_is_refused(bert: Accelerated) -> None:
    model = zoo.load("bert").model
    with route(model, bert.plan.sites[:1]) as applied:
        assert list(applied.sites) == bert.plan.names[:1]
    flux = zoo.load("flux")
    done = accelerate(flux.model, flux.inputs, compile="off")
    done.restore()
    for processor in flux.model.attn_processors.values():
        processor._attention_backend = "native"  # what set_attention_backend does, and its user's own choice
    with pytest.raises(Unsupported, match=r"the plan cannot be put into FluxTransformer2DModel"):
        apply(flux.model, done.plan)
