"""First launch of the delta rule's forward in bfloat16, gates per channel: what kernels_triton_triangles.py makes.

All rows are taken as near first, which is in the first band (tiles/near.py); chunks whose totals say that some may be
far are made again by a second launch, band by band. A and E are products of operands in float32, rounded to TF32: next
to what bfloat16 has left of inputs that is nothing, and it is one product where two bfloat16 each would be three. Apart
from instructions it is latencies that take time: channels are loaded two blocks ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, dependent_launch, float_precision, launch, strides, target_of
from foci.tiles import near
from foci.tiles.memory import store_tile
from foci.tiles.near import DOWN, UP, above_each_other, apart, nearest, sums_and_total
from foci.tiles.solve import across, inverse
from foci.tiles.state import chunk_at, in_two
from foci.tiles.turns import begin_next
from foci.tiles.whole import read, write, write_beside

CHUNK = 64
EACH: tl.constexpr = tl.constexpr(32)  # chunks that one program of the second launch looks at


@triton.jit
def far_pairs(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, g_ptr, beta, total_ptr, made_ptr, q_strides, k_strides, e_strides, g_strides,
    t0, stop, stride, K, half, WHOLE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(A without scale, E) of a chunk that may have far rows, with what else its channels leave: near rows bit by bit
    as without them.
    """
    pairs = tl.zeros([2 * CHUNK, CHUNK], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
        g = read(g_ptr, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
        q = read(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
        k = read(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
        e = k
        if e_ptr is not None:
            e = read(e_ptr, t0, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
        c, last = near.sums_in_two(g, True)
        store_tile(total_ptr, tl.exp2(last), 0, 1, 0, k0, K, 1)
        fallen, lost = in_two(k * (tl.exp2(last - c) * beta[:, None]))
        for i in tl.range(near.bands(c), disable_licm=True):
            rise, lift = near.of_band(c, i, True)
            rows = above_each_other(q * rise, e * rise)
            if i == 0:
                four = above_each_other((rows * DOWN).to(tl.bfloat16), above_each_other(fallen, lost))
                write_beside(made_ptr, four, half, t0, stop, stride, k0, K, WHOLE, CHUNK)
            columns = tl.trans(across(nearest(k * (lift * beta[:, None]), PRECISION)))
            pairs = tl.dot(across(nearest(rows, PRECISION)), columns, pairs, input_precision=PRECISION)
    return apart(pairs)


@triton.jit
def one_chunk(  # type: ignore[no-untyped-def]
    h, b, t0, stop, slot, q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, X_ptr, A_ptr, total_ptr, made_ptr,
    q_strides, k_strides, e_strides, beta_strides, g_strides, scale, zero, T, H, R, K, half,
    FAR: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """X and A of one chunk and head, its totals, rise q, rise e and fall beta k; whether it may have far rows, or is no
    chunk of numbers.
    """
    row = tl.cast(b, tl.int64)
    q_ptr += row * q_strides[0] + h // R * q_strides[2]
    k_ptr += row * k_strides[0] + h // R * k_strides[2]
    if e_ptr is not None:
        e_ptr += row * e_strides[0] + h // R * e_strides[2]
    g_ptr += row * g_strides[0] + h * g_strides[2]
    made_ptr += (row * T * H + h) * K
    total_ptr += (slot * H + h) * K
    t, at = tl.arange(0, CHUNK), t0 + tl.arange(0, CHUNK)
    beta_ptr += row * beta_strides[0] + h * beta_strides[2]
    beta = tl.load(beta_ptr + at.to(tl.int64) * beta_strides[1], mask=at < stop, other=0.0).to(tl.float32)
    far = 0
    if FAR:
        A, E = far_pairs(
            q_ptr, k_ptr, e_ptr, g_ptr, beta, total_ptr, made_ptr, q_strides, k_strides, e_strides, g_strides,
            t0, stop, H * K, K, half, WHOLE, PRECISION, CHUNK, BLOCK_K,
        )  # fmt: skip
    else:
        pairs = tl.zeros([2 * CHUNK, CHUNK], tl.float32)
        least = tl.full([CHUNK // 2, BLOCK_K], 1.0, tl.float32)
        for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            g = read(g_ptr, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K, WHOLE).to(tl.float32)
            q = read(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K, WHOLE)
            k = read(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, WHOLE)
            e = k
            if e_ptr is not None:
                e = read(e_ptr, t0, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_K, WHOLE)
            c, gone, once = sums_and_total(g, UP)
            rise, lift = tl.exp2(c + UP), tl.exp2(-(c + UP))  # infinite where rows are far
            columns = k.to(tl.float32) * (lift * beta[:, None])
            up_q, up_e = q.to(tl.float32) * rise, e.to(tl.float32) * rise
            fallen, lost = in_two(columns * gone)
            rows = above_each_other(up_q, up_e)
            four = above_each_other((rows * DOWN).to(tl.bfloat16), above_each_other(fallen, lost))
            write_beside(made_ptr, four, half, t0, stop, H * K, k0, K, WHOLE, CHUNK)
            store_tile(total_ptr, once * DOWN, 0, 1, 0, k0, K, 1)
            least = tl.minimum(least, once, tl.PropagateNan.ALL)
            columns = tl.trans(across(nearest(columns, PRECISION)))
            rows = across(nearest(rows, PRECISION))
            pairs = tl.dot(rows, columns, pairs, input_precision=PRECISION)
        far = tl.max(tl.where(least > near.CLOSE, 0, 1))
        A, E = apart(pairs)
    into = (row * T * H + h) * 2 * CHUNK
    A = tl.where(t[:, None] >= t[None, :], A * scale, 0.0)
    high, low = in_two(A)
    write(A_ptr + into, high, t0, stop, 2 * H * CHUNK, 0, CHUNK, WHOLE)
    write(A_ptr + into + CHUNK, low, t0, stop, 2 * H * CHUNK, 0, CHUNK, WHOLE)
    # What is past the end has no key, so that X is there the unit matrix's and 0 beside it. Above the diagonal products
    # may be infinite.
    X = inverse(tl.where(t[:, None] > t[None, :], E, 0.0), PRECISION, True)
    t0 += zero  # addresses kept from before would cost registers
    above, below = in_two(X)
    write(X_ptr + into, above, t0, stop, 2 * H * CHUNK, 0, CHUNK, WHOLE)
    write(X_ptr + into + CHUNK, below, t0, stop, 2 * H * CHUNK, 0, CHUNK, WHOLE)
    return far


@triton.jit
def near_chunks_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, offsets_ptr, X_ptr, A_ptr, total_ptr, made_ptr, far_ptr,
    q_strides, k_strides, e_strides, beta_strides, g_strides, scale, zero, T, N, H, R, K, half, count,
    FAR: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """One chunk and head, all rows taken as near, and whether they may be far; FAR: of EACH chunks those that may.

    BESIDE: the walk behind waits for the second launch only in heads of such chunks.
    """
    if FAR:
        begin_next(BESIDE)
        first, i = tl.program_id(0) * EACH, tl.arange(0, EACH)
        flags = tl.load(far_ptr + first + i, mask=first + i < count, other=0)
        for j in tl.range(tl.where(tl.max(flags, 0) > 0, EACH, 0), disable_licm=True):
            if tl.sum(tl.where(i == j, flags, 0), 0) > 0:
                h = ((first + j) % H).to(tl.int64)
                n, b, t0, stop, slot = chunk_at(offsets_ptr, (first + j) // H, N, T, CHUNK)
                one_chunk(
                    h, b, t0, stop, slot,
                    q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, X_ptr, A_ptr, total_ptr, made_ptr,
                    q_strides, k_strides, e_strides, beta_strides, g_strides, scale, zero, T, H, R, K, half,
                    FAR, WHOLE, PRECISION, CHUNK, BLOCK_K, STAGES,
                )  # fmt: skip
    else:
        h = (tl.program_id(0) % H).to(tl.int64)
        n, b, t0, stop, slot = chunk_at(offsets_ptr, tl.program_id(0) // H, N, T, CHUNK)
        if n < 0:
            tl.store(far_ptr + tl.program_id(0), 0)
            return
        far = one_chunk(
            h, b, t0, stop, slot, q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, X_ptr, A_ptr, total_ptr, made_ptr,
            q_strides, k_strides, e_strides, beta_strides, g_strides, scale, zero, T, H, R, K, half,
            FAR, WHOLE, PRECISION, CHUNK, BLOCK_K, STAGES,
        )  # fmt: skip
        tl.store(far_ptr + tl.program_id(0), far)


def chunks(
    call: Any,
    inverse: Tensor,
    products: Tensor,
    gated: Sequence[Any],
    whole: bool,
    config: Config,
) -> None:
    """Fills X, A, and total, rise q, rise e and fall beta k, which lie behind each other, and which are far (`gated`).

    Both launches have as many warps, and so products of the same instructions: near rows have the same bits in both.
    """
    B, T, G, H, K, _, N = call.sizes
    far, target = gated[-1], target_of(call.v.device)
    programs, each = far.numel(), EACH.value
    for again in (False, True):
        launch(
            near_chunks_kernel, (-(-programs // each) if again else programs,),
            call.q, call.k, call.erase, call.beta, call.log_decay, call.offsets, inverse, products, *gated[:2],
            far, call.q.stride(), call.k.stride(), strides(call.erase), call.beta.stride(), strides(call.log_decay),
            call.scale, 0, T, N, H, H // G, K, B * T * H * K, programs,
            config=config, FAR=again, WHOLE=whole,
            PRECISION=float_precision(call.v.dtype, target), CHUNK=CHUNK, STAGES=3,
            **(dependent_launch(target, False) if again else {"BESIDE": False}),
        )  # fmt: skip
