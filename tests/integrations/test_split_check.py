"""foci.integrations.split_check: right plans pass, and of a wrong one it is the tensor left unsplit that is named."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from torch import Tensor, nn

from foci.integrations.diffusers import attention_sites
from foci.integrations.split_check import SplitError, check
from foci.integrations.split_plan import Cut, Gather, SplitPlan, plan_for
from tests.integrations.models import build

TEXTS = {"dit": ("auto",), "pixart": ("auto",), "wan": ("auto",)}


@pytest.mark.parametrize("name", ["dit", "flux", "sd3", "pixart", "wan", "hunyuan"])
def test_the_known_plans_are_right(name: str) -> None:
    small = build(name)
    for size in (1, 2, 3, 4):
        for text in TEXTS.get(name, ("split", "replicated")):
            check(small.model, small.inputs, size=size, text=text)


# Model, the tensor that the plan forgets, and the module and tensor that the checker must name.
FORGOTTEN = [
    ("dit", "pos_embed", 0, "transformer_blocks.0.attn1", "q"),
    ("flux", "", "hidden_states", "transformer_blocks.0.attn", "hidden_states"),
    ("flux", "", "img_ids", "", "img_ids"),
    ("flux", "", "encoder_hidden_states", "transformer_blocks.0.attn", "encoder_hidden_states"),
    ("flux", "", "txt_ids", "", "txt_ids"),
    ("pixart", "pos_embed", 0, "transformer_blocks.0.attn1", "q"),
    ("wan", "rope", 0, "blocks.0.attn1", "rotary_emb[0]"),
    ("wan", "rope", 1, "blocks.0.attn1", "rotary_emb[1]"),
    ("wan", "blocks.0", "hidden_states", "blocks.0.attn1", "hidden_states"),
    ("hunyuan", "rope", 0, "transformer_blocks.0", "freqs_cis[0]"),
    ("hunyuan", "rope", 1, "transformer_blocks.0", "freqs_cis[1]"),
    ("hunyuan", "transformer_blocks.0", "hidden_states", "transformer_blocks.0.attn", "hidden_states"),
]


@pytest.mark.parametrize(("name", "module", "tensor", "found", "named"), FORGOTTEN)
def test_a_tensor_left_unsplit_is_named(name: str, module: str, tensor: str | int, found: str, named: str) -> None:
    small = build(name)
    plan = plan_for(small.model)
    cuts = tuple(cut for cut in plan.cuts if (cut.module, cut.tensor) != (module, tensor))
    assert len(cuts) == len(plan.cuts) - 1
    with pytest.raises(SplitError, match="was left unsplit") as error:
        check(small.model, small.inputs, dataclasses.replace(plan, cuts=cuts))
    assert (error.value.module, error.value.tensor, error.value.fault) == (found, named, "unsplit")


@pytest.mark.parametrize("name", ["dit", "flux", "sd3", "pixart", "wan", "hunyuan"])
def test_a_forgotten_gather_is_named(name: str) -> None:
    small = build(name)
    plan = plan_for(small.model)
    with pytest.raises(SplitError, match=f"the output of {plan.gathers[0].module} was left ungathered") as error:
        check(small.model, small.inputs, dataclasses.replace(plan, gathers=()))
    assert error.value.fault == "ungathered"


class Counting(nn.Module):
    """Adds a position that it counts itself, from the tokens it sees: no size is wrong, and every value is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + torch.arange(hidden_states.shape[1])[:, None]


def test_a_module_that_counts_its_tokens_is_named() -> None:
    small = build("dit")
    small.model.transformer_blocks[1].norm3 = nn.Sequential(small.model.transformer_blocks[1].norm3, Counting())
    with pytest.raises(SplitError, match="something in the model counts the tokens it sees") as error:
        check(small.model, small.inputs)
    assert (error.value.module, error.value.fault) == ("transformer_blocks.1.norm3.1", "values")


@pytest.mark.parametrize("kind", ["cross", "whole"])
def test_attention_over_split_tokens_that_is_called_local_is_named(kind: str) -> None:
    small = build("wan")
    sites = (("blocks.*.attn1", kind), ("blocks.*.attn2", "cross"))
    with pytest.raises(SplitError, match=r"blocks\.0\.attn1: its keys are split \(9 of 18 tokens\)"):
        check(small.model, small.inputs, dataclasses.replace(plan_for(small.model), sites=sites))  # type: ignore[arg-type]


def test_text_on_the_wrong_side_is_found() -> None:
    small = build("sd3")
    sites = (("transformer_blocks.*.attn", "front"), ("transformer_blocks.*.attn2", "self"))
    plan = dataclasses.replace(plan_for(small.model), sites=sites)  # type: ignore[arg-type]
    with pytest.raises(SplitError, match=r"transformer_blocks\.0\.attn: q"):
        check(small.model, small.inputs, plan)


def test_the_model_is_as_it_was_after_a_wrong_plan() -> None:
    small = build("dit")
    before = small.run()
    processors = [module.processor for _, module, _ in attention_sites(small.model)]
    plan = SplitPlan("DiT", (Cut("transformer_blocks.1", "hidden_states", 1),), (Gather("proj_out_2"),),
                     (("transformer_blocks.*.attn1", "self"),))  # fmt: skip
    with pytest.raises(SplitError):
        check(small.model, small.inputs, plan)
    assert all(module.processor is processors[i] for i, (_, module, _) in enumerate(attention_sites(small.model)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in small.model.modules())
    assert torch.equal(small.run(), before)


def test_gathering_what_is_whole_is_refused() -> None:
    small = build("dit")
    plan = dataclasses.replace(plan_for(small.model), gathers=(Gather("pos_embed"), Gather("proj_out_2")))
    cuts = (Cut("transformer_blocks.0", "hidden_states", 1),)
    with pytest.raises(SplitError, match="pos_embed"):
        check(small.model, small.inputs, dataclasses.replace(plan, cuts=cuts))


def test_the_error_survives_pickling() -> None:
    error = SplitError("a: b was left unsplit", "a", "b", "unsplit", 1, "text")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.module, again.dim, again.stream) == (str(error), "a", 1, "text")


def test_rounding_is_no_fault() -> None:
    small = build("dit").to(torch.bfloat16)
    check(small.model, small.inputs, size=3)
