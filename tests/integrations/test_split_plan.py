"""foci.integrations.split_plan: the known models have plans that fit them, and a plan that does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from foci.core.errors import Unsupported
from foci.integrations.diffusers import attention_sites
from foci.integrations.split_plan import PLANS, Cut, Gather, SplitPlan, fits, plan_for, require_fit
from tests.integrations.models import build

KNOWN = ("dit", "flux", "sd3", "pixart", "wan", "hunyuan")


def sites(name: str) -> list[str]:
    return [site for site, _, _ in attention_sites(build(name).model)]


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_has_a_plan_that_fits(name: str) -> None:
    small = build(name)
    plan = plan_for(small.model)
    require_fit(plan, small.model, sites(name))
    assert plan.model == type(small.model).__name__
    assert json.loads(json.dumps(plan.as_dict()))["model"] == plan.model


def test_every_plan_is_of_one_of_them() -> None:
    assert {type(build(name).model).__name__ for name in KNOWN} == PLANS.keys()


def test_a_model_without_a_plan_is_told_what_to_do() -> None:
    with pytest.raises(Unsupported, match=re.escape("SanaTransformer2DModel has no plan")) as error:
        plan_for(build("sana").model)
    assert "split_infer.infer(model, inputs)" in str(error.value)


WRONG = {
    "module": ({"cuts": (Cut("blocks.0", "hidden_states", 1),)}, "it splits blocks.0: hidden_states, dimension 1, and"),
    "argument": ({"cuts": (Cut("pos_embed", "ids", 1),)}, "the forward of pos_embed has no such argument"),
    "gather": ({"gathers": (Gather("proj"),)}, "it gathers proj: output, dimension 1, and there is no such module"),
    "site": ({"sites": ()}, "it says nothing of the attention site transformer_blocks.0.attn1"),
    "config": ({"refused": (("patch_size", 2, "for a test"),)}, "its config has patch_size=2: for a test"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_plan_that_does_not_fit_is_refused(fault: str) -> None:
    change, sentence = WRONG[fault]
    small = build("dit")
    plan = dataclasses.replace(plan_for(small.model), **change)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        require_fit(plan, small.model, sites("dit"))


def test_patterns() -> None:
    assert fits("blocks.*.attn", "blocks.12.attn") and fits("", "")
    assert not fits("blocks.*.attn", "blocks.1.attn.q") and not fits("blocks.*", "blocks") and not fits("a.b", "axb")
    plan = SplitPlan("M", (), (), (("a.*", "self"), ("b.*.c", "cross")))
    assert [plan.kind(site) for site in ("a.0", "b.1.c", "d")] == ["self", "cross", None]


def test_a_plan_is_readable() -> None:
    assert str(PLANS["PixArtTransformer2DModel"]).splitlines() == [
        "PixArtTransformer2DModel:",
        "  split   pos_embed: output 0, dimension 1",
        "  gather  proj_out: output, dimension 1",
        "  site    transformer_blocks.*.attn1: every token is image",
        "  site    transformer_blocks.*.attn2: image asks, text answers",
    ]
