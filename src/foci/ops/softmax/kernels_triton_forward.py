"""Triton kernels of the forward: one pass over the live keys, split over programs and merged where rows are few."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core import tune
from foci.core.tune import Config, Target
from foci.tiles.random import kept, row_coins
from foci.tiles.softmax import (
    between,
    border,
    borders,
    conclude,
    join,
    join_parts,
    join_sink,
    keys_of,
    logits,
    share,
    stretches,
)

FEWEST = 256  # keys that are worth a program of their own


def forward(call: Any, table: Tensor | None = None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """out [B,T,H,V] in v's dtype (or another) and lse [B,T,H] in float32.

    With a table [B,M], k and v are pages [P,page,G,..], and key j of row b is row j % page of page table[b, j // page].
    """
    B, T, S, H, G, K, V = call.sizes
    page = 0 if table is None else S
    S = S if table is None else S * table.shape[1]
    q, device = call.q, call.q.device
    target = tune.target_of(device)
    R = H // G
    # Few tokens: the heads that share a key head are rows of one tile, so that its keys are read once.
    together = R > 1 and T < 64
    rows, heads = (T * R, G) if together else (T, H)
    config = _configured(call, rows, (K, V), page > 0, target)
    blocks = -(-rows // config["BLOCK_T"]) * heads * B
    columns = -(-V // config["BLOCK_V"])
    # A program with few rows waits for memory: two of them share a processor, where tiles of keys leave room for two.
    # On an H200 more than 32 rows of more than 64 channels do not wait.
    two = rows <= (32 if target.arch == 90 and max(K, V) > 64 else 64)
    two = two and 2 * _room(config, q.dtype.itemsize) <= target.shared
    splits = _splits(call, T, S, config["BLOCK_S"], blocks * columns, target, two)
    out = torch.empty(B, T, H, V, dtype=dtype or q.dtype, device=device)
    lse = torch.empty(B, T, H, dtype=torch.float32, device=device)
    sums, tops, masses = out, lse, lse
    if splits > 1:
        sums = lse.new_empty(splits, B, T, H, V)
        tops, masses = lse.new_empty(2, splits, B, T, H)
    bias, dense = (None if x is None else x.expand(B, H, T, S) for x in (call.bias, call.dense))
    low, high = call.band_low, call.band_high
    tune.launch(
        _attend_kernel, (blocks, columns, splits),
        q, call.k, call.v, bias, call.sink, call.seed, dense, call.q_offsets, call.kv_offsets, call.kv_lengths,
        call.q_lengths, low, high, table, sums, tops, masses,
        *(None if x is None else x.stride() for x in (q, call.k, call.v, bias, dense, table)), call.k.shape[0],
        B, T, S, H, heads, rows, 0 if call.q_offsets is None else call.q_offsets.shape[0] - 1,
        int(low is not None and low.numel() > 1), int(high is not None and high.numel() > 1), call.left, call.right,
        call.scale, call.softcap, int(call.dropout * 2**53), 1 / (1 - call.dropout), splits,
        config=config, PAGE=page, R=R, K=K, V=V, END=call.causal_end, START=call.causal_start, TOGETHER=together,
        PARTIAL=splits > 1, PLACED=call.seed is not None and call.seed.dim() == 1,
        NEAR=_near(call, bias, dense, config), PRECISE=q.dtype == torch.float32, ASCENDING=call.ascending,
        PRECISION=tune.precision(q.dtype, target),
    )  # fmt: skip
    if splits > 1:
        merge(sums, tops, masses, call.sink, out, lse, target)
    return out, lse


def merge(
    sums: Tensor, tops: Tensor, masses: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, target: Target
) -> None:
    """out and lse of parts over disjoint keys: sums [splits,B,T,H,V], tops and masses [splits,B,T,H] (tiles: join)."""
    splits, *_, H, V = sums.shape
    rows = lse.numel()
    config = tune.configure("softmax_merge", (V,), functools.partial(_merge_rule, V=V), target)
    tune.launch(
        _merge_kernel, (rows,), sums, tops, masses, sink, out, lse, rows, H, splits,
        config=config, V=V,
    )  # fmt: skip


def _near(call: Any, bias: Tensor | None, dense: Tensor | None, config: Config) -> bool:
    """Whether places within a tile fit into 32 bits (any that are not those of tensors that are very far apart)."""
    rows = config["BLOCK_S"]
    for x in (call.q, call.k, call.v):
        _, step, _, stride = x.stride()
        if rows * step + 512 * stride >= 2**31:
            return False
    for x in (bias, dense):
        if x is not None and sum(n * step for n, step in zip(x.shape[1:], x.stride()[1:], strict=True)) >= 2**31:
            return False
    return True


def _room(config: Config, size: int) -> int:
    """Bytes of shared memory that keys and values take while they are on their way."""
    return max(1, config.stages - 1) * config["BLOCK_S"] * (config["BLOCK_K"] + config["BLOCK_V"]) * size


def _splits(call: Any, T: int, live: int, block: int, programs: int, target: Target, two: bool) -> int:
    """Programs that share the keys of a block of queries, each with FEWEST keys at least, and as many blocks of them.

    One for every processor in all, or two. On an H200 none share where more than half of the processors have work
    without that: of 2048 keys to merge took longer than the others saved.
    """
    if target.arch == 90 and 2 * programs > target.processors:
        return 1
    if call.left is not None and (call.right is not None or call.causal_end):
        live = min(live, call.left + (0 if call.causal_end else call.right) + T)
    room = min((1 + two) * target.processors // programs, live // FEWEST)
    if room <= 1:
        return 1
    blocks = -(-live // block)
    return -(-blocks // -(-blocks // room))


def _configured(call: Any, rows: int, widths: tuple[int, int], paged: bool, target: Target) -> Config:
    few = 128 if rows > 64 else 64 if rows > 32 else 32 if rows > 16 else 16
    K, V = (_power(max(width, 16)) for width in widths)
    extra = (call.bias is not None) + (call.dense is not None) + (call.q_offsets is not None) + (call.seed is not None)
    key = (call.q.dtype.itemsize, K, V, few, min(2, extra), paged)
    return tune.configure(
        "softmax_forward", key, functools.partial(_rule, key=key), target, vary=_MANY if few == 128 else _FEW
    )


_FEW = {"BLOCK_S": (32, 64, 128)}
_MANY = {"BLOCK_T": (32, 64, 128), **_FEW}


def _power(size: int) -> int:
    """The next power of two. Triton's own function of that name costs ten times as much."""
    return 1 << (size - 1).bit_length()


# Keys at a time and stages where few rows wait for memory, as measured on an H200: by the wider of K and V, 64 at
# least, and by whether keys lie in pages.
_WAITING = {
    (64, False): (128, 4), (64, True): (128, 4), (128, False): (128, 3), (128, True): (64, 4),
    (256, False): (64, 3), (256, True): (64, 3),
}  # fmt: skip


@functools.cache
def _rule(target: Target, key: tuple[int, int, int, int, int, bool]) -> Config:
    """Tiles of queries and keys that leave room in registers and shared memory; K beyond BLOCK_K goes in a loop.

    key: bytes of a number, K and V as powers of two, at least as many rows as there are, where those are few, and how
    many things beyond q, k and v are read or made for every pair (2: two or more), and whether keys lie in pages.
    """
    size, *widths, few, laden, paged = key
    roomy = target.shared > 160_000
    wgmma = target.kind == "cuda" and target.arch in (90, 100)  # products that leave their operands in shared memory
    full = (512 if roomy else 256) // size
    whole = target.kind == "cuda" and target.arch == 90 and max(widths) <= 256 and few == 128
    if size == 4 and max(widths) > full and not whole:
        full = 64
    BLOCK_K, BLOCK_V = (min(width, full) for width in widths)
    width = max(BLOCK_K, BLOCK_V) * size // 2  # in numbers of two bytes
    many = laden > (1 if wgmma else 0)
    if size == 4:  # three products of TF32 take the registers of three
        BLOCK_T, BLOCK_S = (128, 64) if max(widths) <= 64 and wgmma and not laden else (32, 32)
    elif width <= 64:
        BLOCK_T, BLOCK_S = 64 if many else 128, (128 if wgmma else 64) // (2 if laden else 1)
    elif width <= 128:
        BLOCK_T, BLOCK_S = 64 if many else 128, 32 if laden else 64
    else:
        BLOCK_T, BLOCK_S = 32 if many else 64, 32 if laden else 64
    warps, stages = 8, 1 if size == 4 and max(widths) > full else 3 if width <= 128 and roomy else 2
    if size == 4 and whole and BLOCK_T == 32:  # as measured on an H100
        BLOCK_T, BLOCK_S, warps, stages = (128, 64, 8, 1) if max(widths) > 128 else (32, 32, 4, 2)
    hopper = target.kind == "cuda" and target.arch == 90 and size == 2
    if hopper and laden < 2:  # as measured on an H200
        if width <= 128:
            BLOCK_T, BLOCK_S, warps, stages = 64, 64, 4, 2 if width <= 64 and not laden else 3
            if few < 64:
                BLOCK_S = 128
        elif max(widths) <= 256 and not laden:
            BLOCK_T, BLOCK_S = 128, 64
    if few < BLOCK_T:
        BLOCK_T, warps = few, 4 if few < 64 and size == 2 and width <= 128 else 8
        if hopper and few < 64 and not laden and max(widths) <= 256:
            warps, (BLOCK_S, stages) = 4, _WAITING[max(width, 64), paged]
    return Config({"BLOCK_T": BLOCK_T, "BLOCK_S": BLOCK_S, "BLOCK_K": BLOCK_K, "BLOCK_V": BLOCK_V}, warps, stages)


def _merge_rule(target: Target, V: int) -> Config:
    BLOCK_V = _power(V)
    return Config({"BLOCK_P": max(4, min(64, 4096 // BLOCK_V)), "BLOCK_V": BLOCK_V}, 4, 2)


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, bias_ptr, sink_ptr, seed_ptr, dense_ptr, q_offsets_ptr, kv_offsets_ptr, kv_lengths_ptr,
    q_lengths_ptr, low_ptr, high_ptr, table_ptr, out_ptr, lse_ptr, mass_ptr,
    q_strides, k_strides, v_strides, bias_strides, dense_strides, table_strides, pages,
    B, T, S, H, heads, rows, documents, step_low, step_high, left, right, scale, softcap, threshold, boost, splits,
    PAGE: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, END: tl.constexpr, START: tl.constexpr,
    TOGETHER: tl.constexpr, PARTIAL: tl.constexpr, PLACED: tl.constexpr, NEAR: tl.constexpr,
    PRECISE: tl.constexpr, ASCENDING: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """out = sum_s 2^(z - top) v_s / sum_s 2^(z - top) of a block of rows, z in base 2 (arXiv 2205.14135).

    A row is a query of one head, or (TOGETHER) of one of the R heads that share a key head.
    """
    blocks = (rows + BLOCK_T - 1) // BLOCK_T
    pid = tl.program_id(0)
    block = blocks - 1 - pid % blocks  # under Causal the last queries see most: they begin first
    head, b = pid // blocks % heads, (pid // blocks // heads).to(tl.int64)
    column = tl.program_id(1) * BLOCK_V
    mask = (q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr,
            low_ptr, step_low, high_ptr, step_high, END, START, left, right)  # fmt: skip

    row = block * BLOCK_T + tl.arange(0, BLOCK_T)
    written = row < rows
    row = tl.minimum(row, rows - 1)
    if TOGETHER:
        t, h, g = row // R, head * R + row % R, head
    else:
        t, h, g = row, head + row * 0, head // R
    t_far, h_far, g_far = t.to(tl.int64), h.to(tl.int64), g.to(tl.int64)

    q_rows = q_ptr + b * q_strides[0] + t_far * q_strides[1] + h_far * q_strides[2]
    q, bias_rows, dense_rows, coins = None, None, None, None
    if BLOCK_K >= K:
        q = _load(q_rows, None, q_strides[3], 0, K, NEAR, BLOCK_K)
    if bias_ptr is not None:
        bias_rows = _beside(bias_ptr, bias_strides, b, h, t, head, TOGETHER, NEAR)
    if dense_ptr is not None:
        dense_rows = _beside(dense_ptr, dense_strides, b, h, t, head, TOGETHER, NEAR)
    if seed_ptr is not None:
        coins = row_coins(seed_ptr, b, h, t, PLACED)[:, None]

    low, high = keys_of(mask, b, t, T, S)
    start, inner, outer, stop = stretches(low, high, BLOCK_S)
    if dense_ptr is not None:
        inner, outer = start, start
    if PARTIAL:
        start, inner, outer, stop = share(start, inner, outer, stop, tl.program_id(2), splits, BLOCK_S)

    queries = (q, q_rows, q_strides[3], low, high, bias_rows, dense_rows, coins)
    k_base, v_base, where = k_ptr + g_far * k_strides[2], v_ptr + g_far * v_strides[2], None
    if table_ptr is not None:
        where = (table_ptr + b * table_strides[0], table_strides[1], pages)
    else:
        k_base, v_base = k_base + b * k_strides[0], v_base + b * v_strides[0]
    keys = (k_base, k_strides, v_base, v_strides, column, stop)
    rest = (scale, softcap, bias_strides, dense_strides, seed_ptr, threshold, q_offsets_ptr, S)
    if PAGE > 0:  # all of it again: a name of its own for one of them does not compile where that is None
        rest = (scale, softcap, bias_strides, dense_strides, seed_ptr, threshold, left, S)
    top, mass = tl.full((BLOCK_T,), -float("inf"), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for i in range(borders(start, inner, outer, stop, BLOCK_S)):
        s0 = border(i, start, inner, outer, BLOCK_S)
        acc, top, mass = _step(
            acc, top, mass, s0, _places(where, s0, stop, PAGE, BLOCK_S), queries, keys, rest, True, PAGE, K, V, PLACED,
            NEAR, PRECISE, ASCENDING, PRECISION, BLOCK_S, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    if dense_ptr is None:
        ahead = _places(where, inner, stop, PAGE, BLOCK_S)
        for i in range((outer - inner) // BLOCK_S):
            s0, places = inner + i * BLOCK_S, ahead
            ahead = _places(where, s0 + BLOCK_S, stop, PAGE, BLOCK_S)  # a block before its keys are loaded
            acc, top, mass = _step(
                acc, top, mass, s0, places, queries, keys, rest, False, PAGE, K, V, PLACED, NEAR, PRECISE,
                ASCENDING, PRECISION, BLOCK_S, BLOCK_K, BLOCK_V,
            )  # fmt: skip

    if seed_ptr is not None:
        acc *= boost
    places = (b * T + t_far) * H + h
    if PARTIAL:
        places += tl.program_id(2).to(tl.int64) * B * T * H
        tl.store(mass_ptr + places, mass, mask=written)
        result = top
    else:
        if sink_ptr is not None:
            fade, top, mass = join_sink(tl.load(sink_ptr + h).to(tl.float32), top, mass)
            acc *= fade[:, None]
        portion, result = conclude(top, mass)
        acc *= portion[:, None]
    if column == 0:
        tl.store(lse_ptr + places, result, mask=written)
    d = column + tl.arange(0, BLOCK_V)
    tl.store(
        out_ptr + (places * V)[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty),
        mask=written[:, None] & (d < V)[None, :],
    )  # fmt: skip


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    acc, top, mass, s0, places, queries, keys, rest, MASKED: tl.constexpr, PAGE: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, PLACED: tl.constexpr, NEAR: tl.constexpr, PRECISE: tl.constexpr, ASCENDING: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One block of keys (`_places`) joins. MASKED: some of them lie behind the end, or are not for every row."""
    q, q_rows, q_stride, low, high, bias_rows, dense_rows, coins = queries
    k_base, k_strides, v_base, v_strides, column, stop = keys
    scale, softcap, bias_strides, dense_strides, seed_ptr, threshold, partly, S = rest
    beside = tl.arange(0, BLOCK_S)
    s, s0 = s0 + beside, tl.multiple_of(s0.to(tl.int64), BLOCK_S)  # so that a bias is read eight at a time
    if not NEAR:
        beside = beside.to(tl.int64)
    real, wanted, there = None, None, None
    if MASKED:
        real = s < stop
        wanted = real
        there = beside < (S - s0).to(tl.int32)  # of a bias: known to be so eight at a time
        seen = between(s[None, :], low[:, None], high[:, None])
        if partly is not None:  # documents, or a window over pages
            # A value that no row of this block sees may be NaN, and 0 NaN is NaN: it is not read.
            wanted = tl.max(seen.to(tl.int32), 0) > 0
    if PAGE > 0:
        page, place = places
        k_rows = k_base + page * k_strides[0] + place * k_strides[1]
        v_rows = v_base + page * v_strides[0] + place * v_strides[1]
    else:
        k_rows = k_base + s0 * k_strides[1] + beside * k_strides[1]
        v_rows = v_base + s0 * v_strides[1] + beside * v_strides[1]
    products = _products(q, q_rows, q_stride, k_rows, k_strides[3], real, K, NEAR, PRECISION, BLOCK_K)
    bias = None
    if bias_rows is not None:
        bias = _across(bias_rows, s0, beside, bias_strides[3], there).to(tl.float32)
    x, factor = logits(products, scale, softcap, bias, PRECISE, ASCENDING)
    if MASKED:
        if dense_rows is not None:
            seen &= _across(dense_rows, s0, beside, dense_strides[3], there) != 0
        x = tl.where(seen, x, -float("inf"))
    p, fade, top, mass = join(x, factor, top, mass)
    if coins is not None:
        p = tl.where(kept(coins, seed_ptr, s[None, :], threshold, PLACED), p, 0.0)
    v = _load(v_rows, wanted, v_strides[3], column, V, NEAR, BLOCK_V)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, top, mass


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    q, q_rows, q_stride, k_rows, k_stride, real,
    K: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """q k^T [queries, keys] in float32; heads wider than BLOCK_K part by part, as a whole row of q has no room."""
    if q is not None:
        k = _load(k_rows, real, k_stride, 0, K, NEAR, BLOCK_K)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    else:
        products = tl.zeros((q_rows.shape[0], k_rows.shape[0]), tl.float32)
        for first in range(0, K, BLOCK_K):
            q_part = _load(q_rows, None, q_stride, first, K, NEAR, BLOCK_K)
            k = _load(k_rows, real, k_stride, first, K, NEAR, BLOCK_K)
            products = tl.dot(q_part, tl.trans(k), products, input_precision=PRECISION)
    return products


@triton.jit
def _load(rows, real, stride, first, WIDTH: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, BLOCK]: the columns first.. of WIDTH of the rows that are real (None: all of them), and zeros."""
    d = first + tl.arange(0, BLOCK)
    if not NEAR:
        d = d.to(tl.int64)
    places = rows[:, None] + d[None, :] * stride
    if real is None:
        if WIDTH % BLOCK == 0:
            return tl.load(places)
        else:
            return tl.load(places, mask=(d < WIDTH)[None, :], other=0.0)
    else:
        if WIDTH % BLOCK == 0:
            return tl.load(places, mask=real[:, None], other=0.0)
        else:
            return tl.load(places, mask=real[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def _places(where, s0, stop, PAGE: tl.constexpr, BLOCK_S: tl.constexpr):  # type: ignore[no-untyped-def]
    """(pages, places in them) of a block of keys, int64; page 0 behind the end. Where nothing lies in pages: nothing.

    The table may say anything: its numbers are moved inside the pages there are.
    """
    if where is None:
        return s0, s0
    else:
        row_ptr, step, pages = where
        beside, s0 = tl.arange(0, BLOCK_S), s0.to(tl.int64)
        if PAGE % BLOCK_S == 0:
            s, place = s0, s0 % PAGE + beside
        else:
            s = s0 + beside
            place = s % PAGE
        page = tl.load(row_ptr + s // PAGE * step, mask=s < stop, other=0)
        return tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64), place


@triton.jit
def _beside(ptr, strides, b, h, t, head, TOGETHER: tl.constexpr, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the rows of a bias or a dense mask begin: (pointer, places [rows]), places in 32 bits where they fit."""
    if not NEAR:
        t, h = t.to(tl.int64), h.to(tl.int64)
    if TOGETHER:
        return ptr + b * strides[0], t * strides[2] + h * strides[1]
    else:
        return ptr + b * strides[0] + head.to(tl.int64) * strides[1], t * strides[2]


@triton.jit
def _across(rows, s0, beside, stride, there):  # type: ignore[no-untyped-def]
    """[rows, keys] of a bias or a dense mask; 0 for keys that are not there."""
    places = rows[0] + s0 * stride + (rows[1][:, None] + beside[None, :] * stride)
    if there is None:
        return tl.load(places)
    else:
        return tl.load(places, mask=there[None, :], other=0)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, tops_ptr, masses_ptr, sink_ptr, out_ptr, lse_ptr, rows, H, splits,
    V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The algebra of merge/partial.py on sums that are not divided yet: no rounding of an lse comes in between.

    A program has one row, and BLOCK_P of its parts at a time: these are read together, not one after another.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_V)
    inside = d < V
    top, mass, acc = -float("inf"), 0.0, tl.zeros((BLOCK_V,), tl.float32)
    for first in range(0, splits, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        real, place = part < splits, part.to(tl.int64) * rows + row
        tops = tl.load(tops_ptr + place, mask=real, other=-float("inf"))
        masses = tl.load(masses_ptr + place, mask=real, other=0.0)
        sums = tl.load(sums_ptr + (place * V)[:, None] + d[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        fade, weights, top, mass = join_parts(tops, masses, top, mass)
        acc = acc * fade + tl.sum(sums * weights[:, None], 0)
    if sink_ptr is not None:
        fade, top, mass = join_sink(tl.load(sink_ptr + row % H).to(tl.float32), top, mass)
        acc *= fade
    portion, lse = conclude(top, mass)
    tl.store(lse_ptr + row, lse)
    tl.store(out_ptr + row * V + d, acc * portion, mask=inside)
