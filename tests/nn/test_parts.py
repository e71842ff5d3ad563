"""foci.nn.parts: each part against its equation, in all its forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from foci.core.errors import ShapeError
from foci.nn import parts
from foci.nn.parts import FEATURE_MAPS, GatedRMSNorm, RMSNorm, ShortConvolution, history, l2norm, rotary

DOUBLE = torch.float64


def test_l2norm_makes_keys_of_length_one_and_leaves_zero_alone() -> None:
    x = torch.randn(3, 5, dtype=DOUBLE)
    torch.testing.assert_close(l2norm(x), F.normalize(x, dim=-1), rtol=1e-5, atol=1e-6)
    assert not l2norm(torch.zeros(2, 4)).any()
    assert l2norm(x.bfloat16()).dtype == torch.bfloat16


def test_rms_norm_is_torchs_own() -> None:
    norm = RMSNorm(6).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 6, dtype=DOUBLE)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (6,), norm.weight, norm.eps))


def test_rms_norm_of_parts() -> None:
    norm = RMSNorm(6, groups=2).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 6, dtype=DOUBLE)
    parts = [F.rms_norm(x[:, s], (3,), norm.weight[s], norm.eps) for s in (slice(0, 3), slice(3, 6))]
    torch.testing.assert_close(norm(x), torch.cat(parts, 1))


def test_rms_norm_computes_half_precision_in_float32() -> None:
    x = (torch.randn(4, 6) * 300).half()  # squares beyond float16's range
    assert torch.isfinite(RMSNorm(6).half()(x)).all()


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_rms_norm(activation: str, gate_first: bool) -> None:
    norm = GatedRMSNorm(6, activation=activation, gate_first=gate_first).double()
    x, gate = torch.randn(2, 4, 6, dtype=DOUBLE)
    opened = getattr(F, activation)(gate)
    right = F.rms_norm(x * opened, (6,), eps=1e-6) if gate_first else F.rms_norm(x, (6,), eps=1e-6) * opened
    torch.testing.assert_close(norm(x, gate), right)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="GatedRMSNorm: activation is 'gelu'; expected one of 'silu', 'sigmoid'"):
        GatedRMSNorm(6, activation="gelu")
    with pytest.raises(ValueError, match=r"GatedRMSNorm: activation is \['silu'\]; expected one of 'silu', 'sigmoid'"):
        GatedRMSNorm(6, activation=["silu"])


@pytest.mark.parametrize("norm", [RMSNorm, GatedRMSNorm])
def test_parts_of_a_norm_are_equal(norm: type[RMSNorm]) -> None:
    with pytest.raises(ValueError, match=f"^{norm.__name__}: size is 6, groups 4; expected a multiple of the second"):
        norm(6, groups=4)
    with pytest.raises(ValueError, match=f"^{norm.__name__}: groups is 0; expected an integer of at least 1"):
        norm(6, groups=0)
    with pytest.raises(ValueError, match="ShortConvolution: size is 0"):
        ShortConvolution(6, 0)


@pytest.mark.parametrize("norm", [RMSNorm, GatedRMSNorm])
def test_a_norm_takes_its_size_alone(norm: type[RMSNorm]) -> None:
    """One channel would be spread over all of the weight's."""
    for wrong in (torch.randn(2, 1), torch.randn(2, 5), torch.randn(6, 2), torch.tensor(1.0), torch.ones(2, 6).long()):
        with pytest.raises(ShapeError, match=rf"^{norm.__name__}: x is .*; expected floating \[\.\.\., 6\]"):
            norm(6)(*[wrong] * (1 + (norm is GatedRMSNorm)))
    with pytest.raises(TypeError, match=f"^{norm.__name__}: x is None; expected a tensor"):
        norm(6)(*[None] * (1 + (norm is GatedRMSNorm)))
    for eps in (0.0, -1e-6, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^{norm.__name__}: eps must be a positive finite number, got {eps}"):
            norm(6, eps)
    with pytest.raises(TypeError, match=f"^{norm.__name__}: eps must be a number, got '1e-6'"):
        norm(6, "1e-6")
    for size in (0, -2, 6.0, True, None):
        with pytest.raises(ValueError, match=f"^{norm.__name__}: size is {size}; expected an integer of at least 1"):
            norm(size)


@pytest.mark.parametrize("gate_first", [False, True])
def test_a_gate_is_of_the_shape_that_it_gates(gate_first: bool) -> None:
    norm, x = GatedRMSNorm(6, gate_first=gate_first), torch.randn(2, 6)
    for wrong in (x[:1], x[:, :1], x[0], x[None], x.long()):
        with pytest.raises(ShapeError, match=r"GatedRMSNorm: gate is .*; expected floating \[2, 6\], as x"):
            norm(x, wrong)
    with pytest.raises(TypeError, match=r"GatedRMSNorm: gate is None; expected a tensor \[2, 6\]"):
        norm(x, None)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, -x), norm(x, -x))


@pytest.fixture
def convolution() -> ShortConvolution:
    made = ShortConvolution(6, 4, bias=True).double()
    torch.nn.init.normal_(made.bias)
    return made


def literally(convolution: ShortConvolution, x: torch.Tensor) -> torch.Tensor:
    """torch's own convolution, padded on the left. x [B,T,C]."""
    padded = F.pad(x.transpose(1, 2), (convolution.size - 1, 0))
    return F.silu(F.conv1d(padded, convolution.weight, convolution.bias, groups=x.shape[2])).transpose(1, 2)


def test_the_convolution_is_torchs_padded_on_the_left(convolution: ShortConvolution) -> None:
    x = torch.randn(2, 9, 6, dtype=DOUBLE)
    torch.testing.assert_close(convolution(x)[0], literally(convolution, x))
    assert set(convolution.state_dict()) == {"weight", "bias"} and convolution.weight.shape == (6, 1, 4)


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9])
def test_its_tail_goes_on_where_it_stopped(convolution: ShortConvolution, cut: int) -> None:
    x = torch.randn(2, 9, 6, dtype=DOUBLE)
    first, tail = convolution(x[:, :cut])
    second, tail = convolution(x[:, cut:], tail=tail)
    torch.testing.assert_close(torch.cat([first, second], 1), literally(convolution, x))
    assert torch.equal(tail, x[:, -3:])


def test_its_tail_does_not_hold_the_whole_sequence_alive(convolution: ShortConvolution) -> None:
    tail = convolution(torch.randn(1, 900, 6, dtype=DOUBLE))[1]
    assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()


def test_its_steps_change_the_tail_in_place(convolution: ShortConvolution) -> None:
    x = torch.randn(2, 9, 6, dtype=DOUBLE)
    with torch.no_grad():
        _, tail = convolution(x[:, :4])
        place = tail.data_ptr()
        steps = [convolution.step(x[:, t], tail) for t in range(4, 9)]
    torch.testing.assert_close(torch.stack(steps, 1), literally(convolution, x)[:, 4:])
    assert tail.data_ptr() == place and torch.equal(tail, x[:, -3:])


@pytest.mark.parametrize("continued", [False, True])
def test_packed_documents_do_not_touch(convolution: ShortConvolution, continued: bool) -> None:
    """Nor do the tokens before them, which a history has where the documents go on."""
    ends, x = [0, 2, 2, 3, 9], torch.randn(1, 9, 6, dtype=DOUBLE)
    tails = torch.randn(4, 3, 6, dtype=DOUBLE) if continued else None
    offsets = torch.tensor(ends)
    y, after = convolution(x, offsets=offsets, tail=tails)
    ones = None if tails is None else tails[:, 2:]
    before = history(x, 1, tail=ones, offsets=offsets).previous()
    for n, (start, stop) in enumerate(pairwise(ends)):
        own = None if tails is None else tails[n : n + 1]
        alone, tail = convolution(x[:, start:stop], tail=own)
        torch.testing.assert_close(y[:, start:stop], alone)
        assert torch.equal(after[n : n + 1], tail)
        shifted = history(x[:, start:stop], 1, tail=None if own is None else own[:, 2:]).previous()
        assert torch.equal(before[:, start:stop], shifted)


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("offsets", [None, [0, 0], [0, 0, 0]])
def test_of_no_tokens_the_tail_is_what_it_was(
    convolution: ShortConvolution, offsets: list[int] | None, continued: bool
) -> None:
    rows = 1 if offsets is None else len(offsets) - 1
    was = torch.randn(rows, 3, 6, dtype=DOUBLE)
    y, tail = convolution(
        torch.empty(1, 0, 6, dtype=DOUBLE), tail=was if continued else None,
        offsets=None if offsets is None else torch.tensor(offsets),
    )  # fmt: skip
    assert y.shape == (1, 0, 6) and torch.equal(tail, was if continued else torch.zeros_like(was))


@pytest.mark.parametrize("offsets", [None, [0, 4, 9]])
@pytest.mark.parametrize("continued", [False, True])
def test_a_tail_that_nobody_wants_is_not_made(
    convolution: ShortConvolution, offsets: list[int] | None, continued: bool
) -> None:
    x = torch.randn(1, 9, 6, dtype=DOUBLE)
    given = {"tail": torch.randn(1 if offsets is None else 2, 3, 6, dtype=DOUBLE) if continued else None}
    given |= {"offsets": None if offsets is None else torch.tensor(offsets)}
    y, tail = convolution(x, **given, return_tail=False)
    assert tail is None and torch.equal(y, convolution(x, **given)[0])


def test_the_tail_of_a_padded_row_is_its_last_real_tokens() -> None:
    x = torch.randn(3, 5, 2)
    tail = history(x, 2, lengths=torch.tensor([5, 1, 0])).tail
    zero = torch.zeros(2)
    assert torch.equal(tail, torch.stack([x[0, 3:], torch.stack([zero, x[1, 0]]), torch.stack([zero, zero])]))


def test_what_no_convolution_can_have_is_refused(convolution: ShortConvolution) -> None:
    """A tail of other tokens than it needs would be read as if it had those, documents of two rows as one."""
    x, ends = torch.randn(2, 5, 6, dtype=DOUBLE), torch.tensor([0, 2, 5])
    for shape in ((2, 2, 6), (2, 4, 6), (1, 3, 6), (2, 3, 1)):
        tail = torch.randn(shape, dtype=DOUBLE)
        with pytest.raises(ShapeError, match=r"convolve: .*expected \[B, taps - 1, D\] = \[2, 3, 6\]"):
            convolution(x, tail=tail)
        was = tail.clone()
        with pytest.raises(ShapeError, match=r"expected \[B, taps - 1, D\] = \[2, 3, 6\]"), torch.no_grad():
            convolution.step(x[:, 0], tail)
        assert torch.equal(tail, was)
    for shape in ((3, 2, 6), (1, 6, 6), (2, 6, 3)):
        with pytest.raises(ShapeError, match=r"history: tail has shape .*expected \[N, width, D\] = \[2, 3, 6\]"):
            convolution(x[:1], offsets=ends, tail=torch.randn(shape, dtype=DOUBLE))
    for wrong in (x[0], x[:, :, :1], x[:, :, None], x.long()):
        with pytest.raises(ShapeError, match=r"ShortConvolution: x is .*expected floating \[B, T, 6\]"):
            convolution(wrong)
    with pytest.raises(ShapeError, match="history: offsets need a batch of 1"):
        convolution(x, offsets=ends)
    with pytest.raises(ValueError, match="history: offsets must rise from 0 to T=5"):
        convolution(x[:1], offsets=torch.tensor([1, 3]))


def test_lengths_that_are_not_of_the_rows_are_refused(convolution: ShortConvolution) -> None:
    """Beside offsets they would be ignored."""
    x = torch.randn(2, 5, 6, dtype=DOUBLE)
    with pytest.raises(ValueError, match="history: offsets and lengths are both given; expected one"):
        convolution(x[:1], offsets=torch.tensor([0, 5]), lengths=torch.tensor([2]))
    for wrong, told in (
        (torch.tensor([2.0, 5.0]), r"is torch\.float32; expected torch\.int32 or torch\.int64"),
        (torch.tensor([True, False]), r"is torch\.bool; expected torch\.int32"),
        (torch.tensor([2]), r"has shape \[1\]; expected \[B\] = \[2\]"),
        (torch.tensor([[2], [5]]), r"has shape \[2, 1\]; expected \[B\]"),
        (torch.tensor([2, 6]), "holds 6; expected 0 to T=5"),
        (torch.tensor([-1, 5]), "holds -1; expected 0 to T=5"),
    ):
        with pytest.raises(ValueError, match=f"history: lengths {told}"):
            convolution(x, lengths=wrong)
    with pytest.raises(TypeError, match=r"history: lengths is \[2, 5\]; expected a tensor \[B\]"):
        convolution(x, lengths=[2, 5])
    y, tail = convolution(x, lengths=torch.tensor([2, 5], dtype=torch.int32))
    assert torch.equal(tail[1], x[1, 2:]) and torch.equal(y, convolution(x)[0])
    step = torch.compile(convolution, backend="eager", fullgraph=True)
    assert torch.equal(step(x, lengths=torch.tensor([2, 5]))[1], tail)


def test_a_step_takes_one_token_a_row_and_a_floating_tail(convolution: ShortConvolution) -> None:
    """What it writes into a tail of integers would be cut to them."""
    x, tail = torch.randn(2, 6, dtype=DOUBLE), torch.zeros(2, 3, 6, dtype=DOUBLE)
    for wrong in (x[:, None], x[0], x[:, :3], x.long()):
        with pytest.raises(ShapeError, match=r"ShortConvolution: x is .*expected floating \[B, 6\]"), torch.no_grad():
            convolution.step(wrong, tail)
    for wrong in (tail.long(), tail[0], tail[:, :2], tail[:1]):
        told = r"ShortConvolution: tail is .*expected \[B, taps - 1, D\] = \[2, 3, 6\], floating"
        with pytest.raises(ShapeError, match=told), torch.no_grad():
            convolution.step(x, wrong)
    for given, name in (((x, None), "tail"), ((None, tail), "x")):
        with pytest.raises(TypeError, match=f"ShortConvolution: {name} is None; expected a tensor"):
            convolution.step(*given)
    assert not tail.any()


def test_half_precision_is_summed_in_float32() -> None:
    made = ShortConvolution(64, 4)
    x = torch.randn(1, 200, 64).bfloat16()
    right = literally(made.bfloat16().double(), x.double())
    error = made.bfloat16()(x)[0].double() - right
    rounding = right.bfloat16().double() - right
    assert error.norm() <= 1.01 * rounding.norm()


def test_rotary_turns_pairs_of_halves() -> None:
    x, positions = torch.randn(1, 5, 2, 6, dtype=DOUBLE), torch.tensor([0, 1, 2, 7, -3])
    turned = rotary(x, positions, base=100.0)
    for t, position in enumerate(positions.tolist()):
        for i in range(3):
            whole = torch.polar(
                torch.ones((), dtype=DOUBLE), torch.tensor(position * 100.0 ** (-2 * i / 6), dtype=DOUBLE)
            )
            right = torch.complex(x[0, t, :, i], x[0, t, :, i + 3]) * whole
            torch.testing.assert_close(torch.complex(turned[0, t, :, i], turned[0, t, :, i + 3]), right)


def test_rotary_products_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 3, 8, dtype=DOUBLE)
    products = [(rotary(q, torch.tensor([n + 4])) * rotary(k, torch.tensor([n]))).sum() for n in (0, 11, 1000)]
    torch.testing.assert_close(torch.stack(products[1:]), torch.stack([products[0]] * 2))


def test_rotary_of_a_trace_is_as_exact_as_any() -> None:
    """torch.jit.trace makes tensors of sizes, whose quotients are of the default dtype."""
    x, positions = torch.randn(1, 1, 1, 64), torch.tensor([131071])
    traced = torch.jit.trace(rotary, (x, positions), check_trace=False)
    torch.testing.assert_close(traced(x, positions), rotary(x, positions), rtol=0, atol=1e-6)


def test_rotary_of_rows_and_of_part_of_a_head() -> None:
    x = torch.randn(2, 4, 3, 8, dtype=DOUBLE)
    places = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])
    turned = rotary(x, places, width=4)
    torch.testing.assert_close(turned[1:], rotary(x[1:], torch.arange(5, 9), width=4))
    torch.testing.assert_close(turned[..., :4], rotary(x[..., :4], places))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    for wrong, told in (
        ((x[:, 0], places), r"x has shape \[2, 3, 8\]; expected \[B, T, H, K\]"),
        ((x, places > 1), r"positions are torch\.bool; expected integers"),
        ((x, places[:, 1:]), r"positions \[2, 3\] with x \[2, 4, 3, 8\]; expected \[T\] or \[B, T\]"),
        ((x, places[0, 0]), r"positions \[\] with x"),
    ):
        with pytest.raises(ValueError, match=f"rotary: {told}"):
            rotary(*wrong)
    with pytest.raises(TypeError, match=r"rotary: positions are \[0\]; expected a tensor of numbers"):
        rotary(x, [0])
    for base in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"rotary: base must be a positive finite number, got {base}"):
            rotary(x, places, base=base)
    for width in (3, 0, -2, 10):
        with pytest.raises(ValueError, match=f"rotary: width is {width}; expected an even number up to K=8"):
            rotary(x, places, width=width)
    with pytest.raises(ValueError, match=r"rotary: positions are torch\.complex64"):
        rotary(x, places.to(torch.complex64))
    assert rotary(x, places, base=0.5).isfinite().all()


def test_taylor_products_are_exp_to_second_order() -> None:
    q, k = torch.randn(2, 50, 4, dtype=DOUBLE) * 0.1
    z = (q * k).sum(-1) / 2
    torch.testing.assert_close((FEATURE_MAPS["taylor"](q) * FEATURE_MAPS["taylor"](k)).sum(-1), 1 + z + z**2 / 2)


@pytest.mark.parametrize("name", sorted(set(FEATURE_MAPS) - {"identity"}))
def test_normalised_feature_maps_have_products_that_are_not_negative(name: str) -> None:
    q, k = FEATURE_MAPS[name](torch.randn(2, 50, 4) * 5)
    assert (q @ k.T).min() >= 0


def test_positions_may_lie_between_integers() -> None:
    """As they do where they are interpolated."""
    x = torch.randn(1, 4, 2, 8, dtype=torch.float64)
    base = 10000.0
    halved = rotary(x, torch.arange(4) / 2, base=base)
    assert torch.equal(halved[:, ::2], rotary(x[:, ::2], torch.arange(2), base=base))


def test_feature_maps_are_what_their_papers_say() -> None:
    x = torch.randn(2, 5, 3, 4, dtype=DOUBLE)
    torch.testing.assert_close(FEATURE_MAPS["elu"](x), torch.where(x > 0, x + 1, x.exp()))
    torch.testing.assert_close(FEATURE_MAPS["softmax"](x).sum(-1), torch.ones(2, 5, 3, dtype=DOUBLE))
    assert torch.equal(FEATURE_MAPS["relu"](x), x.clamp(min=0)) and FEATURE_MAPS["identity"](x) is x


def test_what_parts_begin_with() -> None:
    torch.manual_seed(0)
    made = ShortConvolution(64)
    assert made.weight.shape == (64, 1, 4) and made.bias is None and made.activation == "silu"
    weight = ShortConvolution(64, 16, bias=True, activation=None)
    assert weight.bias is not None and not weight.bias.any()
    assert -0.25 <= weight.weight.min() < -0.24 and 0.24 < weight.weight.max() <= 0.25
    assert RMSNorm(4).eps == GatedRMSNorm(4).eps == 1e-6
    with pytest.raises(ValueError, match="ShortConvolution: activation is 'tanh'; expected one of 'silu', 'sigmoid'"):
        ShortConvolution(4, activation="tanh")


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2", None])
def test_a_size_is_an_integer_of_at_least_one(wrong: object) -> None:
    parts.sizes("Layer", {"size": 1, "other": 2})
    with pytest.raises(ValueError, match=f"Layer: other is {wrong!r}; expected an integer of at least 1"):
        parts.sizes("Layer", {"size": 1, "other": wrong})  # type: ignore[dict-item]


def test_sizes_of_heads() -> None:
    assert parts.head_sizes("Layer", 24, 6, "num_kv_heads", None, None) == (6, 4)
    assert parts.head_sizes("Layer", 25, 6, "num_kv_heads", 3, 5) == (3, 5)
    for given, told in (
        ((24, 6, "num_kv_heads", 4, None), "num_heads is 6, num_kv_heads 4; expected a multiple of the second"),
        ((25, 6, "num_kv_heads", None, None), "hidden_size is 25, no multiple of num_heads=6"),
        ((24, 6, "num_kv_heads", 0, None), "num_kv_heads is 0; expected an integer"),
        ((24, 6, "num_kv_heads", 6, 0), "head_dim is 0; expected an integer"),
    ):
        with pytest.raises(ValueError, match=f"Layer: {told}"):
            parts.head_sizes("Layer", *given)
