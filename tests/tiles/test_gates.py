"""Device functions of decays against ops/gates.py in float64: extreme gates, in every mix."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.ops.gates import Gates
from foci.tiles import gates
from foci.tiles.memory import load_tile, store_tile
from tests.ops.in_triton import DEVICE
from tests.ops.recurrences import error

C, K = 64, 16
EXTREMES = torch.tensor([0.0, -1e-6, -0.3, -2.0, -20.0, -1e4, -torch.inf])
IEEE = tl.constexpr("ieee")


def drawn(D: int, kind: str) -> Tensor:
    """[1,C,D]: every extreme in one chunk, gates that stay open, or all of them nearly closed."""
    draw = torch.Generator().manual_seed(D)
    if kind == "mixed":
        return EXTREMES[torch.randint(0, len(EXTREMES), (1, C, D), generator=draw)]
    scale = {"open": -0.05, "closed": -20.0}[kind]
    return scale * (0.5 + torch.rand(1, C, D, generator=draw))


KINDS = pytest.mark.parametrize("kind", ["mixed", "open", "closed"])
OWN = pytest.mark.parametrize("own", [True, False])


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def room(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, device=DEVICE)


def close(found: Tensor, truth: Tensor) -> bool:
    """Within the budget, and nothing above it in any place where the answer is all but 0."""
    found, truth = found.cpu().double().reshape(truth.shape), truth.double()
    return error(found, truth) < 1e-5 and bool(((found - truth).abs() < 1e-5 * truth.abs().max() + 1e-30).all())


@triton.jit
def _by_token(g_ptr, stride, rows, W_ptr, rise_ptr, fall_ptr, total_ptr, OWN: tl.constexpr):
    t = tl.arange(0, 64)
    g = gates.load_gates(g_ptr, 0, rows, stride, 64)
    rise, fall = gates.ends(g, OWN)
    store_tile(W_ptr, gates.weights(g, OWN), 0, 64, 64, 0, 64, 1)
    tl.store(rise_ptr + t, rise)
    tl.store(fall_ptr + t, fall)
    tl.store(total_ptr, gates.total(g))


@OWN
@KINDS
@pytest.mark.parametrize("rows", [64, 17, 1])
@pytest.mark.parametrize("constant", [False, True])
def test_per_token(kind: str, own: bool, rows: int, constant: bool) -> None:
    g = drawn(1, kind)
    if constant:
        g[:] = g[:, :1].clone()
    padded = torch.where(torch.arange(C)[:, None] < rows, g, 0.0)
    W, rise, fall, total = room(C, C), room(C), room(C), room(1)
    _by_token[(1,)](g.to(DEVICE), 0 if constant else 1, rows, W, rise, fall, total, own)
    truth = Gates(padded.double(), own)
    assert truth.weights is not None
    assert all(map(close, (W, rise, fall, total), (truth.weights[0], truth.rise, truth.fall, truth.total)))


@triton.jit
def _gradient_by_token(P_ptr, rise_ptr, fall_ptr, total_ptr, dg_ptr, OWN: tl.constexpr):
    t = tl.arange(0, 64)
    P = load_tile(P_ptr, 0, 64, 64, 0, 64, 1, 64, 64)
    dg = gates.by_pairs(P, OWN)
    dg += gates.by_ends(tl.load(rise_ptr + t), tl.load(fall_ptr + t), tl.load(total_ptr), OWN)
    tl.store(dg_ptr + t, dg)


@OWN
@KINDS
def test_gradient_per_token(kind: str, own: bool) -> None:
    g, dA, x, y = drawn(1, kind), normal(1, 1, C, 1, C), normal(2, 1, C, 1, K), normal(3, 1, C, K)
    by_rise, by_fall, by_total, found = normal(4, C), normal(5, C), normal(6, 1), room(C)
    truth = Gates(g.double(), own)
    A = truth.pairs(x.double(), y.double())
    expected = truth.pairs_backward(dA.double(), A, x.double(), y.double())[2]
    by_rise, by_fall = by_rise * truth.rise[0, :, 0].float(), by_fall * truth.fall[0, :, 0].float()
    P, times_total = (dA.double() * A).float()[0, :, 0].to(DEVICE), (by_total * truth.total[0]).float()
    _gradient_by_token[(1,)](P, by_rise.to(DEVICE), by_fall.to(DEVICE), times_total.to(DEVICE), found, own)
    expected = expected + truth.backward(by_rise[None, :, None], by_fall[None, :, None], by_total[None])
    assert close(found, expected)


@triton.jit
def _tile(ptr, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    return load_tile(ptr, 0, 64, WIDTH, k, WIDTH, 1, 64, BLOCK_K)


@triton.jit
def _pairs(x_ptr, e_ptr, y_ptr, g_ptr, A_ptr, ends_ptr, total_ptr, OWN: tl.constexpr, TWO: tl.constexpr):
    A, E = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32)
    for k in range(0, 32, 16):
        x, y, g = _tile(x_ptr, k, 32, 16), _tile(y_ptr, k, 32, 16), _tile(g_ptr, k, 32, 16)
        if TWO:
            A, E = gates.pairs_of_two(A, E, x, _tile(e_ptr, k, 32, 16), y, g, IEEE)
        else:
            A = gates.pairs(A, x, y, g, OWN, IEEE)
        rise, fall = gates.ends(g, OWN)
        store_tile(ends_ptr, rise, 0, 64, 32, k, 32, 1)
        store_tile(ends_ptr + 64 * 32, fall, 0, 64, 32, k, 32, 1)
        tl.store(total_ptr + k + tl.arange(0, 16), gates.total(g))
    store_tile(A_ptr, A, 0, 64, 64, 0, 64, 1)
    store_tile(A_ptr + 64 * 64, E, 0, 64, 64, 0, 64, 1)


@KINDS
@pytest.mark.parametrize(("own", "two"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_per_channel(kind: str, own: bool, two: bool, dtype: torch.dtype, budget: float) -> None:
    g = drawn(32, kind)
    x, e, y = (normal(seed, C, 32).to(DEVICE, dtype) for seed in (1, 2, 3))
    A, ends, total = room(2, C, C), room(2, C, 32), room(32)
    _pairs[(1,)](x, e, y, g.to(DEVICE), A, ends, total, own, two)
    truth = Gates(g.double(), own)
    rows = torch.stack([x, e], 1)[None].cpu().double()
    expected = truth.pairs(rows, y[None].cpu().double())[0].transpose(0, 1)
    assert error(A[0].cpu(), expected[0]) < budget
    if two:
        assert error(A[1].cpu(), expected[1].tril(-1)) < budget
    assert close(ends[0], truth.rise) and close(ends[1], truth.fall) and close(total, truth.total)


def test_what_comes_later_changes_no_bit() -> None:
    g, x, y = drawn(32, "open"), normal(1, C, 32).to(DEVICE), normal(2, C, 32).to(DEVICE)
    found = []
    for late in (g, torch.where(torch.arange(C)[:, None] >= 37, -torch.inf, g)):
        A, ends, total = room(2, C, C), room(2, C, 32), room(32)
        _pairs[(1,)](x, x, y, late.to(DEVICE), A, ends, total, True, False)
        found.append((A[0, :37], ends[0, :37]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@triton.jit
def _pairs_back(x_ptr, y_ptr, g_ptr, dA_ptr, d_ptr, OWN: tl.constexpr, PRECISION: tl.constexpr):
    dA, x, y, g = _tile(dA_ptr, 0, 64, 64), _tile(x_ptr, 0, 16, 16), _tile(y_ptr, 0, 16, 16), _tile(g_ptr, 0, 16, 16)
    dx, dy, dg = _tile(d_ptr, 0, 16, 16), _tile(d_ptr + 64 * 16, 0, 16, 16), _tile(d_ptr + 2 * 64 * 16, 0, 16, 16)
    dx, dy, dg = gates.pairs_backward_onto(dx, dy, dg, dA, x, y, g, OWN, PRECISION)
    store_tile(d_ptr, dx, 0, 64, 16, 0, 16, 1)
    store_tile(d_ptr + 64 * 16, dy, 0, 64, 16, 0, 16, 1)
    store_tile(d_ptr + 2 * 64 * 16, dg, 0, 64, 16, 0, 16, 1)


@OWN
@KINDS
@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_gradients_per_channel(kind: str, own: bool, precision: str) -> None:
    g, dA, x, y = drawn(K, kind), normal(4, C, C), normal(1, C, K), normal(2, C, K)
    found, already = torch.zeros(3, C, K, device=DEVICE), normal(3, 3, C, K)
    _pairs_back[(1,)](*(z.to(DEVICE) for z in (x, y, g, dA)), found, own, precision)
    truth, rows, columns = Gates(g.double(), own), x[None, :, None].double(), y[None].double()
    dx, dy, dg = truth.pairs_backward(dA[None, :, None].double(), truth.pairs(rows, columns), rows, columns)
    assert close(found[0], dx[0, :, 0]) and close(found[1], dy) and close(found[2], dg)
    onto = already.to(DEVICE, copy=True)
    _pairs_back[(1,)](*(z.to(DEVICE) for z in (x, y, g, dA)), onto, own, precision)
    torch.testing.assert_close(onto.cpu(), already + found.cpu())


@triton.jit
def _ends_back(rise_ptr, fall_ptr, total_ptr, dg_ptr, OWN: tl.constexpr):
    by_total = tl.load(total_ptr + tl.arange(0, 16))
    store_tile(
        dg_ptr,
        gates.by_ends(_tile(rise_ptr, 0, 16, 16), _tile(fall_ptr, 0, 16, 16), by_total, OWN),
        0,
        64,
        16,
        0,
        16,
        1,
    )


@OWN
@KINDS
def test_gradient_of_the_ends_per_channel(kind: str, own: bool) -> None:
    truth = Gates(drawn(K, kind).double(), own)
    by_rise, by_fall = normal(1, 1, C, K) * truth.rise.float(), normal(2, 1, C, K) * truth.fall.float()
    by_total, dg = normal(3, 1, K), room(C, K)
    times_total = (by_total * truth.total).float()
    _ends_back[(1,)](by_rise.to(DEVICE), by_fall.to(DEVICE), times_total.to(DEVICE), dg, own)
    assert close(dg, truth.backward(by_rise.double(), by_fall.double(), by_total.double()))
