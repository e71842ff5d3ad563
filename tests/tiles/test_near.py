"""Device functions of decays in half precision against ops/gates.py in float64: far, near, and where both meet."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.ops.gates import Gates
from foci.tiles import near
from foci.tiles.memory import load_tile, store_tile
from tests.ops.in_triton import DEVICE
from tests.ops.recurrences import error
from tests.tiles.test_gates import _tile, drawn, normal, room

C, K = 64, 16
IEEE = tl.constexpr("ieee")
# Sums of gates are rounded in proportion to themselves: in all, to what bfloat16 tells.
BUDGETS = {"zero": 1e-6, "open": 1e-5, "closed": 2e-3, "meeting": 2e-4, "mixed": 2e-3, "some": 2e-3, "cut": 1e-4}
OWN = pytest.mark.parametrize("own", [True, False])
KINDS = pytest.mark.parametrize("kind", BUDGETS)


def gates_of(D: int, kind: str) -> Tensor:
    """[1,C,D], also: sums that come to FAR on the way; strong gates among weak ones; one that forgets all."""
    draw = torch.Generator().manual_seed(D)
    if kind == "zero":
        return torch.zeros(1, C, D)
    if kind == "meeting":
        return -3.0 * torch.rand(1, C, D, generator=draw)
    if kind == "some":
        strong = torch.tensor([-40.0, -1e30, -torch.inf])[torch.randint(0, 3, (1, C, D), generator=draw)]
        return torch.where(torch.rand(1, C, D, generator=draw) < 0.1, strong, -1e-3)
    if kind == "cut":
        return torch.where(torch.arange(C)[:, None] == 20, -torch.inf, -0.1).expand(1, C, D).contiguous()
    return drawn(D, kind)


@triton.jit
def _by_token(g_ptr, W_ptr, rise_ptr, fall_ptr, total_ptr, OWN: tl.constexpr):
    t = tl.arange(0, 64)
    g = tl.load(g_ptr + t)
    rise, fall, total = near.ends_and_total(g, OWN, True)
    tl.store(total_ptr, total)
    store_tile(W_ptr, near.weights(g, OWN, True), 0, 64, 64, 0, 64, 1)
    tl.store(rise_ptr + t, rise)
    tl.store(fall_ptr + t, fall)


@OWN
@KINDS
def test_per_token(kind: str, own: bool) -> None:
    g, W, rise, fall, total = gates_of(1, kind), room(C, C), room(C), room(C), room(1)
    _by_token[(1,)](g.to(DEVICE), W, rise, fall, total, own)
    truth = Gates(g.double(), own)
    assert truth.weights is not None
    for found, expected in (W, truth.weights[0]), (rise, truth.rise[0, :, 0]), (fall, truth.fall[0, :, 0]):
        assert (found.cpu() - expected).abs().max() < BUDGETS[kind]
    assert (total.cpu() - g.double().sum().exp()).abs() < BUDGETS[kind]


@triton.jit
def _weighted(x_ptr, g_ptr, into_ptr, BELOW: tl.constexpr, NEAR: tl.constexpr):
    g = tl.load(g_ptr + tl.arange(0, 64))
    store_tile(into_ptr, near.weighted(_tile(x_ptr, 0, 64, 64), g, BELOW, NEAR), 0, 64, 64, 0, 64, 1)


@KINDS
@pytest.mark.parametrize(("below", "half"), [(True, True), (False, True), (True, False)])
def test_what_no_weight_is_for_is_not_read(kind: str, below: bool, half: bool) -> None:
    g, x, found = gates_of(1, kind), normal(1, C, C).float(), room(C, C)
    unread = torch.ones(C, C).triu(0 if below else 1) > 0
    _weighted[(1,)](x.masked_fill(unread, torch.nan).to(DEVICE), g.to(DEVICE), found, below, half)
    weights = Gates(g.double(), True).weights
    assert weights is not None
    expected = (x * weights[0]).masked_fill(unread, 0.0)
    assert (found.cpu() - expected).abs().max() < 4 * BUDGETS[kind]


@triton.jit
def _gradient_by_token(P_ptr, rise_ptr, fall_ptr, total_ptr, dg_ptr, OWN: tl.constexpr):
    t = tl.arange(0, 64)
    P = _tile(P_ptr, 0, 64, 64)
    dg = near.by_chunk(P, tl.load(rise_ptr + t), tl.load(fall_ptr + t), tl.load(total_ptr), OWN, True)
    tl.store(dg_ptr + t, dg)


@OWN
@KINDS
def test_gradient_per_token(kind: str, own: bool) -> None:
    g, dA, x, y = gates_of(1, kind), normal(1, 1, C, 1, C), normal(2, 1, C, 1, K), normal(3, 1, C, K)
    truth, found = Gates(g.double(), own), room(C)
    A = truth.pairs(x.double(), y.double())
    by_rise, by_fall, through = normal(4, 1, C, 1) * truth.rise, normal(5, 1, C, 1) * truth.fall, normal(6, 1, 1)
    P = (dA.double() * A)[0, :, 0]
    given = (z.float().to(DEVICE) for z in (P, by_rise, by_fall, through * truth.total))
    _gradient_by_token[(1,)](*given, found, own)
    expected = truth.pairs_backward(dA.double(), A, x.double(), y.double())[2]
    expected = expected + truth.backward(by_rise, by_fall, through)
    assert error(found.cpu(), expected[0, :, 0]) < 1e-5


@triton.jit
def _both(A, x_risen, x, y, risen, c, close, OWN: tl.constexpr):
    """A with the pairs of near rows, by one product, and of far ones."""
    products = tl.dot(x_risen, tl.trans(y * near.lift(c)).to(x.dtype), input_precision="ieee")
    A += tl.where(near.seen(close, OWN), products, 0.0)
    return near.far_pairs(A, x, y, risen, c, close, OWN, IEEE)


@triton.jit
def _pairs(x_ptr, y_ptr, g_ptr, A_ptr, ends_ptr, OWN: tl.constexpr):
    A = tl.zeros([64, 64], tl.float32)
    for k in range(0, 32, 16):
        x, y, g = _tile(x_ptr, k, 32, 16), _tile(y_ptr, k, 32, 16), _tile(g_ptr, k, 32, 16)
        risen, c, close = near.exponents(g, OWN)
        A = _both(A, (x * tl.exp(risen)).to(x.dtype), x, y, risen, c, close, OWN)
        rise, fall = near.ends(g, OWN, True)
        store_tile(ends_ptr, rise, 0, 64, 32, k, 32, 1)
        store_tile(ends_ptr + 64 * 32, fall, 0, 64, 32, k, 32, 1)
    store_tile(A_ptr, A, 0, 64, 64, 0, 64, 1)


@OWN
@KINDS
def test_per_channel(kind: str, own: bool) -> None:
    g, x, y = gates_of(32, kind), normal(1, C, 32), normal(2, C, 32)
    A, ends = room(C, C), room(2, C, 32)
    _pairs[(1,)](*(z.to(DEVICE) for z in (x, y, g)), A, ends, own)
    truth = Gates(g.double(), own)
    assert error(A.cpu(), truth.pairs(x[None, :, None].double(), y[None].double())[0, :, 0]) < BUDGETS[kind]
    assert (ends[0].cpu() - truth.rise[0]).abs().max() < BUDGETS[kind]
    assert (ends[1].cpu() - truth.fall[0]).abs().max() < BUDGETS[kind]


@pytest.mark.parametrize("kind", ["open", "meeting", "mixed"])
@pytest.mark.parametrize("late", [-torch.inf, -1e30, torch.nan])
def test_what_comes_later_changes_no_bit(kind: str, late: float) -> None:
    g, x, y = gates_of(32, kind), normal(1, C, 32).to(DEVICE), normal(2, C, 32).to(DEVICE)
    found = []
    for gates in (g, torch.where(torch.arange(C)[:, None] >= 37, late, g)):
        A, ends = room(C, C), room(2, C, 32)
        _pairs[(1,)](x, y, gates.contiguous().to(DEVICE), A, ends, True)
        found.append((A[:37], ends[0, :37]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@triton.jit
def _pairs_of_sums(x_ptr, y_ptr, c_ptr, A_ptr):
    x, y, c = _tile(x_ptr, 0, 16, 16), _tile(y_ptr, 0, 16, 16), _tile(c_ptr, 0, 16, 16)
    A = tl.zeros([64, 64], tl.float32)
    A = _both(A, x * tl.exp(c), x, y, c, c, tl.min(c, 1) >= near.FAR, True)
    store_tile(A_ptr, A, 0, 64, 64, 0, 64, 1)


def test_a_column_that_rounding_puts_below_far_is_read_by_near_rows() -> None:
    x, y, A = normal(1, C, K), normal(2, C, K), room(C, C)
    c = torch.full((C, K), -60.0)
    c[::2] = -60.000004  # even tokens are far, though a gate of 0 stands between them and the next
    _pairs_of_sums[(1,)](*(z.to(DEVICE) for z in (x, y, c)), A)
    assert error(A.cpu(), (x @ y.T).tril()) < 1e-5


@triton.jit
def _pairs_back(x_ptr, y_ptr, g_ptr, dA_ptr, rows_ptr, d_ptr, OWN: tl.constexpr, PRECISION: tl.constexpr):
    dA, x, y, g = _tile(dA_ptr, 0, 64, 64), _tile(x_ptr, 0, 16, 16), _tile(y_ptr, 0, 16, 16), _tile(g_ptr, 0, 16, 16)
    dy, dg = _tile(d_ptr + 64 * 16, 0, 16, 16), _tile(d_ptr + 2 * 64 * 16, 0, 16, 16)
    risen, c, close = near.exponents(g, OWN)
    by_rows = _tile(rows_ptr, 0, 16, 16)
    dx, dy, dg = near.pairs_backward(by_rows, dy, dg, dA, x, y, risen, c, close, OWN, PRECISION)
    far_dx, far_dy, far_dg = near.far_backward(dA, x, y, risen, c, close, OWN, PRECISION)
    store_tile(d_ptr, dx + far_dx, 0, 64, 16, 0, 16, 1)
    store_tile(d_ptr + 64 * 16, dy + far_dy, 0, 64, 16, 0, 16, 1)
    store_tile(d_ptr + 2 * 64 * 16, dg + far_dg, 0, 64, 16, 0, 16, 1)


@OWN
@KINDS
@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_gradients_per_channel(kind: str, own: bool, precision: str) -> None:
    """`by_rows`, what a state before the chunk adds to the gradient of x exp(risen), is in dx and in dg."""
    g, dA, x, y = gates_of(K, kind), normal(4, C, C), normal(1, C, K), normal(2, C, K)
    for by_rows in (torch.zeros(C, K), normal(5, C, K)):
        found = torch.zeros(3, C, K, device=DEVICE)
        _pairs_back[(1,)](*(z.to(DEVICE) for z in (x, y, g, dA, by_rows)), found, own, precision)
        truth, rows, columns = Gates(g.double(), own), x[None, :, None].double(), y[None].double()
        dx, dy, dg = truth.pairs_backward(dA[None, :, None].double(), truth.pairs(rows, columns), rows, columns)
        dx = dx[:, :, 0] + truth.rise * by_rows
        nothing = torch.zeros_like(truth.rise)
        dg = dg + truth.backward(by_rows * x * truth.rise, nothing, nothing[:, 0])
        for one, expected in zip(found.cpu(), (dx, dy, dg), strict=True):
            assert error(one, expected[0]) < BUDGETS[kind]


@triton.jit
def _sums(g_ptr, c_ptr, gone_ptr, once_ptr):
    g = _tile(g_ptr, 0, 16, 16)
    c, gone, once = near.sums_and_total(g, 5.0)
    again, last = near.sums_in_two(g, False)
    store_tile(c_ptr, c - again, 0, 64, 16, 0, 16, 1)
    store_tile(gone_ptr, gone - tl.exp2(last + 5.0), 0, 64, 16, 0, 16, 1)
    store_tile(once_ptr, once, 0, 32, 16, 0, 16, 1)


def test_sums_as_one_product_are_those_of_two() -> None:
    g, c, gone, once = gates_of(K, "open"), room(C, K), room(C, K), room(C // 2, K)
    _sums[(1,)](g.to(DEVICE), c, gone, once)
    assert c.abs().max() == gone.abs().max() == 0
    assert error(once.cpu() / 32, g[0].double().sum(0).exp().expand(32, K)) < 1e-5


@triton.jit
def _bands(c_ptr, count_ptr):
    c = load_tile(c_ptr, 0, 64, 16, 0, 16, 1, 64, 16)
    count = tl.zeros([64, 16], tl.float32)
    for i in tl.range(near.bands(c)):
        rise, _ = near.of_band(c, i, True)
        count += tl.where(rise > 0, 1.0, 0.0)
    store_tile(count_ptr, count, 0, 64, 16, 0, 16, 1)


@pytest.mark.parametrize("k", [1, 2, 3, 7, 12, 30, 54])
@pytest.mark.parametrize("towards", [0.0, None, -torch.inf])
def test_each_sum_is_in_one_band(k: int, towards: float | None) -> None:
    """Also the last one of all on a band's border, or the number beside it."""
    c, count, border = torch.zeros(64, 16), room(64, 16), torch.tensor(near.LOW.value) * k
    c[40], c[-1, 3] = border / 2, border if towards is None else torch.nextafter(border, torch.tensor(towards))
    _bands[(1,)](c.to(DEVICE), count)
    assert (count.cpu() == 1).all()


@triton.jit
def _nearest(x_ptr, y_ptr):
    x = _tile(x_ptr, 0, 16, 16)
    both = near.above_each_other(near.nearest(x, "tf32"), near.nearest(-x, "ieee"))
    above, below = near.apart(both)
    cut = (above.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    store_tile(y_ptr, cut + below, 0, 64, 16, 0, 16, 1)


def test_what_products_cut_off_has_been_added_to() -> None:
    x, y = normal(1, C, K), room(C, K)
    _nearest[(1,)](x.to(DEVICE), y)
    assert (y.cpu().abs() <= x.abs() * 2.0**-11).all() and y.abs().max() > 0


@triton.jit
def _nearest_alone(x_ptr, y_ptr):
    store_tile(y_ptr, near.nearest(_tile(x_ptr, 0, 16, 16), "tf32"), 0, 64, 16, 0, 16, 1)


def test_what_is_no_number_stays_none_whatever_its_bits() -> None:
    """A GPU's arithmetic gives the NaN of bits 0x7fffffff, to which nothing can be added as to an integer."""
    x, y = normal(1, C, 16), room(C, 16)
    x[..., 3, :], x[..., 5, :] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32), torch.nan
    _nearest_alone[(1,)](x.to(DEVICE), y)
    assert torch.equal(y.cpu().isnan().view(-1), x.isnan().view(-1)) and x.isnan().sum() == 32
