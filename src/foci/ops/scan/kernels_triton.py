"""The elementwise scan in Triton, forward, backward and one token: each thread walks the tokens of its channels.

    h_t = exp(g_t) h_{t-1} + x_t

A program has one block of channels of one stretch of tokens. Where sequences times blocks are too few to fill a GPU,
sequences are cut into stretches: a first launch gives the map that each is, state -> decay state + end, and in the
second every stretch joins the maps of those before it (in the backward, behind it) by itself. Decays are multiplied,
never divided or subtracted, and what comes later has no part in what comes before.
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
from foci.tiles.channels import channels_of
from foci.tiles.memory import present
from foci.tiles.stretches import join, rows, stretch

VARY = {"BLOCK_D": (32, 64, 128, 256), "BLOCK_T": (8, 16, 32)}  # what `foci tune` may try


@triton.jit
def ends_kernel(  # type: ignore[no-untyped-def]
    x_ptr, g_ptr, offsets_ptr, decays_ptr, ends_ptr, x_s, g_s, T, N, D,
    BACK: tl.constexpr, STRETCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The map of one stretch: h -> decay h + end. BACK: of gradients, r -> decay r + end from its end to its start.

    r_t = exp(g_t) dh_t, what token t hands to the one before, and dh_t = dh_t's own + r_{t+1}: x is the own gradient.
    """
    index, d, inside = channels_of(tl.program_id(0), D, BLOCK_D)
    n, b, start, stop, first, end, slot = stretch(offsets_ptr, index, T, N, STRETCH)
    if n < 0 or (first == start if BACK else end >= stop):  # the last that is walked hands its map to no one
        return
    g_ptr += tl.cast(b, tl.int64) * g_s[0]
    if x_ptr is not None:
        x_ptr += tl.cast(b, tl.int64) * x_s[0]
    total, h = tl.full([BLOCK_D], 1.0, tl.float32), tl.zeros([BLOCK_D], tl.float32)
    steps = tl.cdiv(end - first, BLOCK_T)
    for j in range(steps):
        t0 = first + (steps - 1 - j if BACK else j) * BLOCK_T
        gs = rows(g_ptr, t0, end, g_s[1], d * g_s[2], inside, BLOCK_T)
        if x_ptr is not None:
            xs = rows(x_ptr, t0, end, x_s[1], d * x_s[2], inside, BLOCK_T)
        for i in tl.static_range(BLOCK_T):
            if BACK:
                decay = tl.exp(gs[BLOCK_T - 1 - i].to(tl.float32))
                if x_ptr is not None:
                    h += xs[BLOCK_T - 1 - i].to(tl.float32)
                h *= decay
            else:
                decay = tl.exp(gs[i].to(tl.float32))
                h = decay * h + xs[i].to(tl.float32)
            total *= decay
    tl.store(decays_ptr + tl.cast(slot, tl.int64) * D + d, total, mask=inside)
    tl.store(ends_ptr + tl.cast(slot, tl.int64) * D + d, h, mask=inside)


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, g_ptr, state_ptr, offsets_ptr, decays_ptr, ends_ptr, out_ptr, final_ptr, x_s, g_s, state_s, T, N, D,
    STRETCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """h of one stretch, and of a sequence's last the state behind it."""
    index, d, inside = channels_of(tl.program_id(0), D, BLOCK_D)
    n, b, start, stop, first, end, slot = stretch(offsets_ptr, index, T, N, STRETCH)
    if n < 0:
        return
    n, b = tl.cast(n, tl.int64), tl.cast(b, tl.int64)
    h = tl.zeros([BLOCK_D], tl.float32)
    if state_ptr is not None:
        h = tl.load(state_ptr + n * state_s[0] + d * state_s[1], mask=inside, other=0.0).to(tl.float32)
    if STRETCH > 0:
        before = (first - start) // STRETCH
        h = join(h, decays_ptr + d, ends_ptr + d, slot - before, before, D, inside, 1)
    x_ptr += b * x_s[0]
    g_ptr += b * g_s[0]
    out_ptr += b * T * D
    xs = (tl.zeros([BLOCK_D], x_ptr.dtype.element_ty),) * BLOCK_T
    gs = (tl.zeros([BLOCK_D], g_ptr.dtype.element_ty),) * BLOCK_T
    for next0 in range(first, end + BLOCK_T, BLOCK_T):
        # What is walked next is on its way while what came before it is walked; before the first: nothing.
        next_xs = rows(x_ptr, next0, end, x_s[1], d * x_s[2], inside, BLOCK_T)
        next_gs = rows(g_ptr, next0, end, g_s[1], d * g_s[2], inside, BLOCK_T)
        t0 = next0 - BLOCK_T
        hs = ()
        for i in tl.static_range(BLOCK_T):
            # Tokens from `end` on have g = 0 and x = 0: they change nothing.
            h = tl.exp(gs[i].to(tl.float32)) * h + xs[i].to(tl.float32)
            hs = hs + (h,)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(BLOCK_T):
            t = tl.cast(t0 + i, tl.int64)
            tl.store(out_ptr + t * D + d, hs[i].to(out_ptr.dtype.element_ty), mask=inside & (t >= first) & (t < end))
        xs, gs = next_xs, next_gs
    tl.store(final_ptr + n * D + d, h, mask=inside & (end == stop) & present(final_ptr))


@triton.jit
def read(  # type: ignore[no-untyped-def]
    g_ptr, dout_ptr, dg_ptr, before_ptr, t0, start, end, g_s, dout_s, D, d, inside, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """What the backward reads of BLOCK_T tokens: their gates, their outputs' gradients, the states before them."""
    gs, douts, hs = rows(g_ptr, t0, end, g_s[1], d * g_s[2], inside, BLOCK_T), (), ()
    if dout_ptr is not None:
        douts = rows(dout_ptr, t0, end, dout_s[1], d * dout_s[2], inside, BLOCK_T)
    if dg_ptr is not None:
        hs = rows(before_ptr, t0, end, D, d, inside & (t0 > start), 1)
        hs = hs + rows(before_ptr, t0 + 1, end, D, d, inside, BLOCK_T - 1)
    return gs, douts, hs


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    g_ptr, out_ptr, state_ptr, offsets_ptr, dout_ptr, dfinal_ptr, decays_ptr, ends_ptr, dx_ptr, dg_ptr, dstate_ptr,
    g_s, state_s, dout_s, dfinal_s, T, N, D,
    STRETCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradients of one stretch from its last token to its first; out_{t-1} is h_{t-1}.

    dh_t = dout_t + r_{t+1};  r_t = exp(g_t) dh_t;  dx_t = dh_t;  dg_t = r_t h_{t-1};  dh_0 = r_1
    """
    index, d, inside = channels_of(tl.program_id(0), D, BLOCK_D)
    n, b, start, stop, first, end, slot = stretch(offsets_ptr, index, T, N, STRETCH)
    if n < 0:
        return
    n, b = tl.cast(n, tl.int64), tl.cast(b, tl.int64)
    r, state = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    if dfinal_ptr is not None:
        r = tl.load(dfinal_ptr + n * dfinal_s[0] + d * dfinal_s[1], mask=inside, other=0.0).to(tl.float32)
    if STRETCH > 0:
        behind = tl.cdiv(stop - end, STRETCH)
        r = join(r, decays_ptr + d, ends_ptr + d, slot + behind, behind, D, inside, -1)
    if state_ptr is not None:
        state = tl.load(state_ptr + n * state_s[0] + d * state_s[1], mask=inside, other=0.0).to(tl.float32)
    g_ptr += b * g_s[0]
    if dout_ptr is not None:
        dout_ptr += b * dout_s[0]
    row0 = b * T
    steps = tl.cdiv(end - first, BLOCK_T)
    before = out_ptr + (row0 - 1) * D
    gs = (tl.zeros([BLOCK_D], g_ptr.dtype.element_ty),) * BLOCK_T
    douts, hs = (), ()
    if dout_ptr is not None:
        douts = (tl.zeros([BLOCK_D], dout_ptr.dtype.element_ty),) * BLOCK_T
    if dg_ptr is not None:
        hs = (tl.zeros([BLOCK_D], out_ptr.dtype.element_ty),) * BLOCK_T
    for j in range(steps + 1):  # as in the forward
        t0 = first + (steps - j) * BLOCK_T
        next_gs, next_douts, next_hs = read(
            g_ptr, dout_ptr, dg_ptr, before, t0 - BLOCK_T, start, end, g_s, dout_s, D, d, inside & (j < steps), BLOCK_T
        )
        for i in tl.static_range(BLOCK_T - 1, -1, -1):
            t = tl.cast(t0 + i, tl.int64)
            there = inside & (t < end)
            if dout_ptr is not None:
                r += douts[i].to(tl.float32)
            if dx_ptr is not None:
                tl.store(dx_ptr + (row0 + t) * D + d, r.to(dx_ptr.dtype.element_ty), mask=there)
            r *= tl.exp(gs[i].to(tl.float32))
            if dg_ptr is not None:
                h = tl.where(t > start, hs[i].to(tl.float32), state)
                tl.store(dg_ptr + (row0 + t) * D + d, (r * h).to(dg_ptr.dtype.element_ty), mask=there)
        gs, douts, hs = next_gs, next_douts, next_hs
    if dstate_ptr is not None:
        tl.store(dstate_ptr + n * D + d, r.to(dstate_ptr.dtype.element_ty), mask=inside & (first == start))


@triton.jit
def step_kernel(x_ptr, g_ptr, state_ptr, out_ptr, x_s, g_s, state_s, D, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token: h = exp(g) h + x, in place."""
    b, d, inside = channels_of(tl.program_id(0), D, BLOCK_D)
    b = b.to(tl.int64)
    x = tl.load(x_ptr + b * x_s[0] + d * x_s[1], mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + b * g_s[0] + d * g_s[1], mask=inside, other=0.0).to(tl.float32)
    state_ptr += b * state_s[0] + d * state_s[1]
    h = tl.exp(g) * tl.load(state_ptr, mask=inside, other=0.0) + x
    tl.debug_barrier()  # all have read before any writes: few channels lie in several threads each
    tl.store(state_ptr, h, mask=inside)
    tl.store(out_ptr + b * D + d, h.to(out_ptr.dtype.element_ty), mask=inside)


def rule(D: int, BLOCK_T: int, whole: bool, target: Target) -> Config:
    """One warp, a channel a thread where sequences are walked `whole`, else two, each with half as many tokens.

    As many tokens are on their way as are walked.
    """
    wide, most = (1, 2 * BLOCK_T) if whole else (2, BLOCK_T)
    return Config({"BLOCK_D": min(wide * target.lanes, triton.next_power_of_2(D)), "BLOCK_T": most}, 1, 1)


def _config(kernel: str, call: Any, BLOCK_T: int, cut: Callable[[Target, int], Any], target: Target) -> Config:
    """Sequences are whole where they would be with a channel a thread."""
    D = call.sizes[2]
    whole = not cut(target, -(-D // target.lanes)).tokens
    return configure(f"scan_{kernel}", (call.x.dtype, whole), partial(rule, D, BLOCK_T, whole), target, VARY)


def _maps(x: Tensor | None, call: Any, STRETCH: int, slots: int, back: bool, config: Config) -> tuple[Tensor, Tensor]:
    """decay and end of every stretch, by slot."""
    _, T, D, N = call.sizes
    decays, ends = (torch.empty(slots, D, dtype=torch.float32, device=call.x.device) for _ in range(2))
    launch(
        ends_kernel, (slots * -(-D // config["BLOCK_D"]),), x, call.log_decay, call.offsets, decays, ends,
        strides(x), strides(call.log_decay), T, N, D,
        config=config, BACK=back, STRETCH=STRETCH,
    )  # fmt: skip
    return decays, ends


def forward(call: Any, out: Tensor, cut: Callable[[Target, int], Any]) -> Tensor:
    """`out` [B,T,D] is filled with h; the final state [call.ends,D]: one launch, two where sequences are cut.

    `cut` is that of ops/stretches.py.
    """
    _, T, D, N = call.sizes
    x, g, state = call.x, call.log_decay, call.state
    target = target_of(x.device)
    config = _config("forward", call, 16, cut, target)
    blocks = -(-D // config["BLOCK_D"])
    STRETCH, programs, slots = cut(target, blocks * config.warps)
    decays, ends = _maps(x, call, STRETCH, slots, False, config) if STRETCH else (None, None)
    final = torch.empty(call.ends, D, dtype=torch.float32, device=x.device)
    launch(
        forward_kernel, (programs * blocks,), x, g, state, call.offsets, decays, ends, out, final,
        *map(strides, (x, g, state)), T, N, D, config=config, STRETCH=STRETCH,
    )  # fmt: skip
    return final


def backward(
    call: Any, out: Tensor, grads: tuple[Tensor | None, Tensor | None], found: Sequence[Tensor | None],
    cut: Callable[[Target, int], Any],
) -> None:  # fmt: skip
    """Fills the gradients that are `found`, of x, log_decay and state: one launch, two where sequences are cut."""
    _, T, D, N = call.sizes
    g, state, (dout, dfinal) = call.log_decay, call.state, grads
    target = target_of(g.device)
    config = _config("backward", call, 8, cut, target)
    blocks = -(-D // config["BLOCK_D"])
    STRETCH, programs, slots = cut(target, blocks * config.warps)
    decays, ends = _maps(dout, call, STRETCH, slots, True, config) if STRETCH else (None, None)
    launch(
        backward_kernel, (programs * blocks,), g, out, state, call.offsets, dout, dfinal, decays, ends, *found,
        *map(strides, (g, state, dout, dfinal)), T, N, D, config=config, STRETCH=STRETCH,
    )  # fmt: skip


def step(x: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
    """h [B,D] in x's dtype, `state` changed in place: one launch."""
    B, D = x.shape
    out = torch.empty(B, D, dtype=x.dtype, device=x.device)
    config = Config({"BLOCK_D": min(256, triton.next_power_of_2(D))}, warps=2, stages=1)
    launch(
        step_kernel, (B * -(-D // config["BLOCK_D"]),), x, log_decay, state, out,
        *map(strides, (x, log_decay, state)), D, config=config,
    )  # fmt: skip
    return out
