"""What layers compute round an operator: one kernel each way on a GPU, torch's operations elsewhere.

Short convolutions, gated norms, decays made of projections, rotary positions. Kernels keep only their inputs for the
backward, where one more adds the gradients of weights. Torch's operations, which the compiler fuses by itself, are what
runs under it, under transforms and modes, in float64, and what the kernels are tested against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.core.device import installed
from foci.core.errors import ShapeError
from foci.core.plans import all_plain, replay_or_run, store_plan, try_replay_operator, wants_gradient
from foci.core.spec import accumulator
from foci.ops.arguments import alone, exact_size, folded
from foci.ops.gpu import DTYPES, unsuitable
from foci.ops.step import shares_storage

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
WIDEST = 16384  # channels of a norm that a program has at once
LONGEST = 16  # taps of a convolution's kernel, which is written out for each: with 64 it compiles for minutes


def known(activation: str | None) -> bool:
    """Whether a convolution has this activation, or none."""
    return activation is None or activation in ACTIVATIONS


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    before: Tensor | None = None,
    ages: Tensor | None = None,
) -> Tensor:
    """y[t] = act(sum_j weight[:, 0, j] x[t - J + 1 + j] + bias): x [B,T,D], weight [D,1,J], bias [D] -> [B,T,D].

    before [B,J-1,D]: the tokens before x, zeros by default. ages [T], integers: the number of tokens before each one in
    its document; those of others count as zeros.
    """
    return _CONVOLUTION(x, before, ages, weight, bias, activation)


def _convolves(x: Tensor, before: Tensor | None, *rest: Any) -> bool:
    """A loop carries rows of x and before, which for Triton's compiler, not its interpreter, must be of one dtype."""
    return (before is None or before.dtype == x.dtype) and _reads(x, before, *rest)


def _reads(
    x: Tensor, before: Tensor | None, ages: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str | None
) -> bool:
    """Whether these sizes, this name and what lies in their memory are a kernel's, of a step too."""
    if not _fits(x, before, weight, bias):
        return False
    B, T, D = x.shape
    J = weight.shape[2]
    if not known(activation) or J > LONGEST or weight.shape[:2] != (D, 1):
        return False
    aged = ages is None or (_plain(ages) and ages.device == x.device and ages.shape == (T,))
    return aged and (bias is None or bias.shape == (D,)) and (before is None or before.shape == (B, J - 1, D))


def _convolved(
    x: Tensor, before: Tensor | None, ages: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    (B, T, D), J, wide = x.shape, weight.shape[2], accumulator(x.dtype)
    if before is not None and before.shape != (B, J - 1, D):  # others would be read as if they were
        expected = f"expected [B, taps - 1, D] = {[B, J - 1, D]}"
        raise ShapeError(f"convolve: there are {list(before.shape)} tokens before x {list(x.shape)}; {expected}")
    joined = torch.cat([x.new_zeros(B, J - 1, D) if before is None else before, x], 1).to(wide)
    weight = weight.to(wide)

    def tap(j: int) -> Tensor:
        x = joined[:, j : j + T]
        return x if ages is None or j == J - 1 else x.masked_fill(ages[:, None] < J - 1 - j, 0)

    y = tap(0) * weight[:, 0, 0]
    for j in range(1, J):  # a pass per tap is faster than conv1d in this layout
        y = torch.addcmul(y, tap(j), weight[:, 0, j])
    if bias is not None:
        y = y + bias
    return (y if activation is None else ACTIVATIONS[activation](y)).to(x.dtype)


def convolve_step(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """One token a row: `convolve` of x [B,D] behind tail [B,J-1,D], which then ends with x, in place."""
    part = _stepped if shares_storage(x, tail) else _STEP  # a kernel writes while others still read
    return part(x, tail, weight, bias, activation)


def _steps(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> bool:
    return not folded(tail) and _reads(x[:, None], tail, None, weight, bias, activation)


def _stepped(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    token = x[:, None].to(tail.dtype)
    y = _convolved(token, tail, None, weight, bias, activation)[:, 0].to(x.dtype)
    tail.copy_(torch.cat([tail, token], 1)[:, 1:])
    return y


class Norm(NamedTuple):
    """y = x / sqrt(mean(x^2) + eps) * weight * act(gate) over each of `groups` equal parts of the last dimension.

    mean: False for the sum in its place. gate_first: y = norm(x * act(gate)) * weight. No weight, no gate: 1.
    """

    groups: int = 1
    eps: float = 1e-6
    mean: bool = True
    activation: str | None = None
    gate_first: bool = False

    def __call__(self, x: Tensor, weight: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """x, gate [..., D], weight [D] -> y [..., D] in x's dtype, computed in float32 (float64 for float64)."""
        return _NORM(x, weight, gate, *self)


def _norms(x: Tensor, weight: Tensor | None, gate: Tensor | None, *options: Any) -> bool:
    if not _fits(x, weight, gate):
        return False
    norm = Norm(*options)
    if gate is not None and (gate.shape != x.shape or norm.activation not in ACTIVATIONS):
        return False
    size, rest = divmod(x.shape[-1], norm.groups)
    return size <= WIDEST and not rest and (weight is None or weight.shape == x.shape[-1:])


def _normed(x: Tensor, weight: Tensor | None, gate: Tensor | None, *options: Any) -> Tensor:
    norm = Norm(*options)
    wide = x.to(accumulator(x.dtype))
    opened = None if gate is None else ACTIVATIONS[norm.activation or ""](gate.to(wide.dtype))
    if opened is not None and norm.gate_first:
        wide = wide * opened
    parts = wide if norm.groups == 1 else wide.unflatten(-1, (norm.groups, -1))
    square = parts.square()
    total = square.mean(-1, keepdim=True) if norm.mean else square.sum(-1, keepdim=True)
    y = (parts * torch.rsqrt(total + norm.eps)).view_as(wide)
    if weight is not None:
        y = y * weight
    if opened is not None and not norm.gate_first:
        y = y * opened
    return y.to(x.dtype)


def gate(
    x: Tensor, bias: Tensor | None = None, a_log: Tensor | None = None, rate: float = 1.0, inverted: bool = False
) -> Tensor:
    """y = rate exp(a_log) softplus(x + bias) in float32 (float64 for float64); inverted: softplus(-x - bias).

    x [..., D], bias [D], a_log [H]: one number for each D/H channels.
    """
    return _GATE(x, bias, a_log, rate, inverted)


def _gates(x: Tensor, bias: Tensor | None, a_log: Tensor | None, rate: float, inverted: bool) -> bool:
    if not _fits(x, bias, a_log) or (bias is not None and bias.shape != x.shape[-1:]):
        return False
    return a_log is None or (a_log.dim() == 1 and _spreads(x, a_log))


def _gated(x: Tensor, bias: Tensor | None, a_log: Tensor | None, rate: float, inverted: bool) -> Tensor:
    wide = x.to(accumulator(x.dtype))
    if bias is not None:
        wide = wide + bias.to(wide.dtype)
    y = -F.logsigmoid(wide) if inverted else F.softplus(wide)
    if a_log is None:
        return y * rate
    return (y.unflatten(-1, (a_log.shape[0], -1)) * (a_log.to(wide.dtype).exp() * rate)[:, None]).flatten(-2)


def weigh(x: Tensor, scale: Tensor) -> Tensor:
    """x [..., D] in heads of D/H channels times scale, [..., H] or [H], in x's dtype."""
    return _WEIGHED(x, scale)


def _weighs(x: Tensor, scale: Tensor) -> bool:
    return _fits(x, scale) and (scale.dim() == 1 or scale.shape[:-1] == x.shape[:-1]) and _spreads(x, scale)


def _weighed(x: Tensor, scale: Tensor) -> Tensor:
    heads = x.unflatten(-1, (scale.shape[-1], -1))
    return (heads * scale.to(accumulator(x.dtype))[..., None]).flatten(-2).to(x.dtype)


def _spreads(x: Tensor, scale: Tensor) -> bool:
    """Whether the channels of x are so many heads, of equal size."""
    return scale.shape[-1] > 0 and x.shape[-1] % scale.shape[-1] == 0


def turn(x: Tensor, positions: Tensor, base: float, width: int) -> Tensor:
    """Channels i < width/2 and i + width/2 of x [B,T,H,K] turned by positions ([T] or [B,T]) * base^(-2i/width)."""
    rate = -2 * math.log(base) / exact_size(width)
    return _TURN(x, positions if positions.dim() == 2 else positions[None], rate, width, False)


def _turns(x: Tensor, positions: Tensor, rate: float, width: int, back: bool) -> bool:
    return not positions.requires_grad and positions.device == x.device and _fits(x) and _plain(positions)


def _turned(x: Tensor, positions: Tensor, rate: float, width: int, back: bool) -> Tensor:
    cos, sin = _angles(x, positions, rate, width, back)
    first, second, rest = x.split([width // 2, width // 2, x.shape[-1] - width], -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def _angles(x: Tensor, positions: Tensor, rate: float, width: int, back: bool) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1 or B, T, 1, width/2] of angles in float64: in float32 a position of 10^5 is 0.005 off."""
    wide = accumulator(x.dtype)
    exact = wide if x.device.type == "mps" else torch.float64  # which MPS has not
    angle = positions[..., None].to(exact) * torch.exp(torch.arange(width // 2, device=x.device, dtype=exact) * rate)
    cos, sin = angle.cos().to(wide), (-angle if back else angle).sin().to(wide)
    if torch.compiler.is_compiling():  # a strided view has memory of its own: else each head would have its own cosines
        cos, sin = (part.as_strided(part.shape, part.stride()) for part in (cos, sin))
    return cos[..., None, :], sin[..., None, :]


def _fits(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel takes them: on one GPU, of its dtypes, and nothing must see torch's own operations."""
    if not _plain(x, *others) or unsuitable(x, x.shape, (1,)) or not installed("triton"):
        return False
    return all(y.dtype in DTYPES and y.device == x.device for y in others if y is not None)


def _plain(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel can read what lies in their memory; of a gradient is_grads_batched brings many in one."""
    return alone(x) and all_plain((x, *others)) and not torch._C._functorch.is_legacy_batchedtensor(x)


def _by_torch(dy: Tensor, *given: Tensor | None) -> bool:
    """Whether a backward goes by torch's operations: for second derivatives, or since no kernel reads the gradient."""
    return torch.is_grad_enabled() or not _plain(dy, *given)


def _gradients(run: Callable[..., Tensor], given: tuple[Tensor | None, ...], dy: Tensor) -> Iterator[Tensor | None]:
    """Of run(*given) by torch's operations, with a graph of their own where one is wanted.

    Of views, since one of `given` may be made of another, or be the same: each has its own share alone.
    """
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [x.view_as(x) if x is not None and x.requires_grad else x for x in given]
        wanted = [x for x in own if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(run(*own), wanted, dy, create_graph=graph))
    return (next(found) if x is not None and x.requires_grad else None for x in own)


class _Part(NamedTuple):
    """A part of a layer, called with tensors, or None in the place of some, and then numbers and names.

    name: of its kernel's function in ops/kernels_triton_*, whose `_back` is the backward. tensors: how many arguments
    are tensors. fits: whether that function takes these arguments; by_torch, the same by torch's operations, spreads
    others, or says what is wrong. function: what autograd is given; None: there is no backward. changes: the place of
    the tensor that is changed.
    """

    name: str
    tensors: int
    fits: Callable[..., bool]
    by_torch: Callable[..., Tensor]
    function: type[torch.autograd.Function] | None
    changes: int | None = None

    def __call__(self, *given: Any) -> Tensor:
        if wants_gradient(given):
            fits = self.function is not None and self.fits(*given)
            return self.function.apply(self, *given) if fits else self.by_torch(*given)  # type: ignore[union-attr]
        key, found = try_replay_operator(self.name, given)
        if found is None:
            if not self.fits(*given):
                return self.by_torch(*given)
            found = self.run(*given)
            if key is not None:
                store_plan(key, given, _function(self.name), given)
        if self.changes is not None:
            torch.autograd.graph.increment_version(given[self.changes])
        return found[0]

    def run(self, *given: Any, back: bool = False) -> tuple[Tensor | None, ...]:
        """Its kernel's function, or that of its backward; repeated, it is replayed (core/plans.py)."""
        run = _function(f"{self.name}_back" if back else self.name)
        found: tuple[Tensor | None, ...] = replay_or_run(run, given, lambda: run(*given))
        return found


_module = cache(import_module)


def _function(name: str) -> Callable[..., Any]:
    module, function = name.split(".")
    return getattr(_module(f"foci.ops.kernels_triton_{module}"), function)


class _Kept(torch.autograd.Function):
    """Of a part whose backward takes what the forward was given, the gradient, and which tensors need theirs."""

    @staticmethod
    def forward(ctx: Any, part: _Part, *given: Any) -> Tensor:
        ctx.save_for_backward(*given[: part.tensors])
        ctx.part, ctx.options = part, given[part.tensors :]
        (y,) = part.run(*given)
        return y  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        given, part, options = ctx.saved_tensors, ctx.part, ctx.options
        rest = (None,) * len(options)
        if _by_torch(dy, *given):
            return None, *_gradients(lambda *tensors: part.by_torch(*tensors, *options), given, dy), *rest
        needs = [*ctx.needs_input_grad[1 : part.tensors + 1]]
        return None, *part.run(*given, *options, dy, needs, back=True), *rest


class _Turned(torch.autograd.Function):
    """Of rotary positions, whose backward turns the other way."""

    @staticmethod
    def forward(ctx: Any, part: _Part, x: Tensor, positions: Tensor, *turn: Any) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.part, (rate, width, back) = part, turn
        ctx.turn = rate, width, not back
        (y,) = part.run(x, positions, *turn)
        return y  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        given = dy, positions, *ctx.turn
        dx = _Turned.apply(ctx.part, *given) if _plain(dy, positions) else ctx.part.by_torch(*given)
        return None, dx, None, None, None, None


_CONVOLUTION = _Part("convolution.convolve", 5, _convolves, _convolved, _Kept)
_STEP = _Part("convolution.convolve_step", 4, _steps, _stepped, None, changes=1)
_NORM = _Part("parts.norm", 3, _norms, _normed, _Kept)
_GATE = _Part("parts.gate", 3, _gates, _gated, _Kept)
_WEIGHED = _Part("parts.weigh", 2, _weighs, _weighed, _Kept)
_TURN = _Part("parts.rotary", 2, _turns, _turned, _Turned)
