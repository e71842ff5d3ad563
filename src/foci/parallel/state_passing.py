"""The states that ranks of a sharded recurrence exchange, as pure computation without communication.

Every rank summarises its tokens as one affine map of the state, S -> A S + B, and the maps are gathered. The state that
enters a rank is the first state mapped by those of the ranks before it, in order; the gradient that enters it from
behind is mapped by the transposed maps of the ranks after it, from the last. Of packed documents only one that spans
the border between two ranks passes it: the map of a rank in which a document begins has no A.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.core.select import choose
from foci.core.spec import Output, Outputs, as_declared
from foci.merge.affine import Affine
from foci.ops.decay import summary as decay
from foci.ops.delta import summary as delta
from foci.ops.scan import summary as scan
from foci.ops.selective_scan import summary as selective_scan
from foci.parallel.operators import Operator

SUMMARIES: dict[str, ModuleType] = {
    "linear_attention": decay,
    "delta_rule": delta,
    "scan": scan,
    "selective_scan": selective_scan,
}


class Run(NamedTuple):
    """Tokens start:stop of a rank that belong to one document (or to all batch rows); `rows` indexes its states.

    `enters`: its initial state comes from the rank before (or, of a batch, from the caller). `leaves`: its final state
    goes to the rank after.
    """

    rows: slice
    start: int
    stop: int
    enters: bool
    leaves: bool

    @property
    def passes_through(self) -> bool:
        return self.enters and self.leaves


@dataclass(frozen=True)
class TokenSharding:
    """The sharding: how many tokens each rank has, and start and stop of each document (None: batch rows)."""

    lengths: tuple[int, ...]
    documents: tuple[tuple[int, int], ...] | None

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.lengths, initial=0))

    def runs(self, rank: int) -> list[Run]:
        """The runs of a rank, in order; a document without a token there has none."""
        first, last = self.boundaries[rank : rank + 2]
        if self.documents is None:
            return [Run(slice(None), 0, last - first, True, True)]
        found = []
        for n, (start, stop) in enumerate(self.documents):
            here = max(start, first) - first, min(stop, last) - first
            if here[0] < here[1]:
                found.append(Run(slice(n, n + 1), *here, start < first, stop > last))
        return found

    def is_empty(self, rank: int) -> bool:
        """Whether states pass this rank unchanged, as it has no tokens."""
        return self.lengths[rank] == 0

    def propagates(self, rank: int) -> bool:
        """Whether the state that enters this rank affects the one that leaves: no document begins or ends in it."""
        return all(run.passes_through for run in self.runs(rank))


class StateMap(NamedTuple):
    """A rank's affine map of the state (transposed: of its gradient); without a transition, a constant."""

    transition: Tensor | None
    offset: Tensor

    def apply(self, state: Tensor) -> Tensor:
        if self.transition is None:
            return self.offset.view_as(state)
        return Affine(self.transition, self.offset).apply(state.view_as(self.offset)).view_as(state)


class RankRecurrence:
    """One rank's part of a recurrence: its maps, its local call, and the assembly of states and gradients."""

    def __init__(self, operator: Operator, sharding: TokenSharding, rank: int) -> None:
        self.operator, self.sharding, self.rank = operator, sharding, rank
        self.summary = SUMMARIES[operator.name]
        self.chosen: str | None = None  # the backend that ran the local call, and so runs its backward
        self.runs = sharding.runs(rank)

    def final_state_output(self, call: Any) -> Output:
        """The declaration of the final states of the whole: [N, ...] in the accumulator's dtype."""
        assert self.operator.spec.outputs is not None
        return self.operator.spec.outputs(call)[1]

    def zero_state(self, call: Any) -> Tensor:
        """A zero state, of one document or of all batch rows."""
        declared = self.final_state_output(call)
        rows = declared.shape[0] if self.sharding.documents is None else 1
        return _first(call).new_zeros((rows, *declared.shape[1:]), dtype=declared.dtype)

    def initial_states(self, call: Any, rows: slice) -> Tensor:
        """The caller's initial states of some documents, or zeros."""
        declared = self.final_state_output(call)
        if call.state is None:
            return self.zero_states(call)[rows]
        state: Tensor = call.state[rows].to(declared.dtype)
        return state

    def map_shapes(self, call: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a map's transition and offset."""
        rows = self.final_state_output(call).shape[0] if self.sharding.documents is None else 1
        found: tuple[tuple[int, ...], tuple[int, ...]] = self.summary.shapes(call, rows)
        return found

    # Forward: from the first rank to the last.

    def state_map(self, call: Any) -> StateMap | None:
        """This rank's map, forward; None if it has no tokens."""
        if self.sharding.is_empty(self.rank):
            return None
        run = self.runs[-1]
        if not run.leaves:
            return StateMap(None, self.zero_state(call))
        state = None if run.enters else self.initial_states(call, run.rows)
        found = self.summary.ahead(self._run_call(call, run)._replace(state=state), run.passes_through)
        return StateMap(found.transition if run.passes_through else None, found.offset)

    def entering_state(self, call: Any, maps: Sequence[StateMap | None]) -> tuple[Tensor, Tensor]:
        """The state before this rank's first token, and the state after the last token of the whole."""
        state = self.zero_state(call) if self.sharding.documents is not None else self.initial_states(call, slice(None))
        found = state
        for rank, state_map in enumerate(maps):
            if rank == self.rank:
                found = state
            if state_map is not None:
                state = state_map.apply(state)
        return found, state

    def run_states(self, call: Any, carry: Tensor) -> Tensor:
        """The initial state of each run; `carry` is the one that enters the rank."""
        return self.stacked(call, [carry if run.enters else self.initial_states(call, run.rows) for run in self.runs])

    def stacked(self, call: Any, states: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(states)).contiguous() if states else self.zero_state(call)[:0]

    def local_call(self, call: Any, state: Tensor) -> Any:
        """The operator's call on this rank's tokens, with these initial states of its runs."""
        if len(self.runs) == 1:
            return self.backend_form(call._replace(offsets=None, state=state))
        offsets = torch.tensor([0, *(run.stop for run in self.runs)], device=call.offsets.device)
        return self.backend_form(call._replace(offsets=offsets, state=state))

    def final_states(self, call: Any, state: Tensor | None) -> Tensor:
        """[N, ...]: final states of documents that end on this rank, zeros elsewhere: the sum over ranks has all.

        `state`: the local call's final states. A document without tokens keeps its initial state; rank 0 adds it.
        """
        found = self.zero_states(call)
        for i, run in enumerate(self.runs):
            if not run.leaves and state is not None:
                found[run.rows] = state[i : i + 1]
        return self._add_empty_documents(found, call.state)

    def compute(self, call: Any, state: Tensor, backend: str | None, keep: bool) -> Outputs:
        """Run the local call: out, final states and, with `keep`, the backend's tensor for its backward."""
        if self.sharding.is_empty(self.rank):
            assert self.operator.spec.outputs is not None
            return self.operator.spec.outputs(call)[0].empty(_first(call)), state
        local = self.local_call(call, state)
        chosen = choose(self.operator.spec, local, backend)
        self.chosen, module = chosen.name, chosen.load()
        found: Outputs = module.forward(local, True) if keep and hasattr(module, "kept") else module.forward(local)
        return found

    # Backward: from the last rank to the first.

    def backward_map(
        self, call: Any, transition: Tensor | None, d_out: Tensor, d_final: Tensor | None
    ) -> StateMap | None:
        """This rank's map for the backward, of the gradient of its final state; `transition`: the forward's."""
        if self.sharding.is_empty(self.rank):
            return None
        run = self.runs[0]
        if not run.enters:
            return StateMap(None, self.zero_state(call))
        d_end = self.zero_state(call)
        if not run.leaves and d_final is not None:
            d_end = d_final[run.rows]
        found = self.summary.back(self._run_call(call, run), d_out[:, run.start : run.stop], d_end)
        if transition is None:
            return StateMap(None, found)
        return StateMap(transition.mT if transition.dim() == found.dim() else transition, found)

    def leaving_gradient(
        self, call: Any, maps: Sequence[StateMap | None], d_final: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the state after this rank's last token, and of the first state of the whole."""
        gradient = self.zero_state(call) if d_final is None or self.sharding.documents is not None else d_final
        found = gradient
        for rank, state_map in reversed(list(enumerate(maps))):
            if rank == self.rank:
                found = gradient
            if state_map is not None:
                gradient = state_map.apply(gradient)
        return found, gradient

    def final_state_gradients(self, call: Any, behind: Tensor, d_final: Tensor | None) -> Tensor:
        """The gradients of the local call's final states, by run; `behind`: of the one that leaves the rank."""
        none = self.zero_states(call) if d_final is None else d_final
        return self.stacked(call, [behind if run.leaves else none[run.rows] for run in self.runs])

    def gradients(
        self,
        call: Any,
        state: Tensor,
        outputs: Outputs,
        grads: tuple[Tensor, Tensor],
        needs: Mapping[str, bool],
    ) -> dict[str, Tensor | None]:
        """Gradients of the local call by name: by the backend's own backward, or by autograd if it has none."""
        names = [name for name in self.operator.spec.differentiable if needs[name]]
        if self.sharding.is_empty(self.rank):
            return {name: torch.zeros_like(getattr(call, name)) for name in names}
        assert self.chosen is not None
        local, module = self.local_call(call, state), self.operator.spec.backend(self.chosen).load()
        if hasattr(module, "backward"):
            wanted = [needs[name] for name in self.operator.spec.differentiable]
            every = module.backward(local, as_declared(outputs), grads, wanted)
            found = dict(zip(self.operator.spec.differentiable, every, strict=True))
        else:
            leaves = {name: getattr(local, name).detach().requires_grad_() for name in names}
            with torch.enable_grad():
                again = module.forward(local._replace(**leaves))
            some = torch.autograd.grad(again, list(leaves.values()), grads, allow_unused=True)
            found = dict(zip(leaves, some, strict=True))
        return {
            name: x if x is None or name == "state" else x.view_as(getattr(call, name)) for name, x in found.items()
        }

    def initial_state_gradients(self, call: Any, d_state: Tensor | None, d_final: Tensor | None) -> Tensor:
        """[N, ...]: gradients of initial states of documents that begin on this rank, zeros elsewhere, to be summed."""
        found = self.zero_states(call)
        for i, run in enumerate(self.runs):
            if not run.enters and d_state is not None:
                found[run.rows] = d_state[i : i + 1]
        return self._add_empty_documents(found, d_final)

    # Without an order: sums over the tokens of all ranks.

    def state_sums(self, call: Any) -> Tensor:
        """[N, ...]: the contribution of this rank's tokens to every state."""
        found = self.zero_states(call)
        for run in self.runs if not self.sharding.is_empty(self.rank) else []:
            found[run.rows] = self.summary.ahead(self._run_call(call, run)).offset
        return found

    def gradient_sums(self, call: Any, d_out: Tensor) -> Tensor:
        """[N, ...]: the contribution of this rank's outputs to the gradient of every state."""
        found = self.zero_states(call)
        for run in self.runs if not self.sharding.is_empty(self.rank) else []:
            found[run.rows] = self.summary.back(
                self._run_call(call, run), d_out[:, run.start : run.stop], torch.zeros_like(found[run.rows])
            )
        return found

    def zero_states(self, call: Any) -> Tensor:
        """Zeros [N, ...] for the states of all documents or rows."""
        declared = self.final_state_output(call)
        return _first(call).new_zeros(declared.shape, dtype=declared.dtype)

    def _add_empty_documents(self, found: Tensor, given: Tensor | None) -> Tensor:
        if self.rank == 0 and given is not None and self.sharding.documents is not None:
            for n, (start, stop) in enumerate(self.sharding.documents):
                if start == stop:
                    found[n] = given[n]
        return found

    def _run_call(self, call: Any, run: Run) -> Any:
        """The call of one run alone, without an initial state."""
        parts: dict[str, Tensor | None] = {"state": None, "offsets": None}
        for name, letters in self.operator.letters.items():
            tensor = getattr(call, name)
            dim = None if tensor is None else letters.token(tensor)
            if dim is not None:
                parts[name] = tensor.narrow(dim, run.start, run.stop - run.start)
        return self.backend_form(call._replace(**parts))

    def backend_form(self, call: Any) -> Any:
        """A bound call in the form backends take: leading broadcast dimensions (of a decay per head) as size 1."""
        full: dict[str, Tensor] = {}
        for name, letters in self.operator.letters.items():
            tensor = getattr(call, name)
            if letters.broadcast and tensor is not None and tensor.dim() < len(letters.names):
                full[name] = tensor[(None,) * (len(letters.names) - tensor.dim())]
        return call._replace(**full)


def _first(call: Any) -> Tensor:
    tensor: Tensor = call[0]
    return tensor
