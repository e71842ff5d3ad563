"""What pieces of a sequence (tiles/pieces.py) tell each other in one launch: where they begin, and what is NaN.

A piece begins with what its gates have not forgotten, and so knows nothing of NaN before that, which no factor makes 0.
Who is the last of all pieces' programs to come, whichever that is, makes up for it: for this no one waits.
SETTLE: by a GPU, on which these stores and loads are on their way for a while; the interpreter has none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.affine import store_joined_turned
from foci.tiles.memory import present
from foci.tiles.pieces import share, slow_pieces
from foci.tiles.state import sequence
from foci.tiles.stretches import await_count, count_one

JOINED: tl.constexpr = tl.constexpr(32)  # columns of a state that a program joins at once
LOST: tl.constexpr = tl.constexpr(1 << 16)  # who has lost something counts so many: more than there are pieces


@triton.jit
def counts(V):  # type: ignore[no-untyped-def]
    """How many numbers count a head's programs, 0 before (`arrived`): of maps, and of each 64 columns of its state."""
    return tl.cdiv(V, 64) + 1


@triton.jit
def tell(  # type: ignore[no-untyped-def]
    reach_ptr, slow_ptr, first_ptr, M_ptr, N_ptr, arrived_ptr, first, n, h, piece, pieces, rest, chunks, H, V, v0,
    SETTLE: tl.constexpr, K: tl.constexpr, BLOCK_V: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Whether nobody wants the map of columns v0.. of a piece; it says which pieces are slow, if only some are.

    With `first_ptr` those of the last slow one wait for the maps of all before it, and say how each of these begins.
    """
    c0, later = v0 - tl.cdiv(V, BLOCK_V) * BLOCK_V, (piece < pieces - 1).to(tl.int32)
    if reach_ptr is not None:
        slow, later = slow_pieces(reach_ptr + first, H, piece, pieces, chunks, 0, FAR)
        if v0 == 0:
            tl.store(slow_ptr + rest, slow)
        if first_ptr is not None:  # noqa: SIM102  a constant and a number
            if (slow != 0) & (later == 0):
                of_M: tl.constexpr = K // BLOCK_V
                each = tl.cdiv(V, BLOCK_V) + of_M
                await_count(arrived_ptr + (n * H + h) * counts(V), piece * each - of_M)
                order_tma(SETTLE)
                for v1 in range(v0 // BLOCK_V * JOINED, V, each * JOINED):
                    store_joined_turned(first_ptr, M_ptr, N_ptr, n * pieces * H + h, H, piece, v1, V, K, JOINED)
    return (later == 0) | ((piece == 0) & (c0 >= 0))


@triton.jit
def count_map(arrived_ptr, head, V, SETTLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The map that a program has stored is there, for who waits in `tell`."""
    order_tma(SETTLE)
    count_one(arrived_ptr + head * counts(V))


@triton.jit
def order_tma(SETTLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What other programs have stored, and this one knows of, is there for TMA too, which it has not to be without."""
    if SETTLE:
        tl.inline_asm_elementwise("fence.proxy.async; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def settle(SETTLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until what these threads have stored by TMA is in memory: else it is only waited for until it is on its way."""
    if SETTLE:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def store_and_spread_lost(  # type: ignore[no-untyped-def]
    S, lost_ptr, arrived_ptr, out_ptr, final_ptr, errors_ptr, states_ptr, offsets_ptr, v0, rest, apart, T, H, V, pieces,
    SETTLE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`spread_lost` of columns v0.. of a state turned over, behind all that this program has stored, by TMA too."""
    v = v0 + tl.arange(0, S.shape[0])
    tl.store(lost_ptr + rest.to(tl.int64) * V + v, (tl.sum(S * 0.0, 1) != 0.0).to(tl.int32), mask=v < V)
    settle(SETTLE)
    tl.debug_barrier()
    spread_lost(
        lost_ptr, arrived_ptr, out_ptr, final_ptr, errors_ptr, states_ptr, offsets_ptr, v, v0 // S.shape[0], rest,
        apart, T, H, S.shape[1], V, pieces, CHUNK,
    )  # fmt: skip


@triton.jit
def spread_lost(  # type: ignore[no-untyped-def]
    lost_ptr, arrived_ptr, out_ptr, final_ptr, errors_ptr, states_ptr, offsets_ptr, v, block, rest, apart, T, H, K, V,
    pieces, CHUNK: tl.constexpr,
):  # fmt: skip
    """Columns `v` of what all have made, by who comes last to a head's `block`; errors' two parts, so far `apart`."""
    h, n = (rest % H).to(tl.int64), (rest // H // pieces).to(tl.int64)
    lost = tl.load(lost_ptr + rest.to(tl.int64) * V + v, mask=v < V, other=0)
    come = 1 + LOST * tl.max(lost, 0)
    come += tl.atomic_add(arrived_ptr + (n * H + h) * counts(V) + 1 + block, come)
    if (come % LOST == pieces) & (come >= LOST):
        _spread(
            lost_ptr, out_ptr, final_ptr, errors_ptr, states_ptr, offsets_ptr, v, n, h, apart, T, H, K, V, pieces, CHUNK
        )


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    lost_ptr, out_ptr, final_ptr, errors_ptr, states_ptr, offsets_ptr, v, n, h, apart, T, H, K, V, pieces,
    CHUNK: tl.constexpr,
):  # fmt: skip
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    row, chunks, lost = tl.cast(b, tl.int64) * T, tl.cdiv(stop - start, CHUNK), (v * 0).to(tl.int32)
    one = tl.minimum(pieces, 1)  # which no compiler knows: beside loops that it unrolls a walk's is another, and slower
    for piece in range(1, pieces, one):
        ahead, behind = share(piece - 1, pieces, chunks)
        there = ((n * pieces + piece - 1) * H + h) * V + v
        lost |= tl.load(lost_ptr + there, mask=(v < V) & (ahead < behind), other=0)
        ahead, behind = share(piece, pieces, chunks)
        t1, count = start + ahead * CHUNK, tl.minimum(behind * CHUNK, stop - start) - ahead * CHUNK
        tokens, states = ((row + t1) * H + h) * V + v, ((slot + ahead).to(tl.int64) * H + h) * K * V + v
        _store_nothing(out_ptr, lost, tokens, count, H * V, one)
        if errors_ptr is not None:
            _store_nothing(errors_ptr, lost, tokens, count, H * V, one)
            _store_nothing(errors_ptr, lost, tokens + apart, count, H * V, one)
        if states_ptr is not None:
            for i in range(0, behind - ahead, one):
                _store_nothing(states_ptr, lost, states + tl.cast(i, tl.int64) * H * K * V, K, V, one)
    if present(final_ptr):
        _store_nothing(final_ptr, lost, (n * H + h) * K * V + v, K, V, one)


@triton.jit
def _store_nothing(ptr, lost, first, count, step, one):  # type: ignore[no-untyped-def]
    """NaN to `count` rows, where numbers are `lost`."""
    for i in range(0, count, one):
        tl.store(ptr + (first + tl.cast(i, tl.int64) * step), lost.to(tl.float32) * float("nan"), mask=lost > 0)
