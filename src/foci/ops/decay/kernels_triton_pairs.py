"""What gates per channel make of each chunk, once, for all kernels: queries risen, keys fallen, pairs, totals.

risen = rise q, fallen = fall k [B,T,H,K] and the decayed products A [B,T,H,CHUNK] of queries with the keys of their
chunk, the bonus on its diagonal, in what states are stored in; total [chunks,H,K]. With them a chunk is one of gates
per token to every other kernel: no sum of gates, no factor, no product is made again for each block of V.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, float_precision, launch, side, state_dtype, strides, target_of
from foci.tiles import near
from foci.tiles.gates import ends, pairs, scaled
from foci.tiles.memory import load_tile, store_tile
from foci.tiles.rest import behind, clear_rest
from foci.tiles.state import chunk_at, working

CHUNK = 64
FLAGS: tl.constexpr = tl.constexpr(
    16
)  # twice as many as a stretch's head has blocks of V, as documents have spare ones
WIDTHS = {"BLOCK_K": (16, 32, 64, 128)}  # what `foci tune` may try


class Pairs(NamedTuple):
    """As above. Where a backward in half precision wants them, too (tiles/near.py):

    `sums` [B,T,H,K] of the gates from the chunk's start on, `far` [slots,H]: whether a chunk has far tokens.
    """

    risen: Tensor
    fallen: Tensor
    pairs: Tensor
    totals: Tensor
    sums: Tensor | None
    far: Tensor | None


@triton.jit
def pairs_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, g_ptr, bonus_ptr, offsets_ptr, risen_ptr, fallen_ptr, pairs_ptr, totals_ptr, sums_ptr, far_ptr,
    flags_ptr, rest_a, rest_b, rest_c, rest_d, rest_e, rest_f, widths,
    q_strides, k_strides, g_strides, bonus_strides, T, N, H, R, K, flags,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One chunk of one head; in half precision as if all tokens were near (tiles/near.py), then of rows that are not.

    Which rows these are depends on no later one. Behind its programs are those of `clear_rest`. Each sets FLAGS of so
    many `flags` to 0, for who walks next (kernels_triton_walks.py).
    """
    if widths is not None:
        rest = behind()
        if rest >= 0:
            clear_rest(rest_a, rest_b, rest_c, rest_d, rest_e, rest_f, widths, offsets_ptr, rest, N, T)
            return
    if flags_ptr is not None:
        flag = tl.program_id(0) * FLAGS + tl.arange(0, FLAGS)
        tl.store(flags_ptr + flag, 0, mask=flag < flags)
    OWN: tl.constexpr = bonus_ptr is None
    NEAR: tl.constexpr = k_ptr.dtype.element_ty != tl.float32
    h = (tl.program_id(0) % H).to(tl.int64)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, tl.program_id(0) // H, N, T, CHUNK)
    if n < 0:
        return
    row, t = tl.cast(b, tl.int64), tl.arange(0, CHUNK)
    totals_ptr += (slot * H + h) * K
    into, at = (row * T * H + h) * K, pairs_ptr + (row * T * H + h) * CHUNK
    q_ptr += row * q_strides[0] + h // R * q_strides[2]
    k_ptr += row * k_strides[0] + h // R * k_strides[2]
    g_ptr += row * g_strides[0] + h * g_strides[2]
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    least = tl.zeros([CHUNK], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        q = working(load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
        k = working(load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
        g = load_tile(g_ptr, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K).to(tl.float32)
        if not OWN:
            u = load_tile(bonus_ptr + h * bonus_strides[0], 0, 1, 0, k0, K, bonus_strides[1], 1, BLOCK_K)
            own += tl.sum(q * u.to(tl.float32) * k, 1)
        if NEAR:
            up, c, _ = near.exponents(g, OWN)
            risen = scaled(q, tl.exp(up))
            A = tl.dot(risen, tl.trans(scaled(k, near.lift(c))), A, input_precision=PRECISION)
            least = tl.minimum(least, tl.min(c, 1))
            if sums_ptr is not None:
                store_tile(sums_ptr + into, c, t0, stop, H * K, k0, K, 1)
            whole = tl.sum(near.bounded(g), 0)
            fallen = scaled(k, tl.exp(whole[None, :] - c))
        else:
            A = pairs(A, q, k, g, OWN, PRECISION)
            rise, fall = ends(g, OWN)
            risen, fallen, whole = scaled(q, rise), scaled(k, fall), tl.sum(g, 0)
        store_tile(risen_ptr + into, risen, t0, stop, H * K, k0, K, 1)
        store_tile(fallen_ptr + into, fallen, t0, stop, H * K, k0, K, 1)
        store_tile(totals_ptr, tl.exp(whole)[None, :], 0, 1, 0, k0, K, 1)
    close = least >= near.FAR
    if NEAR:
        A = tl.where(near.seen(close, OWN), A, 0.0)
        far = tl.min(least, 0) < near.FAR  # rarely
        if far_ptr is not None:
            tl.store(far_ptr + slot * H + h, far.to(tl.int8))
        if far:
            for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
                q = working(load_tile(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K))
                k = working(load_tile(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K))
                g = load_tile(g_ptr, t0, stop, g_strides[1], k0, K, g_strides[3], CHUNK, BLOCK_K).to(tl.float32)
                up, c, _ = near.exponents(g, OWN)
                A = near.far_pairs(A, q, k, up, c, close, OWN, PRECISION)
    if not OWN:
        A = tl.where(t[:, None] == t[None, :], own[:, None], A)
    store_tile(at, A, t0, stop, H * CHUNK, 0, CHUNK, 1)


def pairs_rule(dtype: torch.dtype, K: int, summed: bool, target: Target) -> Config:
    """Few channels of many warps. On Hopper, as measured on an H100, of few; in a backward twice as many channels."""
    if target.arch != 90 or dtype != torch.bfloat16:
        return Config({"BLOCK_K": side(K, 32)}, warps=4 if target.arch == 90 else 8, stages=1)
    return Config({"BLOCK_K": side(K, 64 if summed else 32)}, warps=4, stages=1 if summed else 2)


def prepared(call: Any, slots: int, summed: bool, rest: Any, flags: Tensor | None = None) -> Pairs | None:
    """The Pairs of a call of gates per channel; `summed`: with `sums`, where dtypes use them.

    Takes the `rest` of outputs with it (kernels_triton_packed.py), and sets `flags` [programs of a walk,H,blocks] to 0.
    """
    B, T, G, H, K, _, N = call.sizes
    v, g, target = call.v, call.log_decay, target_of(call.v.device)
    if g is None or g.shape[3] == 1:
        return None
    risen, fallen = (torch.empty(B, T, H, K, dtype=state_dtype(v.dtype), device=v.device) for _ in range(2))
    pairs = torch.empty(B, T, H, CHUNK, dtype=risen.dtype, device=v.device)
    totals = torch.empty(slots, H, K, dtype=torch.float32, device=v.device)
    sums = far = None
    if summed and v.dtype != torch.float32:
        sums = torch.empty(B, T, H, K, dtype=torch.float32, device=v.device)
        far = torch.empty(slots, H, dtype=torch.int8, device=v.device)
    key = (v.dtype, K, sums is not None)  # with sums it is another kernel, of more registers
    config = configure("linear_pairs", key, partial(pairs_rule, *key), target, WIDTHS)
    # As many programs on a processor as without the far rows' levels, which rarely run: these may spill.
    room = {"maxnreg": 128} if target.arch == 90 and v.dtype == torch.bfloat16 and sums is None else {}
    more, given = rest.taken()
    assert flags is None or flags.numel() <= slots * H * FLAGS.value
    launch(
        pairs_kernel,
        (slots * H + more,),
        call.q, call.k, g, call.bonus, call.offsets, risen, fallen, pairs, totals, sums, far, flags, *given,
        call.q.stride(), call.k.stride(), strides(g), strides(call.bonus), T, N, H, H // G, K,
        0 if flags is None else flags.numel(),
        config=config, PRECISION=float_precision(v.dtype, target), CHUNK=CHUNK, **room,
    )  # fmt: skip
    return Pairs(risen, fallen, pairs, totals, sums, far)
