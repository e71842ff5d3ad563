"""Probabilities made again from lse, tile by tile: masks, bias, softcap, dropout against plain torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import interpreting
from foci.ops.softmax.dropout import keep
from foci.tiles.softmax_backward import probabilities, stays

if not interpreting():
    pytest.skip("these run in Triton's interpreter: TRITON_INTERPRET=1", allow_module_level=True)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x_ptr, lse_ptr, bias_ptr, dense_ptr, seed_ptr, p_ptr, y_ptr, stays_ptr, bias_strides, dense_strides, T, S, scale,
    softcap, threshold, PRECISE: tl.constexpr,
):  # fmt: skip
    t, s = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    one = tl.program_id(0) + 1
    lse = tl.load(lse_ptr + t)
    products = tl.load(x_ptr + t * 32 + s)
    pairs = (bias_ptr, bias_strides, dense_ptr, dense_strides, T, S)
    zero = one - 1
    p, y = probabilities(products, lse, zero, zero, t, s, pairs, one, one, scale, softcap, PRECISE, PRECISE)
    tl.store(p_ptr + t * 32 + s, p)
    tl.store(y_ptr + t * 32 + s, y)
    if seed_ptr is not None:
        tl.store(stays_ptr + t * 32 + s, stays(seed_ptr, one, one, t, s, threshold, False).to(tl.int32))


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_pairs", [True, False])
def test_probabilities(precise: bool, softcap: float | None, with_pairs: bool) -> None:
    torch.manual_seed(0)
    T, S = 13, 30
    x, lse = torch.randn(16, 32), torch.randn(16)
    lse[3] = torch.inf
    bias, dense = torch.randn(1, 2, T, S), torch.rand(2, 2, T, 1) < 0.6
    expanded = (bias.expand(2, 2, T, S), dense.expand(2, 2, T, S)) if with_pairs else (None, None)
    p, y, kept = torch.empty(16, 32), torch.empty(16, 32), torch.empty(16, 32, dtype=torch.int32)
    strides = ((0,) * 4 if x is None else x.stride() for x in expanded)
    given = lse if precise else lse * 1.4426950408889634
    _kernel[(1,)](
        x, given, *expanded, torch.tensor(5), p, y, kept, *strides, T, S, 0.5, softcap, int(0.3 * 2**53),
        PRECISE=precise,
    )  # fmt: skip
    z = 0.5 * x if softcap is None else softcap * torch.tanh(0.5 * x / softcap)
    if with_pairs:
        z[:T, :S] += bias[0, 1]
    expected = torch.exp(z - lse[:, None])[:T, :S]
    if with_pairs:
        expected = expected.masked_fill(~dense[1, 1], 0.0)
    assert torch.allclose(p[:T, :S], expected, rtol=1e-5, atol=0)
    assert not p[3].any()
    if softcap is not None:
        assert torch.allclose(y, torch.tanh(0.5 * x / softcap), atol=3e-7)
    index = (torch.full((1, 1), 1), torch.full((1, 1), 1), torch.arange(16)[:, None], torch.arange(32)[None, :])
    assert torch.equal(kept.bool(), keep(torch.tensor(5), 0.3, *index))
