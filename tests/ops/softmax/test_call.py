"""What the operator's arguments may be: each wrong one a sentence with its name, its value and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci import Causal, Dense, Lengths, Packed, ShapeError, Unsupported, Window
from foci.ops.arguments import LARGEST
from foci.ops.masks import Band
from foci.ops.softmax.call import bind
from tests.ops.softmax.problems import BACKENDS, HALVES

NAN, INF = float("nan"), float("inf")


def z(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


GOOD: dict[str, Any] = {"q": z(2, 5, 4, 8), "k": z(2, 7, 2, 8), "v": z(2, 7, 2, 6)}
ONE = {name: x[:1] for name, x in GOOD.items()}

SHAPES: dict[str, dict[str, Any]] = {
    "attention: q has 3 dimensions, shape [5, 4, 8]; expected 4: [B, T, H, K]": {"q": z(5, 4, 8)},
    "attention: k has 5 dimensions, shape [1, 2, 7, 2, 8]; expected 4: [B, S, G, K]": {"k": z(1, 2, 7, 2, 8)},
    "attention: k has shape [3, 7, 2, 8] for [B, S, G, K], so B would be 3; q says B=2": {"k": z(3, 7, 2, 8)},
    "attention: k has shape [2, 7, 2, 9] for [B, S, G, K], so K would be 9; q says K=8": {"k": z(2, 7, 2, 9)},
    "attention: v has shape [2, 6, 2, 6] for [B, S, G, V], so S would be 6; k says S=7": {"v": z(2, 6, 2, 6)},
    "attention: v has shape [2, 7, 1, 6] for [B, S, G, V], so G would be 1; k says G=2": {"v": z(2, 7, 1, 6)},
    "attention: k has 3 heads but q has 4; q heads must be a multiple of k heads (G=3, H=4)": {
        "k": z(2, 7, 3, 8), "v": z(2, 7, 3, 6),
    },
    "attention: k has 0 heads but q has 4": {"k": z(2, 7, 0, 8), "v": z(2, 7, 0, 6)},
    "attention: k has 8 heads but q has 4": {"k": z(2, 7, 8, 8), "v": z(2, 7, 8, 6)},
    "attention: bias has shape [5, 5], so S would be 5; expected 1 or S=7 (broadcastable to [B, H, T, S])": {
        "bias": z(5, 5)
    },
    "attention: bias has shape [3, 1, 1, 7], so B would be 3; expected 1 or B=2": {"bias": z(3, 1, 1, 7)},
    "attention: bias has 5 dimensions, shape [1, 1, 1, 1, 7]; expected at most 4": {"bias": z(1, 1, 1, 1, 7)},
    "attention: sink has shape [2] for [H], so H would be 2; q says H=4": {"sink": z(2)},
    "attention: sink has 2 dimensions, shape [1, 4]; expected 1: [H]": {"sink": z(1, 4)},
    "attention: dense has shape [5, 5], so S would be 5; expected 1 or S=7": {"mask": Dense(z(5, 5).bool())},
    "attention: Lengths has 3 entries; expected 2, the rows in the batch": {"mask": Lengths(integers(1, 2, 3))},
    "attention: Packed needs a batch of 1 (documents stand end to end), got B=2": {"mask": Packed(integers(0, 5))},
    "attention: Lengths has 2 entries; expected 3, the packed documents": ONE
    | {"mask": Packed(integers(0, 1, 2, 5)) & Lengths(integers(1, 1))},
}  # fmt: skip


@pytest.mark.parametrize("message", SHAPES)
def test_sizes_that_do_not_fit(message: str) -> None:
    with pytest.raises(ShapeError, match=re.escape(message)):
        foci.attention(**GOOD | SHAPES[message])


HALF, LONG = torch.float16, torch.int64
VALUES: dict[str, dict[str, Any]] = {
    "attention: softcap must be a positive finite number, got -30.0": {"softcap": -30.0},
    "attention: softcap must be a positive finite number, got nan": {"softcap": NAN},
    "attention: softcap must be a positive finite number, got inf": {"softcap": INF},
    "attention: softcap must be a positive finite number, got 0; expected": {"softcap": 0},
    "got 1e+40; expected 1e-30 to 1e+30": {"softcap": 1e40},
    "got 1e-40; expected 1e-30 to 1e+30": {"softcap": 1e-40},
    "attention: scale must be a finite number, got nan": {"scale": NAN},
    "attention: scale must be a finite number, got -inf": {"scale": -INF},
    f"attention: scale must be a finite number, got 1e+39; expected {-LARGEST} to {LARGEST}": {"scale": 1e39},
    "attention: scale must be a finite number, got -1e+300; expected": {"scale": -1e300, "backend": "chunked"},
    "attention: dropout must be a probability in [0, 1), got 1": {"dropout": 1.0},
    "attention: dropout must be a probability in [0, 1), got -0.1": {"dropout": -0.1},
    "attention: dropout must be a probability in [0, 1), got nan": {"dropout": NAN},
    "attention: q, k, v have dtypes float32, float16, float32; expected one of float64, float32, bfloat16, float16": {
        "k": z(2, 7, 2, 8, dtype=HALF)
    },
    "attention: q, k, v have dtypes int64, int64, int64": {n: x.to(LONG) for n, x in GOOD.items()},
    "attention: q, k, v are on cpu, cpu, meta; expected one device": {"v": z(2, 7, 2, 6).to("meta")},
    "attention: bias must be a floating tensor, got bool; a boolean mask is `mask=Dense(...)`": {"bias": z(7).bool()},
    "attention: bias must be a floating tensor, got int64": {"bias": z(7).to(LONG)},
    "attention: sink must be a floating tensor, got int64": {"sink": z(4).to(LONG)},
    "attention: bias is on meta, q is on cpu; expected one device": {"bias": z(7).to("meta")},
    "attention: dense is on meta, q is on cpu; expected one device": {"mask": Dense(z(7).bool().to("meta"))},
    "attention: unknown backend 'flush'; expected one of 'aten', 'flash', 'triton', 'chunked', 'reference'": {
        "backend": "flush"
    },
}


@pytest.mark.parametrize("message", VALUES)
def test_values_that_cannot_be(message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        foci.attention(**GOOD | VALUES[message])


TYPES: dict[str, dict[str, Any]] = {
    "attention: q must be a tensor, got [1.0]": {"q": [1.0]},
    "attention: k must be a tensor, got None": {"k": None},
    "attention: bias must be a tensor, got 1.0": {"bias": 1.0},
    "attention: sink must be a tensor, got 0.0": {"sink": 0.0},
    "attention: softcap must be a number, got '30'": {"softcap": "30"},
    "attention: softcap must be a number, got True": {"softcap": True},
    "attention: scale must be a number, got tensor(1.)": {"scale": torch.tensor(1.0)},
    "attention: dropout must be a number, got None": {"dropout": None},
    "mask: 'causal' is no mask of foci; expected Causal, Window, Packed, Lengths or Dense": {"mask": "causal"},
    "is no mask of foci; expected Causal": {"mask": z(5, 7).bool()},
    "<class 'foci.ops.masks.Causal'> is no mask of foci": {"mask": Causal},
    "unexpected keyword argument 'is_causal'": {"is_causal": True},
    "unexpected keyword argument 'attn_mask'": {"attn_mask": None},
}


@pytest.mark.parametrize("message", TYPES)
def test_what_is_of_no_use_is_never_ignored(message: str) -> None:
    for call in (foci.attention, foci.attention_with_lse):
        with pytest.raises(TypeError, match=re.escape(message)):
            call(**GOOD | TYPES[message])


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("kv_lengths", lambda make: Lengths(make(torch.tensor([3, 2])))),
        ("q_lengths", lambda make: Lengths(torch.tensor([3, 2]), make(torch.tensor([3, 2])))),
        ("low", lambda make: Band(make(torch.tensor([0, 1])), None)),
        ("high", lambda make: Band(None, make(torch.tensor([0, 1])))),
        ("dense", lambda make: Dense(make(torch.ones(3, 3, dtype=torch.bool)))),
    ],
)
def test_a_mask_of_several_ranks_is_named(name: str, mask: Callable[..., Any], of_ranks: Callable[..., Tensor]) -> None:
    q = torch.zeros(2, 3, 2, 4)
    with pytest.raises(ValueError, match=rf"^attention: {name} is a DTensor of .*: {name}.to_local\(\)"):
        foci.attention(q, q, q, mask=mask(of_ranks))


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        foci.attention(*GOOD.values(), Causal())  # type: ignore[misc]


BAD_MASKS: dict[str, Any] = {
    "Packed: q_offsets must never decrease, got 4 then 2 at entry 2": Packed(integers(0, 4, 2, 5)),
    "Packed: q_offsets ends at 6, past the 5 tokens there are (T=5)": Packed(integers(0, 6)),
    "Packed: kv_offsets ends at 8, past the 7 tokens there are (S=7)": Packed(integers(0, 5), integers(0, 8)),
    "Packed: q_offsets must start at 0, got 1": Packed(integers(1, 5)),
    "Lengths: kv_lengths[0] is 8; expected 0 to 7, the tokens of that row": Lengths(integers(8)),
    "Lengths: kv_lengths[0] is -1; expected 0 to 7": Lengths(integers(-1)),
    "Lengths: q_lengths[0] is 6; expected 0 to 5": Lengths(integers(7), integers(6)),
    "Lengths: kv_lengths[1] is 4; expected 0 to 3": Packed(integers(0, 4, 5), integers(0, 4, 7))
    & Lengths(integers(1, 4)),
}


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("message", BAD_MASKS)
def test_offsets_and_lengths_that_lie_are_caught_on_every_backend(message: str, backend: str | None) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        foci.attention(**ONE, mask=BAD_MASKS[message], backend=backend)


def test_a_backend_that_cannot_lists_its_reasons() -> None:
    with pytest.raises(Unsupported) as caught:
        foci.attention(**GOOD, softcap=2.0, mask=Window(1, None), backend="aten")
    assert len(caught.value.reasons) == 2
    assert str(caught.value).splitlines()[0] == "attention: backend 'aten' cannot run this call:"
    assert str(caught.value).splitlines()[-1] == "  use backend=None to let foci choose (chunked would run)"


def test_what_a_call_holds() -> None:
    call = bind(**GOOD, mask=Causal() & Window(3, None) & Lengths(integers(7, 2)), softcap=2, dropout=0.5)
    assert call.sizes == (2, 5, 7, 4, 2, 8, 6)
    assert (call.causal_end, call.causal_start, call.left, call.right) == (True, False, 3, None)
    assert (call.softcap, call.scale, call.dropout) == (2.0, 8**-0.5, 0.5)
    assert call.visible.kv_lengths is call.kv_lengths
    assert call.seed is not None and call.seed.dtype == torch.int64
    assert bind(**GOOD).seed is None
    assert set(call.features()) >= {"softcap", "dropout", "Lengths", "Window"}
    assert bind(**GOOD).features() == []


def test_scale_may_be_zero_or_negative_and_heads_without_width_have_one() -> None:
    assert bind(**GOOD, scale=0).scale == 0.0
    assert bind(**GOOD, scale=-1).scale == -1.0
    assert bind(GOOD["q"][..., :0], GOOD["k"][..., :0], GOOD["v"]).scale == 1.0


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_casts_as_torch_does(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        assert bind(**GOOD).q.dtype == dtype
        assert bind(**GOOD | {"v": z(2, 7, 2, 6, dtype=HALF)}).v.dtype == dtype
        double = {name: x.double() for name, x in GOOD.items()}
        assert bind(**double).q.dtype == torch.float64
        with pytest.raises(ValueError, match="float64"):
            bind(**GOOD | {"k": double["k"]})
        with pytest.raises(ValueError, match="int64"):
            bind(**GOOD | {"q": GOOD["q"].to(LONG)})


def test_meta_tensors_bind() -> None:
    """explain asks without data."""
    meta = {name: x.to("meta") for name, x in GOOD.items()}
    assert bind(**meta, mask=Causal()).sizes == (2, 5, 7, 4, 2, 8, 6)
    packed = {name: x[:1] for name, x in meta.items()}
    assert foci.explain("softmax", **packed, mask=Packed(integers(0, 5).to("meta"))).chosen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [lambda b: {"bias": torch.zeros(7), "mask": Dense(z(7).bool())}, lambda b: {"sink": z(4, dtype=torch.float64)}],
)
def test_bias_and_sink_may_have_another_floating_dtype(backend: str, make: Callable[[str], dict]) -> None:
    halves = {name: x.to(torch.bfloat16) for name, x in GOOD.items()}
    assert foci.attention(**halves, **make(backend), backend=backend).dtype == torch.bfloat16


def test_explain_names_the_argument_that_its_operator_does_not_take() -> None:
    wrong = "explain: attention got an unexpected keyword argument 'sfotcap'; expected arguments of q, k, v, mask, bias"
    with pytest.raises(TypeError, match=re.escape(wrong)):
        foci.explain("softmax", **GOOD, sfotcap=30.0)
    with pytest.raises(TypeError, match="explain: linear_attention missing a required argument: 'k'; expected"):
        foci.explain("linear", GOOD["q"])


def test_dtypes_are_named_as_they_were_given_under_autocast() -> None:
    q, k = torch.randn(1, 3, 1, 8, dtype=torch.float64), torch.randn(1, 3, 1, 8)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="dtypes float64, float32, float32"):
        foci.attention(q, k, k)
