"""Short convolutions and norms by kernels: values and every gradient against torch's operations in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from foci.core.tune import TARGETS, record_launches
from foci.ops import kernels_triton_parts, layer_parts
from foci.ops.layer_parts import Norm, convolve, turn
from tests.ops.in_triton import DEVICE
from tests.ops.recurrences import BUDGET, error

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NORMS = {
    "of queries": Norm(mean=False),
    "plain": Norm(),
    "gated": Norm(activation="silu"),
    "gated by a sigmoid": Norm(activation="sigmoid", eps=1e-3),
    "behind the gate": Norm(activation="silu", gate_first=True),
    "two parts behind the gate": Norm(2, activation="silu", gate_first=True),
    "three parts": Norm(3, activation="silu"),
}

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "convolve": lambda x: convolve(x.flatten(2), x.new_ones(8, 1, 1), None, "silu").unflatten(2, (2, 4)),
    "norm": Norm(),
    "turn": lambda x: turn(x, torch.arange(5, device=x.device), 1e4, 4),
}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What a kernel does not write is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def by_kernel(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ in ("_ConvolutionBackward", "_NormedBackward", "_TurnedBackward")


def apart(run: Callable[..., Tensor], leaves: list[Tensor | None], flat: bool = False) -> list[float]:
    """How far values and gradients are from those in float64, by which no kernel runs; flat: of a sum."""
    given = [None if x is None else x.detach().to(DEVICE).requires_grad_() for x in leaves]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    found, truth = run(*given), run(*exact)
    assert by_kernel(found) and not by_kernel(truth) and found.dtype == given[0].dtype  # type: ignore[union-attr]
    dy = torch.ones(1, 1).expand(truth.shape) if flat else torch.randn(truth.shape).to(found.dtype)
    wanted = [x for x in exact if x is not None]
    expected = torch.autograd.grad(truth, wanted, dy.double())
    got = torch.autograd.grad(found, [x for x in given if x is not None], dy.to(found))
    assert all(a.dtype == b.dtype for a, b in zip(got, (x for x in given if x is not None), strict=True))
    pairs = zip((found, *got), (truth, *expected), strict=True)
    return [error(a.detach().cpu(), b.detach()) for a, b in pairs]


def drawn(B: int, T: int, D: int, size: int, dtype: torch.dtype, bias: bool = True) -> list[Tensor | None]:
    torch.manual_seed(size + T)
    x, weight = torch.randn(B, T + size - 1, D), torch.randn(D, 1, size)
    return [x.to(dtype), weight.to(dtype), torch.randn(D).to(dtype) if bias else None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "sigmoid", None])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_convolution_is_torchs(size: int, activation: str | None, dtype: torch.dtype) -> None:
    for B, T, D in ((2, 1, 3), (1, 7, 130), (2, 63, 1), (2, 130, 70)):
        errors = apart(lambda *x: convolve(*x, activation), drawn(B, T, D, size, dtype, bias=T != 7))
        assert max(errors) <= BUDGET[dtype], (B, T, D, errors)


def test_as_many_taps_as_a_kernel_takes_and_more() -> None:
    errors = apart(lambda *x: convolve(*x, "silu"), drawn(1, 150, 2, layer_parts.LONGEST, torch.float32))
    assert max(errors) <= BUDGET[torch.float32], errors
    more = [None if x is None else x.to(DEVICE) for x in drawn(1, 5, 2, layer_parts.LONGEST + 1, torch.float32)]
    x, weight, bias = more
    assert x is not None and weight is not None
    assert not by_kernel(convolve(x.requires_grad_(), weight, bias, "silu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolution_of_strided_tokens_whose_gradient_is_one_number(dtype: torch.dtype) -> None:
    x, weight, bias = drawn(2, 70, 12, 4, dtype)
    assert x is not None and weight is not None
    x, weight = x.transpose(1, 2).contiguous().transpose(1, 2), weight.repeat(2, 1, 1)[::2]
    assert bias is not None
    errors = apart(lambda x, w, b: convolve(x, w, b.repeat_interleave(2)[::2], "silu"), [x, weight, bias], flat=True)
    assert max(errors) <= BUDGET[dtype], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_torchs(name: str, dtype: torch.dtype) -> None:
    norm = NORMS[name]
    for shape in ((2, 3, 6), (1, 40, 3, 36), (530, 30), (3, 4998)):
        torch.manual_seed(len(shape))
        x, gate = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) if norm.activation else None
        weight = torch.randn(shape[-1]).to(dtype) if norm.mean else None
        errors = apart(norm, [x, weight, gate])
        assert max(errors) <= BUDGET[dtype], (shape, errors)


def test_a_norm_of_parts_of_wider_rows_whose_gradient_is_one_number() -> None:
    torch.manual_seed(0)
    wide = torch.randn(2, 50, 40)
    x, gate = wide[..., :16], wide[..., 20:36]
    errors = apart(NORMS["two parts behind the gate"], [x, torch.randn(16), gate], flat=True)
    assert max(errors) <= BUDGET[torch.float32], errors
    turned = torch.randn(8, 50).t()
    assert max(apart(NORMS["plain"], [turned, torch.randn(8), None])) <= BUDGET[torch.float32]
    errors = apart(lambda x, w, g: NORMS["gated"](x, w.repeat_interleave(2)[::2], g), [turned, torch.randn(8), turned])
    assert max(errors) <= BUDGET[torch.float32], errors


def test_what_was_saved_may_come_back_in_another_order() -> None:
    """Hooks on saved tensors keep values, not strides."""
    torch.manual_seed(0)
    inputs = [x.to(DEVICE).requires_grad_() for x in drawn(1, 20, 6, 3, torch.float32) if x is not None]

    def gradients() -> tuple[Tensor, ...]:
        y = convolve(*inputs, "silu")
        y = turn(Norm(activation="silu")(y, inputs[2], y.detach())[:, :, None], torch.arange(20, device=DEVICE), 1e4, 4)
        return torch.autograd.grad(y.square().sum(), inputs)

    expected = gradients()

    def turned(x: Tensor) -> Tensor:
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))

    with torch.autograd.graph.saved_tensors_hooks(turned, lambda x: x.repeat_interleave(2, -1)[..., ::2]):
        found = gradients()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 6, 20])
def test_rotary_is_torchs(width: int, dtype: torch.dtype) -> None:
    """Of rows, of one token, far from the first, between tokens, backwards; of strided heads."""
    torch.manual_seed(width)
    places = [torch.arange(9), torch.arange(18).view(2, 9), torch.tensor([[100_003]]), torch.tensor([2.5, -1.25])]
    for positions in places:
        x = torch.randn(2, 3, positions.shape[-1], 20).to(dtype).transpose(1, 2)
        errors = apart(lambda x, p=positions: turn(x, p.to(x.device), 1e4, width), [x])
        assert max(errors) <= BUDGET[dtype], (positions, errors)


def test_rotary_of_channels_that_lie_apart_is_torchs() -> None:
    x = torch.randn(2, 20, 3, 9).permute(0, 3, 2, 1)
    errors = apart(lambda x: turn(x, torch.arange(9, device=x.device), 1e4, 6), [x])
    assert max(errors) <= BUDGET[torch.float32], errors


def test_positions_that_learn_are_torchs() -> None:
    positions = torch.arange(4.0, device=DEVICE, requires_grad=True)
    y = turn(torch.randn(1, 4, 1, 6, device=DEVICE), positions, 1e4, 6)
    assert not by_kernel(y) and torch.autograd.grad(y.sum(), positions)[0].any()


def test_rows_of_zeros_have_finite_gradients() -> None:
    x = torch.zeros(3, 8, device=DEVICE, requires_grad=True)
    y = Norm(mean=False)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.zeros_like(y)) and torch.allclose(dx, torch.full_like(dx, 1e3))


def test_without_eps_the_gradient_of_weights_is_that_of_the_rows_there_are() -> None:
    for shape in ((5, 8), (700, 6)):
        torch.manual_seed(0)
        errors = apart(Norm(eps=0.0), [torch.randn(shape), torch.randn(shape[-1]), None])
        assert max(errors) <= BUDGET[torch.float32], errors


def test_heads_that_lie_farther_apart_than_32_bits_count() -> None:
    far = torch.UntypedStorage(2**32 + 8, device=DEVICE)
    x = torch.empty(0, dtype=torch.float16, device=DEVICE).set_(far, 0, (1, 1, 3, 2), (0, 0, 2**30, 1))
    x.copy_(torch.randn(1, 1, 3, 2))
    found, same = (turn(y, torch.tensor([3], device=DEVICE), 1e4, 2) for y in (x, x.clone()))
    assert torch.equal(found, same) and not torch.equal(found, x)


@pytest.mark.parametrize("target", TARGETS)
def test_a_program_has_no_more_threads_than_a_gpu_lets_it_have(target: str) -> None:
    x, weight = torch.empty(3, layer_parts.WIDEST, device="meta"), torch.empty(layer_parts.WIDEST, device="meta")
    with record_launches(TARGETS[target]) as launches:
        kernels_triton_parts.norm(x, weight, None, *Norm())
        kernels_triton_parts.norm_back(x, weight, None, x, [True, True, False], *Norm())
    assert max(launch.meta["num_warps"] for launch in launches) * TARGETS[target].lanes <= 1024


@pytest.mark.parametrize("token", [0, 69, 127, 128, 129])
def test_what_is_no_number_stays_with_its_row_and_its_tokens(token: int) -> None:
    x, weight, _ = (None if y is None else y.to(DEVICE) for y in drawn(3, 140, 5, 4, torch.float32, bias=False))
    assert x is not None and weight is not None
    spoilt = x.clone()
    spoilt[1, token + 3] = torch.nan
    results = []
    for given in (x, spoilt):
        leaf = given.requires_grad_()
        y = convolve(leaf, weight, None, "silu")
        results.append((y.detach(), *torch.autograd.grad(y.sum(), leaf)))
    (y, dx), (y_spoilt, dx_spoilt) = results
    reached = torch.zeros(3, 140, dtype=torch.bool)
    reached[1, token : token + 4] = True
    assert torch.equal(y_spoilt.isnan().any(-1).cpu(), reached) and torch.equal(y_spoilt[~reached], y[~reached])
    heard = torch.zeros(3, 143, dtype=torch.bool)
    heard[1, token : min(token + 7, 143)] = True
    assert torch.equal(dx_spoilt.isnan().any(-1).cpu(), heard) and torch.equal(dx_spoilt[~heard], dx[~heard])


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_gradients_that_nobody_wants_are_not_made(wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others are the same."""
    asked: list[list[bool]] = []
    convolve_back, norm_back = kernels_triton_parts.convolve_back, kernels_triton_parts.norm_back

    def convolved(*given: Any) -> Any:
        found = convolve_back(*given)
        asked.append([x is not None for x in found])
        return found

    def normed(*given: Any) -> Any:
        found = norm_back(*given)
        asked.append([x is not None for x in found])
        return found

    def gradients(run: Callable[..., Tensor], given: list[Any], some: tuple[int, ...]) -> dict[int, Tensor]:
        leaves = [x.detach().to(DEVICE).requires_grad_(i in some) for i, x in enumerate(given)]
        return dict(zip(some, torch.autograd.grad(run(*leaves).square().sum(), [leaves[i] for i in some]), strict=True))

    runs: list[tuple[Callable[..., Tensor], list[Any]]] = [
        (lambda *x: convolve(*x, "silu"), drawn(1, 20, 6, 3, torch.float32)),
        (NORMS["gated"], [torch.randn(9, 6), torch.randn(6), torch.randn(9, 6)]),
    ]
    for run, given in runs:
        every = gradients(run, given, (0, 1, 2))
        with monkeypatch.context() as patched:
            patched.setattr(kernels_triton_parts, "convolve_back", convolved)
            patched.setattr(kernels_triton_parts, "norm_back", normed)
            some = gradients(run, given, wanted)
        assert all(torch.equal(some[i], every[i]) for i in wanted)
    assert asked == [[i in wanted for i in range(3)]] * 2


def test_second_derivatives_are_those_of_torchs_operations() -> None:
    """Of every input and of the gradient that came; a first one whose graph is kept is the same."""

    def steep(run: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(run(*leaves).sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
        return [*(x.detach() for x in first), *second]

    torch.manual_seed(0)
    places = torch.arange(12)
    runs: list[tuple[Callable[..., Tensor], list[Any]]] = [
        (lambda *x: convolve(*x, "silu"), drawn(1, 20, 6, 3, torch.float32)),
        (NORMS["two parts behind the gate"], [torch.randn(9, 6), torch.randn(6), torch.randn(9, 6)]),
        (lambda x: turn(x, places.to(x.device), 1e4, 4), [torch.randn(2, 12, 1, 6)]),
    ]
    for run, given in runs:
        found = steep(run, [x.to(DEVICE).requires_grad_() for x in given])
        truth = steep(run, [x.detach().double().requires_grad_() for x in given])
        assert max(error(a.cpu(), b) for a, b in zip(found, truth, strict=True)) <= BUDGET[torch.float32]


@pytest.mark.parametrize("name", PARTS)
def test_gradients_that_no_kernel_reads_are_torchs(name: str) -> None:
    """Many in one, as of a vectorised Jacobian, and what a conjugate negates by a bit; their own gradients too."""
    x, dy = torch.randn(2, 1, 5, 2, 4).unbind()
    results = []
    for given in (x.to(DEVICE), x.double()):
        run, leaf, back = PARTS[name], given.requires_grad_(), dy.to(given)
        (negated,) = torch.autograd.grad(run(leaf), leaf, torch._neg_view(-back))
        (many,) = torch.autograd.grad(run(leaf), leaf, torch.stack([back, back.exp()]), is_grads_batched=True)
        (first,) = torch.autograd.grad(run(leaf).sin().sum(), leaf, create_graph=True)
        results.append((negated, many, *torch.autograd.grad(first, leaf, many.detach(), is_grads_batched=True)))
    for found, truth in zip(*results, strict=True):
        assert error(found.cpu(), truth) <= BUDGET[torch.float32]


def test_second_derivatives_where_one_input_is_made_of_another_or_is_the_same() -> None:
    def steep(run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad(run(x).sin().sum(), x, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first.square().sum(), x)]

    torch.manual_seed(0)
    runs: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda x: NORMS["gated"](x, None, x), torch.randn(3, 8)),
        (lambda x: NORMS["behind the gate"](x, x[0] + 1, 2 * x), torch.randn(3, 8)),
        (lambda w: convolve(w[None, :, 0] * w.sum(0), w[:, :, :3], w[:, 0, 0], "silu"), torch.randn(6, 1, 6)),
    ]
    for run, given in runs:
        found = steep(run, given.to(DEVICE).requires_grad_())
        truth = steep(run, given.double().requires_grad_())
        assert max(error(a.cpu(), b) for a, b in zip(found, truth, strict=True)) <= BUDGET[torch.float32]


def test_a_gradient_that_carries_a_tangent_keeps_it() -> None:
    """Forward-mode AD over a backward, which is linear in what came; torch has none over that of silu."""
    x, weight, bias = (None if y is None else y.to(DEVICE).requires_grad_() for y in drawn(1, 20, 6, 3, torch.float32))
    assert x is not None and weight is not None
    for y in (
        convolve(x, weight, bias, None),
        NORMS["plain"](x),
        turn(x[:, :, None], torch.arange(22, device=DEVICE), 1e4, 4),
    ):
        dy, tangent = torch.randn_like(y), torch.randn_like(y)
        with forward_ad.dual_level():
            (found,) = torch.autograd.grad(y, x, forward_ad.make_dual(dy, tangent), retain_graph=True)
            moved = forward_ad.unpack_dual(found).tangent
        assert moved is not None
        torch.testing.assert_close(moved, torch.autograd.grad(y, x, tangent)[0], rtol=1e-5, atol=1e-5)


def test_the_backward_keeps_only_what_was_given() -> None:
    given = [None if x is None else x.to(DEVICE).requires_grad_() for x in drawn(1, 20, 6, 3, torch.float32)]
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.data_ptr())
        return x

    x, weight, bias = given
    assert x is not None and weight is not None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        convolve(x, weight, bias, "silu")
        Norm()(x, torch.ones(6, device=DEVICE))
    assert {*kept[:3]} == {y.data_ptr() for y in given if y is not None} and kept[3] == x.data_ptr()
    assert len(kept) == 5


def test_wider_norms_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_parts, "WIDEST", 6)
    x = torch.randn(4, 12, device=DEVICE, requires_grad=True)
    assert by_kernel(Norm(2)(x)) and not by_kernel(Norm()(x))
