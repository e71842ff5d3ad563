"""Causal, Window, Packed, Lengths, Band, Dense: composable with `&`, each can `materialize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.core.errors import ShapeError, a_type
from foci.ops.arguments import INTEGERS
from foci.ops.deferred_checks import check_ends, unreadable

FARTHEST = 2**61  # clamp for bounds: beyond any position, and adding positions cannot overflow int64


class Mask:
    """Which keys each query may see. Masks compose with `&`; `materialize(T, S)` is the definition.

    `Packed` and `Lengths` give every row (or document) its own end, and `Causal` and `Window` are aligned to that end:
    the last real query has the position of the last real key.
    """

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise TypeError(f"mask: cannot combine {a_type(self)} with {other!r}; expected another mask")
        return _merge(_parts(self), _parts(other))

    def __bool__(self) -> bool:
        """Raises: `Causal() and Lengths(n)` would be Lengths(n) alone, and see the future."""
        raise TypeError("mask: a mask is neither true nor false; join masks with `&` (not `and`), or ask `is None`")

    def materialize(self, T: int, S: int) -> Tensor:
        """The boolean tensor, broadcastable to [B, H, T, S], that is True where query t may see key s."""
        visible = lower(self)
        entries = [x.numel() for x in (visible.kv_lengths, visible.band_low, visible.band_high) if x is not None]
        rows = next((n for n in entries if n != 1), 1)  # one entry holds for all rows
        for name, size in (("T", T), ("S", S)):
            if not isinstance(size, Integral | torch.SymInt | Tensor) or size < 0:  # a trace makes tensors of sizes
                raise ValueError(f"mask: {name} must be a non-negative int, got {size!r}")
        shape = [] if visible.dense is None else list(visible.dense.shape)
        if any(n not in (1, size) for n, size in zip(shape[:-3:-1], (S, T), strict=False)) or (
            len(shape) == 4 and shape[0] != 1 != rows != shape[0]
        ):
            whole = f"[{'B' if rows == 1 else rows}, H, {T}, {S}]"
            raise ShapeError(f"Dense: allowed has shape {shape}; expected one that broadcasts to {whole}")
        check(visible, 1 if visible.q_offsets is not None else rows, T, S)
        return materialize(visible, T, S)


@dataclass(frozen=True)
class Causal(Mask):
    """No key after the query. bottom-right: the last query sees the last key; top-left: the first sees the first."""

    align: str = "bottom-right"

    def __post_init__(self) -> None:
        if self.align not in ("bottom-right", "top-left"):
            raise ValueError(f"Causal: align must be 'bottom-right' or 'top-left', got {self.align!r}")


@dataclass(frozen=True)
class Window(Mask):
    """At most `left` keys before the query's position and `right` after it; None leaves a side open."""

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            check_reach("Window", name, getattr(self, name))


@dataclass(frozen=True, eq=False)
class Packed(Mask):
    """Documents end to end in a batch of one: document n holds queries q_offsets[n]:q_offsets[n+1] and the keys alike.

    Offsets are int32 or int64 [N+1], start at 0 and never decrease; tokens after the last one see nothing.
    `kv_offsets` defaults to `q_offsets`. Offsets on the CPU are checked; those on a GPU are not, as reading them would
    synchronise: invalid ones cause no out-of-bounds access, but undefined results.
    """

    q_offsets: Tensor
    kv_offsets: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("q_offsets", "kv_offsets"):
            _require_integers("Packed", name, getattr(self, name))
        if self.kv_offsets is not None and self.kv_offsets.shape != self.q_offsets.shape:
            raise ShapeError(
                f"Packed: kv_offsets has {self.kv_offsets.numel()} entries, q_offsets has {self.q_offsets.numel()}; "
                "expected one more than there are documents in both"
            )
        if self.q_offsets.numel() < 1:
            raise ShapeError("Packed: q_offsets is empty; expected [0, ...], one more entry than there are documents")


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """Row b holds `kv_lengths[b]` real keys, the rest is padding or unwritten cache. int32 or int64 [B] (or [N]
    documents).

    `q_lengths` marks padded queries the same way: they see nothing. Without it every query is computed, and query i of
    row b has key position i + max(kv_lengths[b] - T, min(S - T, 0)): padded keys correspond to padded queries, and new
    tokens at the end of a cache to its end. Lengths on a GPU are not checked, as Packed's offsets are not.
    """

    kv_lengths: Tensor
    q_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("kv_lengths", "q_lengths"):
            _require_integers("Lengths", name, getattr(self, name))
        if self.q_lengths is not None and self.q_lengths.shape != self.kv_lengths.shape:
            raise ShapeError(
                f"Lengths: q_lengths has {self.q_lengths.numel()} rows, kv_lengths has {self.kv_lengths.numel()}"
            )


@dataclass(frozen=True, eq=False)
class Band(Mask):
    """Query i of a row or document sees key j only when i + low <= j <= i + high; None leaves a side open.

    i and j count from the start of the row or document. An int holds for all of them, an int32 or int64 tensor [B] (or
    [N] documents) gives each its own; a tensor may stay on the CPU. A Band expresses Causal and Window for a range of
    queries and a range of keys that are parts of longer sequences.
    """

    low: int | Tensor | None
    high: int | Tensor | None

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            bound = getattr(self, name)
            if isinstance(bound, bool) or not isinstance(bound, int | Tensor | None):
                raise ValueError(f"Band: {name} must be an int, a tensor of ints or None, got {bound!r}")
            if isinstance(bound, Tensor):
                _require_integers("Band", name, bound)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """Any pattern: boolean, broadcastable to [B, H, T, S], True where a key may be seen."""

    allowed: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.allowed, Tensor) or self.allowed.dtype != torch.bool:
            got = getattr(self.allowed, "dtype", type(self.allowed).__name__)
            raise ValueError(f"Dense: allowed must be a boolean tensor, got {got}; an additive mask is `bias=`")
        if self.allowed.dim() > 4:
            raise ShapeError(f"Dense: allowed has {self.allowed.dim()} dimensions; expected at most 4: [B, H, T, S]")


@dataclass(frozen=True, eq=False)
class All(Mask):
    """Several masks at once, one of each kind; the result of `&`."""

    parts: tuple[Mask, ...]


class Visible(NamedTuple):
    """A mask in the flat form of op arguments: at most one of each kind; by default no mask."""

    dense: Tensor | None = None
    q_offsets: Tensor | None = None
    kv_offsets: Tensor | None = None
    kv_lengths: Tensor | None = None
    q_lengths: Tensor | None = None
    band_low: Tensor | None = None
    band_high: Tensor | None = None
    causal_end: bool = False
    causal_start: bool = False
    left: int | None = None
    right: int | None = None


NOTHING_HIDDEN = Visible()


def lower(mask: Mask | None) -> Visible:
    """The flat form of a mask."""
    if mask is None:
        return NOTHING_HIDDEN
    found: dict[str, object] = {}
    for part in _parts(mask):
        if isinstance(part, Causal):
            found["causal_end" if part.align == "bottom-right" else "causal_start"] = True
        elif isinstance(part, Window):
            found.update(left=_clamped(part.left), right=_clamped(part.right))
        elif isinstance(part, Packed):
            kv_offsets = part.q_offsets if part.kv_offsets is None else part.kv_offsets
            found.update(q_offsets=part.q_offsets, kv_offsets=kv_offsets)
        elif isinstance(part, Lengths):
            found.update(kv_lengths=part.kv_lengths, q_lengths=part.q_lengths)
        elif isinstance(part, Band):
            found.update(band_low=_bound(part.low), band_high=_bound(part.high))
        elif isinstance(part, Dense):
            found["dense"] = part.allowed
        else:
            raise TypeError(_refusal(part))
    return Visible(**found)  # type: ignore[arg-type]


def check_reach(owner: str, name: str, reach: object) -> None:
    """Raise unless `reach` is a valid number of keys for one side of a window."""
    if reach is not None and (isinstance(reach, bool) or not isinstance(reach, int | torch.SymInt) or reach < 0):
        raise ValueError(f"{owner}: {name} must be a non-negative int or None, got {reach!r}")


def _clamped(reach: int | None) -> int | None:
    return max(-FARTHEST, min(reach, FARTHEST)) if isinstance(reach, int) else reach


def _bound(bound: int | Tensor | None) -> Tensor | None:
    return torch.tensor([_clamped(bound)], device="cpu") if isinstance(bound, int) else bound


def _refusal(thing: object) -> str:
    name, hint = repr(thing), ""
    if isinstance(thing, Tensor):
        name = f"a {str(thing.dtype).removeprefix('torch.')} tensor {list(thing.shape)}"
        hint = "(tensor)" if thing.dtype == torch.bool else " (an additive mask is `bias=`)"
    return f"mask: {name} is no mask of foci; expected Causal, Window, Packed, Lengths or Dense{hint}"


class Segment(NamedTuple):
    """A range of queries and the range of keys they may see: of one document, one padded row, or the whole batch.

    Query i and key j count from the segment's start; i may see j if i + low <= j <= i + high (None: no bound on that
    side).
    """

    rows: slice
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int | None
    high: int | None


def segments(visible: Visible, B: int, T: int, S: int) -> list[Segment]:
    """The mask without its Dense part, as segments. Reads the values of offsets and lengths, and checks them."""
    if visible.q_offsets is not None:
        assert visible.kv_offsets is not None
        q_offsets = _checked_offsets("q_offsets", visible.q_offsets, "T", T)
        kv_offsets = _checked_offsets("kv_offsets", visible.kv_offsets, "S", S)
        starts = list(zip(q_offsets[:-1], kv_offsets[:-1], strict=True))
        sizes = [
            (q1 - q0, k1 - k0)
            for q0, q1, k0, k1 in zip(q_offsets[:-1], q_offsets[1:], kv_offsets[:-1], kv_offsets[1:], strict=True)
        ]
        rows = [slice(0, 1)] * len(starts)
    elif visible.kv_lengths is not None or any(x is not None and x.numel() > 1 for x in visible[5:7]):
        starts, sizes, rows = [(0, 0)] * B, [(T, S)] * B, [slice(b, b + 1) for b in range(B)]
    else:
        starts, sizes, rows = [(0, 0)], [(T, S)], [slice(0, B)]
    kv_lengths = _checked_lengths("kv_lengths", visible.kv_lengths, [s for _, s in sizes])
    q_lengths = _checked_lengths("q_lengths", visible.q_lengths, [t for t, _ in sizes])
    lows = _checked_bounds("low", visible.band_low, len(sizes))
    highs = _checked_bounds("high", visible.band_high, len(sizes))
    found = []
    for place, ((q0, k0), (t, s), row) in enumerate(zip(starts, sizes, rows, strict=True)):
        keys = s if kv_lengths is None else kv_lengths[place]
        queries = t if q_lengths is None else q_lengths[place]
        shift = keys - queries if q_lengths is not None else max(keys - t, min(s - t, 0))
        low, high = _band(visible, shift)
        low, high = _tighter(low, lows[place], max), _tighter(high, highs[place], min)
        found.append(Segment(row, q0, q0 + queries, k0, k0 + keys, low, high))
    return found


def check(visible: Visible, B: int, T: int, S: int) -> None:
    """Check the values of offsets and lengths; if they are not readable (compile, vmap), by asserts at run time."""
    tensors = [tensor for tensor in visible[1:7] if tensor is not None]
    if tensors and not unreadable(*tensors):
        segments(visible, B, T, S)
    elif tensors:
        check_ends(*visible[1:5], T, S)


def check_near(visible: Visible, B: int, T: int, S: int) -> None:
    """The same if all of them are on the CPU; on a GPU reading them would synchronise, so no check."""
    if all(tensor.device.type == "cpu" for tensor in visible[1:7] if tensor is not None):
        check(visible, B, T, S)


def _band(visible: Visible, shift: int) -> tuple[int | None, int | None]:
    highs = [shift] if visible.causal_end else []
    if visible.causal_start:
        highs.append(0)
    if visible.right is not None:
        highs.append(shift + visible.right)
    return (None if visible.left is None else shift - visible.left), (min(highs) if highs else None)


def live_keys(segment: Segment, start: int, stop: int) -> tuple[int, int]:
    """The keys j0:j1 of a segment that any of its queries start:stop may see (j0 >= j1: none)."""
    keys = segment.k_stop - segment.k_start
    first = 0 if segment.low is None else max(0, start + segment.low)
    last = keys if segment.high is None else min(keys, stop - 1 + segment.high + 1)
    return first, last


def materialize(visible: Visible, T: int, S: int) -> Tensor:
    """The definition of a mask, by comparing positions; shape broadcastable to [B, H, T, S]."""
    device = next((t.device for t in visible[:5] if t is not None), torch.device("cpu"))
    frame = _frame(visible, T, S, device)
    allowed = frame.together
    if visible.causal_end:
        allowed = allowed & (frame.key <= frame.query + frame.shift)
    if visible.causal_start:
        allowed = allowed & (frame.key <= frame.query)
    if visible.right is not None:
        allowed = allowed & (frame.key <= frame.query + frame.shift + visible.right)
    if visible.left is not None:
        allowed = allowed & (frame.key >= frame.query + frame.shift - visible.left)
    if visible.band_low is not None:
        allowed = allowed & (frame.key >= frame.query + _bounds(visible.band_low, frame, visible))
    if visible.band_high is not None:
        allowed = allowed & (frame.key <= frame.query + _bounds(visible.band_high, frame, visible))
    allowed = allowed[:, None]
    return allowed if visible.dense is None else allowed & visible.dense


def existing(visible: Visible, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Which queries [B or 1, T] and keys [B or 1, S] Packed and Lengths include at all; None: all of them."""
    if visible.q_offsets is None and visible.kv_lengths is None:
        return None
    together = _frame(visible, T, S, device).together
    if visible.kv_lengths is not None and visible.q_offsets is None:
        queries = torch.ones(1, T, dtype=torch.bool, device=device)
        if visible.q_lengths is not None:
            queries = torch.arange(T, device=device) < visible.q_lengths[:, None]
        return queries, torch.arange(S, device=device) < visible.kv_lengths[:, None]
    return together.any(-1), together.any(-2)


class _Frame(NamedTuple):
    query: Tensor  # [B|1, T, 1] index of a query in its document or row
    key: Tensor  # [B|1, 1, S]
    shift: Tensor  # [B|1, T, 1] a query's key position minus its index
    together: Tensor  # [B|1, T, S] query and key are both real and of one document
    document: Tensor | None  # [1, T, 1] a query's document; None if there are none


def _frame(visible: Visible, T: int, S: int, device: torch.device) -> _Frame:
    t, s = torch.arange(T, device=device)[None, :, None], torch.arange(S, device=device)[None, None, :]
    if visible.q_offsets is not None:
        assert visible.kv_offsets is not None
        documents = visible.q_offsets.numel() - 1
        q_document = torch.searchsorted(visible.q_offsets.long(), t, right=True) - 1
        k_document = torch.searchsorted(visible.kv_offsets.long(), s, right=True) - 1
        inside = (q_document < documents) & (q_document == k_document)
        # One sentinel document after the last holds the tokens that belong to none.
        q_sizes = torch.nn.functional.pad(visible.q_offsets.long().diff(), (0, 1))
        k_sizes = torch.nn.functional.pad(visible.kv_offsets.long().diff(), (0, 1))
        query, key = t - visible.q_offsets.long()[q_document], s - visible.kv_offsets.long()[k_document]
        queries, keys, full = q_sizes[q_document], k_sizes[q_document], k_sizes[q_document]
        of_query, of_key = q_document, k_document
    else:
        inside, query, key = torch.ones(1, T, S, dtype=torch.bool, device=device), t, s
        queries, keys = torch.full((1, 1, 1), T, device=device), torch.full((1, 1, 1), S, device=device)
        full, of_query, of_key = keys, None, None
    shift = keys - queries
    if visible.kv_lengths is not None:
        keys = _per_row(visible.kv_lengths, of_query)
        inside = inside & (key < _per_row(visible.kv_lengths, of_key))
        shift = torch.maximum(keys - queries, (full - queries).clamp(max=0))
        if visible.q_lengths is not None:
            real = _per_row(visible.q_lengths, of_query)
            inside, shift = inside & (query < real), keys - real
    return _Frame(query, key, shift, inside, of_query)


def _per_row(lengths: Tensor, document: Tensor | None) -> Tensor:
    if document is None:
        return lengths.long()[:, None, None]
    return torch.nn.functional.pad(lengths.long(), (0, 1))[document]


def _bounds(bound: Tensor, frame: _Frame, visible: Visible) -> Tensor:
    """The bound of each query's row or document, [B|1, T|1, 1]."""
    documents = 1 if visible.q_offsets is None else visible.q_offsets.numel() - 1
    bound = bound.to(frame.query.device).long().clamp(-FARTHEST, FARTHEST)
    return _per_row(bound if bound.numel() > 1 else bound.expand(documents), frame.document)


def _parts(mask: Mask) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, All) else (mask,)


def _merge(first: tuple[Mask, ...], second: tuple[Mask, ...]) -> Mask:
    merged = list(first)
    for new in second:
        place = next((i for i, old in enumerate(merged) if type(old) is type(new) and not _coexist(old, new)), None)
        if place is None:
            merged.append(new)
        else:
            merged[place] = _both(merged[place], new)
    return merged[0] if len(merged) == 1 else All(tuple(merged))


def _coexist(old: Mask, new: Mask) -> bool:
    return isinstance(old, Causal) and old != new


def _both(old: Mask, new: Mask) -> Mask:
    """The intersection of two masks of the same kind."""
    if isinstance(old, Window) and isinstance(new, Window):
        return Window(_smaller_reach(old.left, new.left), _smaller_reach(old.right, new.right))
    if isinstance(old, Band) and isinstance(new, Band):
        return Band(_tighter(old.low, new.low, max), _tighter(old.high, new.high, min))
    if isinstance(old, Dense) and isinstance(new, Dense):
        _together("Dense", "allowed", old.allowed, new.allowed)
        return Dense(old.allowed & new.allowed)
    if isinstance(old, Causal):
        return old
    raise ValueError(
        f"mask: two {type(old).__name__} masks cannot be combined, as each says where rows end; expected one"
    )


def _smaller_reach(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _tighter(a: Any, b: Any, take: Callable[..., Any]) -> Any:
    """The tighter of two bounds, ints or tensors; `take` is max for a lower one. Tensors become int64 for any int."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, int) and isinstance(b, int):
        return take(a, b)
    a, b = (x.long() if isinstance(x, Tensor) else torch.tensor(_clamped(x), device="cpu") for x in (a, b))
    _together("Band", "low or high", a, b)
    return torch.maximum(a, b) if take is max else torch.minimum(a, b)


def _together(kind: str, name: str, a: Tensor, b: Tensor) -> None:
    """Raise unless the tensors of two masks of a kind broadcast."""
    if any(x != y and 1 not in (x, y) for x, y in zip(a.shape[::-1], b.shape[::-1], strict=False)):
        got = f"{list(a.shape)} and {list(b.shape)}"
        raise ShapeError(f"{kind}: {name} of two masks joined by & has shapes {got}; expected ones that broadcast")


def _require_integers(owner: str, name: str, value: object) -> None:
    if value is None and name in ("kv_offsets", "q_lengths"):
        return
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS or value.dim() != 1:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{owner}: {name} must be a one-dimensional int32 or int64 tensor, got {got}")


def _checked_offsets(name: str, offsets: Tensor, letter: str, size: int) -> list[int]:
    values: list[int] = offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"Packed: {name} must start at 0, got {values[0]}")
    for place, (before, after) in enumerate(pairwise(values)):
        if after < before:
            raise ValueError(f"Packed: {name} must never decrease, got {before} then {after} at entry {place + 1}")
    if values[-1] > size:
        raise ValueError(f"Packed: {name} ends at {values[-1]}, past the {size} tokens there are ({letter}={size})")
    return values


def _checked_bounds(name: str, bounds: Tensor | None, rows: int) -> list[int | None]:
    if bounds is None:
        return [None] * rows
    values: list[int | None] = bounds.tolist()
    if len(values) not in (1, rows):
        raise ShapeError(f"Band: {name} has {len(values)} entries; expected 1 or {rows}, one for each row")
    return values if len(values) == rows else values * rows


def _checked_lengths(name: str, lengths: Tensor | None, limits: list[int]) -> list[int] | None:
    if lengths is None:
        return None
    values: list[int] = lengths.tolist()
    if len(values) != len(limits):
        raise ShapeError(f"Lengths: {name} has {len(values)} entries; expected {len(limits)}, one for each row")
    for row, (value, limit) in enumerate(zip(values, limits, strict=True)):
        if not 0 <= value <= limit:
            raise ValueError(f"Lengths: {name}[{row}] is {value}; expected 0 to {limit}, the tokens of that row")
    return values
