"""flash-attn 2.8's flash_attn_with_kvcache: the cache written in place, rotary positions, rows, padding and pages."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.compat.flash_attn.arguments import alibi, join, logits, mask_of, per_head
from foci.core.errors import ShapeError, Unsupported
from foci.core.spec import accumulator
from foci.ops.masks import Lengths
from foci.ops.softmax.api import attention_with_lse
from foci.ops.softmax.call import bind


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens to a cache, after k and v, if given, are written behind what it holds.

    q [B,T,H,D]; k_cache, v_cache [C,S,G,D], changed in place; k, v [B,T',G,D]; out [B,T,H,D], lse [B,H,T] on request.
    cache_seqlens: what each row holds before, an int or int32/int64 [B]; all of S when absent and nothing is written.
    cache_batch_idx [B]: the cache row of each batch row. cache_leftpad [B]: where a row's keys begin.
    block_table [B, pages]: the caches are pages [P, page, G, D]; reading gathers (copies) what the rows hold.
    rotary_cos, rotary_sin [positions, R/2] turn the first R numbers of k, and of q, at cache_seqlens + t (of q at
    cache_seqlens when neither causal nor windowed); they need k and v. rotary_interleaved: pairs (0, 1), (2, 3), ...,
    otherwise (0, R/2), (1, R/2 + 1), ...
    causal and window_size: the last query stands at the last key of its row. A row that sees nothing: out 0, lse -inf.

    Raises ShapeError or ValueError, before the cache is touched; Unsupported where a gradient is wanted (there is no
    backward, as in flash-attn) and for num_splits > 1, since foci splits no keys here.
    """
    _refuse((q, k_cache, v_cache, k, v), num_splits)
    mask = mask_of(causal, window_size)
    with torch.no_grad():
        B, T = q.shape[:2]
        cache = _Cache(k_cache, v_cache, B, cache_batch_idx, block_table)
        scale, cap = logits(softmax_scale, softcap)
        bind(q, *cache.stand_ins(), softcap=cap, scale=scale)  # raises now what else would come after the write
        held = _lengths(cache_seqlens, B, cache.capacity, k is None, q)
        starts = _starts(cache_leftpad, held, B)
        slopes = None if alibi_slopes is None else per_head(alibi_slopes, B, q)
        if rotary_cos is not None or rotary_sin is not None:
            q, k = _rotated(q, k, held, mask is not None, (rotary_cos, rotary_sin), rotary_interleaved)
        total = held if k is None and v is None else cache.append(k, v, held)
        keys, values, total = cache.read(total, starts)
        if T == 1 and causal and window_size[0] == -1:
            mask = None  # a single query at the end sees everything
        mask = join(mask, _ends(total, T, keys.shape[1], mask is not None))
        bias = None
        if slopes is not None:
            rows, columns = (torch.arange(n, device=q.device) for n in (T, keys.shape[1]))
            bias = alibi(slopes, rows + (total - T)[:, None], columns[None])
        out, lse = attention_with_lse(q, keys, values, mask=mask, bias=bias, softcap=cap, scale=scale)
    return (out, lse.transpose(1, 2)) if return_softmax_lse else out


class _Cache:
    """Both caches behind one indexing: rows of the batch, or pages of a table."""

    def __init__(self, k: Tensor, v: Tensor, B: int, rows: Tensor | None, table: Tensor | None) -> None:
        if rows is not None and table is not None:
            raise ValueError("flash_attn: cache_batch_idx and block_table were both given; expected one of them")
        if k.shape[:3] != v.shape[:3]:
            raise ShapeError(f"flash_attn: k_cache is {list(k.shape)} but v_cache is {list(v.shape)}")
        for name, index in (("cache_batch_idx", rows), ("block_table", table)):
            if index is not None and index.shape[0] != B:
                raise ShapeError(f"flash_attn: {name} has {index.shape[0]} rows; expected {B}, as q has")
        if rows is None and table is None and k.shape[0] < B:
            raise ShapeError(f"flash_attn: k_cache has {k.shape[0]} rows; expected at least {B}, as q has")
        self.k, self.v, self.B, self.rows, self.table = k, v, B, rows, table
        self.page = k.shape[1]
        self.capacity = self.page if table is None else self.page * table.shape[1]

    def stand_ins(self) -> tuple[Tensor, Tensor]:
        """Tensors like the keys and values of the batch, without their memory."""
        k, v = (x.new_empty(1).expand(self.B, 1, *x.shape[2:]) for x in (self.k, self.v))
        return k, v

    def append(self, k: Tensor | None, v: Tensor | None, held: Tensor) -> Tensor:
        """Write k and v behind what each row holds; the new lengths."""
        if k is None or v is None:
            raise ValueError(f"flash_attn: {'k' if k is None else 'v'} is None; expected k and v, or neither")
        expected = (self.B, k.shape[1], *self.k.shape[2:])
        if k.shape != expected or v.shape != (*expected[:3], self.v.shape[-1]):
            got = f"k is {list(k.shape)} and v is {list(v.shape)}"
            raise ShapeError(f"flash_attn: {got}; expected {list(expected)} for both, as the cache has")
        if k.dtype != self.k.dtype or v.dtype != self.v.dtype:
            raise ValueError(f"flash_attn: k is {k.dtype}, v is {v.dtype}; expected {self.k.dtype}, as the cache is")
        total = held + k.shape[1]
        if int(total.max()) > self.capacity:
            raise ValueError(
                f"flash_attn: cache_seqlens and k need {int(total.max())} places; there are {self.capacity}"
            )
        place = held[:, None] + torch.arange(k.shape[1], device=held.device)
        row, column = self._index(place)
        self.k[row, column], self.v[row, column] = k, v
        return total

    def read(self, total: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values [B, longest, G, D] of all rows, and their lengths; views unless rows, pages or starts move."""
        longest = int(total.max()) if total.numel() else 0
        if self.rows is None and self.table is None and starts is None:
            return self.k[: self.B, :longest], self.v[: self.B, :longest], total
        place = torch.arange(longest, device=total.device)[None].expand(self.B, -1)
        if starts is not None:
            place, total = (place + starts[:, None]).clamp(max=max(longest - 1, 0)), total - starts
        row, column = self._index(place)
        return self.k[row, column], self.v[row, column], total

    def _index(self, place: Tensor) -> tuple[Tensor, Tensor]:
        if self.table is not None:
            return self.table.long().gather(1, place // self.page), place % self.page
        rows = torch.arange(self.B, device=place.device) if self.rows is None else self.rows.long()
        return rows[:, None], place


def _ends(total: Tensor, T: int, S: int, ordered: bool) -> Lengths | None:
    """Where each row ends, unless all fill the keys."""
    lengths = total.tolist()
    if all(n == S for n in lengths):
        return None
    # Without q_lengths, a row of fewer keys than queries counts as a padded one, which begins at the start.
    return Lengths(total, torch.full_like(total, T) if ordered and min(lengths) < T else None)


def _refuse(tensors: tuple[Tensor | None, ...], num_splits: int) -> None:
    if num_splits not in (0, 1):
        raise Unsupported(
            "flash_attn: flash_attn_with_kvcache cannot honour num_splits",
            [f"num_splits is {num_splits}; the keys are not split here"],
            "num_splits=0 leaves the choice to the library, 1 asks for none",
        )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise Unsupported(
            "flash_attn: flash_attn_with_kvcache has no backward",
            ["an input requires a gradient, and the cache is changed in place"],
            "call it under torch.no_grad(), or use flash_attn_func",
        )


def _lengths(given: int | Tensor | None, B: int, capacity: int, reading: bool, q: Tensor) -> Tensor:
    if given is None:
        if not reading:
            raise ValueError("flash_attn: cache_seqlens is None; expected lengths, since k and v are to be written")
        given = capacity
    if isinstance(given, int):
        given = torch.full((B,), given, device=q.device)
    if given.shape != (B,):
        raise ShapeError(f"flash_attn: cache_seqlens has shape {list(given.shape)}; expected [{B}]")
    held = given.long()
    if B and not 0 <= int(held.min()) <= int(held.max()) <= capacity:
        raise ValueError(f"flash_attn: cache_seqlens is {held.tolist()}; expected 0 to {capacity}, the cache's places")
    return held


def _starts(leftpad: Tensor | None, held: Tensor, B: int) -> Tensor | None:
    if leftpad is None:
        return None
    if leftpad.shape != (B,) or bool(((leftpad < 0) | (leftpad > held)).any()):
        raise ValueError(f"flash_attn: cache_leftpad is {leftpad.tolist()}; expected [{B}] from 0 to cache_seqlens")
    return leftpad.long()


def _rotated(
    q: Tensor, k: Tensor | None, held: Tensor, ordered: bool, tables: tuple[Tensor | None, Tensor | None], pairs: bool
) -> tuple[Tensor, Tensor]:
    """q and k turned to their positions; without an order among the queries, all stand at cache_seqlens."""
    cos, sin = tables
    if cos is None or sin is None or k is None:
        raise ValueError("flash_attn: rotary_cos and rotary_sin need each other, and k and v; one of them is None")
    if cos.shape != sin.shape or 2 * cos.shape[-1] > q.shape[-1]:
        raise ShapeError(
            f"flash_attn: rotary_cos is {list(cos.shape)}, rotary_sin is {list(sin.shape)}; expected "
            f"[positions, at most {q.shape[-1] // 2}] for both"
        )
    first = held[:, None]
    of_k = first + torch.arange(k.shape[1], device=k.device)
    of_q = first + torch.arange(q.shape[1], device=q.device) if ordered else first.expand(-1, q.shape[1])
    last = max((int(place.max()) for place in (of_k, of_q) if place.numel()), default=-1)
    if last >= cos.shape[0]:
        raise ValueError(f"flash_attn: rotary_cos has {cos.shape[0]} positions; position {last} is needed")
    return _turn(q, cos[of_q], sin[of_q], pairs), _turn(k, cos[of_k], sin[of_k], pairs)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """x [B,T,H,D] with its first 2n numbers turned by the angles of cos, sin [B,T,n]; rounded once, at the end."""
    n = cos.shape[-1]
    wide = accumulator(x.dtype)
    cos, sin, turned = cos[:, :, None].to(wide), sin[:, :, None].to(wide), x[..., : 2 * n].to(wide)
    a, b = turned.unflatten(-1, (n, 2)).unbind(-1) if pairs else turned.unflatten(-1, (2, n)).unbind(-2)
    both = torch.stack([a * cos - b * sin, a * sin + b * cos], -1 if pairs else -2).flatten(-2)
    return torch.cat([both.to(x.dtype), x[..., 2 * n :]], -1)
