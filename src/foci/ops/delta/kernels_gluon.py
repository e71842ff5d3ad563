"""The delta rule's walk on Hopper by warps with work of their own: 128 columns of a state a program, for inference.

What `token_walk_kernel` does (kernels_triton_token_walks.py: equations, letters, pieces). There one program has 64
columns, and each of its products waits for the one before it; two such programs find no room beside each other. Here
four warps load, and two times four walk, 64 columns each: they share keys, queries, X and A where TMA has brought them
and wait for nothing else, so one half has the tensor cores while the other rounds, scales and stores.

What is not a state is two bfloat16 there. Here it is one, and 4 products in place of 7, but of exact tokens: those
from the first one on in their chunk whose keys are alike (kernels_triton_chunks.py). A chunk that has some loads and
multiplies both, and those before have 0 as the second, so that what comes later changes no bit.

Gluon says where every number lies: a product's sums are the next one's left operand in the same registers, turned over
as there. It has no interpreter: the tests hold these kernels to the equation as threads on a CPU, and on a GPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from foci.core.tune import Config, launch, strides
from foci.tiles.near import UNREAD
from foci.tiles.pieces import FORGOTTEN, share
from foci.tiles.state import sequence

CHUNK = 64
HALF: gl.constexpr = gl.constexpr(64)  # columns of a state that four warps have: the rows of a product
STAGES = 2  # chunks in shared memory, which has no room for a third
BY_TOKEN: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of sums [HALF,tokens]
BY_KEY: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # of sums [HALF,K]
OF_TOKENS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, BY_TOKEN.value, 2))  # of what multiplies to such sums
OF_KEYS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, BY_KEY.value, 2))


@gluon.jit
def _plus(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit
def _rounded(x, exact, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """x [HALF,tokens] rounded, and what that left of tokens that are `exact`, as left operands."""
    high = x.to(gl.bfloat16)
    low = high
    if exact is not None:
        low = gl.where(exact > 0, x - high.to(gl.float32), 0.0).to(gl.bfloat16)
    return gl.convert_layout(high, layout), gl.convert_layout(low, layout)


@gluon.jit
def _remembered(reach_ptr, step, count):  # type: ignore[no-untyped-def]
    """`remembered` of tiles/pieces.py."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    begin = 0
    reaches, worst = 0.0, 0.0
    for i in range(0, count, 128):
        at = count - 1 - i - gl.arange(0, 128, layout=layout)
        reach = gl.load(reach_ptr + at.to(gl.int64) * step, mask=at >= 0, other=0.0)
        sums = reaches + gl.associative_scan(reach, 0, _plus)
        begin = gl.maximum(begin, gl.max(gl.where(sums <= FORGOTTEN, at, 0), 0))
        reaches, worst = reaches + gl.sum(reach, 0), gl.maximum(worst, gl.max(reach, 0))
    return begin, gl.where(worst > 2 * UNREAD, float("nan"), 0.0)


@gluon.jit
def _load(  # type: ignore[no-untyped-def]
    there, tiles, full, empty, span, exact, exact_ptr, start, H, v0, CHUNK: gl.constexpr, STAGES: gl.constexpr
):
    """What those who load do: chunk by chunk, when both halves have left the place.

    q and A for what is read; of X and A what rounding left where some tokens are exact.
    """
    q_there, k_there, v_there, XA_there, rows_there = there
    q_tiles, k_tiles, v_tiles, X_tiles, A_tiles, rows, marks, _ = tiles
    begin, own, end = span
    K: gl.constexpr = k_tiles.shape[2]
    each: gl.constexpr = 2 * CHUNK * CHUNK  # bytes
    least: gl.constexpr = 2 * CHUNK * (K + 2 * HALF) + each + 8 * CHUNK
    read: gl.constexpr = 2 * CHUNK * K + each
    lost: gl.constexpr = each + 4 * CHUNK
    exact = exact != 0.0
    for i in range(begin, end):
        then = gl.load(exact_ptr + (i + 1) * 3 * H * CHUNK, mask=i + 1 < end, other=0.0) != 0.0
        at, t0, reads = (i - begin) % STAGES, start + i * CHUNK, i >= own
        bar, both = full.index(at), reads & exact
        mbarrier.wait(empty.index(at), ((i - begin) // STAGES & 1) ^ 1)
        mbarrier.expect(bar, least, pred=(i < own) & (exact == 0))
        mbarrier.expect(bar, least + lost, pred=(i < own) & exact)
        mbarrier.expect(bar, least + read, pred=reads & (exact == 0))
        mbarrier.expect(bar, least + read + lost + each, pred=both)
        tma.async_copy_global_to_shared(k_there, [t0, 0], bar, k_tiles.index(at))
        tma.async_copy_global_to_shared(q_there, [t0, 0], bar, q_tiles.index(at), pred=reads)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(v_there, [t0, v0 + half * HALF], bar, v_tiles.index(2 * at + half))
        for part in gl.static_range(2):
            tma.async_copy_global_to_shared(rows_there, [3 * H * i + part, 0], bar, rows.index(2 * at + part))
        tma.async_copy_global_to_shared(rows_there, [3 * H * i + 2, 0], bar, marks.index(at), pred=exact)
        tma.async_copy_global_to_shared(XA_there, [t0, 0], bar, X_tiles.index(2 * at))
        tma.async_copy_global_to_shared(XA_there, [t0, CHUNK], bar, X_tiles.index(2 * at + 1), pred=exact)
        tma.async_copy_global_to_shared(XA_there, [t0, 2 * CHUNK], bar, A_tiles.index(2 * at), pred=reads)
        tma.async_copy_global_to_shared(XA_there, [t0, 3 * CHUNK], bar, A_tiles.index(2 * at + 1), pred=both)
        exact = then


@gluon.jit
def _chunk(  # type: ignore[no-untyped-def]
    S, gone, scale, turn, t0, v0, out_there, tiles, full, empty, half: gl.constexpr, READS: gl.constexpr,
    EXACT: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The state behind a chunk; READS: what its tokens read is stored. EXACT: some of its tokens are."""
    q_tiles, k_tiles, v_tiles, X_tiles, A_tiles, rows, marks, outs = tiles
    at = turn % STAGES
    mbarrier.wait(full.index(at), turn // STAGES & 1)
    k, v = k_tiles.index(at), v_tiles.index(2 * at + half).permute((1, 0))
    X, X_lost = X_tiles.index(2 * at).permute((1, 0)), X_tiles.index(2 * at + 1).permute((1, 0))
    none = gl.zeros([HALF, CHUNK], gl.float32, BY_TOKEN)
    operand = gl.convert_layout(S.to(gl.bfloat16), OF_TOKENS)
    read = warpgroup_mma(operand, k.permute((1, 0)), none, use_acc=False, is_async=True)
    if READS:
        o = warpgroup_mma(operand, q_tiles.index(at).permute((1, 0)), none, use_acc=False, is_async=True)
    value = v.load(BY_TOKEN).to(gl.float32)
    rise, write = rows.index(2 * at).load(BY_TOKEN), rows.index(2 * at + 1).load(BY_TOKEN)
    exact = marks.index(at).load(BY_TOKEN) if EXACT else None
    read = warpgroup_mma_wait(1 if READS else 0, deps=[read])
    high, low = _rounded(value - read * rise, exact, OF_TOKENS)
    d = none
    if EXACT:
        d = warpgroup_mma(low, X, d, use_acc=False, is_async=True)
        d = warpgroup_mma(high, X_lost, d, is_async=True)
    d = warpgroup_mma(high, X, d, use_acc=EXACT, is_async=True)
    S *= gone
    if READS:
        o = warpgroup_mma_wait(3 if EXACT else 1, deps=[o]) * rise * scale
    d = warpgroup_mma_wait(0, deps=[d])
    if READS:
        A, A_lost = A_tiles.index(2 * at).permute((1, 0)), A_tiles.index(2 * at + 1).permute((1, 0))
        high, low = _rounded(d, exact, OF_TOKENS)
        if EXACT:
            o = warpgroup_mma(low, A, o, is_async=True)
            o = warpgroup_mma(high, A_lost, o, is_async=True)
        o = warpgroup_mma(high, A, o, is_async=True)
    high, low = _rounded(d * write, exact, OF_KEYS)
    if EXACT:
        S = warpgroup_mma(low, k, S, is_async=True)
    S = warpgroup_mma(high, k, S, is_async=True)
    if READS:
        o = warpgroup_mma_wait(2 if EXACT else 1, deps=[o])
        out = outs.index(half)
        tma.store_wait(0)
        out.permute((1, 0)).store(o.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_there, [t0, v0], out)
    S = warpgroup_mma_wait(0, deps=[S])
    mbarrier.arrive(empty.index(at), count=1)
    return S


@gluon.jit
def _walk(  # type: ignore[no-untyped-def]
    half: gl.constexpr, out_there, tiles, full, empty, span, start, state_ptr, state_strides, first_ptr, slow,
    gone, exact, total_ptr, exact_ptr, final_ptr, lost_ptr, lost, last, scale, zero, H, V, v0, CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """What four warps do: HALF columns from v0 on, or behind those, through the chunks of a piece."""
    begin, own, end = span
    K: gl.constexpr = tiles[1].shape[2]
    v0 += half * HALF
    v = (v0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, BY_KEY)))[:, None]
    c = gl.arange(0, K, layout=gl.SliceLayout(0, BY_KEY))[None, :]
    S = gl.zeros([HALF, K], gl.float32, BY_KEY)
    if state_ptr is not None:
        S = gl.load(state_ptr + c.to(gl.int64) * state_strides[2] + v.to(gl.int64) * state_strides[3]).to(gl.float32)
    S = S * gl.where(begin == 0, 1.0, 0.0) + lost
    if first_ptr is not None:  # noqa: SIM102  a constant and a tensor
        if slow:
            S += gl.load(first_ptr + ((c + zero) * V + (v + zero)))
    for phase in gl.static_range(2):
        first, stop = (begin, own) if phase == 0 else (own, end)
        for i in range(first, stop):
            gone_then = gl.load(total_ptr + (i + 1) * H, mask=i + 1 < end, other=0.0)
            exact_then = gl.load(exact_ptr + (i + 1) * 3 * H * CHUNK, mask=i + 1 < end, other=0.0)
            turn, t0 = i - begin, start + i * CHUNK
            if exact != 0.0:
                S = _chunk(
                    S, gone, scale, turn, t0, v0, out_there, tiles, full, empty, half, phase == 1, True, CHUNK, STAGES
                )
            else:
                S = _chunk(
                    S, gone, scale, turn, t0, v0, out_there, tiles, full, empty, half, phase == 1, False, CHUNK, STAGES
                )
            gone, exact = gone_then, exact_then
    tma.store_wait(0)
    if lost_ptr is not None:
        at = v0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, BY_KEY))
        gl.store(lost_ptr + at, gl.max(gl.where(S * 0.0 == 0.0, 0, 1), 1))
    if last:
        gl.store(final_ptr + ((c + zero) * V + (v + zero)), S)  # addresses kept from before would cost registers


@gluon.jit
def wide_walk_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, XA_ptr, rows_ptr, total_ptr, reach_ptr, slow_ptr, first_ptr, state_ptr,
    offsets_ptr, out_ptr, final_ptr, lost_ptr,
    q_strides, k_strides, v_strides, state_strides, scale, zero, T, H, R, V, pieces,
    CHUNK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """2 HALF columns of one head's state through one of the `pieces` of a sequence (one, without `reach_ptr`)."""
    K: gl.constexpr = BLOCK_K
    v0 = gl.program_id(0) % (V // (2 * HALF)) * 2 * HALF
    rest = gl.program_id(0) // (V // (2 * HALF))
    h, n, piece = (rest % H).to(gl.int64), (rest // H // pieces).to(gl.int64), rest // H % pieces
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    row, count = gl.to_tensor(b).to(gl.int64), (stop - start + CHUNK - 1) // CHUNK
    tokens, first = row * T * H + h, gl.to_tensor(slot).to(gl.int64) * H + h
    begin, own, end = 0, 0, count
    lost, slow = 0.0, False
    if reach_ptr is not None:
        own, end = share(piece, pieces, count)
        begin, lost = _remembered(reach_ptr + first, H, own)
        if slow_ptr is not None:
            slow = gl.load(slow_ptr + rest) != 0
            begin = gl.where(slow, own, begin)
            first_ptr += rest.to(gl.int64) * K * V
        begin = gl.where((own == end) & (piece < pieces - 1), end, begin)  # without a chunk nobody has anything to do
    total_ptr += first
    rows_ptr += 3 * first * CHUNK
    exact_ptr = rows_ptr + (3 * CHUNK - 1)  # of the last token: where one is exact, it is
    # Asked for before the descriptors are made, which takes as long.
    gone = gl.load(total_ptr + begin * H, mask=begin < end, other=0.0)
    exact = gl.load(exact_ptr + begin * 3 * H * CHUNK, mask=begin < end, other=0.0)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, K], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.bfloat16)
    line: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    q_ptr += row * q_strides[0] + h // R * q_strides[2]
    k_ptr += row * k_strides[0] + h // R * k_strides[2]
    v_ptr += row * v_strides[0] + h * v_strides[2]
    XA_ptr += 4 * tokens * CHUNK
    each: gl.constexpr = [CHUNK, CHUNK]
    there = (
        tma.make_tensor_descriptor(q_ptr, [stop, K], [q_strides[1], 1], [CHUNK, K], wide),
        tma.make_tensor_descriptor(k_ptr, [stop, K], [k_strides[1], 1], [CHUNK, K], wide),
        tma.make_tensor_descriptor(v_ptr, [stop, V], [v_strides[1], 1], each, square),
        tma.make_tensor_descriptor(XA_ptr, [stop, 4 * CHUNK], [4 * H * CHUNK, 1], each, square),
        tma.make_tensor_descriptor(rows_ptr, [3 * H * count, CHUNK], [CHUNK, 1], [1, CHUNK], line),
    )
    tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, K], wide),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, K], wide),
        gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, CHUNK, HALF], square),
        gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, CHUNK, CHUNK], square),
        gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, CHUNK, CHUNK], square),
        gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, CHUNK], line),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, CHUNK], line),
        gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, HALF], square),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(full.index(at), count=1)
        mbarrier.init(empty.index(at), count=2)
    if state_ptr is not None:
        state_ptr += n * state_strides[0] + h * state_strides[1]
    out_there = tma.make_tensor_descriptor(out_ptr + tokens * V, [stop, V], [H * V, 1], each, square)
    final_ptr += (n * H + h) * K * V
    if lost_ptr is not None:
        lost_ptr += rest * V
    last, span = piece == pieces - 1, (begin, own, end)
    gl.warp_specialize(
        [
            (_walk, (
                gl.constexpr(0), out_there, tiles, full, empty, span, start, state_ptr, state_strides, first_ptr,
                slow, gone, exact, total_ptr, exact_ptr, final_ptr, lost_ptr, lost, last, scale, zero, H, V, v0,
                CHUNK, STAGES,
            )),
            (_walk, (
                gl.constexpr(1), out_there, tiles, full, empty, span, start, state_ptr, state_strides, first_ptr,
                slow, gone, exact, total_ptr, exact_ptr, final_ptr, lost_ptr, lost, last, scale, zero, H, V, v0,
                CHUNK, STAGES,
            )),
            (_load, (there, tiles, full, empty, span, exact, exact_ptr, start, H, v0, CHUNK, STAGES)),
        ],
        [4, 4],
        [240, 24],  # registers of a thread: what one warp does not need the others have
    )  # fmt: skip


def forward(
    call: Any, parts: None, made: tuple[Tensor, Tensor, Any], pieces: int, lost: Tensor | None, out: Tensor,
    final: Tensor, slow: Tensor | None, first: Tensor | None,
) -> None:  # fmt: skip
    """`forward` of kernels_triton_token_walks.py of calls that are `wider` there; nothing is kept for a backward."""
    _, T, G, H, K, V, N = call.sizes
    inverse, _, gated = made
    launch(
        wide_walk_kernel, (N * H * pieces * (V // 128),),
        call.q, call.k, call.v, inverse, gated.rows, gated.total, gated.reach, slow, first,
        call.state, call.offsets, out, final, lost,
        call.q.stride(), call.k.stride(), call.v.stride(), strides(call.state), call.scale, 0,
        T, H, H // G, V, pieces,
        config=Config(warps=4, stages=STAGES), CHUNK=CHUNK, BLOCK_K=K, STAGES=STAGES,
    )  # fmt: skip
