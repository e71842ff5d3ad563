"""Triton kernel that puts a gradient of lse into `out`, for backwards of others that know of none."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, launch, side

# aten_cuda.py: fold has the equation.
WIDEST = 512
_LAST = tl.constexpr(WIDEST - 1)


@triton.jit
def _largest(keys, c, first, end, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """In columns first..end of each row: where the largest number stands, and which it is, in float32."""
    best = tl.max(tl.where((c >= first) & (c < end), keys, 0), 1)
    bits = ((best >> 10) | ((best & 1) << 15)).to(tl.int16)
    return _LAST - ((best >> 1) & _LAST), bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _share(left, place, pull, dout, out, moves, least, c, first):  # type: ignore[no-untyped-def]
    """One number of out takes what it can of `left`: dout, out and what its rounding leaves.

    It stands at `place`, where dout is `pull`, or where that is less than `least`, at `first`, where dout becomes so.
    """
    little = tl.abs(pull) < least
    place, pull = tl.where(little, first, place), tl.where(little, least, pull)
    share = (left / pull).to(out.dtype)
    here = moves[:, None] & (c == place[:, None])
    dout, out = tl.where(here, pull[:, None].to(dout.dtype), dout), tl.where(here, share[:, None], out)
    return dout, out, left - share.to(tl.float32) * pull


@triton.jit
def fold_kernel(  # type: ignore[no-untyped-def]
    dlse_ptr, lse_ptr, dout_ptr, out_ptr, pulls_ptr, shares_ptr,
    dlse_strides, lse_strides, dout_strides, out_strides, rows, T, H,
    V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Rows of `rows` = B T H: dout and out anew, contiguous, out three numbers a row where dlse is not 0."""
    row, c = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    real, there, far = row < rows, (row < rows)[:, None] & (c < V)[None, :], c[None, :].to(tl.int64)
    h, t, b = (row % H).to(tl.int64), (row // H % T).to(tl.int64), (row // H // T).to(tl.int64)
    dlse = tl.load(dlse_ptr + b * dlse_strides[0] + t * dlse_strides[1] + h * dlse_strides[2], mask=real, other=0.0)
    lse = tl.load(lse_ptr + b * lse_strides[0] + t * lse_strides[1] + h * lse_strides[2], mask=real, other=0.0)
    moves = (dlse != 0.0) & (lse != -float("inf"))
    at = b * dout_strides[0] + t * dout_strides[1] + h * dout_strides[2]
    dout = tl.load(dout_ptr + at[:, None] + far * dout_strides[3], mask=there, other=0.0)
    at = b * out_strides[0] + t * out_strides[1] + h * out_strides[2]
    out = tl.load(out_ptr + at[:, None] + far * out_strides[3], mask=there, other=0.0)

    left = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1) - dlse
    out, columns = tl.where(moves[:, None], 0.0, out).to(out.dtype), c[None, :]
    # A number's size, its place and its sign in one, so that one maximum finds all three.
    bits = dout.to(tl.int16, bitcast=True).to(tl.int32)
    keys = ((bits & 0x7FFF) << 10) | ((_LAST - columns) << 1) | ((bits >> 15) & 1)
    SHORT: tl.constexpr = V // 3
    SECOND: tl.constexpr = SHORT + (1 if V % 3 > 0 else 0)
    THIRD: tl.constexpr = SECOND + SHORT + (1 if V % 3 > 1 else 0)
    place_0, pull_0 = _largest(keys, columns, 0, SECOND, dout.dtype)
    place_1, pull_1 = _largest(keys, columns, SECOND, THIRD, dout.dtype)
    place_2, pull_2 = _largest(keys, columns, THIRD, V, dout.dtype)
    least = tl.maximum(tl.maximum(tl.abs(pull_0), tl.abs(pull_1)), tl.abs(pull_2))
    least = tl.maximum(least * 2.0**-40, 2.0**-64)
    dout, out, left = _share(left, place_0, pull_0, dout, out, moves, least, columns, 0)
    dout, out, left = _share(left, place_1, pull_1, dout, out, moves, least, columns, SECOND)
    dout, out, left = _share(left, place_2, pull_2, dout, out, moves, least, columns, THIRD)

    places = row.to(tl.int64)[:, None] * V + columns
    tl.store(pulls_ptr + places, dout, mask=there)
    tl.store(shares_ptr + places, out, mask=there)


def fold(dlse: Tensor, lse: Tensor, dout: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """(dout, out) [B,T,H,V] of 16 bits, 2 < V <= WIDEST, as aten_cuda.py: fold; dlse, lse [B,T,H]; any strides."""
    B, T, H, V = out.shape
    pulls, shares = (torch.empty(out.shape, dtype=out.dtype, device=out.device) for _ in range(2))
    width = side(V, WIDEST)
    config = Config({"BLOCK_R": max(1, 1024 // width), "BLOCK_V": width}, 4, 1)
    launch(
        fold_kernel, (-(-(B * T * H) // config["BLOCK_R"]),),
        dlse, lse, dout, out, pulls, shares, *(x.stride() for x in (dlse, lse, dout, out)), B * T * H, T, H,
        config=config, V=V,
    )  # fmt: skip
    return pulls, shares
