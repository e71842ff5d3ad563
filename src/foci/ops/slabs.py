"""Slabs: a few chunks of a sequence at a time, laid out for bmm: [B,T,G,D] <-> [n * P, C, D], P = B * H."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.core.spec import Output
from foci.merge.affine import Affine
from foci.ops.gates import Gates

CHUNK = 64
_TOGETHER = 32  # chunks x heads of a slab: enough work for each bmm, few enough to stay in the CPU cache


class Slab(NamedTuple):
    """Tokens start:stop as n chunks of C; the last may extend beyond stop, padded with zeros."""

    start: int
    stop: int
    n: int
    C: int


def slabs(start: int, stop: int, P: int, chunk: int = CHUNK) -> Iterator[Slab]:
    """The slabs of one sequence: whole chunks, then the rest as one chunk of the next power of two."""
    together = max(1, _TOGETHER // max(P, 1)) * chunk
    while stop - start >= chunk:
        end = min(start + together, start + (stop - start) // chunk * chunk)
        yield Slab(start, end, (end - start) // chunk, chunk)
        start = end
    if start < stop:
        yield Slab(start, stop, 1, 1 << (stop - start - 1).bit_length())


def load(x: Tensor, slab: Slab, H: int, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
    """A slab of x as [n * B * H, C, D], each of G heads repeated for its H / G heads; written to `into` if given."""
    B, _, G, D = x.shape
    tokens = x[:, slab.start : slab.stop]
    missing = slab.n * slab.C - tokens.shape[1]
    if missing:
        tokens = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, missing))
    if into is None:
        into = torch.empty(slab.n * B * H, slab.C, D, dtype=dtype, device=x.device)
    there = into.unflatten(0, (slab.n, B, G, H // G))
    there.copy_(tokens.unflatten(1, (slab.n, slab.C)).permute(1, 0, 3, 2, 4)[:, :, :, None])
    return into


def store(found: Tensor, slab: Slab, into: Tensor) -> None:
    """The inverse of `load`: into tokens start:stop of [B,T,G,D], summed over heads that share one of G."""
    B, _, G, D = into.shape
    heads = found.view(slab.n, B, G, -1, slab.C, D)
    tokens = (heads[:, :, :, 0] if heads.shape[3] == 1 else heads.sum(3)).permute(1, 0, 3, 2, 4)
    there = into[:, slab.start : slab.stop]
    if slab.n * slab.C > there.shape[1]:  # one chunk, longer than what is left
        there.copy_(tokens[:, 0, : there.shape[1]])
    else:
        there.unflatten(1, (slab.n, slab.C)).copy_(tokens)


def sequences(packed: list[tuple[int, int]] | None, state: Tensor, T: int) -> Iterator[tuple[int, int, Tensor]]:
    """Start, stop and state [P,K,V] (a view) of every sequence: all batch rows together, or documents one by one.

    Yields nothing if the states are empty (no rows, heads or channels).
    """
    if not state.numel():
        return
    if packed is None:
        yield 0, T, state.flatten(0, 1)
    else:
        for n, (start, stop) in enumerate(packed):
            yield start, stop, state[n]


class Decays:
    """The Gates of each slab from log_decay [B|1, T|1, H, D]; cached if they are the same for all tokens."""

    def __init__(self, log_decay: Tensor | None, v: Tensor, dtype: torch.dtype, own: bool = True) -> None:
        B, self.T, self.H, _ = v.shape
        self.idle = log_decay is None
        self.fixed = log_decay is None or (log_decay.shape[1] == 1 and self.T > 1)
        self.log_decay = v.new_zeros(1, 1, self.H, 1) if log_decay is None else log_decay
        self.log_decay = self.log_decay.expand(B, -1, -1, -1)
        self.dtype, self.own = dtype, own
        self.made: dict[Slab, Gates] = {}

    def __call__(self, slab: Slab) -> Gates:
        if not self.fixed:
            return Gates(load(self.log_decay, slab, self.H, self.dtype), self.own)
        first = slab._replace(start=0, stop=slab.stop - slab.start)
        if first not in self.made:
            everywhere = self.log_decay.expand(-1, first.stop, -1, -1)
            self.made[first] = Gates(load(everywhere, first, self.H, self.dtype), self.own, self.idle)
        return self.made[first]


def room(call: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor like `like`, filled by slabs; zeros if a size is 0, as there are no slabs."""
    make = torch.empty_like if all(call.sizes) else torch.zeros_like
    return make(like, dtype=dtype, memory_format=torch.contiguous_format)


def initial(call: Any) -> Tensor:
    """A copy of the call's state [N,H,K,V] in the accumulator's dtype; zeros where it has none."""
    *_, H, K, V, N = call.sizes
    if call.state is None:
        return torch.zeros(N, H, K, V, dtype=call.accumulator, device=call.v.device)
    return call.state.to(call.accumulator, copy=True, memory_format=torch.contiguous_format)


def kept(call: Any) -> Output:
    """The declaration of the saved states, one at the start of every slab; none for packed calls, whose slabs depend on
    offsets' values.

    The count covers the slabs that `slabs` yields, in closed form, as a loop would specialize a compiled graph on T,
    plus two, as torch.compile specializes on sizes 0 and 1. No divisor is negative: the compiler merges two floors.
    """
    B, T, _, H, K, V, _ = call.sizes
    together = max(1, _TOGETHER // max(B * H, 1))
    whole, rest = (T // CHUNK + together - 1) // together, (T % CHUNK + CHUNK - 1) // CHUNK
    count = 2 + whole + rest if keeps(call) else 0
    return Output("kept", (count, B * H, K, V), call.accumulator)


def keeps(call: Any) -> bool:
    return call.offsets is None and getattr(call, "causal", True)


def borders(gates: Gates, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """The state at the start of each chunk [M,K,V]; `state` [P,K,V] is advanced in place, S <- total S + k^T v."""
    written = torch.bmm(k.transpose(1, 2), v).view(-1, *state.shape)
    total = gates.total.view(*written.shape[:2], gates.D)
    found = state.new_empty(len(written) + 1, *state.shape)
    found[0] = state
    for i in range(len(written)):
        Affine(total[i], written[i]).apply(found[i], out=found[i + 1])
    state.copy_(found[-1])
    return found[:-1].flatten(0, 1)


def ends(gates: Gates, read: Tensor, state: Tensor) -> Tensor:
    """The gradient of the state at each chunk's end [M,K,V]; `state` [P,K,V], that of the last, is updated in place.

    From a chunk's end to its start: dS <- total dS + read, `read` [M,K,V] being the gradient from its outputs.
    """
    added = read.view(-1, *state.shape)
    total = gates.total.view(*added.shape[:2], gates.D)
    found = state.new_empty(len(added) + 1, *state.shape)
    found[-1] = state
    for i in reversed(range(len(added))):
        Affine(total[i], added[i]).apply(found[i + 1], out=found[i])
    state.copy_(found[0])
    return found[1:].flatten(0, 1)
