"""The delta rule's walk for gates per channel on Hopper, in bfloat16: a state turned over, [V,K], in registers.

The equations are those of kernels_triton_forward.py, turned over too:

    d^T = (v^T - S^T (rise e)^T) X^T;  o^T = S^T (scale rise q)^T + d^T A^T;  S^T <- S^T total + d^T (fall beta k)

So whatever one product makes and another takes is its left operand, and stays in registers: what Hopper adds up lies
where it takes a left operand from. The right ones lie in shared memory as TMA has brought them, none of them waits for
a product, and between the products of a chunk, which wait for each other, nothing is stored, fenced or waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, dependent_launch, launch, strides, target_of
from foci.tiles.affine import load_state
from foci.tiles.maps import tiles_of
from foci.tiles.memory import lines_of, load_row, load_tile, loaded, own_rows, present, put, rows_of, store_tile
from foci.tiles.state import halves, in_two, sequence
from foci.tiles.turns import flagged, wait_for_last
from foci.tiles.whole import write

CHUNK = 64


@triton.jit
def channel_walk_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, v_ptr, X_ptr, A_ptr, total_ptr, far_ptr, state_ptr, offsets_ptr,
    out_ptr, final_ptr, errors_ptr, states_ptr, v_strides, state_strides, scale, B, T, N, H, V,
    WHOLE: tl.constexpr, BESIDE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's state through one sequence: `walk_kernel` of rise q and e; k, X and A in two.

    BESIDE: the launch before it makes far chunks anew (kernels_triton_channel_chunks.py): heads that have some wait for
    it first, all others at their end.
    """
    K: tl.constexpr = BLOCK_K
    v0 = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * BLOCK_V
    rest = tl.program_id(0) // tl.cdiv(V, BLOCK_V)
    h, n = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    row = tl.cast(b, tl.int64)
    tokens, first = row * T * H + h, tl.cast(slot, tl.int64) * H + h
    if BESIDE:  # noqa: SIM102  what is known when it is compiled
        if flagged(far_ptr + first, tl.cdiv(stop - start, CHUNK), H) > 0:
            wait_for_last(BESIDE)
    q_there = own_rows(q_ptr, row, h, T, H, stop, K, CHUNK, K, TMA)
    e_ptr += tokens * K
    next_e = load_tile(e_ptr, start, stop, H * K, 0, K, 1, CHUNK, K)  # where all else has yet to be asked for
    k_there = own_rows(k_ptr, row, h, T, H, stop, K, CHUNK, K, TMA)
    lost_there = own_rows(k_ptr, row + B, h, T, H, stop, K, CHUNK, K, TMA)
    v_there = rows_of(v_ptr, row, h, T, stop, v_strides, V, CHUNK, BLOCK_V, TMA)
    X_there = own_rows(X_ptr, row, h, T, H, stop, 2 * CHUNK, CHUNK, CHUNK, TMA)
    A_there = own_rows(A_ptr, row, h, T, H, stop, 2 * CHUNK, CHUNK, CHUNK, TMA)
    out_there = own_rows(out_ptr, row, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
    if states_ptr is not None:
        states_there = lines_of(states_ptr, first * K, tl.cdiv(stop - start, CHUNK) * H * K, V, K, BLOCK_V, TMA)
    if state_ptr is not None:
        state_ptr += n * state_strides[0] + h * state_strides[1]
    S = tl.trans(load_state(state_ptr, state_strides, K, v0, V, 1, K, BLOCK_V)[0])
    gone = load_row(total_ptr + first * K, 0, tl.where(start < stop, K, 0), K)  # each a chunk before it is wanted
    total_ptr += (first + H) * K
    # Else where tiles lie would be kept in registers, and these spilled.
    for t0 in tl.range(start, stop, CHUNK, disable_licm=TMA == 2):
        e = next_e
        next_e = load_tile(e_ptr, t0 + CHUNK, stop, H * K, 0, K, 1, CHUNK, K)
        operand = S.to(tl.bfloat16)
        read = tl.dot(operand, tl.trans(e))
        v = loaded(v_there, t0, v0)
        high, low = in_two(tl.trans(v).to(tl.float32) - read)
        X, X_lost = loaded(X_there, t0, 0), loaded(X_there, t0, CHUNK)
        d = halves(high, low, tl.trans(X), tl.trans(X_lost), tl.zeros_like(read))
        high, low = in_two(d)
        S *= gone[None, :]
        gone = load_row(total_ptr, 0, tl.where(t0 + CHUNK < stop, K, 0), K)
        total_ptr += H * K
        k, k_lost = loaded(k_there, t0, 0), loaded(lost_there, t0, 0)
        S = halves(high, low, k, k_lost, S)
        q, A, A_lost = loaded(q_there, t0, 0), loaded(A_there, t0, 0), loaded(A_there, t0, CHUNK)
        o = halves(high, low, tl.trans(A), tl.trans(A_lost), tl.dot(operand, tl.trans(q)) * scale)
        put(out_there, tl.trans(o), t0, v0)
        if states_ptr is not None:
            put(states_there, tl.trans(operand), (t0 - start) // CHUNK * H * K, v0)
        if errors_ptr is not None:
            write(errors_ptr + tokens * V, tl.trans(d), t0, stop, H * V, v0, V, WHOLE)
    if present(final_ptr):
        store_tile(final_ptr + (n * H + h) * K * V, tl.trans(S), 0, K, V, v0, V, 1)
    wait_for_last(BESIDE)


@triton.jit
def channel_walk_back_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, total_ptr, A_ptr, d_out_ptr, d_final_ptr, offsets_ptr,
    dv_ptr, d_value_ptr, ends_ptr, d_state_ptr, d_out_strides, d_final_strides, B, T, N, H, V,
    WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The backward's walk, turned over in the same way: of scale rise q; X^T fall beta k, A X and rise e in two.

    dv^T = do^T A X + dS^T (X^T fall beta k)^T;  dS^T <- dS^T total + do^T (scale rise q) - dv^T (rise e)
    """
    K: tl.constexpr = BLOCK_K
    v0 = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * BLOCK_V
    rest = tl.program_id(0) // tl.cdiv(V, BLOCK_V)
    h, n = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    row, count = tl.cast(b, tl.int64), tl.cdiv(stop - start, CHUNK)
    tokens, first = row * T * H + h, tl.cast(slot, tl.int64) * H + h
    q_there = own_rows(q_ptr, row, h, T, H, stop, K, CHUNK, K, TMA)
    k_there = own_rows(k_ptr, row, h, T, H, stop, K, CHUNK, K, TMA)
    k_lost_there = own_rows(k_ptr, row + B, h, T, H, stop, K, CHUNK, K, TMA)
    e_there = own_rows(e_ptr, row, h, T, H, stop, K, CHUNK, K, TMA)
    e_lost_there = own_rows(e_ptr, row + B, h, T, H, stop, K, CHUNK, K, TMA)
    A_there = own_rows(A_ptr, row, h, T, H, stop, 2 * CHUNK, CHUNK, CHUNK, TMA)
    do_there = rows_of(d_out_ptr, row, h, T, stop, d_out_strides, V, CHUNK, BLOCK_V, TMA)
    if d_final_ptr is not None:
        d_final_ptr += n * d_final_strides[0] + h * d_final_strides[1]
    dS = tl.trans(load_state(d_final_ptr, d_final_strides, K, v0, V, 1, K, BLOCK_V)[0])
    total_ptr += (first + (count - 1) * H) * K
    ends_ptr += (first + (count - 1) * H) * K * V
    gone = load_row(total_ptr, 0, tl.where(count > 0, K, 0), K)  # each a chunk before it is wanted
    for i in tl.range(count, disable_licm=TMA == 2):
        t0 = start + (count - 1 - i) * CHUNK
        k = loaded(k_there, t0, 0)
        k_lost = loaded(k_lost_there, t0, 0)
        operand = dS.to(tl.bfloat16)
        dv = tl.dot(operand, tl.trans(k_lost), tl.dot((dS - operand.to(tl.float32)).to(tl.bfloat16), tl.trans(k)))
        dv = tl.dot(operand, tl.trans(k), dv)
        write(ends_ptr, tl.trans(operand), 0, K, V, v0, V, WHOLE)
        ends_ptr -= H * K * V
        do, A, A_lost = loaded(do_there, t0, v0), loaded(A_there, t0, 0), loaded(A_there, t0, CHUNK)
        dv = tl.dot(tl.trans(do), A, tl.dot(tl.trans(do), A_lost, dv))
        dS *= gone[None, :]
        total_ptr -= H * K
        gone = load_row(total_ptr, 0, tl.where(i + 1 < count, K, 0), K)
        high, low = in_two(-dv)
        e, e_lost, q = loaded(e_there, t0, 0), loaded(e_lost_there, t0, 0), loaded(q_there, t0, 0)
        dS = tl.dot(tl.trans(do), q, halves(high, low, e, e_lost, dS))
        write(dv_ptr + tokens * V, tl.trans(dv), t0, stop, H * V, v0, V, WHOLE)
        if d_value_ptr is not None:
            write(d_value_ptr + tokens * V, tl.trans(dv), t0, stop, H * V, v0, V, WHOLE)
    if d_state_ptr is not None:
        store_tile(d_state_ptr + (n * H + h) * K * V, tl.trans(dS), 0, K, V, v0, V, 1)


def fits(K: int, V: int, walk: Config, target: Target, columns: int = 64) -> bool:
    """Whether a walk may be turned: all channels in one block, columns as many as a product has rows, or `columns`."""
    return target.arch == 90 and K == walk["BLOCK_K"] in (64, 128) and walk["BLOCK_V"] in (64, columns) and V % 8 == 0


def forward(
    call: Any, parts: Any, inverse: Tensor, products: Tensor, gated: Any, out: Tensor, final: Tensor,
    programs: int, walk: Config,
) -> None:  # fmt: skip
    """Fills out, final, and the errors and states of `parts`."""
    B, T, _, H, K, V, N = call.sizes
    # In inference all heads walk at once, as a rule: one with a far chunk keeps the launch waiting then, either way.
    together = {"BESIDE": False} if parts is None else dependent_launch(target_of(call.v.device), True)
    whole, key, value, pair = _whole(call, walk), (CHUNK, K), (CHUNK, walk["BLOCK_V"]), (CHUNK, CHUNK)
    by = tiles_of(True, whole, CHUNK, call.offsets, gated.query, call.v)
    errors, states = (None, None) if parts is None else (parts.errors, parts.states)
    launch(
        channel_walk_kernel, (programs,),
        by.rows(gated.query, *key), by.rows(gated.key, *key), gated.erase, by.rows(call.v, *value),
        by.rows(inverse, *pair), by.rows(products, *pair), gated.total, gated.far, call.state,
        call.offsets, by.rows(out, *value), final, errors, by.lines(states, K, value[1]),
        call.v.stride(), strides(call.state), call.scale, B, T, N, H, V,
        config=walk, WHOLE=whole, CHUNK=CHUNK, TMA=by.tma, **together,
    )  # fmt: skip


def backward(
    call: Any, operands: Sequence[Tensor], results: Sequence[Tensor | None], programs: int, walk: Config
) -> None:
    """Fills dv, its copy, the gradients of states and the first one's (`results`).

    `operands`: scale rise q, X^T fall beta k, rise e, total, A X, and the gradients of out and of the last state.
    """
    B, T, _, H, K, V, N = call.sizes
    q, k, e, total, products, d_out, d_final = operands
    whole, key, value, pair = _whole(call, walk), (CHUNK, K), (CHUNK, walk["BLOCK_V"]), (CHUNK, CHUNK)
    by = tiles_of(True, whole, CHUNK, call.offsets, q, d_out)
    launch(
        channel_walk_back_kernel, (programs,),
        by.rows(q, *key), by.rows(k, *key), by.rows(e, *key), total, by.rows(products, *pair),
        by.rows(d_out, *value), d_final, call.offsets, *results, d_out.stride(), strides(d_final), B, T, N, H, V,
        config=walk, WHOLE=whole, CHUNK=CHUNK, TMA=by.tma,
    )  # fmt: skip


def _whole(call: Any, walk: Config) -> bool:
    """Whether no tile of tokens, or of columns of the state, reaches beyond its tensor."""
    return call.offsets is None and call.v.shape[1] % CHUNK == call.v.shape[3] % walk["BLOCK_V"] == 0
