"""What the parts of a chunk's backward compute, each in a kernel of its own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.tiles.chunk_backward import across, gather, load_in_two, of_beta, onto, right, store_in_two
from foci.tiles.memory import load_tile, store_tile
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_triton import DEVICE


@triton.jit
def products(x_ptr, y_ptr, right_ptr, onto_ptr, across_ptr, V: tl.constexpr):  # type: ignore[no-untyped-def]
    x, y = load_tile(x_ptr, 0, V, V, 0, V, 1, V, V), load_tile(y_ptr, 0, V, V, 0, V, 1, V, V)
    store_tile(right_ptr, right(x, y, y, "ieee"), 0, V, V, 0, V, 1)
    store_tile(across_ptr, across(x, tl.trans(y), y, "ieee"), 0, V, V, 0, V, 1)
    high, low = load_in_two(x_ptr, 0, 0, V, V, V, V, True)
    store_tile(onto_ptr, onto(y, high, low, y, "ieee"), 0, V, V, 0, V, 1)


@triton.jit
def heads(x_ptr, sums_ptr, into_ptr, R, rows, K, C: tl.constexpr):  # type: ignore[no-untyped-def]
    for r in range(R):
        tile = load_tile(x_ptr + r * rows * K, 0, rows, K, 0, K, 1, C, 32)
        gather(into_ptr, sums_ptr, 0, tile, r, R, 0, rows, K, 0, K)


def test_a_product_with_float32_keeps_its_digits() -> None:
    x, y = torch.randn(2, 32, 32, device=DEVICE).unbind()
    found = torch.empty(3, 32, 32, device=DEVICE)
    products[(1,)](x, y, *found, V=32)
    torch.testing.assert_close(found, (x @ y + y).expand(3, 32, 32), atol=1e-5, rtol=1e-5)


def test_heads_are_summed_one_after_the_other() -> None:
    x = torch.randn(3, 21, 20, device=DEVICE)
    sums, into = (torch.full((21, 20), torch.nan, device=DEVICE, dtype=t) for t in (torch.float32, torch.float16))
    heads[(1,)](x, sums, into, 3, 21, 20, C=32)
    assert torch.equal(into, (x[0] + x[1] + x[2]).half())
    heads[(1,)](x, None, into, 1, 21, 20, C=32)
    assert torch.equal(into, x[0].half())


@triton.jit
def in_two(x_ptr, into_ptr, half, rows, K, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = load_tile(x_ptr, 0, rows, K, 0, K, 1, 32, 32)
    store_in_two(into_ptr, half, tile, 0, rows, K, 0, K, WHOLE)


@pytest.mark.parametrize("rows, K, whole", [(21, 20, False), (32, 32, True)])
def test_a_tile_keeps_its_digits_as_two_in_bfloat16(rows: int, K: int, whole: bool) -> None:
    x = torch.randn(rows, K, device=DEVICE)
    two = torch.empty(2, rows, K, device=DEVICE, dtype=torch.bfloat16)
    in_two[(1,)](x, two, two[0].numel(), rows, K, WHOLE=whole)
    torch.testing.assert_close(two.float().sum(0), x, atol=0, rtol=2**-14)  # the interpreter cuts digits off
    one = torch.empty(rows, K, device=DEVICE)
    in_two[(1,)](x, one, 0, rows, K, WHOLE=whole)
    assert torch.equal(one, x)


@triton.jit
def rows_in_two(x_ptr, into_ptr, half, rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    high, low = load_in_two(x_ptr, half, 1, rows, 32, ROWS, 32, False)
    store_tile(into_ptr, high.to(tl.float32) + low.to(tl.float32), 0, ROWS, 32, 0, 32, 1)


def test_rows_that_are_two_are_loaded_from_any_on_and_end_with_zeros() -> None:
    two = torch.randn(2, 12, 32, device=DEVICE).bfloat16()
    into = torch.empty(16, 32, device=DEVICE)
    rows_in_two[(1,)](two, into, two[0].numel(), 12, ROWS=16)
    assert torch.equal(into[:11], two[:, 1:].float().sum(0)) and not into[11:].any()


@triton.jit
def beside(x_ptr, y_ptr, into_ptr, V: tl.constexpr):  # type: ignore[no-untyped-def]
    x, y = load_tile(x_ptr, 0, V, V, 0, V, 1, V, V), load_tile(y_ptr, 0, V, V, 0, V, 1, V, V)
    store_tile(into_ptr, across(x, y, tl.zeros([V, V], tl.float32), "ieee"), 0, V, V, 0, V, 1)


@pytest.mark.usefixtures("halves")
def test_float32_beside_bfloat16_is_two_of_them() -> None:
    x, y = torch.randn(2, 32, 32, device=DEVICE).unbind()
    found = torch.empty(32, 32, device=DEVICE)
    beside[(1,)](x.bfloat16(), y, found, V=32)
    torch.testing.assert_close(found, x.bfloat16().float() @ y.T, atol=1e-3, rtol=0)  # rounded once 2.7e-2


@triton.jit
def betas(by_error_ptr, beta_ptr, otherwise_ptr, into_ptr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    t = tl.arange(0, T)
    found = of_beta(tl.load(by_error_ptr + t), tl.load(beta_ptr + t), tl.load(otherwise_ptr + t), 2.0**-60)
    tl.store(into_ptr + t, found)


def test_the_gradient_of_a_beta_that_is_too_small_to_divide_by_is_its_definition() -> None:
    by_error, otherwise = torch.tensor([[3.0, -1.0, 2.0, 1e-19], [7.0, 7.0, 7.0, 7.0]], device=DEVICE).unbind()
    beta, into = torch.tensor([2.0, -0.5, 0.0, 1e-19], device=DEVICE), torch.empty(4, device=DEVICE)
    betas[(1,)](by_error, beta, otherwise, into, T=4)
    assert into.tolist() == [1.5, 2.0, 7.0, 7.0]
