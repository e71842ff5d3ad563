"""Short convolutions, norms, gates of layers: their equations, and when torch's operations are what runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from foci.core.errors import ShapeError
from foci.nn import GatedDeltaNet
from foci.ops import layer_parts
from foci.ops.layer_parts import ACTIVATIONS, Norm, convolve, gate, turn, weigh


@pytest.mark.parametrize("activation", [*ACTIVATIONS, None])
@pytest.mark.parametrize("size", [1, 4])
def test_a_convolution_is_conv1d(size: int, activation: str | None) -> None:
    """Of zeros before it, of tokens before it, and of packed documents, each by itself."""
    x, before, weight, bias = (
        torch.randn(s, dtype=torch.float64) for s in ((2, 9, 5), (2, size - 1, 5), (5, 1, size), (5,))
    )

    def truth(joined: Tensor) -> Tensor:
        y = F.conv1d(joined.transpose(1, 2), weight, bias, groups=5).transpose(1, 2)
        return y if activation is None else ACTIVATIONS[activation](y)

    zeros, lengths = torch.zeros_like(before), (4, 1, 0, 2, 2)
    ages = torch.cat([torch.arange(n) for n in lengths])
    alone = torch.cat([truth(torch.cat([zeros, part], 1)) for part in x.split(lengths, 1) if part.shape[1]], 1)
    torch.testing.assert_close(convolve(x, weight, bias, activation), truth(torch.cat([zeros, x], 1)))
    torch.testing.assert_close(convolve(x, weight, bias, activation, ages=ages), alone)
    together = convolve(x, weight, bias, activation, before=before)
    torch.testing.assert_close(together, truth(torch.cat([before, x], 1)))
    leaves = [y.requires_grad_() for y in (x, weight, bias, before)]
    assert torch.autograd.gradcheck(lambda *y: convolve(*y[:3], activation, before=y[3]), leaves)
    assert torch.autograd.gradcheck(lambda *y: convolve(*y, activation, ages=ages), leaves[:3])


@pytest.mark.parametrize("inverted", [False, True])
def test_a_gate_is_its_equation(inverted: bool) -> None:
    x, bias, a_log = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 6), (6,), (3,)))
    z = x + bias
    truth = -0.5 * a_log.exp().repeat_interleave(2) * torch.log1p(torch.exp(-z if inverted else z))
    torch.testing.assert_close(gate(x, bias, a_log, -0.5, inverted), truth)
    torch.testing.assert_close(gate(x), torch.log1p(x.exp()))
    assert gate(x.bfloat16()).dtype == torch.float32
    leaves = [y.requires_grad_() for y in (x, bias, a_log)]
    assert torch.autograd.gradcheck(lambda *y: gate(*y, -0.5, inverted), leaves)


def test_weighed_heads_are_their_equation() -> None:
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    for scale in (torch.randn(3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)):
        torch.testing.assert_close(weigh(x, scale), x * scale.repeat_interleave(2, -1))
        assert torch.autograd.gradcheck(weigh, [x.requires_grad_(), scale.requires_grad_()])
    assert weigh(x.bfloat16(), scale.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_norm_is_its_equation(groups: int, gate_first: bool) -> None:
    x, gate, weight = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 6), (2, 4, 6), (6,)))
    opened = F.silu(gate)
    given = x * opened if gate_first else x
    truth = torch.cat([F.rms_norm(part, [6 // groups], eps=0.1) for part in given.chunk(groups, -1)], -1) * weight
    norm = Norm(groups, 0.1, activation="silu", gate_first=gate_first)
    torch.testing.assert_close(norm(x, weight, gate), truth if gate_first else truth * opened)
    leaves = [y.requires_grad_() for y in (x, weight, gate)]
    assert torch.autograd.gradcheck(norm, leaves)


def test_the_sum_in_place_of_the_mean_makes_unit_vectors() -> None:
    x = torch.randn(3, 7, dtype=torch.float64)
    torch.testing.assert_close(Norm(eps=0.0, mean=False)(x), F.normalize(x, dim=-1))


def test_a_step_behind_tokens_of_another_dtype_has_its_token_as_they_keep_it() -> None:
    """So that it is what a later one reads."""
    x, weight, tail = torch.randn(2, 6), torch.randn(6, 1, 3), torch.randn(2, 2, 6).bfloat16()
    right = convolve(x[:, None].bfloat16(), weight, None, "silu", before=tail)[:, 0]
    then = torch.cat([tail, x[:, None].bfloat16()], 1)[:, 1:]
    found = layer_parts.convolve_step(x, tail, weight, None, "silu")
    assert torch.equal(found, right.float()) and torch.equal(tail, then)


def apart(found: Tensor, truth: Tensor) -> float:
    """Relative RMS."""
    return float((found.double() - truth).norm() / truth.norm())


WAYS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "eager": lambda run: run,
    "compiled": lambda run: torch.compile(run, backend="aot_eager", fullgraph=True),
    "vmapped": lambda run: lambda x, p: torch.func.vmap(run)(x[:, None], p)[:, 0],
    "compiled, vmapped": lambda run: WAYS["compiled"](WAYS["vmapped"](run)),
}


@pytest.mark.parametrize("way", WAYS)
def test_angles_of_far_positions_are_right(way: str) -> None:
    """And their gradients, and those of positions between tokens, which learn."""
    positions = torch.tensor([[4096, 131071], [2**23 + 1, 7]])
    x, dy = torch.randn(2, 2, 2, 3, 10).unbind()

    def run(x: Tensor, p: Tensor) -> Tensor:
        return turn(x, p, 1e4, 8)

    def results(x: Tensor, p: Tensor, run: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), p.to(x.dtype).requires_grad_()]
        y = run(*leaves)
        return [run(x, p), y.detach(), *torch.autograd.grad(y, leaves, dy.to(x))]

    found, truth = results(x, positions, WAYS[way](run)), results(x.double(), positions, run)
    assert all(a.dtype == torch.float32 for a in found)
    assert max(apart(a, b) for a, b in zip(found, truth, strict=True)) <= 3e-7
    assert torch.equal(WAYS[way](run)(x.bfloat16(), positions), run(x.bfloat16().double(), positions).bfloat16())


@pytest.mark.parametrize("way", WAYS)
def test_angles_of_far_positions_have_tangents(way: str) -> None:
    x, moved, positions = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 3, 8), torch.tensor([[131071.0], [5.5]])

    def run(x: Tensor, p: Tensor) -> Tensor:
        return torch.func.jvp(lambda x, p: turn(x, p, 1e4, 8), (x, p), (moved[: len(x)].to(x), torch.ones_like(p)))[1]

    moved[1] = moved[0]  # vmapped, each row has the first's
    assert apart(WAYS[way](run)(x, positions), run(x.double(), positions.double())) <= 3e-7


def test_compiled_angles_are_made_once_for_all_heads() -> None:
    """In memory of their own, without which each head has cosines in float64, five times as slow."""
    run = torch.compile(lambda x: turn(x, torch.arange(37), 1e4, 10), fullgraph=True)
    _, (code,) = run_and_get_code(run, torch.randn(1, 37, 3, 10))
    assert "empty_strided_cpu((1, 37, 5)" in code


class WithoutDouble(TorchFunctionMode):
    """As if all lay on MPS, which has no float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("mps")
        found = func(*args, **{name: "cpu" if name == "device" else v for name, v in (kwargs or {}).items()})
        assert not isinstance(found, Tensor) or found.dtype != torch.float64
        return found


def test_where_no_float64_is_angles_are_float32() -> None:
    x, positions = torch.randn(1, 9, 3, 8), torch.arange(9)
    with WithoutDouble():
        found = turn(x, positions, 1e4, 8)
    assert apart(found, turn(x.double(), positions, 1e4, 8)) <= 1e-6


class Kernel(Exception):
    """It would have run."""


class Mine(Tensor):
    """Somebody's subclass."""


def _kernel(*_: Any) -> Tensor:
    raise Kernel


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these tensors were on a GPU that has kernels."""
    monkeypatch.setattr(layer_parts, "installed", lambda name: True)
    monkeypatch.setattr(layer_parts, "unsuitable", lambda x, *_: [] if x.dtype in layer_parts.DTYPES else ["its dtype"])
    monkeypatch.setattr(layer_parts._Part, "run", _kernel)
    monkeypatch.setattr(layer_parts._Kept, "apply", _kernel)
    monkeypatch.setattr(layer_parts._Turned, "apply", _kernel)


RUNS: dict[str, Callable[..., Tensor]] = {
    "convolve": lambda x, w, b: convolve(x, w[:, None, None].expand(-1, 1, 2), b, "silu"),
    "turn": lambda x, p, s: turn(x[:, None] * s, p[None].expand(1, 6)[:, :1], 1e4, 4).squeeze(1),
    "gate": lambda x, b, a: gate(x, b, a, -1.0),
    "weigh": lambda x, w, v: weigh(x, v if v.is_meta else w),
    "norm": lambda x, w, g: Norm(activation="silu")(x, w, g.expand_as(x) if g.dim() == 1 else g),
}
each = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def given(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 5, 6, dtype=dtype), torch.randn(6, dtype=dtype), torch.randn(6, dtype=dtype)]


@each
@pytest.mark.usefixtures("kernels")
def test_a_kernel_runs_where_there_is_one(run: Callable[..., Tensor]) -> None:
    for dtype in layer_parts.DTYPES:
        with pytest.raises(Kernel):
            run(*given(dtype))
    with pytest.raises(Kernel), torch.no_grad():
        run(*given(torch.bfloat16)[:1], *given()[1:])


@each
@pytest.mark.usefixtures("kernels")
def test_torchs_operations_run_where_something_must_see_them(run: Callable[..., Tensor]) -> None:
    x, w, b = given()
    truth = run(x.double(), w.double(), b.double()).float()

    def compiled(*y: Tensor) -> Tensor:
        return torch.compile(run, backend="aot_eager", fullgraph=True)(*y)  # type: ignore[no-any-return]

    def vmapped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.func.vmap(run, in_dims=(0, None, None))(x[:, None], w, b)[:, 0]

    def counted(*y: Tensor) -> Tensor:
        with FlopCounterMode(display=False):
            return run(*y)

    def moved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with forward_ad.dual_level():
            found = run(forward_ad.make_dual(x, torch.ones_like(x)), w, b)
            value, tangent = forward_ad.unpack_dual(found)
            assert tangent is not None
            return value.clone()

    def of_a_class(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return run(x.as_subclass(Mine), w, b).as_subclass(Tensor)

    def weights_of_a_class(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return run(x, w.as_subclass(Mine), b).as_subclass(Tensor)

    for way in (compiled, vmapped, counted, moved, of_a_class, weights_of_a_class):
        torch.testing.assert_close(way(x, w, b), truth)
    with FakeTensorMode() as mode:
        assert run(*(mode.from_tensor(y) for y in (x, w, b))).shape == truth.shape
    assert run(*given(torch.float64)).dtype == torch.float64


@each
@pytest.mark.usefixtures("kernels")
def test_what_lies_on_another_device_is_torchs_to_refuse(run: Callable[..., Tensor]) -> None:
    x, w, b = given()
    for others in ((w.to("meta"), b), (w, b.to("meta"))):
        with pytest.raises(RuntimeError, match="device"):
            run(x, *others)


@each
@pytest.mark.usefixtures("kernels")
def test_without_triton_torchs_operations_run(run: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_parts, "installed", lambda name: name != "triton")
    x, w, b = given()
    assert run(x, w, b).shape[0] == len(x)


@pytest.mark.parametrize("name", ["convolve", "norm"])
def test_weights_in_float64_are_torchs(name: str, kernels: None) -> None:
    x, w, b = given()
    assert RUNS[name](x, w.double(), b).dtype == RUNS[name](x, w, b.double()).dtype == torch.float32


@pytest.mark.parametrize("name", ["convolve", "norm"])
def test_half_precision_is_rounded_once(name: str) -> None:
    """At the end: weights, biases and gates of float32 are not."""
    x, w, b = given()
    for others in ((w, b), (w.bfloat16(), b.bfloat16())):
        truth = RUNS[name](x.bfloat16().double(), *(y.double() for y in others))
        torch.testing.assert_close(RUNS[name](x.bfloat16(), *others), truth.bfloat16(), rtol=0, atol=0)


def test_a_gate_of_another_shape_is_spread_by_torch(kernels: None) -> None:
    x = torch.randn(2, 3, 6)
    assert Norm(activation="silu")(x, None, torch.randn(3, 1)).shape == x.shape


def test_what_no_kernel_has_the_sizes_or_the_name_of_is_torchs(kernels: None) -> None:
    """It says what is wrong, or spreads one number: a kernel would read what lies behind."""
    x, weight = torch.randn(2, 5, 6), torch.randn(6, 1, 3)
    wrong: list[Callable[[], Tensor]] = [
        lambda: Norm()(x, torch.randn(4)),
        lambda: Norm(4)(x),
        lambda: convolve(x, weight[:4], None, None),
        lambda: convolve(x, weight, torch.randn(4), None),
        lambda: convolve(x, weight, torch.randn(6, 1), None),
        lambda: Norm()(x, torch.randn(6, 1)),
    ]
    for run in wrong:
        with pytest.raises(RuntimeError, match=r"must match the size|don't multiply up"):
            run()
    for run in (lambda: Norm(activation="gelu")(x, None, x), lambda: convolve(x, weight, None, "gelu")):
        with pytest.raises(KeyError, match="gelu"):
            run()
    one = torch.randn(1)
    assert torch.equal(Norm()(x, one), Norm()(x, one.expand(6).double()))
    assert convolve(x, weight, one, None).shape == (2, 5, 6) == convolve(x, weight[:1], None, None).shape


@pytest.mark.usefixtures("kernels")
def test_tokens_before_and_ages_that_a_kernel_would_read_behind_are_torchs() -> None:
    x, weight, before, ages = torch.randn(2, 5, 6), torch.randn(6, 1, 3), torch.randn(2, 2, 6), torch.arange(5)
    for given in ({"before": before}, {"ages": ages}, {"before": before, "ages": ages.int()}):
        with pytest.raises(Kernel):
            convolve(x, weight, None, None, **given)
    for wrong in (before[:, 1:], before[:1], before[..., :1], torch.cat([before, before], 1)):
        with pytest.raises(ShapeError, match=r"convolve: .*expected \[B, taps - 1, D\] = \[2, 2, 6\]"):
            convolve(x, weight, None, None, before=wrong)
    for wrong, error in ((ages[1:], "must match the size"), (ages.to("meta"), "device")):
        with pytest.raises(RuntimeError, match=error):
            convolve(x, weight, None, None, ages=wrong)
    for other in (before.double(), before.as_subclass(Mine), before.half()):
        assert convolve(x, weight, None, None, before=other).shape == x.shape
    assert convolve(x, weight, None, None, ages=ages.as_subclass(Mine)).shape == x.shape
    with pytest.raises(Kernel), torch.no_grad():  # a step rounds its token to the tail's dtype
        layer_parts.convolve_step(x[:, 0], before.half(), weight, None, None)


@pytest.mark.usefixtures("kernels")
def test_numbers_of_heads_that_a_kernel_would_read_behind_are_torchs() -> None:
    x, one = torch.randn(2, 5, 6), torch.randn(1)
    wrong: list[Callable[[], Tensor]] = [
        lambda: gate(x, torch.randn(4)),
        lambda: gate(x, None, torch.randn(4)),
        lambda: gate(x, None, torch.randn(0)),
        lambda: gate(x, None, torch.randn(12)),
        lambda: gate(x, None, torch.randn(2, 1)),
        lambda: weigh(x, torch.randn(4)),
        lambda: weigh(x, torch.randn(3, 5, 2)),
        lambda: weigh(x, torch.randn(2, 5, 0)),
    ]
    for run in wrong:
        with pytest.raises(RuntimeError, match=r"must match the size|don't multiply up"):
            run()
    assert torch.equal(gate(x, one), gate(x, one.expand(6).double()))
    assert gate(x, None, torch.randn(2, dtype=torch.float64)).shape == x.shape == weigh(x, torch.randn(5, 2)).shape


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_give_their_parts_what_a_kernel_takes(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that none falls back to torch's operations without a word: each call of a layer in training."""
    fits: list[bool] = []

    def asked(x: Tensor, *others: Tensor | None) -> bool:
        rows = [y for y in (x, *others) if y is not None]
        fits.append(all(y.dtype in layer_parts.DTYPES for y in rows) and layer_parts.alone(x))
        return False

    monkeypatch.setattr(layer_parts, "_fits", asked)
    layer = GatedDeltaNet(16, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        layer(torch.randn(1, 6, 16)).sum().backward()
    assert fits == [True] * 7
