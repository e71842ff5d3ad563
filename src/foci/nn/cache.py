"""The cache that layers keep between calls: tensors by name and the number of tokens seen, one entry per layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping
from uuid import uuid4

import torch
from torch import Tensor

from foci.core.errors import ShapeError
from foci.ops.arguments import INTEGERS, is_whole, plain

BLOCK = 64  # minimum free tokens in the buffer of a growing tensor
# Unique numbers of layers, across processes that exchange layers; a copy of a layer has the same number.
NUMBERS = itertools.count(uuid4().int % 2**48)


class LayerCache(MutableMapping[str, Tensor]):
    """One layer's tensors by name, and how many tokens it has `seen` (padding counted; the layer adds to it).

    A recurrent layer keeps tensors of fixed size and changes them in place. An attention layer keeps growing ones with
    `append`, in buffers with free space; reading one makes a new view of its buffer.
    """

    def __init__(self) -> None:
        self.seen = 0
        # For a growing tensor its buffer only, no view: with both as inputs, torch.compile loses track of sizes.
        self._held: dict[str, Tensor] = {}
        self._spans: dict[str, tuple[int, int]] = {}  # start and end of a growing tensor in its buffer
        self._origin: LayerCache | None = None  # of a draft: the cache it is a draft of
        self._owner: tuple[str, int | None] | None = None  # which layer wrote it last

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_owner": None}  # a copy, or another process, may continue with other layers

    def __getitem__(self, name: str) -> Tensor:
        held = self._writable(name)
        if name not in self._spans:
            return held
        begin, end = self._spans[name]
        return held[:, begin:end]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._spans.pop(name, None)
        self._held[name] = value

    def __delitem__(self, name: str) -> None:
        self._spans.pop(name, None)
        del self._held[name]

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def append(self, name: str, new: Tensor, last: int | None = None, saved: bool = False) -> Tensor:
        """Append `new` [B, T, ...] to the tensor `name`; returns all, [B, S, ...]. `last`: tokens to keep, None: all.

        The result is a view of a buffer allocated with a quarter more space, so T appends of one token copy O(T)
        tokens, not O(T^2), and with `last` memory is constant. If gradients flow, or another backward needs the result
        (`saved`), the two are concatenated instead, and the buffer is not written again.
        """
        buffer = self._writable(name) if name in self else new[:, :0]
        begin, end = self._spans.get(name, (0, buffer.shape[1]))
        size = end - begin + new.shape[1]
        kept = size if last is None else min(size, last)
        if torch.is_grad_enabled() and (saved or new.requires_grad or buffer.requires_grad):
            whole = torch.cat([buffer[:, begin:end], new], 1)
            self[name] = whole[:, size - kept :]
            return whole
        if end + new.shape[1] >= buffer.shape[1]:  # keep one token free: a view of the full buffer would recompile
            grown = buffer.new_empty(new.shape[0], size + _room(size), *new.shape[2:])
            grown[:, : end - begin] = buffer[:, begin:end]
            buffer, begin, end = grown, 0, end - begin
            if self._origin is not None and name in self._origin:  # shares its buffer with the origin
                self._origin._held[name], self._origin._spans[name] = buffer, (begin, end)
        end += new.shape[1]
        buffer[:, end - new.shape[1] : end] = new
        whole = buffer[:, end - size : end]
        if last is not None and buffer.shape[1] > last + 1 + _room(last + 1):
            self[name] = whole[:, size - kept :].clone()  # copy, to free the memory of a long prefill
        else:
            self._held[name], self._spans[name] = buffer, (end - kept, end)
        return whole

    def _writable(self, name: str) -> Tensor:
        """The buffer, writable in this call: an inference-mode tensor is copied by the first call outside that mode."""
        held = self._held[name]  # a compiled call cannot test is_inference()
        if not torch.compiler.is_compiling() and held.is_inference() and not torch.is_inference_mode_enabled():
            held = self._held[name] = held.clone()
        return held

    def draft(self, kind: str, rows: int, index: int | None, number: int) -> LayerCache:
        """A cache to write to during a call, committed by `take`: a call that raises changes nothing.

        A draft shares this cache's buffers and writes to their free space; only a recurrent layer's step changes more
        in place. Raises ShapeError if this has another number of rows; ValueError if a layer of another class wrote it,
        or another layer (unless both have an explicit layer_index). An empty cache belongs to no layer.
        """
        owner = (kind, number if index is None else None)
        if self and self.seen and self._owner is not None and self._owner != owner:
            raise ValueError(
                f"{kind}: layer_index is {index or 0}, where cache holds what another layer wrote ({self._owner[0]}); "
                "expected a layer_index of its own for every layer"
            )
        for name, value in self._held.items():
            if value.shape[0] != rows:
                raise ShapeError(f"{kind}: cache holds {name} of {value.shape[0]} rows; expected {rows}")
        draft = LayerCache()
        draft.take(self)
        draft._origin, draft._owner = self, owner
        return draft

    def take(self, draft: LayerCache) -> None:
        """Commit a draft: take over its tensors and its `seen`."""
        self.seen, self._held, self._spans = draft.seen, dict(draft._held), dict(draft._spans)
        self._owner = draft._owner

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes row `rows[b]`, for beam search: int32 or int64, one entry for each row that continues.

        Raises TypeError, ValueError or ShapeError before anything is changed.
        """
        self._check_rows(rows)
        self._take(rows)

    def _take(self, rows: Tensor) -> None:
        for name, value in self.items():
            self[name] = value.index_select(0, rows)

    def _check_rows(self, rows: Tensor) -> None:
        if not isinstance(rows, Tensor):
            raise TypeError(f"Cache.reorder: rows is {rows!r}; expected a tensor of row numbers")
        if rows.dtype not in INTEGERS:
            raise ValueError(f"Cache.reorder: rows is {rows.dtype}; expected torch.int32 or torch.int64")
        if rows.dim() != 1:
            raise ShapeError(f"Cache.reorder: rows has shape {list(rows.shape)}; expected one dimension")
        if not plain(rows) or rows.device.type != "cpu":
            return
        size = min((held.shape[0] for held in self._held.values()), default=None)
        if size is not None and (wrong := [row for row in rows.tolist() if not 0 <= row < size]):
            raise ValueError(f"Cache.reorder: rows holds {wrong[0]}; expected 0 to {size - 1}, of {size} rows")

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including free space of growing tensors."""
        return sum(held.numel() * held.element_size() for held in self._held.values())


class Cache:
    """The caches of a model's layers: `cache.layer(index)` is that layer's, created on first use.

    A layer reads it, computes, writes it back and increases its `seen`. A plain object: it can be deepcopied and
    pickled.
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
        """Row b of every layer becomes what row `rows[b]` was; raises as a layer's does, before any is changed."""
        for layer in self._layers.values():
            layer._check_rows(rows)
        for layer in self._layers.values():
            layer._take(rows)


def entry(where: str, layer_index: int | None) -> int | None:
    """A layer's entry in a Cache, checked: True would be entry 1, another layer's."""
    if layer_index is None:
        return None
    if not is_whole(layer_index, 0):
        raise ValueError(f"{where}: layer_index is {layer_index!r}; expected an integer of at least 0, or None")
    return int(layer_index)


def _room(size: int) -> int:
    return max(BLOCK, size // 4)
