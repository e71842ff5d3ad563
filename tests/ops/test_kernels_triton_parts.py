"""Short convolutions and norms by kernels: values and every gradient against torch's operations in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from foci.core.tune import TARGETS, interpreting, record_launches
from foci.ops import kernels_triton_convolution, kernels_triton_parts, layer_parts
from foci.ops.layer_parts import Norm, convolve, gate, turn, weigh
from tests.ops.in_triton import DEVICE
from tests.ops.layer_kernels import DTYPES, apart, by_kernel, drawn, poisoned
from tests.ops.recurrences import BUDGET, error

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
    "gate": lambda x: gate(x, x.new_ones(4), x.new_zeros(2), -0.5),
    "weigh": lambda x: weigh(x, x.detach()[..., :2].cos()),
}
__all__ = ["poisoned"]  # a fixture


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
    swapped = torch.randn(50, 2, 8).transpose(0, 1)
    assert max(apart(NORMS["plain"], [swapped, torch.randn(8), None])) <= BUDGET[torch.float32]
    turned = torch.randn(8, 50).t()
    assert max(apart(NORMS["plain"], [turned, torch.randn(8), None])) <= BUDGET[torch.float32]
    errors = apart(lambda x, w, g: NORMS["gated"](x, w.repeat_interleave(2)[::2], g), [turned, torch.randn(8), turned])
    assert max(errors) <= BUDGET[torch.float32], errors


@pytest.mark.parametrize(("name", "rows"), [("gated", 37), ("two parts behind the gate", 530)])
def test_a_norm_of_many_programs_whose_gate_has_its_own_strides(name: str, rows: int) -> None:
    """Each has 16 rows as wide as these; their sums are added 32 at a time."""
    torch.manual_seed(0)
    D = 1030 * NORMS[name].groups
    x, gate = torch.randn(rows, D), torch.randn(rows, D + 7)[:, 3:-4]
    errors = apart(NORMS[name], [x, torch.randn(D), gate])
    assert max(errors) <= BUDGET[torch.float32], errors


def test_what_was_saved_may_come_back_in_another_order() -> None:
    """Hooks on saved tensors keep values, not strides."""
    torch.manual_seed(0)
    inputs = [x.to(DEVICE).requires_grad_() for x in drawn(1, 20, 6, 3, torch.float32) if x is not None]
    ages = torch.arange(20, device=DEVICE) % 7

    def gradients() -> tuple[Tensor, ...]:
        y = convolve(*inputs, "silu", ages=ages)
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
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("heads", [None, 1, 5, "each"])
def test_a_gate_is_torchs(heads: int | str | None, inverted: bool, dtype: torch.dtype) -> None:
    """Far below 0 and above too, whatever heads there are, in float32; its bias and rates in dtypes of their own."""
    for shape, biased in (((2, 3, 5), True), ((1, 70, 40), False), ((300, 300), True), ((3, 650), False)):
        torch.manual_seed(shape[-1])
        x = (3 * torch.randn(shape) + torch.tensor([0.0, -12.0, 12.0]).repeat(shape[-1])[: shape[-1]]).to(dtype)
        bias = torch.randn(shape[-1]).to(dtype) if biased else None
        a_log = None if heads is None else torch.randn(shape[-1] if heads == "each" else int(heads))
        errors = apart(lambda *y: gate(*y, -0.25, inverted), [x, bias, a_log], gives=torch.float32)
        budget = [BUDGET[torch.float32], *[BUDGET[dtype]] * 3]
        assert all(map(float.__le__, errors, budget)), (shape, errors)


def test_a_gate_keeps_its_digits_where_it_is_small() -> None:
    x = torch.tensor([-87.0, -40, -20, -5, 0, 5, 20, 40, 1000], device=DEVICE)
    y = gate(x.requires_grad_(), rate=2.0)
    (dx,) = torch.autograd.grad(y.sum(), x)
    truth = torch.nn.functional.softplus(x.detach().double(), threshold=1e3) * 2
    assert by_kernel(y) and ((y.double() - truth).abs() <= 1e-5 * truth).all()
    torch.testing.assert_close(dx.double(), 2 * x.detach().double().sigmoid(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_weighed_heads_are_torchs(shared: bool, heads: int, dtype: torch.dtype) -> None:
    """By a number for each head, or for each head of each token, in float32 and in their own dtype."""
    for shape in ((2, 3, 6), (1, 150, 48), (5, 3 * 200)):
        torch.manual_seed(shape[-1])
        x = torch.randn(shape).to(dtype)
        scale = torch.randn((heads,) if shared else (*shape[:-1], heads))
        for given in (scale, scale.to(dtype)):
            errors = apart(weigh, [x, given])
            assert max(errors) <= BUDGET[dtype], (shape, errors)


def test_gates_and_weighed_heads_of_parts_of_wider_rows_whose_gradient_is_one_number() -> None:
    torch.manual_seed(0)
    wide = torch.randn(2, 50, 40)
    errors = apart(lambda x, b, a: gate(x, b, a, -1.0), [wide[..., 3:19], torch.randn(16), torch.randn(4)], flat=True)
    errors += apart(weigh, [wide[..., 4:20], wide[..., 20:28]], flat=True)
    errors += apart(weigh, [torch.randn(8, 50).t(), torch.randn(2)], flat=True)
    errors += apart(lambda x: gate(x, None, None, 1.0, True), [torch.randn(8, 50).t()], flat=True)
    errors += apart(
        lambda x, w: gate(x, w.repeat_interleave(2)[::2], w[:2].repeat_interleave(2)[::2], 1.0),
        [torch.randn(7, 8), torch.randn(8)],
    )
    assert max(errors) <= BUDGET[torch.float32], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 6, 20])
def test_rotary_is_torchs(width: int, dtype: torch.dtype) -> None:
    """Of rows, of one token, far from the first, between tokens, backwards; of strided heads."""
    torch.manual_seed(width)
    places = [torch.arange(9), torch.arange(18).view(2, 9), torch.tensor([[2**24 + 1]]), torch.tensor([2.5, -1.25])]
    for positions in places:
        x = torch.randn(2, 3, positions.shape[-1], 20).to(dtype).transpose(1, 2)
        errors = apart(lambda x, p=positions: turn(x, p.to(x.device), 1e4, width), [x])
        assert max(errors) <= BUDGET[dtype], (positions, errors)


def test_rotary_of_channels_that_lie_apart_is_torchs() -> None:
    x = torch.randn(2, 20, 3, 9).permute(0, 3, 2, 1)
    errors = apart(lambda x: turn(x, torch.arange(9, device=x.device), 1e4, 6), [x])
    assert max(errors) <= BUDGET[torch.float32], errors


def test_rotary_is_turned_back_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[bool] = []
    rotary = kernels_triton_parts.rotary

    def watched(*given: Any) -> Any:
        ways.append(given[-1])
        return rotary(*given)

    monkeypatch.setattr(kernels_triton_parts, "rotary", watched)
    x = torch.randn(1, 5, 2, 4, device=DEVICE, requires_grad=True)
    torch.autograd.grad(PARTS["turn"](x).sum(), x)
    assert ways == [False, True]


def test_positions_that_learn_are_torchs() -> None:
    positions = torch.arange(4.0, device=DEVICE, requires_grad=True)
    y = turn(torch.randn(1, 4, 1, 6, device=DEVICE), positions, 1e4, 6)
    assert not by_kernel(y) and torch.autograd.grad(y.sum(), positions)[0].any()


@pytest.mark.parametrize("kinds", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_values_and_gradients_have_the_dtypes_of_what_they_are_of(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """Weights, biases and gates need not have x's."""
    x, weight, bias = (
        None if y is None else y.to(kinds[i > 0]) for i, y in enumerate(drawn(1, 9, 6, 3, torch.float32))
    )
    assert x is not None and weight is not None and bias is not None
    for errors in (
        apart(lambda *y: convolve(*y, "silu"), [x, weight, bias]),
        apart(NORMS["gated"], [x, bias, x.flip(0).to(kinds[1])]),
    ):
        assert max(errors) <= BUDGET[torch.float16], errors


@pytest.mark.parametrize("shape", [(0, 5, 2, 4), (2, 0, 2, 4), (2, 5, 0, 4)])
def test_what_is_empty_is_torchs(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, device=DEVICE, requires_grad=True)
    for y in (
        Norm()(x),
        turn(x, torch.arange(shape[1], device=DEVICE), 1e4, 4),
        convolve(x.flatten(2), x.new_ones(4 * shape[2], 1, 1), None, "silu"),
    ):
        assert not by_kernel(y) and y.numel() == 0


def test_weights_that_do_not_learn_cost_no_launch() -> None:
    x, weight, bias = (torch.empty(shape, device="meta") for shape in ((2, 9, 6), (6, 1, 3), (6,)))
    for learns in (False, True):
        with record_launches(next(iter(TARGETS.values()))) as launches:
            kernels_triton_convolution.convolve_back(
                x, None, None, weight, bias, None, x, [True, False, False, False, learns]
            )
            kernels_triton_parts.norm_back(x, bias, x, *NORMS["gated"], x, [True, learns, True])
        assert len(launches) == (4 if learns else 2)


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


def one(x: Tensor) -> Tensor:
    return turn(x, torch.arange(1, x.shape[1] + 1, device=x.device), 1e4, 2)


FAR: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "rows of a convolution": ((3, 4, 2), lambda x: x, lambda x: convolve(x, x.new_ones(2, 1, 1), None, "silu")),
    "tokens of a convolution": ((3, 2), lambda x: x[None], lambda x: convolve(x, x.new_ones(2, 1, 1), None, "silu")),
    "channels of a convolution": (
        (3, 2),
        lambda x: x.t()[None],
        lambda x: convolve(x, x.new_ones(3, 1, 1), None, "silu"),
    ),
    "rows of a norm": ((3, 2), lambda x: x, lambda x: Norm(activation="silu")(x, None, x)),
    "rows of rotary": ((3, 2), lambda x: x[:, None, None], one),
    "tokens of rotary": ((3, 2), lambda x: x[None, :, None], one),
    "heads of rotary": ((3, 2), lambda x: x[None, None], one),
    "pairs of rotary": (
        (4, 1),
        lambda x: x.t()[None, None],
        lambda x: turn(x, torch.tensor([3], device=DEVICE), 1e4, 4),
    ),
    "channels that stay": ((3, 1), lambda x: x.t()[None, None], one),
}


@pytest.mark.parametrize("name", FAR)
def test_what_lies_farther_apart_than_32_bits_count_is_found(name: str) -> None:
    """And its gradient; no memory is touched but theirs."""
    shape, view, run = FAR[name]
    memory = torch.UntypedStorage((shape[0] - 1) * 2**31 + 64, device=DEVICE)
    near, results = torch.randn(2, *shape, device=DEVICE).half(), []
    x, dy = (
        torch.empty(0, dtype=near.dtype, device=DEVICE).set_(memory, 16 * i, shape, (2**30, *near.stride()[2:]))
        for i in (0, 1)
    )
    for leaf, back in (near.unbind(), (x.copy_(near[0]), dy.copy_(near[1]))):
        leaf = leaf.requires_grad_()
        y = run(view(leaf))
        assert by_kernel(y)
        # Loops of the interpreter count in 32 bits whatever their bounds are: the norm's backward has one over rows.
        counts = name != "rows of a norm" or not interpreting()
        results.append((y, *(torch.autograd.grad(y, leaf, view(back)) if counts else ())))
    for found, same in zip(*results, strict=True):
        assert torch.equal(found, same)


@pytest.mark.parametrize("target", TARGETS)
def test_a_program_has_no_more_threads_than_a_gpu_lets_it_have(target: str) -> None:
    x, weight = torch.empty(3, layer_parts.WIDEST, device="meta"), torch.empty(layer_parts.WIDEST, device="meta")
    with record_launches(TARGETS[target]) as launches:
        kernels_triton_parts.norm(x, weight, None, *Norm())
        kernels_triton_parts.norm_back(x, weight, None, *Norm(), x, [True, True, False])
        kernels_triton_parts.gate_back(x, weight, weight[:1], 1.0, False, x, [True] * 3)
        kernels_triton_parts.weigh_back(x, weight[:1], x, [True] * 2)
    assert max(launch.meta["num_warps"] for launch in launches) * TARGETS[target].lanes <= 1024


@pytest.mark.parametrize("name", ["norm", "gate", "weigh"])
def test_gradients_that_nobody_wants_are_not_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others are the same."""
    asked: list[list[bool]] = []
    back = getattr(kernels_triton_parts, f"{name}_back")

    def seen(*given: Any) -> Any:
        found = back(*given)
        asked.append([x is not None for x in found])
        return found

    def gradients(run: Callable[..., Tensor], given: list[Any], some: tuple[int, ...]) -> dict[int, Tensor]:
        leaves = [x.detach().to(DEVICE).requires_grad_(i in some) for i, x in enumerate(given)]
        return dict(zip(some, torch.autograd.grad(run(*leaves).square().sum(), [leaves[i] for i in some]), strict=True))

    runs: dict[str, tuple[Callable[..., Tensor], list[Any]]] = {
        "norm": (NORMS["gated"], [torch.randn(9, 6), torch.randn(6), torch.randn(9, 6)]),
        "gate": (lambda *x: gate(*x, -1.0), [torch.randn(9, 6), torch.randn(6), torch.randn(3)]),
        "weigh": (weigh, [torch.randn(9, 6), torch.randn(3)]),
    }
    run, given = runs[name]
    every = gradients(run, given, tuple(range(len(given))))
    monkeypatch.setattr(kernels_triton_parts, f"{name}_back", seen)
    for wanted in ((0,), (1,), (2,), (0, 1), (1, 2))[: 5 if len(given) == 3 else 2]:
        some = gradients(run, given, wanted)
        assert all(torch.equal(some[i], every[i]) for i in wanted)
        assert asked.pop() == [i in wanted for i in range(len(given))] and not asked


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
        (lambda *x: gate(*x, -1.0), [torch.randn(9, 6), torch.randn(6), torch.randn(3)]),
        (weigh, [torch.randn(9, 6), torch.randn(9, 3)]),
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
        (lambda x: weigh(gate(x, x[0], x[1], -1.0), x[..., :4]), torch.randn(3, 8)),
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
        turn(x[:, :, None], torch.arange(20, device=DEVICE), 1e4, 4),
        weigh(x, torch.randn(3, device=DEVICE)),
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
        gate(x)
    assert {*kept[:3]} == {y.data_ptr() for y in given if y is not None} and kept[3] == kept[5] == x.data_ptr()
    assert len(kept) == 6


def test_wider_norms_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_parts, "WIDEST", 6)
    x = torch.randn(4, 12, device=DEVICE, requires_grad=True)
    assert by_kernel(Norm(2)(x)) and not by_kernel(Norm()(x))
