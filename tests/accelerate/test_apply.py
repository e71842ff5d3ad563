"""A saved plan goes into a model of the same kind, comes out exactly, and is refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from foci.accelerate import zoo
from foci.accelerate.apply import apply, denoiser, library_of, route
from foci.accelerate.plan import CompilePlan, Plan, SitePlan, identify
from foci.accelerate.run import Accelerated, accelerate
from foci.core.errors import Unsupported
from foci.nn import DeltaNet


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
    with pytest.raises(ValueError, match=r"apply: model is an int; expected an nn.Module or a Diffusers pipeline"):
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


class Two(nn.Module):
    """Of foci's own layers, the first with a backend that its user named."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = DeltaNet(16, 2, backend="reference"), DeltaNet(16, 2)


def planned(model: nn.Module, fixed: bool = False, backend: str = "chunked", **more: Any) -> Plan:
    sites = [SitePlan(n, "DeltaNet", "Two", "foci", backend, fixed, [], {}, "delta") for n in ("first", "second")]
    return Plan("Two", identify(model), "cpu", "float32", sites, [], **more)


def named(model: Two) -> list[str | None]:
    return [model.first.backend, model.second.backend]


def test_what_foci_would_choose_it_goes_on_choosing_and_what_was_measured_is_named() -> None:
    model = Two()
    sites, fixed = planned(model).sites, planned(model, fixed=True).sites
    both = {"first", "second"}
    for given, there, at in (
        (None, [None, None], both),
        (sites, [None, None], both),
        (fixed, ["chunked", "chunked"], both),
        ([sites[0], fixed[1]], ["chunked", "chunked"], both),
        (sites[1:], ["reference", "chunked"], {"second"}),
    ):
        applied = route(model, given)
        assert named(model) == there and set(applied.sites) == at
        assert list(applied.skipped) == [(name, "left by the plan") for name in ("first", "second") if name not in at]
        for _ in range(2):
            applied.restore()
            assert named(model) == ["reference", None]


def test_a_plan_that_cannot_be_put_in_says_why_and_changes_nothing() -> None:
    model = Two()
    sites = [planned(model, fixed=True).sites[0], planned(model, backend=None).sites[1]]  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="the plan cannot be put into Two") as told:
        route(model, sites)
    assert told.value.reasons == ["second: left by the plan"] and named(model) == ["reference", None]
    with pytest.raises(ValueError, match="plan was made over 2 ranks; expected one of a single process"):
        apply(model, planned(model, ranks={"world": 2}))
    with pytest.raises(ValueError, match="another model"):
        apply(nn.ModuleList([Two()]), planned(model))
    assert named(model) == ["reference", None]


@pytest.mark.parametrize("mode", ["off", "default"])
def test_what_is_compiled_is_taken_out_first_and_once(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    model, told = Two(), []

    def compile_parts(*given: Any) -> Any:
        told.append(given)
        return SimpleNamespace(restore=lambda: told.append(named(model)))

    monkeypatch.setattr("foci.accelerate.apply.compile_parts", compile_parts)
    plan = planned(model, fixed=True, compile=CompilePlan(mode))
    for given in (plan, plan.as_dict()):
        told.clear()
        with apply(model, given) as applied:
            assert named(model) == ["chunked", "chunked"] and "Compiled" not in repr(applied)
        applied.restore()
        assert named(model) == ["reference", None]
        assert told == ([] if mode == "off" else [(model, mode, ["first", "second"]), ["chunked", "chunked"]])


def test_the_part_of_a_pipeline_that_runs_every_step() -> None:
    model, other = Two(), nn.Linear(2, 2)
    assert library_of(model) == "foci" and denoiser(model, "apply") == ("", model)
    for components, part in (
        ({"vae": other, "transformer": model, "unet": other}, "transformer"),
        ({"transformer": None, "unet": model}, "unet"),
        ({"prior": model, "text_encoder": other}, "prior"),
    ):
        assert denoiser(SimpleNamespace(components=components), "apply") == (part, model)
    with pytest.raises(ValueError, match=r"apply: SimpleNamespace has no transformer or unet; it has \['a', 'vae'\]"):
        denoiser(SimpleNamespace(components={"vae": other, "a": None}), "apply")
    with pytest.raises(ValueError, match=r"apply: model is a dict; expected an nn.Module or a Diffusers pipeline"):
        denoiser({}, "apply")
