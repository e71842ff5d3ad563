"""First launch of the delta rule's forward: X and A of every chunk at once, in loops over channels, of any dtype.

Letters and equations are those of kernels_triton_forward.py, which walks through what is made here. In bfloat16 others
make the same where they may: kernels_triton_chunks.py and, with gates per channel, kernels_triton_channel_chunks.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, float_precision, launch, side, state_dtype, strides, target_of
from foci.tiles import near, pairs
from foci.tiles.gates import load_gates, pairs_of_two, total
from foci.tiles.memory import store_tile
from foci.tiles.solve import inverse
from foci.tiles.state import chunk_at, in_two, rounded, working
from foci.tiles.whole import read, within, write

CHUNK = 64


class Gated(NamedTuple):
    """What gates make of a chunk's operands, for the walk; None where nothing decays."""

    rise: Tensor | None  # per token: [B,T,H]
    write: Tensor | None  # per token: [B,T,H], fall beta
    total: Tensor | None  # [slots,H] or per channel [slots,H,K]
    query: Tensor | None  # per channel: [B,T,H,K], rise q
    erase: Tensor | None  # per channel: [B,T,H,K], rise e
    key: Tensor | None  # per channel: [B,T,H,K], fall beta k; in bfloat16 [2,B,T,H,K], its rounding and what that left
    rows: Tensor | None  # in bfloat16, but for gates per channel: [slots,H,2,64], rise and write (beta), for TMA;
    # for kernels_gluon.py [slots,H,3,64], third 1 of tokens that have two bfloat16, else 0
    reach: Tensor | None  # where `cut`: [slots,H], what is left of a state (kernels_triton_chunks.py)
    sums: Tensor | None  # where the walk makes A: [slots,H,2,64], sums of gates, as powers of 2, and beta scale
    arrived: Tensor | None  # where `cut`: [N,H,counts] int32, made 0 (tiles/told.py)
    far: Tensor | None  # in bfloat16 per channel: [slots,H] int32, not 0 of chunks that the second launch makes again


@triton.jit
def chunks_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, offsets_ptr,
    X_ptr, A_ptr, rise_ptr, write_ptr, total_ptr, risen_q_ptr, risen_e_ptr, fallen_ptr,
    q_strides, k_strides, e_strides, beta_strides, g_strides, scale, zero, T, N, H, R, K,
    FAR: tl.constexpr, WHOLE: tl.constexpr, ALL_K: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """X and A of one chunk and head, and its operands with their decays in them.

    Per channel in float16 a first launch takes all rows as near (tiles/pairs.py); where its totals say that they
    may not be, the second, FAR, does all again. WHOLE: no tile reaches beyond its tensor (tiles/whole.py).
    """
    NEAR: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
    h = (tl.program_id(0) % H).to(tl.int64)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, tl.program_id(0) // H, N, T, CHUNK)
    if n < 0:
        return
    if FAR:  # noqa: SIM102  a constant and a tensor
        if near.forgets(total_ptr + (slot * H + h) * K, near.CLOSE, K, ALL_K) == 0:
            return
    row = tl.cast(b, tl.int64)
    q_ptr += row * q_strides[0] + h // R * q_strides[2]
    k_ptr += row * k_strides[0] + h // R * k_strides[2]
    if e_ptr is not None:
        e_ptr += row * e_strides[0] + h // R * e_strides[2]
    if g_ptr is not None:
        g_ptr += row * g_strides[0] + h * g_strides[2]
    t, at = tl.arange(0, CHUNK), t0 + tl.arange(0, CHUNK)
    beta_ptr += row * beta_strides[0] + h * beta_strides[2]
    beta = tl.load(beta_ptr + at.to(tl.int64) * beta_strides[1], mask=at < stop, other=0.0).to(tl.float32)
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    E = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        q = working(read(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K, WHOLE))
        k = working(read(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, WHOLE))
        e = k
        if e_ptr is not None:
            e = working(read(e_ptr, t0, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_K, WHOLE))
        if PER_CHANNEL:
            g = read(g_ptr, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
            q, k, e = q.to(tl.float32), k.to(tl.float32), e.to(tl.float32)
            if NEAR:
                c, last = near.sums_in_two(g, FAR)
                rise, fall, gone = tl.exp2(c), tl.exp2(last - c), tl.exp2(last)
            else:
                rise, fall = near.ends(g, True, False)
                gone = tl.broadcast_to(total(g)[None, :], g.shape)
            there = (row * T * H + h) * K
            write(risen_q_ptr + there, q * rise, t0, stop, H * K, k0, K, WHOLE)
            write(risen_e_ptr + there, e * rise, t0, stop, H * K, k0, K, WHOLE)
            write(fallen_ptr + there, k * (fall * beta[:, None]), t0, stop, H * K, k0, K, WHOLE)
            store_tile(total_ptr + (slot * H + h) * K, gone, 0, 1, 0, k0, K, 1)
            if NEAR:
                A, E = pairs.pairs_in_two(A, E, q, e, k, c, FAR, q_ptr.dtype.element_ty, PRECISION)
            else:
                A, E = pairs_of_two(A, E, q, e, k, g, PRECISION)
        else:
            A = tl.dot(q, tl.trans(k), A, input_precision=PRECISION)
            E = tl.dot(e, tl.trans(k), E, input_precision=PRECISION)
    if g_ptr is None or (PER_CHANNEL and NEAR):
        A = tl.where(t[:, None] >= t[None, :], A, 0.0)
    if PER_CHANNEL and NEAR:  # above the diagonal products may be infinite
        E = tl.where(t[:, None] > t[None, :], E, 0.0)
    if not PER_CHANNEL:  # noqa: SIM102  constants, each of which leaves code out
        if g_ptr is not None:
            g = load_gates(g_ptr, t0, stop, g_strides[1], CHUNK)
            W = near.weights(g, True, NEAR)
            A, E = A * W, E * W
            rise, fall = near.ends(g, True, NEAR)
            token = (row * T + at) * H + h
            tl.store(rise_ptr + token, rise, mask=at < stop)
            tl.store(write_ptr + token, fall * beta, mask=at < stop)
            tl.store(total_ptr + slot * H + h, total(g))
    there = (row * T * H + h) * CHUNK
    A *= (scale * beta)[None, :]
    HALVES: tl.constexpr = X_ptr.dtype.element_ty == tl.bfloat16
    if not HALVES:
        store_tile(A_ptr + there, rounded(A, PRECISION), t0, stop, H * CHUNK, 0, CHUNK, 1)  # read for products alone
    else:
        high, low = in_two(A)
        store_tile(A_ptr + 2 * there, high, t0, stop, 2 * H * CHUNK, 0, CHUNK, 1)
        store_tile(A_ptr + 2 * there + CHUNK, low, t0, stop, 2 * H * CHUNK, 0, CHUNK, 1)
    # What is past the end has no key, so that X is there the unit matrix's and 0 beside it.
    X = inverse(E * beta[None, :], PRECISION, HALVES)
    t0 += zero  # addresses kept from before would cost registers
    if not HALVES:
        store_tile(X_ptr + there, rounded(X, PRECISION), t0, stop, H * CHUNK, 0, CHUNK, 1)
    else:
        above, below = in_two(X)
        store_tile(X_ptr + 2 * there, above, t0, stop, 2 * H * CHUNK, 0, CHUNK, 1)
        store_tile(X_ptr + 2 * there + CHUNK, below, t0, stop, 2 * H * CHUNK, 0, CHUNK, 1)


def chunks_rule(dtype: torch.dtype, K: int, per_channel: bool, target: Target) -> Config:
    """Blocks of channels that leave room for what the pairs of each level need."""
    if per_channel:
        blocks = {"BLOCK_K": side(K, 32 if target.warpgroups else 16)}
        return Config(blocks, warps=4 if target.arch == 90 else 8, stages=1)
    if target.arch == 90 and dtype != torch.bfloat16:  # as measured on an H100
        return Config({"BLOCK_K": side(K, 128 if dtype == torch.float16 else 64)}, warps=4, stages=1)
    wide = dtype == torch.bfloat16 and target.shared > 100_000
    return Config({"BLOCK_K": side(K, 64 if wide else 32)}, warps=4 if wide else 8, stages=2 if wide else 1)


def first(
    call: Any, parts: Any, slots: int, cut: bool, at_once: Any, channel_chunks: Any, exact: bool, alone: bool, rest: Any
) -> tuple[Tensor, Tensor | None, Gated]:
    """X, A and what is made of gates; `parts` (gpu.py), if given, is filled; `cut`: reach too.

    One launch, and one more for far rows (`chunks_kernel`). `exact`: for the walk of kernels_gluon.py; `alone`: X is,
    as that makes A itself. In bfloat16, where they may, `at_once` makes it (kernels_triton_chunks.py), which clears the
    `rest` of the output too, and, with gates per channel, `channel_chunks` (kernels_triton_channel_chunks.py), behind
    the `rest`.
    """
    B, T, G, H, K, _, N = call.sizes
    v, g, target = call.v, call.log_decay, target_of(call.v.device)
    halves = state_dtype(v.dtype) == torch.bfloat16
    if parts is not None:
        inverse, products = parts.inverse, parts.products
    elif exact:  # beside each other, for one map
        inverse = torch.empty(B, T, H, (2 if alone else 4) * CHUNK, dtype=torch.bfloat16, device=v.device)
        products = None if alone else inverse[..., 2 * CHUNK :]
    else:
        width = 2 * CHUNK if halves else CHUNK
        inverse, products = torch.empty(2, B, T, H, width, dtype=state_dtype(v.dtype), device=v.device).unbind()
    per_channel = g is not None and g.shape[3] > 1
    gated = _gated(call, parts, slots, cut, exact, alone, per_channel)
    rule = partial(chunks_rule, v.dtype, K, per_channel)
    config = configure("delta_chunks", (v.dtype, K, per_channel), rule, target, {"BLOCK_K": (16, 32, 64)})
    by_near = per_channel and v.dtype != torch.float32
    even = K % config["BLOCK_K"] == 0 and within(CHUNK, K, call.q, call.k, call.erase, g)
    whole = even and call.offsets is None and T % CHUNK == 0
    # Three programs a processor, or four that hold less, as each waits for one product after the other: on an H200 195
    # us for 224, with spills, and 245 for 274 where `exact`; on an H100 81 for 90 of 64 channels. X alone by five.
    registers = 96 if alone else 128 if exact or K <= 64 else 168
    room = {"maxnreg": registers} if target.arch == 90 and halves and not per_channel else {}
    if halves and per_channel:
        rest.end()  # nothing stands between the last launch and the walk, which may begin beside it
        channel_chunks.chunks(call, inverse, products, (*gated[2:6], gated.far), whole, config)
        return inverse, products, gated
    if halves and at_once.fits(call, target):
        constants = {"EXACT": exact, "WHOLE": whole, "EVEN": even, "KEEP": parts is not None, **room}
        at_once.chunks(call, inverse, products, (*gated[:3], *gated[6:10]), slots, config, constants, rest)
        return inverse, products, gated
    for again in (False, True)[: 2 if by_near else 1]:
        launch(
            chunks_kernel, (slots * H,),
            call.q, call.k, call.erase, call.beta, g, call.offsets, inverse, products, *gated[:6],
            call.q.stride(), call.k.stride(), strides(call.erase), call.beta.stride(), strides(g),
            call.scale, 0, T, N, H, H // G, K,
            config=config, FAR=again, WHOLE=whole,
            ALL_K=side(K, 1 << 20), PER_CHANNEL=per_channel, CHUNK=CHUNK,
            PRECISION=float_precision(v.dtype, target), **room,
        )  # fmt: skip
    return inverse, products, gated


def _gated(call: Any, parts: Any, slots: int, cut: bool, exact: bool, alone: bool, per_channel: bool) -> Gated:
    """Room for what is made of gates; what `parts` has is there already."""
    B, T, _, H, K, V, N = call.sizes
    v, gated = call.v, Gated(*[None] * 11)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    each: tuple[Tensor | None, ...]
    if per_channel:
        total = torch.empty(slots, H, K, **kind)
        halves = 2 if state_dtype(v.dtype) == torch.bfloat16 else 1
        made = torch.empty(2 + halves, B, T, H, K, dtype=state_dtype(v.dtype), device=v.device)
        far = torch.empty(slots, H, dtype=torch.int32, device=v.device) if halves == 2 else None
        gated = Gated(None, None, total, made[0], made[1], made[2:], None, None, None, None, far)
    elif call.log_decay is not None:
        if parts is None:
            per_token = (None, None) if exact else torch.empty(2, B, T, H, **kind).unbind()
            each = (*per_token, *torch.empty(2, slots, H, **kind).unbind())
        else:
            each = parts.rise, parts.write, parts.total, parts.reach
        gated = gated._replace(rise=each[0], write=each[1], total=each[2])
        if cut:
            arrived = torch.empty(N, H, -(-V // 64) + 1, dtype=torch.int32, device=v.device)
            gated = gated._replace(reach=each[3], arrived=arrived)
    if state_dtype(v.dtype) == torch.bfloat16 and not per_channel:
        rows = torch.empty(slots, H, 3 if exact else 2, CHUNK, **kind) if parts is None else parts.rows
        gated = gated._replace(rows=rows)
    if alone:
        gated = gated._replace(sums=torch.empty(slots, H, 2, CHUNK, **kind))
    return gated
