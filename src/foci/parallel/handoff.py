"""handoff: a recurrence over a sequence sharded in contiguous runs; ranks exchange affine maps of the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci.core.flops import warn_uncounted
from foci.core.plans import without_autocast
from foci.core.spec import Outputs
from foci.ops import arguments
from foci.parallel.exchange import Session, all_reduce, all_to_all
from foci.parallel.group import Group
from foci.parallel.nested_graph import once_differentiable
from foci.parallel.operators import COUNT_INSTEAD, Bound, Operator, operator_of
from foci.parallel.state_passing import SUMMARIES, RankRecurrence, StateMap, TokenSharding

Gradients = dict[str, Tensor | None]


def handoff(op: Callable[..., Any], group: Any) -> Handoff:
    """`op` on a sequence of which every rank of `group` holds a run, in rank order: same signature, same answer.

        S_r = A_r S_{r-1} + B_r            the state after rank r's tokens, from that before them; S_{-1} = state or 0

    op: foci.linear_attention, delta_rule, scan or selective_scan. group: a ProcessGroup, a DeviceMesh of one dimension
    or a Group. Arguments with tokens (q, k, v, gates ...) are this rank's run, [B, T of this rank, ...]: runs may have
    any lengths, also 0. The others (state, bonus, a decay [H], A, skip) are the same on all ranks. `offsets` are those
    of the whole sequence; documents may span ranks. The final state is that of the whole, on every rank.

    Every rank summarises its tokens as one affine map (A_r, B_r), sends it to the ranks that need it, and computes with
    the state that the maps before it give: all ranks at the same time, none waits for another's outputs, forward and
    backward. linear_attention with causal=False sums over all ranks instead. The gradient of a run is that of the sum
    of all ranks' losses; replicated arguments get their full gradient on each rank.

    Raises TypeError for another operator or group, Disagreement (on all ranks) for calls that do not fit together,
    RankError when a rank fails, and what `op` raises. Papers: LASP-2 (arXiv 2502.07563), and Martin and Cundy 2018
    (1709.04057) for the scan of maps.
    """
    operator = operator_of(op)
    if not isinstance(operator, Operator) or operator.name not in SUMMARIES:
        hint = ", ".join(SUMMARIES)
        if operator is not None and not isinstance(operator, Operator):
            raise TypeError(
                f"handoff: op must be one of {hint}, got a wrapper; put handoff inside: ulysses(handoff(op))"
            )
        raise TypeError(f"handoff: op must be one of {hint}, got {getattr(op, '__name__', op)}")
    return Handoff(operator, Group.of(group))


@dataclass(frozen=True)
class Handoff:
    """The callable that `handoff` returns, with the signature of its operator."""

    operator: Operator
    group: Group

    @torch.compiler.disable
    def __call__(self, *args: Any, **options: Any) -> Any:
        session = Session(self.group, self.operator.name, "forward")
        bound = session.compute(self.operator.bind, args, options)
        outputs = self._run(session, bound)
        assert bound is not None
        return self.operator.returns(outputs, bound)

    @torch.compiler.disable
    def run(self, call: Any, backend: str | None) -> Outputs:
        """All outputs of a bound call."""
        session = Session(self.group, self.operator.name, "forward")
        return self._run(session, Bound(call, backend))

    def _run(self, session: Session, bound: Bound | None) -> Outputs:
        facts: dict[str, object] = {}
        numbers = [0]
        if bound is not None:
            facts = self.operator.facts(bound.call) | {"wrapper": "handoff", "gradients": torch.is_grad_enabled()}
            facts["offsets"] = bound.call.offsets
            numbers = [bound.call[0].shape[1]]
        lengths = [row[0] for row in session.agree(facts, numbers)]
        assert bound is not None  # or agree had raised
        call = bound.call
        documents = arguments.documents(self.operator.name, call.offsets, sum(lengths))
        sharding = TokenSharding(tuple(lengths), None if documents is None else tuple(documents))
        plan = _Plan(self.operator, self.group, sharding, bound.backend, call.return_state)
        warn_uncounted(f"handoff of {self.operator.name}", COUNT_INSTEAD)
        out, final = _Handoff.apply(plan, *call._replace(return_state=True))
        return out, arguments.ends(call, final)


@dataclass(frozen=True)
class _Plan:
    """Everything about a call except its tensors. `wanted`: whether the final state is returned."""

    operator: Operator
    group: Group
    sharding: TokenSharding
    backend: str | None
    wanted: bool

    @property
    def recurrence(self) -> RankRecurrence:
        return RankRecurrence(self.operator, self.sharding, self.group.rank)

    def gather(
        self,
        state_map: StateMap | None,
        call: Any,
        to: Callable[[int, int], bool],
        through: Callable[[int], bool],
        session: Session,
    ) -> list[StateMap | None]:
        """Exchange state maps; returns those of the ranks that this one needs, by rank, None for others.

        `to(a, b)`: whether rank a's map is sent to rank b; `through(a)`: whether it has a transition.
        """
        transition, offset = self.recurrence.map_shapes(call)
        A, B = math.prod(transition), math.prod(offset)

        def size(source: int, target: int) -> int:
            if self.sharding.is_empty(source) or not to(source, target):
                return 0
            return A * through(source) + B

        own = [size(self.group.rank, rank) for rank in range(self.group.size)]
        flat = call[0].new_zeros(max(own), dtype=call.accumulator)
        if state_map is not None and flat.numel():
            parts = (state_map.transition, state_map.offset) if through(self.group.rank) else (state_map.offset,)
            flat = torch.cat([x.reshape(-1) for x in parts if x is not None])
        sent = [flat[:n] for n in own]
        arrived = all_to_all(sent, [(size(rank, self.group.rank),) for rank in range(self.group.size)], session)
        found: list[StateMap | None] = []
        for rank, each in enumerate(arrived):
            if not each.numel():
                found.append(None)
            elif through(rank):
                found.append(StateMap(each[:A].view(transition), each[A:].view(offset)))
            else:
                found.append(StateMap(None, each.view(offset)))
        return found

    def step(self, call: Any) -> _Ordered | _Unordered:
        return _Ordered(self, call) if getattr(call, "causal", True) else _Unordered(self, call)

    def shared(self, call: Any, found: Gradients, needs: dict[str, bool], session: Session) -> Gradients:
        """Gradients of replicated arguments (bonus, a decay [H], A, skip), summed by a single all-reduce."""
        letters = self.operator.letters
        given = {n: getattr(call, n) for n, need in needs.items() if need and n != "state"}
        names = [name for name, tensor in given.items() if letters[name].token(tensor) is None]
        if not names:
            return {}
        parts = [torch.zeros_like(given[n]) if (part := found.get(n)) is None else part for n in names]
        flat = all_reduce(torch.cat([part.flatten().to(call.accumulator) for part in parts]), session)
        sums = flat.split([part.numel() for part in parts])
        return {name: each.view_as(given[name]) for name, each in zip(names, sums, strict=True)}


class _Ordered:
    """Causal: the incoming state is the first state mapped by the maps of the ranks before."""

    def __init__(self, plan: _Plan, call: Any) -> None:
        self.plan, self.call, self.recurrence = plan, call, plan.recurrence
        self.packed = plan.sharding.documents is not None
        self.saved: tuple[Tensor | None, ...] = ()

    def forward(self, session: Session, keep: bool) -> tuple[Tensor, Tensor] | None:
        """out and the final state; None if a rank failed."""

        def to(source: int, target: int) -> bool:
            return source < target or (self.plan.wanted and not self.packed)

        recurrence, state_map = self.recurrence, None
        if self._sends(to):
            state_map = session.compute(recurrence.state_map, self.call)
        maps = self.plan.gather(state_map, self.call, to, self.plan.sharding.propagates, session)
        entered = session.compute(recurrence.entering_state, self.call, maps)
        state = None if entered is None else recurrence.run_states(self.call, entered[0])
        outputs = session.compute(recurrence.compute, self.call, state, self.plan.backend, keep)
        final = None if entered is None else entered[1]
        if self.packed and self.plan.wanted:
            ended = session.compute(recurrence.final_states, self.call, outputs and outputs[1])
            final = all_reduce(recurrence.zero_states(self.call) if ended is None else ended, session)
        if outputs is None or final is None:
            return None
        self.saved = (None if state_map is None else state_map.transition, state, *outputs)
        return outputs[0], final

    def backward(self, session: Session, grads: Sequence[Tensor | None], needs: dict[str, bool]) -> Gradients:
        """The needed gradients, by name."""

        def to(source: int, target: int) -> bool:
            return source > target or (needs["state"] and not self.packed)

        def through(source: int) -> bool:
            # After the last rank there is a gradient only if the final state is wanted; else it has no transition.
            return self.plan.sharding.propagates(source) and (self.plan.wanted or source < self.plan.group.size - 1)

        recurrence, call = self.recurrence, self.call
        transition, state, out, *rest = self.saved
        assert out is not None
        d_out, d_final = grads
        d_out = torch.zeros_like(out) if d_out is None else d_out
        if self.plan.wanted:
            d_final = all_reduce(recurrence.zero_states(call) if d_final is None else d_final, session)
        state_map = None
        if self._sends(to):
            state_map = session.compute(recurrence.backward_map, call, transition, d_out, d_final)
        maps = self.plan.gather(state_map, call, to, through, session)
        left = session.compute(recurrence.leaving_gradient, call, maps, d_final)
        found: Gradients = {}
        if left is not None:
            given = d_out, recurrence.final_state_gradients(call, left[0], d_final)
            wanted = needs | {"state": needs["state"] and self.packed}
            found = session.compute(recurrence.gradients, call, state, (out, *rest), given, wanted) or {}
            found["state"] = left[1] if needs["state"] and not self.packed else found.get("state")
        if needs["state"] and self.packed:
            firsts = session.compute(recurrence.initial_state_gradients, call, found.get("state"), d_final)
            found["state"] = all_reduce(recurrence.zero_states(call) if firsts is None else firsts, session)
        return found

    def _sends(self, to: Callable[[int, int], bool]) -> bool:
        group = self.plan.group
        return any(to(group.rank, rank) for rank in range(group.size))


class _Unordered:
    """Not causal: every token reads the sum over all ranks' tokens; the local call adds this rank's own part itself."""

    def __init__(self, plan: _Plan, call: Any) -> None:
        self.plan, self.call, self.recurrence = plan, call, plan.recurrence
        self.saved: tuple[Tensor | None, ...] = ()

    def forward(self, session: Session, keep: bool) -> tuple[Tensor, Tensor] | None:
        """out and the final state; None if a rank failed."""
        recurrence, call = self.recurrence, self.call
        own = session.compute(recurrence.state_sums, call)
        total = all_reduce(recurrence.zero_states(call) if own is None else own, session)
        if own is None:
            return None
        first = recurrence.initial_states(call, slice(None))
        state = recurrence.stacked(call, [first[run.rows] + (total - own)[run.rows] for run in recurrence.runs])
        outputs = session.compute(recurrence.compute, call, state, self.plan.backend, keep)
        if outputs is None:
            return None
        self.saved = (state, *outputs)
        return outputs[0], first + total

    def backward(self, session: Session, grads: Sequence[Tensor | None], needs: dict[str, bool]) -> Gradients:
        """The needed gradients, by name."""
        recurrence, call = self.recurrence, self.call
        state, out, *rest = self.saved
        assert out is not None
        d_out, d_final = grads
        d_out = torch.zeros_like(out) if d_out is None else d_out
        read = session.compute(recurrence.gradient_sums, call, d_out)
        known = recurrence.zero_states(call) if read is None else read
        total = all_reduce(known if d_final is None else known + d_final, session)
        if read is None:
            return {}
        given = d_out, recurrence.stacked(call, [(total - read)[run.rows] for run in recurrence.runs])
        wanted = needs | {"state": False}
        found = session.compute(recurrence.gradients, call, state, (out, *rest), given, wanted) or {}
        return found | {"state": total if needs["state"] else None}


class _Handoff(torch.autograd.Function):
    """The one Function of handoff. The forward saves the call, the incoming state, A and the outputs."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *values: Any) -> tuple[Tensor, Tensor]:
        assert plan.operator.spec.call is not None
        call = plan.operator.spec.call(*values)
        needs = dict(zip(call._fields, ctx.needs_input_grad[1:], strict=True))
        step = plan.step(call)
        with Session(plan.group, plan.operator.name, "forward") as session, without_autocast(call[0]):
            found = step.forward(session, any(needs.values()))
        assert found is not None  # or the end of the block had raised
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.needs, ctx.chosen = plan, needs, step.recurrence.chosen
        ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in values), *step.saved)
        ctx.numbers = [None if isinstance(each, Tensor) else each for each in values]
        if not plan.wanted:
            ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        plan, count = ctx.plan, len(ctx.numbers)
        every = ctx.saved_tensors  # read once: torch.utils.checkpoint unpacks recomputed tensors only once
        tensors, saved = every[:count], every[count:]
        call = plan.operator.spec.call(*(n if x is None else x for x, n in zip(tensors, ctx.numbers, strict=True)))
        step = plan.step(call)
        step.saved, step.recurrence.chosen = saved, ctx.chosen
        with Session(plan.group, plan.operator.name, "backward") as session, without_autocast(call[0]):
            found = step.backward(session, grads, ctx.needs)
            found |= plan.shared(call, found, ctx.needs, session)
        return None, *(_cast_like(x, found.get(name)) for name, x in zip(call._fields, call, strict=True))


def _cast_like(given: Any, gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to(given.dtype)
