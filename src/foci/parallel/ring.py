"""ring(op, group, order): ring attention; blocks of keys and values are passed round the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from foci.core.errors import ShapeError, Unsupported
from foci.core.flops import warn_uncounted
from foci.core.plans import without_autocast
from foci.core.spec import Backend, Outputs
from foci.ops.masks import Segment, segments
from foci.ops.softmax.call import Call, Gradients, Rows
from foci.ops.softmax.dropout import placed
from foci.parallel.balance import Order, Piece, length, pieces
from foci.parallel.exchange import Pending, Session, all_reduce, shift, zeros_in_message
from foci.parallel.group import Group
from foci.parallel.nested_graph import once_differentiable
from foci.parallel.operators import COUNT_INSTEAD, Bound, Operator, operator_of, refuse_transforms
from foci.parallel.ring_plan import Pair, distances, pairs


def ring(op: Callable[..., Any], group: Any, order: Order = "zigzag") -> Ring:
    """Softmax attention over a sequence that is split over the ranks of a group, in the memory of a few blocks.

        lse = log sum_r exp lse_r,   out = sum_r exp(lse_r - lse) out_r        over the keys of each rank r

    Every rank keeps its queries. Blocks of keys and values are passed round the ring: while one is computed the next is
    in flight, and its result is merged into out (float32) and lse (float64). In the backward they go round once more,
    and float32 accumulators of their gradients follow them back to their rank.

    op: `foci.attention` or `foci.attention_with_lse`; the result has its signature. group: a ProcessGroup or a one-
    dimensional DeviceMesh. order: which positions a rank holds, as `shard(x, group, order)` cuts them: "zigzag" and
    "stripe" share the work of a causal mask evenly, "plain" are runs one after the other, of any lengths. q, and k and
    v, are cut alike (T and S may differ).

    Masks mean the same as on the whole sequence in one process, whatever the order: `Causal`, `Window`, `Packed` and
    `Lengths` are the same on all ranks; `Dense` and `bias` have this rank's rows (or one for all) and every column, in
    sequence order. `sink` is the same on all ranks. Every rank gets the gradient that one process would get of the sum
    of all ranks' losses: that of its own tokens, and the full gradient of what is replicated. Dropout drops what one
    process with rank 0's generator would.

    Communication per rank: the k and v blocks of all ranks whose keys any rank at that distance sees (a window needs
    near neighbours only), in their dtype; in the backward the same, and the float32 gradients of each block once for
    each time that the block moved. The gradients of a sink, and of a bias of one row, are all-reduced.

    Calls are one graph break of torch.compile. Raises what `op` would raise, ValueError for another operator or order,
    or for lengths that are not those of the order, Disagreement when ranks are called differently, RankError on all
    ranks when one fails (the step counts blocks), Unsupported for a backend that cannot attend to parts.
    Papers: Liu et al. 2023 (arXiv 2310.01889); stripes Brandon et al. 2023 (arXiv 2311.09431).
    """
    operator = operator_of(op)
    if not isinstance(operator, Operator) or operator.spec.call is not Call:
        name, hint = getattr(op, "__name__", type(op).__name__), ""
        if isinstance(operator, Operator):
            hint = "; it has a state to hand on: handoff(op, group)"
        elif operator is not None:
            hint = "; a ring goes inside: ulysses(ring(op, inner), outer) or usp(op, mesh)"
        raise ValueError(f"ring: op must be foci.attention or foci.attention_with_lse, got {name}{hint}")
    if order not in get_args(Order):
        raise ValueError(f"ring: order must be one of {', '.join(map(repr, get_args(Order)))}, got {order!r}")
    return Ring(operator, Group.of(group), order)


@dataclass(frozen=True)
class Ring:
    """The callable that `ring` returns, with the signature of its operator; other wrappers can wrap it."""

    inner: Operator
    group: Group
    order: Order = "zigzag"

    @property
    def operator(self) -> Operator:
        return self.inner

    @torch.compiler.disable
    def __call__(self, *args: Any, **options: Any) -> Any:
        refuse_transforms(self.inner.name)
        with Session(self.group, self.inner.name, "forward") as session:
            bound = session.compute(self.inner.bind, args, options)
            outputs = self._begin(session, bound)
        assert bound is not None
        return self.inner.returns(outputs, bound)

    @torch.compiler.disable
    def run(self, call: Any, backend: str | None) -> Outputs:
        """All outputs of a bound call (parallel/operators.py)."""
        with Session(self.group, self.inner.name, "forward") as session:
            return self._begin(session, Bound(call, backend))

    def _begin(self, session: Session, bound: Bound | None) -> Outputs:
        """Check the call against the other ranks', and run it. `bound`: None if binding failed: all ranks raise."""
        facts: dict[str, object] = {}
        numbers: list[int] = []
        backends = None if bound is None else session.compute(_able, self.inner, bound.backend)
        if bound is not None:
            tokens = self.inner.tokens(bound.call)
            seed = bound.call.seed
            facts = self.inner.facts(bound.call) | {
                "strategy": f"ring over {self.group.size}, order {self.order}",
                "backend": bound.backend,
                "gradients": torch.is_grad_enabled(),
                "cut along tokens": ", ".join(tokens),
            }
            numbers = [*tokens.values(), *([] if seed is None else seed.flatten().tolist())]
        everyone = session.agree(facts, numbers)
        assert bound is not None and backends is not None
        lengths = {name: [row[place] for row in everyone] for place, name in enumerate(tokens)}
        call = bound.call
        if seed is not None:
            call = call._replace(seed=seed.new_tensor(everyone[0][len(tokens) :]).view(seed.shape))
        plan = _plan(self, call, lengths, backends)
        warn_uncounted(f"ring of {self.inner.name}", COUNT_INSTEAD)
        out, lse = _Ring.apply(plan, session, call, *(getattr(call, name) for name in _INPUTS))
        return out, lse


_INPUTS = ("q", "k", "v", "bias", "sink")
_LARGE = 1 << 21  # elements of a block from which it goes round in two turns
_COPIED = 1 << 19  # elements of q that a part may copy on a CPU: 2 MB, as much as the logits that backends hold at once


class _Plan(NamedTuple):
    """Everything about a call except its tensors, equal on all ranks. `turns`: key heads that go round together."""

    group: Group
    name: str
    backends: tuple[Backend, ...]
    segments: list[Segment]
    queries: list[list[Piece]]
    keys: list[list[Piece]]
    distances: list[int]
    turns: list[slice]
    q_apart: bool
    k_apart: bool
    shared_bias: bool
    accumulator: torch.dtype

    def pairs_with(self, distance: int) -> list[Pair]:
        """The pairs of this rank's queries with the keys of rank (this - distance)."""
        mine, theirs = self.queries[self.group.rank], self.keys[self._from(distance)]
        return pairs(self.segments, mine, theirs, q_apart=self.q_apart, k_apart=self.k_apart)

    def shapes(self, distance: int, like: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """The shapes [B, G, S, .] of that block's k and v: heads before tokens, the layout of the computation."""
        size = length(self.keys[self._from(distance)])
        return [(x.shape[0], x.shape[2], size, x.shape[3]) for x in like]

    def _from(self, distance: int) -> int:
        return (self.group.rank - distance) % self.group.size


def _plan(wrapper: Ring, call: Call, lengths: dict[str, list[int]], backends: tuple[Backend, ...]) -> _Plan:
    """Checks sizes of the whole sequence, too: every rank knows them, and raises the same error."""
    operator = wrapper.inner
    own = {name: _own_rows(operator.name, name, call, lengths) for name in ("bias", "dense")}
    T, S = sum(lengths["q"]), sum(lengths["k"])
    stand_ins = {}
    for name, letters in operator.letters.items():
        tensor = getattr(call, name)
        if isinstance(tensor, Tensor):
            shape, place = list(tensor.shape), letters.token(tensor)
            if place is not None and own.get(name, True):
                shape[place] = sum(lengths[name])
            tensor = tensor.new_empty(()).expand(shape)
        stand_ins[name] = tensor
    operator.signature.bind(stand_ins)
    whole = segments(call.visible, call.q.shape[0], T, S)
    queries, keys = _held(wrapper, "q", lengths["q"]), _held(wrapper, "k", lengths["k"])
    columns = any(x is not None and x.dim() and x.shape[-1] != 1 for x in (call.bias, call.dense))
    return _Plan(
        group=wrapper.group, name=operator.name, backends=backends, segments=whole, queries=queries, keys=keys,
        distances=distances(whole, queries, keys), turns=_turns(call, max(lengths["k"])), q_apart=call.seed is not None,
        k_apart=call.seed is not None or columns, shared_bias=not own["bias"], accumulator=call.accumulator,
    )  # fmt: skip


def _turns(call: Call, longest: int) -> list[slice]:
    """Slices of key heads that go round together. Large blocks take two turns: half the memory, the same traffic."""
    B, _, _, _, G, K, V = call.sizes
    half = -(-G // 2) if B * longest * G * (K + V) >= _LARGE else G
    return [slice(g, min(g + half, G)) for g in range(0, G, half)] if half else [slice(0, 0)]


def _held(wrapper: Ring, name: str, lengths: list[int]) -> list[list[Piece]]:
    """The positions of every rank. Runs in plain order may have any lengths; other orders fix them."""
    size = len(lengths)
    if wrapper.order == "plain":
        starts = [sum(lengths[:rank]) for rank in range(size)]
        return [[Piece(start, 1, n)] if n else [] for start, n in zip(starts, lengths, strict=True)]
    held = [pieces(wrapper.order, sum(lengths), size, rank) for rank in range(size)]
    if (expected := [length(each) for each in held]) != lengths:
        raise ValueError(
            f"{wrapper.inner.name}: the ranks hold {lengths} tokens of {name}; order {wrapper.order!r} of "
            f"{sum(lengths)} gives {expected}: cut them with shard(x, group, {wrapper.order!r})"
        )
    return held


def _own_rows(function: str, name: str, call: Call, lengths: dict[str, list[int]]) -> bool:
    """Whether the rows of a bias are this rank's own, not one row for all. All ranks get the same answer."""
    if name not in lengths:  # absent, or without a dimension of rows
        return False
    sizes, rows = lengths[name], lengths["q"]
    own, single = sizes == rows, all(size == 1 for size in sizes)
    if own and single and len(rows) > 1 and name == "bias" and call.bias is not None and call.bias.requires_grad:
        raise ValueError(
            f"{function}: {name} has one row on each of {len(rows)} ranks, which have one token each: whether they are "
            "one and the same row cannot be told, and its gradient would differ"
        )
    if not own and not single:
        raise ShapeError(f"{function}: {name} has {sizes} rows on the ranks; expected 1 or T={rows}")
    return own


def _able(operator: Operator, backend: str | None) -> tuple[Backend, ...]:
    """The backends that can merge attention to a part of the keys; only the named one, if any."""
    spec = operator.spec
    asked = spec.backends if backend is None else (spec.backend(backend),)
    able = tuple(each for each in asked if not each.missing() and hasattr(each.load(), "forward_part"))
    if not able:
        raise Unsupported(
            f"{operator.name}: backend {backend!r} cannot run this call",
            ["a ring needs attention in parts, which this backend does not give"],
            "use backend=None to let foci choose",
        )
    return able


class _Part(NamedTuple):
    """A Pair of query and key ranges, for some key heads and the query heads that read them."""

    pair: Pair
    groups: slice
    first: int  # key head of the block
    shared: int  # query heads per key head

    @property
    def heads(self) -> slice:
        return slice(self.groups.start * self.shared, self.groups.stop * self.shared)

    @property
    def rows(self) -> tuple[slice, ...]:
        """The index into a [B, T, H, ...] tensor."""
        return slice(None), self.pair.queries, self.heads

    @property
    def keys(self) -> tuple[slice, ...]:
        """The index into a block [B, S, some of G, ...]."""
        return slice(None), self.pair.keys, slice(self.groups.start - self.first, self.groups.stop - self.first)

    def pairs(self, x: Tensor | None) -> Tensor | None:
        """The part of a bias or dense mask (this rank's rows, every column); broadcast dimensions stay 1."""
        if x is None:
            return None
        if x.dim() >= 1 and x.shape[-1] != 1:
            assert self.pair.k_piece is not None
            places = self.pair.k_piece.positions
            x = x[..., places.start : places.stop : places.step]
        if x.dim() >= 2 and x.shape[-2] != 1:
            x = x[..., self.pair.queries, :]
        return x[..., self.heads, :, :] if x.dim() >= 3 and x.shape[-3] != 1 else x


class _Local:
    """The local computation of one turn: this rank's queries with one block after another."""

    def __init__(self, plan: _Plan, call: Call, needs: Sequence[bool], groups: slice) -> None:
        self.plan, self.call, self.needs, self.groups = plan, call, needs, groups
        self.own = [x[:, :, groups] for x in (call.k, call.v)]

    def block(self, session: Session) -> list[Tensor]:
        """This rank's k and v, [B, G, S, .], in the buffer of a message, so that sending needs no copy."""
        block = zeros_in_message(self.plan.shapes(0, self.own), self.own, session)
        for place, tensor in zip(block, self.own, strict=True):
            place.copy_(tensor.transpose(1, 2))
        return block

    def attend(self, distance: int, block: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
        """Merge attention to the block of rank (this - distance) into out and lse."""
        with without_autocast(self.call.q):
            for part in self._parts(distance):
                call = self._part_call(part, block)
                self._module(call).forward_part(call, out[part.rows], lse[part.rows])

    def attend_backward(
        self, distance: int, block: Sequence[Tensor], rows: Rows, dq: Tensor, sums: Sequence[Tensor],
        dbias: Tensor | None,
    ) -> None:  # fmt: skip
        """The backward of `attend`: add to the gradients of the queries, of the block (`sums`), and of the bias."""
        with without_autocast(self.call.q):
            for part in self._parts(distance):
                call = self._part_call(part, block)
                own = Rows(*(None if x is None else x[part.rows] for x in rows))  # type: ignore[arg-type]
                dk, dv = (x.transpose(1, 2)[part.keys] for x in sums)
                self._module(call).backward_part(call, own, Gradients(dq[part.rows], dk, dv, part.pairs(dbias)))

    def _parts(self, distance: int) -> Iterator[_Part]:
        """The pairs with a block; on a CPU only some heads at a time, so that copies of q stay small."""
        B, _, _, H, G, K, V = self.call.sizes
        for pair in self.plan.pairs_with(distance):
            step = max(1, G)
            if self.call.q.device.type == "cpu":
                copied = B * (pair.queries.stop - pair.queries.start) * (H // G) * max(K, V)
                step = max(1, min(G, _COPIED // max(1, copied)))
            for g in range(self.groups.start, self.groups.stop, step):
                yield _Part(pair, slice(g, min(g + step, self.groups.stop)), self.groups.start, H // G)

    def _part_call(self, part: _Part, block: Sequence[Tensor]) -> Call:
        """One pair as a Call; `block`: k and v, heads before tokens. Without the sink, which lse starts from."""
        call = self.call
        k, v = (x.transpose(1, 2)[part.keys] for x in block)
        seed = call.seed
        if seed is not None:
            pair = part.pair
            assert pair.q_piece is not None and pair.k_piece is not None
            start, step = seed[3:5].tolist() if seed.dim() else (0, 1)
            head = (start + step * part.heads.start, step)
            seed = placed(seed, h=head, t=pair.q_piece[:2], s=pair.k_piece[:2])
        visible = part.pair.visible._replace(dense=part.pairs(call.dense))
        return call._replace(
            q=call.q[part.rows], k=k, v=v, bias=part.pairs(call.bias), sink=None, seed=seed, **visible._asdict()
        )

    def _module(self, call: Call) -> Any:
        """The module of the first backend that can run this part and its needed gradients."""
        marked = call._replace(q=call.q.detach().requires_grad_())
        if call.bias is not None:
            marked = marked._replace(bias=call.bias.detach().requires_grad_(self.needs[3]))
        with torch.enable_grad() if any(self.needs) else torch.no_grad():
            refused = {}
            for backend in self.plan.backends:
                reasons = backend.reasons(marked)
                if not reasons:
                    return backend.load()
                refused[backend.name] = reasons
        raise Unsupported(
            f"{self.plan.name}: no backend can run a part of this call",
            [f"{name}: {reason}" for name, against in refused.items() for reason in against],
            "use backend=None to let foci choose",
        )


def _filled(call: Call, inputs: Sequence[Tensor | None]) -> Call:
    fields: dict[str, Any] = dict(zip(_INPUTS, inputs, strict=True))
    return call._replace(**fields)


class _Ring(torch.autograd.Function):
    """Ring attention: one round with k and v; in the backward another, with their gradients."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, session: Session, call: Call, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        call = _filled(call, inputs)
        B, T, _, H, _, _, V = call.sizes
        out = torch.zeros(B, T, H, V, dtype=plan.accumulator, device=call.q.device)
        lse = torch.full((B, T, H), -torch.inf, dtype=torch.float64, device=call.q.device)
        if call.sink is not None:
            lse.copy_(call.sink)
        for groups in plan.turns:
            side = _Local(plan, call, ctx.needs_input_grad[3:], groups)
            block = side.block(session)
            for step, (distance, following) in enumerate(_moves([*plan.distances, 0])):
                session.step = step
                shapes = plan.shapes(following, side.own)
                coming = shift(block, shapes, following - distance, session) if following else None
                session.compute(side.attend, distance, block, out, lse)
                block = block if coming is None else coming.wait()
        ctx.plan, ctx.call = plan, _filled(call, [None] * len(_INPUTS))._replace(dense=None, seed=None)
        lse = lse.to(plan.accumulator)
        # Saved in float32: the backward's sum(dout * out) must not have the rounding of a half-precision out.
        ctx.save_for_backward(*inputs, call.dense, call.seed, out, lse)
        ctx.set_materialize_grads(False)
        rounded = out.to(call.v.dtype)
        return (rounded, lse) if rounded is not out else (out, lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        plan = ctx.plan
        *inputs, dense, seed, out, lse = ctx.saved_tensors
        call = _filled(ctx.call, inputs)._replace(dense=dense, seed=seed)
        with Session(plan.group, plan.name, "backward") as session:
            found = _backward(plan, call, ctx.needs_input_grad[3:], session, (out, lse), grads)
        wanted = zip(inputs, found, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(grad.to(x.dtype) if need and grad is not None else None for x, grad, need in wanted)


def _backward(
    plan: _Plan, call: Call, needs: Sequence[bool], session: Session, outputs: tuple[Tensor, Tensor],
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v, bias and sink in the accumulator's dtype."""
    rows = session.compute(_rows, plan, outputs, grads)
    dq = torch.zeros(call.q.shape, dtype=plan.accumulator, device=call.q.device)
    dbias = dsink = None
    if call.bias is not None and needs[3]:
        dbias = torch.zeros(call.bias.shape, dtype=dq.dtype, device=dq.device)
    turns = [_backward_turn(_Local(plan, call, needs, groups), session, rows, dq, dbias) for groups in plan.turns]
    if dbias is not None and plan.shared_bias:
        dbias = all_reduce(dbias, session)
    if call.sink is not None and needs[4]:
        given = session.compute(_sink_gradient, call.sink, outputs[1], rows)
        dsink = all_reduce(call.sink.new_zeros(call.sink.shape, dtype=dq.dtype) if given is None else given, session)
    # dk, dv [B, G, S, .], the heads of all turns.
    dk, dv = (each[0] if len(each) == 1 else torch.cat(each, 1) for each in zip(*turns, strict=True))
    return dq, dk.transpose(1, 2), dv.transpose(1, 2), dbias, dsink


def _backward_turn(side: _Local, session: Session, rows: Rows | None, dq: Tensor, dbias: Tensor | None) -> list[Tensor]:
    """One backward round with some key heads: adds to dq and dbias, returns dk and dv of this rank's own block.

    The own block is computed last, while its accumulated gradients from the other ranks are in flight.
    """
    plan = side.plan
    sums_like = [x.new_empty(0, dtype=plan.accumulator) for x in side.own]
    away = plan.distances[1:]
    block = side.block(session)
    if away:
        block = shift(block, plan.shapes(away[0], side.own), away[0], session).wait()
    returning: Pending | None = None
    for step, (distance, following) in enumerate(_moves([*away, 0])):
        session.step = step
        shapes = plan.shapes(following, side.own)
        coming = shift(block, shapes, following - distance, session) if following else None
        sums = zeros_in_message(plan.shapes(distance, side.own), sums_like, session)
        session.compute(side.attend_backward, distance, block, rows, dq, sums, dbias)
        _add(sums, returning)
        returning = shift(sums, shapes, following - distance, session)
        block = block if coming is None else coming.wait()
    session.step = len(away)
    if away:
        block = side.block(session)
    sums = [torch.zeros_like(x, dtype=dq.dtype) for x in block]
    session.compute(side.attend_backward, 0, block, rows, dq, sums, dbias)
    _add(sums, returning)
    return sums


def _add(sums: Sequence[Tensor], coming: Pending | None) -> None:
    if coming is not None:
        for total, more in zip(sums, coming.wait(), strict=True):
            total += more


def _rows(plan: _Plan, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, ...]) -> Rows:
    out, lse = outputs
    dout = torch.zeros_like(out) if grads[0] is None else grads[0].to(plan.accumulator)
    delta = torch.linalg.vecdot(dout, out)
    return Rows(out, lse, dout, grads[1], delta if grads[1] is None else delta.sub_(grads[1]))


def _sink_gradient(sink: Tensor, lse: Tensor, rows: Rows) -> Tensor:
    """dsink = -sum_t exp(sink - lse) delta over this rank's rows, where delta = sum(dout * out) - dlse."""
    share = torch.exp(sink.to(lse.dtype) - lse).masked_fill_(lse == -torch.inf, 0.0)
    return share.mul_(rows.delta).sum((0, 1)).neg_()


def _moves(distances: Sequence[int]) -> list[tuple[int, int]]:
    """Each distance but the last, with its successor."""
    return list(pairwise(distances))
