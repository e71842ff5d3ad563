"""flash-attn 2.8's flash_attn_with_kvcache: the cache written in place, rotary positions, rows, padding and pages."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.compat.flash_attn.arguments import alibi, check_inside, check_own, indices, join, logits, mask_of, per_head
from foci.core.errors import ShapeError, Unsupported
from foci.core.spec import accumulator
from foci.ops.arguments import check_apart, switch
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
    block_table [B, pages]: the caches are pages [P, page, G, D]; reading gathers (copies) what the rows hold. What the
    table holds for no key that is read or written may be anything: behind a row's end, before its window or leftpad.
    rotary_cos, rotary_sin [positions, R/2] turn the first R numbers of k, and of q, at cache_seqlens + t (of q at
    cache_seqlens when neither causal nor windowed); they need k and v. rotary_interleaved: pairs (0, 1), (2, 3), ...,
    otherwise (0, R/2), (1, R/2 + 1), ...
    causal and window_size: the last query stands at the last key of its row. A row that sees nothing: out 0, lse -inf.

    Raises ShapeError, ValueError or TypeError before the cache is touched (a GPU is waited for); Unsupported for a
    gradient (there is no backward, as in flash-attn) and for num_splits > 1, since foci splits no keys here.
    """
    _refuse((q, k_cache, v_cache, k, v), num_splits, rotary_interleaved, return_softmax_lse)
    mask = mask_of(causal, window_size)
    with torch.no_grad():
        B, T = q.shape[:2]
        cache = _Cache(k_cache, v_cache, B, cache_batch_idx, block_table)
        scale, cap = logits(softmax_scale, softcap)
        bind(q, *cache.stand_ins(), softcap=cap, scale=scale)  # raises now what else would come after the write
        held = _lengths(cache_seqlens, B, cache.capacity, k is None, q)
        starts = _starts(cache_leftpad, held)
        slopes = None if alibi_slopes is None else per_head(alibi_slopes, B, q)
        if rotary_cos is not None or rotary_sin is not None:
            q, k = _rotated(q, k, held, mask is not None, (rotary_cos, rotary_sin), rotary_interleaved)
        reach = None if window_size[0] == -1 else T + min(window_size[0], cache.capacity)
        total = cache.extend(k, v, held, starts, reach)
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
        if rows is None and table is None and k.shape[0] < B:
            raise ShapeError(f"flash_attn: k_cache has {k.shape[0]} rows; expected at least {B}, as q has")
        self.k, self.v, self.B, self.page = k, v, B, max(k.shape[1], 1)
        self.rows = None if rows is None else indices("cache_batch_idx", rows, B, k.device)
        self.table = None if table is None else indices("block_table", table, B, k.device, "pages")
        if self.rows is not None:
            check_inside("cache_batch_idx", self.rows, k.shape[0], "a row")
        self.capacity = k.shape[1] * (1 if self.table is None else self.table.shape[1])

    def stand_ins(self) -> tuple[Tensor, Tensor]:
        """Tensors like the keys and values of the batch, without their memory."""
        k, v = (x.new_empty(1).expand(self.B, 1, *x.shape[2:]) for x in (self.k, self.v))
        return k, v

    def extend(
        self, k: Tensor | None, v: Tensor | None, held: Tensor, starts: Tensor | None, reach: int | None
    ) -> Tensor:
        """The lengths when k and v, if given, are written behind what each row holds; all is checked before.

        No key before `starts` is read, nor one more than `reach` before the end.
        """
        writes = k is not None or v is not None
        total = held + self._count(k, v, held) if writes else held
        if self.table is not None:
            first = torch.zeros_like(held) if starts is None else starts
            if reach is not None:
                first = first.maximum((total - reach).minimum(held))
            page = torch.arange(self.table.shape[1], device=held.device)
            end = torch.where(first < total, total, 0)
            needed = (page >= first[:, None] // self.page) & (page * self.page < end[:, None])
            check_inside("block_table", self.table, self.k.shape[0], "a page", needed)
            if writes:
                written = needed & (held < total)[:, None] & (page >= held[:, None] // self.page)
                check_own("block_table", self.table, self.k.shape[0], "a page", needed, written)
        if writes and self.rows is not None:
            everyone = torch.ones_like(held, dtype=torch.bool)
            check_own("cache_batch_idx", self.rows, self.k.shape[0], "a row", everyone, held < total)
        if k is not None and v is not None:
            row, column = self._index(held[:, None] + torch.arange(k.shape[1], device=held.device))
            self.k[row, column], self.v[row, column] = k, v
        return total

    def _count(self, k: Tensor | None, v: Tensor | None, held: Tensor) -> int:
        """The tokens of k and v, which fit."""
        if k is None or v is None:
            raise ValueError(f"flash_attn: {'k' if k is None else 'v'} is None; expected k and v, or neither")
        expected = (self.B, k.shape[1], *self.k.shape[2:])
        if k.shape != expected or v.shape != (*expected[:3], self.v.shape[-1]):
            got = f"k is {list(k.shape)} and v is {list(v.shape)}"
            raise ShapeError(f"flash_attn: {got}; expected {list(expected)} for both, as the cache has")
        for name, x in (("k", k), ("v", v)):
            if x.dtype != self.k.dtype or x.device != self.k.device:
                raise ValueError(
                    f"flash_attn: {name} is {x.dtype} on {x.device}; expected {self.k.dtype} on {self.k.device}, as "
                    "the cache is"
                )
        for name, cache in (("k_cache", self.k), ("v_cache", self.v)):
            check_apart("flash_attn", name, cache, "call")
        if (longest := max(held.tolist(), default=0) + k.shape[1]) > self.capacity:
            raise ValueError(f"flash_attn: cache_seqlens and k need {longest} places; there are {self.capacity}")
        return k.shape[1]

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
            page = self.table.gather(1, place // self.page)
            return page.clamp(0, max(self.k.shape[0] - 1, 0)), place % self.page  # moved inside: what is not needed
        rows = torch.arange(self.B, device=place.device) if self.rows is None else self.rows
        return rows[:, None], place


def _ends(total: Tensor, T: int, S: int, ordered: bool) -> Lengths | None:
    """Where each row ends, unless all fill the keys."""
    lengths = total.tolist()
    if all(n == S for n in lengths):
        return None
    # Without q_lengths, a row of fewer keys than queries counts as a padded one, which begins at the start.
    return Lengths(total, torch.full_like(total, T) if ordered and min(lengths) < T else None)


def _refuse(
    tensors: tuple[Tensor | None, ...], num_splits: int, rotary_interleaved: bool, return_softmax_lse: bool
) -> None:
    switch("flash_attn", "rotary_interleaved", rotary_interleaved)
    switch("flash_attn", "return_softmax_lse", return_softmax_lse)
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
    if isinstance(given, bool) or not isinstance(given, int | Tensor):
        raise TypeError(f"flash_attn: cache_seqlens must be an int, or an int32 or int64 tensor [{B}], got {given!r}")
    if isinstance(given, int):
        given = torch.full((B,), given, device=q.device)
    held = indices("cache_seqlens", given, B, q.device)
    values = held.tolist()
    if any(not 0 <= n <= capacity for n in values):
        raise ValueError(f"flash_attn: cache_seqlens is {values}; expected 0 to {capacity}, the cache's places")
    return held


def _starts(leftpad: Tensor | None, held: Tensor) -> Tensor | None:
    if leftpad is None:
        return None
    starts = indices("cache_leftpad", leftpad, held.shape[0], held.device)
    if bool(((starts < 0) | (starts > held)).any()):
        raise ValueError(f"flash_attn: cache_leftpad is {starts.tolist()}; expected 0 to cache_seqlens for each row")
    return starts


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
