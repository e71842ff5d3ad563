"""Dropout's coins in a kernel are those of ops/softmax/dropout.py, bit for bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.ops.softmax.dropout import keep, placed, positions
from foci.tiles.random import kept, row_coins
from tests.ops.in_triton import DEVICE


@triton.jit(do_not_specialize=["b", "h"])
def _coins(seed_ptr, out_ptr, b, h, threshold, PLACED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):  # type: ignore[no-untyped-def]
    t, s = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
    row = row_coins(seed_ptr, b, h, t, PLACED)
    coins = kept(row[:, None], seed_ptr, s[None, :], threshold, PLACED)
    tl.store(out_ptr + t[:, None] * BLOCK_S + s[None, :], coins)


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("seed", [0, 1, 1234567890123456789, 2**62 - 1])
def test_the_coins_are_those_of_every_backend(seed: int, p: float) -> None:
    plain = torch.tensor(seed, device=DEVICE)
    far = placed(plain, b=(3, 2), h=(1, 5), t=(2**33, 3), s=(40, 8))
    for numbers in (plain, far):
        whole = keep(numbers, p, *positions(3, 4, 16, 64, DEVICE))
        for b, h in ((0, 0), (2, 1), (1, 3)):
            out = torch.empty(16, 64, dtype=torch.int8, device=DEVICE)
            _coins[(1,)](numbers, out, b, h, int(p * 2**53), PLACED=numbers.dim() == 1, BLOCK_T=16, BLOCK_S=64)
            assert torch.equal(out.bool(), whole[b, h]), (seed, p, b, h)
