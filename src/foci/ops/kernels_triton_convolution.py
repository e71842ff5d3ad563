"""Short causal convolutions in Triton: one launch each way, and one that adds the gradients of weights; one a step.

A thread walks the tokens of its channels with all taps in registers. Before the first token lie those of an earlier
call, or zeros; of packed documents a token's age tells which taps reach its own.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, launch, strides
from foci.tiles.activation import activate, slope
from foci.tiles.channels import channels_of
from foci.tiles.stretches import rows
from foci.tiles.sums import total

STRETCH = 64  # tokens of a program
CHANNELS, AHEAD = (4, 2), (8, 4)  # of a thread, forward and backward; tokens on their way to it


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
def earlier(x_ptr, before_ptr, first, T, stride, D, columns, d, inside, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The COUNT rows before row `first` of x, 0 from T on; before row 0 those of before [COUNT,D], or zeros."""
    found = rows(x_ptr, first - COUNT, T, stride, columns, inside & (first > 0), COUNT)
    if before_ptr is not None:
        others = rows(before_ptr, 0, COUNT, D, d, inside & (first == 0), COUNT)
        for i in tl.static_range(COUNT):  # the oldest goes behind, until all have
            found = found[1:] + (tl.where(first == 0, others[i], found[0]),)  # noqa: RUF005
    return found


@triton.jit
def reached(x, ages_ptr, t, end, BACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, or 0 where the document of token t begins after the token BACK places before."""
    if ages_ptr is not None and BACK > 0:
        x = tl.where(tl.load(ages_ptr + t, mask=t < end, other=0) >= BACK, x, 0.0)
    return x


@triton.jit
def tapped(xs, weights, bias, ages_ptr, t, end, START: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """sum_j w_j x_{t - SIZE + 1 + j} + bias: x of the last is xs[START + SIZE - 1]."""
    total = bias
    for j in tl.static_range(SIZE):
        total += weights[j] * reached(xs[START + j].to(tl.float32), ages_ptr, t, end, SIZE - 1 - j)
    return total


@triton.jit
def convolve_kernel(  # type: ignore[no-untyped-def]
    x_ptr, before_ptr, ages_ptr, weight_ptr, bias_ptr, y_ptr, x_s, weight_s, T, D,
    ACTIVATION: tl.constexpr, SIZE: tl.constexpr, STRETCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """y_t = act(sum_j w_j x_{t - SIZE + 1 + j} + bias) of one stretch."""
    index, d, inside = channels_of(tl.program_id(0), D, BLOCK_D)
    stretches, columns = tl.cdiv(T, STRETCH), d * x_s[2]
    b, first = (index // stretches).to(tl.int64), index % stretches * STRETCH
    end = tl.minimum(first + STRETCH, T)
    weights, bias = taps(weight_ptr, bias_ptr, weight_s, d, inside, SIZE)
    x_ptr += b * x_s[0]
    y_ptr += b * T * D
    if before_ptr is not None:
        before_ptr += b * (SIZE - 1) * D
    seen = earlier(x_ptr, before_ptr, first, T, x_s[1], D, columns, d, inside, SIZE - 1)
    for t0 in range(first, end, BLOCK_T):
        xs = seen + rows(x_ptr, t0, T, x_s[1], columns, inside, BLOCK_T)
        for i in tl.static_range(BLOCK_T):
            y = activate(tapped(xs, weights, bias, ages_ptr, t0 + i, end, i, SIZE), ACTIVATION)
            there = y_ptr + tl.cast(t0 + i, tl.int64) * D + d
            tl.store(there, y.to(y_ptr.dtype.element_ty), mask=inside & (t0 + i < end))
        seen = xs[BLOCK_T:]


@triton.jit
def convolve_back_kernel(  # type: ignore[no-untyped-def]
    x_ptr, before_ptr, ages_ptr, weight_ptr, bias_ptr, dy_ptr, dx_ptr, dbefore_ptr, sums_ptr, x_s, weight_s, dy_s, T, D,
    ACTIVATION: tl.constexpr, SIZE: tl.constexpr, STRETCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Of one stretch of y, which ends SIZE - 1 tokens behind T; after token t all has come that x of t - SIZE + 1 gets.

    dpre_t = dy_t act'(pre_t);  dx_{t - SIZE + 1 + j} += w_j dpre_t;  dw_j = sum_t dpre_t x_{t - SIZE + 1 + j};
    dbias = sum_t dpre_t. Of the SIZE - 1 tokens before the stretch dpre is computed again.
    """
    index, d, inside = channels_of(tl.program_id(0), D, BLOCK_D)
    WIDTH: tl.constexpr = SIZE - 1
    stretches, columns, last = tl.cdiv(T + WIDTH, STRETCH), d * x_s[2], T + WIDTH
    b, first = (index // stretches).to(tl.int64), index % stretches * STRETCH
    end = tl.minimum(first + STRETCH, last)
    weights, bias = taps(weight_ptr, bias_ptr, weight_s, d, inside, SIZE)
    x_ptr += b * x_s[0]
    dy_ptr += b * dy_s[0]
    if before_ptr is not None:
        before_ptr += b * WIDTH * D
    nothing = tl.zeros(d.shape, tl.float32)
    pending, sums = (nothing,) * SIZE, (nothing,) * (SIZE + 1)
    seen = earlier(x_ptr, before_ptr, first, T, x_s[1], D, columns, d, inside, WIDTH)
    start, known = first - WIDTH, inside & (first > 0)
    heard = earlier(x_ptr, None, start, T, x_s[1], D, columns, d, known, WIDTH) + seen
    told = rows(dy_ptr, start, T, dy_s[1], d * dy_s[2], known, WIDTH)
    for i in tl.static_range(WIDTH):
        t = tl.maximum(start + i, 0)
        ahead = told[i].to(tl.float32) * slope(tapped(heard, weights, bias, ages_ptr, t, T, i, SIZE), ACTIVATION)
        ahead, waiting = tl.where(known & (start + i < T), ahead, 0.0), ()
        for j in tl.static_range(1, SIZE):
            share = weights[j] * reached(ahead, ages_ptr, t, T, SIZE - 1 - j)
            waiting = waiting + (pending[j] + share,)  # type: ignore[assignment]  # noqa: RUF005
        pending = waiting + (nothing,)  # noqa: RUF005
    for t0 in range(first, end, BLOCK_T):
        xs = seen + rows(x_ptr, t0, T, x_s[1], columns, inside, BLOCK_T)
        dys = rows(dy_ptr, t0, T, dy_s[1], d * dy_s[2], inside, BLOCK_T)
        for i in tl.static_range(BLOCK_T):
            t = t0 + i
            dpre = dys[i].to(tl.float32) * slope(tapped(xs, weights, bias, ages_ptr, t, T, i, SIZE), ACTIVATION)
            dpre, passed, added = tl.where(t < T, dpre, 0.0), (), ()  # blocks end where stretches do
            for j in tl.static_range(SIZE):
                x = reached(xs[i + j].to(tl.float32), ages_ptr, t, T, SIZE - 1 - j)
                added = added + (sums[j] + dpre * x,)  # type: ignore[assignment]  # noqa: RUF005
                share = weights[j] * reached(dpre, ages_ptr, t, T, SIZE - 1 - j)
                passed = passed + (pending[j] + share,)  # type: ignore[assignment]  # noqa: RUF005
            sums, pending = added + (sums[SIZE] + dpre,), passed[1:] + (nothing,)  # noqa: RUF005
            dx, s = passed[0], tl.cast(t - WIDTH, tl.int64)  # type: ignore[misc]
            if dx_ptr is not None:
                there = dx_ptr + (b * T + s) * D + d
                tl.store(there, dx.to(dx_ptr.dtype.element_ty), mask=inside & (s >= 0) & (t < end))
            if dbefore_ptr is not None:
                there = dbefore_ptr + (b * WIDTH + t) * D + d
                tl.store(there, dx.to(dbefore_ptr.dtype.element_ty), mask=inside & (s < 0))
        seen = xs[BLOCK_T:]
    if sums_ptr is not None:
        for j in tl.static_range(SIZE + 1):
            tl.store(sums_ptr + (tl.cast(index, tl.int64) * (SIZE + 1) + j) * D + d, sums[j], mask=inside)


@triton.jit
def weights_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, dweight_ptr, dbias_ptr, S, D, SIZE, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """dweight [D,SIZE] and dbias [D] from sums [S,SIZE + 1,D]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    found, j, d = total(sums_ptr, m, S, (SIZE + 1) * D, BLOCK_S), m // D, m % D
    if dweight_ptr is not None:
        tl.store(dweight_ptr + d * SIZE + j, found.to(dweight_ptr.dtype.element_ty), mask=j < SIZE)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + d, found.to(dbias_ptr.dtype.element_ty), mask=j == SIZE)


@triton.jit
def convolve_step_kernel(  # type: ignore[no-untyped-def]
    x_ptr, tail_ptr, weight_ptr, bias_ptr, y_ptr, x_s, tail_s, weight_s, D,
    ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One token of each row, x [B,D]: y from tail [B,SIZE-1,D] and x, which the tail then ends with."""
    b, d, inside = channels_of(tl.program_id(0), D, BLOCK_D)
    b = b.to(tl.int64)
    weights, bias = taps(weight_ptr, bias_ptr, weight_s, d, inside, SIZE)
    tail_ptr += b * tail_s[0]
    x = tl.load(x_ptr + b * x_s[0] + d * x_s[1], mask=inside, other=0.0).to(tail_ptr.dtype.element_ty)
    xs = rows(tail_ptr, 0, SIZE - 1, tail_s[1], d * tail_s[2], inside, SIZE - 1) + (x,)  # noqa: RUF005
    y = activate(tapped(xs, weights, bias, None, 0, 1, 0, SIZE), ACTIVATION)
    tl.store(y_ptr + b * D + d, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # several lanes may have read what one of them writes
    for j in tl.static_range(SIZE - 1):
        tl.store(tail_ptr + j * tail_s[1] + d * tail_s[2], xs[j + 1], mask=inside)


@functools.cache
def _channels(D: int, back: bool) -> Config:
    """One warp."""
    block = min(32 * CHANNELS[back], triton.next_power_of_2(D))
    return Config({"STRETCH": STRETCH, "BLOCK_D": block, "BLOCK_T": AHEAD[back]}, warps=1, stages=1)


def convolve(
    x: Tensor, before: Tensor | None, ages: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor]:
    """y [B,T,D] in x's dtype of x [B,T,D], before [B,J-1,D], ages [T], weight [D,1,J], bias [D]."""
    (B, T, D), config = x.shape, _channels(x.shape[2], False)
    y = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
    launch(
        convolve_kernel, (B * -(-T // STRETCH) * -(-D // config["BLOCK_D"]),), x, _packed(before), _packed(ages),
        weight, _packed(bias), y, strides(x), strides(weight), T, D, config=config, ACTIVATION=activation,
        SIZE=weight.shape[2],
    )  # fmt: skip
    return (y,)


def convolve_back(
    x: Tensor, before: Tensor | None, ages: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str | None,
    dy: Tensor, needs: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What is needed of dx, dbefore, None, dweight and dbias, each in its tensor's dtype: two launches, or one."""
    (B, T, D), SIZE, config = x.shape, weight.shape[2], _channels(x.shape[2], True)
    stretches = B * -(-(T + SIZE - 1) // STRETCH)
    dx, dbefore, _, dweight, dbias = (
        torch.empty(given.shape, dtype=given.dtype, device=given.device) if need and given is not None else None
        for given, need in zip((x, before, None, weight, bias), needs, strict=True)
    )
    learns = dweight is not None or dbias is not None
    sums = torch.empty(stretches, SIZE + 1, D, dtype=torch.float32, device=x.device) if learns else None
    launch(
        convolve_back_kernel, (stretches * -(-D // config["BLOCK_D"]),), x, _packed(before), _packed(ages), weight,
        _packed(bias), dy, dx, dbefore, sums, strides(x), strides(weight), strides(dy), T, D, config=config,
        ACTIVATION=activation, SIZE=SIZE,
    )  # fmt: skip
    if learns:
        config = Config({"BLOCK_S": 32, "BLOCK_M": 32}, warps=4, stages=1)
        launch(weights_kernel, (-(-(SIZE + 1) * D // 32),), sums, dweight, dbias, stretches, D, SIZE, config=config)
    return dx, dbefore, None, dweight, dbias


def convolve_step(
    x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor]:
    """y [B,D] in x's dtype of x [B,D], tail [B,J-1,D], which is changed in place, weight [D,1,J], bias [D]."""
    (B, D), block = x.shape, min(128, triton.next_power_of_2(x.shape[1]))
    y = torch.empty(B, D, dtype=x.dtype, device=x.device)
    launch(
        convolve_step_kernel, (B * -(-D // block),), x, tail, weight, _packed(bias), y, strides(x), strides(tail),
        strides(weight), D, config=Config({"BLOCK_D": block}, warps=1, stages=1), ACTIVATION=activation,
        SIZE=weight.shape[2],
    )  # fmt: skip
    return (y,)


def _packed(x: Tensor | None) -> Tensor | None:
    """In one piece."""
    return None if x is None else x.contiguous()
