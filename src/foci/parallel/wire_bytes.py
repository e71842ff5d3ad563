"""Communication volume: the exact bytes a rank sends under a split, forward and backward, without running it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch import Tensor

from foci.core.spec import accumulator
from foci.ops.masks import Segment, segments
from foci.parallel import ring_plan
from foci.parallel.balance import Order, Piece, length, pieces
from foci.parallel.heads import Share, shares
from foci.parallel.operators import Letters
from foci.parallel.split import Split
from foci.parallel.state_passing import SUMMARIES
from foci.parallel.workload import Shape

NEAR = 4  # ring steps whose pairs are counted; later steps are taken to equal the last of them


class Wire(NamedTuple):
    """Bytes of tensors that one rank sends in one pass (forward or backward) of one call.

    `swap_in`, `swap_out`: in the two all-to-alls of Ulysses. `blocks`: hop by hop, the keys and values it sends round
    the ring. `grads`: hop by hop, their gradients. `states`: of a handoff, to all ranks that need them. `sums`: in
    all-reduces, of gradients of what every rank has the same.
    """

    swap_in: int = 0
    swap_out: int = 0
    blocks: tuple[int, ...] = ()
    grads: tuple[int, ...] = ()
    states: int = 0
    sums: int = 0

    @property
    def total(self) -> int:
        return self.swap_in + self.swap_out + sum(self.blocks) + sum(self.grads) + self.states + self.sums


class _Part(NamedTuple):
    """A tensor as Ulysses splits it: bytes per token and head, tokens and heads by rank (None: not split)."""

    each: int
    tokens: tuple[int, ...] | None
    heads: tuple[int, ...] | None

    def size(self, holder: int, computer: int) -> int:
        """Bytes of the message between the rank that holds tokens and the one that computes heads."""
        tokens = 1 if self.tokens is None else self.tokens[holder]
        return self.each * tokens * (1 if self.heads is None else self.heads[computer])


def sent(shape: Shape, split: Split, rank: tuple[int, int] = (0, 0), *, backward: bool = False) -> Wire:
    """What the rank at (index in Ulysses, index in the ring or handoff) sends, if all inputs require gradients.

    Masks, offsets and a dense bias are never sent. For arguments that a Shape does not have, see the documentation.
    """
    u, r = _place(split, rank)
    U = split.ulysses
    call = shape.call()
    held = shares(shape.H, 0 if _headless(shape) else shape.heads, U)
    swap_in = swap_out = 0
    if U > 1:
        ins, outs = _inputs(shape, split, call, held, r), _outputs(shape, split, call, held, r)
        others = [p for p in range(U) if p != u]
        there = [part for part in ins if part.tokens is not None]
        if backward:
            there = outs
        back = ins if backward else outs
        swap_in = sum(part.size(u, p) for part in there for p in others)
        swap_out = sum(part.size(p, u) for part in back for p in others)
    wire = Wire(swap_in, swap_out)
    if split.ring == 1:
        return wire
    if shape.recurrent:
        return wire._replace(**_handoff(shape, split, call, held[u], r, backward))
    return wire._replace(**_ring(shape, split, held[u], r, backward))


def _place(split: Split, rank: Any) -> tuple[int, int]:
    """A rank of the split: its (index in Ulysses, index in the ring)."""
    sizes = (split.ulysses, split.ring)
    pair = isinstance(rank, tuple | list) and len(rank) == 2
    if not pair or not all(isinstance(n, int) and 0 <= n < size for n, size in zip(rank, sizes, strict=True)):
        raise ValueError(
            f"sent: rank must be a pair, (index in Ulysses, index in the ring) of {sizes[0]} x {sizes[1]} ranks, "
            f"got {rank!r:.200}"
        )
    return rank[0], rank[1]


@functools.lru_cache(maxsize=4096)
def tokens(count: int, split: Split) -> tuple[tuple[int, ...], ...]:
    """How many of `count` tokens each rank holds, by index in the ring, then in Ulysses."""
    found = []
    for r in range(split.ring):
        ring = length(pieces(cast(Order, split.order), count, split.ring, r))
        small, more = divmod(ring, split.ulysses)
        found.append(tuple(small + (u < more) for u in range(split.ulysses)))
    return tuple(found)


def _headless(shape: Shape) -> bool:
    return shape.operator in ("scan", "selective_scan")


def _part(shape: Shape, split: Split, tensor: Any, letters: Letters, held: list[Share], r: int) -> _Part:
    """`tensor`: anything with a shape and a dtype, of the whole call."""
    names = letters.names[len(letters.names) - len(tensor.shape) :]
    sizes = dict(zip(names, tensor.shape, strict=True))
    token = next((letter for letter in ("T", "S") if letter in sizes), None)
    head = next((letter for letter in ("H", "G", "D") if sizes.get(letter, 1) > 1), None)
    each = math.prod(tensor.shape) * tensor.dtype.itemsize
    held_tokens = heads = None
    if token is not None:
        each //= sizes[token]
        held_tokens = tokens(sizes[token], split)[r]
    if head is not None:
        each //= sizes[head]
        runs = [share.keys if head == "G" else share.heads for share in held]
        heads = tuple(stop - start for start, stop in runs)
    return _Part(each, held_tokens, heads)


def _inputs(shape: Shape, split: Split, call: Any, held: list[Share], r: int) -> list[_Part]:
    found = []
    for name, letters in shape.function.letters.items():
        tensor = getattr(call, name)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            found.append(_part(shape, split, tensor, letters, held, r))
    return found


def _outputs(shape: Shape, split: Split, call: Any, held: list[Share], r: int) -> list[_Part]:
    """The first output alone: an lse or final state is not sent unless asked for."""
    return [_part(shape, split, shape.function.declared(call)[0], shape.function.results[0], held, r)]


def _handoff(shape: Shape, split: Split, call: Any, share: Share, r: int, backward: bool) -> dict[str, Any]:
    """Every rank's affine map goes to all ranks after it; in the backward to all before it."""
    transition, offset = SUMMARIES[shape.operator].shapes(call, shape.B)
    wide = call.accumulator.itemsize
    heads = (share.heads[1] - share.heads[0]) / shape.H
    state = round(math.prod(offset) * heads)
    passes = not backward or r < split.ring - 1  # no gradient enters the last rank: it sends no transition
    link = (passes * round(math.prod(transition) * heads) + state) * wide
    others = r if backward else split.ring - 1 - r
    lengths = [sum(each) for each in tokens(shape.T, split)]
    sums = 0
    if backward:
        same = sum(
            round(tensor.numel() * (heads if _has_heads(letters) else 1))
            for name, letters in shape.function.letters.items()
            if isinstance(tensor := getattr(call, name), Tensor) and letters.token(tensor) is None
        )
        sums = _all_reduce(same, split.ring, r) * wide
    return {"states": others * link if lengths[r] else 0, "sums": sums}


def _has_heads(letters: Letters) -> bool:
    return any(letter in letters.names for letter in ("H", "D"))


def _all_reduce(count: int, ranks: int, rank: int) -> int:
    """Elements that a rank sends in an all-reduce: a reduce-scatter, then an all-gather."""
    own = len(range(rank, count, ranks))
    return count - own + own * (ranks - 1)


def _ring(shape: Shape, split: Split, share: Share, r: int, backward: bool) -> dict[str, Any]:
    """Each hop forwards the current block; in the backward also its float32 gradient sums, until back at its rank."""
    R, (first, last) = split.ring, share.keys
    heads = last - first if share.repeat is None else len(share.repeat)
    lengths = [sum(each) for each in tokens(shape.keys, split)]
    each = shape.B * heads * (shape.K + shape.values)
    steps = distances(shape, split.order, R)
    found = {"blocks": tuple(each * shape.dtype.itemsize * lengths[(r - d) % R] for d in steps[:-1])}
    if backward:
        wide = accumulator(shape.dtype).itemsize
        found["grads"] = tuple(each * wide * lengths[(r - d) % R] for d in steps[1:])
    return found


@functools.lru_cache(maxsize=1024)
def distances(shape: Shape, order: str, ring: int) -> tuple[int, ...]:
    """The ring distances of keys that some rank sees: blocks that a window excludes are not sent."""
    if shape.window is None:
        return tuple(range(ring))
    return tuple(ring_plan.distances(*_cut(shape, order, ring)))


@functools.lru_cache(maxsize=1024)
def pairs(shape: Shape, order: str, ring: int) -> tuple[int, ...]:
    """The number of operator calls on the busiest rank, by distance of the keys."""
    whole, queries, keys = _cut(shape, order, ring)
    ranks = sorted({round(place * (ring - 1) / 7) for place in range(8)})
    found: list[int] = []
    for d in distances(shape, order, ring)[:NEAR]:
        met = (ring_plan.pairs(whole, queries[r], keys[(r - d) % ring], q_apart=False, k_apart=False) for r in ranks)
        found.append(max(map(len, met)))
    return (*found, *found[-1:] * (len(distances(shape, order, ring)) - len(found)))


def _cut(shape: Shape, order: str, ring: int) -> tuple[list[Segment], list[list[Piece]], list[list[Piece]]]:
    """The inputs of a ring's plan: the mask's segments, and each rank's pieces of queries and keys."""
    queries, keys = (
        [pieces(cast(Order, order), count, ring, r) for r in range(ring)] for count in (shape.T, shape.keys)
    )
    return segments(shape.call().visible, shape.B, shape.T, shape.keys), queries, keys


def places(split: Split) -> Iterator[tuple[int, int]]:
    """Every rank's (index in Ulysses, index in the ring)."""
    return ((u, r) for u in range(split.ulysses) for r in range(split.ring))
