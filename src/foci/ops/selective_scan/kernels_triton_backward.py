"""Backward of Mamba-1's selective scan in Triton: from the last token to the first, states made again in registers.

With r_{t+1} what token t+1 hands back, u_t = dt_t x_t and a_t = exp(dt_t A):

    dh_t = dy_t C_t^T + r_{t+1};  r_t = a_t dh_t;  du_t = dh_t B_t;  dB_t = u_t dh_t;  dC_t = dy_t h_t
    e_t = r_t h_{t-1} is the gradient of dt_t A:  ddt_t = e_t A + du_t x_t;  dA = sum_t e_t dt_t

dB and dC are sums over channels: a program writes those of its own, and a last launch adds these in their order, as
it does dA and dskip of all stretches. Nothing is added in memory by two programs: same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, strides, target_of
from foci.tiles.channels import four_rows, four_sums, load_four, rates_of, states_of, store_four
from foci.tiles.state import covered, sequence
from foci.tiles.stretches import join, row, rows, stretch

VARY = {"BLOCK_D": (4, 8, 16, 32), "BLOCK_T": (4, 8)}  # what `foci tune` may try: tokens in fours
CHANNELS = 32  # that share a sum for dB and dC, where programs are many: room for B T D K / 4 bytes of them


@triton.jit
def ends_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, dt_ptr, A_ptr, C_ptr, offsets_ptr, decays_ptr, ends_ptr, dy_s, dt_s, A_s, C_s, T, N, D, K,
    STRETCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The map of one stretch for gradients: r behind it -> decay r + end, r at its start."""
    index, d, channels, k, keys, inside, rates = states_of(tl.program_id(0), A_ptr, A_s, D, K, BLOCK_D, BLOCK_K)
    n, b, start, _, first, end, slot = stretch(offsets_ptr, index, T, N, STRETCH)
    if n < 0 or first == start:
        return
    b = tl.cast(b, tl.int64)
    dt_ptr += b * dt_s[0]
    C_ptr += b * C_s[0]
    if dy_ptr is not None:
        dy_ptr += b * dy_s[0]
    r, steps = tl.zeros([BLOCK_D, BLOCK_K], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    count = tl.cdiv(end - first, BLOCK_T)
    for j in range(count):
        t0 = first + (count - 1 - j) * BLOCK_T
        dts = rows(dt_ptr, t0, end, dt_s[1], d * dt_s[2], channels, BLOCK_T)
        if dy_ptr is not None:
            dys = rows(dy_ptr, t0, end, dy_s[1], d * dy_s[2], channels, BLOCK_T)
            cs = rows(C_ptr, t0, end, C_s[1], k * C_s[2], keys, BLOCK_T)
        for i in tl.static_range(BLOCK_T - 1, -1, -1):
            dt = dts[i].to(tl.float32)
            if dy_ptr is not None:
                r += dys[i].to(tl.float32)[:, None] * cs[i].to(tl.float32)[None, :]
            r *= tl.exp2(dt[:, None] * rates)
            steps += dt
    cells = tl.cast(slot, tl.int64) * D * K + d[:, None] * K + k[None, :]
    tl.store(decays_ptr + cells, tl.exp2(steps[:, None] * rates), mask=inside)
    tl.store(ends_ptr + cells, r, mask=inside)


@triton.jit
def after(h, rates, x, dt, key):  # type: ignore[no-untyped-def]
    """The state after a token, from the one before it."""
    x, dt, key = x.to(tl.float32), dt.to(tl.float32), key.to(tl.float32)
    return tl.exp2(dt[:, None] * rates) * h + (dt * x)[:, None] * key[None, :]


@triton.jit
def put(tiles, place, x, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tiles with x at a place that is known as the kernel runs."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.where(place == i, x, tiles[i]),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, skip_ptr, offsets_ptr, kept_ptr, dy_ptr, dfinal_ptr, decays_ptr, ends_ptr,
    dx_ptr, ddt_ptr, dA_ptr, pairs_ptr, dskip_ptr, dstate_ptr,
    x_s, dt_s, A_s, B_s, C_s, skip_s, dy_s, dfinal_s, T, N, D, K, TOKENS,
    STRETCH: tl.constexpr, KEEP: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradients of one stretch: BLOCK_T tokens at a time, whose states are walked again from the last one kept.

    One block of channels after another, GROUP of them, which add to the same dB and dC: wide K leaves room for few.
    """
    groups = tl.cdiv(D, BLOCK_D * GROUP)
    group, index, k = tl.program_id(0) % groups, tl.program_id(0) // groups, tl.arange(0, BLOCK_K)
    # A program without tokens goes on all the same: its dA and dskip, 0, will be added.
    n, b, start, stop, first, end, slot = stretch(offsets_ptr, index, T, N, STRETCH)
    known, keys, k = n >= 0, k < K, k.to(tl.int64)
    n, b, index = tl.cast(tl.maximum(n, 0), tl.int64), tl.cast(b, tl.int64), tl.cast(index, tl.int64)
    x_ptr += b * x_s[0]
    dt_ptr += b * dt_s[0]
    B_ptr += b * B_s[0]
    C_ptr += b * C_s[0]
    if dy_ptr is not None:
        dy_ptr += b * dy_s[0]
    if pairs_ptr is not None:
        pairs_ptr += (tl.cast(group, tl.int64) * TOKENS + b * T) * K * 2
    _, _, _, border = sequence(offsets_ptr, n, T, KEEP)
    four_cells = 2 * k[:, None, None, None] + tl.arange(0, 2)[None, :, None, None]
    SPANS: tl.constexpr = min(KEEP // BLOCK_T, 4)  # whose first states are held at once
    count = tl.cdiv(end - first, SPANS * BLOCK_T)
    for member in range(GROUP):
        if GROUP > 1:
            tl.debug_barrier()  # all sums of the member before are written
        d = (group * GROUP + member) * BLOCK_D + tl.arange(0, BLOCK_D)
        channels, d = d < D, d.to(tl.int64)
        inside, cells = channels[:, None] & keys[None, :], d[:, None] * K + k[None, :]
        alive = inside & known
        rates = rates_of(A_ptr, A_s, d, k, inside)
        r = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
        if dfinal_ptr is not None:
            places = dfinal_ptr + n * dfinal_s[0] + d[:, None] * dfinal_s[1] + k[None, :] * dfinal_s[2]
            r = tl.load(places, mask=alive, other=0.0).to(tl.float32)
        if STRETCH > 0:
            behind = tl.cdiv(stop - end, STRETCH)
            r = join(r, decays_ptr + cells, ends_ptr + cells, slot + behind, behind, D * K, alive, -1, 4)
        if skip_ptr is not None:
            skip = tl.load(skip_ptr + d * skip_s[0], mask=channels, other=0.0).to(tl.float32)[:, None, None]
        dA, dskip = tl.zeros([BLOCK_D, BLOCK_K], tl.float32), tl.zeros([BLOCK_D, 2, 2], tl.float32)
        for j in range(count):
            first0 = first + (count - 1 - j) * (SPANS * BLOCK_T)
            place = tl.cast(border + (first0 - start) // KEEP, tl.int64) * D * K
            h = tl.load(kept_ptr + place + cells, mask=inside, other=0.0)
            starts, spans = (h,) * SPANS, tl.minimum(SPANS, tl.cdiv(end - first0, BLOCK_T))
            for span in range(1 - (first0 - start) % KEEP // BLOCK_T, spans):  # from the state that was kept on
                t0 = first0 + (span - 1) * BLOCK_T
                xs = rows(x_ptr, t0, end, x_s[1], d * x_s[2], channels, BLOCK_T)
                dts = rows(dt_ptr, t0, end, dt_s[1], d * dt_s[2], channels, BLOCK_T)
                bs = rows(B_ptr, t0, end, B_s[1], k * B_s[2], keys, BLOCK_T)
                for i in tl.static_range(BLOCK_T):
                    h = after(h, rates, xs[i], dts[i], bs[i])
                starts = put(starts, span, h, SPANS)
            for span in range(spans - 1, -1, -1):
                t0, h = first0 + span * BLOCK_T, starts[0]
                for i in tl.static_range(1, SPANS):
                    h = tl.where(span == i, starts[i], h)
                if dy_ptr is not None:
                    dys = rows(dy_ptr, t0, end, dy_s[1], d * dy_s[2], channels, BLOCK_T)
                xs = rows(x_ptr, t0, end, x_s[1], d * x_s[2], channels, BLOCK_T)
                dts = rows(dt_ptr, t0, end, dt_s[1], d * dt_s[2], channels, BLOCK_T)
                bs = rows(B_ptr, t0, end, B_s[1], k * B_s[2], keys, BLOCK_T)
                hs = (h,)
                for i in tl.static_range(BLOCK_T):
                    h = after(h, rates, xs[i], dts[i], bs[i])
                    hs = hs + (h,)  # type: ignore[assignment]  # noqa: RUF005
                pairs, dus, es = (), (), ()
                for i in tl.static_range(BLOCK_T - 1, -1, -1):
                    x, dt, key = xs[i].to(tl.float32), dts[i].to(tl.float32), bs[i].to(tl.float32)
                    dy = tl.zeros([BLOCK_D], tl.float32)
                    if dy_ptr is not None:
                        dy = dys[i].to(tl.float32)
                        query = row(C_ptr, t0 + i, end, C_s[1], k * C_s[2], keys).to(tl.float32)
                        r += dy[:, None] * query[None, :]
                    if pairs_ptr is not None:
                        pairs = (tl.join((dt * x)[:, None] * r, dy[:, None] * hs[i + 1]),) + pairs  # type: ignore[assignment]  # noqa: RUF005
                        if i % 4 == 0:
                            t = four_rows(t0 + i)[:, None, :, :]
                            there, found = pairs_ptr + t.to(tl.int64) * K * 2, keys[:, None, None, None] & (t < end)
                            four = four_sums(pairs, 0)
                            if GROUP > 1:
                                four += tl.load(there + four_cells, mask=found & (member > 0), other=0.0)
                                tl.debug_barrier()  # all have read before any writes
                            tl.store(there + four_cells, four, mask=found)
                            pairs = ()
                    du = r * key[None, :]
                    dus = (du,) + dus  # type: ignore[assignment]  # noqa: RUF005
                    r *= tl.exp2(dt[:, None] * rates)
                    e = r * hs[i]
                    if dA_ptr is not None:
                        dA += e * dt[:, None]
                    es = (e * (rates * 0.6931471805599453),) + es  # type: ignore[assignment]  # noqa: RUF005
                    if i % 4 == 0:
                        here = load_four(x_ptr, t0 + i, end, x_s, d, channels)
                        du = four_sums(dus, 1)
                        if dy_ptr is not None:
                            pull = load_four(dy_ptr, t0 + i, end, dy_s, d, channels)
                            if dskip_ptr is not None:
                                dskip += pull * here
                        if dx_ptr is not None:
                            dx = du * load_four(dt_ptr, t0 + i, end, dt_s, d, channels)
                            if skip_ptr is not None and dy_ptr is not None:
                                dx += skip * pull
                            store_four(dx_ptr + b * T * D, dx, t0 + i, end, d, channels, D)
                        if ddt_ptr is not None:
                            store_four(ddt_ptr + b * T * D, four_sums(es, 1) + du * here, t0 + i, end, d, channels, D)
                        dus, es = (), ()
        if dA_ptr is not None:
            tl.store(dA_ptr + index * D * K + cells, dA, mask=inside)
        if dskip_ptr is not None:
            tl.store(dskip_ptr + index * D + d, tl.sum(tl.sum(dskip, 2), 1), mask=channels)
        if dstate_ptr is not None:
            tl.store(dstate_ptr + n * D * K + cells, r.to(dstate_ptr.dtype.element_ty), mask=alive & (first == start))
        if GROUP > 1:
            tl.debug_barrier()  # what others wrote of dB and dC is what the next block of channels adds to


@triton.jit
def total(parts_ptr, block, count, size, BLOCK: tl.constexpr, BATCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of `count` parts of `size` numbers each, in their order: one block of it."""
    places = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    for part0 in range(0, count, BATCH):
        part = part0 + tl.arange(0, BATCH)
        there = parts_ptr + part.to(tl.int64)[:, None] * size + places[None, :]
        found += tl.sum(tl.load(there, mask=(part < count)[:, None] & (places < size)[None, :], other=0.0), 0)
    return found


@triton.jit
def totals_kernel(  # type: ignore[no-untyped-def]
    pairs_ptr, dA_parts_ptr, dskip_parts_ptr, dB_ptr, dC_ptr, dA_ptr, dskip_ptr,
    offsets_ptr, groups, programs, tokens, channels, cells, T, N, K, BLOCK: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """dB and dC of all groups of channels, dA and dskip of all programs; each sum has its own programs here."""
    index, tokens = tl.program_id(0), tl.cast(tokens, tl.int64)
    if pairs_ptr is not None:
        if (index >= 0) & (index < tl.cdiv(2 * tokens, BLOCK)):
            both = total(pairs_ptr, index, groups, 2 * tokens, BLOCK, BATCH)
            dB, dC = tl.split(tl.reshape(both, [BLOCK // 2, 2]))
            places = tl.cast(index, tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
            if offsets_ptr is not None:
                start, end = covered(offsets_ptr, N, T)
                known = (places // K >= start) & (places // K < end)
                dB, dC = tl.where(known, dB, 0.0), tl.where(known, dC, 0.0)
            if dB_ptr is not None:
                tl.store(dB_ptr + places, dB.to(dB_ptr.dtype.element_ty), mask=places < tokens)
            if dC_ptr is not None:
                tl.store(dC_ptr + places, dC.to(dC_ptr.dtype.element_ty), mask=places < tokens)
        index -= tl.cdiv(2 * tokens, BLOCK)
    if dA_ptr is not None:
        if (index >= 0) & (index < tl.cdiv(cells, BLOCK)):
            places = tl.cast(index, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            dA = total(dA_parts_ptr, index, programs, cells, BLOCK, BATCH)
            tl.store(dA_ptr + places, dA.to(dA_ptr.dtype.element_ty), mask=places < cells)
        index -= tl.cdiv(cells, BLOCK)
    if dskip_ptr is not None:  # noqa: SIM102  a constant and a tensor
        if (index >= 0) & (index < tl.cdiv(channels, BLOCK)):
            places = tl.cast(index, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            dskip = total(dskip_parts_ptr, index, programs, channels, BLOCK, BATCH)
            tl.store(dskip_ptr + places, dskip.to(dskip_ptr.dtype.element_ty), mask=places < channels)


def rule(D: int, K: int, walks: int, target: Target) -> Config:
    """Eight states a thread, of one warp as long as that has two channels: sums within a warp wait for no other.

    Four where `walks` of all channels are too few for a program a processor, as each token waits for the one before it.
    """
    BLOCK_K, lanes = triton.next_power_of_2(K), target.lanes
    warps = max(1, BLOCK_K // (4 * lanes))
    states = 4 if walks * D * BLOCK_K <= 4 * warps * lanes * target.processors else 8
    BLOCK_D = max(1, min(states * warps * lanes // BLOCK_K, lanes, triton.next_power_of_2(D)))
    return Config({"BLOCK_D": BLOCK_D, "BLOCK_K": BLOCK_K, "BLOCK_T": 4}, warps=warps, stages=1)


def _parts(call: Any, found: Sequence[Tensor | None], groups: int, programs: int) -> list[Tensor | None]:
    """Room for dA by program, dB and dC side by side by group of channels, dskip by program, where asked for."""
    B, T, D, K, _ = call.sizes
    wanted = (
        (found[2] is not None, programs * D * K),
        (found[3] is not None or found[4] is not None, 2 * groups * B * T * K),
        (found[5] is not None, programs * D),
    )
    return [torch.empty(size, dtype=torch.float32, device=call.x.device) if need else None for need, size in wanted]


def _add_up(call: Any, parts: list[Tensor | None], sums: list[Tensor | None], groups: int, programs: int) -> None:
    """dA, dB, dC and dskip of their parts, in one launch."""
    B, T, D, K, N = call.sizes
    config = Config({"BLOCK": 256, "BATCH": 8}, warps=4, stages=1)
    (dA_parts, pairs, dskip_parts), (dA, dB, dC, dskip) = parts, sums
    sizes = (pairs is not None and 2 * B * T * K, dA_parts is not None and D * K, dskip_parts is not None and D)
    if any(sizes):
        grid = sum(-(-size // config["BLOCK"]) for size in sizes)
        launch(
            totals_kernel, (grid,), pairs, dA_parts, dskip_parts, dB, dC, dA, dskip,
            call.offsets, groups, programs, B * T * K, D, D * K, T, N, K, config=config,
        )  # fmt: skip


def backward(
    call: Any, kept: Tensor, keep: int, grads: tuple[Tensor | None, Tensor | None], found: Sequence[Tensor | None],
    cut: Callable[[Target, int], Any],
) -> None:  # fmt: skip
    """Fills the gradients of x, dt, A, B, C, skip and state (`found`): two launches, three where sequences are cut.

    `kept` [slots,D,K] has the states at every `keep`-th token; `cut`: ops/stretches.py.
    """
    B, T, D, K, N = call.sizes
    (dy, dfinal), target = grads, target_of(kept.device)
    key = (call.x.dtype, triton.next_power_of_2(K), call.offsets is not None)
    config = configure("selective_scan_backward", key, partial(rule, D, K, cut(target, 1).programs), target, VARY)
    blocks, GROUP = -(-D // config["BLOCK_D"]), max(1, min(CHANNELS, triton.next_power_of_2(D)) // config["BLOCK_D"])
    groups = -(-blocks // GROUP)
    while GROUP > 1 and cut(target, groups * config.warps).programs * groups * config.warps < 4 * target.processors:
        GROUP //= 2  # few programs: there is little to share, and one block after another takes longer
        groups = -(-blocks // GROUP)
    STRETCH, programs, slots = cut(target, groups * config.warps)
    decays = ends = None
    if STRETCH:
        decays, ends = (torch.empty(slots, D, K, dtype=torch.float32, device=kept.device) for _ in range(2))
        launch(
            ends_kernel, (slots * blocks,), dy, call.dt, call.A, call.C, call.offsets, decays, ends,
            *map(strides, (dy, call.dt, call.A, call.C)), T, N, D, K, config=config, STRETCH=STRETCH,
        )  # fmt: skip
    inputs = (call.x, call.dt, call.A, call.B, call.C, call.skip)
    dx, ddt, dA, dB, dC, dskip, dstate = found
    dA_parts, pairs, dskip_parts = parts = _parts(call, found, groups, programs)
    launch(
        backward_kernel, (programs * groups,), *inputs, call.offsets, kept, dy, dfinal, decays, ends,
        dx, ddt, dA_parts, pairs, dskip_parts, dstate,
        *map(strides, (*inputs, dy, dfinal)), T, N, D, K, B * T, config=config, STRETCH=STRETCH, KEEP=keep,
        GROUP=GROUP,
    )  # fmt: skip
    _add_up(call, parts, [dA, dB, dC, dskip], groups, programs)
