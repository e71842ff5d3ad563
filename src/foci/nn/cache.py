"""What layers remember between calls: tensors by name and the tokens seen, one entry per layer."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # buffers hold a multiple of this many tokens


class LayerCache(dict[str, Tensor]):
    """One layer's tensors by name, and how many tokens it has `seen` (padding counted).

    A recurrent layer keeps tensors of fixed size and changes them in place. An attention layer keeps growing ones
    with `append`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self._room: dict[str, Tensor] = {}

    def append(self, name: str, new: Tensor, at: Tensor | None = None) -> Tensor:
        """Write `new` [B, T, ...] behind what `name` holds and return all of it, [B, seen + T, ...].

        `at` [B] writes row b from token `at[b]` on instead, for rows of several lengths. The tensor that comes back is
        a view of a buffer that doubles when it is full, so T appends of one token copy O(T) tokens, not O(T^2).
        Call it before `seen` is raised. Where gradients flow through `new` the old and the new are concatenated, and
        with `at` copied, instead: what a backward needs is never overwritten.
        """
        total = self.seen + new.shape[1]
        keep = torch.is_grad_enabled() and (new.requires_grad or (name in self and self[name].requires_grad))
        if keep and at is None:
            self[name] = torch.cat([self[name], new], 1) if name in self else new
            self._room.pop(name, None)
            return self[name]
        buffer = self._buffer(name, new, total, fresh=keep)
        if at is None:
            buffer[:, self.seen : total] = new
        else:
            rows = torch.arange(new.shape[0], device=new.device)[:, None]
            places = at[:, None] + torch.arange(new.shape[1], device=new.device)
            buffer[rows, places] = new
        self[name] = buffer[:, :total]
        return self[name]

    def _buffer(self, name: str, new: Tensor, total: int, fresh: bool) -> Tensor:
        """Room for `total` tokens that holds the old ones; zeros behind them."""
        held = self._room.get(name)
        if held is not None and held.shape[1] >= total and not fresh:
            return held
        size = -(-max(total, 2 * self.seen) // BLOCK) * BLOCK
        buffer = new.new_zeros(new.shape[0], size, *new.shape[2:])
        if name in self:
            buffer[:, : self.seen] = self[name]
        self._room[name] = buffer
        return buffer

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row `rows[b]` was, as beam search needs it."""
        for name, value in self.items():
            self[name] = value.index_select(0, rows)
        self._room.clear()

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the unused room of growing tensors counted."""
        return sum(_bytes(self._room.get(name, value)) for name, value in self.items())


class Cache:
    """The caches of a model's layers: `cache.layer(index)` is the one of that layer, made when first asked for.

    A layer reads it, computes, writes it back and adds to its `seen`. A plain object: copy.deepcopy forks it.
    """

    def __init__(self) -> None:
        self._layers: dict[int, LayerCache] = {}

    def layer(self, index: int) -> LayerCache:
        """The cache of layer `index`."""
        return self._layers.setdefault(index, LayerCache())

    @property
    def seen(self) -> int:
        """Tokens seen, padding counted: the most of any layer (they agree between two forwards of a model)."""
        return max((layer.seen for layer in self._layers.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated by all layers."""
        return sum(layer.nbytes for layer in self._layers.values())

    def reorder(self, rows: Tensor) -> None:
        """Row b of every layer becomes what row `rows[b]` was."""
        for layer in self._layers.values():
            layer.reorder(rows)


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()
