"""Which positions each rank holds, in orders that balance causal work; shard and unshard tensors that way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from foci.ops.arguments import whole
from foci.parallel.exchange import Session, all_gather, checked, gather_counts, sum_scatter
from foci.parallel.group import Group

Order = Literal["plain", "zigzag", "stripe"]


class Piece(NamedTuple):
    """`size` positions start, start + step, ... in the whole sequence."""

    start: int
    step: int
    size: int

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.step * self.size, self.step)


def pieces(order: Order, T: int, size: int, rank: int) -> list[Piece]:
    """The positions of a sequence of T that a rank holds, in its local order; none of them empty, neighbours joined.

    plain: rank r has the r-th of `size` runs. zigzag: of 2 * size runs it has the r-th from the front and the r-th from
    the back. stripe: positions r, r + size, ... Any T: runs differ by one position at most, and may be empty.
    """
    _require_order(order)
    if not 0 <= rank < size:
        raise ValueError(f"pieces: rank must be 0 to {size - 1} (size={size}), got {rank}")
    if T < 0:
        raise ValueError(f"pieces: T must be at least 0, got {T}")
    if order == "stripe":
        count = len(range(rank, T, size))
        return [Piece(rank, size if size > 1 else 1, count)] if count else []
    if order == "plain":
        runs = [_run(T, size, rank)]
    else:
        runs = [_run(T, 2 * size, rank), _run(T, 2 * size, 2 * size - 1 - rank)]
    found: list[Piece] = []
    for start, stop in runs:
        if start == stop:
            continue
        if found and found[-1].positions.stop == start:
            found[-1] = Piece(found[-1].start, 1, stop - found[-1].start)
        else:
            found.append(Piece(start, 1, stop - start))
    return found


def cut(held: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """Elements start:stop of a rank's shard, as pieces of the whole sequence."""
    found, before = [], 0
    for piece in held:
        first, last = max(start - before, 0), min(stop - before, piece.size)
        if first < last:
            found.append(Piece(piece.start + first * piece.step, piece.step, last - first))
        before += piece.size
    return found


def length(held: Sequence[Piece]) -> int:
    """How many positions these pieces have."""
    return sum(piece.size for piece in held)


def held_by(group: Any, order: Order, T: int) -> list[list[Piece]]:
    """The pieces of every rank, in rank order; for a two-dimensional mesh row by row.

    On a mesh (ulysses, ring) the sequence is sharded by `order` over the ring, and each shard is split in contiguous
    runs over the Ulysses ranks.
    """
    outer, inner = _groups(group)
    if outer is None:
        return [pieces(order, T, inner.size, rank) for rank in range(inner.size)]
    rings = [pieces(order, T, inner.size, rank) for rank in range(inner.size)]
    return [cut(ring, *_run(length(ring), outer.size, row)) for row in range(outer.size) for ring in rings]


@torch.compiler.disable
def positions(T: int, group: Any, order: Order = "zigzag") -> Tensor:
    """The positions in the whole sequence of this rank's tokens, int64 [T of this rank], for rotary embeddings."""
    held = held_by(group, order, whole("positions", "T", T, 0))[_index(group)]
    return torch.tensor([position for piece in held for position in piece.positions], dtype=torch.int64, device="cpu")


@torch.compiler.disable
def shard(x: Tensor, group: Any, order: Order = "zigzag", dim: int = 1) -> Tensor:
    """This rank's positions of a tensor that every rank has whole: x [..., T, ...] -> [..., T of this rank, ...].

    `group`: a ProcessGroup, a one-dimensional DeviceMesh, or a two-dimensional one (ulysses, ring). The gradient of x
    is that of the sum of all ranks' losses, whole and equal on every rank. Raises ValueError for an unknown order.
    """
    dim = _dimension("shard", x, dim)
    T = x.shape[dim]
    held = held_by(group, order, T)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _take(x, held[_index(group)], dim)
    taken: Tensor = _Shard.apply(x, group, held, dim)
    return taken


@torch.compiler.disable
def unshard(x: Tensor, group: Any, order: Order = "zigzag", dim: int = 1) -> Tensor:
    """The whole tensor on every rank from what each holds: x [..., T of this rank, ...] -> [..., T, ...].

    The gradient of x is that of the sum of all ranks' losses: where every rank takes the same loss of the whole, that
    is `size` times the gradient of one of them (and an average over ranks, as data parallelism takes, is right again).
    Raises ValueError for an unknown order, Disagreement when what the ranks hold are not the shards of one tensor.
    """
    return rejoined(x, group, order, dim)


def rejoined(x: Tensor, group: Any, order: Order, dim: int, also: Mapping[str, object] | None = None) -> Tensor:
    """`unshard`; the ranks also compare the facts in `also`."""
    outer, inner = _groups(group)
    groups = [inner] if outer is None else [inner, outer]
    dim = checked(groups, "unshard", _dimension, "unshard", x, dim)
    checked(groups, "unshard", _require_order, order)
    facts: dict[str, object] = {
        **(also or {}),
        "order": order,
        "dim": dim,
        "dtype": x.dtype,
        "shape without dim": [*x.shape[:dim], *x.shape[dim + 1 :]],
        "needs gradient": x.requires_grad and torch.is_grad_enabled(),
    }
    lengths = [count for row in gather_counts("unshard", groups, [x.shape[dim]], facts) for count in row]
    held = held_by(group, order, sum(lengths))
    expected = [length(each) for each in held]
    if expected != lengths:
        raise ValueError(
            f"unshard: the ranks hold {lengths} positions; order {order!r} of T={sum(lengths)} gives {expected}"
        )
    whole: Tensor = _Unshard.apply(x, group, held, dim)
    return whole


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, held: list[list[Piece]], dim: int) -> Tensor:
        ctx.group, ctx.held, ctx.dim = group, held, dim
        return _take(x, held[_index(group)], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return _Unshard.apply(grads[0], ctx.group, ctx.held, ctx.dim, "backward of shard"), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, held: list[list[Piece]], dim: int, name: str = "unshard") -> Tensor:
        ctx.group, ctx.held, ctx.dim = group, held, dim
        outer, inner = _groups(group)
        x = x.movedim(dim, 0).contiguous()
        lengths = [length(each) for each in held]
        row = 0 if outer is None else outer.rank
        mine = lengths[row * inner.size : (row + 1) * inner.size]
        with Session(inner, name) as session:
            parts = all_gather(x, [(n, *x.shape[1:]) for n in mine], session)
        if outer is not None:
            sums = [sum(lengths[i * inner.size : (i + 1) * inner.size]) for i in range(outer.size)]
            with Session(outer, name) as session:
                parts = all_gather(torch.cat(parts), [(n, *x.shape[1:]) for n in sums], session)
        everywhere = [place for each in held for piece in each for place in piece.positions]
        places = torch.tensor(everywhere, dtype=torch.int64, device=x.device)
        whole = torch.cat(parts)
        return torch.empty_like(whole).index_copy_(0, places, whole).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        return _ReduceScatter.apply(grads[0], ctx.group, ctx.held, ctx.dim), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatter: the sum over ranks of a whole tensor, sharded by positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, held: list[list[Piece]], dim: int) -> Tensor:
        ctx.group, ctx.held, ctx.dim = group, held, dim
        outer, inner = _groups(group)
        parts = [_take(x, each, dim).movedim(dim, 0).contiguous() for each in held]
        if outer is not None:
            rows = [torch.cat(parts[row * inner.size : (row + 1) * inner.size]) for row in range(outer.size)]
            with Session(outer, "unshard", "backward") as session:
                row = sum_scatter(rows, session)
            mine = held[outer.rank * inner.size : (outer.rank + 1) * inner.size]
            parts = list(row.split([length(each) for each in mine]))
        with Session(inner, "unshard", "backward") as session:
            return sum_scatter(parts, session).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return _Unshard.apply(grads[0], ctx.group, ctx.held, ctx.dim), None, None, None


def _run(T: int, runs: int, number: int) -> tuple[int, int]:
    """Start and stop of run `number` when T positions are split in `runs` runs; the first T % runs have one more."""
    small, more = divmod(T, runs)
    start = number * small + min(number, more)
    return start, start + small + (number < more)


def _take(x: Tensor, held: Sequence[Piece], dim: int) -> Tensor:
    cuts = []
    for piece in held:
        where = [slice(None)] * x.dim()
        where[dim] = slice(piece.start, piece.positions.stop, piece.step)
        cuts.append(x[tuple(where)])
    return torch.cat(cuts, dim) if cuts else x.narrow(dim, 0, 0).clone()


def _groups(group: Any) -> tuple[Group | None, Group]:
    """(None, group) of one dimension, (ulysses, ring) of a two-dimensional mesh."""
    names = getattr(group, "mesh_dim_names", None)
    if getattr(group, "ndim", 1) == 2:
        if names is None:
            raise ValueError("a two-dimensional DeviceMesh must have mesh_dim_names, such as ('ulysses', 'ring')")
        return Group.of_mesh(group)
    return None, Group.of(group)


def _index(group: Any) -> int:
    outer, inner = _groups(group)
    return inner.rank if outer is None else outer.rank * inner.size + inner.rank


def _dimension(function: str, x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"{function}: x must be a tensor, got {x!r}")
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"{function}: dim must be one of the {x.dim()} dimensions of x, got {dim!r}")
    return dim % x.dim()


def _require_order(order: object) -> None:
    if order not in get_args(Order):
        raise ValueError(f"order must be one of {', '.join(map(repr, get_args(Order)))}, got {order!r}")
