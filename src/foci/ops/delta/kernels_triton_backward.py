"""Backward of the delta rule in Triton: the states' gradients, last chunk to first, then all chunks side by side.

With do, dS the gradients of the outputs and of the state at a chunk's end, X = (I + E)^-1 and the errors d of a chunk
(ops/delta/chunked.py), the walk from the last chunk to the first is

    dd = A^T do + (fall w) dS;   dv = X^T dd;   dS <- total dS + (scale rise q)^T do - (rise e)^T dv,

with gates per channel dv = (A X)^T do + (X^T fall w) dS, as its operands are made anew for it. It leaves dv and dS at
each chunk's end, and what is left is a matter of each chunk alone (kernels_triton_tokens.py; with gates per channel
kernels_triton_channels.py). Keys that are alike make sums over d, dv, A and X telescope: these are float32 throughout,
and in a product with a bfloat16 operand they are two bfloat16 (tiles/chunk_backward.py: right), or float32 rounded to
TF32; with each other both are two bfloat16, where X and A lie so (tiles/state.py: halves). For float16, whose range
holds no decays, all products are of float32 tiles (tiles/state.py: working).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    strides,
    target_of,
)
from foci.tiles.affine import joined, load_state, piece_at, store_map, store_state, with_unit
from foci.tiles.chunk_backward import onto, right
from foci.tiles.maps import tiles_of
from foci.tiles.memory import lines_of, load_block, load_halves, own_rows, rows_of, store_block, store_tile, unless
from foci.tiles.pairs import of_two, parted
from foci.tiles.state import in_two, nearest_in_two, working

CHUNK = 64


@triton.jit
def walk_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, e_ptr, rise_ptr, write_ptr, total_ptr, A_ptr, X_ptr, d_out_ptr, d_final_ptr, offsets_ptr,
    M_ptr, N_ptr, dv_ptr, d_value_ptr, ends_ptr, d_state_ptr,
    q_strides, k_strides, e_strides, write_strides, d_out_strides, d_final_strides, scale, T, N, H, R, K, V, half,
    PER_CHANNEL: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr, JOIN: tl.constexpr, CHUNK: tl.constexpr,
    PIECE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TMA: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's dS through one sequence, or a piece of it, last chunk to first.

    It keeps dS at each chunk's end, and dv. dS are BLOCKS tiles of BLOCK_K channels. Per channel q, k and e come with
    their decays, scale and beta, in bfloat16 k and e as two of them, `half` apart; k is X^T k and A is A X, which make
    dv, and there is no `X_ptr`. Without `dv_ptr` a piece's map is made, as by the forward's: what dS at its end is at
    its start; the columns behind V's blocks are M's, for which no output has a gradient. FULL: in bfloat16 no digit of
    dS is lost, also not at a chunk's end: erase keys that are not the written ones would let what is lost grow. Per
    channel and without decays none is lost for dv.
    """
    blocks = tl.cdiv(V, BLOCK_V) + (tl.cdiv(K, BLOCK_V) if dv_ptr is None else 0)
    v0 = tl.program_id(0) % blocks * BLOCK_V
    rest = tl.program_id(0) // blocks
    h = (rest % H).to(tl.int64)
    n, row, start, stop, slot, piece, before, behind = piece_at(offsets_ptr, rest // H, T, N, CHUNK, PIECE)
    known = K
    if PIECE > 0:
        if n < 0:
            return
        known = tl.where(behind == 0, K, 0)
    if dv_ptr is None:  # noqa: SIM102  a constant and a tensor
        if (before == 0) | ((behind == 0) & (v0 >= tl.cdiv(V, BLOCK_V) * BLOCK_V)):
            return
    WIDE: tl.constexpr = 2 * CHUNK if HALVES else CHUNK
    q_there = rows_of(q_ptr, row, h // R, T, stop, q_strides, K, CHUNK, BLOCK_K, TMA)
    k_there = rows_of(k_ptr, row, h // R, T, stop, k_strides, K, CHUNK, BLOCK_K, TMA)
    if e_ptr is not None:
        e_there = rows_of(e_ptr, row, h // R, T, stop, e_strides, K, CHUNK, BLOCK_K, TMA)
        if PER_CHANNEL and HALVES:
            k_lost_there = rows_of(k_ptr + half, row, h // R, T, stop, k_strides, K, CHUNK, BLOCK_K, TMA)
            e_lost_there = rows_of(e_ptr + half, row, h // R, T, stop, e_strides, K, CHUNK, BLOCK_K, TMA)
    do_there = rows_of(d_out_ptr, row, h, T, stop, d_out_strides, V, CHUNK, BLOCK_V, TMA)
    if dv_ptr is None:
        do_there = unless(do_there, v0 >= V, H * V)
    A_there = own_rows(A_ptr, row, h, T, H, stop, WIDE, CHUNK, CHUNK, TMA)
    if not PER_CHANNEL:
        X_there = own_rows(X_ptr, row, h, T, H, stop, WIDE, CHUNK, CHUNK, TMA)
    count = tl.cdiv(stop - start, CHUNK)
    if dv_ptr is not None:
        dv_there = own_rows(dv_ptr, row, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
        # chunk by chunk, H K rows behind each other
        ends_there = lines_of(ends_ptr, (slot * H + h) * K, count * H * K, V, BLOCK_K, BLOCK_V, TMA)
    if d_value_ptr is not None:
        d_value_there = own_rows(d_value_ptr, row, h, T, H, stop, V, CHUNK, BLOCK_V, TMA)
    write_ptr += row * write_strides[0] + h * write_strides[2]
    if rise_ptr is not None:
        rise_ptr += row * T * H + h
    gone_ptr = write_ptr
    if total_ptr is not None and not PER_CHANNEL:
        gone_ptr = total_ptr + (slot + count) * H + h
    if d_final_ptr is not None:
        d_final_ptr += n * d_final_strides[0] + h * d_final_strides[1]
    dS = load_state(d_final_ptr, d_final_strides, known, v0, V, BLOCKS, BLOCK_K, BLOCK_V)
    if PIECE > 0:
        if dv_ptr is None:
            dS = with_unit(dS, v0 - tl.cdiv(V, BLOCK_V) * BLOCK_V, BLOCKS, BLOCK_K, BLOCK_V)
        else:
            dS = joined(dS, M_ptr, N_ptr, piece + behind, behind, h, H, K, v0, V, -1, JOIN, BLOCKS, BLOCK_K, BLOCK_V)
    # What is the same for all chunks would otherwise be kept in registers, and these spilled.
    LEAN: tl.constexpr = not TMA and (PIECE > 0 or offsets_ptr is not None or not HALVES)
    for i in tl.range(count, disable_licm=LEAN):
        chunk = count - 1 - i
        t0 = start + chunk * CHUNK
        if total_ptr is not None and not PER_CHANNEL:
            gone_ptr -= H
            gone = tl.load(gone_ptr)
        at = t0 + tl.arange(0, CHUNK)
        write = tl.load(write_ptr + at.to(tl.int64) * write_strides[1], mask=at < stop, other=0.0).to(tl.float32)
        if rise_ptr is not None:
            rise = tl.load(rise_ptr + at.to(tl.int64) * H, mask=at < stop, other=0.0)
        do = load_block(do_there, t0, stop, d_out_strides[1], v0, V, d_out_strides[3], CHUNK, BLOCK_V, TMA)
        A, A_lost = load_halves(A_there, t0, stop, H, CHUNK, HALVES, TMA)
        if not PER_CHANNEL:
            X, X_lost = load_halves(X_there, t0, stop, H, CHUNK, HALVES, TMA)
        # dd = A^T do + write (k dS);  dv = X^T dd
        dd = onto(tl.zeros([CHUNK, BLOCK_V], tl.float32), tl.trans(A), tl.trans(A_lost), working(do), PRECISION)
        read = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        for j in tl.static_range(BLOCKS):
            k = working(load_block(k_there, t0, stop, k_strides[1], j * BLOCK_K, K, k_strides[3], CHUNK, BLOCK_K, TMA))
            operand = dS[j].to(k.dtype)
            if PER_CHANNEL and HALVES:
                lost = load_block(k_lost_there, t0, stop, k_strides[1], j * BLOCK_K, K, 1, CHUNK, BLOCK_K, TMA)
                read = tl.dot(lost, operand, read)
            if FULL or (HALVES and (PER_CHANNEL or total_ptr is None)):
                read = tl.dot(k, (dS[j] - operand.to(tl.float32)).to(k.dtype), read)
            read = tl.dot(k, operand, read, input_precision=PRECISION)
            if ends_ptr is not None:
                if TMA and not FULL:
                    store_block(ends_there, operand, chunk * H * K + j * BLOCK_K, 0, 0, v0, V, TMA)
                else:
                    here = ends_ptr + ((slot + chunk) * H + h) * K * V
                    store_tile(here, dS[j], j * BLOCK_K, K, V, v0, V, 1)
        dd += read if PER_CHANNEL else read * write[:, None]
        dv = dd
        if not PER_CHANNEL:
            above, below = parted(dd, X.dtype, PRECISION)
            dv = of_two(tl.trans(X), tl.trans(X_lost), above, below, tl.zeros_like(dd), PRECISION)
        if dv_ptr is not None:
            said, unsaid = dv, dv
            if HALVES and not PER_CHANNEL:
                said, unsaid = nearest_in_two(dv)
            store_block(dv_there, said, t0, stop, H * V, v0, V, TMA)
        # dS <- total dS + (scale rise q)^T do - (rise e)^T dv
        by_read, by_erase = do.to(tl.float32), -dv
        if not PER_CHANNEL:
            by_read *= scale
        if rise_ptr is not None:
            by_read *= rise[:, None]
            by_erase *= rise[:, None]
        earlier = ()  # type: Any
        for j in tl.static_range(BLOCKS):
            block = dS[j]
            if PER_CHANNEL:
                c, there = j * BLOCK_K + tl.arange(0, BLOCK_K), (slot + chunk) * H + h
                block *= tl.load(total_ptr + there * K + c, mask=c < K, other=0.0)[:, None]
            elif total_ptr is not None:
                block *= gone
            q = working(load_block(q_there, t0, stop, q_strides[1], j * BLOCK_K, K, q_strides[3], CHUNK, BLOCK_K, TMA))
            block = tl.dot(tl.trans(q), by_read.to(q.dtype), block, input_precision=PRECISION)
            e = k
            if e_ptr is not None:
                e = working(
                    load_block(e_there, t0, stop, e_strides[1], j * BLOCK_K, K, e_strides[3], CHUNK, BLOCK_K, TMA)
                )
                if PER_CHANNEL and HALVES:
                    lost = load_block(e_lost_there, t0, stop, e_strides[1], j * BLOCK_K, K, 1, CHUNK, BLOCK_K, TMA)
                    block = tl.dot(tl.trans(lost), in_two(by_erase)[0], block)
            elif BLOCKS > 1:
                e = working(
                    load_block(k_there, t0, stop, k_strides[1], j * BLOCK_K, K, k_strides[3], CHUNK, BLOCK_K, TMA)
                )
            earlier = earlier + (right(tl.trans(e), by_erase, block, PRECISION),)  # noqa: RUF005
        if d_value_ptr is not None:
            store_block(d_value_there, unsaid, t0, stop, H * V, v0, V, TMA)
        dS = earlier
    if dv_ptr is None:
        store_map(M_ptr, N_ptr, dS, piece * H + h, K, v0, V, BLOCKS, BLOCK_K, BLOCK_V)
    elif d_state_ptr is not None:  # noqa: SIM102
        if before == 0:
            store_state(d_state_ptr + (n * H + h) * K * V, dS, K, v0, V, BLOCKS, BLOCK_K)


def _named(call: Any, per_channel: bool) -> tuple[str, Callable[[int, int, torch.dtype, Target], Config]]:
    """The walk's name among configurations, and its rule."""
    if per_channel:
        return "walk_by_channel", _walk_by_channel_rule
    if call.erase is None and call.log_decay is not None:
        return "walk", _walk_rule
    return "walk_in_full", _walk_in_full_rule


def _walk_by_channel_rule(K: int, V: int, dtype: torch.dtype, target: Target) -> Config:
    """As `_walk_rule`, but there is more to load for a chunk, and more programs at once hide that best."""
    if target.arch == 90 and K in (64, 128) and V > 32 and dtype == torch.bfloat16:
        return Config({"BLOCK_K": K, "BLOCK_V": 64}, warps=4, stages=3 if K == 64 else 2)  # as measured on an H100
    return _walk_in_full_rule(K, V, dtype, target)


def _narrow(K: int) -> int:
    """How many columns a walk has that is not turned, where the rule's are of one that is."""
    return 16 if K > 64 else 32


def _walk_in_full_rule(K: int, V: int, dtype: torch.dtype, target: Target) -> Config:
    """As `_walk_rule`, but beside erase keys or what rounding left of dS a third stage finds no shared memory."""
    config = _walk_rule(K, V, dtype, target)
    return Config(config.blocks, config.warps, min(config.stages, 2))


def _walk_rule(K: int, V: int, dtype: torch.dtype, target: Target) -> Config:
    """All of K is in registers as float32, so there is less of V where K is large, and where tiles are of float32."""
    wide = dtype != torch.bfloat16
    if target.arch == 90 and K <= 128 and not wide:  # as measured on an H200
        return Config({"BLOCK_K": side(K, 128), "BLOCK_V": side(V, 32)}, warps=4, stages=3)
    if target.arch == 90 and wide and 64 < K <= 256:  # as measured on an H100, spills and all
        return Config({"BLOCK_K": 64, "BLOCK_V": side(V, 32)}, warps=4, stages=1)
    k = 32 if wide and target.shared < 160_000 else 64
    blocks = {"BLOCK_K": side(K, k), "BLOCK_V": side(V, 16 if wide or K > 128 else 32)}
    return Config(blocks, warps=4 if K <= 128 else 8, stages=1)


class _Problem:
    """A call, its sizes, and its gradients: contiguous, each in its argument's dtype, None where not needed."""

    def __init__(self, call: Any, found: Sequence[Tensor | None], rest: Any) -> None:
        self.call, self.target, self.g = call, target_of(call.q.device), call.log_decay
        self.B, self.T, self.G, self.H, self.K, self.V, self.N = call.sizes
        self.found, self.rest = found, rest  # kernels_triton_packed.py
        self.erase = call.k if call.erase is None else call.erase
        self.per_channel = self.g is not None and self.g.shape[3] > 1
        self.constant = self.g is not None and self.g.shape[:2] != (self.B, self.T)
        self.precision = float_precision(call.q.dtype, self.target)  # of products of float32 tiles
        self.gates: Tensor | None = None  # sums per channel [slots,H,K], when the walk's operands are made
        self.chunks = self.B * -(-self.T // CHUNK) if call.offsets is None else self.T // CHUNK + self.N

    def sums(self, x: Tensor | None) -> Tensor | None:
        """Where sums over the heads that read one wait, in float32."""
        if x is None or self.G == self.H:
            return None
        return x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)

    def config(self, kernel: str, rule: Callable[[int, int, torch.dtype, Target], Config]) -> Config:
        key = (self.K, self.V, self.call.q.dtype)
        vary = {"BLOCK_K": (16, 32, 64)} if kernel == "ends" else {"BLOCK_V": (16, 32, 64)}
        return configure(f"delta_backward_{kernel}", key, partial(rule, *key), self.target, vary)


def backward(
    call: Any,
    kept: Sequence[Any],
    grads: Sequence[Tensor | None],
    room: tuple[Sequence[Tensor | None], Any],
    way: Callable[..., Any],
    channels: Any,
    tokens: Any,
    token_walks: Any,
    joins: Any,
    channel_walks: Any,
) -> None:
    """Fills the gradients of q, k, v, beta, log_decay, erase and state, None where not needed.

    `room`: these and their Rest (kernels_triton_packed.py). `kept`: what the forward left (gpu.py: Parts). `way`:
    ops/delta/pieces.py.
    What does each chunk's part: `channels` for gates per channel (kernels_triton_channels.py), `tokens` for others:
    kernels_triton_tokens.py and kernels_gluon_backward.py, or None.
    `token_walks`, `channel_walks`: the walk where it can be that of the file of their name; the first are two, that
    and kernels_gluon_walk_back.py or None; `joins` as the forward's.
    """
    found, rest = room
    problem = _Problem(call, found, rest)
    d_out = call.v.new_zeros(()).expand(call.v.shape) if grads[0] is None else grads[0]
    dv, behind = _walk(problem, kept, d_out, grads[1], way, channels, token_walks, joins, channel_walks)
    if any(x is not None for x in (found[0], found[1], *found[3:6])):
        if problem.per_channel:
            channels.side_by_channel(problem, kept, d_out, dv, behind)
        else:
            tokens[0].side_by_token(problem, kept, d_out, dv, behind, tokens[1])
    rest.end()


def _room(problem: _Problem, two: bool) -> tuple[Tensor, Tensor | None]:
    """Where dv [B,T,H,V] goes, and what is stored beside it.

    In float32, with its copy if v's gradient is of another dtype; in bfloat16, but for gates per channel, it is two:
    dv rounded and what that left.
    """
    v, d_value = problem.call.v, problem.found[2]
    direct = d_value is not None and (two or d_value.dtype == torch.float32)
    dtype = torch.bfloat16 if two else torch.float32
    dv = d_value if direct and d_value is not None else v.new_empty(v.shape, dtype=dtype)
    return dv, torch.empty_like(dv) if two else None if direct else d_value


def _walk(
    problem: _Problem, kept: Sequence[Any], d_out: Tensor, d_final: Tensor | None, way: Callable[..., Any],
    channels: Any, walks: Any, joins: Any, channel_walks: Any,
) -> tuple[Any, Tensor]:  # fmt: skip
    """dv [B,T,H,V] and the gradient of the state at each chunk's end, laid out as the states are; as `_room` has dv."""
    call, d_value, H, K, V = problem.call, problem.found[2], problem.H, problem.K, problem.V
    (token_walks, by_warps), (states, _, inverse, products, rise, write, gone, rows, reach) = walks, kept
    q, k, e, write = call.q, call.k, call.erase, call.beta if write is None else write
    if problem.per_channel:
        q, k, e, gone, products = channels.for_walk(problem, kept)
    two = call.v.dtype == torch.bfloat16 and not problem.per_channel
    dv, beside = _room(problem, two)
    config, operands = problem.config(*_named(call, problem.per_channel)), (q, k, e, d_out, d_value)
    blocks = -(-V // config["BLOCK_V"])
    turned = problem.per_channel and config["BLOCK_V"] >= 64  # the rule's for what is turned
    apart = -(-V // _narrow(K)) if turned else blocks
    by = way(token_walks.shares(call, problem.target), apart, operands if two else None)
    pieces = by.cut
    able = problem.target.arch == 90 and q.dtype == torch.bfloat16 and K % config["BLOCK_K"] == 0
    able = able and all(map(by_tma, operands))
    by_channel = problem.per_channel and able and not pieces.tokens and channel_walks.fits(K, V, config, problem.target)
    full = call.erase is not None and states.dtype == torch.bfloat16 and not (by.turned or by_channel)
    behind = torch.empty_like(states, dtype=torch.float32 if full else None)
    results = dv, beside, behind, problem.found[6]
    turns = two and token_walks.fits(K, V, problem.target, *operands)
    if by_warps is not None and turns and by_warps.takes(call, d_out, by):
        by_warps.backward(call, (rows, gone, products, inverse), d_out, d_final, results)
        return (dv, beside), behind
    if by.turned:
        left = rows, gone, reach if by.pieces > 1 and not by.maps else None, products, inverse
        make = partial(token_walks.backward, call, left, by.pieces, d_out, d_final, [None] * 4)
        begins = joins.starts(call, by.pieces, make, by.maps, False)
        token_walks.backward(call, left, by.pieces, d_out, d_final, results, begins)
        return (dv, beside), behind

    if by_channel:
        channel_walks.backward(
            call, (q, k, e, gone, products, d_out, d_final), results, pieces.programs * H * blocks, config
        )
        return dv, behind
    if turned:  # here shared memory has no room for as much
        blocks, narrow = apart, {**config.blocks, "BLOCK_V": _narrow(K)}
        config = Config(narrow, config.warps, min(config.stages, 2))

    pairs, gates = (products, None if problem.per_channel else inverse), (rise, write, gone)
    go = _launcher(problem, operands, pairs, gates, d_final, pieces, config, able, full)
    if pieces.tokens:
        # Made again and not kept: what a forward keeps is declared to the compiler, whose lengths are symbols.
        go(pieces.slots * H * (blocks + -(-K // config["BLOCK_V"])), None, None, None, None)
    go(pieces.programs * H * blocks, *results)
    return (dv, beside) if two else dv, behind


def _launcher(
    problem: _Problem, operands: tuple[Tensor | None, ...], pairs: tuple[Tensor, Tensor | None],
    gates: tuple[Tensor | None, ...], d_final: Tensor | None, pieces: Any, config: Config, able: bool, full: bool,
) -> Callable[..., None]:  # fmt: skip
    """What launches so many programs of `walk_kernel`, which fill dv, what it leaves, dS behind chunks and the first.

    `able`: TMA can read the `operands`: q, k, e and the gradient of out, with others that only count for that.
    """
    (q, k, e, d_out, _), (products, inverse), (rise, write, gone) = operands, pairs, gates
    H, K, V = problem.H, problem.K, problem.V
    assert q is not None and k is not None and d_out is not None and write is not None
    key, value, pair = (CHUNK, config["BLOCK_K"]), (CHUNK, config["BLOCK_V"]), (CHUNK, CHUNK)
    rows = () if problem.per_channel else (q, k, e, d_out)  # else e is two
    R, whole = 1 if problem.per_channel else H // problem.G, problem.V % value[1] == 0 and bool(rows)
    tiles = tiles_of(able, whole, CHUNK, problem.call.offsets, *rows)

    def go(programs: int, *results: Any) -> None:
        dv, beside, behind, d_state = results
        launch(
            walk_kernel, (programs,),
            tiles.rows(q, *key), tiles.rows(k, *key), tiles.rows(e, *key), rise, write, gone,
            tiles.rows(products, *pair), tiles.rows(inverse, *pair), tiles.rows(d_out, *value), d_final,
            problem.call.offsets, pieces.M, pieces.N, tiles.rows(dv, *value), tiles.rows(beside, *value),
            behind if full else tiles.lines(behind, key[1], value[1]), d_state,
            q.stride(), k.stride()[-4:], None if e is None else e.stride()[-4:], write.stride(), d_out.stride(),
            strides(d_final), problem.call.scale, problem.T, problem.N, H, R, K, V, q.numel(),
            config=config, PER_CHANNEL=problem.per_channel, HALVES=products.dtype == torch.bfloat16,
            PRECISION=problem.precision, JOIN=precision(torch.float32, problem.target), CHUNK=CHUNK,
            PIECE=pieces.tokens, BLOCKS=-(-K // config["BLOCK_K"]), TMA=tiles.tma, FULL=full,
        )  # fmt: skip

    return go
