"""What layers compute round an operator in Triton, one launch each way: gated norms, decays, rotary positions.

All read what they need once and keep only their inputs for the backward, which computes the rest again, a few tokens at
a time. Gradients of weights are sums over tokens: each program stores its own, a second launch adds them.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, launch, strides, target_of
from foci.tiles.activation import activate, slope, softplus
from foci.tiles.channels import channels_of
from foci.tiles.sums import total

ROOM = 8  # numbers that a thread has at once
WIDE = 128  # channels of a gate, or of a weighed head, that a program has at once


@triton.jit
def row_of(ptr, t, stride, column, inside):  # type: ignore[no-untyped-def]
    """Rows t [BLOCK_T,BLOCK_D] from a column on, in float32, 0 outside."""
    return tl.load(ptr + t[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def inverse(x, D, eps, MEAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean(x^2) + eps) of each row, or of its sum."""
    total = tl.sum(x * x, 1)
    return tl.rsqrt((total / D if MEAN else total) + eps)[:, None]


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, gate_ptr, y_ptr, x_stride, gate_stride, T, D, G, eps,
    MEAN: tl.constexpr, ACTIVATION: tl.constexpr, FIRST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y = r x w act(gate), r = 1 / sqrt(mean(x^2) + eps) of each of G parts of D; FIRST: of x act(gate) for x."""
    t = (tl.program_id(0) // G).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    column = tl.program_id(0) % G * D + d
    inside = (t < T)[:, None] & (d < D)[None, :]
    x = row_of(x_ptr, t, x_stride, column, inside)
    if gate_ptr is not None:
        opened = activate(row_of(gate_ptr, t, gate_stride, column, inside), ACTIVATION)
        if FIRST:
            x *= opened
    y = x * inverse(x, D, eps, MEAN)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if gate_ptr is not None and not FIRST:
        y *= opened
    there = y_ptr + t[:, None] * (G * D) + column[None, :]
    tl.store(there, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_back_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, gate_ptr, dy_ptr, dx_ptr, dgate_ptr, sums_ptr, x_stride, gate_stride, dy_stride, T, D, G, eps,
    MEAN: tl.constexpr, ACTIVATION: tl.constexpr, FIRST: tl.constexpr, PIECE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """n = r x;  dn = dy w act(gate);  dx = r (dn - n mean(dn n));  dgate = dy n w act'(gate);  dw = sum dy n act(gate).

    FIRST: n = r z, z = x act(gate), dn = dy w, dz as dx above, dx = dz act(gate), dgate = dz x act'(gate).
    """
    d = tl.arange(0, BLOCK_D)
    column = tl.program_id(0) % G * D + d
    weight = tl.full([1, BLOCK_D], 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=d < D, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    first = (tl.program_id(0) // G).to(tl.int64) * PIECE
    for t0 in range(first, tl.minimum(first + PIECE, T), BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        inside = (t < T)[:, None] & (d < D)[None, :]
        x = row_of(x_ptr, t, x_stride, column, inside)
        dy = row_of(dy_ptr, t, dy_stride, column, inside)
        opened, steep, z, dn = 1.0, 0.0, x, dy * weight
        if gate_ptr is not None:
            gate = row_of(gate_ptr, t, gate_stride, column, inside)
            opened, steep = activate(gate, ACTIVATION), slope(gate, ACTIVATION)
            if FIRST:
                z = x * opened
            else:
                dn *= opened
        r = inverse(z, D, eps, MEAN)
        n = z * r
        along = tl.sum(dn * n, 1)[:, None]
        dx = r * (dn - n * (along / D if MEAN else along))
        there = t[:, None] * (G * D) + column[None, :]
        if dgate_ptr is not None:
            dgate = (dx * x if FIRST else dy * n * weight) * steep
            tl.store(dgate_ptr + there, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
        if dx_ptr is not None:
            tl.store(dx_ptr + there, (dx * opened if FIRST else dx).to(dx_ptr.dtype.element_ty), mask=inside)
        # Of a row that is not there n is NaN where eps is 0.
        sums += tl.where(inside, dy * n if FIRST else dy * n * opened, 0.0)
    if sums_ptr is not None:
        piece = (tl.program_id(0) // G).to(tl.int64)
        tl.store(sums_ptr + piece * (G * D) + column, tl.sum(sums, 0), mask=d < D)


@triton.jit
def gate_of(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, a_log_ptr, t, x_stride, g, column, inside, channels, rate,
    INVERTED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """(z, its rate) of rate exp(a_log) softplus(z), z = x + bias, INVERTED: -x - bias. SHARED: by heads' a_log."""
    z = row_of(x_ptr, t, x_stride, column, inside)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column, mask=channels, other=0.0).to(tl.float32)[None, :]
    if a_log_ptr is not None:
        if SHARED:
            rate *= tl.exp(tl.load(a_log_ptr + g).to(tl.float32))
        else:
            rate *= tl.exp(tl.load(a_log_ptr + column, mask=channels, other=0.0).to(tl.float32))[None, :]
    return -z if INVERTED else z, rate


@triton.jit
def gate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, a_log_ptr, y_ptr, x_stride, T, D, G, rate,
    INVERTED: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y = rate exp(a_log) softplus(x + bias) of one of G heads of D channels."""
    index, d, channels = channels_of(tl.program_id(0), D, BLOCK_D)
    t = (index // G).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    g, column, inside = index % G, index % G * D + d, (t < T)[:, None] & channels[None, :]
    z, rate = gate_of(
        x_ptr, bias_ptr, a_log_ptr, t, x_stride, g, column, inside, channels, rate, INVERTED, SHARED
    )  # fmt: skip
    there = y_ptr + t[:, None] * (G * D) + column[None, :]
    tl.store(there, (rate * softplus(z)).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_back_kernel(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, a_log_ptr, dy_ptr, dx_ptr, biases_ptr, rates_ptr, x_stride, dy_stride, T, D, G, rate,
    INVERTED: tl.constexpr, SHARED: tl.constexpr, PIECE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx = dy rate exp(a_log) sigmoid(z), INVERTED: its negative;  dbias = sum dx;  da_log = sum dy y."""
    index, d, channels = channels_of(tl.program_id(0), D, BLOCK_D)
    piece, g, column = (index // G).to(tl.int64), index % G, index % G * D + d
    first = piece * PIECE
    biases, rates = tl.zeros([BLOCK_T, BLOCK_D], tl.float32), tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for t0 in range(first, tl.minimum(first + PIECE, T), BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        inside = (t < T)[:, None] & channels[None, :]
        z, steep = gate_of(
            x_ptr, bias_ptr, a_log_ptr, t, x_stride, g, column, inside, channels, rate, INVERTED, SHARED
        )  # fmt: skip
        dy = row_of(dy_ptr, t, dy_stride, column, inside) * steep
        dx = dy * tl.sigmoid(z) * (-1.0 if INVERTED else 1.0)
        if dx_ptr is not None:
            tl.store(dx_ptr + t[:, None] * (G * D) + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
        biases += dx
        rates += dy * softplus(z)
    if biases_ptr is not None:
        tl.store(biases_ptr + piece * (G * D) + column, tl.sum(biases, 0), mask=channels)
    if rates_ptr is not None:
        if SHARED:
            blocks = tl.cdiv(D, BLOCK_D)
            tl.store(rates_ptr + (piece * blocks + tl.program_id(0) % blocks) * G + g, tl.sum(tl.sum(rates, 1), 0))
        else:
            tl.store(rates_ptr + piece * (G * D) + column, tl.sum(rates, 0), mask=channels)


@triton.jit
def weigh_kernel(  # type: ignore[no-untyped-def]
    x_ptr, scale_ptr, y_ptr, x_stride, scale_stride, T, D, G, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """y = x scale of one of G heads of D channels."""
    index, d, channels = channels_of(tl.program_id(0), D, BLOCK_D)
    t = (index // G).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    g, column, inside = index % G, index % G * D + d, (t < T)[:, None] & channels[None, :]
    scale = tl.load(scale_ptr + t * scale_stride + g, mask=t < T, other=0.0).to(tl.float32)
    y = row_of(x_ptr, t, x_stride, column, inside) * scale[:, None]
    tl.store(y_ptr + t[:, None] * (G * D) + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weigh_back_kernel(  # type: ignore[no-untyped-def]
    x_ptr, scale_ptr, dy_ptr, dx_ptr, dscale_ptr, sums_ptr, x_stride, scale_stride, dy_stride, T, D, G,
    PIECE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx = dy scale;  dscale = sum over a head's channels of dy x, and over tokens where all have the same scale."""
    g, d = tl.program_id(0) % G, tl.arange(0, BLOCK_D)
    piece = (tl.program_id(0) // G).to(tl.int64)
    total = tl.zeros([BLOCK_T], tl.float32)
    for t0 in range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, T), BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        scale = tl.load(scale_ptr + t * scale_stride + g, mask=t < T, other=0.0).to(tl.float32)
        along = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for d0 in range(0, D, BLOCK_D):
            column, inside = g * D + d0 + d, (t < T)[:, None] & (d0 + d < D)[None, :]
            dy = row_of(dy_ptr, t, dy_stride, column, inside)
            if dx_ptr is not None:
                there = dx_ptr + t[:, None] * (G * D) + column[None, :]
                tl.store(there, (dy * scale[:, None]).to(dx_ptr.dtype.element_ty), mask=inside)
            along += dy * row_of(x_ptr, t, x_stride, column, inside)
        found = tl.sum(along, 1)
        if dscale_ptr is not None:
            tl.store(dscale_ptr + t * G + g, found.to(dscale_ptr.dtype.element_ty), mask=t < T)
        total += found
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def total_kernel(sums_ptr, out_ptr, S, M, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [M]: sums [S,M] added up."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(out_ptr + m, total(sums_ptr, m, S, M, BLOCK_S).to(out_ptr.dtype.element_ty), mask=m < M)


@triton.jit
def rotary_kernel(  # type: ignore[no-untyped-def]
    x_ptr, positions_ptr, y_ptr, x_s, positions_s, T, H, K, rate, rest_of_rate,
    WIDTH: tl.constexpr, BACK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Channels d and d + WIDTH/2 of x [B,T,H,K] turned by positions * exp(rate d), BACK: the other way; others stay.

    Angles are float64 until whole turns are gone, and the rate two float32: with one a position of 10^5 is 0.01 off.
    """
    blocks, HALF = tl.cdiv(T, BLOCK_T), WIDTH // 2
    b = (tl.program_id(0) // blocks).to(tl.int64)
    t = (tl.program_id(0) % blocks * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    position = tl.load(positions_ptr + b * positions_s[0] + t * positions_s[1], mask=t < T, other=0.0)
    slower = d.to(tl.float64) * rate + d.to(tl.float64) * rest_of_rate
    turns = position.to(tl.float64)[:, None] * tl.exp(slower)[None, :]
    turns *= tl.full([1, 1], 0.15915494309189535, tl.float64)
    angle = (turns - tl.floor(turns)).to(tl.float32) * 6.283185307179586
    cos, sin = tl.cos(angle), tl.sin(angle) * (-1.0 if BACK else 1.0)
    inside = (t < T)[:, None] & (d < HALF)[None, :]
    x_ptr += b * x_s[0] + t[:, None] * x_s[1]
    y_ptr += (b * T + t[:, None]) * (H * K)
    for h in range(H):
        near = x_ptr + tl.cast(h, tl.int64) * x_s[2] + d[None, :] * x_s[3]
        first = tl.load(near, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(near + tl.cast(HALF, tl.int64) * x_s[3], mask=inside, other=0.0).to(tl.float32)
        there = y_ptr + h * K + d[None, :]
        tl.store(there, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(there + HALF, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask=inside)
        for rest in range(WIDTH, K, BLOCK_D):
            still = (t < T)[:, None] & (rest + d < K)[None, :]
            kept = tl.load(near + tl.cast(rest, tl.int64) * x_s[3], mask=still, other=0.0)
            tl.store(there + rest, kept, mask=still)


def _like(x: Tensor | None, needed: bool) -> Tensor | None:
    """Memory for the gradient of x, if it is needed."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed and x is not None else None


def _room(programs: int, gradient: Tensor | None) -> Tensor | None:
    """Room for what each program has summed of a gradient, where it is wanted."""
    if gradient is None:
        return None
    return torch.empty(programs, gradient.shape[0], dtype=torch.float32, device=gradient.device)


def _total(sums: Tensor | None, gradient: Tensor | None) -> None:
    """Adds what programs have summed."""
    if sums is not None:
        config = Config({"BLOCK_S": 32, "BLOCK_M": 32}, warps=4, stages=1)
        launch(total_kernel, (-(-sums.shape[1] // 32),), sums, gradient, *sums.shape, config=config)


@functools.cache
def _rows(D: int, lanes: int, steps: int = 0) -> Config:
    """As many rows as 128 threads have room for, of a wide row alone up to 1024 threads. PIECE: those of a sum."""
    block, most = triton.next_power_of_2(D), 128 * ROOM
    rows = max(1, most // block)
    blocks = {"BLOCK_T": rows, "BLOCK_D": block} | ({"PIECE": steps * rows} if steps else {})
    return Config(blocks, warps=min(1024 // lanes, max(4, block // (32 * ROOM))), stages=1)


def norm(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, groups: int, eps: float, mean: bool,
    activation: str | None, gate_first: bool,
) -> tuple[Tensor]:  # fmt: skip
    """y [..,G D] in x's dtype, of x and gate [..,G D], weight [G D]."""
    y, rows = torch.empty(x.shape, dtype=x.dtype, device=x.device), _flat(x, gate)
    T, D = rows[0].shape[0], x.shape[-1] // groups
    config = _rows(D, target_of(x.device).lanes)
    launch(
        norm_kernel, (-(-T // config["BLOCK_T"]) * groups,), rows[0], _packed(weight), rows[1], y, *_pitches(*rows),
        T, D, groups, eps, config=config, MEAN=mean, ACTIVATION=activation, FIRST=gate_first,
    )  # fmt: skip
    return (y,)


def norm_back(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, groups: int, eps: float, mean: bool,
    activation: str | None, gate_first: bool, dy: Tensor, needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """What is needed of dx, dweight and dgate, each in its tensor's dtype: two launches where weights learn."""
    x_, gate_, dy_ = rows = _flat(x, gate, dy)
    T, D = x_.shape[0], x.shape[-1] // groups
    config = _rows(D, target_of(x.device).lanes, 16)
    pieces = -(-T // config["PIECE"])
    dx, dweight, dgate = map(_like, (x, weight, gate), needs)
    sums = _room(pieces, dweight)
    launch(
        norm_back_kernel, (pieces * groups,), x_, _packed(weight), gate_, dy_, dx, dgate, sums, *_pitches(*rows),
        T, D, groups, eps, config=config, MEAN=mean, ACTIVATION=activation, FIRST=gate_first,
    )  # fmt: skip
    _total(sums, dweight)
    return dx, dweight, dgate


def gate(x: Tensor, bias: Tensor | None, a_log: Tensor | None, rate: float, inverted: bool) -> tuple[Tensor]:
    """y [..,D] in float32 of x [..,D], bias [D], a_log [H]."""
    y, (rows,) = torch.empty(x.shape, dtype=torch.float32, device=x.device), _flat(x)
    T, (G, D, shared) = rows.shape[0], _heads(x, a_log)
    config = _rows(min(D, WIDE), target_of(x.device).lanes)
    launch(
        gate_kernel, (-(-T // config["BLOCK_T"]) * G * -(-D // config["BLOCK_D"]),), rows, _packed(bias),
        _packed(a_log), y, rows.stride(0), T, D, G, rate, config=config, INVERTED=inverted, SHARED=shared,
    )  # fmt: skip
    return (y,)


def gate_back(
    x: Tensor, bias: Tensor | None, a_log: Tensor | None, rate: float, inverted: bool, dy: Tensor, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What is needed of dx, dbias and da_log, each in its tensor's dtype: two launches, three, or one for dx."""
    x_, dy_ = _flat(x, dy)
    T, (G, D, shared) = x_.shape[0], _heads(x, a_log)
    config = _rows(min(D, WIDE), target_of(x.device).lanes, 4)
    pieces, blocks = -(-T // config["PIECE"]), -(-D // config["BLOCK_D"])
    dx, dbias, da_log = map(_like, (x, bias, a_log), needs)
    biases, rates = _room(pieces, dbias), _room(pieces * blocks if shared else pieces, da_log)
    launch(
        gate_back_kernel, (pieces * G * blocks,), x_, _packed(bias), _packed(a_log), dy_, dx, biases, rates,
        *_pitches(x_, dy_), T, D, G, rate, config=config, INVERTED=inverted, SHARED=shared,
    )  # fmt: skip
    _total(biases, dbias)
    _total(rates, da_log)
    return dx, dbias, da_log


def _heads(x: Tensor, a_log: Tensor | None) -> tuple[int, int, bool]:
    """(G, D, True): G heads of D channels that share a rate; (1, D, False): each channel has its own, or none has."""
    D = x.shape[-1]
    return (1, D, False) if a_log is None or a_log.shape[0] == D else (a_log.shape[0], D // a_log.shape[0], True)


def weigh(x: Tensor, scale: Tensor) -> tuple[Tensor]:
    """y [..,D] in x's dtype of x [..,D], scale [..,H] or [H]."""
    y, (rows, scales) = torch.empty(x.shape, dtype=x.dtype, device=x.device), _flat(x, scale)
    T, G, D = rows.shape[0], scale.shape[-1], x.shape[-1] // scale.shape[-1]
    config = _rows(min(D, WIDE), target_of(x.device).lanes)
    launch(
        weigh_kernel, (-(-T // config["BLOCK_T"]) * G * -(-D // config["BLOCK_D"]),), rows, scales, y, rows.stride(0),
        0 if scale.dim() == 1 else scales.stride(0), T, D, G, config=config,
    )  # fmt: skip
    return (y,)


def weigh_back(x: Tensor, scale: Tensor, dy: Tensor, needs: list[bool]) -> tuple[Tensor | None, Tensor | None]:
    """What is needed of dx and dscale, each in its tensor's dtype: one launch, two where tokens share their scale."""
    x_, scales, dy_ = _flat(x, scale, dy)
    T, G, D, shared = x_.shape[0], scale.shape[-1], x.shape[-1] // scale.shape[-1], scale.dim() == 1
    config = _rows(min(D, WIDE), target_of(x.device).lanes, 16)
    pieces = -(-T // config["PIECE"])
    dx, dscale = map(_like, (x, scale), needs)
    sums = _room(pieces, dscale) if shared else None
    launch(
        weigh_back_kernel, (pieces * G,), x_, scales, dy_, dx, None if shared else dscale, sums, x_.stride(0),
        0 if shared else scales.stride(0), dy_.stride(0), T, D, G, config=config,
    )  # fmt: skip
    _total(sums, dscale)
    return dx, dscale


def _flat(*tensors: Tensor | None) -> list[Any]:
    """[..,D] as rows [T,D], each in one piece."""
    rows = [None if x is None else x.reshape(-1, x.shape[-1]) for x in tensors]
    return [x if x is None or x.stride(1) == 1 else x.contiguous() for x in rows]


def _packed(x: Tensor | None) -> Tensor | None:
    """[D] in one piece."""
    return None if x is None else x.contiguous()


def _pitches(*tensors: Tensor | None) -> tuple[int | None, ...]:
    """How far rows lie apart."""
    return tuple([None if x is None else x.stride(0) for x in tensors])


def rotary(x: Tensor, positions: Tensor, rate: float, width: int, back: bool) -> tuple[Tensor]:
    """x [B,T,H,K] turned, in its dtype; positions [1 or B,T]."""
    (B, T, H, K), block = x.shape, triton.next_power_of_2(width // 2)
    y = torch.empty(B, T, H, K, dtype=x.dtype, device=x.device)
    config = Config({"BLOCK_T": max(1, min(8, 512 // block)), "BLOCK_D": block}, warps=4, stages=1)
    (near,) = struct.unpack("f", struct.pack("f", rate))
    launch(
        rotary_kernel, (B * -(-T // config["BLOCK_T"]),), x, positions, y, strides(x),
        strides(positions.expand(B, T)), T, H, K, near, rate - near, config=config, WIDTH=width, BACK=back,
    )  # fmt: skip
    return (y,)
