"""Channels and states: every one of every row is some program's, what lies outside is nobody's, rates are A's.

Sums of four tokens go to their own rows, and none behind the end.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import interpreting
from foci.tiles.channels import channels_of, four_sums, load_four, states_of, store_four

if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1, which `make test` sets for these", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")


@triton.jit
def _channels(out_ptr, D, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    index, d, inside = channels_of(tl.program_id(0), D, BLOCK_D)
    tl.store(out_ptr + index * D + d, index * 100 + d, mask=inside)


@triton.jit
def _states(A_ptr, out_ptr, A_strides, D, K, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    index, d, channels, k, keys, inside, rates = states_of(tl.program_id(0), A_ptr, A_strides, D, K, BLOCK_D, BLOCK_K)
    both = channels[:, None] & keys[None, :]
    tl.store(out_ptr + (index * D + d[:, None]) * K + k[None, :], rates, mask=both & inside)


@triton.jit
def _sums(x_ptr, y_ptr, out_ptr, x_strides, end, D, K: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    _, d, channels = channels_of(tl.program_id(0), D, BLOCK_D)
    k, t0, tiles = tl.arange(0, K), 1, ()
    for i in tl.static_range(4):
        there = y_ptr + ((t0 + i) * D + d[:, None]) * K + k[None, :]
        tiles = tiles + (tl.load(there, mask=channels[:, None], other=0.0),)  # noqa: RUF005
    store_four(
        out_ptr, four_sums(tiles, 1) + load_four(x_ptr, t0, end, x_strides, d, channels), t0, end, d, channels, D
    )


@pytest.mark.parametrize("D", [1, 4, 7])
def test_every_channel_of_every_row_is_some_programs(D: int) -> None:
    out = torch.full((3, D), -1, device=DEVICE)
    _channels[(3 * -(-D // 4),)](out, D, 4)
    assert torch.equal(out.cpu(), 100 * torch.arange(3)[:, None] + torch.arange(D))


def test_states_come_with_the_decay_rates_of_any_strides() -> None:
    A = -torch.rand(5, 3)
    for each in (A, A.T.contiguous().T):
        out = torch.full((2, 5, 3), math.nan, device=DEVICE)
        each = each.to(DEVICE)
        _states[(2 * 3,)](each, out, each.stride(), 5, 3, 2, 4)
        torch.testing.assert_close(out.cpu(), (A / math.log(2)).expand(2, -1, -1))


@pytest.mark.parametrize("end", [2, 4, 5])
def test_sums_of_four_tokens_go_to_their_rows(end: int) -> None:
    D, K = 5, 8
    x, y = torch.randn(1, 6, 2 * D)[..., ::2], torch.randn(6, D, K)
    out = torch.full((6, D), math.nan, device=DEVICE)
    there = torch.zeros(1, 6, 2 * D, device=DEVICE)[..., ::2].copy_(x)
    _sums[(2,)](there, y.to(DEVICE), out, there.stride(), end, D, K, 4)
    expected = torch.full((6, D), math.nan)
    expected[1:end] = y[1:end].sum(-1) + x[0, 1:end]
    torch.testing.assert_close(out.cpu(), expected, equal_nan=True)
