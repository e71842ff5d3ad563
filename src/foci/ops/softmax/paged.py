"""Paged decoding: the newest tokens attend to a paged key/value cache through a page table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from foci.core import plans
from foci.core.errors import ShapeError, Unsupported
from foci.core.flops import warn_uncounted
from foci.core.select import choose
from foci.core.shapes import Signature
from foci.ops.arguments import DTYPES, INTEGERS, by_autocast, scaling
from foci.ops.deferred_checks import raise_unless, unreadable
from foci.ops.masks import FARTHEST, Causal, Lengths, Mask, Window, check_reach
from foci.ops.softmax import gpu
from foci.ops.softmax.api import attention
from foci.ops.softmax.call import Call, Out, Query, Sink, bind, cap
from foci.ops.softmax.spec import SPEC

KeyPages = Float[Tensor, "P page G K"]
ValuePages = Float[Tensor, "P page G V"]
Table = Int[Tensor, "B M"]
RowLengths = Int[Tensor, "B"]

_NAME = "attention_paged"


class _Tensors(NamedTuple):
    q: Query
    k_pages: KeyPages
    v_pages: ValuePages
    table: Table
    lengths: RowLengths
    sink: Sink | None


_SIGNATURE = Signature(_Tensors, _NAME)
_SPEC = replace(SPEC, function=_NAME)


def attention_paged(
    q: Query,
    k_pages: KeyPages,
    v_pages: ValuePages,
    table: Table,
    lengths: RowLengths,
    *,
    softcap: float | None = None,
    sink: Sink | None = None,
    window: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Out:
    """Softmax attention of the T newest tokens of each row to its paged cache.

        k[b,j] = k_pages[table[b, j // page], j % page]          v[b,j] alike, for j < lengths[b]
        out    = attention(q, k, v, mask=Lengths(lengths) & Causal() & Window(window, None))

    The T tokens are the last of the lengths[b] keys, already written to their pages: query i of row b sees the keys
    j <= i + lengths[b] - T, and with `window` at most `window` of them before itself. In a row of fewer than T keys
    query i sees j <= i. A row of length 0 gives out = 0. Pages that no token reads, and their numbers in the table, may
    hold anything: those after the length, and with `window` those before its reach. No gradient. Under autocast q and
    the pages take its dtype.

    q [B,T,H,K], k_pages [P,page,G,K], v_pages [P,page,G,V]: float32, bfloat16 or float16 (float64 where the pages are
    gathered), one dtype, any strides, any page size, H a multiple of G. table [B,M], lengths [B]: int32 or int64.
    softcap, sink [H], scale: those of `attention`.
    backend: "triton" reads the pages in place (on a GPU; with few rows, keys are split over programs); any other
    backend of `attention` gathers them first. None takes the first that can.

    Raises ShapeError, ValueError or TypeError for arguments that do not fit, Unsupported where a gradient is asked for
    or the named backend cannot. On a CPU lengths and table are checked (when compiled, at run time, by a RuntimeError;
    not under a vmap inside a compiled function); on a GPU, to avoid a sync, page numbers and lengths out of range are
    clamped.
    Paper: Kwon et al. 2023, PagedAttention (arXiv 2309.06180).
    """
    given = (q, k_pages, v_pages, sink, lengths, table, softcap, window, scale, backend)
    key, played = plans.try_replay_operator(_NAME, given)
    if played is not None:
        return played[0]
    tensors = _Tensors(q, k_pages, v_pages, table, lengths, sink)
    sizes = _SIGNATURE.bind(tensors._asdict())
    tensors = _check(tensors, sizes)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise Unsupported(f"{_NAME}: it has no gradient", ["an input requires one"], "call it under torch.no_grad()")
    check_reach(_NAME, "window", window)
    if q.device.type == "cpu":
        (_insist if unreadable(table, lengths) else _check_values)(table, lengths, window, sizes)
    call = _bound(tensors, softcap, window, scale)  # before dispatch, so that errors name attention_paged
    if backend in (None, "triton"):
        reasons = gpu.reasons(call) + _table_reasons(sizes) + _transform_reasons()
        if not reasons:
            warn_uncounted(_NAME, "attention to the gathered pages")
            return plans.replay_or_run_one(key, given, _paged, (*call, table))
        if backend is not None:
            raise Unsupported(f"{_NAME}: backend 'triton' cannot run this call", reasons, "backend=None gathers pages")
    k, v, mask = _end_to_end(tensors, window)
    if backend is not None:  # so that a refusal names attention_paged
        choose(_SPEC, bind(q, k, v, mask=mask, softcap=softcap, sink=sink, scale=scale), backend)
    return attention(q, k, v, mask=mask, softcap=softcap, sink=sink, scale=scale, backend=backend)


def _paged(*values: Any) -> Tensor:
    *call, table = values
    return gpu.forward_paged(Call(*call), table)


def gathered(pages: Tensor, table: Tensor) -> Tensor:
    """[B, M * page, G, D]: each row's pages concatenated; page numbers out of range are clamped."""
    if pages.shape[0] == 0:
        return pages.new_zeros(table.shape[0], table.shape[1] * pages.shape[1], *pages.shape[2:])
    found = pages[table.long().clamp(0, pages.shape[0] - 1)]
    return found.flatten(1, 2)


def _end_to_end(tensors: _Tensors, window: int | None) -> tuple[Tensor, Tensor, Mask]:
    """Gathered keys and values, and the mask with which `attention` reads them."""
    q, k_pages, v_pages, table, lengths, _ = tensors
    if q.device.type == "cpu" and not unreadable(table, lengths):
        table, lengths = _needed(table, lengths, q.shape[1], window, max(k_pages.shape[1], 1))
    k, v = (gathered(pages, table) for pages in (k_pages, v_pages))
    if (lacking := q.shape[1] - k.shape[1]) > 0:  # Causal aligns to the last key, here the first tokens count: pad
        lengths = lengths.clamp(max=k.shape[1])
        k, v = (pad(x, (0, 0, 0, 0, 0, lacking)) for x in (k, v))
    mask = Lengths(lengths) & Causal()
    if window is None:
        return k, v, mask
    return *_reached(k, v, lengths, q.shape[1], window), mask & Window(window, None)


def _needed(table: Tensor, lengths: Tensor, T: int, window: int | None, page: int) -> tuple[Tensor, Tensor]:
    """The table from the first page that each row needs, with as many columns as the longest row needs.

    Lengths then count from that page; masks are aligned to a row's end, so they stay the same.
    """
    firsts = torch.zeros_like(lengths) if window is None else _first_seen(lengths, T, window) // page
    pages = (lengths + page - 1) // page - firsts
    places = firsts.long()[:, None] + torch.arange(max(pages.tolist(), default=0), device=pages.device)
    return table.gather(1, places.clamp(max=table.shape[1] - 1)), lengths - firsts * page


def _reached(k: Tensor, v: Tensor, lengths: Tensor, T: int, window: int) -> tuple[Tensor, Tensor]:
    """Gathered keys and values with zeros before the window of every token, as 0 * NaN is NaN."""
    reached = torch.arange(k.shape[1], device=k.device) >= _first_seen(lengths, T, window)[:, None]
    return torch.where(reached[..., None, None], k, 0), torch.where(reached[..., None, None], v, 0)


def _first_seen(lengths: Tensor, T: int, window: int) -> Tensor:
    """[B]: the first key that each row's first token sees."""
    return ((lengths.long() - T).clamp(min=0) - min(window, FARTHEST)).clamp(min=0)


def _bound(tensors: _Tensors, softcap: float | None, window: int | None, scale: float | None) -> Call:
    """The Call for the kernel: k and v are the pages, the mask is that of the gathered cache."""
    scale = scaling(_NAME, scale, tensors.q.shape[-1])
    return Call(
        *tensors[:3], None, tensors.sink, None, None, None, None, tensors.lengths, None,
        None, None, True, False, window, None, cap(_NAME, softcap), scale, 0.0,
    )  # fmt: skip


def _table_reasons(sizes: dict[str, int]) -> list[str]:
    if not sizes["P"]:  # there is no page to clamp to
        return ["there are no pages"]
    if not sizes["M"]:
        return ["there is nothing to compute: the table has no columns"]
    room = sizes["M"] * sizes["page"]
    return [f"the table has room for {room} keys, fewer than the {sizes['T']} tokens"] if room < sizes["T"] else []


def _transform_reasons() -> list[str]:
    """The kernel bypasses torch's dispatcher: it would lose tangents, and does not support vmap."""
    if torch.compiler.is_compiling() or not plans.transformed():
        return []
    return ["torch.func transforms and forward-mode derivatives do not reach it"]


def _check(tensors: _Tensors, sizes: dict[str, int]) -> _Tensors:
    """Check the tensors; returns them with q and pages in autocast's dtype."""
    tensors = tensors._replace(**by_autocast({name: getattr(tensors, name) for name in _Tensors._fields[:3]}))
    q, k_pages, v_pages, table, lengths, sink = tensors
    if sizes["G"] == 0 or sizes["H"] % sizes["G"]:
        raise ShapeError(
            f"{_NAME}: k_pages has {sizes['G']} heads but q has {sizes['H']}; "
            f"q heads must be a multiple of k heads (G={sizes['G']}, H={sizes['H']})"
        )
    if not (q.dtype == k_pages.dtype == v_pages.dtype and q.dtype in DTYPES):
        raise ValueError(
            f"{_NAME}: q, k_pages, v_pages have dtypes {q.dtype}, {k_pages.dtype}, {v_pages.dtype}; "
            "expected one of float64, float32, bfloat16, float16 for all three"
        )
    for name, x in zip(_Tensors._fields[1:], tensors[1:], strict=True):
        if x is not None and x.device != q.device:
            raise ValueError(f"{_NAME}: {name} is on {x.device}, q is on {q.device}; expected one device")
    for name, x in (("table", table), ("lengths", lengths)):
        if x.dtype not in INTEGERS:
            raise ValueError(f"{_NAME}: {name} must be an int32 or int64 tensor, got {x.dtype}")
    if sink is not None and sink.dtype not in DTYPES:
        raise ValueError(f"{_NAME}: sink must be a floating tensor, got {sink.dtype}")
    return tensors


def _invalid(table: Tensor, lengths: Tensor, window: int | None, sizes: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Masks of invalid lengths [B], and of needed table entries [B,M] that are no page."""
    size = max(sizes["page"], 1)
    starts = torch.arange(0, sizes["M"] * size, size, device=table.device)
    pages = ((table < 0) | (table >= sizes["P"])) & (starts < lengths[:, None])
    if window is not None:
        pages &= starts + size > _first_seen(lengths, sizes["T"], window)[:, None]
    return (lengths < 0) | (lengths > sizes["M"] * sizes["page"]), pages


def _insist(table: Tensor, lengths: Tensor, window: int | None, sizes: dict[str, int]) -> None:
    """The checks of `_check_values` as run-time asserts, for values that are not readable (compile, vmap)."""
    rows, pages = _invalid(table, lengths, window, sizes)
    room = sizes["M"] * sizes["page"]
    raise_unless(~rows.any(), f"{_NAME}: lengths must each be 0 to {room}, what pages hold")
    raise_unless(~pages.any(), f"{_NAME}: table must hold 0 to {sizes['P'] - 1}, pages that there are")


def _check_values(table: Tensor, lengths: Tensor, window: int | None, sizes: dict[str, int]) -> None:
    rows, pages = _invalid(table, lengths, window, sizes)
    for (row,) in rows.nonzero().tolist():
        raise ValueError(
            f"{_NAME}: lengths[{row}] is {int(lengths[row])}; expected 0 to {sizes['M'] * sizes['page']}, what "
            f"{sizes['M']} pages of {sizes['page']} hold"
        )
    for row, place in pages.nonzero().tolist():
        raise ValueError(
            f"{_NAME}: table[{row}, {place}] is {int(table[row, place])}; expected 0 to {sizes['P'] - 1}, a page that "
            "there is"
        )
