"""Sites are found by running: on every small model of the zoo, with shape, mask, caller and what is left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foci
from foci.accelerate import zoo
from foci.accelerate.apply import route
from foci.accelerate.calls import arguments, dims, letters, mask_text
from foci.accelerate.sites import attention_calls, find_sites
from foci.ops.softmax.call import bind
from tests.ops.softmax.fused import rows, stand_in

EXPECTED = {
    "flux": (5, "B2 T74 H4 K16", "no mask", "FluxTransformerBlock", "scaled_dot_product_attention"),
    "sd3": (4, "B2 T74 H4 K16", "no mask", "JointTransformerBlock", "scaled_dot_product_attention"),
    "pixart": (6, "B2 T64 H4 K16", "no mask", "BasicTransformerBlock", "scaled_dot_product_attention"),
    "unet": (8, "B2 T256 H4 K4", "no mask", "BasicTransformerBlock", "scaled_dot_product_attention"),
    "llama": (3, "B2 T48 H4 G2 K16", "Dense 2x1x1x48 & Causal", "LlamaDecoderLayer", "scaled_dot_product_attention"),
    "gemma2": (3, "B2 T48 H4 G2 K16", "softcap & Dense 2x1x1x48 & Causal & Window", "Gemma2DecoderLayer", "softmax"),
    "bert": (3, "B2 T48 H4 K16", "Dense 2x1x1x48", "BertAttention", "scaled_dot_product_attention"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_zoo_model_shows_its_sites(name: str) -> None:
    subject = zoo.load(name)
    model = subject.model
    found = find_sites(model, lambda: model(**subject.inputs), lambda: route(model))
    count, sizes, mask, caller, via = EXPECTED[name]
    first = found.sites[0]
    call, times = first.calls[0]
    assert len(found.sites) == count
    assert (dims(letters(call)), mask_text(call), first.caller, first.via) == (sizes, mask, caller, via)
    assert times == first.count == 1
    assert found.skipped == ()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_watching_changes_nothing_and_sees_attention_outside_any_site() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x) + torch.softmax(x, -1)

    model = nn.Sequential(Own(), Own())
    x = torch.randn(1, 2, 3, 4)
    outputs = []
    events = attention_calls(model, lambda: outputs.append(model(x)))
    assert torch.equal(outputs[0], model(x))
    assert [event.stack for event in events] == [("", "0"), ("", "0"), ("", "1"), ("", "1")]
    assert {event.via for event in events} == {"scaled_dot_product_attention", "softmax"}


def test_a_plain_call_is_seen_where_torchs_own_op_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a plain call is no op of foci's."""

    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return foci.attention(x, x, x)

    stand_in(monkeypatch)
    model, x = Own(), rows()["q"]
    for _ in range(3):
        model(x)
    (event,) = (event for event in attention_calls(model, lambda: model(x)) if event.call is not None)
    assert event.via == "foci" and event.stack == ("",) and event.call.q is x


def test_a_site_that_does_not_run_is_told() -> None:
    subject = zoo.load("bert")
    model = subject.model
    ids = subject.inputs["input_ids"]
    first = lambda: model.encoder.layer[0](model.embeddings(ids), None)  # noqa: E731
    found = find_sites(model, first, lambda: route(model))
    assert [site.name for site in found.sites] == ["encoder.layer.0.attention.self"]
    assert ("encoder.layer.2.attention.self", "it did not run with these inputs") in found.skipped


@pytest.mark.parametrize(
    "mask",
    [
        None,
        foci.Causal(),
        foci.Causal("top-left") & foci.Window(3, 0),
        foci.Lengths(torch.tensor([5, 7])) & foci.Causal(),
        foci.Dense(torch.rand(2, 1, 6, 8) > 0.3),
    ],
)
def test_arguments_remake_the_call(mask: foci.Mask | None) -> None:
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 8, 2, 8)
    given = {"mask": mask, "bias": torch.randn(6, 8), "softcap": 5.0, "sink": torch.randn(4), "scale": 0.3}
    call = bind(q, k, k, **given)
    again = bind(**arguments(call))
    assert torch.equal(foci.attention(q, k, k, **given), foci.attention(**arguments(call)))
    assert again.causal_end == call.causal_end and again.left == call.left and again.softcap == call.softcap
