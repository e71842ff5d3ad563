"""The backward of a recurrence over slabs: the states it starts from, and the assembly of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.slabs import Slab, initial, keeps, room, sequences, slabs, store


class Found:
    """The gradients of a call, filled slab by slab; log_decay's at full size, before it is summed to its own shape."""

    def __init__(self, call: Any, names: Sequence[str], needs: Sequence[bool]) -> None:
        self.call, self.names = call, names
        self.needed = {name for name, need in zip(names, needs, strict=True) if need}
        self.there: dict[str, Tensor] = {}
        for name in self.needed - {"state"}:
            x = getattr(call, name)
            if name == "log_decay":
                self.there[name] = room(call, x.expand(*call.v.shape[:2], -1, -1), call.accumulator)
            elif name == "bonus":  # summed over tokens
                self.there[name] = x.new_zeros(x.shape, dtype=call.accumulator)
            else:
                self.there[name] = room(call, x)

    def put(self, name: str, gradient: Tensor, slab: Slab) -> None:
        """Store one slab's tokens, [M,C,D], into the gradient of `name`, if it is needed."""
        if name in self.needed:
            into = self.there[name]
            store(gradient, slab, into if into.dim() == 4 else into[..., None])

    def gradients(self, d_state: Tensor) -> tuple[Tensor | None, ...]:
        """In the order of the names, each with its tensor's shape and dtype; None where not needed."""
        self.there["state"] = d_state
        return tuple(self._like(name) if name in self.needed else None for name in self.names)

    def _like(self, name: str) -> Tensor:
        x = getattr(self.call, name)
        return self.there[name].sum_to_size(x.shape).to(x.dtype)


def walk(
    operator: str,
    call: Any,
    kept: Tensor,
    grads: Sequence[Tensor | None],
    carry: Callable[[Slab, Tensor], object],
    back: Callable[[Slab, Tensor, Tensor, Tensor], None],
) -> Tensor:
    """Process every sequence's slabs from last to first; returns the gradient of the initial states [N,H,K,V].

    `back(slab, state, d_state, d_out)` gets the state [P,K,V] at the slab's start, and updates d_state in place from
    the gradient after the slab to that before it. Where the forward could not save those states, they are recomputed by
    `carry(slab, state)`, which advances the state through the slab in place.
    """
    T = call.v.shape[1]
    d_out = torch.zeros_like(call.v) if grads[0] is None else grads[0]
    d_state = initial(call._replace(state=grads[1]))
    packed = arguments.documents(operator, call.offsets, T)
    runs = zip(sequences(packed, initial(call), T), sequences(packed, d_state, T), strict=True)
    for (start, stop, state), (_, _, d) in runs:
        passed = list(slabs(start, stop, state.shape[0]))
        befores = list(kept[: len(passed)]) if keeps(call) else []
        for slab in passed[len(befores) :]:
            befores.append(state.clone())
            carry(slab, state)
        while passed:
            back(passed.pop(), befores.pop().clone(), d, d_out)
    return d_state
