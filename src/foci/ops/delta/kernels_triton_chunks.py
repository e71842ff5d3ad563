"""First launch of the delta rule's forward in bfloat16, gates per token or none: X and A of every chunk.

Letters and equations are those of kernels_triton_forward.py; kernels_triton_triangles.py has the same launch in loops.
Here nothing is a loop, and the order is such that little waits for memory and little has to be kept: first all loads;
the triangle's blocks before A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, dependent_launch, launch, strides, target_of
from foci.tiles.gates import load_gates
from foci.tiles.near import LOG2E, UNREAD, bounded
from foci.tiles.rest import behind, clear_rest
from foci.tiles.solve import blocks_in_two, inverse_in_two, parts
from foci.tiles.state import chunk_at, in_two
from foci.tiles.turns import begin_next
from foci.tiles.whole import read, write

CHUNK = 64
FLAGS: tl.constexpr = tl.constexpr(16)  # at least as many as count a head's programs
ALIKE: tl.constexpr = tl.constexpr(0.2)  # up to which sum of a row of E, squared, one bfloat16 is enough: docs/delta.md


@triton.jit
def _last(a, b):  # type: ignore[no-untyped-def]
    return b


@triton.jit
def kept(x):  # type: ignore[no-untyped-def]
    """x [CHUNK], a load, as what is not loaded again for each layout that wants it: 16 addresses a thread."""
    return tl.associative_scan(x, 0, _last)


@triton.jit
def times(x, y):  # type: ignore[no-untyped-def]
    """x y, rounded: `in_two` of tiles/state.py, fused with a plain product, would take an operation more."""
    return tl.fma(x, y, 0.0)


@triton.jit
def token_chunks_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, beta_ptr, g_ptr, offsets_ptr,
    X_ptr, A_ptr, rise_ptr, write_ptr, total_ptr, rows_ptr, reach_ptr, sums_ptr, arrived_ptr, arrived,
    rest_a, rest_b, rest_c, rest_d, rest_e, rest_f, widths,
    q_strides, k_strides, e_strides, beta_strides, g_strides, scale, T, N, H, R, K,
    EXACT: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, CHUNK: tl.constexpr,
    TILES: tl.constexpr, BLOCK_K: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """One chunk and head. WHOLE, EVEN: what tiles reach beyond (tiles/whole.py). KEEP: gradients are wanted.

    Behind its programs are those of `clear_rest`. Each sets FLAGS of so many `arrived` to 0, for the walk.
    Without `A_ptr` the walk makes A itself, of sums of gates and beta scale, which go to `sums_ptr`.
    EXACT: X and A lie beside each other, and rows say third of which tokens they are two bfloat16: 1 from the first one
    on in the chunk whose keys are alike, 0 of those before: their rows are one, of which nothing later changes a bit.
    Where none is exact the second part is not written.
    reach: a state's column, of length 1 before the chunk, has 2 to this behind it at most. Infinite where a key, a beta
    or a gate is no number; UNREAD at least where a query is none and KEEP.
    """
    begin_next(BESIDE)
    if widths is not None:
        rest = behind()
        if rest >= 0:
            clear_rest(rest_a, rest_b, rest_c, rest_d, rest_e, rest_f, widths, offsets_ptr, rest, N, T)
            return
    if arrived_ptr is not None:
        flag = tl.program_id(0) * FLAGS + tl.arange(0, FLAGS)
        tl.store(arrived_ptr + flag, 0, mask=flag < arrived)
    h = (tl.program_id(0) % H).to(tl.int64)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, tl.program_id(0) // H, N, T, CHUNK)
    if n < 0:
        return
    row = tl.cast(b, tl.int64)
    t, at = tl.arange(0, CHUNK), t0 + tl.arange(0, CHUNK)
    q_ptr += row * q_strides[0] + h // R * q_strides[2]
    k_ptr += row * k_strides[0] + h // R * k_strides[2]
    if e_ptr is not None:
        e_ptr += row * e_strides[0] + h // R * e_strides[2]
    beta = load_gates(beta_ptr + row * beta_strides[0] + h * beta_strides[2], t0, stop, beta_strides[1], CHUNK)
    if g_ptr is not None:
        g = load_gates(g_ptr + row * g_strides[0] + h * g_strides[2], t0, stop, g_strides[1], CHUNK)
    qs, ks, es = (), (), ()
    for i in tl.static_range(TILES):
        k0 = i * BLOCK_K
        if A_ptr is not None:
            q = read(q_ptr, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K, WHOLE, EVEN)
            qs += (q,)  # type: ignore[assignment]
        ks += (read(k_ptr, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, WHOLE, EVEN),)  # type: ignore[assignment]
        if e_ptr is not None:
            es += (read(e_ptr, t0, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_K, WHOLE, EVEN),)  # type: ignore[assignment]
    if e_ptr is None:
        es = ks
    beta = kept(beta)
    W = tl.full([CHUNK, CHUNK], 1.0, tl.float32)
    rise, write_by = tl.full([CHUNK], 1.0, tl.float32), beta
    if g_ptr is not None:
        g = bounded(g) * LOG2E
        c, whole = tl.cumsum(g, 0), tl.sum(g, 0)
        rise = tl.exp2(c)
        write_by *= tl.exp2(whole - c)
        if rise_ptr is not None:
            token = (row * T + at) * H + h
            tl.store(rise_ptr + token, rise, mask=at < stop)
            tl.store(write_ptr + token, write_by, mask=at < stop)
        tl.store(total_ptr + slot * H + h, tl.exp2(whole))
        W = tl.exp2(c[:, None] - c[None, :])
    row_ptr = rows_ptr + (slot * H + h).to(tl.int64) * (3 if EXACT else 2) * CHUNK + t
    tl.store(row_ptr, rise)
    tl.store(row_ptr + CHUNK, write_by)
    if sums_ptr is not None:
        sums_ptr += (slot * H + h).to(tl.int64) * 2 * CHUNK + t
        tl.store(sums_ptr, c)
        tl.store(sums_ptr + CHUNK, beta * scale)
    W = tl.where(t[:, None] >= t[None, :], W, 0.0)
    E = tl.zeros([CHUNK, CHUNK], tl.float32)
    for i in tl.static_range(TILES):
        E = tl.dot(es[i], tl.trans(ks[i]), E)
    # What is past the end has no key, so that X is there the unit matrix's and 0 beside it.
    minus = times(E * W, (beta * -1.0)[None, :])
    if EXACT:
        minus = tl.where(t[:, None] > t[None, :], minus, 0.0)
    width: tl.constexpr = (4 if EXACT and A_ptr is not None else 2) * CHUNK  # of a token
    X_ptr += (row * T * H + h) * width
    exact = None
    if not EXACT:
        blocks = blocks_in_two(minus)
    if reach_ptr is not None:  # I - beta k k^T makes nothing longer than this
        grown = tl.abs(1.0 - beta * tl.sum(tl.where(t[:, None] == t[None, :], E, 0.0), 1))
        reach = whole + tl.sum(tl.where(grown <= 1.0, 0.0, tl.log2(grown)), 0)
    if EXACT:
        alike = tl.sum(minus * minus, 1)
        exact = tl.min(tl.where(alike <= ALIKE, CHUNK, t), 0)
        tl.store(row_ptr + 2 * CHUNK, tl.where(t >= exact, 1.0, 0.0))
        if exact < CHUNK:
            X = inverse_in_two(blocks_in_two(minus, exact), exact)
            above, below = parts(X, t[:, None], exact, True)
            write(X_ptr, above, t0, stop, H * width, 0, CHUNK, WHOLE, EVEN)
            write(X_ptr + CHUNK, below, t0, stop, H * width, 0, CHUNK, WHOLE, EVEN)
        else:
            above = inverse_in_two(blocks_in_two(minus, None, False), None, False).to(tl.bfloat16)
            write(X_ptr, above, t0, stop, H * width, 0, CHUNK, WHOLE, EVEN)
    if A_ptr is not None:
        A_ptr += (row * T * H + h) * width
        A = tl.zeros([CHUNK, CHUNK], tl.float32)
        for i in tl.static_range(TILES):
            A = tl.dot(qs[i], tl.trans(ks[i]), A)
    if reach_ptr is not None:
        reach = tl.where(reach < float("inf"), reach, float("inf"))
        if KEEP:  # what is no number in a query is none in gradients before it, and in no later output
            reach = tl.where(tl.sum(tl.sum(A * 0.0, 1), 0) == 0.0, reach, tl.maximum(reach, UNREAD))
        tl.store(reach_ptr + slot * H + h, reach)
    if A_ptr is not None:
        high, low = parts(times(A * W, (beta * scale)[None, :]), t[:, None], exact, True)
        write(A_ptr, high, t0, stop, H * width, 0, CHUNK, WHOLE, EVEN)
    if not EXACT:
        write(A_ptr + CHUNK, low, t0, stop, H * width, 0, CHUNK, WHOLE, EVEN)
        above, below = in_two(inverse_in_two(blocks))
        write(X_ptr, above, t0, stop, H * width, 0, CHUNK, WHOLE, EVEN)
        write(X_ptr + CHUNK, below, t0, stop, H * width, 0, CHUNK, WHOLE, EVEN)
    elif A_ptr is not None:  # noqa: SIM102  a constant and a tensor
        if exact < CHUNK:
            write(A_ptr + CHUNK, low, t0, stop, H * width, 0, CHUNK, WHOLE, EVEN)


def fits(call: Any, target: Target) -> bool:
    """Whether registers hold all channels of a chunk's queries and keys, and shared memory does beside X."""
    K, tiles = call.sizes[4], 2 if call.erase is None else 3
    holds = target.arch >= 90 or K <= 128  # products take operands from registers before Hopper
    return target.kind == "cuda" and holds and K <= 256 and 2 * tiles * CHUNK * K + 16_384 <= target.shared


def chunks(
    call: Any, inverse: Tensor, products: Tensor | None, gated: Sequence[Tensor | None], slots: int, config: Config,
    constants: Mapping[str, int], rest: Any,
) -> None:  # fmt: skip
    """Fills X, A if it is asked for, and rise, write, total, rows, reach, sums and arrived (`gated`).

    And clears the `rest` of the output (ops/kernels_triton_packed.py).
    """
    _, T, G, H, K, _, N = call.sizes
    more, left = rest.taken()
    arrived = 0 if gated[-1] is None else gated[-1].numel()
    assert arrived <= slots * H * FLAGS.value
    launch(
        token_chunks_kernel, (slots * H + more,),
        call.q, call.k, call.erase, call.beta, call.log_decay, call.offsets, inverse, products, *gated, arrived, *left,
        call.q.stride(), call.k.stride(), strides(call.erase), call.beta.stride(), strides(call.log_decay),
        call.scale, T, N, H, H // G, K,
        config=config, CHUNK=CHUNK, TILES=-(-K // config["BLOCK_K"]), **constants,
        **dependent_launch(target_of(call.v.device), False),
    )  # fmt: skip
