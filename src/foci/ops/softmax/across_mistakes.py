"""Known bugs of softmax attention over ranks: the outputs that each would give, computed on the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from foci.core.spec import Inputs, Outputs
from foci.ops.masks import NOTHING_HIDDEN, materialize
from foci.ops.softmax.call import Call, bind, never_empty
from foci.ops.softmax.dropout import keep
from foci.ops.softmax.reference import forward

Places = list[Tensor]


class Whole(NamedTuple):
    """A call, and for each query and key its rank and its local position there."""

    call: Call
    allowed: Tensor
    queries: Places
    keys: Places
    q_rank: Tensor
    k_rank: Tensor
    q_local: Tensor
    k_local: Tensor

    @property
    def equal(self) -> bool:
        return len({len(part) for part in self.keys}) == 1

    def under(self, allowed: Tensor) -> Call:
        """The call under another mask."""
        dense = allowed[(None,) * (4 - allowed.dim())]
        return self.call._replace(**NOTHING_HIDDEN._replace(dense=dense)._asdict())

    def without(self, *fields: str) -> Tensor:
        """The mask without some of its parts, as a boolean tensor."""
        visible = self.call.visible._replace(**{name: getattr(NOTHING_HIDDEN, name) for name in fields})
        return materialize(visible, *self.allowed.shape[-2:])


Ways = Iterator[tuple[str, Call | Outputs]]
Told = Iterator[tuple[str, Outputs]]


def hypotheses(
    places: Callable[[int], Places],
    others: Mapping[str, Callable[[int], Places]],
    words: Callable[[int], int] = lambda length: 0,
) -> Callable[[Inputs], Told]:
    """A function from inputs to known bugs of attention over ranks, each a sentence and the outputs it would give.

    `places`: the positions of each rank for a length; `others`: those in the other orders. `words`: how many leading
    tokens are text replicated on every rank; if there are any, only bugs with text are returned.
    """

    def tell(inputs: Inputs) -> Told:
        call = bind(**inputs)
        T, S = call.q.shape[1], call.k.shape[1]
        if words(T):
            yield from _text(call, words(T), words(S), len(places(T)))
            return
        queries, keys = places(T), places(S)
        whole = Whole(
            call, materialize(call.visible, T, S), queries, keys, _rank(queries, T), _rank(keys, S), _local(queries, T),
            _local(keys, S),
        )  # fmt: skip
        for ways in (_blocks, _causal, _windows, _columns, _order, _merged, _counted, _dropout):
            for sentence, found in ways(whole):
                yield sentence, forward(found) if isinstance(found, Call) else found
        for name, other in others.items():
            outputs = _believed(inputs, places, other)
            if outputs is not None:
                yield f"as if the shards were in {name} order, which they are not (wrong positions)", outputs

    return tell


def _text(call: Call, T: int, S: int, size: int) -> Told:
    """Joint attention in which the leading text is counted wrongly."""
    call, columns = call._replace(**NOTHING_HIDDEN._asdict()), torch.arange(call.k.shape[1], device="cpu") < S
    once = torch.where(columns, math.log(size), 0.0).to(call.q.dtype).view(1, 1, 1, -1)
    bias = once if call.bias is None else call.bias + once
    yield "as if the text counted once for every rank", forward(call._replace(bias=bias))
    yield "as if the text were never attended to", forward(call._replace(dense=(~columns).view(1, 1, 1, -1)))
    rows = torch.arange(call.q.shape[1], device="cpu") < T
    yield "as if text attended to text alone", forward(call._replace(dense=(columns | ~rows[:, None])[None, None]))


def _rank(parts: Places, length: int) -> Tensor:
    return torch.empty(length, dtype=torch.int64, device="cpu").index_copy_(
        0, torch.cat(parts), torch.cat([torch.full_like(part, rank) for rank, part in enumerate(parts)])
    )


def _local(parts: Places, length: int) -> Tensor:
    return torch.empty(length, dtype=torch.int64, device="cpu").index_copy_(
        0, torch.cat(parts), torch.cat([torch.arange(len(part), device="cpu") for part in parts])
    )


OWN = "as if each rank attended to its own keys alone"
MISSED = "as if the ring stopped one step early: one rank's keys are never seen"
MISSED_NEXT = "as if the keys of the next rank were never seen"
CAUSAL_LOCAL = "as if causal went by positions within the block (a local mask), where it goes by those in the sequence"
CAUSAL_DIAGONAL = "as if causal hid nothing but within a rank's own block: later blocks are attended to"
CAUSAL_BLOCKS = "as if causal skipped later blocks and hid nothing within a rank's own"
WINDOW_LOCAL = "as if the window went by positions within the block (a local window)"
WINDOW_ALL_LOCAL = "as if window and causal both went by positions within the block (local masks)"
WINDOW_DIAGONAL = "as if the window held within a rank's own block alone"
COLUMNS_OWN = "as if each rank applied its own part of the mask to every block of keys (a local mask)"
COLUMNS_FIRST = "as if the first columns of the mask were applied to every block of keys"
LENGTHS_LOCAL = "as if lengths counted within each block (a local mask)"
BIAS_OWN = "as if each rank added its own columns of the bias to every block of keys"
BIAS_FIRST = "as if the first columns of the bias were added to every block of keys"
KEYS_REVERSED = "as if the ranks' keys came in reverse rank order"
KEYS_NEXT = "as if the keys were taken for those of the next rank (wrong rank order)"
KEYS_BEFORE = "as if the keys were taken for those of the rank before (wrong rank order)"
OUT_REVERSED = "the ranks hold each other's results, in reverse rank order"
OUT_NEXT = "each rank holds the result of the next (wrong rank order)"
OUT_BEFORE = "each rank holds the result of the one before (wrong rank order)"
AVERAGED = "as if every block's lse were zeros: blocks are averaged, whatever their weight"
AVERAGED_ALL = "as if every block's lse were zeros: blocks are averaged, those that are hidden too"
SUMMED = "as if the blocks' outputs were added up without their weights"
LOG2 = "as if the blocks' lse were in log2 when they are merged"
SINKS = "as if the sink counted once for every block of keys"
TWICE = "as if a rank's own keys counted twice"
DROPOUT_ROWS = "as if dropout went by the rank's own query positions: its mask depends on the rank"
DROPOUT_LOCAL = "as if dropout went by positions within the block: every block drops alike, and by rank"
DROPOUT_RANK = "as if every rank drew dropout from a seed of its own (rank-dependent dropout)"


def _blocks(w: Whole) -> Ways:
    size = len(w.keys)
    yield OWN, w.under(w.allowed & (w.q_rank[:, None] == w.k_rank))
    for sentence, step in ((MISSED, 1), (MISSED_NEXT, -1)):
        if size > 1:
            yield sentence, w.under(w.allowed & ((w.q_rank[:, None] - step) % size != w.k_rank))


def _causal(w: Whole) -> Ways:
    if not (w.call.causal_end or w.call.causal_start):
        return
    rest = w.without("causal_end", "causal_start")
    own = w.q_rank[:, None] == w.k_rank
    yield CAUSAL_LOCAL, w.under(rest & (w.k_local <= w.q_local[:, None]))
    yield CAUSAL_DIAGONAL, w.under(torch.where(own, w.allowed, rest))
    yield CAUSAL_BLOCKS, w.under(rest & (w.k_rank <= w.q_rank[:, None]))


def _windows(w: Whole) -> Ways:
    left, right = w.call.left, w.call.right
    if left is None and right is None:
        return
    apart = w.k_local - w.q_local[:, None]
    near = torch.ones_like(apart, dtype=torch.bool)
    if left is not None:
        near &= apart >= -left
    if right is not None:
        near &= apart <= right
    rest = w.without("left", "right")
    yield WINDOW_LOCAL, w.under(rest & near)
    bare = w.without("left", "right", "causal_end", "causal_start")
    if w.call.causal_end or w.call.causal_start:
        yield WINDOW_ALL_LOCAL, w.under(bare & near & (apart <= 0))
    yield WINDOW_DIAGONAL, w.under(torch.where(w.q_rank[:, None] == w.k_rank, w.allowed, rest))


def _columns(w: Whole) -> Ways:
    """Masks and biases with the columns of another block."""
    if not w.equal or len(w.queries) != len(w.keys):
        return
    S = len(w.k_local)
    stack = torch.stack(w.keys)
    own, first = stack[w.q_rank[:, None], w.k_local], stack[0][w.k_local].expand(len(w.q_local), -1)
    if w.call.kv_lengths is not None or w.call.dense is not None:
        hiding = materialize(NOTHING_HIDDEN._replace(kv_lengths=w.call.kv_lengths, dense=w.call.dense), len(own), S)
        rest = w.without("kv_lengths", "q_lengths", "dense")
        for sentence, columns in ((COLUMNS_OWN, own), (COLUMNS_FIRST, first)):
            yield sentence, w.under(rest & _taken(hiding, columns))
    if w.call.kv_lengths is not None:
        rest = w.without("kv_lengths", "q_lengths")
        yield LENGTHS_LOCAL, w.under(rest & (w.k_local < w.call.kv_lengths[:, None, None, None]))
    if w.call.bias is not None:
        for sentence, columns in ((BIAS_OWN, own), (BIAS_FIRST, first)):
            yield sentence, w.call._replace(bias=_taken(w.call.bias, columns))


def _taken(tensor: Tensor, columns: Tensor) -> Tensor:
    """A tensor [..., T or 1, S or 1] with row t's columns taken at columns[t], [T, S]."""
    T, S = columns.shape
    spread = tensor.expand(*tensor.shape[:-2], T, S)
    return spread.gather(-1, columns.expand_as(spread))


def _order(w: Whole) -> Ways:
    size = len(w.keys)
    if not w.equal or len({len(part) for part in w.queries}) > 1:
        return
    turned = {
        "reversed": [size - 1 - rank for rank in range(size)],
        "next": [(rank + 1) % size for rank in range(size)],
        "before": [(rank - 1) % size for rank in range(size)],
    }
    out, lse = forward(w.call)
    for word, keys, results in (
        ("reversed", KEYS_REVERSED, OUT_REVERSED),
        ("next", KEYS_NEXT, OUT_NEXT),
        ("before", KEYS_BEFORE, OUT_BEFORE),
    ):
        source = torch.cat([w.keys[rank] for rank in turned[word]])
        place = torch.empty_like(source).index_copy_(0, torch.cat(w.keys), source)
        yield keys, w.call._replace(k=w.call.k[:, place], v=w.call.v[:, place])
        source = torch.cat([w.queries[rank] for rank in turned[word]])
        place = torch.empty_like(source).index_copy_(0, torch.cat(w.queries), source)
        yield results, (out[:, place], lse[:, place])


def _merged(w: Whole) -> Ways:
    """Blocks merged with wrong weights."""
    pairs = [forward(w.under(w.allowed & (w.k_rank == rank))) for rank in range(len(w.keys))]
    outs, lses = torch.stack([out for out, _ in pairs]), torch.stack([lse for _, lse in pairs])
    seen = torch.stack(
        [_any(w, rank) for rank in range(len(w.keys))]
    )  # [ranks, T]: whether a query's rank sees a block
    weights = seen[:, None, :, None].to(outs.dtype).expand_as(lses)
    count = weights.sum(0).clamp(min=1)
    yield AVERAGED, ((outs * weights[..., None]).sum(0) / count[..., None], count.log())
    yield AVERAGED_ALL, (outs.mean(0), torch.full_like(lses[0], math.log(len(outs))))
    yield SUMMED, (outs.sum(0), lses.logsumexp(0))
    other = lses / math.log(2)
    total = other.logsumexp(0)
    shares = (other - never_empty(total)).exp()
    yield LOG2, ((outs * shares[..., None]).sum(0), total)


def _any(w: Whole, block: int) -> Tensor:
    """For every query, whether any query on its rank sees any key of a block."""
    seen = (w.allowed & (w.k_rank == block)).flatten(0, 1).any(0).any(-1)
    return torch.stack([seen[part].any() for part in w.queries])[w.q_rank]


def _counted(w: Whole) -> Ways:
    if w.call.sink is not None:
        yield SINKS, w.call._replace(sink=w.call.sink + math.log(len(w.keys)))
    again = torch.where(w.q_rank[:, None] == w.k_rank, math.log(2), 0.0).to(w.call.q.dtype)[None, None]
    yield TWICE, w.call._replace(bias=again if w.call.bias is None else w.call.bias + again)


def _dropout(w: Whole) -> Ways:
    """Dropout masks hashed from local positions, or from a different seed on each rank."""
    if w.call.seed is None:
        return
    B, T, S, H, *_ = w.call.sizes
    b, h = torch.arange(B, device="cpu").view(-1, 1, 1, 1), torch.arange(H, device="cpu").view(-1, 1, 1)
    _, lse = forward(w.call)
    t, s, seed, p = torch.arange(T, device="cpu")[:, None], torch.arange(S, device="cpu"), w.call.seed, w.call.dropout
    local = w.q_local[:, None]
    for sentence, rows, columns, seeds in (
        (DROPOUT_ROWS, local, s, seed),
        (DROPOUT_LOCAL, local, w.k_local, seed),
        (DROPOUT_RANK, local, s, seed + w.q_rank[:, None]),
        (DROPOUT_RANK, t, s, seed + w.q_rank[:, None]),
    ):
        kept = keep(seeds, p, b, h, rows, columns)
        out, weight = forward(w.under(kept & w.allowed)._replace(seed=None, dropout=0.0))
        yield sentence, (out * ((weight - never_empty(lse)).exp() / (1 - p))[..., None], lse)


def _believed(inputs: Inputs, places: Callable[[int], Places], other: Callable[[int], Places]) -> Outputs | None:
    """Shards in one order, computed as if they were in another."""
    T, S = inputs["q"].shape[1], inputs["k"].shape[1]
    moved = dict(inputs)
    for name, length in (("q", T), ("k", S), ("v", S)):
        if [len(part) for part in places(length)] != [len(part) for part in other(length)]:
            return None
        moved[name] = _moved(inputs[name], torch.cat(places(length)), torch.cat(other(length)))
    out, lse = forward(bind(**moved))
    back = torch.cat(other(T)), torch.cat(places(T))
    return _moved(out, *back), _moved(lse, *back)


def _moved(tensor: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return torch.empty_like(tensor).index_copy_(1, target, tensor[:, source])
