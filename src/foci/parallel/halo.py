"""halo: the last tokens of the ranks before, for short convolutions over a sequence sharded in contiguous runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.core.errors import ShapeError
from foci.core.shapes import dense
from foci.ops import arguments
from foci.parallel.exchange import Session, all_gather, gather, sum_scatter
from foci.parallel.group import Group
from foci.parallel.state_passing import TokenSharding

_NAME = "halo"


class Halo(NamedTuple):
    """The tokens before this rank's.

    before [n, width, D]: of each batch row, or of each document with tokens here. offsets [n + 1]: of those documents
    among this rank's tokens, None for batch rows. tail [N, width, D]: the last tokens of every row or document of the
    whole sequence, on every rank.
    """

    before: Tensor
    offsets: Tensor | None
    tail: Tensor


@torch.compiler.disable
def halo(x: Tensor, width: int, group: Any, *, tail: Tensor | None = None, offsets: Tensor | None = None) -> Halo:
    """The `width` tokens before this rank's x [B, T of this rank, D], the ranks holding runs of a sequence in order.

    Differentiable. tail [N, width, D]: the tokens before the first of each row or document, the same on all ranks
    (zeros by default). offsets [N + 1]: batch 1, documents end to end, of the whole sequence; none sees another. Runs
    may have any lengths, also less than `width` and 0. Every rank sends its last `width` tokens to every other.

    Raises ShapeError or ValueError for what does not fit, Disagreement where ranks differ, RankError when one fails.
    """
    group = Group.of(group)
    session = Session(group, _NAME, "forward")
    session.compute(_check, x, width, tail, offsets)
    facts: dict[str, object] = {}
    if session.failure is None:
        facts = {"width": width, "dtype": x.dtype, "rows and channels": (x.shape[0], x.shape[2]), "offsets": offsets}
        facts |= {"tail": tail is not None, "gradient": x.requires_grad and torch.is_grad_enabled()}
    lengths = [row[0] for row in session.agree(facts, [x.shape[1] if session.failure is None else 0])]
    documents = arguments.documents(_NAME, offsets, sum(lengths))
    sharding = TokenSharding(tuple(lengths), None if documents is None else tuple(documents))
    rows = x.shape[0] if documents is None else len(documents)
    first = x.new_zeros(rows, width, x.shape[2]) if tail is None else tail.to(x.dtype)
    before, last = _Halo.apply(group, sharding, x, first)
    if documents is None:
        return Halo(before, None, last)
    runs = sharding.runs(group.rank)
    joined = [torch.cat([b, x[0, r.start : r.stop]]) for b, r in zip(before, runs, strict=True) if not r.leaves]
    ended = torch.stack([each[each.shape[0] - width :] for each in joined]) if joined else before[:0]
    counts = [sum(not run.leaves for run in sharding.runs(rank)) for rank in range(group.size)]
    ends = iter(torch.cat(gather(ended, [(n, width, x.shape[2]) for n in counts], group, _NAME)))
    tails = [next(ends) if stop > start else first[n] for n, (start, stop) in enumerate(documents)]
    places = torch.tensor([0, *(run.stop for run in runs)], device=x.device)
    return Halo(before, places, torch.stack(tails) if tails else first)


class _Halo(torch.autograd.Function):
    """(before, tail) of batch rows, (before, empty) of documents. All ranks must run its backward, used or not."""

    @staticmethod
    def forward(ctx: Any, group: Group, sharding: TokenSharding, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.sharding, ctx.shape, ctx.first = group, sharding, x.shape, first.shape
        width = first.shape[1]
        with Session(group, _NAME, "forward") as session:
            ends = all_gather(
                x[:, max(x.shape[1] - width, 0) :].contiguous(), _shapes(sharding, x.shape, width), session
            )
        return _found(sharding, group.rank, ends, first)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, Tensor, Tensor]:
        return None, None, *_HaloBackward.apply(ctx.group, ctx.sharding, ctx.shape, ctx.first, *grads)


class _HaloBackward(torch.autograd.Function):
    """Gradients of x and first from those of (before, tail); linear, so its own backward is _Halo."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, sharding: TokenSharding, shape: torch.Size, first: torch.Size, *grads: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.sharding = group, sharding
        with torch.enable_grad():  # _found only moves elements: autograd transposes it
            shapes = [*_shapes(sharding, shape, first[1]), first]
            *ends, start = (grads[0].new_zeros(each, requires_grad=True) for each in shapes)
            made = _found(sharding, group.rank, ends, start)
            *parts, d_first = torch.autograd.grad(made, [*ends, start], grads, materialize_grads=True)
        with Session(group, _NAME, "backward") as session:
            mine = sum_scatter([part.contiguous() for part in parts], session)
        dx = mine.new_zeros(shape)
        dx[:, shape[1] - mine.shape[1] :] = mine
        return dx, d_first

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None, None, Tensor, Tensor]:
        return None, None, None, None, *_Halo.apply(ctx.group, ctx.sharding, *grads)


def _shapes(sharding: TokenSharding, shape: Sequence[int], width: int) -> list[tuple[int, int, int]]:
    """Shapes of the last tokens that each rank sends."""
    return [(shape[0], min(width, n), shape[2]) for n in sharding.lengths]


def _found(sharding: TokenSharding, rank: int, ends: Sequence[Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens before each run of this rank; of batch rows also the last tokens of the whole sequence."""
    here = sharding.boundaries[rank]
    befores = [
        _last(first, ends, sharding, run.rows, here) if run.enters else first[run.rows] for run in sharding.runs(rank)
    ]
    # New tensors, connected to the inputs in the graph even if empty.
    before = torch.cat([first[:0], *befores])
    if sharding.documents is not None:
        return before, first[:0].clone()
    return before, _last(first, ends, sharding, slice(None), sharding.boundaries[-1]).clone()


def _check(x: Tensor, width: int, tail: Tensor | None, offsets: Tensor | None) -> None:
    if dense(_NAME, "x", x).dim() != 3:
        raise ShapeError(f"{_NAME}: x has shape {list(x.shape)}; expected [B, T, D]")
    if not isinstance(width, int) or isinstance(width, bool) or width < 0:
        raise ValueError(f"{_NAME}: width must be a whole number of tokens, at least 0, got {width!r}")
    arguments.check_documents(_NAME, offsets, None, x.shape[0])
    expected = [arguments.rows(offsets, x.shape[0]), width, x.shape[2]]
    if tail is not None and list(dense(_NAME, "tail", tail).shape) != expected:
        raise ShapeError(f"{_NAME}: tail has shape {list(tail.shape)}; expected [N, width, D] = {expected}")


def _last(first: Tensor, ends: Sequence[Tensor], sharding: TokenSharding, rows: slice, stop: int) -> Tensor:
    """The `width` tokens before position `stop` of the whole sequence, of batch rows or of the document there."""
    start = 0 if sharding.documents is None else sharding.documents[rows.start][0]
    parts = [first[rows]]
    for rank, end in enumerate(ends):
        behind = sharding.boundaries[rank + 1]
        # Of this rank's last tokens those that belong to the document and stand before `stop`.
        low, high = max(start, behind - end.shape[1]), min(stop, behind)
        if low < high:
            parts.append(end[:, low - behind + end.shape[1] : high - behind + end.shape[1]])
    joined = torch.cat(parts, 1)
    return joined[:, joined.shape[1] - first.shape[1] :]
