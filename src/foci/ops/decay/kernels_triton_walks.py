"""Linear attention by walks that give what tokens read of a state as they go: none is written for a launch behind.

A program takes some columns of a head's state through a sequence, or a stretch of one. With x, y and z the queries,
keys and values, and A the weighed products of a chunk's x and y:

    out = scale (A z + (rise x) S)        S <- total S + (fall y)^T z          (tiles/gates.py: rise, fall, total)

From the last token to the first, each reading what is behind it, dv is the same of (k, q, do), with rise and fall in
each other's place, and dS its state. dk is that of (v, do, q), whose state is some rows of dS, and dq is read of the
same rows of the states that the forward kept: both in one walk, with all that gates take of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, by_tma, configure, launch, side, strides, target_of
from foci.tiles.affine import added, faded, faded_each, load_columns, load_state, store_state, turned
from foci.tiles.maps import tiles_of
from foci.tiles.memory import lines_of, load_tile, loaded, own_rows, present, put, rows_of, store_tile
from foci.tiles.near import store_powers
from foci.tiles.rest import behind, clear_rest
from foci.tiles.state import chunk_at, sequence
from foci.tiles.stretches import arrive, await_stretches, join_states, stretch

CHUNK = 64
WIDTHS = {"BLOCK_Z": (64, 128)}  # what `foci tune` may try, where gates leave no rows
ROWS: tl.constexpr = tl.constexpr(9)  # of CHUNK numbers, that a block of channels leaves of a chunk's gates


@triton.jit
def sums_kernel(  # type: ignore[no-untyped-def]
    g_ptr, sums_ptr, offsets_ptr, rest_a, rest_b, rest_c, rest_d, rest_e, rest_f, widths, g_strides, T, N, H,
    CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """What chunks' gates sum to, where no launch before it has made it beside maps; behind that `clear_rest`."""
    if widths is not None:
        rest = behind()
        if rest >= 0:
            clear_rest(rest_a, rest_b, rest_c, rest_d, rest_e, rest_f, widths, offsets_ptr, rest, N, T)
            return
    store_powers(sums_ptr, g_ptr, g_strides, offsets_ptr, tl.program_id(0), T, N, H, CHUNK, BLOCK_H)


@triton.jit
def walk_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, z_ptr, gates_ptr, wholes_ptr, pairs_ptr, state_ptr, offsets_ptr, out_ptr, kept_ptr, last_ptr,
    decays_ptr, maps_ptr, flags_ptr, parts_ptr, dg_ptr,
    x_strides, y_strides, z_strides, state_strides, scale, T, N, H, R, K, V, walks,
    BACK: tl.constexpr, CHUNK: tl.constexpr, STRETCH: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_Z: tl.constexpr, BLOCK_H: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """BLOCK_Z columns of out, of the last state, and of the states that are kept, each at a chunk's start.

    S is held as [Z,X]: a left operand where it lies. `gates`: a chunk's sums, or with `pairs` its totals per channel;
    `wholes` as it, by a pointer.
    BACK, behind so many `walks` programs sum the `parts` of gates' gradients, of BLOCKS each. With `flags` each stretch
    makes its own map (tiles/stretches.py), by states alone, and waits for those of the ones before it.
    """
    MAKES: tl.constexpr = flags_ptr is not None
    tl.static_assert(TILES == 1 or not MAKES)
    if dg_ptr is not None:  # noqa: SIM102  a constant and a number
        if tl.program_id(0) >= walks:
            sum_gates(parts_ptr, dg_ptr, offsets_ptr, tl.program_id(0) - walks, T, N, H, BLOCKS, CHUNK, BLOCK_H)
            return
    blocks = tl.cdiv(V, BLOCK_Z)
    z0, rest = tl.program_id(0) % blocks * BLOCK_Z, tl.program_id(0) // blocks
    h, index = (rest % H).to(tl.int64), rest // H
    if MAKES:
        if BACK:  # those behind it are programs of lower numbers
            index = walks // (H * blocks) - 1 - index
        flag_ptr = flags_ptr + (index * H + h) * blocks + z0 // BLOCK_Z
    n, _, _, _, first, end, piece = stretch(offsets_ptr, index, T, N, STRETCH)
    if n < 0:
        if MAKES:
            arrive(flag_ptr)
        return
    n = tl.cast(n, tl.int64)
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    b, count = tl.cast(b, tl.int64), tl.cdiv(end - first, CHUNK)
    slot = (tl.cast(slot, tl.int64) + (first - start) // CHUNK) * H + h
    x_there = rows_of(x_ptr, b, h // R, T, end, x_strides, K, CHUNK, BLOCK_X, TMA)
    y_there = rows_of(y_ptr, b, h // R, T, end, y_strides, K, CHUNK, BLOCK_X, TMA)
    z_there = rows_of(z_ptr, b, h, T, end, z_strides, V, CHUNK, BLOCK_Z, TMA)
    out_there = own_rows(out_ptr, b, h, T, H, end, V, CHUNK, BLOCK_Z, TMA)
    if kept_ptr is not None:
        kept_there = lines_of(kept_ptr, slot * K, count * H * K, V, BLOCK_X, BLOCK_Z, TMA)
    if pairs_ptr is not None:
        pairs_there = own_rows(pairs_ptr, b, h, T, H, end, CHUNK, CHUNK, CHUNK, TMA)
        gates_there = lines_of(gates_ptr, slot, count * H, K, 1, BLOCK_X, TMA)
    elif gates_ptr is not None:
        gates_there = lines_of(gates_ptr, slot, count * H, CHUNK, 1, CHUNK, TMA)
        wholes_ptr += slot * CHUNK + CHUNK - 1
        whole = tl.load(wholes_ptr + (count - 1 if BACK else 0) * H * CHUNK, mask=count > 0, other=0.0)
    t = tl.arange(0, CHUNK)
    if MAKES:
        wanted = first > start if BACK else end < stop
        end_of_it, decay = tl.zeros([BLOCK_Z, BLOCK_X], tl.float32), tl.full([1, BLOCK_X], 1.0, tl.float32)
        for i in tl.range(tl.where(wanted, count, 0), num_stages=4):  # less is loaded of a chunk than below
            chunk = count - 1 - i if BACK else i
            t0 = first + chunk * CHUNK
            y, z = loaded(y_there, t0, 0), loaded(z_there, t0, z0)
            gone = loaded(gates_there, chunk * H, 0)
            w = tl.trans(z)
            if BACK:
                w = (w * scale).to(tl.bfloat16)
            end_of_it = tl.dot(w, y, end_of_it * gone)
            decay *= gone
        if wanted:
            at = piece.to(tl.int64) * H + h
            store_tile(maps_ptr + at * K * V, tl.trans(end_of_it), 0, K, V, z0, V, 1)
            store_tile(decays_ptr + at * K, decay, 0, 1, 0, 0, K, 1)  # each block the same
        arrive(flag_ptr)  # who has no map to make, too: offsets that do not rise may say that somebody waits for it
    if state_ptr is not None:
        state_ptr += n * state_strides[0] + h * state_strides[1]
    S = load_state(state_ptr, state_strides, K, z0, V, TILES, BLOCK_X, BLOCK_Z)
    if STRETCH > 0:
        others = tl.cdiv(stop - end, STRETCH) if BACK else (first - start) // STRETCH
        nearest = piece + others if BACK else piece - others
        if MAKES:
            flags = flags_ptr + h * blocks + z0 // BLOCK_Z
            await_stretches(flags, nearest, others, H * blocks, -1 if BACK else 1)
        found = ()
        for j in tl.static_range(TILES):
            k0, step = j * BLOCK_X, -1 if BACK else 1
            tile = join_states(S[j], decays_ptr, maps_ptr, nearest, others, h, H, k0, K, z0, V, step)
            found += (tile,)  # type: ignore[assignment]
        S = found
    S = turned(S, TILES)
    for i in tl.range(count):
        chunk = count - 1 - i if BACK else i
        t0 = first + chunk * CHUNK
        x, y = load_columns(x_there, t0, TILES, BLOCK_X), load_columns(y_there, t0, TILES, BLOCK_X)
        z = loaded(z_there, t0, z0)
        if pairs_ptr is not None:  # rounded already: scale goes to what is not
            A = loaded(pairs_there, t0, 0)
            if not BACK:
                A = tl.trans(A)
        else:
            A = tl.zeros([CHUNK, CHUNK], tl.float32)
            for j in tl.static_range(TILES):
                A = tl.dot(y[j], tl.trans(x[j]), A)  # columns are who reads
            A *= scale
            if gates_ptr is not None:
                c = loaded(gates_there, chunk * H, 0)
                A *= tl.exp2(tl.trans(c) - c if BACK else c - tl.trans(c))
            A = tl.where(t[:, None] >= t[None, :] if BACK else t[:, None] <= t[None, :], A, 0.0).to(tl.bfloat16)
        o = tl.zeros([BLOCK_Z, CHUNK], tl.float32)
        for j in tl.static_range(TILES):
            operand = S[j].to(tl.bfloat16)
            if kept_ptr is not None:
                put(kept_there, tl.trans(operand), chunk * H * K + j * BLOCK_X, z0)
            o = tl.dot(operand, tl.trans(x[j]), o)
        left, w = tl.trans(z), tl.trans(z)
        if pairs_ptr is not None:
            if BACK:
                w = (w * scale).to(tl.bfloat16)
                left = w
            S = faded_each(S, load_columns(gates_there, chunk * H, TILES, BLOCK_X), TILES)
        elif gates_ptr is not None:
            rise, fall = tl.exp2(c), tl.exp2(whole - c)
            o *= fall if BACK else scale * rise
            w = (w * (scale * rise if BACK else fall)).to(tl.bfloat16)
            S = faded(S, tl.exp2(whole), TILES)
            ahead = chunk - 1 if BACK else chunk + 1
            whole = tl.load(wholes_ptr + ahead * H * CHUNK, mask=i + 1 < count, other=0.0)
        elif BACK:
            w = (w * scale).to(tl.bfloat16)
        else:
            o *= scale
        o = tl.dot(left, A, o)
        S = added(S, w, None, y, TILES)
        if pairs_ptr is not None and not BACK:
            o *= scale
        put(out_there, tl.trans(o), t0, z0)
    if last_ptr is not None:  # noqa: SIM102
        if ((first == start) if BACK else (end == stop)) & present(last_ptr):
            store_state(last_ptr + (n * H + h) * K * V, turned(S, TILES), K, z0, V, TILES, BLOCK_X)


@triton.jit
def sides_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, gates_ptr, sums_ptr, do_ptr, d_final_ptr, offsets_ptr, kept_ptr, dq_ptr, dk_ptr, parts_ptr,
    decays_ptr, starts_ptr, q_strides, k_strides, v_strides, do_strides, d_final_strides, scale, T, N, H, K, V,
    CHUNK: tl.constexpr, STRETCH: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Z: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """BLOCK_Z columns of dq and dk, from last to first, with as many rows of dS [Z,X]; parts of gates' gradients.

    Of each chunk ROWS rows: of each token q dq less what pairs give k dk, for its gate and those before it, by four
    warps; what dS gives k dk, for the gates behind it, likewise; and S dS, for all.
    """
    GATES: tl.constexpr = parts_ptr is not None
    blocks = tl.cdiv(K, BLOCK_Z)
    z0, rest = tl.program_id(0) % blocks * BLOCK_Z, tl.program_id(0) // blocks
    h = (rest % H).to(tl.int64)
    n, _, _, _, first, end, piece = stretch(offsets_ptr, rest // H, T, N, STRETCH)
    if n < 0:
        return
    n = tl.cast(n, tl.int64)
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    b, count = tl.cast(b, tl.int64), tl.cdiv(end - first, CHUNK)
    slot = (tl.cast(slot, tl.int64) + (first - start) // CHUNK) * H + h
    q_there = rows_of(q_ptr, b, h, T, end, q_strides, K, CHUNK, BLOCK_Z, TMA)
    k_there = rows_of(k_ptr, b, h, T, end, k_strides, K, CHUNK, BLOCK_Z, TMA)
    v_there = rows_of(v_ptr, b, h, T, end, v_strides, V, CHUNK, BLOCK_X, TMA)
    do_there = rows_of(do_ptr, b, h, T, end, do_strides, V, CHUNK, BLOCK_X, TMA)
    kept_there = lines_of(kept_ptr, slot * K, count * H * K, V, BLOCK_Z, BLOCK_X, TMA)
    dq_there = own_rows(dq_ptr, b, h, T, H, end, K, CHUNK, BLOCK_Z, TMA)
    dk_there = own_rows(dk_ptr, b, h, T, H, end, K, CHUNK, BLOCK_Z, TMA)
    if sums_ptr is not None:
        gates_there = lines_of(gates_ptr, slot, count * H, CHUNK, 1, CHUNK, TMA)
        sums_ptr += slot * CHUNK + CHUNK - 1
        whole = tl.load(sums_ptr + (count - 1) * H * CHUNK, mask=count > 0, other=0.0)
    t, z, warp = tl.arange(0, CHUNK), tl.arange(0, BLOCK_Z), tl.arange(0, 4)
    if GATES:
        parts_ptr += (slot * blocks + z0 // BLOCK_Z) * ROWS * CHUNK
        rows = warp[:, None] * CHUNK + t[None, :]
    dS = tl.zeros([BLOCK_Z, BLOCK_X], tl.float32)
    if d_final_ptr is not None:
        d_final_ptr += n * d_final_strides[0] + h * d_final_strides[1]
        dS = load_tile(d_final_ptr, z0, K, d_final_strides[2], 0, V, d_final_strides[3], BLOCK_Z, BLOCK_X)
        dS = dS.to(tl.float32)
    if STRETCH > 0:
        behind = tl.cdiv(stop - end, STRETCH)
        dS = join_states(dS, decays_ptr, starts_ptr, piece + behind, behind, h, H, z0, K, 0, V, -1)
    for i in tl.range(count, disable_licm=True):  # else where tiles lie is kept in registers, and these spilled
        chunk = count - 1 - i
        t0 = first + chunk * CHUNK
        do, v = loaded(do_there, t0, 0), loaded(v_there, t0, 0)
        S = loaded(kept_there, chunk * H * K + z0, 0)
        if GATES:
            of_S = tl.exp2(whole) * tl.sum(dS * S.to(tl.float32), 1)
        A = tl.dot(do, tl.trans(v)) * scale
        if sums_ptr is not None:
            c = loaded(gates_there, chunk * H, 0)
            A *= tl.exp2(tl.trans(c) - c)
        A = tl.where(t[:, None] >= t[None, :], A, 0.0).to(tl.bfloat16)
        dq = tl.dot(S, tl.trans(do)) * scale
        if sums_ptr is not None:
            dq *= tl.exp2(c)
        k, q = loaded(k_there, t0, z0), loaded(q_there, t0, z0)
        dq = tl.dot(tl.trans(k), tl.trans(A), dq)
        put(dq_there, tl.trans(dq), t0, z0)
        if GATES:
            of_token = by_warps(dq * tl.trans(q))
        dk = tl.dot(dS.to(tl.bfloat16), tl.trans(v))
        if sums_ptr is not None:
            dk *= tl.exp2(whole - c)
        if GATES:
            of_states = by_warps(dk * tl.trans(k))
        dk = tl.dot(tl.trans(q), A, dk)
        put(dk_there, tl.trans(dk), t0, z0)
        if GATES:
            of_token += of_states - by_warps(dk * tl.trans(k))
            to = parts_ptr + tl.cast(chunk, tl.int64) * H * blocks * ROWS * CHUNK
            tl.store(to + rows, of_token)
            tl.store(to + 4 * CHUNK + rows, of_states)
            tl.store(to + 8 * CHUNK + z, of_S)
        w = tl.trans(q)
        if sums_ptr is not None:
            w = (w * (scale * tl.exp2(c))).to(tl.bfloat16)
            dS *= tl.exp2(whole)
            whole = tl.load(sums_ptr + (chunk - 1) * H * CHUNK, mask=chunk > 0, other=0.0)
        else:
            w = (w * scale).to(tl.bfloat16)
        dS = tl.dot(w, do, dS)


@triton.jit
def by_warps(x):  # type: ignore[no-untyped-def]
    """Sums [4,C] of rows of x [Z,C], which four warps have: each its own, so that none waits for another."""
    return tl.sum(tl.reshape(x, [4, x.shape[0] // 4, x.shape[1]]), 1)


@triton.jit
def sum_gates(  # type: ignore[no-untyped-def]
    parts_ptr, dg_ptr, offsets_ptr, index, T, N, H, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr
):
    """dg of a chunk's BLOCK_H heads: of a token and those behind it, those before it, and the chunk's start."""
    h = index % tl.cdiv(H, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    n, b, t0, stop, slot = chunk_at(offsets_ptr, index // tl.cdiv(H, BLOCK_H), N, T, CHUNK)
    if n >= 0:
        t = tl.arange(0, CHUNK)
        places = (tl.cast(slot, tl.int64) * H + h[None, :]) * BLOCKS * ROWS * CHUNK + t[:, None]
        own, before = tl.zeros([CHUNK, BLOCK_H], tl.float32), tl.zeros([CHUNK, BLOCK_H], tl.float32)
        start = tl.zeros([CHUNK, BLOCK_H], tl.float32)
        for block in tl.static_range(BLOCKS):
            for warp in tl.static_range(4):
                at = parts_ptr + places + (block * ROWS + warp) * CHUNK
                own += tl.load(at, mask=(h < H)[None, :], other=0.0)
                before += tl.load(at + 4 * CHUNK, mask=(h < H)[None, :], other=0.0)
            start += tl.load(parts_ptr + places + (block * ROWS + 8) * CHUNK, mask=(h < H)[None, :], other=0.0)
        dg = tl.cumsum(own, 0, reverse=True) + tl.cumsum(before, 0) - before + tl.sum(start, 0)[None, :]
        to = dg_ptr + (tl.cast(b, tl.int64) * T + t0 + t)[:, None] * H + h[None, :]
        tl.store(to, dg.to(dg_ptr.dtype.element_ty), mask=(t0 + t < stop)[:, None] & (h < H)[None, :])


def rule(ahead: bool, target: Target) -> Config:
    """As many columns as a warpgroup's product has rows; loads two chunks `ahead` where a processor has the room."""
    return Config({"BLOCK_Z": 64}, warps=4, stages=3 if ahead else 2)


def suits(call: Any, keeps: bool) -> bool:
    """Whether these kernels can walk forward, as TMA reads all operands, and are worth it.

    Of 256 channels they are, but where gates fade a state that is kept: on an H100 that takes as long.
    """
    *_, K, V, _ = call.sizes
    read = (call.v,) if call.per_channel else (call.q, call.k, call.v)  # of their queries and keys is made what is read
    fits = target_of(call.v.device).arch == 90 and call.causal and (call.bonus is None or call.per_channel)
    wide = K == 256 and (call.log_decay is None or not keeps)
    return fits and (K in (64, 128) or wide) and V > 32 and V % 8 == 0 and _readable(*read)


def enough(call: Any, cut: Any) -> bool:
    """Whether stretches are long enough: of 256 channels to begin one takes as long as some 16 chunks, on an H100."""
    return call.sizes[4] <= 128 or not cut.tokens or cut.tokens >= 16 * CHUNK


def suits_back(call: Any, do: Tensor) -> bool:
    """The same of dv, and of dq and dk where gates are not per channel: then heads must have keys of their own."""
    _, _, G, H, K, V, _ = call.sizes
    return K < 256 and suits(call, True) and _readable(do) and (call.per_channel or (G == H and V in (64, 128)))


def _readable(*operands: Tensor) -> bool:
    return all(x.dtype == torch.bfloat16 and by_tma(x) for x in operands)


def sums(call: Any, slots: int, made: bool, rest: Any) -> Tensor | None:
    """Of gates per token or per head [slots,H,CHUNK], for walks in either direction; `made` by a launch of its own.

    Which takes the `rest` of outputs with it (kernels_triton_packed.py).
    """
    _, T, _, H, _, _, N = call.sizes
    g = call.log_decay
    if g is None or g.shape[3] > 1:
        return None
    found = torch.empty(slots, H, CHUNK, dtype=torch.float32, device=g.device)
    if made:
        config = Config({"BLOCK_H": side(H, 16)}, warps=4, stages=1)
        more, given = rest.taken()
        launch(
            sums_kernel, (slots * -(-H // config["BLOCK_H"]) + more,),
            g, found, call.offsets, *given, strides(g), T, N, H, config=config, CHUNK=CHUNK,
        )  # fmt: skip
    return found


def empty_maps(call: Any, cut: Any | None) -> tuple[Tensor | None, ...]:
    """Room for what stretches do to a state, decays and ends (kernels_triton_forward.py: maps), and their flags.

    Of gates per channel alone, whose pairs are a launch before, which clears the flags: maps of others are made by one,
    and those of 256 channels. None where nobody walks, or sequences whole.
    """
    *_, H, K, V, _ = call.sizes
    if cut is None or not (cut.tokens and call.per_channel) or K > 128:
        return None, None, None
    decays = torch.empty(cut.slots, H, K, dtype=torch.float32, device=call.v.device)
    ends = torch.empty(cut.slots, H, K, V, dtype=torch.float32, device=call.v.device)
    return decays, ends, torch.empty(cut.programs, H, -(-V // 64), dtype=torch.int32, device=call.v.device)


def walk(
    call: Any, made: Any, sums: Tensor | None, out: Tensor, kept: Tensor | None, final: Tensor, cut: Any,
    maps: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """Fills `out`, `kept`, if given, with the states at the chunks' starts, and the `final` one.

    `made`: the Pairs of gates per channel (kernels_triton_pairs.py). `maps`: of the stretches that `cut` says.
    """
    operands = (call.q, call.k, call.v, sums, None)
    if made is not None:
        operands = (made.risen, made.fallen, call.v, made.totals, made.pairs)
    _walk(call, operands, call.state, out, kept, final, cut, maps, False)


def walk_back(
    call: Any, made: Any, sums: Tensor | None, do: Tensor, d_final: Tensor | None, found: Sequence[Tensor | None],
    parts: Tensor | None, cut: Any, maps: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """Fills what is `found`: dv, gradients of the states at the chunks' ends and of the first, dg of its `parts`."""
    dv, ends, d_state, dg = found
    if parts is None:
        dg = None
    if dv is None and ends is None and d_state is None and dg is None:
        return
    operands = (call.k, call.q, do, sums, None)
    if made is not None:
        operands = (made.fallen, made.risen, do, made.totals, made.pairs)
    out = torch.empty(do.shape, dtype=do.dtype, device=do.device) if dv is None else dv
    _walk(call, operands, d_final, out, ends, d_state, cut, maps, True, parts, dg)


def _walk(
    call: Any, operands: tuple[Any, ...], state: Tensor | None, out: Tensor, kept: Tensor | None, last: Tensor | None,
    cut: Any, maps: tuple[Tensor | None, ...], back: bool, parts: Tensor | None = None, dg: Tensor | None = None,
) -> None:  # fmt: skip
    _, T, _, H, K, V, N = call.sizes
    x, y, z, gates, pairs = operands
    target = target_of(out.device)
    alone = pairs is not None and kept is not None  # two do not fit
    few = alone or cut.programs * H * -(-V // 64) <= target.processors
    # Two programs share a processor, but few; of 64 channels two have room for three chunks each, of 256 none has.
    ahead = K <= 64 or (few and K <= 128)
    config = configure("linear_walk", (K, V, pairs is not None, back, few), partial(rule, ahead), target, WIDTHS)
    walks, heads = cut.programs * H * -(-V // config["BLOCK_Z"]), side(H, 16)
    slots, _, blocks = (0, 0, 1) if parts is None else parts.shape[:3]
    key, value = (CHUNK, min(K, 128)), (CHUNK, config["BLOCK_Z"])
    by = tiles_of(True, V % value[1] == 0, CHUNK, call.offsets, x, y, z)
    launch(
        walk_kernel,
        (walks + slots * -(-H // heads),),
        by.rows(x, *key), by.rows(y, *key), by.rows(z, *value),
        by.lines(gates, 1, CHUNK if pairs is None else key[1]), gates, by.rows(pairs, CHUNK, CHUNK), state,
        call.offsets, by.rows(out, *value),
        by.lines(kept, key[1], value[1]), last, *maps, parts, dg,
        x.stride(), y.stride(), z.stride(), strides(state), call.scale, T, N, H, H // x.shape[2], K, V, walks,
        config=config, BACK=back, CHUNK=CHUNK, STRETCH=cut.tokens, BLOCKS=blocks,
        TILES=-(-K // 128), BLOCK_X=key[1], BLOCK_H=heads, TMA=by.tma,
    )  # fmt: skip


def sides(
    call: Any, sums: Tensor | None, kept: Tensor, do: Tensor, d_final: Tensor | None, found: tuple[Tensor | None, ...],
    slots: int, cut: Any, maps: tuple[Tensor | None, ...],
) -> Tensor | None:  # fmt: skip
    """Fills dq and dk. If dg is among what is `found`, parts [slots,H,blocks,ROWS,CHUNK] of it."""
    _, T, _, H, K, V, N = call.sizes
    target, (dq, dk, dg) = target_of(do.device), found
    few = cut.programs * H * -(-K // 64) <= target.processors or sums is None  # with 128 channels two do not fit
    config = configure("linear_sides", (K, V, dg is not None, few), partial(rule, few), target)
    blocks, parts = K // config["BLOCK_Z"], None
    if dg is not None:
        parts = torch.empty(slots, H, blocks, ROWS.value, CHUNK, dtype=torch.float32, device=do.device)
    key, value = (CHUNK, config["BLOCK_Z"]), (CHUNK, V)
    by = tiles_of(True, True, CHUNK, call.offsets, call.q, call.k, call.v, do)
    launch(
        sides_kernel,
        (cut.programs * H * blocks,),
        by.rows(call.q, *key), by.rows(call.k, *key), by.rows(call.v, *value), by.lines(sums, 1, CHUNK), sums,
        by.rows(do, *value), d_final, call.offsets, by.lines(kept, key[1], V), by.rows(dq, *key), by.rows(dk, *key),
        parts, *maps[:2],
        call.q.stride(), call.k.stride(), call.v.stride(), do.stride(), strides(d_final), call.scale, T, N, H, K, V,
        config=config, CHUNK=CHUNK, STRETCH=cut.tokens, BLOCK_X=V, TMA=by.tma,
    )  # fmt: skip
    return parts
