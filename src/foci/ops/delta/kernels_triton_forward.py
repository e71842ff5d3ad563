"""Forward of the delta rule in Triton: the triangle of every chunk at once, then one walk through the chunks.

With w = beta k, E and A the decayed products of erase keys and of scaled queries with w (E below the diagonal), and S
the state at a chunk's start (chunked.py; tiles/gates.py: rise, fall, total):

    X = (I + E)^-1;  d = X (v - (rise e) S);  o = A d + (scale rise q) S;  S <- total S + k^T (fall beta d)

The first launch makes X and A. The second has S in registers and reads o from it at once, so that without a backward
neither states nor errors d are ever written: half of what three launches would move. Where keys are alike, sums over d
telescope and an error in one term does not cancel: X, A, d and all sums are float32, their products TF32 at least. Only
what came in bfloat16, and states as an operand, are multiplied in it.

In bfloat16 X, A and d are two of them each, for products of 16 digits. On Hopper the walk's tiles are moved by TMA
(tiles/memory.py: opened): there a chunk is a matter of instructions and latencies, most of them addresses.

Where few heads would leave processors idle, sequences are cut into pieces, walked at once (ops/delta/pieces.py): first
without outputs, which makes each piece's map S -> M S + N; then as ever, after each has joined the maps before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import (
    Config,
    Target,
    by_tma,
    configure,
    float_precision,
    launch,
    precision,
    side,
    state_dtype,
    strides,
    target_of,
)
from foci.tiles.affine import joined, load_state, piece_at, store_map, store_state, with_unit
from foci.tiles.chunk_backward import right, store_in_two
from foci.tiles.gates import factors, factors_at
from foci.tiles.maps import tiles_of
from foci.tiles.memory import lines_of, load_block, own_rows, present, rows_of, store_block, store_tile, unless
from foci.tiles.state import halves, in_two, nearest_in_two, rounded, working

CHUNK = 64


@triton.jit
def walk_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, v_ptr, X_ptr, A_ptr, rise_ptr, write_ptr, total_ptr, state_ptr, offsets_ptr, M_ptr, N_ptr,
    out_ptr, final_ptr, errors_ptr, states_ptr,
    q_strides, k_strides, e_strides, v_strides, write_strides, state_strides, scale, B, T, N, H, R, K, V, half,
    PER_CHANNEL: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr, JOIN: tl.constexpr, CHUNK: tl.constexpr,
    PIECE: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's state through one sequence, or a piece of it, and what its tokens read.

    Per channel q, k and e come decayed (in bfloat16 k in two, `half` apart), with as many heads as v. Without `out_ptr`
    a piece's map is made (tiles/affine.py: M, N): the columns behind V's blocks are M's, and no token writes a value.
    """
    blocks = tl.cdiv(V, BLOCK_V) + (tl.cdiv(K, BLOCK_V) if out_ptr is None else 0)
    v0 = tl.program_id(0) % blocks * BLOCK_V
    rest = tl.program_id(0) // blocks
    h = (rest % H).to(tl.int64)
    n, row, start, stop, slot, piece, before, behind = piece_at(offsets_ptr, rest // H, T, N, CHUNK, PIECE)
    known = K
    if PIECE > 0:
        if n < 0:
            return
        known = tl.where(before == 0, K, 0)
    if out_ptr is None:  # noqa: SIM102  a constant and a tensor
        if (behind == 0) | ((before == 0) & (v0 >= tl.cdiv(V, BLOCK_V) * BLOCK_V)):
            return
    WIDE: tl.constexpr = 2 * CHUNK if HALVES else CHUNK
    head = h if PER_CHANNEL else h // R
    tokens = row * T * H + h
    k_there = rows_of(k_ptr, row, head, T, stop, k_strides, K, CHUNK, BLOCK_K, TMA)
    e_there = k_there
    if e_ptr is not None:
        e_there = rows_of(e_ptr, row, head, T, stop, e_strides, K, CHUNK, BLOCK_K, TMA)
    if PER_CHANNEL and HALVES:
        lost_there = own_rows(k_ptr + half, row, head, T, H, stop, K, CHUNK, BLOCK_K, TMA)
    v_there = unless(rows_of(v_ptr, row, h, T, stop, v_strides, V, CHUNK, BLOCK_V, TMA), v0 >= V, H * V)
    X_there = own_rows(X_ptr, row, h, T, H, stop, WIDE, CHUNK, CHUNK, TMA)
    if out_ptr is not None:
        q_there = rows_of(q_ptr, row, head, T, stop, q_strides, K, CHUNK, BLOCK_K, TMA)
        A_there = own_rows(A_ptr, row, h, T, H, stop, WIDE, CHUNK, CHUNK, TMA)
        out_there = own_rows(out_ptr, row, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
    if errors_ptr is not None:
        states_there = lines_of(
            states_ptr, (slot * H + h) * K, tl.cdiv(stop - start, CHUNK) * H * K, V, BLOCK_K, BLOCK_V, TMA
        )  # chunk by chunk, H K rows behind each other
        if BLOCK_V <= 32:
            errors_there = own_rows(errors_ptr, row, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
        if BLOCK_V <= 32 and HALVES and not PER_CHANNEL:
            unsaid_there = own_rows(errors_ptr, row + B, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
    write_ptr += row * write_strides[0] + h * write_strides[2]
    if rise_ptr is not None:
        rise_ptr += tokens
    each_ptr = None
    if total_ptr is not None and not PER_CHANNEL:
        each_ptr = total_ptr + slot * H + h
    rise_at, write_at, gone_at = factors_at(rise_ptr, write_ptr, each_ptr, start, 0, write_strides[1], H, CHUNK)
    next_rise, next_write, next_gone = factors(rise_ptr, each_ptr, rise_at, write_at, gone_at, start, stop, CHUNK)
    if state_ptr is not None:
        state_ptr += n * state_strides[0] + h * state_strides[1]
    S = load_state(state_ptr, state_strides, known, v0, V, TILES, BLOCK_K, BLOCK_V)
    if PIECE > 0:
        if out_ptr is None:
            S = with_unit(S, v0 - tl.cdiv(V, BLOCK_V) * BLOCK_V, TILES, BLOCK_K, BLOCK_V)
        else:
            S = joined(S, M_ptr, N_ptr, piece - before, before, h, H, K, v0, V, 1, JOIN, TILES, BLOCK_K, BLOCK_V)
    # What is the same for all chunks would otherwise be kept in registers, and these spilled.
    for t0 in tl.range(start, stop, CHUNK, disable_licm=PIECE > 0 or not HALVES):
        chunk = (t0 - start) // CHUNK
        rise, write, gone = next_rise, next_write, next_gone  # loaded a chunk before they are wanted
        rise_at, write_at, gone_at = rise_at + CHUNK * H, write_at + CHUNK * write_strides[1], gone_at + H
        next_rise, next_write, next_gone = factors(
            rise_ptr, each_ptr, rise_at, write_at, gone_at, t0 + CHUNK, stop, CHUNK
        )
        v = load_block(v_there, t0, stop, v_strides[1], v0, V, v_strides[3], CHUNK, BLOCK_V, TMA)
        X = load_block(X_there, t0, stop, H * WIDE, 0, CHUNK, 1, CHUNK, CHUNK, TMA)
        if HALVES:
            lost = load_block(X_there, t0, stop, H * WIDE, CHUNK, WIDE, 1, CHUNK, CHUNK, TMA)
        if out_ptr is not None:
            A = load_block(A_there, t0, stop, H * WIDE, 0, CHUNK, 1, CHUNK, CHUNK, TMA)
            if HALVES:
                A_lost = load_block(A_there, t0, stop, H * WIDE, CHUNK, WIDE, 1, CHUNK, CHUNK, TMA)
        read, o = tl.zeros([CHUNK, BLOCK_V], tl.float32), tl.zeros([CHUNK, BLOCK_V], tl.float32)
        for i in tl.static_range(TILES):
            k0 = i * BLOCK_K
            if e_ptr is None:
                e = working(load_block(k_there, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, TMA))
            else:
                e = working(load_block(e_there, t0, stop, e_strides[1], k0, K, e_strides[3], CHUNK, BLOCK_K, TMA))
            if out_ptr is not None:
                q = working(load_block(q_there, t0, stop, q_strides[1], k0, K, q_strides[3], CHUNK, BLOCK_K, TMA))
            operand = S[i].to(e.dtype)
            read = tl.dot(e, operand, read, input_precision=PRECISION)
            if states_ptr is not None:
                if TMA:
                    store_block(states_there, operand, chunk * H * K + k0, 0, 0, v0, V, TMA)
                else:
                    store_tile(states_there[0] + tl.cast(chunk, tl.int64) * H * K * V, operand, k0, K, V, v0, V, 1)
            if out_ptr is not None:
                o = tl.dot(q, operand, o, input_precision=PRECISION)
        if rise_ptr is not None:
            read *= rise[:, None]
        error = v.to(tl.float32) - read
        d = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        if HALVES:
            above, below = in_two(error)
            d = halves(X, lost, above, below, d)
        else:
            d = tl.dot(X, rounded(error, PRECISION), d, input_precision=PRECISION)
        if out_ptr is not None:
            if rise_ptr is not None:
                o *= rise[:, None]
            if HALVES:
                above, below = in_two(d)
                o = halves(A, A_lost, above, below, o * scale)
            else:
                o = tl.dot(A, rounded(d, PRECISION), o * scale, input_precision=PRECISION)
            store_block(out_there, o, t0, stop, H * V, v0, V, TMA)
        written = d
        if not PER_CHANNEL:
            written = d * write[:, None]
        ahead = ()
        for i in tl.static_range(TILES):
            k0 = i * BLOCK_K
            k = e
            if e_ptr is not None or TILES > 1:
                k = working(load_block(k_there, t0, stop, k_strides[1], k0, K, k_strides[3], CHUNK, BLOCK_K, TMA))
            now = S[i]
            if PER_CHANNEL:
                c, there = k0 + tl.arange(0, BLOCK_K), (slot + chunk) * H + h
                now *= tl.load(total_ptr + there * K + c, mask=c < K, other=0.0)[:, None]
                if k.dtype == tl.bfloat16:
                    lost = load_block(lost_there, t0, stop, k_strides[1], k0, K, 1, CHUNK, BLOCK_K, TMA)
                    now = tl.dot(tl.trans(lost), in_two(written)[0], now)
            elif total_ptr is not None:
                now *= gone
            ahead += (right(tl.trans(k), written, now, PRECISION),)  # type: ignore[assignment]
        if errors_ptr is not None:
            if BLOCK_V > 32:  # shared memory has no room for a tile to be stored from
                store_in_two(errors_ptr + tokens * V, tl.cast(B, tl.int64) * T * H * V, d, t0, stop, H * V, v0, V)
            else:
                said = d
                if HALVES and not PER_CHANNEL:
                    said, unsaid = nearest_in_two(d)
                    store_block(unsaid_there, unsaid, t0, stop, H * V, v0, V, TMA)
                store_block(errors_there, said, t0, stop, H * V, v0, V, TMA)
        S = ahead
    if out_ptr is None:
        store_map(M_ptr, N_ptr, S, piece * H + h, K, v0, V, TILES, BLOCK_K, BLOCK_V)
    elif (behind == 0) & present(final_ptr):
        store_state(final_ptr + (n * H + h) * K * V, S, K, v0, V, TILES, BLOCK_K)


@lru_cache(512)
def walk_rule(dtype: torch.dtype, K: int, V: int, heads: int, tiles: int, turned: int, target: Target) -> Config:
    """Columns of the state as many as registers hold, fewer where few heads would leave processors idle.

    In two stages where what a chunk loads (`tiles` of all its channels, X, A and v) fits into shared memory, twice if
    products are read from there, on Hopper in three where it fits thrice; else in one, with the channels in blocks.
    `turned`: how many columns a program may have that walks a whole sequence by TMA, 0 where none does.
    """
    k, v = side(K, 512), side(V, 64)
    if dtype == torch.bfloat16 and target.kind == "cuda":
        groups = target.warpgroups
        programs = heads * -(-V // 64)
        many = (2 if k == 128 else 4) * programs > target.processors
        if turned and target.arch == 90 and tiles == 4 and k in (64, 128) and v == 64 and many:
            # kernels_triton_channel_walks.py; 128 columns take 1.3 times as long, and half as many programs turns
            wide = turned >= 128 and k == 128 and V % 128 == 0 and programs > target.processors
            blocks = {"BLOCK_K": k, "BLOCK_V": 128 if wide else v}
            return Config(blocks, warps=8 if wide else 4, stages=2 if k == 128 else 3)  # 64: as measured on an H100
        v = min(v, max(16, (4096 if groups or tiles == 2 else 2048) // k))
        while v > 16 and 2 * heads * -(-V // v) <= target.processors:
            v //= 2
        while v >= 16:
            chunk = 2 * tiles * CHUNK * k + 8 * CHUNK * CHUNK + 2 * CHUNK * v
            needed = 2 * chunk + 2 * k * v + 4 * CHUNK * v if groups else chunk + 4 * k * v
            if needed <= target.shared or (k <= 128 and not groups):
                hopper = (
                    target.arch == 90
                )  # by three stages Triton 3.9 asks for more than sm_100 has; no speed is known there
                ahead = 3 if hopper and needed + chunk <= target.shared else 2
                return Config({"BLOCK_K": k, "BLOCK_V": v}, warps=4 if hopper else 8, stages=ahead)
            v //= 2
    if dtype != torch.bfloat16 and target.arch == 90 and K <= 256:  # as measured on an H100, spills and all
        v = min(v, 32 if 2 * heads * -(-V // 32) > target.processors else 16)
        twice = dtype == torch.float16 and tiles == 2 and K <= 128
        channels = 128 if dtype == torch.float16 and not twice else 64
        return Config({"BLOCK_K": min(k, channels), "BLOCK_V": v}, warps=4, stages=2 if twice else 1)
    few = dtype == torch.bfloat16 and tiles == 2
    return Config({"BLOCK_K": min(k, 64 if few else 32), "BLOCK_V": 16}, warps=8, stages=1)


def unturned(call: Any) -> tuple[int, tuple[Tensor | None, ...] | None]:
    """(programs of a head that is not turned over, what else TMA has to read; None where gates are per channel)."""
    tiles, target = call.tiles, target_of(call.v.device)
    *_, K, V, _ = call.sizes
    widest = walk_rule(call.v.dtype, K, V, target.processors, tiles, 64, target)["BLOCK_V"]
    return -(-V // widest), None if call.per_channel else (call.q, call.k, call.erase, call.v)


def forward(
    call: Any, parts: Any, made: tuple[Tensor, Tensor | None, Any], out: Tensor, way: Any, token_walks: Any, joins: Any,
    channel_walks: Any, wide_walk: Callable[..., None] | None = None,
) -> Tensor:  # fmt: skip
    """Fills `out` and gives the final state [call.ends,H,K,V], of what the first launch has `made`.

    By kernels_triton_triangles.py. `parts` (gpu.py), if given, is filled for the backward. One launch, and one more
    where sequences are cut and pieces begin by maps, or may (`way`: pieces.py). Turned over `token_walks` make it
    (kernels_triton_token_walks.py; `wide_walk`, kernels_gluon.py, where it is given), which `joins` tells how each
    piece begins (kernels_triton_token_joins.py), or with gates per channel `channel_walks`
    (kernels_triton_channel_walks.py).
    """
    *_, H, K, V, _ = call.sizes
    v, target = call.v, target_of(call.v.device)
    inverse, products, gated = made
    final = torch.empty(call.ends, H, K, V, dtype=torch.float32, device=v.device)
    pieces, tiles = way.cut, call.tiles
    whole = not pieces.tokens and by_tma(v) and K in (64, 128) and V % 8 == 0  # as channel_walks.fits asks
    turned = (128 if parts is None else 64) if whole else 0  # states take shared memory
    rule = partial(walk_rule, v.dtype, K, V, pieces.programs * H, tiles, turned)
    vary = {"BLOCK_V": (16, 32, 64)} if v.dtype == torch.bfloat16 else {}
    # A walk that is turned over has columns for which others have no shared memory, training's too: a table of its own.
    name, kind = ("delta_walk_by_channel", (turned,)) if turned and tiles == 4 else ("delta_walk", ())
    walk = configure(name, (v.dtype, K, V, tiles, *kind), rule, target, vary)
    blocks = -(-V // walk["BLOCK_V"])
    if way.turned:
        if way.maps:
            made = inverse, products, gated._replace(reach=None)
        count, lost = way.pieces, joins.losses(call, made[2], way.pieces)
        make = partial(token_walks.forward, call, None, made, count, None, None, None)
        begins = joins.starts(call, count, make, way.maps, wide_walk is not None)
        (wide_walk or token_walks.forward)(call, parts, made, count, lost, out, final, begins)
        return final
    if turned and tiles == 4 and channel_walks.fits(K, V, walk, target, turned):
        channel_walks.forward(call, parts, inverse, products, gated, out, final, pieces.programs * H * blocks, walk)
        return final

    go = _walk(call, made, pieces, walk)
    if pieces.tokens:
        go(pieces.slots * H * (blocks + -(-K // walk["BLOCK_V"])), None, None, None, None)
    go(pieces.programs * H * blocks, out, final, *((None, None) if parts is None else (parts.errors, parts.states)))
    return final


def _walk(call: Any, made: tuple[Tensor, Tensor | None, Any], pieces: Any, walk: Config) -> Callable[..., None]:
    """What launches so many programs of `walk_kernel`, which fill (out, final, errors, states) or find maps."""
    B, T, _, H, K, V, N = call.sizes
    v, target, (inverse, products, gated) = call.v, target_of(call.v.device), made
    halves = state_dtype(v.dtype) == torch.bfloat16
    q = call.q if gated.query is None else gated.query
    k, e = (call.k, call.erase) if gated.key is None else (gated.key, gated.erase)
    write = call.beta if gated.write is None else gated.write
    key, value = walk["BLOCK_K"], walk["BLOCK_V"]
    able = target.arch == 90 and halves and K % key == 0 and all(map(by_tma, (q, k, e, v)))
    operands = (q, k, e, v) if gated.key is None else ()  # else k and e are two each
    by = tiles_of(able, V % value == 0 and bool(operands), CHUNK, call.offsets, *operands)

    def go(programs: int, out: Tensor | None, final: Tensor | None, errors: Tensor | None, states: Any) -> None:
        launch(
            walk_kernel, (programs,),
            by.rows(q, CHUNK, key), by.rows(k, CHUNK, key), by.rows(e, CHUNK, key), by.rows(v, CHUNK, value),
            by.rows(inverse, CHUNK, CHUNK), by.rows(products, CHUNK, CHUNK), gated.rise, write, gated.total,
            call.state, call.offsets, pieces.M, pieces.N, by.rows(out, CHUNK, value), final,
            by.rows(errors, CHUNK, value) if value <= 32 else errors, by.lines(states, key, value),
            q.stride(), k.stride()[-4:], strides(e), v.stride(), write.stride(), strides(call.state),
            call.scale, B, T, N, H, H // call.q.shape[2], K, V, B * T * H * K,
            config=walk, PER_CHANNEL=gated.key is not None, HALVES=halves,
            PRECISION=float_precision(v.dtype, target),
            JOIN=precision(torch.float32, target), CHUNK=CHUNK, PIECE=pieces.tokens, TILES=-(-K // walk["BLOCK_K"]),
            TMA=by.tma,
        )  # fmt: skip

    return go
