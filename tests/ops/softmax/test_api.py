"""The public functions on every backend: the error budget, strides, padding, empty rows, sizes of nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci import Causal, Dense, Lengths, Packed
from foci.core.spec import Case
from foci.ops.softmax.spec import SPEC
from tests.ops.softmax.problems import (
    BACKENDS,
    CPU,
    HALVES,
    assert_budget,
    assert_close,
    difference,
    evaluate,
    inputs_of,
    promoted,
    pulls,
    refused,
)


def able(inputs: dict[str, Any]) -> list[str]:
    return [backend for backend in BACKENDS if not refused(inputs, backend)]


@pytest.mark.parametrize("problem", SPEC.cases, ids=lambda problem: problem.name)
def test_float32_is_within_its_budget(problem: Case) -> None:
    inputs = problem.make(torch.float32, CPU, 0)
    through = pulls(inputs)
    truth = evaluate(promoted(inputs), through=through)
    for backend in able(inputs):
        found = evaluate(inputs, backend, through=through)
        assert_close(found, truth, 1e-5)
        assert float(difference(found["lse"], truth["lse"]).max()) <= 2e-4


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("problem", SPEC.cases, ids=lambda problem: problem.name)
def test_half_precision_is_within_its_budget(problem: Case, dtype: torch.dtype) -> None:
    """Against float64 on the same rounded inputs, with the plain computation in the same dtype as the measure."""
    inputs = problem.make(dtype, CPU, 0)
    through = pulls(inputs)
    truth = evaluate(promoted(inputs), through=through)
    plain = evaluate(inputs, through=through, call=SPEC.plain)
    for backend in able(inputs):
        assert_budget(evaluate(inputs, backend, through=through), truth, plain)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_large_logits_neither_overflow_nor_lose_the_lse(dtype: torch.dtype) -> None:
    inputs = inputs_of("causal", torch.float64)
    inputs = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    inputs["q"] = inputs["q"] * 20
    through = pulls(inputs)
    truth = evaluate(promoted(inputs), through=through)
    for backend in able(inputs):
        found = evaluate(inputs, backend, through=through)
        assert float(difference(found["lse"], truth["lse"]).max()) <= 2e-4
        assert all(torch.isfinite(x).all() for x in found.values())


def test_a_scale_wrong_by_a_thousandth_would_be_seen() -> None:
    """The budget of the lse is what sees it."""
    inputs = inputs_of("plain", torch.bfloat16)
    lse = foci.attention_with_lse(**inputs)[1]
    off = foci.attention_with_lse(**inputs, scale=16**-0.5 * 1.001)[1]
    assert float((lse - off).abs().max()) > 2e-4


def strided(x: Tensor, how: str) -> Tensor:
    """The same numbers in another memory layout."""
    if how == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "time last":
        return x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    if how == "every second":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    if how == "cut from the middle":
        return torch.nn.functional.pad(x, (3, 2, 1, 1, 2, 3), value=torch.nan)[:, 2:-3, 1:-1, 3:-2]
    raise ValueError(how)


@pytest.mark.parametrize("how", ["heads first", "time last", "every second", "cut from the middle"])
@pytest.mark.parametrize("name", ["plain", "everything", "grouped heads", "padding and causal", "sink", "bias"])
def test_any_strides(name: str, how: str) -> None:
    inputs = inputs_of(name)
    truth = evaluate(inputs)
    moved = inputs | {n: strided(inputs[n], how) for n in ("q", "k", "v")}
    through = [strided(x, how) if x.dim() == 4 else strided(x[..., None], how)[..., 0] for x in pulls(inputs)]
    for backend in able(inputs):
        assert_close(evaluate(moved, backend, through=tuple(through)), truth)


@pytest.mark.parametrize("name", ["plain", "everything", "causal", "padding", "packed causal", "sink"])
def test_views_of_one_fused_projection_and_gradients_of_stride_zero(name: str) -> None:
    """What `.sum().backward()` sends: a gradient of one number, expanded."""
    inputs = inputs_of(name)
    if inputs["q"].shape != inputs["k"].shape or inputs["k"].shape != inputs["v"].shape:
        inputs["k"], inputs["v"] = inputs["q"].clone().roll(1, 1), inputs["q"].clone().roll(2, 1)
    fused = torch.stack([inputs[n] for n in ("q", "k", "v")], dim=2)
    found = []
    for backend in able(inputs):
        leaf = fused.clone().requires_grad_()
        q, k, v = leaf.unbind(2)
        out, lse = foci.attention_with_lse(**inputs | {"q": q, "k": k, "v": v}, backend=backend)
        (out.sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()).backward()
        found.append({"out": out.detach(), "lse": lse.detach(), "dqkv": leaf.grad})
    for each in found[:-1]:
        assert_close(each, found[-1])


def test_one_tensor_thrice() -> None:
    x = inputs_of("plain")["q"]
    found = []
    for backend in BACKENDS:
        leaf = x.clone().requires_grad_()
        foci.attention(leaf, leaf, leaf, mask=Causal(), backend=backend).square().sum().backward()
        found.append(leaf.grad)
    for grad in found[:-1]:
        torch.testing.assert_close(grad, found[-1], rtol=0, atol=1e-12)


EXCLUDED: dict[str, tuple[dict[str, Any], list[tuple[int, slice]], list[tuple[int, slice]]]] = {
    "lengths": ({"mask": Lengths(torch.tensor([19, 11]))}, [], [(1, slice(11, None))]),
    "lengths, causal": (
        {"mask": Lengths(torch.tensor([0, 11])) & Causal()}, [], [(0, slice(0, None)), (1, slice(11, None))],
    ),
    "both lengths": (
        {"mask": Lengths(torch.tensor([19, 9]), torch.tensor([13, 0])) & Causal()},
        [(0, slice(13, None)), (1, slice(0, None))],
        [(1, slice(9, None))],
    ),
    "both lengths, sink, softcap": (
        {"mask": Lengths(torch.tensor([19, 9]), torch.tensor([13, 9])), "sink": torch.randn(4), "softcap": 2.0},
        [(0, slice(13, None)), (1, slice(9, None))],
        [(1, slice(9, None))],
    ),
    "lengths, bias": (
        {"mask": Lengths(torch.tensor([19, 9])), "bias": torch.randn(4, 19, 19)}, [], [(1, slice(9, None))],
    ),
    "packed with a tail": (
        {"mask": Packed(torch.tensor([0, 6, 14])) & Causal()}, [(0, slice(14, None))], [(0, slice(14, None))],
    ),
    "packed, a document without queries": (
        {"mask": Packed(torch.tensor([0, 6, 6, 19]), torch.tensor([0, 6, 9, 17]))},
        [],
        [(0, slice(6, 9)), (0, slice(17, None))],
    ),
    "packed with lengths": (
        {"mask": Packed(torch.tensor([0, 6, 19])) & Lengths(torch.tensor([4, 13]), torch.tensor([5, 13]))},
        [(0, slice(5, 6))],
        [(0, slice(4, 6))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", EXCLUDED)
def test_what_lengths_and_packed_exclude_may_hold_anything(name: str, poison: float) -> None:
    """Uninitialised memory there changes no bit of outputs or gradients, on any backend, and its own gradient is 0."""
    options, queries, keys = EXCLUDED[name]
    plain = inputs_of("plain") | promoted(options)
    if "packed" in name:
        plain |= {n: plain[n][:1].clone() for n in ("q", "k", "v")}
    poisoned = plain | {n: plain[n].clone() for n in ("q", "k", "v")}
    for row, part in queries:
        poisoned["q"][row, part] = poison
    for row, part in keys:
        poisoned["k"][row, part] = poisoned["v"][row, part] = poison
    truth = evaluate(plain)
    for backend in able(plain):
        clean, found = evaluate(plain, backend), evaluate(poisoned, backend)
        assert_close(found, truth)
        for n, x in found.items():
            assert torch.equal(x, clean[n]), (backend, n)
        for row, part in keys:
            assert not found["dk"][row, part].any() and not found["dv"][row, part].any()
        for row, part in queries:
            assert not found["dq"][row, part].any() and not found["out"][row, part].any()


EMPTY: dict[str, dict[str, Any]] = {
    "causal, more queries than keys": {"q": torch.randn(2, 25, 4, 16), "mask": Causal()},
    "no keys in a row": {"mask": Lengths(torch.tensor([0, 19]))},
    "a closed row": {"mask": Dense(torch.arange(19)[:, None] != 4)},
    "everything closed": {"mask": Dense(torch.zeros(1, 1, dtype=torch.bool))},
    "a bias of -inf": {"bias": torch.where(torch.arange(19)[:, None] == 4, -torch.inf, 0.0)},
    "no keys": {"k": torch.randn(2, 0, 4, 16), "v": torch.randn(2, 0, 4, 16)},
}


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("name", EMPTY)
def test_a_row_that_sees_nothing(name: str, sink: bool) -> None:
    """out = 0, lse = -inf (the sink's logit with a sink), every gradient 0: whatever gradient comes in."""
    inputs = inputs_of("plain") | promoted(EMPTY[name])
    if sink:
        inputs["sink"] = torch.randn(4, dtype=torch.float64)
    truth = evaluate(inputs)
    bare = {n: x for n, x in inputs.items() if n != "sink"}
    empty = evaluate(bare)["lse"] == -torch.inf
    assert empty.any()
    for backend in BACKENDS:
        leave = ("bias",) if backend == "aten" else ()
        if foci.explain("softmax", **inputs).refused.get(backend):
            continue
        found = evaluate(inputs, backend, leave=leave)
        assert_close(found, {n: x for n, x in truth.items() if n in found})
        assert not found["out"][empty].any() and not found["dq"][empty].any()
        expected = inputs["sink"].expand_as(empty)[empty] if sink else torch.tensor(-torch.inf, dtype=torch.float64)
        assert (found["lse"][empty] == expected).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
@pytest.mark.parametrize(
    "change",
    [
        {"T": 0},
        {"S": 0},
        {"T": 0, "S": 0},
        {"T": 1},
        {"S": 1},
        {"T": 1, "S": 1},
        {"B": 0},
        {"H": 0},
        {"K": 0},
        {"V": 0},
        {"K": 1, "V": 1},
    ],
    ids=str,
)
def test_sizes_of_nothing_and_one(backend: str, dtype: torch.dtype, change: dict[str, int]) -> None:
    n = {"B": 2, "T": 5, "S": 6, "H": 4, "K": 8, "V": 3} | change
    inputs: dict[str, Any] = {
        "q": torch.randn(n["B"], n["T"], n["H"], n["K"]).to(dtype),
        "k": torch.randn(n["B"], n["S"], 2, n["K"]).to(dtype),
        "v": torch.randn(n["B"], n["S"], 2, n["V"]).to(dtype),
    }
    for extra in ({}, {"mask": Causal("top-left")}, {"sink": torch.randn(n["H"]).to(dtype)}):
        taken = inputs | extra
        leave = ("sink",) if refused(taken, backend) else ()
        found, truth = evaluate(taken, backend, leave=leave), evaluate(promoted(taken))
        for name, x in found.items():
            assert x is not None and x.shape == truth[name].shape, name
        if dtype == torch.float64:
            assert_close(found, truth)
        elif found["lse"].numel():
            assert float(difference(found["lse"], truth["lse"]).max()) <= 2e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_gradients_asked_for(backend: str) -> None:
    inputs = inputs_of("sink")
    truth = evaluate(inputs)
    for wanted in ("q", "k", "v", "sink"):
        leave = tuple({"q", "k", "v", "sink"} - {wanted})
        found = evaluate(inputs, backend, leave=leave)
        assert set(found) == {"out", "lse", f"d{wanted}"}
        assert_close(found, {n: truth[n] for n in found})


@pytest.mark.parametrize("name", ["everything", "sink", "bias", "causal"])
@pytest.mark.parametrize("only", [0, 1])
def test_a_gradient_through_one_output(name: str, only: int) -> None:
    inputs = inputs_of(name)
    through = tuple(x if place == only else None for place, x in enumerate(pulls(inputs)))
    truth = {n: torch.zeros_like(inputs["v"]) if x is None else x for n, x in evaluate(inputs, through=through).items()}
    for backend in able(inputs):
        found = evaluate(inputs, backend, through=through)
        assert_close({n: torch.zeros_like(truth[n]) if x is None else x for n, x in found.items()}, truth)


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_twice_same_bits_and_inputs_untouched(backend: str) -> None:
    for name in ("plain", "causal", "packed causal", "padding and causal"):
        inputs = inputs_of(name, torch.float32)
        before = {n: x.clone() for n, x in inputs.items() if isinstance(x, Tensor)}
        first, second = evaluate(inputs, backend), evaluate(inputs, backend)
        for n, x in first.items():
            assert torch.equal(x, second[n]), (name, n)
            assert all(x.data_ptr() != y.data_ptr() for y in before.values())
        for n, x in before.items():
            assert torch.equal(inputs[n], x), (name, n)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_documents_alone_are_rows_and_documents_together(backend: str) -> None:
    inputs = inputs_of("packed causal")
    together = evaluate(inputs, backend)
    offsets = inputs["mask"].parts[0].q_offsets.tolist()
    dout, dlse = pulls(inputs)
    for a, b in pairwise(offsets):
        alone = {n: inputs[n][:, a:b] for n in ("q", "k", "v")} | {"mask": Causal()}
        part = evaluate(alone, backend, through=(dout[:, a:b], dlse[:, a:b]))
        assert_close({n: x[:, a:b] for n, x in together.items()}, part)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_future_does_not_matter(backend: str) -> None:
    """Tokens from 12 on change, and no output before them nor a gradient of a loss on the prefix moves."""
    inputs = inputs_of("causal", torch.float32)
    changed = {n: torch.cat([x[:, :12], 50 * torch.randn_like(x[:, 12:])], 1) for n, x in inputs.items() if n != "mask"}
    dout, dlse = pulls(inputs)
    dout[:, 12:] = dlse[:, 12:] = 0
    first, second = (evaluate(x, backend, through=(dout, dlse)) for x in (inputs, inputs | changed))
    for name, x in first.items():
        torch.testing.assert_close(second[name][:, :12], x[:, :12], rtol=0, atol=1e-6)
        assert name in ("out", "lse") or not second[name][:, 12:].any()


def test_attention_is_the_first_half_of_attention_with_lse() -> None:
    for name in ("plain", "everything"):
        inputs = inputs_of(name)
        assert torch.equal(foci.attention(**inputs), foci.attention_with_lse(**inputs)[0])


def test_top_left_and_torch_agree() -> None:
    inputs = inputs_of("causal, cached keys", torch.float32)
    q, k, v = (inputs[n].transpose(1, 2) for n in ("q", "k", "v"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    found = foci.attention(**inputs | {"mask": Causal("top-left")})
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_autocast(backend: str | None) -> None:
    inputs = inputs_of("causal", torch.float32)
    leaves = {n: inputs[n].requires_grad_() for n in ("q", "k", "v")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = foci.attention_with_lse(**inputs, backend=backend)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    rounded = {n: x.detach().to(torch.bfloat16) for n, x in leaves.items()}
    expected = foci.attention(**inputs | rounded, backend=backend)
    assert torch.equal(out, expected)
    out.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in leaves.values())


def test_a_cpu_call_neither_needs_nor_wakes_cuda() -> None:
    script = (
        "import torch, foci; q = torch.randn(1, 4, 2, 8, requires_grad=True)\n"
        "for b in (None, 'aten', 'chunked', 'reference'):\n"
        "    foci.attention(q, q, q, mask=foci.Causal(), backend=b).sum().backward()\n"
        "assert not torch.cuda.is_initialized()"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)
