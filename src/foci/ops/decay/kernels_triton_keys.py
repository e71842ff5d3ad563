"""Backward of linear attention in Triton: gradients of queries, keys, gates and the bonus (kernels_triton_backward.py).

With dA = scale do v^T, S the state at a chunk's start and dS the gradient of that at its end:

    dq = pairs(dA) k + scale rise (do S^T)    dk = pairs(dA)^T q + fall (v dS^T)

and a gate takes what it weighs of dA A, of both second terms, and of total (S dS) (tiles/gates.py: by_pairs, by_ends).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, float_precision, launch, side, strides, target_of
from foci.tiles import near
from foci.tiles.gates import load_gates, pairs_backward_onto, scaled, total
from foci.tiles.memory import add_tile, awaited, load_tile, store_tile
from foci.tiles.near import by_chunk, ends, load_sums, weights
from foci.tiles.state import chunk_at, covered, working

CHUNK = 64
WIDTHS = {"BLOCK_K": (16, 32, 64, 128), "BLOCK_V": (16, 32, 64, 128)}  # what `foci tune` may try


@triton.jit
def keys_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, bonus_ptr, offsets_ptr, states_ptr, ends_ptr, do_ptr,
    sums_ptr, far_ptr, dq_ptr, dk_ptr, dg_ptr, d_bonus_ptr,
    q_strides, k_strides, v_strides, g_strides, bonus_strides, do_strides, scale, zero, T, N, H, R, K, V, part,
    share, size, CAUSAL: tl.constexpr, PER_CHANNEL: tl.constexpr, AWAIT: tl.constexpr, SPLIT: tl.constexpr,
    ALONE: tl.constexpr, AHEAD: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dq, dk, summed over `share` of the R heads that read one head of keys, and dg, of one chunk's channels.

    Of BLOCKS times BLOCK_K of them, one block after the other. ALONE: a head has keys of its own. AHEAD: many heads and
    one block of V, so that the next head's tiles are loaded while this one's are multiplied. In both rise and fall
    weigh sums over V, and not what is summed.
    What is left to sum goes to parts: dq and dk to that of their share of heads, `size` entries apart; dg of a gate per
    token to that of its block of K, `part` entries apart; the bonus' to that of its chunk.
    """
    OWN: tl.constexpr = bonus_ptr is None
    NEAR: tl.constexpr = k_ptr.dtype.element_ty != tl.float32
    PER_TOKEN: tl.constexpr = (g_ptr is not None) and not PER_CHANNEL
    AFTER: tl.constexpr = PER_CHANNEL or ALONE or AHEAD
    ROWS: tl.constexpr = (dq_ptr is not None) or (dg_ptr is not None)
    block, rest = tl.program_id(0) % tl.cdiv(K, BLOCKS * BLOCK_K), tl.program_id(0) // tl.cdiv(K, BLOCKS * BLOCK_K)
    G, r0, heads = H // R, 0, R
    if SPLIT:
        r0 = rest % tl.cdiv(R, share) * share
        rest, heads = rest // tl.cdiv(R, share), tl.minimum(R, r0 + share)
    first, chunk = (rest % G).to(tl.int64), (rest // G).to(tl.int64)
    n, b, start, stop, slot = chunk_at(offsets_ptr, rest // G, N, T, CHUNK)
    row = tl.cast(b, tl.int64)
    if offsets_ptr is not None:  # noqa: SIM102  known before n is
        if n < 0:  # no such chunk: its parts are 0, of slots that may hold anything
            n, stop, slot, start = 0, 0, 0, 0
            if d_bonus_ptr is None:
                heads = 0
    # A loop over V that might be left out would set its sums to 0 there again, and Hopper's assembler would have each
    # product wait for the one before it (its note C7515).
    tl.assume(V > 0)
    t = tl.arange(0, CHUNK)
    q_all_ptr, k_all_ptr = q_ptr, k_ptr
    q_ptr += row * q_strides[0] + first * q_strides[2]
    k_ptr += row * k_strides[0] + first * k_strides[2]
    dg_before, far = tl.zeros([CHUNK], tl.float32), 0
    for i in tl.range(BLOCKS, disable_licm=True):
        k0 = (block * BLOCKS + i) * BLOCK_K
        t0 = start + zero * i  # what the loop changes stays in it: addresses kept through it would cost registers
        dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        pairs_of_all = tl.zeros([CHUNK, CHUNK], tl.float32)
        by_q, by_k = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for r in tl.range(r0, heads, disable_licm=True):
            h = first * R + r
            dA = tl.zeros([CHUNK, CHUNK], tl.float32)
            by_rows = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            by_columns = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            by_state = tl.zeros([BLOCK_K], tl.float32)
            if far_ptr is not None:
                far |= tl.load(far_ptr + slot * H + h).to(tl.int32)
            if PER_TOKEN:
                g = load_gates(g_ptr + row * g_strides[0] + h * g_strides[2], t0, stop, g_strides[1], CHUNK)
                rise, fall = ends(g, OWN, NEAR)
            place = ((slot if CAUSAL else n) * H + h) * K * V
            for v0 in tl.range(0, BLOCK_V if AHEAD else V, BLOCK_V):
                here = v_ptr + row * v_strides[0] + h * v_strides[2]
                v = working(load_tile(here, t0, stop, v_strides[1], v0, V, v_strides[3], CHUNK, BLOCK_V))
                here = do_ptr + row * do_strides[0] + h * do_strides[2]
                do = working(load_tile(here, t0, stop, do_strides[1], v0, V, do_strides[3], CHUNK, BLOCK_V))
                if CAUSAL:
                    dA = tl.dot(do, tl.trans(v), dA, input_precision=PRECISION)
                if ROWS:
                    S = load_tile(states_ptr + place, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V)
                    if AFTER:
                        by_rows = tl.dot(do, tl.trans(S.to(do.dtype)), by_rows, input_precision=PRECISION)
                    else:
                        do = scaled(do, (scale * rise)[:, None] if PER_TOKEN else scale)
                        dq = tl.dot(do, tl.trans(S.to(do.dtype)), dq, input_precision=PRECISION)
                        dq = awaited(dq, v0 < V) if AWAIT else dq
                if ends_ptr is not None:
                    dS = load_tile(ends_ptr + place, k0, K, V, v0, V, 1, BLOCK_K, BLOCK_V)
                    if dg_ptr is not None:
                        by_state += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
                    if AFTER:
                        by_columns = tl.dot(v, tl.trans(dS.to(v.dtype)), by_columns, input_precision=PRECISION)
                        if AWAIT and dg_ptr is not None:
                            by_columns = awaited(by_columns, v0 < V)
                    else:
                        v = scaled(v, fall[:, None]) if PER_TOKEN else v
                        dk = tl.dot(v, tl.trans(dS.to(v.dtype)), dk, input_precision=PRECISION)
                        dk = awaited(dk, v0 < V) if AWAIT else dk
            if AFTER and not PER_CHANNEL:  # only now, as what was loaded goes to shared memory by itself
                dq += by_rows * ((scale * rise)[:, None] if PER_TOKEN else scale)
                dk += by_columns * (fall[:, None] if PER_TOKEN else 1.0)
            # Only now, and again for each head: through the loop above they would not fit into registers.
            q = working(load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
            k = working(load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
            dA *= scale
            if PER_CHANNEL:
                dq, dk, dg = of_channels(
                    dq, dk, by_rows * scale, by_columns, by_state, dA, q, k, sums_ptr, (row * T * H + h) * K, H * K,
                    g_ptr + row * g_strides[0] + h * g_strides[2], g_strides, t0, stop, k0, K,
                    dg_ptr is not None, OWN, NEAR, PRECISION, CHUNK, BLOCK_K,
                )  # fmt: skip
                if dg_ptr is not None:
                    store_tile(dg_ptr + (row * T * H + h) * K, dg, t0, stop, H * K, k0, K, 1)
            elif CAUSAL:
                if g_ptr is None:
                    W = tl.where(t[:, None] >= t[None, :] if OWN else t[:, None] > t[None, :], 1.0, 0.0)
                else:
                    W = weights(g, OWN, NEAR)
                    if dg_ptr is not None:
                        P = dA * W * tl.dot(q, tl.trans(k), input_precision=PRECISION)
                        # This head's part of what q dq and k dk sum to.
                        rise, fall = tl.sum(q * dq, 1), tl.sum(k * dk, 1)
                        dg = by_chunk(P, rise - by_q, fall - by_k, tl.sum(by_state) * total(g), OWN, NEAR)
                        by_q, by_k = rise, fall
                        if BLOCKS > 1:  # and of those before: what is stored last is the sum
                            dg += dg_before
                            dg_before = dg
                        to = dg_ptr + tl.cast(block, tl.int64) * part + row * T * H + h
                        tl.store(to + (t0 + t) * H, dg.to(dg_ptr.dtype.element_ty), mask=t0 + t < stop)
                pairs_of_all += dA * W
            if not OWN:
                own = tl.sum(tl.where(t[:, None] == t[None, :], dA, 0.0), 1)[:, None]
                here = bonus_ptr + h * bonus_strides[0]
                u = load_tile(here, 0, 1, 0, k0, K, bonus_strides[1], 1, BLOCK_K).to(tl.float32)
                dq += own * u * k
                dk += own * u * q
                if d_bonus_ptr is not None:
                    du = tl.sum(own * q * k, 0)
                    store_tile(d_bonus_ptr + (chunk * H + h) * K, du[None, :], 0, 1, 0, k0, K, 1)
                if PER_TOKEN and dg_ptr is not None:
                    by_q, by_k = tl.sum(q * dq, 1), tl.sum(k * dk, 1)
        if CAUSAL and not PER_CHANNEL:  # heads that read the same keys and queries: one product of the sum
            q = working(load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
            k = working(load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
            P = pairs_of_all.to(k.dtype)
            dq = tl.dot(P, k, dq, input_precision=PRECISION)
            dk = tl.dot(tl.trans(P), q, dk, input_precision=PRECISION)
        into = tl.cast(r0 // share, tl.int64) * size
        if dq_ptr is not None:
            store_tile(dq_ptr + into + (row * T * G + first) * K, dq, t0, stop, G * K, k0, K, 1)
        if dk_ptr is not None:
            store_tile(dk_ptr + into + (row * T * G + first) * K, dk, t0, stop, G * K, k0, K, 1)
    if far_ptr is not None:  # noqa: SIM102  a constant and a number
        if far != 0:
            tl.debug_barrier()  # what is stored is read again, by other threads
            far_tokens(
                tl.program_id(0) + zero, q_all_ptr, k_all_ptr, v_ptr, g_ptr, offsets_ptr, do_ptr, sums_ptr, dq_ptr,
                dk_ptr, dg_ptr, q_strides, k_strides, v_strides, g_strides, do_strides, scale, T, N, H, R, K, V, share,
                size, SPLIT, OWN, PRECISION, CHUNK, BLOCK_K, BLOCK_V,
            )  # fmt: skip


@triton.jit
def far_tokens(  # type: ignore[no-untyped-def]
    index, q_ptr, k_ptr, v_ptr, g_ptr, offsets_ptr, do_ptr, sums_ptr, dq_ptr, dk_ptr, dg_ptr,
    q_strides, k_strides, v_strides, g_strides, do_strides, scale, T, N, H, R, K, V, share, size,
    SPLIT: tl.constexpr, OWN: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds what the pairs of far tokens (tiles/near.py) give to dq, dk and dg of program `index` above.

    Behind all else, as its levels want the registers, and with nothing of what is there, which would have to be kept.
    A token is far where any of the WIDE channels says so.
    """
    BLOCK_K: tl.constexpr = 32 if WIDE > 32 else WIDE
    wide0, rest = index % tl.cdiv(K, WIDE) * WIDE, index // tl.cdiv(K, WIDE)
    G, r0, heads = H // R, 0, R
    if SPLIT:
        r0 = rest % tl.cdiv(R, share) * share
        rest, heads = rest // tl.cdiv(R, share), tl.minimum(R, r0 + share)
    first = (rest % G).to(tl.int64)
    n, b, t0, stop, _slot = chunk_at(offsets_ptr, rest // G, N, T, CHUNK)
    row = tl.cast(b, tl.int64)
    into = tl.cast(r0 // share, tl.int64) * size + (row * T * G + first) * K
    for r in tl.range(r0, heads if n >= 0 else r0, disable_licm=True):
        h = first * R + r
        of_head = (row * T * H + h) * K
        close = tl.min(load_sums(sums_ptr + of_head, t0, stop, H * K, wide0, K, CHUNK, WIDE)[0], 1) >= near.FAR
        for k0 in tl.range(wide0, wide0 + WIDE, BLOCK_K, disable_licm=True):
            dA = tl.zeros([CHUNK, CHUNK], tl.float32)
            for v0 in range(0, V, BLOCK_V):
                here = v_ptr + row * v_strides[0] + h * v_strides[2]
                v = working(load_tile(here, t0, stop, v_strides[1], v0, V, v_strides[3], CHUNK, BLOCK_V))
                here = do_ptr + row * do_strides[0] + h * do_strides[2]
                do = working(load_tile(here, t0, stop, do_strides[1], v0, V, do_strides[3], CHUNK, BLOCK_V))
                dA = tl.dot(do, tl.trans(v), dA, input_precision=PRECISION)
            here = q_ptr + row * q_strides[0] + first * q_strides[2]
            q = working(load_tile(here, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
            here = k_ptr + row * k_strides[0] + first * k_strides[2]
            k = working(load_tile(here, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
            c = load_sums(sums_ptr + of_head, t0, stop, H * K, k0, K, CHUNK, BLOCK_K)[0]
            risen = c
            if not OWN:
                here = g_ptr + row * g_strides[0] + h * g_strides[2]
                g = load_tile(here, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K).to(tl.float32)
                risen -= near.bounded(g)
            dq, dk, dg = near.far_backward(scale * dA, q, k, risen, c, close, OWN, PRECISION)
            add_tile(dq_ptr, into, dq, t0, stop, G * K, k0, K)
            add_tile(dk_ptr, into, dk, t0, stop, G * K, k0, K)
            add_tile(dg_ptr, of_head, dg, t0, stop, H * K, k0, K)


@triton.jit
def of_channels(  # type: ignore[no-untyped-def]
    dq, dk, by_rows, by_columns, by_state, dA, q, k, sums_ptr, place, stride, g_ptr, g_strides, t0, stop, k0, K,
    GATES: tl.constexpr, OWN: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(dq, dk, dg) with what a head gives of gates per channel; `by_rows` and `by_columns` are not weighed yet."""
    t = tl.arange(0, CHUNK)
    if NEAR:
        c, last = load_sums(sums_ptr + place, t0, stop, stride, k0, K, CHUNK, BLOCK_K)
    if not NEAR or not OWN:
        g = load_tile(g_ptr, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K).to(tl.float32)
    by_columns *= tl.exp(last[None, :] - c) if NEAR else ends(g, True, False)[1]
    dg = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    if GATES:  # by_ends as products: sums along the tokens of a tile so wide spill
        dg += (by_state * (tl.exp(last) if NEAR else total(g)))[None, :]
        of_fall = t[:, None] > t[None, :]
        dg = tl.dot(of_fall.to(k.dtype), (k * by_columns).to(k.dtype), dg, input_precision=PRECISION)
    dk += by_columns
    if NEAR:
        risen, close = c if OWN else c - near.bounded(g), tl.min(c, 1) >= near.FAR
        by_rows, dk, dg = near.pairs_backward(by_rows, dk, dg, dA, q, k, risen, c, close, OWN, PRECISION)
        dq += by_rows
    else:
        by_rows *= ends(g, OWN, False)[0]
        if GATES:
            of_rise = t[:, None] <= t[None, :] if OWN else t[:, None] < t[None, :]
            dg = tl.dot(of_rise.to(q.dtype), (q * by_rows).to(q.dtype), dg, input_precision=PRECISION)
        dq, dk, dg = pairs_backward_onto(dq + by_rows, dk, dg, dA, q, k, g, OWN, PRECISION)
    return dq, dk, dg


@triton.jit
def sums_kernel(  # type: ignore[no-untyped-def]
    g_ptr, dg_ptr, bonus_ptr, d_bonus_ptr, q_ptr, dq_ptr, k_ptr, dk_ptr, offsets_ptr, g_parts, g_size, bonus_parts,
    bonus_size, parts, q_size, k_size, T, N, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums over parts [parts, size] of what gradients have them, in a fixed order; where not, the size is 0.

    Packed, only of tokens that a document has: no other has parts. The bonus has no tokens.
    """
    block = tl.program_id(0)
    if g_ptr is not None:
        _sum(block, g_ptr, dg_ptr, offsets_ptr, g_parts, g_size, T, N, BLOCK_P, BLOCK)
        block -= tl.cdiv(g_size, BLOCK)
    if bonus_ptr is not None:
        _sum(block, bonus_ptr, d_bonus_ptr, None, bonus_parts, bonus_size, T, N, BLOCK_P, BLOCK)
        block -= tl.cdiv(bonus_size, BLOCK)
    if q_ptr is not None:
        _sum(block, q_ptr, dq_ptr, offsets_ptr, parts, q_size, T, N, BLOCK_P, BLOCK)
        block -= tl.cdiv(q_size, BLOCK)
    if k_ptr is not None:
        _sum(block, k_ptr, dk_ptr, offsets_ptr, parts, k_size, T, N, BLOCK_P, BLOCK)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    block, ptr, out_ptr, offsets_ptr, parts, size, T, N, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr
):
    """Block `block` of the sum, if there is one."""
    if (block >= 0) & (block < tl.cdiv(size, BLOCK)):
        x = tl.zeros([BLOCK_P, BLOCK], tl.float32)
        for p in range(0, parts, BLOCK_P):
            x += load_tile(ptr, p, parts, size, block * BLOCK, size, 1, BLOCK_P, BLOCK)
        at = block * BLOCK + tl.arange(0, BLOCK)
        here = at < size
        if offsets_ptr is not None:
            first, last = covered(offsets_ptr, N, T)
            here &= (at >= first * (size // T)) & (at < last * (size // T))
        tl.store(out_ptr + at, tl.sum(x, 0).to(out_ptr.dtype.element_ty), mask=here)


def keys_rule(
    dtype: torch.dtype, K: int, V: int, by_channel: bool, bonus: bool, groups: bool, target: Target
) -> Config:
    """All channels that registers hold, because every block of them makes dA again."""
    more, bf16 = bonus or groups, dtype == torch.bfloat16
    if target.arch == 90 and (by_channel or not (bf16 and bonus)):
        k, v, warps, stages = _on_hopper(dtype, K, V, by_channel, more, groups)
        return Config({"BLOCK_K": side(K, k), "BLOCK_V": side(V, v)}, warps, stages)
    if bf16 and target.shared > 200_000 and not bonus and by_channel != groups:
        k, v = (64, 64) if by_channel else (128, 64)  # as it was fastest on an H200
        return Config({"BLOCK_K": side(K, k), "BLOCK_V": side(V, v)}, warps=8, stages=2 if groups and v >= V else 1)
    if by_channel:
        k = 16 if dtype == torch.float32 or (more and not bf16) else 32
    elif more or dtype == torch.float32:
        k = 16 if dtype == torch.float32 and more else 32
    else:
        k = 128 if bf16 and target.shared > 120_000 else 64
    v = 64 if bf16 and not more and target.shared > 80_000 else 32
    blocks = {"BLOCK_K": side(K, k), "BLOCK_V": side(V, v)}
    return Config(blocks, warps=8, stages=1 if by_channel and groups else 2)


def _on_hopper(
    dtype: torch.dtype, K: int, V: int, by_channel: bool, more: bool, groups: bool
) -> tuple[int, int, int, int]:
    """Channels of K and of V, warps and stages as measured on an H200 and an H100, spills and all."""
    if dtype != torch.bfloat16:
        half = dtype == torch.float16
        k, v, stages = (32, 32 if half else 64, 2 if half else 1) if by_channel else (64 if half else 32, 32, 2)
        return k, v, 4, stages
    if by_channel:
        v, stages = (64, 3) if more or V > 128 else (32, 4 if V > 64 else 3)
        return 32, v, 4, stages
    return (128, 64, 8, 3) if (64 if groups else 128) < K else (64, 64, 4, 3)


def _share(heads: int, others: int, target: Target) -> int:
    """How many of the heads that read one head of keys a program takes: as many as leave enough programs to all."""
    parts = min(heads, -(-8 * target.processors // others))
    return -(-heads // parts)


def sums_rule(parts: int, target: Target) -> Config:
    """Few parts are long, and many are short."""
    return Config({"BLOCK_P": 16, "BLOCK": 64} if parts > 64 else {"BLOCK_P": 4, "BLOCK": 512})


def backward(
    call: Any, made: Any, states: Tensor, ends: Tensor | None, do: Tensor, found: Sequence[Tensor | None], chunks: int
) -> None:
    """Fills the gradients of q, k, log_decay and the bonus (`found`), None where not needed, or constant.

    `states`: what the forward kept, or the last ones where it is not causal; `ends`: their gradients. `chunks`: at most
    so many (ops/gpu.py). `made`: the Pairs of gates per channel (kernels_triton_pairs.py).
    """
    B, T, G, H, K, V, N = call.sizes
    g, target = call.log_decay, target_of(do.device)
    if all(x is None for x in found):
        return
    dq, dk, dg, d_bonus = found
    by_channel = made is not None
    key = do.dtype, K, V, by_channel, call.bonus is not None, H > G
    config = configure("linear_keys", key, partial(keys_rule, *key), target, WIDTHS)
    blocks = -(-K // config["BLOCK_K"])
    # Gates want sums over all channels: where one program has them, no launch has to add them up.
    gated = dg is not None and not by_channel and call.bonus is None and H == G
    blocks, together = (1, blocks) if gated and target.arch == 90 else (blocks, 1)
    g_parts = 1 if by_channel else blocks
    g_size = B * T * H
    dg_parts = bonus_parts = None
    if dg is not None and g_parts > 1:
        dg_parts = torch.empty(g_parts, g_size, dtype=torch.float32, device=do.device)
    if d_bonus is not None:
        bonus_parts = torch.empty(chunks, H, K, dtype=torch.float32, device=do.device)
    share = _share(H // G, chunks * G * blocks, target)
    parts = -(-H // G // share)
    dq_parts, dk_parts = (
        torch.empty(parts, *x.shape, dtype=torch.float32, device=do.device) if x is not None and parts > 1 else None
        for x in (dq, dk)
    )
    onto = (dq if dq_parts is None else dq_parts), (dk if dk_parts is None else dk_parts)
    launch(
        keys_kernel,
        (chunks * G * parts * blocks,),
        call.q, call.k, call.v, g, call.bonus, call.offsets, states, ends, do,
        *((None, None) if made is None else (made.sums, made.far)),
        *onto, dg if dg_parts is None else dg_parts, bonus_parts,
        call.q.stride(), call.k.stride(), call.v.stride(), strides(g), strides(call.bonus), do.stride(),
        call.scale, 0, T, N, H, H // G, K, V, g_size, share, call.q.numel(),
        config=config, CAUSAL=call.causal, PER_CHANNEL=by_channel, AWAIT=target.arch == 90, SPLIT=parts > 1,
        CHUNK=CHUNK, ALONE=H == G, BLOCKS=together, AHEAD=H > G and not by_channel and config["BLOCK_V"] >= V,
        PRECISION=float_precision(do.dtype, target),
    )  # fmt: skip
    left = (dg_parts, dg, g_parts), (bonus_parts, d_bonus, chunks), (dq_parts, dq, parts), (dk_parts, dk, parts)
    _sums(left, call.offsets, T, N, target)


def sums(parts: Tensor, dg: Tensor) -> None:
    """Fills dg, which has no tokens, with the sum of its parts."""
    _sums(((parts, dg, parts.shape[0]), *((None, None, 0),) * 3), None, 0, 0, target_of(dg.device))


def _sums(
    left: Sequence[tuple[Tensor | None, Tensor | None, int]], offsets: Tensor | None, T: int, N: int,
    target: Target,
) -> None:  # fmt: skip
    """What parts are left to sum: (parts, the sum, how many), None where there is none."""
    sizes = [0 if one is None or into is None else into.numel() for one, into, _ in left]
    if not any(sizes):
        return
    most = max(count for size, (_, _, count) in zip(sizes, left, strict=True) if size)
    config = configure("linear_sums", (most > 64,), partial(sums_rule, most), target)
    (_, _, g_parts), (_, _, bonus_parts), (_, _, parts), _ = left
    launch(
        sums_kernel,
        (sum(-(-size // config["BLOCK"]) for size in sizes),),
        *(x for one, into, _ in left for x in (one, into)),
        offsets, g_parts, sizes[0], bonus_parts, sizes[1], parts, *sizes[2:], T, N,
        config=config,
    )  # fmt: skip
