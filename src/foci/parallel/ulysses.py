"""ulysses(op, group): an all-to-all from tokens to heads, the operator, and back; usp(op, mesh): a ring inside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.core.errors import ShapeError
from foci.core.spec import Outputs
from foci.ops import arguments
from foci.ops.masks import check
from foci.ops.softmax.dropout import placed
from foci.parallel.balance import Order
from foci.parallel.exchange import Session, exchange, gather_counts
from foci.parallel.group import Group
from foci.parallel.heads import Route, Share, shares
from foci.parallel.nested_graph import NestedGraph, once_differentiable
from foci.parallel.opaque import opaque
from foci.parallel.operators import Bound, Letters, Operator, Runs, operator_of
from foci.parallel.ring import ring
from foci.parallel.shard_positions import groups_of

SCATTER, COMPUTE, GATHER = 0, 1, 2  # the steps of a protocol, as errors name them


def ulysses(op: Callable[..., Any], group: Any) -> Ulysses:
    """`op` over a sequence sharded over the ranks of a group: each rank computes all tokens of some of the heads.

        q, k, v [B, T of this rank, H, .]  ->  [B, T, H of this rank, .]  ->  op  ->  out [B, T of this rank, H, V]

    op: an operator of foci (`attention`, `linear_attention`, `delta_rule`, `scan` ...; channels are its heads where it
    has none), a wrapper, or any callable of q, k, v that returns out. group: a ProcessGroup or a one-dimensional
    DeviceMesh. The result has the signature of `op`.

    Ranks hold contiguous runs of tokens in rank order, of any lengths: the shards of `shard(x, group, "plain")`. Heads
    are distributed as evenly as possible; with fewer heads than ranks some compute none; k and v may have fewer heads
    than there are ranks. Masks are those of the whole sequence; bias and Dense have this rank's rows and every column.
    Arguments without tokens (sink, bonus, state, a decay per head) are the same on all ranks, and so is a final state.
    Every rank gets the gradient that one process would get of the sum of all ranks' losses: that of its own tokens, and
    the full gradient of what is replicated. Dropout drops what one process with rank 0's generator would.

    Calls are one graph break of torch.compile. Raises what `op` would raise, ValueError for a group that has more than
    this rank in common with a wrapper's inside, Disagreement when ranks are called differently or groups are no grid,
    RankError on all ranks when one fails (step 0: heads for tokens, 1: the operator, 2: tokens for heads).
    Paper: Jacobs et al. 2023 (arXiv 2309.14509).
    """
    found = Ulysses(operator_of(op) or opaque(op), Group.of(group))
    outer, *within = groups_of(found)
    for each in within:
        if len(set(outer.ranks) & set(each.ranks)) > 1:
            raise ValueError(
                f"ulysses: group has ranks {list(outer.ranks)}, a wrapper inside {list(each.ranks)}; expected groups "
                "that have this rank alone in common, as the dimensions of a mesh have: usp(op, mesh)"
            )
    return found


def usp(op: Callable[..., Any], mesh: Any, order: Order = "zigzag") -> Ulysses:
    """Softmax attention over a two-dimensional DeviceMesh: Ulysses over its first dimension, a ring over its second.

    The sequence is sharded by `order` over the ring, and each ring shard is split in runs over the Ulysses ranks, as
    `shard(x, mesh, order)` does. Everything else is as `ulysses` and `ring` say. Paper: Fang and Zhao 2024 (arXiv
    2405.07719).
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if getattr(mesh, "ndim", 0) != 2 or names is None:
        raise ValueError(f"usp: mesh must be a DeviceMesh of two named dimensions (ulysses, ring), got {mesh!r}")
    outer, inner = Group.of_mesh(mesh)
    return ulysses(ring(op, inner, order=order), outer)


@dataclass(frozen=True)
class Ulysses:
    """The callable that `ulysses` returns, with the signature of its operator; other wrappers can wrap it."""

    inner: Runs
    group: Group

    @property
    def operator(self) -> Operator:
        return self.inner.operator

    @torch.compiler.disable
    def __call__(self, *args: Any, **options: Any) -> Any:
        with Session(self.group, self.operator.name, "forward", groups_of(self.inner)) as session:
            bound = session.compute(self.operator.bind, args, options)
            outputs = self._begin(session, bound)
        assert bound is not None
        return self.operator.returns(outputs, bound)

    @torch.compiler.disable
    def run(self, call: Any, backend: str | None) -> Outputs:
        """All outputs of a bound call (parallel/operators.py)."""
        with Session(self.group, self.operator.name, "forward", groups_of(self.inner)) as session:
            return self._begin(session, Bound(call, backend), all_of_them=True)

    def _begin(self, session: Session, bound: Bound | None, all_of_them: bool = False) -> Outputs:
        """Check the call against the other ranks', and run it. `bound`: None if binding failed: all ranks raise."""
        operator = self.operator
        facts: dict[str, object] = {}
        numbers: list[int] = []
        if bound is not None:
            tokens = operator.tokens(bound.call)
            seed = getattr(bound.call, "seed", None)
            facts = operator.facts(bound.call) | {
                "strategy": f"ulysses over {self.group.size}",
                "backend": bound.backend,
                "gradients": torch.is_grad_enabled(),
                "cut along tokens": ", ".join(tokens),
                "this rank's place in the groups inside": [each.rank for each in groups_of(self.inner)],
            }
            numbers = [*tokens.values(), *([] if seed is None else seed.flatten().tolist())]
        everyone = session.agree(facts, numbers)
        assert bound is not None
        call, plan = self._planned(bound.call, tuple(tokens), everyone)
        wanted = len(operator.results) if all_of_them else operator.wanted(bound)
        tensors = [getattr(call, name) for name in plan.routes]
        return tuple(_Exchanged.apply(plan, session, call, bound.backend, wanted, *tensors))

    def _planned(self, call: Any, names: tuple[str, ...], everyone: list[list[int]]) -> tuple[Any, _Plan]:
        """The call with rank 0's seed, and its plan, from the sizes on every rank."""
        lengths = {name: tuple(row[place] for row in everyone) for place, name in enumerate(names)}
        seed = getattr(call, "seed", None)
        if seed is not None:
            call = call._replace(seed=seed.new_tensor(everyone[0][len(names) :]).view(seed.shape))
        return call, _plan(self.inner, self.group, call, lengths, self._rows(call))

    def _rows(self, call: Any) -> dict[str, list[list[int]]]:
        """Numbers of queries and of rows of bias and Dense on every rank of all groups, as one group is ambiguous."""
        found = {}
        for name, letters in self.operator.letters.items():
            tensor = getattr(call, name)
            if isinstance(tensor, Tensor) and letters.broadcast and not isinstance(self.inner, Operator):
                token = letters.token(tensor)
                if token is not None and "S" in letters.names:
                    numbers = [call.q.shape[1], tensor.shape[token]]
                    found[name] = gather_counts(f"{self.operator.name}: {name}", groups_of(self), numbers)
        return found


class _Plan(NamedTuple):
    """Everything about a call except its tensors."""

    inner: Runs
    group: Group
    routes: dict[str, Route]
    share: Share
    runs: tuple[tuple[int, int], ...]
    keyed: tuple[str, ...]
    lengths: tuple[int, ...]
    recorded: bool  # grad mode of the caller: within a Function torch.is_grad_enabled() is always False

    def runner(self, session: Session) -> Callable[..., Any]:
        """How to run the inner operator: a wrapper over further ranks also after a failure, so that they learn."""
        return session.compute if isinstance(self.inner, Operator) else session.run_nested

    def to_heads(self, names: Sequence[str], tensors: Sequence[Tensor], session: Session) -> list[Tensor]:
        """The all-to-all: from this rank's tokens of all heads to all tokens of this rank's heads."""
        routes = [self.routes[name] for name in names]
        cut = [
            None if route.token is None else route.split_by_heads(x) for route, x in zip(routes, tensors, strict=True)
        ]
        moved = [place for place, parts in enumerate(cut) if parts is not None]
        arrived = iter(_swap([routes[place] for place in moved], [cut[place] for place in moved], session, there=True))
        here = session.group.rank
        return [
            route.split_by_heads(x)[here] if parts is None else route.join_tokens(next(arrived))
            for route, x, parts in zip(routes, tensors, cut, strict=True)
        ]

    def local(self, call: Any, tensors: Sequence[Tensor]) -> Any:
        """The call on this rank's heads, all tokens."""
        found = dict(zip(self.routes, tensors, strict=True))
        if self.share.repeat is not None:
            for name in self.keyed:
                dim = self.routes[name].head
                assert dim is not None
                places = torch.tensor(self.share.repeat, device=found[name].device)
                found[name] = found[name].index_select(dim, places)
        seed = getattr(call, "seed", None)
        if seed is not None:
            start, step = seed[3:5].tolist() if seed.dim() else (0, 1)
            found["seed"] = placed(seed, h=(start + step * self.share.heads[0], step))
        return call._replace(**found)

    def output_routes(self, call: Any) -> list[Route]:
        """The routes of the outputs, from their declared shapes in the local call."""
        operator = self.inner.operator
        found = []
        for letters, output in zip(operator.results, operator.declared(call), strict=True):
            token, head = _places(letters, letters.names)
            shape = list(output.shape)
            if token is not None:
                shape[token] = self.lengths[self.group.rank]
            if head is not None:
                shape[head] = self.runs[-1][1]
            lengths = () if token is None else self.lengths
            found.append(Route(tuple(shape), output.dtype, token, lengths, head, self.runs))
        return found


def _plan(
    inner: Runs, group: Group, call: Any, lengths: dict[str, tuple[int, ...]], rows: dict[str, list[list[int]]]
) -> _Plan:
    operator = inner.operator
    sizes: dict[str, int] = {}
    for name, letters in operator.letters.items():
        tensor = getattr(call, name)
        if isinstance(tensor, Tensor) and not letters.broadcast:
            sizes |= dict(zip(letters.names, tensor.shape, strict=True))
    heads = next(letter for letter in _HEADS if letter in sizes)
    held = shares(sizes[heads], sizes.get("G", 0), group.size)
    tokens = {
        letters.names[place]: lengths[name] for name, letters, place in _tokened(operator, call) if name in lengths
    }
    routes, keyed = {}, []
    for name, letters in operator.letters.items():
        tensor = getattr(call, name)
        if not isinstance(tensor, Tensor):
            continue
        token, head = _places(letters, letters.aligned(tensor))
        if head is None and token is None and not tensor.is_floating_point():
            continue
        if token is not None and letters.broadcast:
            held_rows = zip(*rows[name], strict=True) if name in rows else (tokens["T"], lengths[name])
            token = _own_rows(operator.name, name, tensor, token, *map(tuple, held_rows))
        if head is not None and letters.broadcast and tensor.shape[head] == 1:
            head = None
        of_keys = head is not None and letters.aligned(tensor)[head] == "G"
        runs = tuple(share.keys if of_keys else share.heads for share in held)
        along = () if token is None else lengths[name]
        routes[name] = Route(tuple(tensor.shape), tensor.dtype, token, along, head, runs)
        keyed += [name] if of_keys else []
    _check_whole(inner, call, routes, sum(tokens["T"]), sum(tokens.get("S", tokens["T"])))
    runs = tuple(share.heads for share in held)
    return _Plan(inner, group, routes, held[group.rank], runs, tuple(keyed), tokens["T"], torch.is_grad_enabled())


_HEADS = ("H", "D")  # D: the channels of an operator without heads, which are independent as well


def _places(letters: Letters, names: Sequence[str]) -> tuple[int | None, int | None]:
    """The token dimension and the head dimension, None if absent."""
    letter = next((letter for letter in ("T", "S") if letter in letters.names), None)
    token = names.index(letter) if letter in names else None
    return token, next((place for place, name in enumerate(names) if name in ("H", "G", "D")), None)


def _tokened(operator: Operator, call: Any) -> list[tuple[str, Letters, int]]:
    """The tensor arguments with a token dimension, without those that broadcast; and that dimension."""
    found = []
    for name, letters in operator.letters.items():
        tensor = getattr(call, name)
        if isinstance(tensor, Tensor) and not letters.broadcast and (place := letters.token(tensor)) is not None:
            found.append((name, letters, place))
    return found


def _own_rows(
    function: str, name: str, tensor: Tensor, token: int, rows: tuple[int, ...], sizes: tuple[int, ...]
) -> int | None:
    """The token dimension of a bias with this rank's own rows; None for one row for all. Equal on all ranks."""
    own, single = sizes == rows, all(size == 1 for size in sizes)
    if own and single and len(rows) > 1 and name == "bias" and tensor.requires_grad:
        raise ValueError(
            f"{function}: {name} has one row on each of {len(rows)} ranks, which have one token each: whether they are "
            "one and the same row cannot be told, and its gradient would differ"
        )
    if not own and not single:
        raise ShapeError(f"{function}: {name} has {list(sizes)} rows on the ranks; expected 1 or T={list(rows)}")
    return token if own else None


def _check_whole(inner: Runs, call: Any, routes: dict[str, Route], T: int, S: int) -> None:
    """Check the sizes of the whole sequence as one process would. An inner wrapper sees a part, and checks itself."""
    if not isinstance(inner, Operator):
        return
    stand_ins = {name: getattr(call, name) for name in inner.letters}
    for name, route in routes.items():
        shape = list(route.shape)
        if route.token is not None:
            shape[route.token] = sum(route.lengths)
        stand_ins[name] = stand_ins[name].new_empty(()).expand(shape)
    inner.signature.bind(stand_ins)
    if hasattr(call, "visible"):
        check(call.visible, call.q.shape[0], T, S)
    if getattr(call, "offsets", None) is not None:
        arguments.documents(inner.name, call.offsets, T)


def _swap(routes: Sequence[Route], parts: Sequence[Any], session: Session, *, there: bool) -> list[list[Tensor]]:
    """The all-to-all of several tensors; received parts by tensor. `there`: from tokens to heads, else back."""
    if not routes:
        return []
    here, ranks = session.group.rank, range(session.group.size)
    shapes = [
        [route.message_shape(rank, here) if there else route.message_shape(here, rank) for route in routes]
        for rank in ranks
    ]
    arrived = exchange([[each[rank] for each in parts] for rank in ranks], shapes, session)
    return [list(each) for each in zip(*arrived, strict=True)]


class _Exchanged(torch.autograd.Function):
    """All-to-all to heads, the operator, all-to-all back to tokens."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, session: Session, call: Any, backend: str | None, wanted: int, *tensors: Tensor
    ) -> Any:
        session.step = SCATTER
        arrived = plan.to_heads(list(plan.routes), tensors, session)
        session.step = COMPUTE
        routes_out = plan.output_routes(plan.local(call, [torch.empty_like(x, device="meta") for x in arrived]))[
            :wanted
        ]
        needs = tuple(need and plan.recorded for need in ctx.needs_input_grad[5:])
        inside = NestedGraph() if any(needs) else None
        compute = functools.partial(_compute, plan, call, backend, wanted)
        outputs = None
        if plan.share.heads[0] < plan.share.heads[1]:
            if inside is not None:
                run = functools.partial(inside.run, compute, needs=needs)
            else:
                run = functools.partial(_detached, compute) if plan.recorded else compute
            outputs = plan.runner(session)(run, arrived)
        if outputs is None:
            outputs = tuple(
                torch.zeros(route.shape_by_heads(plan.group.rank), dtype=route.dtype, device=arrived[0].device)
                for route in routes_out
            )
        session.step = GATHER
        ctx.plan, ctx.output_routes, ctx.inside = plan, routes_out, inside
        if inside is not None:
            # Save at least one tensor: torch.utils.checkpoint stops its recomputation at the last one saved.
            ctx.save_for_backward(arrived[0].new_empty(0), *inside.take_saved())
        parts = [route.split_by_tokens(x) for route, x in zip(routes_out, outputs, strict=True)]
        return tuple(
            route.join_heads(each)
            for route, each in zip(routes_out, _swap(routes_out, parts, session, there=False), strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        plan, inside = ctx.plan, ctx.inside
        saved = list(ctx.saved_tensors[1:])  # before all else: under a checkpoint this recomputes the forward
        names = [name for name, need in zip(plan.routes, ctx.needs_input_grad[5:], strict=True) if need]
        found: dict[str, Tensor] = {}
        with Session(plan.group, plan.inner.operator.name, "backward") as session:
            session.step = SCATTER
            parts = [route.split_by_heads(grad) for route, grad in zip(ctx.output_routes, grads, strict=True)]
            moved = _swap(ctx.output_routes, parts, session, there=True)
            arrived = [route.join_tokens(each) for route, each in zip(ctx.output_routes, moved, strict=True)]
            session.step = COMPUTE
            inner = plan.runner(session)(inside.gradients, arrived, saved) if inside.outputs else None
            inner = [None] * len(names) if inner is None else inner
            session.step = GATHER
            routes = [plan.routes[name] for name in names]
            whole = [
                grads[0].new_zeros(route.shape_by_heads(plan.group.rank), dtype=route.dtype) if grad is None else grad
                for route, grad in zip(routes, inner, strict=True)
            ]
            moved = _swap(
                routes, [route.split_by_tokens(x) for route, x in zip(routes, whole, strict=True)], session, there=False
            )
            found = {name: route.join_heads(each) for name, route, each in zip(names, routes, moved, strict=True)}
        return None, None, None, None, None, *(found.get(name) for name in plan.routes)


def _detached(compute: Callable[[Sequence[Tensor]], Outputs], tensors: Sequence[Tensor]) -> Outputs:
    """compute(tensors), none of which needs a gradient, recorded: what needs one inside is seen, and refused."""
    with torch.enable_grad():
        return tuple(x.detach() for x in compute(tensors))


def _compute(plan: _Plan, call: Any, backend: str | None, wanted: int, tensors: Sequence[Tensor]) -> Outputs:
    return plan.inner.run(plan.local(call, tensors), backend)[:wanted]
