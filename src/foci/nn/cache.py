"""What layers remember between calls: tensors by name and the tokens seen, one entry per layer."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # tokens of room that a growing tensor gets at least


class LayerCache(dict[str, Tensor]):
    """One layer's tensors by name, and how many tokens it has `seen` (padding counted; the layer adds to it).

    A recurrent layer keeps tensors of fixed size and changes them in place. An attention layer keeps growing ones with
    `append`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self._room: dict[str, tuple[Tensor, int]] = {}  # the buffer that self[name] is a part of, and where it ends

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._room.pop(name, None)
        super().__setitem__(name, value)

    def append(self, name: str, new: Tensor, last: int | None = None) -> Tensor:
        """What `name` holds and `new` [B, T, ...] behind it, [B, S, ...]; of which the `last` tokens are kept, or all.

        What comes back is a view of a buffer that has room for a quarter more when it is made, so T appends of one
        token copy O(T) tokens, not O(T^2), and with `last` the memory stays the same for ever. Where gradients flow the
        two are concatenated instead: what a backward needs is never overwritten.
        """
        held = self.get(name, new[:, :0])
        size = held.shape[1] + new.shape[1]
        if torch.is_grad_enabled() and (new.requires_grad or held.requires_grad):
            whole, room = torch.cat([held, new], 1), None
        else:
            buffer, end = self._room.get(name, (held, held.shape[1]))
            if end + new.shape[1] > buffer.shape[1]:
                buffer = new.new_empty(new.shape[0], size + _room(size), *new.shape[2:])
                buffer[:, : held.shape[1]] = held
                end = held.shape[1]
            buffer[:, end : end + new.shape[1]] = new
            end += new.shape[1]
            whole, room = buffer[:, end - size : end], (buffer, end)
        kept = whole if last is None else whole[:, max(size - last, 0) :]
        if room is not None and last is not None and room[0].shape[1] > last + 1 + _room(last + 1):
            kept, room = kept.clone(), None  # a long piece went by; its memory need not stay
        self[name] = kept
        if room is not None:
            self._room[name] = room
        return whole

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row `rows[b]` was, as beam search needs it."""
        for name, value in self.items():
            self[name] = value.index_select(0, rows)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the unused room of growing tensors counted."""
        return sum(_bytes(self._room.get(name, (value, 0))[0]) for name, value in self.items())


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


def _room(size: int) -> int:
    return max(BLOCK, size // 4)


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()
