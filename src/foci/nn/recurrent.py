"""Shared by recurrent layers: the tokens of a call (padding, documents, cache) and the base class of the layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.types import Device

from foci.core.spec import accumulator
from foci.nn.cache import NUMBERS, Cache, LayerCache, entry
from foci.nn.operators import ALONE, Operators
from foci.nn.parts import ShortConvolution, backend_of, check_share, head_sizes, heads, sizes
from foci.ops.decay.api import linear_attention_step
from foci.ops.delta.api import delta_rule_step
from foci.ops.layer_parts import gate


class Tokens:
    """The tokens of one call of a layer: which are real, where documents begin, and the layer's cache.

    The real tokens of every row are moved to the front, and their outputs back. So padding, wherever it was, comes
    after all real tokens, and cannot affect causal outputs; only states and tails must exclude it.
    """

    def __init__(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        offsets: Tensor | None,
        held: LayerCache | None,
        backend: str | None,
        operators: Operators,
    ) -> None:
        self.offsets, self.held, self.backend, self.operators = offsets, held, backend, operators
        self.B, self.T = hidden.shape[:2]
        self.rows = self.B if offsets is None else offsets.shape[0] - 1
        self.device = hidden.device
        self.real: Tensor | None = None  # [B,T], once moved
        self.lengths: Tensor | None = None
        if mask is not None:
            self.order = mask.to(torch.int8).argsort(stable=True, dim=1, descending=True)
            self.lengths = mask.sum(1)
            self.real = torch.arange(self.T, device=self.device) < self.lengths[:, None]

    def front(self, hidden: Tensor) -> Tensor:
        """[B,T,D] with the real tokens of each row first and zeros behind them."""
        return hidden if self.real is None else self._only_real(hidden.gather(1, self._along(self.order, hidden)))

    def back(self, out: Tensor) -> Tensor:
        """[B,T,D] with every token back at its place, zeros for padding."""
        return out if self.real is None else self._only_real(out).gather(1, self._along(self.order.argsort(1), out))

    def convolve(self, name: str, convolution: ShortConvolution, x: Tensor) -> Tensor:
        """Apply a short convolution to x [B,T,C], with its tail cached under this name."""
        tail = self._kept(name)
        if tail is not None and self._steps(tail):
            return convolution.step(x[:, 0], tail)[:, None]
        y, tail = convolution(
            x, tail=tail, offsets=self.offsets, lengths=self.lengths, return_tail=self.held is not None
        )
        self._keep(name, tail)
        return y

    def previous(self, name: str, x: Tensor) -> Tensor:
        """[B,T,C]: the token before each one, zero before the first."""
        history = self.operators.history(
            x, 1, tail=self._kept(name), offsets=self.offsets, lengths=self.lengths, return_tail=self.held is not None
        )
        self._keep(name, history.tail)
        return history.previous()

    def positions(self) -> Tensor:
        """[B,T]: each token's position among the real ones of its row or document, including earlier calls."""
        before = self._kept("positions")
        if before is None:
            before = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        start, total = self.operators.span(self.T)
        token = torch.arange(start, start + self.T, device=self.device)
        if self.offsets is None:
            self._keep("positions", before + (total if self.lengths is None else self.lengths))
            return before[:, None] + token
        self._keep("positions", before + self.offsets.diff())
        return (token + (before - self.offsets[:-1])[torch.searchsorted(self.offsets[1:-1], token, right=True)])[None]

    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        log_decay: Tensor | None = None,
        bonus: Tensor | None = None,
        scale: float | None = None,
        name: str = "state",
    ) -> Tensor:
        """foci.linear_attention from the state cached under this name, which is updated."""
        state = self._kept(name)
        q, k = q.to(v.dtype), self._only_real(k.to(v.dtype))  # on a GPU autocast makes softmax features float32
        log_decay = self._still(log_decay)
        if state is not None and self._steps(state):
            g = log_decay if log_decay is None or log_decay.dim() == 1 else log_decay[:, 0]
            return linear_attention_step(
                q[:, 0], k[:, 0], v[:, 0], state, log_decay=g, bonus=bonus, scale=scale
            )[:, None]  # fmt: skip
        out, state = self.operators.linear_attention(
            q, k, v, log_decay=log_decay, bonus=bonus, scale=scale, state=state, offsets=self.offsets,
            return_state=self.held is not None, backend=self.backend,
        )  # fmt: skip
        self._keep(name, state)
        return out

    def delta_rule(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, log_decay: Tensor | None = None) -> Tensor:
        """foci.delta_rule from the cached state, which is updated."""
        state = self._kept("state")
        beta, log_decay = self._only_real(beta), self._still(log_decay)
        if state is not None and self._steps(state):
            g = None if log_decay is None else log_decay[:, 0]
            return delta_rule_step(q[:, 0], k[:, 0], v[:, 0], beta[:, 0], state, log_decay=g)[:, None]
        out, state = self.operators.delta_rule(
            q, k, v, beta, log_decay=log_decay, state=state, offsets=self.offsets,
            return_state=self.held is not None, backend=self.backend,
        )  # fmt: skip
        self._keep("state", state)
        return out

    def _steps(self, kept: Tensor) -> bool:
        """Whether to use the in-place step: one new token per row, no gradients, and no backend named.

        Tensors cached by a call with gradients belong to its graph, and are never changed in place.
        """
        alone = self.T == 1 and self.offsets is None and self.real is None and self.backend is None
        alone = alone and self.operators.whole
        return alone and not torch.is_grad_enabled() and not kept.requires_grad

    def _still(self, log_decay: Tensor | None) -> Tensor | None:
        """log_decay, 0 at padding: [H] becomes [B,T,H] if there is padding."""
        if self.real is None or log_decay is None:
            return log_decay
        return self._only_real(log_decay.expand(self.B, self.T, -1) if log_decay.dim() == 1 else log_decay)

    def _only_real(self, x: Tensor) -> Tensor:
        """[B,T,...] with padding replaced by zeros."""
        return x if self.real is None else x.masked_fill(~self.real.view(*self.real.shape, *[1] * (x.dim() - 2)), 0)

    def _along(self, order: Tensor, x: Tensor) -> Tensor:
        return order[..., None].expand_as(x)

    def _kept(self, name: str) -> Tensor | None:
        return None if self.held is None else self.held.get(name)

    def _keep(self, name: str, value: Tensor | None) -> None:
        if self.held is not None and value is not None:
            self.held[name] = value


class Recurrent(nn.Module):
    """Base of layers hidden [B,T,D] -> [B,T,D] around one recurrence. Subclasses build projections and define `mix`.

    H = num_heads states of K x V (K = head_dim, V = value_dim), whose queries and keys have G = num_key_heads heads.
    """

    operator = "linear"
    conv_size = 0  # no short convolutions, unless the layer makes some
    output = "o_proj"
    operators = ALONE

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_heads: int | None,
        head_dim: int | None,
        value_dim: int | None,
        layer_index: int | None,
        backend: str | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        G, K = head_sizes(name, hidden_size, num_heads, "num_key_heads", num_key_heads, head_dim)
        self.hidden_size, self.num_heads, self.num_key_heads = hidden_size, num_heads, G
        self.head_dim, self.value_dim = K, K if value_dim is None else value_dim
        sizes(name, {"value_dim": self.value_dim})
        self.layer_index, self.backend = entry(name, layer_index), backend_of(name, self.operator, backend)
        self._kind, self._number = name, next(NUMBERS)  # kept, as wrappers may change a layer's class

    def forward(
        self,
        hidden: Tensor,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """hidden [B,T,D] -> [B,T,D].

        mask [B,T] boolean: True where a token is real. Padding may be on either side or between; it changes nothing and
        its outputs are 0. offsets [N+1]: documents end to end in a batch of 1; none sees another.
        cache: the call continues from it, and this layer's entry (see `layer_index`) is updated. After a packed call it
        has one row per document. Without gradients a single token uses the operator's in-place step.

        Raises ShapeError or ValueError for a mask, offsets or cache that do not fit.
        """
        name = type(self).__name__
        if mask is not None and offsets is not None:
            raise ValueError(f"{name}: mask and offsets are both given; expected one: packed tokens have no padding")
        self.operators.check(name, self.hidden_size, hidden, mask, offsets, cache)
        rows = hidden.shape[0] if offsets is None else offsets.shape[0] - 1
        kept = None if cache is None else cache.layer(self.layer_index or 0)
        held = None if kept is None else kept.draft(self._kind, rows, self.layer_index, self._number)
        tokens = Tokens(hidden, mask, offsets, held, self.backend, self.operators)
        out = tokens.back(self.get_submodule(self.output)(self.mix(tokens.front(hidden), tokens).flatten(2)))
        if kept is not None and held is not None:
            held.seen += self.operators.span(tokens.T)[1]
            kept.take(held)
        return out

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [B,T,D], real tokens first -> the output projection's input, [B,T,H,V] or with heads merged."""
        raise NotImplementedError

    def _make_qkv(self, device: Device, dtype: torch.dtype | None, conv_size: int | None = None) -> None:
        """Create q_proj, k_proj, v_proj; with conv_size each followed by a short convolution with SiLU."""
        if conv_size is not None:
            sizes(type(self).__name__, {"conv_size": conv_size})
        keys, values = self.num_key_heads * self.head_dim, self.num_heads * self.value_dim
        for name, channels in (("q", keys), ("k", keys), ("v", values)):
            projection = nn.Linear(self.hidden_size, channels, bias=False, device=device, dtype=dtype)
            self.add_module(f"{name}_proj", projection)
            if conv_size is not None:
                self.conv_size = conv_size
                self.add_module(f"{name}_conv1d", ShortConvolution(channels, conv_size, device=device, dtype=dtype))

    def _qkv(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [B,T,G,K] and v [B,T,H,V]; with tensor parallelism only this rank's heads."""
        found = []
        for name, channels in (("q", self.head_dim), ("k", self.head_dim), ("v", self.value_dim)):
            y = self.get_submodule(f"{name}_proj")(x)
            if self.conv_size:
                convolution = self.get_submodule(f"{name}_conv1d")
                assert isinstance(convolution, ShortConvolution)
                y = tokens.convolve(f"{name}_conv1d", convolution, y)
            found.append(self._heads(f"{name}_proj", y, channels))
        q, k, v = found
        self._check_share(k, v, "v_proj")
        return q, k, v

    def _heads(self, name: str, y: Tensor, channels: int) -> Tensor:
        return heads(type(self).__name__, name, y, channels)

    def _check_share(self, k: Tensor, v: Tensor, name: str) -> None:
        check_share(type(self).__name__, name, (v.shape[-2], self.num_heads), (k.shape[-2], self.num_key_heads))


def low_rank(size: int, rank: int, out: int, *, bias: bool, device: Device, dtype: torch.dtype | None) -> nn.Sequential:
    """Two projections through `rank` channels: 0.weight [rank, size], 1.weight [out, rank], and 1.bias where asked."""
    down = nn.Linear(size, rank, bias=False, device=device, dtype=dtype)
    return nn.Sequential(down, nn.Linear(rank, out, bias=bias, device=device, dtype=dtype))


def gate_parameters(
    heads: int, channels: int, device: Device, dtype: torch.dtype | None
) -> tuple[nn.Parameter, nn.Parameter]:
    """Uninitialised A_log [heads] and dt_bias [channels], for `begin_gates` to fill."""
    a_log, dt_bias = (torch.empty(size, device=device, dtype=dtype) for size in (heads, channels))
    return nn.Parameter(a_log), nn.Parameter(dt_bias)


@torch.no_grad()
def begin_gates(a_log: Tensor, dt_bias: Tensor) -> None:
    """Initialise both as Mamba-2 does: A in [1, 16], softplus(dt_bias) in [0.001, 0.1].

    Drawn in torch's default dtype, at least float32, so that a seed gives the same gates whatever their dtype.
    """
    drawn = accumulator(torch.get_default_dtype())
    rate, dt = (torch.empty_like(x, dtype=drawn) for x in (a_log, dt_bias))
    a_log.copy_(rate.uniform_(1, 16).log())
    dt = dt.uniform_(math.log(0.001), math.log(0.1)).exp()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def selective_decay(a_log: Tensor, dt: Tensor, bias: Tensor | None = None) -> Tensor:
    """log_decay = -exp(A_log) softplus(dt + bias), in float32 (float64 for float64): at most 0 whatever is learned.

    dt [..., D], bias [D], A_log [H]: one rate for each D/H channels.
    """
    return gate(dt, bias, a_log, -1.0)
