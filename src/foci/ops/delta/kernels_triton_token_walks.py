"""The delta rule's walks on Hopper, in bfloat16, gates per token or none: a state turned over, [V,K], in registers.

The equations are those of kernels_triton_forward.py and kernels_triton_backward.py, turned over too:

    d^T = (v^T - S^T e^T rise) X^T;  o^T = S^T Q^T + v^T P^T;  S^T <- total S^T + (fall beta d)^T k
    dv^T = (do^T A + dS^T k^T (fall beta)) X;  dS^T <- total dS^T + (scale rise do)^T q - (rise dv)^T e

So whatever one product makes and another takes is its left operand, and stays in registers: what Hopper adds up lies
where it takes a left operand from. The right ones lie in shared memory as TMA has brought them, none of them waits for
a product, and between the products of a chunk, which wait for each other, nothing is stored, fenced or waited for.

What is said first is loaded first: a wait for TMA ends a stretch of code, and in one stretch the assembler fills the
time of products with other work. Stores of one shape have one place in shared memory, and each waits until the last has
left it: they are far apart. Factors per token lie by columns here, where of a load each thread would take 16 addresses:
TMA brings them too, as rows of 64 (kernels_triton_forward.py: Gated.rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, by_tma, configure, launch, strides, target_of
from foci.tiles.affine import load_state
from foci.tiles.memory import opened, store_tile
from foci.tiles.state import halves, in_two, nearest_in_two, sequence

CHUNK = 64


@triton.jit
def token_walk_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, v_ptr, X_ptr, P_ptr, rows_ptr, total_ptr, state_ptr, offsets_ptr,
    out_ptr, final_ptr, errors_ptr, states_ptr,
    k_strides, e_strides, v_strides, state_strides, T, N, H, R, V, apart,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's state through one sequence, and what its tokens read: `walk_kernel` of Q and P."""
    K: tl.constexpr = BLOCK_K
    v0 = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * BLOCK_V
    rest = tl.program_id(0) // tl.cdiv(V, BLOCK_V)
    h, n = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    row = tl.cast(b, tl.int64)
    tokens, first = row * T * H + h, tl.cast(slot, tl.int64) * H + h
    q_there = opened(q_ptr + tokens * K, stop, H * K, K, CHUNK, K, True)
    k_there = opened(k_ptr + row * k_strides[0] + h // R * k_strides[2], stop, k_strides[1], K, CHUNK, K, True)
    e_there = k_there
    if e_ptr is not None:
        e_there = opened(e_ptr + row * e_strides[0] + h // R * e_strides[2], stop, e_strides[1], K, CHUNK, K, True)
    v_there = opened(v_ptr + row * v_strides[0] + h * v_strides[2], stop, v_strides[1], V, CHUNK, BLOCK_V, True)
    X_there = opened(X_ptr + 2 * tokens * CHUNK, stop, 2 * H * CHUNK, 2 * CHUNK, CHUNK, CHUNK, True)
    P_there = opened(P_ptr + tokens * CHUNK, stop, H * CHUNK, CHUNK, CHUNK, CHUNK, True)
    out_there = opened(out_ptr + tokens * V, stop, H * V, V, CHUNK, BLOCK_V, True)
    if states_ptr is not None:
        states_there = opened(states_ptr + first * K * V, tl.cdiv(stop - start, CHUNK) * H * K, V, V, K, BLOCK_V, True)
        errors_there = opened(errors_ptr + tokens * V, stop, H * V, V, CHUNK, BLOCK_V, True)
        unsaid_there = opened(errors_ptr + apart + tokens * V, stop, H * V, V, CHUNK, BLOCK_V, True)
    chunks = tl.cdiv(stop - start, CHUNK)
    rows_there = opened(rows_ptr + first * 2 * CHUNK, 2 * H * chunks, CHUNK, CHUNK, 1, CHUNK, True)
    if state_ptr is not None:
        state_ptr += n * state_strides[0] + h * state_strides[1]
    S = tl.trans(load_state(state_ptr, state_strides, K, v0, V, 1, K, BLOCK_V)[0])
    if total_ptr is not None:
        gone = tl.load(total_ptr + first, mask=chunks > 0, other=0.0)  # each a chunk before it is wanted
    for t0 in tl.range(start, stop, CHUNK):
        chunk = (t0 - start) // CHUNK
        v, P = v_there.load([t0, v0]), P_there.load([t0, 0])
        k, q = k_there.load([t0, 0]), q_there.load([t0, 0])
        e = k
        if e_ptr is not None:
            e = e_there.load([t0, 0])
        X, X_lost = X_there.load([t0, 0]), X_there.load([t0, CHUNK])
        write = rows_there.load([2 * H * chunk + 1, 0])
        operand = S.to(tl.bfloat16)
        if states_ptr is not None:
            states_there.store([chunk * H * K, v0], tl.trans(operand))
        read = tl.dot(operand, tl.trans(e))
        if total_ptr is not None:
            rise = rows_there.load([2 * H * chunk, 0])
        o = tl.dot(tl.trans(v), tl.trans(P), tl.dot(operand, tl.trans(q)))
        if total_ptr is not None:
            read *= rise
        high, low = in_two(tl.trans(v).to(tl.float32) - read)
        out_there.store([t0, v0], tl.trans(o).to(out_there.dtype))
        d = halves(high, low, tl.trans(X), tl.trans(X_lost), tl.zeros_like(read))
        if total_ptr is not None:
            S *= gone
            gone = tl.load(total_ptr + first + (chunk + 1) * H, mask=chunk + 1 < chunks, other=0.0)
        if states_ptr is not None:
            said, unsaid = nearest_in_two(d)
            errors_there.store([t0, v0], tl.trans(said))
        high, low = in_two(d * write)
        S = tl.dot(high, k, tl.dot(low, k, S))
        if states_ptr is not None:
            unsaid_there.store([t0, v0], tl.trans(unsaid))
    store_tile(final_ptr + (n * H + h) * K * V, tl.trans(S), 0, K, V, v0, V, 1)


@triton.jit
def token_walk_back_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, rows_ptr, total_ptr, A_ptr, X_ptr, d_out_ptr, d_final_ptr, offsets_ptr,
    dv_ptr, unsaid_ptr, ends_ptr, d_state_ptr,
    q_strides, k_strides, e_strides, d_out_strides, d_final_strides, scale, T, N, H, R, V,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's dS through one sequence, last chunk to first: the backward's `walk_kernel`."""
    K: tl.constexpr = BLOCK_K
    v0 = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * BLOCK_V
    rest = tl.program_id(0) // tl.cdiv(V, BLOCK_V)
    h, n = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    row, count = tl.cast(b, tl.int64), tl.cdiv(stop - start, CHUNK)
    tokens, first = row * T * H + h, tl.cast(slot, tl.int64) * H + h
    q_there = opened(q_ptr + row * q_strides[0] + h // R * q_strides[2], stop, q_strides[1], K, CHUNK, K, True)
    k_there = opened(k_ptr + row * k_strides[0] + h // R * k_strides[2], stop, k_strides[1], K, CHUNK, K, True)
    if e_ptr is not None:
        e_there = opened(e_ptr + row * e_strides[0] + h // R * e_strides[2], stop, e_strides[1], K, CHUNK, K, True)
    d_out_ptr += row * d_out_strides[0] + h * d_out_strides[2]
    do_there = opened(d_out_ptr, stop, d_out_strides[1], V, CHUNK, BLOCK_V, True)
    A_there = opened(A_ptr + 2 * tokens * CHUNK, stop, 2 * H * CHUNK, 2 * CHUNK, CHUNK, CHUNK, True)
    X_there = opened(X_ptr + 2 * tokens * CHUNK, stop, 2 * H * CHUNK, 2 * CHUNK, CHUNK, CHUNK, True)
    dv_there = opened(dv_ptr + tokens * V, stop, H * V, V, CHUNK, BLOCK_V, True)
    unsaid_there = opened(unsaid_ptr + tokens * V, stop, H * V, V, CHUNK, BLOCK_V, True)
    ends_there = opened(ends_ptr + first * K * V, count * H * K, V, V, K // 2, BLOCK_V, True)
    rows_there = opened(rows_ptr + first * 2 * CHUNK, 2 * H * count, CHUNK, CHUNK, 1, CHUNK, True)
    if d_final_ptr is not None:
        d_final_ptr += n * d_final_strides[0] + h * d_final_strides[1]
    dS = tl.trans(load_state(d_final_ptr, d_final_strides, K, v0, V, 1, K, BLOCK_V)[0])
    if total_ptr is not None:
        gone = tl.load(total_ptr + first + (count - 1) * H, mask=count > 0, other=0.0)  # as the forward's
    for i in tl.range(count):
        chunk = count - 1 - i
        t0 = start + chunk * CHUNK
        do, A, A_lost = do_there.load([t0, v0]), A_there.load([t0, 0]), A_there.load([t0, CHUNK])
        X, X_lost = X_there.load([t0, 0]), X_there.load([t0, CHUNK])
        k, q = k_there.load([t0, 0]), q_there.load([t0, 0])
        e = k
        if e_ptr is not None:
            e = e_there.load([t0, 0])
        write = rows_there.load([2 * H * chunk + 1, 0])
        operand = dS.to(tl.bfloat16)
        left, right = tl.split(tl.permute(tl.reshape(operand, [BLOCK_V, 2, K // 2]), [0, 2, 1]))
        ends_there.store([chunk * H * K, v0], tl.trans(left))
        read = tl.dot(operand, tl.trans(k))
        ends_there.store([chunk * H * K + K // 2, v0], tl.trans(right))  # each from the same place in shared memory
        dd = tl.dot(tl.trans(do), A, tl.dot(tl.trans(do), A_lost))
        dd += read * write
        high, low = in_two(dd)
        _, by_read = tl.split(tl.join(dd, tl.trans(do).to(tl.float32)))  # so that both lie alike
        if total_ptr is None:
            by_read *= scale
        else:
            rise = rows_there.load([2 * H * chunk, 0])
            by_read *= scale * rise
            dS *= gone
            gone = tl.load(total_ptr + first + (chunk - 1) * H, mask=chunk > 0, other=0.0)
        dS = tl.dot(by_read.to(tl.bfloat16), q, dS)
        dv = halves(high, low, X, X_lost, tl.zeros_like(dd))
        said, unsaid = nearest_in_two(dv)
        dv_there.store([t0, v0], tl.trans(said))
        by_erase = -dv
        if total_ptr is not None:
            by_erase = dv * -rise
        high, low = in_two(by_erase)
        dS = tl.dot(high, e, tl.dot(low, e, dS))
        unsaid_there.store([t0, v0], tl.trans(unsaid))
    if d_state_ptr is not None:
        store_tile(d_state_ptr + (n * H + h) * K * V, tl.trans(dS), 0, K, V, v0, V, 1)


def suits(heads: int, K: int, V: int, target: Target, *operands: Tensor | None) -> bool:
    """Whether these kernels can walk, and are worth it: where all channels are one block and TMA reads all operands.

    A chunk takes them longer than it takes 32 columns alone, of which few heads make twice the programs: on an H200
    they win, in both directions, with programs for more than half of the processors.
    """
    fits = target.arch == 90 and K in (64, 128) and V > 32 and V % 8 == 0
    fits = fits and all(x is None or x.dtype == torch.bfloat16 for x in operands) and all(map(by_tma, operands))
    return fits and 2 * heads * -(-V // 64) > target.processors


def rule(K: int, tiles: int, target: Target) -> Config:
    """As many columns as a warpgroup's product has rows; loads two chunks ahead where shared memory has the room."""
    return Config({"BLOCK_V": 64}, warps=4, stages=3 if K * tiles <= 256 else 2)


def _config(name: str, K: int, V: int, e: Tensor | None, target: Target) -> Config:
    tiles = 2 if e is None else 3
    return configure(f"delta_{name}", (K, V, tiles), partial(rule, K, tiles), target)


def forward(
    call: Any, parts: Any, query: Tensor, inverse: Tensor, through: Tensor, rows: Tensor, total: Tensor | None,
    out: Tensor, final: Tensor,
) -> None:  # fmt: skip
    """`out` and `final` of whole sequences, and the states and errors that `parts` keeps."""
    B, T, G, H, K, V, N = call.sizes
    target, k, e, v = target_of(call.v.device), call.k, call.erase, call.v
    config = _config("token_walk", K, V, e, target)
    launch(
        token_walk_kernel, (N * H * -(-V // config["BLOCK_V"]),),
        query, k, e, v, inverse, through, rows, total, call.state, call.offsets,
        out, final, *((None, None) if parts is None else (parts.errors, parts.states)),
        k.stride(), strides(e), v.stride(), strides(call.state), T, N, H, H // G, V, B * T * H * V,
        config=config, CHUNK=CHUNK, BLOCK_K=K,
    )  # fmt: skip


def backward(
    call: Any, kept: Sequence[Tensor | None], d_out: Tensor, d_final: Tensor | None, dv: Tensor, beside: Tensor,
    behind: Tensor, d_state: Tensor | None,
) -> None:  # fmt: skip
    """dv in two, `beside` it what its rounding left, and the states' gradients `behind` each chunk.

    `kept`: rows, total, A and X as the forward left them (kernels_triton_forward.py: Parts).
    """
    _, T, G, H, K, V, N = call.sizes
    target, q, k, e = target_of(call.v.device), call.q, call.k, call.erase
    config = _config("token_walk_back", K, V, e, target)
    launch(
        token_walk_back_kernel, (N * H * -(-V // config["BLOCK_V"]),),
        q, k, e, *kept, d_out, d_final, call.offsets,
        dv, beside, behind, d_state,
        q.stride(), k.stride(), strides(e), d_out.stride(), strides(d_final), call.scale, T, N, H, H // G, V,
        config=config, CHUNK=CHUNK, BLOCK_K=K,
    )  # fmt: skip
