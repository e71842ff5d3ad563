"""Short convolutions by kernels: values, every gradient and steps against torch's operations in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foci.core import plans
from foci.ops import kernels_triton_convolution, layer_parts
from foci.ops.layer_parts import convolve, convolve_step
from tests.ops.in_triton import DEVICE
from tests.ops.layer_kernels import DTYPES, apart, by_kernel, drawn, poisoned
from tests.ops.recurrences import BUDGET

__all__ = ["poisoned"]  # a fixture


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels' functions that ran, by name: of calls that no plan of an earlier test replays, on a GPU."""
    for cache in ("_FUNCTION_PLANS", "_OPERATOR_PLANS", "_GUARDED", "_SEEN"):
        monkeypatch.setattr(plans, cache, type(getattr(plans, cache))())
    names: list[str] = []
    found = layer_parts._function
    monkeypatch.setattr(layer_parts, "_function", lambda name: names.append(name) or found(name))
    return names


def ages_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "sigmoid", None])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_convolution_is_torchs(size: int, activation: str | None, dtype: torch.dtype) -> None:
    """Of the tokens before too, where there are some, whose gradient is their own."""
    for B, T, D in ((2, 1, 3), (1, 7, 130), (2, 63, 1), (2, 130, 70)):
        x, weight, bias = drawn(B, T, D, size, dtype, bias=T not in (7, 63))
        before = torch.randn(B, size - 1, D).to(dtype) if T != 63 else None
        errors = apart(lambda x, p, w, b: convolve(x, w, b, activation, before=p), [x, before, weight, bias])
        assert max(errors) <= BUDGET[dtype], (B, T, D, errors)


@pytest.mark.parametrize("T", range(60, 66))
@pytest.mark.parametrize("continued", [False, True])
def test_a_convolution_that_ends_with_a_stretch_and_whose_rows_lie_apart(continued: bool, T: int) -> None:
    """The last stretch of the backward begins before and behind the last token, and has some tokens or none.

    What lies between the rows is no number.
    """
    x, weight, bias = drawn(2, T, 3, 4, torch.float32)
    assert x is not None
    before = torch.randn(2, 3, 3) if continued else None
    apart_x, apart_before = (None if y is None else F.pad(y, (0, 0, 5, 5), value=torch.nan) for y in (x, before))
    assert apart_x is not None
    given = [apart_x[:, 5:-5], None if apart_before is None else apart_before[:, 5:-5], weight, bias]
    errors = apart(lambda x, p, w, b: convolve(x, w, b, "silu", before=p), given)
    assert max(errors) <= BUDGET[torch.float32], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_convolution_of_packed_documents_is_torchs(size: int, dtype: torch.dtype) -> None:
    """Of documents shorter than its taps, of none, and with ends where stretches and blocks have theirs."""
    for lengths in ((3, 0, 1, 5), (64, 63, 1, 66), (128, 2, 1, 127)):
        x, weight, bias = drawn(1, sum(lengths), 5, size, dtype)
        ages = ages_of(lengths)
        errors = apart(lambda x, w, b, a=ages: convolve(x, w, b, "silu", ages=a.to(x.device)), [x, weight, bias])
        assert max(errors) <= BUDGET[dtype], (lengths, errors)


def test_packed_documents_are_convolved_each_by_itself() -> None:
    x, weight, bias = (None if y is None else y.to(DEVICE) for y in drawn(1, 140, 6, 4, torch.float32))
    assert x is not None and weight is not None
    lengths = (2, 70, 0, 68)
    x = x.clone()
    x[0, 1] = torch.nan  # of the first document alone
    y = convolve(x.requires_grad_(), weight, bias, "silu", ages=ages_of(lengths).to(DEVICE))
    (dx,) = torch.autograd.grad(y[:, 2:].square().sum(), x)
    assert by_kernel(y) and torch.equal(y[0, :2].isnan().any(-1).cpu(), torch.tensor([False, True]))
    ends = x.detach()[:, 2:72].requires_grad_(), x.detach()[:, 72:].requires_grad_()
    alone = [convolve(part, weight, bias, "silu") for part in ends]
    assert torch.equal(y[:, 2:], torch.cat(alone, 1))
    right = torch.autograd.grad(sum(part.square().sum() for part in alone), ends)
    torch.testing.assert_close(dx[:, 2:], torch.cat(right, 1), rtol=0, atol=1e-6)


def test_as_many_taps_as_a_kernel_takes_and_more() -> None:
    for ages in (None, ages_of((100, 1, 49))):
        x, weight, bias = drawn(1, 150, 2, layer_parts.LONGEST, torch.float32)
        errors = apart(
            lambda x, w, b, a=ages: convolve(x, w, b, "silu", ages=None if a is None else a.to(x.device)),
            [x, weight, bias],
        )
        assert max(errors) <= BUDGET[torch.float32], errors
    more = [None if x is None else x.to(DEVICE) for x in drawn(1, 5, 2, layer_parts.LONGEST + 1, torch.float32)]
    x, weight, bias = more
    assert x is not None and weight is not None
    assert not by_kernel(convolve(x.requires_grad_(), weight, bias, "silu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolution_of_strided_tokens_whose_gradient_is_one_number(dtype: torch.dtype) -> None:
    x, weight, bias = drawn(2, 70, 12, 4, dtype)
    assert x is not None and weight is not None and bias is not None
    x, weight = x.transpose(1, 2).contiguous().transpose(1, 2), weight.repeat(2, 1, 1)[::2]
    before = torch.randn(2, 12, 3).to(dtype).transpose(1, 2)
    errors = apart(
        lambda x, w, b, p: convolve(x, w, b.repeat_interleave(2)[::2], "silu", before=p), [x, weight, bias, before],
        flat=True,
    )  # fmt: skip
    assert max(errors) <= BUDGET[dtype], errors


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 3), (1, 2)])
def test_gradients_that_nobody_wants_are_not_made(wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others are the same."""
    asked: list[list[bool]] = []
    convolve_back = kernels_triton_convolution.convolve_back

    def convolved(*given: Any) -> Any:
        found = convolve_back(*given)
        asked.append([x is not None for x in found])
        return found

    x, weight, bias = drawn(2, 70, 6, 3, torch.float32)
    given = [x, torch.randn(2, 2, 6), weight, bias]

    def gradients(some: tuple[int, ...]) -> dict[int, Tensor]:
        leaves = [y.detach().to(DEVICE).requires_grad_(i in some) for i, y in enumerate(given) if y is not None]
        x, before, weight, bias = leaves
        y = convolve(x, weight, bias, "silu", before=before)
        return dict(zip(some, torch.autograd.grad(y.square().sum(), [leaves[i] for i in some]), strict=True))

    every = gradients((0, 1, 2, 3))
    monkeypatch.setattr(kernels_triton_convolution, "convolve_back", convolved)
    some = gradients(wanted)
    assert all(torch.equal(some[i], every[i]) for i in wanted)
    assert asked == [[0 in wanted, 1 in wanted, False, 2 in wanted, 3 in wanted]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("turned", [False, True])
def test_a_step_is_the_convolution_of_one_token(size: int, dtype: torch.dtype, turned: bool, ran: list[str]) -> None:
    """Token by token as at once, in place, of strided tokens and of more channels than a program has.

    turned: channels before tokens in memory, and one more token, which no tap reaches, as in transformers' caches.
    """
    B, T, D = 3, 6, 300
    x, weight, bias = (None if y is None else y.to(DEVICE) for y in drawn(B, T, D, size, dtype, bias=size != 2))
    assert x is not None and weight is not None
    before = torch.randn(B, size - 1, D).to(dtype).to(DEVICE)
    with torch.no_grad():
        truth = convolve(x, weight, bias, "silu", before=before)
        tail = before.clone()
        if turned:
            held = torch.cat([before.new_ones(B, 1, D), before], 1).transpose(1, 2).contiguous()
            tail = held[..., 1:].transpose(1, 2)
        version = tail._version
        ran.clear()
        found = torch.stack([convolve_step(x[:, t], tail, weight, bias, "silu") for t in range(T)], 1)
    assert {*ran} == {"convolution.convolve_step"} and tail._version == version + T
    assert torch.equal(found, truth) and torch.equal(tail, torch.cat([before, x], 1)[:, T:])
    assert not turned or bool((held[..., 0] == 1).all())


def test_a_step_writes_its_own_tail_alone(ran: list[str]) -> None:
    _, weight, _ = (None if y is None else y.to(DEVICE) for y in drawn(1, 1, 4, 3, torch.float32))
    assert weight is not None
    all_tails = torch.randn(6, 2, 4, device=DEVICE)
    was, x = all_tails.clone(), torch.randn(2, 4, device=DEVICE, dtype=torch.float16)
    with torch.inference_mode():
        y = convolve_step(x, all_tails[2:4], weight, None, None)
    assert {*ran} == {"convolution.convolve_step"} and y.dtype == torch.float16
    assert torch.equal(all_tails[[0, 1, 4, 5]], was[[0, 1, 4, 5]]) and torch.equal(all_tails[2:4, 1], x.float())


def test_a_step_that_no_kernel_takes_is_torchs(ran: list[str]) -> None:
    """Where autograd must see it, and of a token that is the tail's."""
    x, weight, _ = (None if y is None else y.to(DEVICE) for y in drawn(2, 1, 4, 3, torch.float32))
    assert x is not None and weight is not None
    tail = torch.randn(2, 2, 4, device=DEVICE)
    truth = convolve(x, weight, None, None, before=tail)[:, 0]
    ran.clear()
    for kind in ("learns", "shared"):
        held = tail.clone()
        if kind == "shared":
            held = torch.cat([held, x], 1).flatten()[: 2 * 2 * 4].view(2, 2, 4)
        token = held[:, 0] if kind == "shared" else x[:, 0]
        right = convolve(token[:, None].clone(), weight, None, None, before=held.clone())[:, 0]
        then = torch.cat([held, token[:, None]], 1)[:, 1:]
        ran.clear()
        with torch.set_grad_enabled(kind == "learns"):
            y = convolve_step(token, held, weight.requires_grad_() if kind == "learns" else weight, None, None)
        assert "convolution.convolve_step" not in ran
        torch.testing.assert_close(y, right)
        assert torch.equal(held, then)
        weight = weight.detach()
    with pytest.raises(RuntimeError, match="single memory location"):
        convolve_step(x[:, 0], tail[:, :1].expand(2, 2, 4), weight, None, None)
    torch.testing.assert_close(truth, convolve_step(x[:, 0], tail, weight, None, None))


@pytest.mark.parametrize("token", [0, 69, 127, 128, 129])
def test_what_is_no_number_stays_with_its_row_and_its_tokens(token: int) -> None:
    x, weight, _ = (None if y is None else y.to(DEVICE) for y in drawn(3, 140, 5, 4, torch.float32, bias=False))
    assert x is not None and weight is not None
    spoilt = x.clone()
    spoilt[1, token] = torch.nan
    results = []
    for given in (x, spoilt):
        leaf = given.requires_grad_()
        y = convolve(leaf, weight, None, "silu")
        results.append((y.detach(), *torch.autograd.grad(y.sum(), leaf)))
    (y, dx), (y_spoilt, dx_spoilt) = results
    reached = torch.zeros(3, 140, dtype=torch.bool)
    reached[1, token : token + 4] = True
    assert torch.equal(y_spoilt.isnan().any(-1).cpu(), reached) and torch.equal(y_spoilt[~reached], y[~reached])
    heard = torch.zeros(3, 140, dtype=torch.bool)
    heard[1, max(token - 3, 0) : token + 4] = True
    assert torch.equal(dx_spoilt.isnan().any(-1).cpu(), heard) and torch.equal(dx_spoilt[~heard], dx[~heard])


@pytest.mark.parametrize("size", [4, layer_parts.LONGEST])
def test_nothing_behind_the_last_token_is_read(size: int) -> None:
    """Backward the last stretch may begin behind it: 63 tokens have 4 taps that go on to the 66th."""
    for T in (64 - size + 1, 63, 64):
        x, weight, bias = drawn(2, T, 3, size, torch.float32)
        assert x is not None and weight is not None and bias is not None
        wide, dys = torch.full((2, 2, T + size, 3), torch.nan, device=DEVICE)
        wide[:, :T], dys[:, :T] = x.to(DEVICE), 1
        leaves = [y.detach().to(DEVICE).requires_grad_() for y in (x, weight, bias)]
        right = torch.autograd.grad(convolve(*leaves, "silu").sum(), leaves)
        leaves[0] = wide[:, :T].detach().requires_grad_()
        y = convolve(*leaves, "silu")
        found = torch.autograd.grad(y, leaves, dys[:, :T])
        assert by_kernel(y) and all(torch.equal(a, b) for a, b in zip(found, right, strict=True)), T
