"""Forward of linear attention in Triton: the state at every chunk's start, then what each token reads.

Within a chunk  o = scale (A v + (rise q) S),  A the decayed products of queries and keys, S the state at its start; the
state at its end is  total S + (fall k)^T v  (tiles/gates.py: rise, fall, total). Of gates per channel, rise q, fall k,
A and total are there already (kernels_triton_pairs.py): in place of q, k and g these kernels get them.

Where few heads would leave processors idle, sequences are cut into stretches (ops/stretches.py) and states are walked
twice: first from nothing, for the map that each stretch is, and then from what the maps before it make of the first.

States go from one launch to the next in bfloat16 for bfloat16 inputs: products would round them to it anyway, and they
are most of what is moved. For float16 they stay float32, as do all products of it (tiles/state.py: working).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, float_precision, launch, side, state_dtype, strides, target_of
from foci.tiles.gates import load_gates, scaled
from foci.tiles.memory import awaited, load_row, load_tile, present, store_tile
from foci.tiles.near import ends, ends_and_total, store_powers, weights
from foci.tiles.state import chunk_at, sequence, working
from foci.tiles.stretches import join_states, stretch

CHUNK = 64


@triton.jit
def states_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, g_ptr, state_ptr, offsets_ptr, kept_ptr, final_ptr, decays_ptr, ends_ptr, sums_ptr,
    k_strides, v_strides, g_strides, state_strides, T, N, H, R, K, V, walks,
    CAUSAL: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    STRETCH: tl.constexpr, MAP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One block of one head's state through one sequence, or one stretch; kept at each chunk's start, and the last.

    MAP: the map that the stretch is, state -> decay state + end; a sequence's last stretch is needed by none. Behind so
    many `walks` programs sum gates for who walks next (kernels_triton_walks.py).
    """
    NEAR: tl.constexpr = k_ptr.dtype.element_ty != tl.float32
    if sums_ptr is not None:  # noqa: SIM102  a constant and a number
        if tl.program_id(0) >= walks:
            store_powers(sums_ptr, g_ptr, g_strides, offsets_ptr, tl.program_id(0) - walks, T, N, H, CHUNK, BLOCK_H)
            return
    v0 = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * BLOCK_V
    rest = tl.program_id(0) // tl.cdiv(V, BLOCK_V)
    k0 = rest % tl.cdiv(K, BLOCK_K) * BLOCK_K
    rest = rest // tl.cdiv(K, BLOCK_K)
    h, n = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    if STRETCH > 0:
        n, _, _, stop, first, end, piece = stretch(offsets_ptr, rest // H, T, N, STRETCH)
        if n < 0 or (MAP and end == stop):
            return
    n = tl.cast(n, tl.int64)
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    k_ptr += b * k_strides[0] + h // R * k_strides[2]
    v_ptr += b * v_strides[0] + h * v_strides[2]
    S = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    decay = tl.full([BLOCK_K], 1.0, tl.float32)
    if state_ptr is not None:
        state_ptr += n * state_strides[0] + h * state_strides[1]
        S = load_tile(state_ptr, k0, K, state_strides[2], v0, V, state_strides[3], BLOCK_K, BLOCK_V).to(tl.float32)
    if STRETCH == 0:
        first, end = start, stop
    elif not MAP:
        before = (first - start) // STRETCH
        S = join_states(S, decays_ptr, ends_ptr, piece - before, before, h, H, k0, K, v0, V, 1)
    for t0 in range(first, end, CHUNK):
        if CAUSAL and not MAP:
            there = (slot + (t0 - start) // CHUNK) * H + h
            store_tile(kept_ptr + there * K * V, S, k0, K, V, v0, V, 1)
        k = working(load_tile(k_ptr, t0, end, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
        v = working(load_tile(v_ptr, t0, end, v_strides[1], v0, V, v_strides[3], CHUNK, BLOCK_V))
        if g_ptr is not None:
            if PER_CHANNEL:
                w = load_row(g_ptr + ((slot + (t0 - start) // CHUNK) * H + h) * K, k0, K, BLOCK_K)
                S *= w[:, None]
            else:
                g = load_gates(g_ptr + b * g_strides[0] + h * g_strides[2], t0, end, g_strides[1], CHUNK)
                _rise, fall, w = ends_and_total(g, True, NEAR)
                v = scaled(v, fall[:, None])
                S *= w
            if MAP:
                decay *= w
        S = tl.dot(tl.trans(k), v, S, input_precision=PRECISION)
    if MAP:
        store_tile(ends_ptr + (tl.cast(piece, tl.int64) * H + h) * K * V, S, k0, K, V, v0, V, 1)
        if v0 == 0:
            store_tile(decays_ptr + (tl.cast(piece, tl.int64) * H + h) * K, decay[None, :], 0, 1, 0, k0, K, 1)
    elif (end == stop) & present(final_ptr):
        store_tile(final_ptr + (n * H + h) * K * V, S, k0, K, V, v0, V, 1)


@triton.jit
def out_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, bonus_ptr, offsets_ptr, states_ptr, pairs_ptr, out_ptr,
    q_strides, k_strides, v_strides, g_strides, bonus_strides, scale, T, N, H, R, K, V,
    CAUSAL: tl.constexpr, PER_CHANNEL: tl.constexpr, AWAIT: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """o = scale (A v + (rise q) S) of one chunk and head, BLOCK_V of its columns; not causal: scale q S, S the last."""
    OWN: tl.constexpr = bonus_ptr is None
    NEAR: tl.constexpr = k_ptr.dtype.element_ty != tl.float32
    v0 = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * BLOCK_V
    rest = tl.program_id(0) // tl.cdiv(V, BLOCK_V)
    h = (rest % H).to(tl.int64)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, rest // H, N, T, CHUNK)
    if n < 0:
        return
    row = tl.cast(b, tl.int64)
    q_ptr += row * q_strides[0] + h // R * q_strides[2]
    k_ptr += row * k_strides[0] + h // R * k_strides[2]
    v_ptr += row * v_strides[0] + h * v_strides[2]
    states_ptr += ((slot if CAUSAL else n) * H + h) * K * V
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    o = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        q = working(load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
        S = load_tile(states_ptr, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V).to(q.dtype)
        if CAUSAL and not PER_CHANNEL:
            k = working(load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
            A = tl.dot(q, tl.trans(k), A, input_precision=PRECISION)
            if not OWN:
                u_ptr = bonus_ptr + h * bonus_strides[0]
                u = load_tile(u_ptr, 0, 1, 0, k0, K, bonus_strides[1], 1, BLOCK_K).to(tl.float32)
                own += tl.sum(q * u * k, 1)
        o = tl.dot(q, S, o, input_precision=PRECISION)
        if AWAIT and not OWN:
            o = awaited(o, k0 < K)
    if CAUSAL:
        if PER_CHANNEL:
            A = load_tile(pairs_ptr + (row * T * H + h) * CHUNK, t0, stop, H * CHUNK, 0, CHUNK, 1, CHUNK, CHUNK)
        else:
            t = t0 + tl.arange(0, CHUNK)
            if g_ptr is None:
                A = tl.where(t[:, None] >= t[None, :] if OWN else t[:, None] > t[None, :], A, 0.0)
            else:
                g = load_gates(g_ptr + row * g_strides[0] + h * g_strides[2], t0, stop, g_strides[1], CHUNK)
                A *= weights(g, OWN, NEAR)
                o *= ends(g, OWN, NEAR)[0][:, None]
            if not OWN:
                A = tl.where(t[:, None] == t[None, :], own[:, None], A)
        v = working(load_tile(v_ptr, t0, stop, v_strides[1], v0, V, v_strides[3], CHUNK, BLOCK_V))
        o = tl.dot(A.to(v.dtype), v, o, input_precision=PRECISION)
    store_tile(out_ptr + (row * T * H + h) * V, scale * o, t0, stop, H * V, v0, V, 1)


def forward(call: Any, made: Any, out: Tensor, kept: Tensor | None, slots: int, walk: Any, read: Config) -> Tensor:
    """The final state [call.ends,H,K,V]; `out` is filled, and `kept`, if given, with the states at the chunks' starts.

    `made`: the Pairs of gates per channel (kernels_triton_pairs.py). `walk`, `read`: as rules.py has them.
    """
    _, T, G, H, K, V, N = call.sizes
    v, target = call.v, target_of(call.v.device)
    q, k, g, R = (call.q, call.k, call.log_decay, H // G) if made is None else (made.risen, made.fallen, made.totals, 1)
    final = torch.empty(call.ends, H, K, V, dtype=torch.float32, device=v.device)
    if kept is None and call.causal:
        kept = torch.empty(slots, H, K, V, dtype=state_dtype(v.dtype), device=v.device)
    _states(call, made, kept, final, walk, maps(call, made, walk), False)
    by_channel = made is not None
    launch(
        out_kernel,
        (slots * H * -(-V // read["BLOCK_V"]),),
        q, k, v, g, None if by_channel else call.bonus, call.offsets, kept if call.causal else final,
        None if made is None else made.pairs, out,
        q.stride(), k.stride(), v.stride(), strides(g), strides(call.bonus), call.scale, T, N, H, R, K, V,
        config=read, CAUSAL=call.causal, PER_CHANNEL=by_channel, AWAIT=target.arch == 90,
        PRECISION=float_precision(v.dtype, target), CHUNK=CHUNK,
    )  # fmt: skip
    return final


def maps(call: Any, made: Any, walk: Any, sums: Tensor | None = None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """What each stretch of a `walk` does to a state: decays [slots,H,K] of its rows, and ends [slots,H,K,V] added.

    `sums`, if given and there are stretches, is filled as walks want it (kernels_triton_walks.py).
    """
    *_, H, K, V, _ = call.sizes
    slots = walk.cut.slots
    if not walk.cut.tokens:
        return None, None
    decays = torch.empty(slots, H, K, dtype=torch.float32, device=call.v.device)
    ends = torch.empty(slots, H, K, V, dtype=torch.float32, device=call.v.device)
    _states(call, made, None, None, walk, (decays, ends), True, sums)
    return decays, ends


def _states(
    call: Any, made: Any, kept: Tensor | None, final: Tensor | None, walk: Any, maps: tuple[Any, Any], MAP: bool,
    sums: Tensor | None = None,
) -> None:  # fmt: skip
    _, T, G, H, K, V, N = call.sizes
    v, target = call.v, target_of(call.v.device)
    k, g, R = (call.k, call.log_decay, H // G) if made is None else (made.fallen, made.totals, 1)
    state = None if MAP else call.state
    config, blocks, cut = walk
    walks, heads = (cut.slots if MAP else cut.programs) * blocks, side(H, 16)
    launch(
        states_kernel,
        (walks + (0 if sums is None else sums.shape[0] * -(-H // heads)),),
        k, v, g, state, call.offsets, kept, final, *maps, sums,
        k.stride(), v.stride(), strides(g), strides(state), T, N, H, R, K, V, walks,
        config=config, CAUSAL=call.causal, PER_CHANNEL=made is not None,
        PRECISION=float_precision(v.dtype, target), CHUNK=CHUNK, STRETCH=cut.tokens, MAP=MAP, BLOCK_H=heads,
    )  # fmt: skip
