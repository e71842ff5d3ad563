"""Other people's signatures: what each keyword gets, what is refused, and what is listed as not tested."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import foci
from foci.core.spec import WrongReturn
from foci.ops.conventions import Place
from foci.ops.softmax import conventions
from foci.ops.softmax.api import attention, attention_with_lse
from foci.ops.softmax.cases import CASES
from foci.ops.softmax.conventions import adapt
from foci.ops.softmax.spec import SPEC

BY_NAME = {case.name: case for case in CASES}


def given(name: str) -> dict:
    return BY_NAME[name].make(torch.float64, torch.device("cpu"), 0)


def sees(function):
    """A candidate that keeps the keywords of its last call."""
    kept: dict = {}

    def spy(*args, **kwargs):
        kept.clear()
        kept.update(kwargs, q=args[0])
        return function(*args, **kwargs)

    spy.__signature__ = __import__("inspect").signature(function)
    return kept, spy


@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, attention, attention_with_lse])
def test_every_case_that_is_not_refused_is_right(function) -> None:
    candidate = adapt(function)
    ran = 0
    for case in CASES:
        if candidate.refuses(case) or "dropout" in case.features:
            continue
        inputs = given(case.name)
        out = candidate.call(inputs)[0]
        torch.testing.assert_close(out, SPEC.reference(**inputs)[0], rtol=1e-9, atol=1e-9, msg=case.name)
        ran += 1
    assert ran >= 28


def test_flex_is_given_functions() -> None:
    candidate = adapt(flex_attention)
    for name in ("plain", "dense", "softcap and causal", "bias per key", "grouped heads"):
        inputs = BY_NAME[name].make(torch.float32, torch.device("cpu"), 0)
        out, lse = candidate.call(inputs)
        expected = SPEC.reference(**inputs)
        torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-5)
    assert candidate.refuses(BY_NAME["sink"])


def test_layouts() -> None:
    def heads_first(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    inputs = given("plain")
    expected = SPEC.reference(**inputs)[0]
    torch.testing.assert_close(adapt(heads_first, layout="bhtd").call(inputs)[0], expected)
    assert adapt(heads_first).call(inputs)[0].shape == expected.shape  # wrong, and for the laws to say
    with pytest.raises(ValueError, match="layout must be 'bthd' or 'bhtd', got 'tbhd'"):
        adapt(heads_first, layout="tbhd")


def test_what_is_not_named_is_listed_and_refused() -> None:
    candidate = adapt(lambda q, k, v: attention(q, k, v))
    assert candidate.outputs == ("out",)
    told = " ".join(candidate.not_tested)
    assert all(
        word in told for word in ("mask", "causal", "bias", "softcap", "sink", "scale", "dropout", "window", "lse")
    )
    assert candidate.refuses(BY_NAME["softcap"]) == ["its signature does not name what these need"]
    assert candidate.refuses(BY_NAME["dense"]) and candidate.refuses(BY_NAME["causal"])
    assert not candidate.refuses(BY_NAME["plain"])


def test_ours_take_masks_as_they_are_and_are_held_to_more() -> None:
    candidate = adapt(partial(attention_with_lse, backend="chunked"), name="chunked")
    assert candidate.strict and candidate.name == "chunked" and candidate.outputs == ("out", "lse")
    assert candidate.not_tested == ()
    assert not any(candidate.refuses(case) for case in CASES)


def test_is_causal_leaves_unequal_lengths_open_and_causal_does_not() -> None:
    def torch_like(q, k, v, *, is_causal=False):
        return attention(q, k, v)

    def flash_like(q, k, v, *, causal=False, window_size=(-1, -1)):
        return attention(q, k, v)

    def aligned(q, k, v, *, is_causal=False, align="top-left"):
        return attention(q, k, v)

    assert not adapt(torch_like).refuses(BY_NAME["causal"])
    assert "leaves that open" in adapt(torch_like).refuses(BY_NAME["causal, cached keys"])[0]
    assert adapt(flash_like).refuses(BY_NAME["causal top-left"])
    kept, spy = sees(flash_like)
    adapt(spy).call(given("causal, cached keys"))
    assert kept["causal"] is True
    adapt(spy).call(given("window"))
    assert kept["window_size"] == (4, 2)
    kept, spy = sees(aligned)
    adapt(spy).call(given("causal top-left"))
    assert kept["align"] == "top-left"
    adapt(spy).call(given("causal, cached keys"))
    assert kept["align"] == "bottom-right"


def test_a_mask_and_causal_go_in_together_where_both_are_named() -> None:
    def both(q, k, v, *, attn_mask=None, is_causal=False):
        return attention(q, k, v)

    kept, spy = sees(both)
    adapt(spy).call(given("padding and causal"))
    assert kept["is_causal"] is True and kept["attn_mask"].shape[-2:] == (19, 19)
    adapt(spy).call(given("cache"))
    assert "is_causal" not in kept, "every row ends elsewhere: only a mask can say that"


def test_lse_in_either_order_of_its_dimensions() -> None:
    def flash_like(q, k, v):
        out, lse = attention_with_lse(q, k, v)
        return out, lse.transpose(1, 2)

    inputs = given("plain")
    torch.testing.assert_close(adapt(flash_like).call(inputs)[1], SPEC.reference(**inputs)[1])


def test_kinds_that_a_tiny_call_shows_to_be_refused() -> None:
    def picky(q, k, v):
        assert q.shape[2] == k.shape[2] and q.shape[1] == k.shape[1] and v.shape[-1] == q.shape[-1]
        return attention(q, k, v)

    candidate = adapt(picky)
    for name in ("grouped heads", "cross", "value width"):
        assert "raises AssertionError" in candidate.refuses(BY_NAME[name])[0]
    assert not candidate.refuses(BY_NAME["plain"])


def test_what_refuses_the_cpu_is_tried_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel for GPUs does: here it refuses float32 and narrow heads, as those do the CPU."""
    gpu = Place(torch.device("cpu"), torch.bfloat16, 64)
    monkeypatch.setattr(conventions, "places", lambda: iter((Place(torch.device("cpu")), gpu)))

    def on_a_gpu(q, k, v):
        assert q.dtype == torch.bfloat16 and q.shape[-1] == 64 and q.shape[2] == k.shape[2]
        return attention_with_lse(q, k, v)

    candidate = adapt(on_a_gpu)
    assert candidate.outputs == ("out", "lse")
    assert "raises AssertionError" in candidate.refuses(BY_NAME["grouped heads"])[0]
    assert not candidate.refuses(BY_NAME["value width"])


def test_a_kind_that_ends_the_process_of_a_tiny_call_is_for_the_laws() -> None:
    def plain(q, k, v):
        return attention(q, k, v)

    asked = iter(("answers", None, "answers", "answers"))
    candidate = adapt(plain, aside=lambda work: work(lambda call: next(asked) and call()))
    assert not candidate.refuses(BY_NAME["grouped heads"])
    nothing = adapt(plain, aside=lambda work: work(lambda call: None))
    assert nothing.outputs == ("out",) and not nothing.refuses(BY_NAME["plain"])


@pytest.mark.parametrize("wrong", [lambda out: (out,), lambda out: (out, out, out), lambda out: out.tolist()])
def test_a_wrong_return_is_for_the_laws(wrong) -> None:
    def returns(q, k, v):
        return wrong(attention(q, k, v))

    with pytest.raises(WrongReturn, match="where one tensor is expected"):
        adapt(returns).call(given("plain"))


def test_a_mask_of_the_wrong_size_reaches_the_callable() -> None:
    def attend(q, k, v, *, mask: Tensor | None = None):
        assert mask is not None
        raise ValueError(f"mask {list(mask.shape)}")

    from foci.ops.masks import Dense

    with pytest.raises(ValueError, match=r"mask \[1, 1, 19, 20\]"):
        adapt(attend).call(given("plain") | {"mask": Dense(torch.ones(1, 1, 19, 20, dtype=torch.bool))})


def test_a_module_is_asked_what_its_forward_names() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q, k, v, *, mask=None, softcap=None):
            return attention(q, k, v, mask=mask, softcap=softcap)

    for module in (Attend(), torch.compile(Attend(), backend="eager")):
        assert adapt(module).not_tested[0].split(":")[0] == "causal, bias, sink, scale, dropout, window"

    class Ours(torch.nn.Module):
        def forward(self, q, k, v, *, mask: foci.Mask | None = None):
            return attention(q, k, v, mask=mask)

    candidate, packed = adapt(Ours()), BY_NAME["packed causal"]
    assert not candidate.refuses(packed)
    torch.testing.assert_close(
        candidate.call(given("packed causal"))[0], SPEC.reference(**given("packed causal"))[0], rtol=1e-9, atol=1e-9
    )
