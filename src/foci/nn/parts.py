"""Parts of layers: norms, the short causal convolution, rotary positions, feature maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from foci.core.errors import ShapeError
from foci.ops import SPECS
from foci.ops.arguments import INTEGERS, check_near, check_offsets, is_whole, number, plain
from foci.ops.layer_parts import ACTIVATIONS, Norm, convolve, convolve_step, turn


def choice(where: str, name: str, value: str, options: dict[str, Callable[[Tensor], Tensor]]) -> None:
    """ValueError unless `value` names one of the options."""
    if not isinstance(value, str) or value not in options:  # a list would have no hash
        raise ValueError(f"{where}: {name} is {value!r}; expected one of {', '.join(map(repr, options))}")


def backend_of(where: str, operator: str, name: str | None) -> str | None:
    """ValueError unless that operator has a backend of this name, or none is named."""
    names = [each.name for each in SPECS[operator].backends]
    if name is not None and name not in names:
        raise ValueError(f"{where}: backend is {name!r}; expected None or one of {', '.join(map(repr, names))}")
    return name


def sizes(where: str, named: dict[str, int]) -> None:
    """ValueError unless each is an integer of at least 1."""
    for name, value in named.items():
        if not is_whole(value):
            raise ValueError(f"{where}: {name} is {value!r}; expected an integer of at least 1")


def head_sizes(
    where: str, hidden_size: int, num_heads: int, fewer: str, num_fewer: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Check head counts and sizes: (heads by the argument named `fewer`, default num_heads, and head channels)."""
    groups = num_heads if num_fewer is None else num_fewer
    sizes(where, {"hidden_size": hidden_size, "num_heads": num_heads, fewer: groups})
    if num_heads % groups:
        raise ValueError(f"{where}: num_heads is {num_heads}, {fewer} {groups}; expected a multiple of the second")
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"{where}: hidden_size is {hidden_size}, no multiple of num_heads={num_heads}; expected one")
    channels = hidden_size // num_heads if head_dim is None else head_dim
    sizes(where, {"head_dim": channels})
    return int(groups), int(channels)


def heads(where: str, name: str, y: Tensor, channels: int) -> Tensor:
    """The output y [B, T, heads * channels] of the projection `name` as [B, T, heads, channels]."""
    if y.shape[-1] % channels:
        raise ShapeError(f"{where}: {name} gives {y.shape[-1]} channels; expected heads of {channels} each")
    return y.unflatten(-1, (-1, channels))


def check_share(where: str, name: str, own: tuple[int, int], keys: tuple[int, int]) -> None:
    """Raise unless, where projections were cut over ranks, every head that `name` gives has its own key head here.

    own, keys: how many are here, and how many there are. Either the same part of both is here, or one key head, with
    heads that all read it.
    """
    (h, H), (g, G) = own, keys
    if h * G != g * H and not (g == 1 <= h and (G == 1 or H // G % h == 0)):
        raise ShapeError(
            f"{where}: {name} gives {h} of {H} heads where there are {g} of {G} key heads; expected the same part of "
            "both (num_heads counts those of all ranks)"
        )


def rope(where: str, name: str, base: float) -> float:
    """The base of rotary positions, checked."""
    return number(where, name, base, "positive finite number", 1e-30, 1e30)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in x's dtype. It keeps the delta rule stable."""
    return Norm(eps=eps, mean=False)(x)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32 (float64 for float64).

    groups: the mean is that of each of so many equal parts. State: weight [size].
    Paper: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        *,
        groups: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        sizes(name, {"size": size, "groups": groups})
        if size % groups:
            raise ValueError(f"{name}: size is {size}, groups {groups}; expected a multiple of the second")
        self.eps, self.groups = number(name, "eps", eps, "positive finite number", 1e-30), groups
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype. Raises TypeError or ShapeError for what is not so."""
        self._check(x)
        return Norm(self.groups, self.eps)(x, self.weight)

    def _check(self, x: Tensor) -> None:
        name, size = type(self).__name__, self.weight.shape
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: x is {x!r}; expected a tensor [..., {size[0]}]")
        if x.shape[-1:] != size or not x.is_floating_point():
            raise ShapeError(f"{name}: x is {x.dtype} {list(x.shape)}; expected floating [..., {size[0]}]")


class GatedRMSNorm(RMSNorm):
    """y = RMSNorm(x) * act(gate), or with gate_first RMSNorm(x * act(gate)), as Mamba-2 has it.

    activation: "silu" or "sigmoid". State: weight [size].
    """

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        *,
        groups: int = 1,
        activation: str = "silu",
        gate_first: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(size, eps, groups=groups, device=device, dtype=dtype)
        choice("GatedRMSNorm", "activation", activation, ACTIVATIONS)
        self.activation, self.gate_first = activation, gate_first

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """x, gate [..., size] -> the same shape, x's dtype. Raises TypeError or ShapeError for what is not so."""
        self._check(x)
        if not isinstance(gate, Tensor):
            raise TypeError(f"GatedRMSNorm: gate is {gate!r}; expected a tensor {list(x.shape)}")
        if gate.shape != x.shape or not gate.is_floating_point():
            raise ShapeError(
                f"GatedRMSNorm: gate is {gate.dtype} {list(gate.shape)}; expected floating {list(x.shape)}, as x"
            )
        return Norm(self.groups, self.eps, True, self.activation, self.gate_first)(x, self.weight, gate)


class History(NamedTuple):
    """Tokens x [B,T,D], and what lies before them.

    before [B,width,D]: the tokens before, None: zeros. ages [T]: the number of tokens before each one in its packed
    document. own: packed documents that continue others, each in x with its `width` tokens before it; the index of each
    token there. tail [N,width,D]: the last tokens of every row or document, for the next call; None: not asked for.
    """

    x: Tensor
    before: Tensor | None
    ages: Tensor | None
    own: Tensor | None
    tail: Tensor | None

    def previous(self) -> Tensor:
        """[B,T,D]: the token before each one, zero before the first. Of a history 1 wide."""
        if self.own is not None:
            return self.x[:, self.own - 1]
        first = torch.zeros_like(self.x[:, :1]) if self.before is None else self.before
        found = torch.cat([first, self.x], 1)[:, :-1]
        return found if self.ages is None else found.masked_fill(self.ages[:, None] == 0, 0)


def history(
    x: Tensor,
    width: int,
    *,
    tail: Tensor | None = None,
    offsets: Tensor | None = None,
    lengths: Tensor | None = None,
    return_tail: bool = True,
) -> History:
    """x [B,T,D] and the `width` tokens before it: `tail` [N,width,D], or zeros.

    offsets [N+1]: batch 1, documents end to end, each preceded by its own tail. lengths [B]: only the first lengths[b]
    tokens of row b are real, and only these go to the new tail. One of the two at most.
    """
    if lengths is not None:
        _check_lengths(x, offsets, lengths)
    if tail is not None:
        tail = tail.to(x.dtype)
    if offsets is None:
        return History(x, tail, None, None, _last(x, width, tail, lengths) if return_tail else None)
    check_offsets("history", offsets, x.shape[0])
    check_near("history", offsets, x.shape[1])
    if tail is not None and tail.shape != (offsets.shape[0] - 1, width, x.shape[2]):
        expected = f"expected [N, width, D] = {[offsets.shape[0] - 1, width, x.shape[2]]}"
        raise ShapeError(f"history: tail has shape {list(tail.shape)}; {expected}")
    # Offsets on a GPU are not checked: values outside 0..T are clamped, tokens of no document go to the last one.
    T, D = x.shape[1:]
    offsets, N = offsets.long().clamp(0, T), offsets.shape[0] - 1
    token = torch.arange(T, device=x.device)
    place = (torch.searchsorted(offsets, token, right=True) - 1).clamp(0, max(N - 1, 0))  # a slice fails in torch 2.11
    slots = torch.arange(width, device=x.device)  # + where the document begins, or ends
    if tail is None:
        last = slots - width + offsets[1:, None] if return_tail else None
        tail = None if last is None else _rows(x, last).masked_fill((last < offsets[:-1, None])[..., None], 0)
        return History(x, None, token - offsets[place], None, tail)
    slots = slots + width * torch.arange(N, device=x.device)[:, None]
    own = token + (place + 1) * width
    joined = x.new_zeros(1, T + N * width, D).index_copy(1, own, x)
    joined = joined.index_copy(1, (slots + offsets[:-1, None]).flatten(), tail.reshape(1, -1, D))
    return History(joined, None, None, own, joined[0, slots + offsets[1:, None]] if return_tail else None)


def _check_lengths(x: Tensor, offsets: Tensor | None, lengths: object) -> None:
    """Raise for what cannot be the lengths of x's rows; their values are read on the CPU alone."""
    if offsets is not None:
        raise ValueError("history: offsets and lengths are both given; expected one: packed tokens have no padding")
    if not isinstance(lengths, Tensor):
        raise TypeError(f"history: lengths is {lengths!r}; expected a tensor [B]")
    if lengths.dtype not in INTEGERS:
        raise ValueError(f"history: lengths is {lengths.dtype}; expected torch.int32 or torch.int64")
    if lengths.shape != x.shape[:1]:
        raise ShapeError(f"history: lengths has shape {list(lengths.shape)}; expected [B] = {list(x.shape[:1])}")
    if not plain(lengths) or lengths.device.type != "cpu":
        return
    if wrong := [length for length in lengths.tolist() if not 0 <= length <= x.shape[1]]:
        raise ValueError(f"history: lengths holds {wrong[0]}; expected 0 to T={x.shape[1]}")


def _last(x: Tensor, width: int, tail: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The last `width` of the tokens of `tail` and x; not a view, which would hold all of them."""
    B, T, D = x.shape
    if lengths is None and width <= T:
        return x[:, T - width :].clone()
    joined = torch.cat([x.new_zeros(B, width, D) if tail is None else tail, x], 1)
    if lengths is None:
        return joined[:, T:].clone()
    last = lengths[:, None] + torch.arange(width, device=x.device)
    return joined.gather(1, last[..., None].expand(B, width, D))


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x [1,T,D], of those before the first any; zeros where there are none."""
    return x[0, rows.clamp(min=0)] if x.shape[1] else x.new_zeros(*rows.shape, x.shape[2])


class ShortConvolution(nn.Module):
    """y[t] = act(sum_j weight[:, 0, j] x[t - size + 1 + j] + bias): depthwise, causal, a few tokens wide.

    State: weight [channels, 1, size] (bias [channels] where asked for), as nn.Conv1d has them. activation: "silu" or
    None. Summed in float32 (float64 for float64). `history` provides the tokens before; over ranks, another function.
    """

    history = staticmethod(history)

    def __init__(
        self,
        channels: int,
        size: int = 4,
        *,
        bias: bool = False,
        activation: str | None = "silu",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes("ShortConvolution", {"size": size})
        if activation is not None:
            choice("ShortConvolution", "activation", activation, ACTIVATIONS)
        self.size, self.activation = size, activation
        self.weight = nn.Parameter(torch.empty(channels, 1, size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight, uniform within size^-0.5, and the bias, 0."""
        nn.init.uniform_(self.weight, -(self.size**-0.5), self.size**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        *,
        tail: Tensor | None = None,
        offsets: Tensor | None = None,
        lengths: Tensor | None = None,
        return_tail: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """x [B,T,channels] -> (y [B,T,channels], the tail [N,size-1,channels] that continues it, None if not wanted).

        tail: the tokens before; zeros by default. offsets, lengths: as in `history`. Raises ShapeError or ValueError
        for what does not fit.
        """
        if x.dim() != 3 or x.shape[2] != self.weight.shape[0] or not x.is_floating_point():
            expected = f"expected floating [B, T, {self.weight.shape[0]}]"
            raise ShapeError(f"ShortConvolution: x is {x.dtype} {list(x.shape)}; {expected}")
        x, before, ages, own, tail = self.history(
            x, self.size - 1, tail=tail, offsets=offsets, lengths=lengths, return_tail=return_tail
        )
        y = convolve(x, self.weight, self.bias, self.activation, before=before, ages=ages)
        return y if own is None else y[:, own], tail

    def step(self, x: Tensor, tail: Tensor) -> Tensor:
        """One token a row: x [B,channels] -> y [B,channels]; tail [B,size-1,channels] is changed in place.

        Raises TypeError or ShapeError for what is not so, before anything is changed.
        """
        D = self.weight.shape[0]
        for name, given in (("x", x), ("tail", tail)):
            if not isinstance(given, Tensor):
                raise TypeError(f"ShortConvolution: {name} is {given!r}; expected a tensor")
        if x.dim() != 2 or x.shape[1] != D or not x.is_floating_point():
            raise ShapeError(f"ShortConvolution: x is {x.dtype} {list(x.shape)}; expected floating [B, {D}]")
        if tail.shape != (x.shape[0], self.size - 1, D) or not tail.is_floating_point():
            expected = f"expected [B, taps - 1, D] = {[x.shape[0], self.size - 1, D]}, floating"
            raise ShapeError(f"ShortConvolution: tail is {tail.dtype} {list(tail.shape)}; {expected}")
        return convolve_step(x, tail, self.weight, self.bias, self.activation)


def rotary(x: Tensor, positions: Tensor, *, base: float = 10000.0, width: int | None = None) -> Tensor:
    """Rotary positions: x [B,T,H,K] turned by its positions ([T] or [B,T], integers or between them), x's dtype.

    Channel i < width/2 turns together with channel i + width/2 (the halves of GPT-NeoX and Llama, not neighbours), by
    positions * base^(-2i/width); channels from `width` on (default K) stay. For one token at offset n: positions n.
    Raises ShapeError or ValueError for what is not so. Paper: Su et al. 2021 (arXiv 2104.09864).
    """
    if x.dim() != 4:
        raise ShapeError(f"rotary: x has shape {list(x.shape)}; expected [B, T, H, K]")
    B, T = x.shape[:2]
    if not isinstance(positions, Tensor):
        raise TypeError(f"rotary: positions are {positions!r}; expected a tensor of numbers")
    if positions.dtype == torch.bool or positions.is_complex():
        raise ValueError(f"rotary: positions are {positions.dtype}; expected integers, or floats where interpolated")
    if positions.shape not in ((T,), (1, T), (B, T)):
        raise ShapeError(f"rotary: positions {list(positions.shape)} with x {list(x.shape)}; expected [T] or [B, T]")
    base = rope("rotary", "base", base)
    width = x.shape[-1] if width is None else width
    if width % 2 or not 0 < width <= x.shape[-1]:
        raise ValueError(f"rotary: width is {width}; expected an even number up to K={x.shape[-1]}")
    return turn(x, positions, base, width)


def taylor(x: Tensor) -> Tensor:
    """[..., K] -> [..., 1 + K + K^2], whose products are 1 + qk/sqrt(K) + (qk)^2/2K: exp to second order.

    Paper: Arora et al. 2024, Based (arXiv 2402.18668).
    """
    x = x * x.shape[-1] ** -0.25
    squares = (x[..., :, None] * x[..., None, :]).flatten(-2) * 2**-0.5
    return torch.cat([torch.ones_like(x[..., :1]), x, squares], -1)


# Of queries and keys, [..., K] -> [..., K'].
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,  # Katharopoulos et al. 2020 (arXiv 2006.16236)
    "relu": F.relu,
    "softmax": lambda x: x.softmax(-1),
    "taylor": taylor,
    "identity": lambda x: x,
}
