"""Mamba-1's selective scan in Triton, forward and one token: each thread walks the tokens of some states.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  y_t = h_t C_t + skip x_t

A program has the states [BLOCK_D, K] of one block of channels in registers and walks one stretch of tokens; states are
written every KEEP tokens for the backward, and nowhere else. Where sequences times blocks are too few to fill a GPU,
sequences are cut into stretches: a first launch gives the map that each is, state -> decay state + end, and in the
second every stretch joins the maps of those before it by itself. What comes later has no part in what comes before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, strides, target_of
from foci.tiles.channels import four_sums, load_four, states_of, store_four
from foci.tiles.memory import present
from foci.tiles.state import sequence
from foci.tiles.stretches import join, rows, stretch

VARY = {"BLOCK_D": (8, 16, 32, 64), "BLOCK_T": (4, 8, 16)}  # for `foci tune`: tokens in fours that divide `keep`


@triton.jit
def ends_kernel(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, A_ptr, B_ptr, offsets_ptr, decays_ptr, ends_ptr, x_s, dt_s, A_s, B_s, T, N, D, K,
    STRETCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The map of one stretch: h -> decay h + end. The decay of a sum of steps, all of one sign: nothing cancels."""
    index, d, channels, k, keys, inside, rates = states_of(tl.program_id(0), A_ptr, A_s, D, K, BLOCK_D, BLOCK_K)
    n, b, _, stop, first, end, slot = stretch(offsets_ptr, index, T, N, STRETCH)
    if n < 0 or end >= stop:
        return
    b = tl.cast(b, tl.int64)
    x_ptr += b * x_s[0]
    dt_ptr += b * dt_s[0]
    B_ptr += b * B_s[0]
    h, steps = tl.zeros([BLOCK_D, BLOCK_K], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    for t0 in range(first, end, BLOCK_T):
        xs = rows(x_ptr, t0, end, x_s[1], d * x_s[2], channels, BLOCK_T)
        dts = rows(dt_ptr, t0, end, dt_s[1], d * dt_s[2], channels, BLOCK_T)
        bs = rows(B_ptr, t0, end, B_s[1], k * B_s[2], keys, BLOCK_T)
        for i in tl.static_range(BLOCK_T):
            dt = dts[i].to(tl.float32)
            h = tl.exp2(dt[:, None] * rates) * h + (dt * xs[i].to(tl.float32))[:, None] * bs[i].to(tl.float32)[None, :]
            steps += dt
    cells = tl.cast(slot, tl.int64) * D * K + d[:, None] * K + k[None, :]
    tl.store(decays_ptr + cells, tl.exp2(steps[:, None] * rates), mask=inside)
    tl.store(ends_ptr + cells, h, mask=inside)


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, skip_ptr, state_ptr, offsets_ptr, decays_ptr, ends_ptr,
    out_ptr, final_ptr, kept_ptr, x_s, dt_s, A_s, B_s, C_s, skip_s, state_s, T, N, D, K,
    STRETCH: tl.constexpr, KEEP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """y of one stretch, the states at every KEEP-th token, and of a sequence's last stretch the state behind it."""
    index, d, channels, k, keys, inside, rates = states_of(tl.program_id(0), A_ptr, A_s, D, K, BLOCK_D, BLOCK_K)
    n, b, start, stop, first, end, slot = stretch(offsets_ptr, index, T, N, STRETCH)
    if n < 0:
        return
    n, b, cells = tl.cast(n, tl.int64), tl.cast(b, tl.int64), d[:, None] * K + k[None, :]
    h = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    if state_ptr is not None:
        places = state_ptr + n * state_s[0] + d[:, None] * state_s[1] + k[None, :] * state_s[2]
        h = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    if STRETCH > 0:
        before = (first - start) // STRETCH
        h = join(h, decays_ptr + cells, ends_ptr + cells, slot - before, before, D * K, inside, 1, 4)
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + d * skip_s[0], mask=channels, other=0.0).to(tl.float32)[:, None, None]
    x_ptr += b * x_s[0]
    dt_ptr += b * dt_s[0]
    B_ptr += b * B_s[0]
    C_ptr += b * C_s[0]
    out_ptr += b * T * D
    if kept_ptr is not None:
        _, _, _, border = sequence(offsets_ptr, n, T, KEEP)
    for t0 in range(first, end, BLOCK_T):
        if kept_ptr is not None:  # noqa: SIM102  a constant and a tensor
            if (t0 - start) % KEEP == 0:
                place = tl.cast(border + (t0 - start) // KEEP, tl.int64) * D * K
                tl.store(kept_ptr + place + cells, h, mask=inside)
        xs = rows(x_ptr, t0, end, x_s[1], d * x_s[2], channels, BLOCK_T)
        dts = rows(dt_ptr, t0, end, dt_s[1], d * dt_s[2], channels, BLOCK_T)
        bs = rows(B_ptr, t0, end, B_s[1], k * B_s[2], keys, BLOCK_T)
        cs = rows(C_ptr, t0, end, C_s[1], k * C_s[2], keys, BLOCK_T)
        ys = ()
        for i in tl.static_range(BLOCK_T):
            # Tokens from `end` on have dt = 0: they change nothing.
            x, dt = xs[i].to(tl.float32), dts[i].to(tl.float32)
            h = tl.exp2(dt[:, None] * rates) * h + (dt * x)[:, None] * bs[i].to(tl.float32)[None, :]
            ys = ys + (h * cs[i].to(tl.float32)[None, :],)  # type: ignore[assignment]  # noqa: RUF005
            if i % 4 == 3:
                y = four_sums(ys, 1)
                if skip_ptr is not None:
                    y += skip * load_four(x_ptr, t0 + i - 3, end, x_s, d, channels)
                store_four(out_ptr, y, t0 + i - 3, end, d, channels, D)
                ys = ()
    tl.store(final_ptr + n * D * K + cells, h, mask=inside & (end == stop) & present(final_ptr))


@triton.jit
def step_kernel(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, skip_ptr, state_ptr, out_ptr, x_s, dt_s, A_s, B_s, C_s, skip_s, state_s, D, K,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One token: h = exp(dt A) h + dt x B^T in place;  y = h C + skip x."""
    b, d, channels, k, keys, inside, rates = states_of(tl.program_id(0), A_ptr, A_s, D, K, BLOCK_D, BLOCK_K)
    b = b.to(tl.int64)
    x = tl.load(x_ptr + b * x_s[0] + d * x_s[1], mask=channels, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + b * dt_s[0] + d * dt_s[1], mask=channels, other=0.0).to(tl.float32)
    key = tl.load(B_ptr + b * B_s[0] + k * B_s[1], mask=keys, other=0.0).to(tl.float32)
    query = tl.load(C_ptr + b * C_s[0] + k * C_s[1], mask=keys, other=0.0).to(tl.float32)
    places = state_ptr + b * state_s[0] + d[:, None] * state_s[1] + k[None, :] * state_s[2]
    h = tl.load(places, mask=inside, other=0.0)
    tl.debug_barrier()  # all have read before any writes: few channels lie in several threads each
    h = tl.exp2(dt[:, None] * rates) * h + (dt * x)[:, None] * key[None, :]
    tl.store(places, h, mask=inside)
    y = tl.sum(h * query[None, :], 1)
    if skip_ptr is not None:
        y += tl.load(skip_ptr + d * skip_s[0], mask=channels, other=0.0).to(tl.float32) * x
    tl.store(out_ptr + b * D + d, y.to(out_ptr.dtype.element_ty), mask=channels)


def rule(D: int, K: int, target: Target) -> Config:
    """Sixteen states a thread, of one warp as long as that has two channels: sums within a warp wait for no other."""
    warps = max(1, triton.next_power_of_2(K) // 256)
    return Config({**_blocks(D, K, 16 * warps, target), "BLOCK_T": 4}, warps=warps, stages=1)


def _blocks(D: int, K: int, states: int, target: Target) -> dict[str, int]:
    """Tiles of so many states for each lane of a warp."""
    BLOCK_K, lanes = triton.next_power_of_2(K), target.lanes
    return {"BLOCK_D": max(1, min(states * lanes // BLOCK_K, 2 * lanes, triton.next_power_of_2(D))), "BLOCK_K": BLOCK_K}


def forward(call: Any, out: Tensor, kept: Tensor | None, keep: int, cut: Callable[[Target, int], Any]) -> Tensor:
    """`out` [B,T,D] is filled with y; the final state [call.ends,D,K]: one launch, two where sequences are cut.

    The states at every `keep`-th token go to `kept` [slots,D,K]; `cut`: ops/stretches.py.
    """
    _, T, D, K, N = call.sizes
    x, target = call.x, target_of(call.x.device)
    key = (x.dtype, triton.next_power_of_2(K))
    config = configure("selective_scan_forward", key, partial(rule, D, K), target, VARY)
    blocks = -(-D // config["BLOCK_D"])
    STRETCH, programs, slots = cut(target, blocks * config.warps)
    decays = ends = None
    if STRETCH:
        decays, ends = (torch.empty(slots, D, K, dtype=torch.float32, device=x.device) for _ in range(2))
        launch(
            ends_kernel, (slots * blocks,), x, call.dt, call.A, call.B, call.offsets, decays, ends,
            *map(strides, (x, call.dt, call.A, call.B)), T, N, D, K, config=config, STRETCH=STRETCH,
        )  # fmt: skip
    final = torch.empty(call.ends, D, K, dtype=torch.float32, device=x.device)
    inputs = (x, call.dt, call.A, call.B, call.C, call.skip, call.state)
    launch(
        forward_kernel, (programs * blocks,), *inputs, call.offsets, decays, ends, out, final, kept,
        *map(strides, inputs), T, N, D, K, config=config, STRETCH=STRETCH, KEEP=keep,
    )  # fmt: skip
    return final


def step(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, skip: Tensor | None) -> Tensor:
    """y [B,D] in x's dtype, `state` changed in place: one launch."""
    rows, D = x.shape
    out = torch.empty(rows, D, dtype=x.dtype, device=x.device)
    warps = 4 if A.shape[1] > 32 else 2
    config = Config(_blocks(D, A.shape[1], 8 * warps, target_of(x.device)), warps, 1)
    inputs = (x, dt, A, B, C, skip, state)
    launch(
        step_kernel, (rows * -(-D // config["BLOCK_D"]),), *inputs, out, *map(strides, inputs), D, A.shape[1],
        config=config,
    )  # fmt: skip
    return out
