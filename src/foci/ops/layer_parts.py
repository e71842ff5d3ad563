"""Short convolutions, gated norms, rotary positions: one kernel each way on a GPU, torch's operations elsewhere.

Kernels keep only their inputs for the backward, where one more adds the gradients of weights. Torch's operations, which
the compiler fuses by itself, are what runs under it, under transforms and modes, in float64, and what the kernels are
tested against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.core.device import installed
from foci.core.plans import all_plain, replay_or_run, wants_gradient
from foci.core.spec import accumulator
from foci.ops.arguments import alone
from foci.ops.gpu import DTYPES, unsuitable

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
WIDEST = 16384  # channels of a norm that a program has at once
LONGEST = 16  # taps of a convolution's kernel, which is written out for each: with 64 it compiles for minutes


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """y[t] = act(sum_j weight[:, 0, j] x[t + j] + bias): x [B, T + J - 1, D], weight [D,1,J], bias [D] -> [B,T,D]."""
    given = x, weight, bias, activation
    if not (_fits(x, weight, bias) and _convolves(*given)):
        return _convolved(*given)
    return _Convolution.apply(*given) if wants_gradient(given) else _run("convolve", *given)[0]


def _convolves(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> bool:
    """Whether a kernel takes these sizes and this name; torch's operations spread others, or say what is wrong."""
    D, _, J = weight.shape
    named = activation is None or activation in ACTIVATIONS
    return named and J <= LONGEST and x.shape[2] == D and (bias is None or bias.shape == (D,))


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    J = weight.shape[2]
    T, wide = x.shape[1] - J + 1, accumulator(x.dtype)
    taps, weight = x.to(wide), weight.to(wide)
    y = taps[:, :T] * weight[:, 0, 0]
    for j in range(1, J):  # a pass per tap is faster than conv1d in this layout
        y = torch.addcmul(y, taps[:, j : j + T], weight[:, 0, j])
    if bias is not None:
        y = y + bias
    return (y if activation is None else ACTIVATIONS[activation](y)).to(x.dtype)


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
        given = x, weight, gate
        if not (_fits(*given) and self._matches(*given)):
            return self._normed(*given)
        return _Normed.apply(*given, self) if wants_gradient(given) else _run("norm", *given, *self)[0]

    def _matches(self, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> bool:
        """Whether a kernel takes these sizes and this name; torch's operations spread others, or say what is wrong."""
        if gate is not None and (gate.shape != x.shape or self.activation not in ACTIVATIONS):
            return False
        size, rest = divmod(x.shape[-1], self.groups)
        return size <= WIDEST and not rest and (weight is None or weight.shape == x.shape[-1:])

    def _normed(self, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
        wide = x.to(accumulator(x.dtype))
        opened = None if gate is None else ACTIVATIONS[self.activation or ""](gate.to(wide.dtype))
        if opened is not None and self.gate_first:
            wide = wide * opened
        parts = wide if self.groups == 1 else wide.unflatten(-1, (self.groups, -1))
        square = parts.square()
        total = square.mean(-1, keepdim=True) if self.mean else square.sum(-1, keepdim=True)
        y = (parts * torch.rsqrt(total + self.eps)).view_as(wide)
        if weight is not None:
            y = y * weight
        if opened is not None and not self.gate_first:
            y = y * opened
        return y.to(x.dtype)


def turn(x: Tensor, positions: Tensor, base: float, width: int) -> Tensor:
    """Channels i < width/2 and i + width/2 of x [B,T,H,K] turned by positions ([T] or [B,T]) * base^(-2i/width)."""
    rate = -2 * math.log(base) / width
    given = x, positions if positions.dim() == 2 else positions[None], rate, width, False
    if positions.requires_grad or positions.device != x.device or not (_fits(x) and _plain(positions)):
        return _turned(*given)
    return _Turned.apply(*given) if wants_gradient((x,)) else _run("rotary", *given)[0]


def _turned(x: Tensor, positions: Tensor, rate: float, width: int, back: bool) -> Tensor:
    wide = accumulator(x.dtype)
    angle = positions[..., None].to(wide) * torch.exp(torch.arange(width // 2, device=x.device, dtype=wide) * rate)
    cos, sin = angle.cos()[..., None, :], (-angle if back else angle).sin()[..., None, :]
    first, second, rest = x.split([width // 2, width // 2, x.shape[-1] - width], -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def _fits(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel takes them: on one GPU, of its dtypes, and nothing must see torch's own operations."""
    if not _plain(x, *others) or unsuitable(x, x.shape, (1,)) or not installed("triton"):
        return False
    return all(y.dtype in DTYPES and y.device == x.device for y in others if y is not None)


def _plain(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel can read what lies in their memory; of a gradient is_grads_batched brings many in one."""
    return alone(x) and all_plain((x, *others)) and not torch._C._functorch.is_legacy_batchedtensor(x)


def _run(function: str, *values: Any) -> Any:
    """A function of the kernels' module; repeated, it is replayed (core/plans.py)."""
    from foci.ops import kernels_triton_parts

    run = getattr(kernels_triton_parts, function)
    return replay_or_run(run, values, lambda: run(*values))


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


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.activation = activation
        (y,) = _run("convolve", x, weight, bias, activation)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        given, activation, needs = ctx.saved_tensors, ctx.activation, list(ctx.needs_input_grad[:3])
        if _by_torch(dy, *given):
            return *_gradients(lambda x, weight, bias: _convolved(x, weight, bias, activation), given, dy), None
        return *_run("convolve_back", *given, activation, dy, needs), None


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, gate: Tensor | None, norm: Norm) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.norm = norm
        (y,) = _run("norm", x, weight, gate, *norm)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        given, norm, needs = ctx.saved_tensors, ctx.norm, list(ctx.needs_input_grad[:3])
        if _by_torch(dy, *given):
            return *_gradients(norm._normed, given, dy), None
        return *_run("norm_back", *given, dy, needs, *norm), None


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, rate: float, width: int, back: bool) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.turn = rate, width, not back
        (y,) = _run("rotary", x, positions, rate, width, back)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        return (_Turned.apply if _plain(dy, positions) else _turned)(dy, positions, *ctx.turn), None, None, None, None
