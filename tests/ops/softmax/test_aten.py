"""The fused kernels behind the contract: what they take is the reference, what they cannot take is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci import Causal, Dense, Lengths, Packed, Unsupported, Window
from foci.core.spec import Case
from foci.ops.masks import Band, Mask
from foci.ops.softmax import aten
from foci.ops.softmax.spec import SPEC
from tests.ops.softmax.problems import CPU, HALVES, TINY, assert_close, evaluate, gradcheck, inputs_of, promoted, tiny

BIAS = ("bias",)


def reasons(**inputs: Any) -> list[str]:
    return foci.explain("softmax", **inputs).refused.get("aten", [])


def qkv(B: int = 2, T: int = 19, S: int = 19, H: int = 4, K: int = 16, dtype: torch.dtype = torch.float64) -> dict:
    draw = torch.Generator().manual_seed(11)
    shapes = {"q": (B, T, H, K), "k": (B, S, H, K), "v": (B, S, H, K)}
    return {n: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for n, shape in shapes.items()}


@pytest.mark.parametrize("problem", SPEC.cases, ids=lambda problem: problem.name)
def test_every_case_it_takes_is_the_reference(problem: Case) -> None:
    """A bias that wants no gradient included."""
    inputs = problem.make(torch.float64, CPU, 1)
    if found := reasons(**inputs):
        with pytest.raises(Unsupported) as caught:
            evaluate(inputs, "aten", leave=BIAS)
        assert caught.value.reasons == found
        return
    assert_close(evaluate(inputs, "aten", leave=BIAS), evaluate(inputs, leave=BIAS))


def test_it_takes_what_can_be_decomposed() -> None:
    """Refusing these would be right but slow."""
    taken = {problem.name for problem in SPEC.cases if not reasons(**problem.make(torch.float64, CPU, 1))}
    assert taken >= {
        "plain", "cross", "grouped heads", "one key head", "value width", "odd widths", "scale", "causal",
        "causal top-left", "dense", "dense, empty rows", "dense and causal", "padding", "padding, empty row",
        "padding and causal", "packed", "packed causal", "bias", "bias per head", "bias per key", "sink",
        "sink, empty rows",
    }  # fmt: skip


REFUSED: dict[str, dict[str, Any]] = {
    "cpu flash: causal needs a positive scale there": {"scale": -0.5, "mask": Causal("top-left")},
    "softcap is not supported": {"softcap": 2.0},
    "dropout follows torch's own random stream": {"dropout": 0.1},
    "a window is not supported": {"mask": Window(3, None)},
    "bias needs a gradient": {"bias": torch.zeros(19, requires_grad=True)},
    "sink needs a gradient, which in half precision": {
        **qkv(dtype=torch.bfloat16),
        "sink": torch.zeros(4, requires_grad=True),
    },
    "torch's fused kernels align causal top-left": {
        "mask": Causal() & Lengths(torch.tensor([5, 3]), torch.tensor([4, 3]))
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_by_name_and_taken_by_another(reason: str) -> None:
    inputs = qkv() | REFUSED[reason]
    (found,) = reasons(**inputs)
    assert found.startswith(reason)
    with pytest.raises(Unsupported, match="attention: backend 'aten' cannot run this call") as caught:
        foci.attention(**inputs, backend="aten")
    assert caught.value.reasons == [found]
    assert "chunked would run" in str(caught.value)
    assert foci.explain("softmax", **inputs).chosen == "chunked"


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-60])
@pytest.mark.parametrize("mask", [None, Dense(torch.arange(19) % 3 > 0)], ids=["plain", "dense"])
def test_a_scale_that_is_not_positive(scale: float, mask: Dense | None) -> None:
    inputs = qkv() | {"scale": scale, "mask": mask}
    assert_close(evaluate(inputs, "aten"), evaluate(inputs))


@pytest.mark.parametrize(
    "mask",
    [Window(None, 1), Window(1, None), Band(None, 1), Band(-1, None), Band(torch.tensor([-1, 2]), None)],
    ids=["right", "left", "high", "low", "low of each row"],
)
def test_a_window_or_a_band_of_one_side_is_refused(mask: Mask) -> None:
    (found,) = reasons(**qkv(), mask=mask)
    assert "is not supported by torch's fused kernels" in found


def test_both_ways_of_causal_need_a_positive_scale() -> None:
    for mask in (Causal(), Causal("top-left")):
        (found,) = reasons(**qkv(), scale=-0.5, mask=mask)
        assert found.startswith("cpu flash: causal needs a positive scale there")


def test_reasons_add_up() -> None:
    assert len(reasons(**qkv(), softcap=2.0, dropout=0.1, mask=Window(1, 1))) == 3


def test_causal_over_other_keys_is_refused_unless_it_hides_nothing() -> None:
    assert reasons(**qkv(T=5), mask=Causal())
    assert not reasons(**qkv(T=1), mask=Causal())
    assert not reasons(**qkv(T=5), mask=Causal("top-left"))
    packed = Packed(torch.tensor([0, 9, 19]))
    assert not reasons(**qkv(B=1), mask=packed & Causal())
    assert reasons(**qkv(B=1), mask=packed & Causal() & Lengths(torch.tensor([5, 10])))
    assert_close(evaluate(qkv(T=1) | {"mask": Causal()}, "aten"), evaluate(qkv(T=1)))


def test_a_bias_without_gradient_is_taken_and_with_gradients_off_any() -> None:
    bias = torch.zeros(19, requires_grad=True)
    assert not reasons(**qkv(), bias=bias.detach())
    with torch.no_grad():
        assert not reasons(**qkv(), bias=bias)


@pytest.mark.parametrize("name", TINY)
def test_gradcheck(name: str) -> None:
    inputs = tiny(name)
    if name in ("everything", "packed, bias"):
        with pytest.raises(Unsupported):
            gradcheck(inputs, "aten")
    else:
        assert gradcheck(inputs, "aten")


MASKS: dict[str, dict[str, Any]] = {
    "dense, closed rows of one column, causal": {"mask": Dense(torch.arange(19)[:, None] % 3 > 0) & Causal()},
    "dense, one row for all queries": {"mask": Dense(torch.arange(19) % 3 > 0)},
    "dense, all closed for one row": {"mask": Dense(torch.tensor([True, False])[:, None, None, None])},
    "dense, nothing": {"mask": Dense(torch.zeros((), dtype=torch.bool)) & Causal()},
    "dense, first keys closed, causal": {"mask": Dense(torch.arange(19) > 5) & Causal()},
    "bias of -inf": {"bias": torch.where(torch.arange(19)[:, None] == 4, -torch.inf, 0.0)},
    "bias of one number": {"bias": torch.tensor(0.5)},
    "bias of the lowest number": {"bias": torch.full((19,), torch.finfo(torch.float32).min)},
    "bias, transposed": {"bias": torch.randn(19, 19).T},
    "bias, expanded": {"bias": torch.randn(19, 1).expand(19, 19)},
    "bias and dense": {"bias": torch.randn(2, 1, 19, 1), "mask": Dense(torch.rand(4, 1, 19) < 0.5)},
    "bias and packed rows": {"bias": torch.randn(4, 19, 1), "mask": Lengths(torch.tensor([3, 17]))},
    "top-left and bottom-right": {"mask": Causal() & Causal("top-left")},
}


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES])
@pytest.mark.parametrize("name", MASKS)
def test_additive_masks_and_their_empty_rows(name: str, dtype: torch.dtype) -> None:
    inputs = qkv(dtype=dtype) | MASKS[name]
    assert not reasons(**inputs)
    truth = evaluate(promoted(inputs), leave=BIAS)
    found = evaluate(inputs, "aten", leave=BIAS)
    if dtype == torch.float64:
        assert_close(found, truth)
    lse, expected = found["lse"].double(), truth["lse"]
    assert torch.equal(lse == -torch.inf, expected == -torch.inf)
    seen = expected > -torch.inf
    # Beside a bias of -3.4e38 nothing else is left of a float32.
    bound = 2e-4 + 1e-6 * expected[seen].abs()
    assert ((lse - expected)[seen].abs() <= bound).all()
    assert all(torch.isfinite(found[name]).all() for name in ("out", "dq", "dk", "dv"))
    assert not found["out"][~seen].any() and not found["dq"][~seen].any()


def test_one_document_that_ends_before_its_row_does() -> None:
    inputs = qkv(B=1) | {"mask": Packed(torch.tensor([0, 12]))}
    assert not reasons(**inputs)
    assert_close(evaluate(inputs, "aten"), evaluate(inputs))


@pytest.mark.parametrize("mask", [Causal(), Dense(torch.rand(4, 19, 19) < 0.7)], ids=["causal", "dense"])
def test_a_bias_is_cut_where_documents_are(mask: Mask) -> None:
    inputs = qkv(B=1) | {"bias": torch.randn(4, 19, 19), "mask": Packed(torch.tensor([0, 3, 3, 12, 17])) & mask}
    assert not reasons(**inputs)
    assert_close(evaluate(inputs, "aten", leave=BIAS), evaluate(inputs, leave=BIAS))


def test_top_left_with_more_queries_than_keys_and_closed_rows() -> None:
    inputs = qkv(S=7) | {"mask": Causal("top-left") & Dense((torch.arange(19) % 2 > 0)[:, None])}
    assert_close(evaluate(inputs, "aten"), evaluate(inputs))


def test_a_float32_bias_is_not_rounded_to_the_dtype_of_q() -> None:
    inputs = qkv(dtype=torch.bfloat16) | {"bias": 10 * torch.randn(4, 19, 19)}
    lse, truth = evaluate(inputs, "aten", leave=BIAS)["lse"], evaluate(promoted(inputs), leave=BIAS)["lse"]
    assert float((lse - truth).abs().max()) <= 2e-4


@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("options", [{}, {"mask": Lengths(torch.tensor([19, 4]))}, {"sink": torch.zeros(4)}], ids=str)
def test_rows_that_are_not_consecutive_numbers(place: str, options: dict) -> None:
    """The kernels read a row as consecutive, whatever its stride: silently wrong unless it is copied."""
    inputs = qkv() | promoted(options)
    truth = evaluate(inputs)
    x = inputs[place]
    for strange in (x.transpose(1, 3).contiguous().transpose(1, 3), torch.stack([x, x + 1], -1)[..., 0]):
        assert strange.stride(-1) != 1
        assert_close(evaluate(inputs | {place: strange}, "aten"), truth)
    flat = inputs | {place: x[..., :1].expand_as(x)}
    assert_close(evaluate(flat, "aten"), evaluate(flat))


def test_empty_row_lse_is_not_the_kernels_zero() -> None:
    out, lse = foci.attention_with_lse(**inputs_of("padding, empty row"), backend="aten")
    assert (lse[0] == -torch.inf).all() and not out[0].any()


@pytest.mark.parametrize("S", [1, 7, 15, 16, 40])
def test_nan_in_a_query_is_seen_however_few_the_keys(S: int) -> None:
    inputs = qkv(S=S, dtype=torch.float32)
    inputs["q"][1, 3, 2, 5] = torch.nan
    out, lse = foci.attention_with_lse(**inputs, backend="aten")
    assert out[1, 3, 2].isnan().all() and lse[1, 3, 2].isnan()
    assert int(out.isnan().sum()) == 16 and int(lse.isnan().sum()) == 1


def is_chunked(inputs: dict[str, Any], leave: tuple[str, ...] = BIAS) -> None:
    found, wanted = (evaluate(inputs, backend, leave=leave) for backend in ("aten", "chunked"))
    for name, expected in wanted.items():
        torch.testing.assert_close(found[name], expected, rtol=2e-5, atol=2e-5, equal_nan=True, msg=name)


@pytest.mark.parametrize("mask", [None, Causal("top-left"), Dense(torch.arange(19)[:, None] % 3 > 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("S", [1, 7, 15, 16, 40])
def test_nan_in_keys_is_seen_however_few_they_are(S: int, dtype: torch.dtype, mask: Any) -> None:
    """Every key a row sees, or one of them, that others do not see."""
    for keys in (slice(None), slice(0, 1)):
        inputs = qkv(S=S, dtype=dtype) | {"mask": mask, "sink": torch.zeros(4, dtype=dtype)}
        inputs["k"][1, keys, 2] = torch.nan
        out, lse = foci.attention_with_lse(**inputs, backend="aten")
        assert lse[1, 1, 2].isnan() and out[1, 1, 2].isnan().all() and lse[0].isfinite().all()
        is_chunked(inputs)


@pytest.mark.parametrize("size", [1e19, 1e20])
@pytest.mark.parametrize("S", [1, 15, 40])
def test_products_that_overflow_before_they_are_scaled(S: int, size: float) -> None:
    inputs = qkv(S=S, dtype=torch.float32)
    inputs["q"], inputs["k"] = inputs["q"] * size, inputs["k"] * size
    out, lse = foci.attention_with_lse(**inputs, backend="aten")
    assert size > 1e19 or (lse.isfinite().any() and out.any())
    is_chunked(inputs)


@pytest.mark.parametrize("size", [1e25, torch.inf, torch.nan])
@pytest.mark.parametrize("S", [3, 20])
def test_few_rows_that_are_not_finite_are_found_among_others(S: int, size: float) -> None:
    inputs = qkv(B=1, T=2, S=S, H=1, dtype=torch.float32) | {"scale": 1e-20}
    inputs["q"][:, 0] *= size
    inputs["k"] *= 1e25
    is_chunked(inputs)


@pytest.mark.parametrize("worst", [torch.nan, torch.inf])
def test_a_bias_at_a_pair_that_causal_hides_may_be_anything(worst: float) -> None:
    mask, hidden = Causal(), torch.ones(19, 19, dtype=torch.bool).triu(1)
    bias = torch.randn(19, 19, dtype=torch.float64)
    for inputs in (qkv(), qkv(B=1) | {"sink": torch.zeros(4, dtype=torch.float64)}):
        truth = evaluate(inputs | {"mask": mask, "bias": bias}, leave=BIAS)
        given = inputs | {"mask": mask, "bias": bias.masked_fill(hidden, worst)}
        assert not reasons(**given)
        assert_close(evaluate(given, "aten", leave=BIAS), truth)


def test_a_bias_of_nan_leaves_no_row_empty() -> None:
    bias = torch.zeros(19, 19).index_fill(0, torch.tensor(3), torch.nan)
    out, lse = foci.attention_with_lse(**qkv(dtype=torch.float32), bias=bias, backend="aten")
    assert lse[:, 3].isnan().all() and out[:, 3].isnan().all() and lse[:, 4].isfinite().all()


def test_one_packed_tensor_twice_is_causal_document_by_document() -> None:
    offsets = torch.tensor([0, 6, 7, 19])
    inputs = qkv(B=1) | {"mask": Packed(offsets) & Causal()}
    assert not reasons(**inputs)
    assert reasons(**qkv(B=1), mask=Packed(offsets, offsets.clone()) & Causal())


@pytest.mark.parametrize("only", ["out", "lse"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (16, 15), (16, 8), (8, 16), (7, 7), (1, 1)])
def test_gradients_through_one_output_alone(only: str, K: int, V: int) -> None:
    """A gradient of lse rides in a column of its own, wherever there is room for one."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"q": (2, 9, 4, K), "k": (2, 11, 2, K), "v": (2, 11, 2, V)}
    inputs: dict[str, Tensor] = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}
    out, lse = torch.randn(2, 9, 4, V, dtype=torch.float64), torch.randn(2, 9, 4, dtype=torch.float64)
    through = (out, None) if only == "out" else (None, lse)
    found, truth = (evaluate(inputs, backend, through=through) for backend in ("aten", "reference"))
    if only == "lse":
        # The reference does not reach v at all: no gradient there, zeros here.
        assert truth.pop("dv") is None and not found.pop("dv").any()
    assert_close(found, truth)


@pytest.mark.parametrize("seed", range(4))
def test_heads_that_share_a_key_sum_their_gradients_in_float32(seed: int) -> None:
    """In bfloat16 torch's CPU kernel sums them in bfloat16: as far from the truth as a plain computation."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(2, 23, heads, 16, generator=draw).bfloat16() for heads in (8, 2, 2, 8))
    found = {}
    for backend, dtype in (("aten", torch.bfloat16), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = foci.attention(*leaves, mask=Causal(), backend=backend)
        found[backend, dtype] = torch.autograd.grad(out, leaves, dout.to(dtype))
    truth = found["reference", torch.float64]
    for ours, right in zip(found["aten", torch.bfloat16][1:], truth[1:], strict=True):
        once = (right.to(torch.bfloat16) - right).norm()  # what rounding the truth itself costs
        assert (ours.double() - right).norm() <= 1.5 * once


def test_a_kernel_that_is_refused_for_gradients_computes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a backward autograd says of nothing that it wants a gradient."""

    class Refused(aten.FlashOnCpu):
        def reasons(self, call: Any, gradients: bool = False) -> list[str]:
            return ["its gradients are wrong"] if gradients else []

        def backward(self, *given: Any) -> Any:
            raise AssertionError("refused")

    monkeypatch.setattr(aten, "_CPU_KERNELS", (Refused(), aten.FlashOnCpu()))
    inputs = qkv()
    assert_close(evaluate(inputs, "aten"), evaluate(inputs))


@pytest.mark.parametrize("problem", SPEC.cases, ids=lambda problem: problem.name)
def test_outputs_of_a_call_that_trains_may_be_changed_in_place(problem: Case) -> None:
    inputs = problem.make(torch.float64, CPU, 1)
    if not reasons(**inputs):
        inputs["q"].requires_grad_()
        for x in foci.attention_with_lse(**inputs, backend="aten"):
            x.add_(1.0)
