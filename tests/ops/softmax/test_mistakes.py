"""Every mistake is wrong somewhere, and none is wrong where it does not apply."""

from __future__ import annotations

import pytest
import torch

from foci.core.spec import Mistake
from foci.ops.masks import Causal, lower, materialize
from foci.ops.softmax.call import bind
from foci.ops.softmax.cases import CASES
from foci.ops.softmax.mistakes import MISTAKES
from foci.ops.softmax.spec import SPEC

INPUTS = {case.name: case.make(torch.float64, torch.device("cpu"), 0) for case in CASES}
IDS = {"ids": lambda mistake: mistake.name}


def differs(mistake: Mistake, name: str) -> bool:
    torch.manual_seed(0)
    truth = SPEC.reference(**INPUTS[name])
    torch.manual_seed(0)
    made = mistake.compute(INPUTS[name], 0.01) if mistake.fits else mistake.compute(INPUTS[name])
    if made is None:
        return False
    assert [tuple(m.shape) for m in made] == [tuple(t.shape) for t in truth]
    return any(not torch.allclose(m, t, rtol=1e-6, atol=1e-6, equal_nan=True) for m, t in zip(made, truth, strict=True))


@pytest.mark.parametrize("mistake", MISTAKES, **IDS)
def test_it_is_wrong_in_some_case(mistake: Mistake) -> None:
    assert any(differs(mistake, name) for name in INPUTS)


@pytest.mark.parametrize("mistake", MISTAKES, **IDS)
def test_its_sentence_says_what_and_why(mistake: Mistake) -> None:
    assert len(mistake.sentence) < 160 and "\n" not in mistake.sentence
    assert ("{" in mistake.sentence) == mistake.fits


@pytest.mark.parametrize(
    ("name", "kept"), [("dense", False), ("dense and causal", True), ("bias of all heads, hiding", None)]
)
def test_a_mask_that_is_added_is_a_bias_of_ones(name: str, kept: bool | None) -> None:
    added = next(mistake for mistake in MISTAKES if mistake.name == "mask added").compute(INPUTS[name])
    within = next(mistake for mistake in MISTAKES if mistake.name == "mask with causal added").compute(INPUTS[name])
    if kept is None:
        assert added is within is None
        return
    shown, mask = lower(INPUTS[name]["mask"]).dense, Causal() if kept else None
    torch.testing.assert_close(added, SPEC.reference(**INPUTS[name] | {"bias": shown.double(), "mask": mask}))
    call = bind(**INPUTS[name])
    shown = materialize(call.visible, *call.sizes[1:3])
    torch.testing.assert_close(within, SPEC.reference(**INPUTS[name] | {"bias": shown.double(), "mask": None}))


@pytest.mark.parametrize("name", ["softcap and causal", "softcap, cached keys", "everything"])
def test_a_softcap_after_the_mask_shows_what_is_hidden(name: str) -> None:
    inputs = INPUTS[name]
    call = bind(**inputs)
    seen = materialize(call.visible, *call.sizes[1:3])
    k, v = (x.repeat_interleave(call.q.shape[2] // x.shape[2], 2) for x in (call.k, call.v))
    logits = torch.einsum("bthk,bshk->bhts", call.q, k) * call.scale
    logits = call.softcap * torch.tanh(logits.masked_fill(~seen, -torch.inf) / call.softcap)
    logits = logits if call.bias is None else logits + call.bias
    weights = logits.exp()
    whole = weights.sum(-1, keepdim=True) + (0 if call.sink is None else call.sink.exp()[:, None, None])
    out = next(mistake for mistake in MISTAKES if mistake.name == "softcap after the mask").compute(inputs)[0]
    torch.testing.assert_close(out, torch.einsum("bhts,bshv->bthv", weights / whole, v))


def test_names_are_unique() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("name", ["plain", "cross", "value width"])
def test_few_apply_to_a_plain_case(name: str) -> None:
    wrong = {mistake.name for mistake in MISTAKES if differs(mistake, name)}
    assert wrong <= {"unscaled", "scaled twice", "lse in log2", "lse zeros", "lse exponentiated", "scale off"}


def test_a_fitted_mistake_is_right_at_zero() -> None:
    (scale,) = [mistake for mistake in MISTAKES if mistake.fits]
    torch.testing.assert_close(scale.compute(INPUTS["plain"], 0.0), SPEC.reference(**INPUTS["plain"]))
