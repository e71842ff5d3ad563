"""Softmax attention as a layer: grouped heads, rotary positions, windows, sinks, a cache."""

from __future__ import annotations

from typing import TypeGuard

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from foci.core.errors import ShapeError, Unsupported
from foci.nn.cache import NUMBERS, Cache, LayerCache, entry
from foci.nn.operators import ALONE
from foci.nn.parts import RMSNorm, backend_of, check_share, head_sizes, heads, rope, rotary, sizes
from foci.ops.masks import Causal, Dense, Mask, Packed, Window
from foci.ops.softmax.call import cap


class Attention(nn.Module):
    """Causal attention of many heads: o_proj(merge(attention(q_proj(x), k_proj(x), v_proj(x)))).

    hidden [B,T,D], D = hidden_size; q [B,T,H,K]; k, v [B,S,G,K]. num_heads H; num_kv_heads G, which divides it (default
    H); head_dim K (default D / H). rope_base: of the rotary positions, None for none. qk_norm: an RMSNorm over K of
    every query and key before the rotary embedding. softcap c: logits become c tanh(logits / c). window W: a token sees
    itself and the W - 1 before it, and the cache keeps no more. sink: one learned logit per head without a value.
    layer_index: this layer's entry in a model's cache; default 0, for one layer and its copies. backend: must run every
    call; by default foci chooses. Projections may be cut over ranks (tensor parallelism), queries and keys alike, and
    heads pruned; after pruning query heads within their groups, set the attribute num_heads to how many are left.

    State: q_proj.weight [H K, hidden_size], k_proj.weight and v_proj.weight [G K, hidden_size], o_proj.weight
    [hidden_size, H K]; with qk_norm q_norm.weight and k_norm.weight [K]; with sink sinks [H].
    Papers: Vaswani et al. 2017 (arXiv 1706.03762); GQA (2305.13245); RoPE (2104.09864); qk-norm (2010.04245).
    """

    operators = ALONE

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_base: float | None = 10000.0,
        qk_norm: bool = False,
        softcap: float | None = None,
        window: int | None = None,
        sink: bool = False,
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        groups, K = head_sizes("Attention", hidden_size, num_heads, "num_kv_heads", num_kv_heads, head_dim)
        if window is not None:
            sizes("Attention", {"window": window})
        if rope_base is not None and K % 2:
            raise ValueError(f"Attention: head_dim is {K}; expected an even number, for rotary, or rope_base=None")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, int(num_heads), groups
        self.head_dim, self.window, self.softcap = K, None if window is None else int(window), cap("Attention", softcap)
        self.rope_base = None if rope_base is None else rope("Attention", "rope_base", rope_base)
        self.layer_index, self._number = entry("Attention", layer_index), next(NUMBERS)
        self.backend = backend_of("Attention", "softmax", backend)
        own, shared = num_heads * K, groups * K
        self.q_proj = nn.Linear(hidden_size, own, bias=False, device=device, dtype=dtype)
        self.k_proj = nn.Linear(hidden_size, shared, bias=False, device=device, dtype=dtype)
        self.v_proj = nn.Linear(hidden_size, shared, bias=False, device=device, dtype=dtype)
        self.o_proj = nn.Linear(own, hidden_size, bias=False, device=device, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if sink else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise this layer's own parameters: sinks to 0. Submodules have their own reset_parameters."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        hidden: Float[Tensor, "B T D"],
        *,
        mask: Bool[Tensor, "B T"] | None = None,
        offsets: Int[Tensor, " M"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """hidden [B,T,D] -> [B,T,D].

        mask: True where a token is real. Padding may be anywhere (left, right, between); it changes no real token, has
        no position, and its output is 0. offsets [N+1]: batch 1, documents end to end, independent of each other.
        cache: holds earlier tokens, and these are appended. Raises ShapeError or ValueError for what does not fit,
        Unsupported for offsets together with mask or cache.
        """
        self.operators.check("Attention", self.hidden_size, hidden, mask, offsets, cache)
        others = [name for name, other in (("mask", mask), ("cache", cache)) if other is not None]
        if offsets is not None and others:
            reasons = [f"{name} is given too" for name in others]
            raise Unsupported("Attention: packed documents (offsets) stand alone", reasons)
        kept = None if cache is None else cache.layer(self.layer_index or 0)
        memory = None if kept is None else kept.draft("Attention", hidden.shape[0], self.layer_index, self._number)
        if mask is None:
            out = self.o_proj(self._attend(hidden, memory, None, offsets))
        else:
            # Right-align the rows, padding first: then the cache is one block, and Causal and Window see real tokens.
            order = mask.long().argsort(stable=True, dim=1)
            moved = _pick(hidden.masked_fill(~mask[..., None], 0), order)
            y = self.o_proj(self._attend(moved, memory, mask.sum(1), None))
            out = _pick(y, order.argsort(1)).masked_fill(~mask[..., None], 0)
        if kept is not None and memory is not None:
            kept.take(memory)
        return out

    def _attend(self, x: Tensor, memory: LayerCache | None, lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
        """Attention with heads merged, [B, T, H K]. lengths [B]: real tokens of each row, which are its last ones."""
        start, T = self.operators.span(x.shape[1])
        named = ("q_proj", self.q_proj), ("k_proj", self.k_proj), ("v_proj", self.v_proj)
        q, k, v = (heads("Attention", name, project(x), self.head_dim) for name, project in named)
        check_share("Attention", "q_proj", (q.shape[2], self.num_heads), (k.shape[2], self.num_kv_heads))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        past, total = _real(memory, lengths, T)
        if self.rope_base is not None:
            positions = _positions(past, total, offsets, start, x)
            q, k = (rotary(part, positions, base=self.rope_base) for part in (q, k))
        if memory is not None:
            trained = any(part is not None and part.requires_grad for part in (q, k, v, self.sinks))
            k, v = (self._remember(memory, name, new, past, lengths, trained) for name, new in (("k", k), ("v", v)))
            memory.seen += T
            if _each(total):
                memory["length"] = total
        mask, sink = self._mask(T, k, total, offsets), None if self.sinks is None else self.sinks.to(v.dtype)
        out = self.operators.attention(q, k, v, mask=mask, softcap=self.softcap, sink=sink, backend=self.backend)
        return out.flatten(2)

    def _mask(self, T: int, k: Tensor, total: int | Tensor, offsets: Tensor | None) -> Mask | None:
        parts: list[Mask] = []
        if offsets is not None:
            parts.append(Packed(offsets))
        if _each(total):
            first = k.shape[1] - total
            parts.append(Dense((torch.arange(k.shape[1], device=k.device) >= first[:, None])[:, None, None]))
        if T > 1:  # a single token sees all cached ones
            parts.append(Causal())
            if self.window is not None:
                parts.append(Window(self.window - 1, 0))
        mask: Mask | None = None
        for part in parts:
            mask = part if mask is None else mask & part
        return mask

    def _remember(
        self,
        memory: LayerCache,
        name: str,
        new: Tensor,
        past: int | Tensor,
        lengths: Tensor | None,
        trained: bool,
    ) -> Tensor:
        """The cached keys or values with the new ones appended, rows right-aligned."""
        last = None if self.window is None else self.window - 1
        held = memory.get(name)
        if held is not None and held.shape[2:] != new.shape[2:]:
            found, expected = list(held.shape[2:]), list(new.shape[2:])
            raise ShapeError(f"Attention: cache holds {name} of heads by head_dim {found}; expected {expected}")
        autocast = not new.is_meta and torch.is_autocast_enabled(new.device.type)
        if held is not None and held.dtype != new.dtype and not autocast:
            raise ValueError(f"Attention: cache holds {name} in {held.dtype}; expected {new.dtype}, the layer's")
        if lengths is None or held is None:
            return self.operators.remember(memory, name, new, last, trained)
        # The padding at the front of the new tokens would be a gap between old and new.
        size = held.shape[1]
        assert isinstance(past, Tensor)
        slot = torch.arange(size + new.shape[1], device=new.device)
        first = torch.where(slot < size, size - past[:, None], size + new.shape[1] - lengths[:, None])
        order = (slot >= first).long().argsort(stable=True, dim=1)
        whole = _pick(torch.cat([held, new], 1), order)
        memory[name] = whole if last is None else whole[:, max(whole.shape[1] - last, 0) :]
        return whole


def _pick(x: Tensor, order: Tensor) -> Tensor:
    """Gather each row's tokens in the given order: x [B, S, ...], order [B, S]."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, order]


def _real(memory: LayerCache | None, lengths: Tensor | None, T: int) -> tuple[int | Tensor, int | Tensor]:
    """Real tokens before and after this call: an int if equal for all rows, else [B]."""
    past: int | Tensor = 0
    if memory is not None:
        past = memory.get("length", memory.seen)
    if lengths is not None:
        past = past + torch.zeros_like(lengths)
        return past, past + lengths
    return past, past + T


def _each(count: int | Tensor) -> TypeGuard[Tensor]:
    """Whether the count is per row; a 0-dim tensor is an int under torch.jit.trace."""
    return isinstance(count, Tensor) and count.dim() == 1


def _positions(past: int | Tensor, total: int | Tensor, offsets: Tensor | None, start: int, x: Tensor) -> Tensor:
    """Each token's position among the real ones of its row or document: [T] or [B, T]. Arbitrary for padding."""
    token = torch.arange(start, start + x.shape[1], device=x.device)
    if offsets is not None:
        document = torch.searchsorted(offsets[1:].to(token), token, right=True)
        return token - offsets.to(token)[document]
    if _each(total):
        return (total[:, None] - x.shape[1]) + token
    return past + token
