"""xFormers' attention biases as small values: `materialize` defines each, foci's masks compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from foci.compat.xformers.seqlens import SeqLens
from foci.core.errors import ShapeError, Unsupported
from foci.core.shapes import dense
from foci.ops.masks import Causal, Dense, Lengths, Mask, Packed, Window


class Rule(NamedTuple):
    """Key j may be seen by query i when place - left <= j <= place + right; None leaves a side open.

    place is i (top_left), or i moved so that the last query stands at the last key.
    """

    top_left: bool = False
    left: int | None = None
    right: int | None = None

    def allows(self, T: int, S: int, device: torch.device | str) -> Tensor:
        """[T, S], True where seen."""
        place = torch.arange(T, device=device)[:, None] + (0 if self.top_left else S - T)
        key = torch.arange(S, device=device)
        allowed = torch.ones(T, S, dtype=torch.bool, device=device)
        if self.left is not None:
            allowed &= key >= place - self.left
        if self.right is not None:
            allowed &= key <= place + self.right
        return allowed

    def mask(self) -> Mask | None:
        """The same as a mask of foci, where windows are measured from the last key."""
        causal = Causal("top-left" if self.top_left else "bottom-right") if self.right == 0 else None
        if causal is not None:
            return causal if self.left is None else causal & Window(self.left, None)
        return None if self.left is None and self.right is None else Window(self.left, self.right)


class AttentionBias:
    """What is added to the logits: 0 where a query may see a key, -inf elsewhere; the base of all that follow."""

    def rule(self) -> Rule:
        raise NotImplementedError(f"{type(self).__name__} must say which keys a query may see")

    def to(self, device: torch.device) -> Self:
        return self

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The bias as a tensor of `shape` [..., queries, keys]: its definition, O(T S) memory."""
        T, S = shape[-2:]
        mask = torch.full((T, S), -torch.inf, dtype=dtype, device=device)
        for rows, columns in self.blocks(T, S):
            queries, keys = rows.stop - rows.start, columns.stop - columns.start
            mask[rows, columns] = mask[rows, columns].masked_fill(self.rule().allows(queries, keys, device), 0.0)
        return mask.expand(shape)

    def blocks(self, T: int, S: int) -> list[tuple[slice, slice]]:
        """The stretches of queries and the keys that each may see at all."""
        return [(slice(0, T), slice(0, S))]

    def lower(self, T: int, S: int, device: torch.device) -> tuple[Mask | None, Tensor | None]:
        """A mask of foci and an additive tensor that together are this bias."""
        rule = self.rule()
        if rule.top_left and rule.left is not None and T != S:
            return self.dense(T, S, device), None
        return rule.mask(), None

    def dense(self, T: int, S: int, device: torch.device) -> Mask:
        """Where no other mask says it: a window measured from the first key, keys that lie out of order."""
        return Dense(self.materialize((T, S), device=device) == 0)


class LowerTriangularMask(AttentionBias):
    """Causal, the first query at the first key."""

    def __init__(self, device: torch.device | None = None) -> None:
        """There is nothing to put on a device."""

    def rule(self) -> Rule:
        return Rule(top_left=True, right=0)

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal, the first query at the first key, and `bias`, a tensor as attn_bias may be, added; differentiable."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = dense("xformers", "bias", bias)

    def to(self, device: torch.device) -> Self:
        return type(self)(self._bias.to(device))

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias

    def lower(self, T: int, S: int, device: torch.device) -> tuple[Mask | None, Tensor | None]:
        return self.rule().mask(), self._bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, the last query at the last key."""

    def rule(self) -> Rule:
        return Rule(right=0)

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal, the last query at the last key, the last `window_size` keys up to the query's own."""

    _window_size: int

    def __post_init__(self) -> None:
        _positive("window_size", self._window_size, 1)

    def rule(self) -> Rule:
        return Rule(left=self._window_size - 1, right=0)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """`window_left` keys before the query's place to `window_right` after it, the last query at the last key."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        _positive("window_left", self.window_left, 0)
        _positive("window_right", self.window_right, 0)

    def rule(self) -> Rule:
        return Rule(left=self.window_left, right=self.window_right)


@dataclass
class _Blocks(AttentionBias):
    """Queries and keys in N blocks each, end to end in a batch of 1; block n of one sees block n of the other."""

    q_seqinfo: SeqLens
    k_seqinfo: SeqLens

    def rule(self) -> Rule:
        return Rule()

    def to(self, device: torch.device) -> Self:
        return replace(self, q_seqinfo=self.q_seqinfo.to(device), k_seqinfo=self.k_seqinfo.to(device))

    def blocks(self, T: int, S: int) -> list[tuple[slice, slice]]:
        for name, info, letter, size in (("q", self.q_seqinfo, "T", T), ("k", self.k_seqinfo, "S", S)):
            if info.seqstart_py[-1] != size:
                raise ShapeError(
                    f"xformers: the blocks of {type(self).__name__}.{name}_seqinfo end at {info.seqstart_py[-1]}; "
                    f"expected {letter}={size}, the tokens there are"
                )
        # A list, as torch 2.14 traces no generator here.
        return list(zip(self.q_seqinfo.slices(), self.k_seqinfo.slices(), strict=True))

    def lower(self, T: int, S: int, device: torch.device) -> tuple[Mask | None, Tensor | None]:
        blocks, rule = self.blocks(T, S), self.rule()
        q, k = self.q_seqinfo, self.k_seqinfo
        unequal = any(a.stop - a.start != b.stop - b.start for a, b in blocks)
        if not k.in_order() or (rule.top_left and rule.left is not None and unequal):
            return self.dense(T, S, device), None
        q_starts, k_starts, q_sizes, k_sizes = q.seqstart_py, k.seqstart_py, q.seqlen_py, k.seqlen_py
        if k_starts[0]:  # the keys before the first block are a block that no query sees
            q_starts, k_starts, q_sizes, k_sizes = [0, *q_starts], [0, *k_starts], [0, *q_sizes], [0, *k_sizes]
        offsets, *rest = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in (q_starts, k_starts, k_sizes, q_sizes)
        )
        mask: Mask = Packed(offsets) if q_starts == k_starts else Packed(offsets, rest[0])
        if not k.full():
            mask = mask & Lengths(rest[1], rest[2])
        order = rule.mask()
        return (mask if order is None else mask & order), None


@dataclass
class BlockDiagonalMask(_Blocks):
    """Sequences end to end: `from_seqlens([3, 5])`, or `from_tensor_list` of tensors [B, T_n, ...]."""

    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: torch.device | None = None
    ) -> Self:
        q = SeqLens.packed(q_seqlen, device)
        return cls(q, q if kv_seqlen is None else _paired(q, SeqLens.packed(kv_seqlen, device)))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """The mask of these tensors [B_n, T_n, ...], and they end to end [1, sum B_n T_n, ...]."""
        mask = cls.from_seqlens([x.shape[1] for x in tensors for _ in range(x.shape[0])])
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, _end_to_end(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None
    ) -> tuple[Self, Tensor, Tensor, Tensor | None]:
        """The same for queries, keys and values of their own lengths."""
        pairs = [(q.shape[0], k.shape[0]) for q, k in zip(tensors_q, tensors_k, strict=True)]
        values = [k.shape[:2] for k in tensors_k] if tensors_v is None else [v.shape[:2] for v in tensors_v]
        if any(a != b for a, b in pairs) or values != [k.shape[:2] for k in tensors_k]:
            raise ShapeError(f"xformers: tensors_q, tensors_k, tensors_v differ in their batches or lengths: {pairs}")
        lengths = [[x.shape[1] for x in xs for _ in range(x.shape[0])] for xs in (tensors_q, tensors_k)]
        mask = cls.from_seqlens(*lengths)
        mask._batch_sizes = [x.shape[0] for x in tensors_q]
        v = None if tensors_v is None else _end_to_end(tensors_v)
        return mask, _end_to_end(tensors_q), _end_to_end(tensors_k), v

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Back from `from_tensor_list`: tensor [1, sum, ...] as a list of [B_n, T_n, ...]."""
        if self.q_seqinfo.seqstart_py != self.k_seqinfo.seqstart_py:
            raise ValueError("xformers: split: queries and keys have other lengths; use split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        parts = self.q_seqinfo, self.k_seqinfo, self._batch_sizes
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(*parts, window_size)


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each sequence causal, its first query at its first key."""

    def rule(self) -> Rule:
        return Rule(top_left=True, right=0)


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each sequence causal, its last query at its last key. More queries than keys: the first of them see nothing."""

    def rule(self) -> Rule:
        return Rule(right=0)


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """The same as BlockDiagonalCausalMask, the last `window_size` keys up to the query's own."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _positive("window_size", self._window_size, 1)

    def rule(self) -> Rule:
        return Rule(top_left=True, left=self._window_size - 1, right=0)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """The same as BlockDiagonalCausalFromBottomRightMask, the last `window_size` keys up to the query's own."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _positive("window_size", self._window_size, 1)

    def rule(self) -> Rule:
        return Rule(left=self._window_size - 1, right=0)


@dataclass
class BlockDiagonalPaddedKeysMask(_Blocks):
    """Queries end to end, keys in blocks of `kv_padding` places of which the first `kv_seqlen[n]` are real."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: torch.device | None = None,
    ) -> Self:
        if causal_diagonal is not None:
            raise Unsupported(
                "xformers: causal_diagonal", ["xFormers accepts it and does nothing with it"], "leave it out"
            )
        q = SeqLens.packed(q_seqlen, device)
        return cls(q, _paired(q, SeqLens.padded(kv_seqlen, kv_padding, device)))

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: type) -> NoReturn:
        _refuse_pages(paged_type.__name__)

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, causal, the last query of a block at its last real key: new tokens at the end of a cache."""

    def rule(self) -> Rule:
        return Rule(right=0)


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same with a window: `window_left` keys before the query's place to `window_right` after it."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        _positive("window_left", self.window_left, 0)
        _positive("window_right", self.window_right, 0)

    def rule(self) -> Rule:
        return Rule(left=self.window_left, right=self.window_right)

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_left: int, window_right: int
    ) -> Self:
        q = SeqLens.packed(q_seqlen)
        return cls(q, _paired(q, SeqLens.padded(kv_seqlen, kv_padding)), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same as BlockDiagonalCausalWithOffsetPaddedKeysMask, the last `window_size` keys up to the query's own."""

    _window_size: int

    def __post_init__(self) -> None:
        _positive("window_size", self._window_size, 1)

    def rule(self) -> Rule:
        return Rule(left=self._window_size - 1, right=0)

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> Self:
        q = SeqLens.packed(q_seqlen)
        return cls(q, _paired(q, SeqLens.padded(kv_seqlen, kv_padding)), window_size)


@dataclass
class BlockDiagonalGappyKeysMask(_Blocks):
    """Queries end to end; block n of the keys begins at `kv_seqstarts[n]` and has `kv_seqlen[n]`, with room between."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: torch.device | None = None,
    ) -> Self:
        q = SeqLens.packed(q_seqlen, device)
        return cls(q, _paired(q, SeqLens.gappy(kv_seqstarts, kv_seqlen, device)))

    def make_paged(self, block_tables: Tensor, page_size: int, notional_padding: int, paged_type: type) -> NoReturn:
        _refuse_pages(paged_type.__name__)


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """The same, causal, the last query of a block at its last key."""

    def rule(self) -> Rule:
        return Rule(right=0)


class PagedBlockDiagonalPaddedKeysMask(AttentionBias):
    """Refused: see `Unsupported`'s hint for the same attention over gathered pages."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        _refuse_pages(type(self).__name__)

    @classmethod
    def from_seqlens(cls, *parts: Any, **named: Any) -> NoReturn:
        _refuse_pages(cls.__name__)


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Refused, as PagedBlockDiagonalPaddedKeysMask is."""


class PagedBlockDiagonalGappyKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Refused, as PagedBlockDiagonalPaddedKeysMask is."""


class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """Refused, as PagedBlockDiagonalPaddedKeysMask is."""


def _refuse_pages(name: str) -> NoReturn:
    rows = "kv_seqstarts[n] + n * row" if "Gappy" in name else "kv_padding = row"
    raise Unsupported(
        f"xformers: {name}",
        ["keys that lie in pages are not read through a table here"],
        "gather them, k.unflatten(1, (-1, page_size))[0, block_tables].flatten(0, 2)[None], and take "
        f"{name.removeprefix('Paged')} with {rows}, where row = block_tables.shape[1] * page_size",
    )


def _paired(q: SeqLens, k: SeqLens) -> SeqLens:
    if len(q.seqlen_py) != len(k.seqlen_py):
        raise ShapeError(f"xformers: q_seqlen has {len(q.seqlen_py)} entries, kv_seqlen has {len(k.seqlen_py)}")
    return k


def _positive(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"xformers: {name} must be an int of at least {least}, got {value!r}")


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in tensors])[None]
