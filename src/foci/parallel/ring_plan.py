"""Which queries of one rank attend to which keys of another, and under what mask, computed from index ranges."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from foci.ops.masks import NOTHING_HIDDEN, Segment, Visible
from foci.parallel.balance import Piece


class Pair(NamedTuple):
    """A range of local queries, a range of local keys, and the mask between them, relative to the starts of both.

    `q_piece` and `k_piece` are their positions in the whole sequence; None if several pieces were joined.
    """

    queries: slice
    keys: slice
    visible: Visible
    q_piece: Piece | None
    k_piece: Piece | None


class Overlap(NamedTuple):
    """Queries a0:a1 and keys b0:b1 of two pieces; the i-th sees the j-th if i + low <= j <= i + high (None: open)."""

    a0: int
    a1: int
    b0: int
    b1: int
    low: int | None
    high: int | None


def pairs(
    segments: Sequence[Segment], q_pieces: Sequence[Piece], k_pieces: Sequence[Piece], *, q_apart: bool, k_apart: bool
) -> list[Pair]:
    """The pairs that cover all keys of one rank that queries of another see, as few as their masks allow.

    `segments` are the whole mask's (ops/masks.py). Two different runs of tokens have at most one document in common, so
    a pair is one document's, or of a run with itself. `q_apart`, `k_apart`: do not join pieces: positions are needed.
    """
    found: list[Pair] = []
    a = 0
    for q in q_pieces:
        row: list[Pair] = []
        b = 0
        for k in k_pieces:
            pair = _pair(segments, q, k)
            if pair is not None:
                pair = pair._replace(queries=_shifted(pair.queries, a), keys=_shifted(pair.keys, b))
                before = row[-1] if row else None
                if before and not k_apart and _full(before, pair) and _adjacent(before.keys, pair.keys, before, pair):
                    row[-1] = before._replace(keys=slice(before.keys.start, pair.keys.stop), k_piece=None)
                else:
                    row.append(pair)
            b += k.size
        if found and not q_apart and len(row) == 1 and _full(found[-1], row[0]):
            last = found[-1]
            if last.keys == row[0].keys and last.queries.stop == row[0].queries.start:
                found[-1] = last._replace(queries=slice(last.queries.start, row[0].queries.stop), q_piece=None)
                row = []
        found += row
        a += q.size
    return found


def any_visible(segments: Sequence[Segment], q_pieces: Sequence[Piece], k_pieces: Sequence[Piece]) -> bool:
    """Whether any of these queries sees any of these keys."""
    return any(_overlap(each, q, k) is not None for q in q_pieces for k in k_pieces for each in _nearby(segments, q, k))


def distances(
    segments: Sequence[Segment], queries: Sequence[Sequence[Piece]], keys: Sequence[Sequence[Piece]]
) -> list[int]:
    """The ring distances that keys must travel: every d for which some rank r sees keys of rank r - d; always 0.

    A window needs only near neighbours. Beyond 64 ranks all distances are returned, as testing them would take long.
    """
    size = len(queries)
    if size > 64 or (len(segments) == 1 and segments[0].low is None):
        return list(range(size))
    bare = tuple((each.rows.start, each.rows.stop, *each[1:]) for each in segments)
    return list(_distances(bare, tuple(map(tuple, queries)), tuple(map(tuple, keys))))


@functools.lru_cache(maxsize=64)
def _distances(
    bare: tuple[tuple[int, ...], ...], queries: tuple[tuple[Piece, ...], ...], keys: tuple[tuple[Piece, ...], ...]
) -> tuple[int, ...]:
    segments = [Segment(slice(*each[:2]), *each[2:]) for each in bare]
    size = len(queries)
    used = (
        d for d in range(1, size) if any(any_visible(segments, queries[r], keys[(r - d) % size]) for r in range(size))
    )
    return (0, *used)


def _overlap(segment: Segment, q: Piece, k: Piece) -> Overlap | None:
    """The part of two pieces inside a segment, without queries and keys at its ends that see nothing; None: empty."""
    a0, a1 = _inside(q, segment.q_start, segment.q_stop)
    b0, b1 = _inside(k, segment.k_start, segment.k_stop)
    if a0 >= a1 or b0 >= b1:
        return None
    assert q.step == k.step, "pieces of one order have one step"
    step = q.step
    # Key position minus query position, both within the segment, is step * (j - i) - apart.
    apart = (q.start + q.step * a0 - segment.q_start) - (k.start + k.step * b0 - segment.k_start)
    low = None if segment.low is None else -((-segment.low - apart) // step)
    high = None if segment.high is None else (segment.high + apart) // step
    if high is not None:
        cut = max(0, -high)  # queries before the first key
        a0, low, high = a0 + cut, None if low is None else low + cut, high + cut
    if low is not None:
        a1 = min(a1, a0 + (b1 - b0) - low)  # queries whose window begins after the last key
        cut = max(0, low)
        b0, low, high = b0 + cut, low - cut, None if high is None else high - cut
    if high is not None:
        b1 = min(b1, b0 + (a1 - a0 - 1) + high + 1)
    if a0 >= a1 or b0 >= b1 or (low is not None and high is not None and low > high):
        return None
    return Overlap(a0, a1, b0, b1, low, high)


def _inside(piece: Piece, start: int, stop: int) -> tuple[int, int]:
    """The indices a0:a1 of a piece whose positions are within start:stop."""
    first = max(0, -((piece.start - start) // piece.step))
    last = min(piece.size, -((piece.start - stop) // piece.step))
    return first, last


def _pair(segments: Sequence[Segment], q: Piece, k: Piece) -> Pair | None:
    """Two pieces under all segments: one with a band mask, batch rows, or documents."""
    found = [(each.rows.start, met) for each in _nearby(segments, q, k) if (met := _overlap(each, q, k)) is not None]
    if not found:
        return None
    meetings = [met for _, met in found]
    if _of_rows(segments) and (len(found) < len(segments) or any(met != meetings[0] for met in meetings)):
        visible = _rows(len(segments), dict(found))
    elif len(meetings) > 1 and not _of_rows(segments):
        visible = _documents([_without_idle_bounds(met) for met in meetings])
    else:
        visible = _band(_without_idle_bounds(meetings[0]))
    a0, a1, b0, b1 = _hull(meetings)
    q_piece = Piece(q.start + q.step * a0, q.step, a1 - a0)
    k_piece = Piece(k.start + k.step * b0, k.step, b1 - b0)
    return Pair(slice(a0, a1), slice(b0, b1), visible, q_piece, k_piece)


def _nearby(segments: Sequence[Segment], q: Piece, k: Piece) -> Sequence[Segment]:
    """The segments that may overlap both pieces; documents are sorted, so a binary search finds them."""
    if _of_rows(segments):
        return segments
    first = max(
        bisect_right(segments, q.start, key=lambda each: each.q_stop),
        bisect_right(segments, k.start, key=lambda each: each.k_stop),
    )
    last = min(
        bisect_right(segments, q.positions[-1], key=lambda each: each.q_start),
        bisect_right(segments, k.positions[-1], key=lambda each: each.k_start),
    )
    return segments[first:last]


def _of_rows(segments: Sequence[Segment]) -> bool:
    """Whether segments are rows of a batch (documents share the one row there is)."""
    return len(segments) > 1 and segments[0].rows != segments[1].rows


def _hull(meetings: Sequence[Overlap]) -> tuple[int, int, int, int]:
    return (
        min(met.a0 for met in meetings), max(met.a1 for met in meetings),
        min(met.b0 for met in meetings), max(met.b1 for met in meetings),
    )  # fmt: skip


def _without_idle_bounds(met: Overlap) -> Overlap:
    """The same without bounds that mask nothing."""
    rows, columns = met.a1 - met.a0, met.b1 - met.b0
    low = None if met.low is None or rows - 1 + met.low <= 0 else met.low
    high = None if met.high is None or met.high >= columns - 1 else met.high
    return met._replace(low=low, high=high)


def _band(met: Overlap) -> Visible:
    """The mask of one meeting; plain causal where it is a diagonal, which every backend supports."""
    if met.low is None and met.high is None:
        return NOTHING_HIDDEN
    if met.low is None and met.high == 0:
        return Visible(causal_start=True)
    return Visible(band_low=_bound(met.low), band_high=_bound(met.high))


def _rows(count: int, met: dict[int, Overlap]) -> Visible:
    """The mask of batch rows over the union of their ranges: lengths, and a band per row.

    A row's band also masks positions in front of its own range.
    """
    a0, a1, b0, b1 = _hull(list(met.values()))
    open_ = (a1 - a0) + (b1 - b0)
    kv_lengths, q_lengths, lows, highs = [0] * count, [0] * count, [-open_] * count, [open_] * count
    for row, each in met.items():
        kv_lengths[row], q_lengths[row] = each.b1 - b0, each.a1 - a0
        moved = (each.a0 - a0) - (each.b0 - b0)
        if each.low is not None:
            lows[row] = each.low - moved
        if each.high is not None:
            highs[row] = each.high - moved
    return Visible(
        kv_lengths=_numbers(kv_lengths),
        q_lengths=_numbers(q_lengths) if min(q_lengths) < a1 - a0 else None,
        band_low=_numbers(lows) if max(lows) > -(a1 - a0 - 1) else None,
        band_high=_numbers(highs) if min(highs) < b1 - b0 - 1 else None,
    )


def _documents(meetings: Sequence[Overlap]) -> Visible:
    """The mask of documents in order; lengths exclude gaps between them, which belong to none."""
    a0, b0 = meetings[0].a0, meetings[0].b0
    q_offsets = [met.a0 - a0 for met in meetings] + [meetings[-1].a1 - a0]
    kv_offsets = [met.b0 - b0 for met in meetings] + [meetings[-1].b1 - b0]
    gaps = any(before.a1 != after.a0 or before.b1 != after.b0 for before, after in pairwise(meetings))
    offsets = _numbers(q_offsets)
    visible = Visible(q_offsets=offsets, kv_offsets=offsets if q_offsets == kv_offsets else _numbers(kv_offsets))
    if gaps:
        visible = visible._replace(
            kv_lengths=_numbers([met.b1 - met.b0 for met in meetings]),
            q_lengths=_numbers([met.a1 - met.a0 for met in meetings]),
        )
    # A document of one token has no bound, so any bound is right for it.
    lows, highs = ({getattr(met, name) for met in meetings} for name in ("low", "high"))
    if lows == {None} and highs <= {0, None} and 0 in highs and all(_causal(met) for met in meetings):
        return visible._replace(causal_start=True)
    open_ = q_offsets[-1] + kv_offsets[-1]
    if lows != {None}:
        visible = visible._replace(band_low=_numbers([-open_ if met.low is None else met.low for met in meetings]))
    if highs != {None}:
        visible = visible._replace(band_high=_numbers([open_ if met.high is None else met.high for met in meetings]))
    return visible


def _causal(met: Overlap) -> bool:
    """Whether the meeting's mask equals top-left causal."""
    return met.low is None and (met.high == 0 or (met.high is None and met.b1 - met.b0 == 1))


def _bound(bound: int | None) -> Tensor | None:
    return None if bound is None else _numbers([bound])


def _numbers(values: list[int]) -> Tensor:
    """On the CPU, where plans are made, whatever torch's default device is."""
    return torch.tensor(values, device="cpu")


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _full(a: Pair, b: Pair) -> bool:
    return a.visible == NOTHING_HIDDEN and b.visible == NOTHING_HIDDEN


def _adjacent(first: slice, second: slice, a: Pair, b: Pair) -> bool:
    return a.queries == b.queries and first.stop == second.start
