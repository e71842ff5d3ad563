"""Pairs of two operands of rows, in half precision, against ops/gates.py in float64; and their gradients."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.ops.gates import Gates
from foci.tiles import near, pairs, state
from foci.tiles.memory import store_tile
from tests.ops.in_triton import DEVICE
from tests.ops.recurrences import error
from tests.tiles.test_gates import _tile, normal, room
from tests.tiles.test_near import BUDGETS, IEEE, KINDS, C, K, gates_of

TF32 = 5e-4  # half a unit of the last digit, as operands are rounded


@triton.jit
def _rounded(x_ptr, y_ptr, n):
    i = tl.arange(0, 64)
    tl.store(y_ptr + i, state.rounded(tl.load(x_ptr + i, mask=i < n, other=0.0), "tf32"), mask=i < n)


def test_rounding_keeps_what_tf32_can_say_and_what_is_no_number() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, 1 + 2**-10, 1 + 2**-11 + 2**-13, 3e-39, torch.nan])
    negative = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN of other bits
    x, y = torch.cat([x, negative]), room(12)
    _rounded[(1,)](x.to(DEVICE), y, 12)
    expected = x.clone()
    expected[4:6] = torch.nan  # infinite: no number a product has a use for, and none that is lost
    expected[7] = 1 + 2**-10
    torch.testing.assert_close(y.cpu(), expected, rtol=0, atol=6e-42, equal_nan=True)


@triton.jit
def _pairs(x_ptr, e_ptr, y_ptr, g_ptr, A_ptr, FAR: tl.constexpr):
    A, E = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32)
    for k in range(0, 32, 16):
        x, e, y = _tile(x_ptr, k, 32, 16), _tile(e_ptr, k, 32, 16), _tile(y_ptr, k, 32, 16)
        c, _ = near.sums_in_two(_tile(g_ptr, k, 32, 16), FAR)
        A, E = pairs.pairs_in_two(A, E, x, e, y, c, FAR, tl.float16, IEEE)
    store_tile(A_ptr, A, 0, 64, 64, 0, 64, 1)
    store_tile(A_ptr + 64 * 64, E, 0, 64, 64, 0, 64, 1)


@KINDS
def test_pairs(kind: str) -> None:
    g, x, e, y, found = gates_of(32, kind), normal(1, C, 32), normal(2, C, 32), normal(3, C, 32), room(2, C, C)
    _pairs[(1,)](*(z.to(DEVICE) for z in (x, e, y, g)), found, True)
    truth = Gates(g.double(), True).pairs(torch.stack([x, e], 1)[None].double(), y[None].double())[0]
    assert error(found[0].cpu().tril(), truth[:, 0]) < max(BUDGETS[kind], TF32)
    assert error(found[1].cpu().tril(-1), truth[:, 1].tril(-1)) < max(BUDGETS[kind], TF32)


@pytest.mark.parametrize("kind", ["zero", "open"])
def test_without_far_rows_the_launch_for_them_changes_nothing(kind: str) -> None:
    x, y, g = normal(1, C, 32).to(DEVICE), normal(2, C, 32).to(DEVICE), gates_of(32, kind).to(DEVICE)
    one, other = room(2, C, C), room(2, C, C)
    _pairs[(1,)](x, x, y, g, one, True)
    _pairs[(1,)](x, x, y, g, other, False)
    assert torch.equal(one, other)


@triton.jit
def _back(x_ptr, y_ptr, g_ptr, dA_ptr, rows_ptr, d_ptr, PRECISION: tl.constexpr):
    x, y, dA = _tile(x_ptr, 0, 16, 16), _tile(y_ptr, 0, 16, 16), _tile(dA_ptr, 0, 64, 64)
    on, dA = pairs.on_diagonal(dA)[:, None], pairs.below(dA)
    c, _ = near.sums_in_two(_tile(g_ptr, 0, 16, 16), True)
    zero, nothing = tl.zeros([64, 16], tl.float32), tl.zeros([64, 64], tl.float32)
    P, P_low = pairs.parted(dA, tl.float16, PRECISION)
    both, rows = (P, P_low, nothing, nothing), _tile(rows_ptr, 0, 16, 16)
    dx, dy, by_token = on * y, on * x, zero
    for i in range(near.bands(c)):
        rise, lift = near.of_band(c, i, True)
        first = tl.where(i == 0, near.DOWN, 0.0)
        to_x, _, to_y, found = pairs.band_backward(
            first * rows, zero, zero, both, x, x, y, rise, lift, tl.float16, PRECISION
        )
        dx, dy, by_token = dx + to_x, dy + to_y, by_token + found
    dg = pairs.sums_behind(by_token, zero, tl.float16)
    store_tile(d_ptr, dx, 0, 64, 16, 0, 16, 1)
    store_tile(d_ptr + 64 * 16, dy, 0, 64, 16, 0, 16, 1)
    store_tile(d_ptr + 2 * 64 * 16, dg, 0, 64, 16, 0, 16, 1)


@KINDS
def test_gradients(kind: str) -> None:
    """`by_x`, what a state before the chunk adds to the gradient of x exp(c), is in dx and in dg."""
    g, dA, x, y, by_x = gates_of(K, kind), normal(4, C, C), normal(1, C, K), normal(2, C, K), normal(5, C, K)
    found = room(3, C, K)
    _back[(1,)](*(z.to(DEVICE) for z in (x, y, g, dA, by_x)), found, IEEE)
    truth, rows, columns = Gates(g.double(), True), x[None, :, None].double(), y[None].double()
    dx, dy, dg = truth.pairs_backward(dA[None, :, None].double(), truth.pairs(rows, columns), rows, columns)
    nothing = torch.zeros_like(truth.rise)
    dg = dg + truth.backward(by_x * x * truth.rise, nothing, nothing[:, 0])
    for one, expected in zip(found.cpu(), (dx[:, :, 0] + truth.rise * by_x, dy, dg), strict=True):
        assert error(one, expected[0]) < max(BUDGETS[kind], TF32)
