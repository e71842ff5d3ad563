"""Triton kernels: the GPU backend."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from foci.core.spec import Output
from foci.core.tune import state_dtype, target_of, with_gluon
from foci.ops.delta.call import NAME, Call
from foci.ops.delta.pieces import way
from foci.ops.gpu import CHUNK, chunks, placed, unsuitable

Gradients = tuple[Tensor | None, ...]


class Parts(NamedTuple):
    """What the forward saves for the backward, as contiguous tensors."""

    states: Tensor  # [slots,H,K,V] at each chunk's start (tiles/state.py: slot), as `state_dtype`
    errors: Tensor  # [B,T,H,V]: d; in bfloat16, but for gates per channel, [2,B,T,H,V]: d rounded, what that left
    inverse: Tensor  # [B,T,H,64]: X, row t of its chunk, 0 past the sequence's end; in bfloat16 [B,T,H,128], as two
    products: Tensor  # as X: A, with scale, decays and beta, 0 above the diagonal
    rise: Tensor | None  # with gates per token these three as Gated has them (kernels_triton_triangles.py)
    write: Tensor | None
    total: Tensor | None
    rows: Tensor | None  # in bfloat16, but for gates per channel, as Gated has it
    reach: Tensor | None  # in bfloat16 with gates per token, as Gated has it


def reasons(call: Call) -> list[str]:
    *_, K, V, _ = call.sizes
    return unsuitable(call.v, call.sizes, (K, V))


def kept(call: Call) -> Output:
    """One buffer of float32 for all that the backward reads (`_parts`); states in bfloat16 take half of their room."""
    *_, H, K, V, _ = call.sizes
    states = _slots(call) * H * K * V
    if call.v.dtype == torch.bfloat16:
        states = -(-states // 2)
    return Output("kept", (sum(_counts(call)) + states,), torch.float32)


def _counts(call: Call) -> tuple[int, ...]:
    """Elements of each part except the states, which come last; rounded up to multiples of 16 bytes."""
    B, T, _, H, _, V, _ = call.sizes
    tokens, per_token = B * T * H, call.log_decay is not None and call.log_decay.shape[3] == 1
    gates = (tokens, tokens, _slots(call) * H) if per_token else (0, 0, 0)
    walk = (0, 0)
    if call.v.dtype == torch.bfloat16 and not call.per_channel:
        walk = 2 * _slots(call) * H * CHUNK, gates[2]
    return tuple(-(-n // 4) * 4 for n in (tokens * CHUNK, tokens * CHUNK, tokens * V, *gates, *walk))


def forward(call: Call, keep: bool = False) -> tuple[Tensor, ...]:
    """out [B,T,H,V] in v's dtype and the final state [call.ends,H,K,V] in float32; `keep`: and what `kept` declares."""
    from foci.ops.delta import kernels_triton_channel_chunks as channel_chunks
    from foci.ops.delta import kernels_triton_channel_walks as channel_walks
    from foci.ops.delta import kernels_triton_chunks as at_once
    from foci.ops.delta import kernels_triton_forward as walks
    from foci.ops.delta import kernels_triton_token_joins as joins
    from foci.ops.delta import kernels_triton_token_walks as token_walks
    from foci.ops.delta import kernels_triton_triangles as triangles
    from foci.ops.kernels_triton_packed import room

    call = call._replace(offsets=placed(NAME, call.offsets, call.v))
    buffer = kept(call).empty(call.v) if keep else None
    parts = None if buffer is None else _parts(call, buffer)
    target = target_of(call.v.device)
    wide = token_walks.wide(call, target, keep) if with_gluon() else 0
    shares = token_walks.shares(call, target)
    twice = wide == 64 and joins.twice(call, target, shares, keep)
    always = twice or (wide > 0 and not keep and not joins.reaches_far(call))
    by = way(call, False, token_walks, joins, 1 if twice else shares, *walks.unturned(call), always)
    walk = None
    if wide and by.turned and not by.maps:
        walk = import_module("foci.ops.delta.kernels_gluon").walk(wide, twice)
    out, rest = room(call, call.v)
    exact = walk is not None and not keep
    alone = exact and wide == 64 and token_walks.alone(call, target)
    cut = shares > 1 and (keep or not twice)
    made = triangles.first(call, parts, _slots(call), cut, at_once, channel_chunks, exact, alone, rest)
    rest.end()
    final = walks.forward(call, parts, made, out, by, token_walks, joins, channel_walks, walk)
    return (out, final) if buffer is None else (out, final, buffer)


def backward(call: Call, outputs: tuple[Tensor, ...], grads: Gradients, needs: list[bool]) -> Gradients:
    """Gradients of q, k, v, beta, log_decay, erase and state, None where not needed."""
    from foci.ops.delta import kernels_triton_backward as kernels
    from foci.ops.delta import kernels_triton_channel_walks as channel_walks
    from foci.ops.delta import kernels_triton_channels as channels
    from foci.ops.delta import kernels_triton_token_joins as joins
    from foci.ops.delta import kernels_triton_token_walks as token_walks
    from foci.ops.delta import kernels_triton_tokens as tokens
    from foci.ops.kernels_triton_packed import rooms

    call = call._replace(offsets=placed(NAME, call.offsets, call.v))
    parts, by = _parts(call, outputs[2]), partial(way, call, True, token_walks, joins)
    arguments = call.q, call.k, call.v, call.beta, call.log_decay, call.erase, call.state
    found, rest = rooms(call, arguments, needs)
    by_warps, walk_back = None, None
    if target_of(call.v.device).arch == 90 and with_gluon():
        by_warps = import_module("foci.ops.delta.kernels_gluon_backward")
        walk_back = import_module("foci.ops.delta.kernels_gluon_walk_back")
    walks = (token_walks, walk_back), joins, channel_walks
    kernels.backward(call, parts, grads, (found, rest), by, channels, (tokens, by_warps), *walks)
    return found


def _slots(call: Call) -> int:
    return chunks(call.v.shape[1], call.v.shape[0], call.offsets)


def _parts(call: Call, buffer: Tensor) -> Parts:
    """The buffer's parts by name."""
    B, T, _, H, K, V, _ = call.sizes
    counts, slots, dtype = _counts(call), _slots(call), state_dtype(call.v.dtype)
    inverse, products, errors, *gated, states = buffer.split([*counts, buffer.numel() - sum(counts)])
    rise, write, total, rows, reach = gated
    errors = errors[: B * T * H * V]
    two = call.v.dtype == torch.bfloat16 and not call.per_channel
    gates: tuple[Tensor | None, ...] = (None, None, None)
    if rise.numel():
        gates = (*(x[: B * T * H].view(B, T, H) for x in (rise, write)), total[: slots * H].view(slots, H))
    gates += (rows.view(slots, H, 2, CHUNK) if rows.numel() else None,)
    gates += (reach[: slots * H].view(slots, H) if reach.numel() else None,)
    return Parts(
        states.view(dtype)[: slots * H * K * V].view(-1, H, K, V),
        errors.view(dtype).view(2, B, T, H, V) if two else errors.view(B, T, H, V),
        inverse.view(dtype).view(B, T, H, -1),
        products.view(dtype).view(B, T, H, -1),
        *gates,
    )
