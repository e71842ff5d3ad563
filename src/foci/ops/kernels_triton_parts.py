"""What layers compute round an operator in Triton, one launch each way: convolutions, gated norms, rotary positions.

All read what they need once and keep only their inputs for the backward, which computes the rest again. A thread of a
convolution walks the tokens of its channels; the others have a few tokens at a time. Gradients of weights are sums over
tokens: each program stores its own, a second launch adds them.
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
from foci.tiles.activation import activate, slope
from foci.tiles.channels import channels_of
from foci.tiles.stretches import rows

STRETCH = 64, 128  # tokens of a program, forward and backward
CHANNELS = 4, 2  # of a thread
ROOM = 16  # numbers of a norm that a thread has at once


@triton.jit
def tapped(xs, weights, bias, START: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """sum_j w_j x_{START + j} + bias."""
    total = bias
    for j in tl.static_range(SIZE):
        total += weights[j] * xs[START + j].to(tl.float32)
    return total


@triton.jit
def taps(weight_ptr, bias_ptr, weight_s, d, inside, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights of channels d, one tile for each token that they reach, and the bias."""
    found = ()
    for j in tl.static_range(SIZE):
        there = weight_ptr + d * weight_s[0] + j * weight_s[2]
        found = found + (tl.load(there, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    bias = tl.zeros(d.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + d, mask=inside, other=0.0).to(tl.float32)
    return found, bias


@triton.jit
def convolve_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, y_ptr, x_s, weight_s, T, D,
    ACTIVATION: tl.constexpr, SIZE: tl.constexpr, STRETCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """y_t = act(sum_j w_j x_{t+j} + bias) of one stretch: x has SIZE - 1 tokens more than y."""
    index, d, inside = channels_of(tl.program_id(0), D, BLOCK_D)
    stretches = tl.cdiv(T, STRETCH)
    b, first = (index // stretches).to(tl.int64), index % stretches * STRETCH
    end, x_end = tl.minimum(first + STRETCH, T), T + SIZE - 1
    weights, bias = taps(weight_ptr, bias_ptr, weight_s, d, inside, SIZE)
    x_ptr += b * x_s[0]
    y_ptr += b * T * D
    seen = rows(x_ptr, first, x_end, x_s[1], d * x_s[2], inside, SIZE - 1)
    for t0 in range(first, end, BLOCK_T):
        xs = seen + rows(x_ptr, t0 + SIZE - 1, x_end, x_s[1], d * x_s[2], inside, BLOCK_T)
        for i in tl.static_range(BLOCK_T):
            y = activate(tapped(xs, weights, bias, i, SIZE), ACTIVATION)
            there = y_ptr + tl.cast(t0 + i, tl.int64) * D + d
            tl.store(there, y.to(y_ptr.dtype.element_ty), mask=inside & (t0 + i < end))
        seen = xs[BLOCK_T:]


@triton.jit
def convolve_back_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, dy_ptr, dx_ptr, sums_ptr, x_s, weight_s, dy_s, T, D,
    ACTIVATION: tl.constexpr, SIZE: tl.constexpr, STRETCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Of one stretch of x, from its first token to its last, which also hears of the SIZE - 1 tokens of y before it.

    dpre_t = dy_t act'(pre_t);  dx_s = sum_j w_j dpre_{s-j};  dw_j = sum_t dpre_t x_{t+j};  dbias = sum_t dpre_t
    """
    index, d, inside = channels_of(tl.program_id(0), D, BLOCK_D)
    x_end = T + SIZE - 1
    stretches = tl.cdiv(x_end, STRETCH)
    b, first = (index // stretches).to(tl.int64), index % stretches * STRETCH
    end = tl.minimum(first + STRETCH, x_end)
    weights, bias = taps(weight_ptr, bias_ptr, weight_s, d, inside, SIZE)
    x_ptr += b * x_s[0]
    dy_ptr += b * dy_s[0]
    seen = rows(x_ptr, first, x_end, x_s[1], d * x_s[2], inside, SIZE - 1)
    earlier, start = inside & (first > 0), first - (SIZE - 1)
    known = rows(x_ptr, start, x_end, x_s[1], d * x_s[2], earlier, SIZE - 1) + seen
    heard = rows(dy_ptr, start, T, dy_s[1], d * dy_s[2], earlier, SIZE - 1)
    dpres, sums = (), (tl.zeros(d.shape, tl.float32),) * (SIZE + 1)
    for i in tl.static_range(SIZE - 1):
        ahead = heard[i].to(tl.float32) * slope(tapped(known, weights, bias, i, SIZE), ACTIVATION)
        dpres = dpres + (tl.where(earlier & (start + i < T), ahead, 0.0),)  # type: ignore[assignment]  # noqa: RUF005
    for t0 in range(first, end, BLOCK_T):
        xs = seen + rows(x_ptr, t0 + SIZE - 1, x_end, x_s[1], d * x_s[2], inside, BLOCK_T)
        dys = rows(dy_ptr, t0, T, dy_s[1], d * dy_s[2], inside, BLOCK_T)
        for i in tl.static_range(BLOCK_T):
            dpre = dys[i].to(tl.float32) * slope(tapped(xs, weights, bias, i, SIZE), ACTIVATION)
            dpre = tl.where(t0 + i < T, dpre, 0.0)  # blocks end where stretches do
            dpres = dpres + (dpre,)  # type: ignore[assignment]  # noqa: RUF005
            dx, added = tl.zeros(d.shape, tl.float32), ()
            for j in tl.static_range(SIZE):
                dx += weights[j] * dpres[SIZE - 1 + i - j]
                added = added + (sums[j] + dpre * xs[i + j].to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            sums = added + (sums[SIZE] + dpre,)  # noqa: RUF005
            if dx_ptr is not None:
                there = dx_ptr + (b * x_end + t0 + i) * D + d
                tl.store(there, dx.to(dx_ptr.dtype.element_ty), mask=inside & (t0 + i < end))
        seen, dpres = xs[BLOCK_T:], dpres[BLOCK_T:]  # type: ignore[assignment]
    if sums_ptr is not None:
        for j in tl.static_range(SIZE + 1):
            tl.store(sums_ptr + (tl.cast(index, tl.int64) * (SIZE + 1) + j) * D + d, sums[j], mask=inside)


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
    sums = tl.zeros([BLOCK_D], tl.float32)
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
        sums += tl.sum(tl.where(inside, dy * n if FIRST else dy * n * opened, 0.0), 0)
    if sums_ptr is not None:
        piece = (tl.program_id(0) // G).to(tl.int64)
        tl.store(sums_ptr + piece * (G * D) + column, sums, mask=d < D)


@triton.jit
def total_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, dweight_ptr, dbias_ptr, S, D, J, ROWS, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """dweight [D,J], and where there are J + 1 ROWS dbias [D], from sums [S,ROWS,D]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_M], tl.float32)
    for s0 in range(0, S, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        inside = (s < S)[:, None] & (m < ROWS * D)[None, :]
        there = sums_ptr + s[:, None].to(tl.int64) * (ROWS * D) + m[None, :]
        total += tl.sum(tl.load(there, mask=inside, other=0.0), 0)
    j, d = m // D, m % D
    if dweight_ptr is not None:
        tl.store(dweight_ptr + d * J + j, total.to(dweight_ptr.dtype.element_ty), mask=j < J)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + d, total.to(dbias_ptr.dtype.element_ty), mask=j == J)


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


@functools.cache
def _channels(D: int, back: bool) -> Config:
    """One warp, with eight tokens on their way."""
    block = min(32 * CHANNELS[back], triton.next_power_of_2(D))
    return Config({"STRETCH": STRETCH[back], "BLOCK_D": block, "BLOCK_T": 8}, warps=1, stages=1)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> tuple[Tensor]:
    """y [B,T,D] in x's dtype of x [B,T+J-1,D], weight [D,1,J], bias [D]."""
    (B, L, D), SIZE = x.shape, weight.shape[2]
    T = L - SIZE + 1
    y = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
    config = _channels(D, False)
    launch(
        convolve_kernel, (B * -(-T // config["STRETCH"]) * -(-D // config["BLOCK_D"]),), x, weight, _packed(bias), y,
        strides(x), strides(weight), T, D, config=config, ACTIVATION=activation, SIZE=SIZE,
    )  # fmt: skip
    return (y,)


def convolve_back(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dy: Tensor, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What is needed of dx, dweight [D,1,J] and dbias [D], each in its tensor's dtype: two launches, or one for dx."""
    (B, L, D), SIZE = x.shape, weight.shape[2]
    config = _channels(D, True)
    stretches = B * -(-L // config["STRETCH"])
    dx, dweight, dbias = map(_like, (x, weight, bias), needs)
    sums = _sums(stretches, (SIZE + 1) * D, dweight, dbias)
    launch(
        convolve_back_kernel, (stretches * -(-D // config["BLOCK_D"]),), x, weight, _packed(bias), dy, dx, sums,
        strides(x), strides(weight), strides(dy), L - SIZE + 1, D, config=config, ACTIVATION=activation, SIZE=SIZE,
    )  # fmt: skip
    _total(sums, dweight, dbias, D, SIZE, SIZE + 1)
    return dx, dweight, dbias


def _like(x: Tensor | None, needed: bool) -> Tensor | None:
    """Memory for the gradient of x, if it is needed."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed and x is not None else None


def _sums(programs: int, size: int, *given: Tensor | None) -> Tensor | None:
    """Room for what each program has summed, where any of these gradients is wanted of it."""
    some = next((x for x in given if x is not None), None)
    return None if some is None else torch.empty(programs, size, dtype=torch.float32, device=some.device)


def _total(sums: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, D: int, J: int, ROWS: int) -> None:
    """Adds what programs have summed."""
    if sums is not None:
        config = Config({"BLOCK_S": 32, "BLOCK_M": 32}, warps=4, stages=1)
        launch(total_kernel, (-(-ROWS * D // 32),), sums, dweight, dbias, sums.shape[0], D, J, ROWS, config=config)


@functools.cache
def _rows(D: int, back: bool, lanes: int) -> Config:
    """As many rows as 128 threads have room for, of a wide row alone up to 1024 threads. PIECE: those of a sum."""
    block, most = triton.next_power_of_2(D), 128 * ROOM
    rows = max(1, most // block)
    blocks = {"BLOCK_T": rows, "BLOCK_D": block} | ({"PIECE": 16 * rows} if back else {})
    return Config(blocks, warps=min(1024 // lanes, max(4, block // (32 * ROOM))), stages=1)


def norm(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, groups: int, eps: float, mean: bool,
    activation: str | None, gate_first: bool,
) -> tuple[Tensor]:  # fmt: skip
    """y [..,G D] in x's dtype, of x and gate [..,G D], weight [G D]."""
    y, rows = torch.empty(x.shape, dtype=x.dtype, device=x.device), _flat(x, gate)
    T, D = rows[0].shape[0], x.shape[-1] // groups
    config = _rows(D, False, target_of(x.device).lanes)
    launch(
        norm_kernel, (-(-T // config["BLOCK_T"]) * groups,), rows[0], _packed(weight), rows[1], y, *_pitches(*rows),
        T, D, groups, eps, config=config, MEAN=mean, ACTIVATION=activation, FIRST=gate_first,
    )  # fmt: skip
    return (y,)


def norm_back(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, dy: Tensor, needs: list[bool], groups: int, eps: float,
    mean: bool, activation: str | None, gate_first: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """What is needed of dx, dweight and dgate, each in its tensor's dtype: two launches where weights learn."""
    x_, gate_, dy_ = rows = _flat(x, gate, dy)
    T, D = x_.shape[0], x.shape[-1] // groups
    config = _rows(D, True, target_of(x.device).lanes)
    pieces = -(-T // config["PIECE"])
    dx, dweight, dgate = map(_like, (x, weight, gate), needs)
    sums = _sums(pieces, groups * D, dweight)
    launch(
        norm_back_kernel, (pieces * groups,), x_, _packed(weight), gate_, dy_, dx, dgate, sums, *_pitches(*rows),
        T, D, groups, eps, config=config, MEAN=mean, ACTIVATION=activation, FIRST=gate_first,
    )  # fmt: skip
    _total(sums, dweight, None, groups * D, 1, 1)
    return dx, dweight, dgate


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
