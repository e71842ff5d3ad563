"""Backward of Mamba-1's selective scan in Triton: from the last token to the first, states made again in registers.

With r_{t+1} what token t+1 hands back, u_t = dt_t x_t and a_t = exp(dt_t A):

    dh_t = dy_t C_t^T + r_{t+1};  r_t = a_t dh_t;  du_t = dh_t B_t;  dB_t = u_t dh_t;  dC_t = dy_t h_t
    e_t = r_t h_{t-1} is the gradient of dt_t A:  ddt_t = e_t A + du_t x_t;  dA = sum_t e_t dt_t

dB and dC are sums over channels: a program writes those of its block, and a last launch adds the blocks in their order,
as it does dA and dskip of all stretches. Nothing is added in memory by two programs: same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, target_of
from foci.tiles.state import sequence
from foci.tiles.stretches import decay_rates, join, rows, stretch


@triton.jit
def ends_kernel(
    dy_ptr, dt_ptr, A_ptr, C_ptr, offsets_ptr, decays_ptr, ends_ptr, dy_s, dt_s, A_s, C_s, T, N, D, K,
    STRETCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The map of one stretch for gradients: r behind it -> decay r + end, r at its start."""
    blocks = tl.cdiv(D, BLOCK_D)
    d, k = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    n, b, start, _, first, end, slot = stretch(offsets_ptr, tl.program_id(0) // blocks, T, N, STRETCH)
    if n < 0 or first == start:
        return
    channels, keys, d, b = d < D, k < K, d.to(tl.int64), tl.cast(b, tl.int64)
    inside = channels[:, None] & keys[None, :]
    rates = decay_rates(A_ptr + d[:, None] * A_s[0] + k[None, :] * A_s[1], inside)
    dt_ptr += b * dt_s[0] + d * dt_s[2]
    C_ptr += b * C_s[0] + k * C_s[2]
    if dy_ptr is not None:
        dy_ptr += b * dy_s[0] + d * dy_s[2]
    r, steps = tl.zeros([BLOCK_D, BLOCK_K], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    count = tl.cdiv(end - first, BLOCK_T)
    for j in range(count):
        t0 = first + (count - 1 - j) * BLOCK_T
        dts = rows(dt_ptr, t0, end, dt_s[1], channels, BLOCK_T)
        if dy_ptr is not None:
            dys, cs = rows(dy_ptr, t0, end, dy_s[1], channels, BLOCK_T), rows(C_ptr, t0, end, C_s[1], keys, BLOCK_T)
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
def advance(h, rates, x_ptr, dt_ptr, B_ptr, t, end, x_step, dt_step, B_step, channels, keys):  # type: ignore[no-untyped-def]
    """The state after token t, from the one before it."""
    t = tl.cast(t, tl.int64)
    x = tl.load(x_ptr + t * x_step, mask=channels & (t < end), other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + t * dt_step, mask=channels & (t < end), other=0.0).to(tl.float32)
    key = tl.load(B_ptr + t * B_step, mask=keys & (t < end), other=0.0).to(tl.float32)
    return tl.exp2(dt[:, None] * rates) * h + (dt * x)[:, None] * key[None, :]


@triton.jit
def backward_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, skip_ptr, offsets_ptr, kept_ptr, dy_ptr, dfinal_ptr, decays_ptr, ends_ptr,
    dx_ptr, ddt_ptr, dA_ptr, dB_ptr, dC_ptr, dskip_ptr, dstate_ptr,
    x_s, dt_s, A_s, B_s, C_s, skip_s, dy_s, dfinal_s, T, N, D, K, TOKENS,
    STRETCH: tl.constexpr, KEEP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Gradients of one stretch: BLOCK_T tokens at a time, whose states are walked again from the last one kept."""
    blocks = tl.cdiv(D, BLOCK_D)
    block, index = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    d, k = block * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    # A program without tokens goes on all the same: its dA and dskip, 0, will be added.
    n, b, start, stop, first, end, slot = stretch(offsets_ptr, index, T, N, STRETCH)
    channels, keys, d = d < D, k < K, d.to(tl.int64)
    inside, cells = channels[:, None] & keys[None, :], d[:, None] * K + k[None, :]
    alive = inside & (n >= 0)
    n, b, block = tl.cast(tl.maximum(n, 0), tl.int64), tl.cast(b, tl.int64), block.to(tl.int64)
    rates = decay_rates(A_ptr + d[:, None] * A_s[0] + k[None, :] * A_s[1], inside)
    r = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    if dfinal_ptr is not None:
        places = dfinal_ptr + n * dfinal_s[0] + d[:, None] * dfinal_s[1] + k[None, :] * dfinal_s[2]
        r = tl.load(places, mask=alive, other=0.0).to(tl.float32)
    if STRETCH > 0:
        behind = tl.cdiv(stop - end, STRETCH)
        r = join(r, decays_ptr + cells, ends_ptr + cells, slot + behind, behind, D * K, alive, -1, 4)
    skip, dskip = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + d * skip_s[0], mask=channels, other=0.0).to(tl.float32)
    x_ptr += b * x_s[0] + d * x_s[2]
    dt_ptr += b * dt_s[0] + d * dt_s[2]
    B_ptr += b * B_s[0] + k * B_s[2]
    C_ptr += b * C_s[0] + k * C_s[2]
    if dy_ptr is not None:
        dy_ptr += b * dy_s[0] + d * dy_s[2]
    _, _, _, border = sequence(offsets_ptr, n, T, KEEP)
    dA = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    count = tl.cdiv(end - first, BLOCK_T)
    for j in range(count):
        t0 = first + (count - 1 - j) * BLOCK_T
        if dy_ptr is not None:
            dys = rows(dy_ptr, t0, end, dy_s[1], channels, BLOCK_T)
        place = tl.cast(border + (t0 - start) // KEEP, tl.int64) * D * K
        h = tl.load(kept_ptr + place + cells, mask=inside, other=0.0)
        for t in range(t0 - (t0 - start) % KEEP, t0):
            h = advance(h, rates, x_ptr, dt_ptr, B_ptr, t, end, x_s[1], dt_s[1], B_s[1], channels, keys)
        hs = (h,)
        for i in tl.static_range(BLOCK_T):
            h = advance(h, rates, x_ptr, dt_ptr, B_ptr, t0 + i, end, x_s[1], dt_s[1], B_s[1], channels, keys)
            hs = hs + (h,)  # noqa: RUF005
        for i in tl.static_range(BLOCK_T - 1, -1, -1):
            t = tl.cast(t0 + i, tl.int64)
            here = channels & (t < end)
            x = tl.load(x_ptr + t * x_s[1], mask=here, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + t * dt_s[1], mask=here, other=0.0).to(tl.float32)
            key = tl.load(B_ptr + t * B_s[1], mask=keys & (t < end), other=0.0).to(tl.float32)
            dy = tl.zeros([BLOCK_D], tl.float32)
            if dy_ptr is not None:
                dy = dys[i].to(tl.float32)
                query = tl.load(C_ptr + t * C_s[1], mask=keys & (t < end), other=0.0).to(tl.float32)
                r += dy[:, None] * query[None, :]
            if dB_ptr is not None:
                both = tl.sum(tl.join((dt * x)[:, None] * r, dy[:, None] * hs[i + 1]), 0)
                dB, dC = tl.split(both)
                place = ((block * TOKENS + b * T) + t) * K + k
                tl.store(dB_ptr + place, dB, mask=keys & (t < end))
                tl.store(dC_ptr + place, dC, mask=keys & (t < end))
            du = tl.sum(r * key[None, :], 1)
            r *= tl.exp2(dt[:, None] * rates)
            e = r * hs[i]
            dA += e * dt[:, None]
            if dx_ptr is not None:
                tl.store(dx_ptr + (b * T + t) * D + d, (du * dt + skip * dy).to(dx_ptr.dtype.element_ty), mask=here)
            if ddt_ptr is not None:
                ddt = tl.sum(e * rates, 1) * 0.6931471805599453 + du * x
                tl.store(ddt_ptr + (b * T + t) * D + d, ddt.to(ddt_ptr.dtype.element_ty), mask=here)
            dskip += dy * x
    if dA_ptr is not None:
        tl.store(dA_ptr + tl.cast(index, tl.int64) * D * K + cells, dA, mask=inside)
    if dskip_ptr is not None:
        tl.store(dskip_ptr + tl.cast(index, tl.int64) * D + d, dskip, mask=channels)
    if dstate_ptr is not None:
        tl.store(dstate_ptr + n * D * K + cells, r.to(dstate_ptr.dtype.element_ty), mask=alive & (first == start))


@triton.jit
def total(parts_ptr, out_ptr, block, count, size, BLOCK: tl.constexpr, BATCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = the sum of `count` parts of `size` numbers each, in their order."""
    places = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    for part0 in range(0, count, BATCH):
        part = part0 + tl.arange(0, BATCH)
        there = parts_ptr + part.to(tl.int64)[:, None] * size + places[None, :]
        found += tl.sum(tl.load(there, mask=(part < count)[:, None] & (places < size)[None, :], other=0.0), 0)
    tl.store(out_ptr + places, found.to(out_ptr.dtype.element_ty), mask=places < size)


@triton.jit
def totals_kernel(
    dB_parts_ptr, dC_parts_ptr, dA_parts_ptr, dskip_parts_ptr, dB_ptr, dC_ptr, dA_ptr, dskip_ptr,
    blocks, programs, tokens, channels, cells, BLOCK: tl.constexpr, BATCH: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """dB and dC of all blocks of channels, dA and dskip of all programs; each output has its own programs here."""
    index = tl.program_id(0)
    if dB_ptr is not None:
        if (index >= 0) & (index < tl.cdiv(tokens, BLOCK)):
            total(dB_parts_ptr, dB_ptr, index, blocks, tokens, BLOCK, BATCH)
        index -= tl.cdiv(tokens, BLOCK)
    if dC_ptr is not None:
        if (index >= 0) & (index < tl.cdiv(tokens, BLOCK)):
            total(dC_parts_ptr, dC_ptr, index, blocks, tokens, BLOCK, BATCH)
        index -= tl.cdiv(tokens, BLOCK)
    if dA_ptr is not None:
        if (index >= 0) & (index < tl.cdiv(cells, BLOCK)):
            total(dA_parts_ptr, dA_ptr, index, programs, cells, BLOCK, BATCH)
        index -= tl.cdiv(cells, BLOCK)
    if dskip_ptr is not None:
        if (index >= 0) & (index < tl.cdiv(channels, BLOCK)):
            total(dskip_parts_ptr, dskip_ptr, index, programs, channels, BLOCK, BATCH)


def rule(D: int, K: int, target: Target) -> Config:
    """Four states a thread, as those of all BLOCK_T tokens are in registers; many channels, as dB adds up over them."""
    BLOCK_K = triton.next_power_of_2(K)
    lanes = 64 if target.kind == "hip" else 32
    warps = 8 if lanes == 32 else 4
    BLOCK_D = max(1, min(4 * warps * lanes // BLOCK_K, 128, triton.next_power_of_2(D)))
    return Config({"BLOCK_D": BLOCK_D, "BLOCK_K": BLOCK_K, "BLOCK_T": 16}, warps=warps, stages=1)


def strides(*tensors: Tensor | None) -> list[tuple[int, ...] | None]:
    return [None if tensor is None else tensor.stride() for tensor in tensors]


def _parts(call: Any, needs: list[bool], blocks: int, programs: int) -> list[Tensor | None]:
    """Room for dB, dC by block of channels and dA, dskip by program, where they are asked for."""
    B, T, D, K, _ = call.sizes
    both = needs[3] or needs[4]
    sizes = ((both, blocks * B * T * K), (both, blocks * B * T * K), (needs[2], programs * D * K))
    return [
        torch.empty(size, dtype=torch.float32, device=call.x.device) if need else None
        for need, size in (*sizes, (needs[5] and call.skip is not None, programs * D))
    ]


def _add_up(call: Any, parts: list[Tensor | None], sums: list[Tensor | None], blocks: int, programs: int) -> None:
    """dB, dC, dA and dskip of their parts, in one launch."""
    B, T, D, K, _ = call.sizes
    config = Config({"BLOCK": 256, "BATCH": 8}, warps=4, stages=1)
    sizes = [0 if out is None else -(-out.numel() // config["BLOCK"]) for out in sums]
    if any(sizes):
        first = next(part for part in parts if part is not None)
        launch(
            totals_kernel, (sum(sizes),), *(first if part is None else part for part in parts), *sums,
            blocks, programs, B * T * K, D, D * K, config=config,
        )  # fmt: skip


def backward(
    call: Any, kept: Tensor, keep: int, grads: tuple[Tensor | None, Tensor | None], needs: list[bool],
    cut: Callable[[Target, int], Any],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, dt, A, B, C, skip and state: two launches, three where sequences are cut (`cut`: ops/stretches.py).

    `kept` [slots,D,K] has the states at every `keep`-th token.
    """
    B, T, D, K, N = call.sizes
    (dy, dfinal), target = grads, target_of(kept.device)
    key = (call.x.dtype, triton.next_power_of_2(K))
    config = configure("selective_scan_backward", key, partial(rule, D, K), target)
    blocks = -(-D // config["BLOCK_D"])
    STRETCH, programs, slots = cut(target, blocks * config.warps)
    decays = ends = None
    if STRETCH:
        decays, ends = (torch.empty(slots, D, K, dtype=torch.float32, device=kept.device) for _ in range(2))
        launch(
            ends_kernel, (slots * blocks,), dy, call.dt, call.A, call.C, call.offsets, decays, ends,
            *strides(dy, call.dt, call.A, call.C), T, N, D, K, config=config, STRETCH=STRETCH,
        )  # fmt: skip
    inputs = (call.x, call.dt, call.A, call.B, call.C, call.skip)
    made = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=kept.device) if need and tensor is not None else None
        for tensor, need in zip((*inputs, call.state), needs, strict=True)
    ]
    dx, ddt, dA, dB, dC, dskip, dstate = made
    dB_parts, dC_parts, dA_parts, dskip_parts = parts = _parts(call, needs, blocks, programs)
    launch(
        backward_kernel, (programs * blocks,), *inputs, call.offsets, kept, dy, dfinal, decays, ends,
        dx, ddt, dA_parts, dB_parts, dC_parts, dskip_parts, dstate,
        *strides(*inputs, dy, dfinal), T, N, D, K, B * T, config=config, STRETCH=STRETCH, KEEP=keep,
    )  # fmt: skip
    _add_up(call, parts, [dB, dC, dA, dskip], blocks, programs)
    return tuple(made)
