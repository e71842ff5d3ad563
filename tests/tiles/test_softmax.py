"""Device functions of softmax against masks as their docstrings put them, and against torch's softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foci.ops.masks import Dense, Visible, lower
from foci.tiles import softmax as tiles
from foci.tiles.softmax import between, conclude, join, join_sink, keys_of, logits, queries_of, stretches
from tests.ops.in_triton import DEVICE
from tests.ops.oracle import joined, mask_parts, visible

FAR = tiles.FAR.value


@triton.jit
def _bounds(
    q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr, low_ptr, step_low, high_ptr, step_high,
    left, right, mask_ptr, turned_ptr, ways_ptr, T, S, END: tl.constexpr, START: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, STEP: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The mask of one batch row from the queries' side and from the keys' side, and the stretches of its blocks."""
    b = tl.program_id(0)
    mask = (q_offsets_ptr, kv_offsets_ptr, documents, kv_lengths_ptr, q_lengths_ptr,
            low_ptr, step_low, high_ptr, step_high, END, START, left, right)  # fmt: skip
    t, s = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
    places = b * T * S + t[:, None] * S + s[None, :]
    inside = (t < T)[:, None] & (s < S)[None, :]
    low, high = keys_of(mask, b, tl.minimum(t, T - 1), T, S)
    tl.store(mask_ptr + places, between(s[None, :], low[:, None], high[:, None]).to(tl.int8), mask=inside)
    first, last = queries_of(mask, b, tl.minimum(s, S - 1), T, S)
    tl.store(turned_ptr + places, between(t[:, None], first[None, :], last[None, :]).to(tl.int8), mask=inside)
    a, i, o, z = stretches(low, high, STEP)
    tl.store(ways_ptr + b * 8, a)
    tl.store(ways_ptr + b * 8 + 1, i)
    tl.store(ways_ptr + b * 8 + 2, o)
    tl.store(ways_ptr + b * 8 + 3, z)
    a, i, o, z = stretches(first, last, STEP)
    tl.store(ways_ptr + b * 8 + 4, a)
    tl.store(ways_ptr + b * 8 + 5, i)
    tl.store(ways_ptr + b * 8 + 6, o)
    tl.store(ways_ptr + b * 8 + 7, z)


def bounds(seen: Visible, B: int, T: int, S: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    there = Visible(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in seen))
    masks = torch.full((2, B, T, S), -1, dtype=torch.int8, device=DEVICE)
    ways = torch.full((B, 8), -1, dtype=torch.int32, device=DEVICE)
    documents = 0 if seen.q_offsets is None else seen.q_offsets.shape[0] - 1
    steps = [int(x is not None and x.numel() > 1) for x in (seen.band_low, seen.band_high)]
    _bounds[(B,)](
        there.q_offsets, there.kv_offsets, documents, there.kv_lengths, there.q_lengths, there.band_low, steps[0],
        there.band_high, steps[1], seen.left, seen.right, masks[0], masks[1], ways, T, S,
        END=seen.causal_end, START=seen.causal_start, BLOCK_T=16, BLOCK_S=32, STEP=4,
    )  # fmt: skip
    return masks[0].cpu(), masks[1].cpu(), ways.tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_masks_are_intervals_from_both_sides_and_blocks_are_told_apart(data: st.DataObject) -> None:
    B, T, S = (data.draw(st.integers(1, n)) for n in (2, 13, 19))
    parts = tuple(part for part in data.draw(mask_parts(B, 1, T, S)) if not isinstance(part, Dense))
    seen = lower(joined(parts))
    if seen.q_offsets is not None and seen.q_offsets.shape[0] == 1:
        return
    truth = visible(parts, B, 1, T, S)[:, 0]
    mask, turned, ways = bounds(seen, B, T, S)
    assert torch.equal(mask.bool(), truth)
    assert torch.equal(turned.bool(), truth)
    for row, way in zip(truth, ways, strict=True):
        for (start, inner, outer, stop), allowed in ((way[:4], row), (way[4:], row.T)):
            assert start <= inner <= outer and not any(place % 4 for place in (start, inner, outer))
            everything = torch.nonzero(allowed.any(0)).flatten().tolist()
            assert all(start <= place < stop for place in everything)
            assert stop == (everything[-1] + 1 if everything else 0) and (not everything or start > everything[0] - 4)
            for first in range(0, allowed.shape[1] + 4, 4):
                block = allowed[:, first : first + 4]
                whole = block.shape[1] == 4 and bool(block.all())
                assert (inner <= first < outer) == whole, (way, first)


@triton.jit
def _sum(
    x_ptr, bias_ptr, sink_ptr, lse_ptr, share_ptr, scale, softcap, S, PRECISE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    t = tl.arange(0, BLOCK_T)
    top, mass = tl.full((BLOCK_T,), -float("inf"), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    for s0 in range(0, S, BLOCK_S):
        places = t[:, None] * S + s0 + tl.arange(0, BLOCK_S)[None, :]
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + places)
        x, factor = logits(tl.load(x_ptr + places), scale, softcap, bias, PRECISE, True)
        p, fade, top, mass = join(x, factor, top, mass)
        total = total * fade + tl.sum(p, 1)
    if sink_ptr is not None:
        fade, top, mass = join_sink(tl.load(sink_ptr + t), top, mass)
        total *= fade
    share, lse = conclude(top, mass)
    tl.store(lse_ptr + t, lse)
    tl.store(share_ptr + t, total * share)


def test_the_sum_through_blocks_is_a_softmax() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, generator=draw) * 3
    x[1] *= 40
    bias = torch.randn(16, 64, generator=draw)
    bias[2, :40], bias[3], bias[4, 16:] = -torch.inf, -torch.inf, -torch.inf
    sinks = torch.randn(16, generator=draw)
    sinks[5] = -torch.inf
    for softcap in (None, 0.7, 30.0):
        for sink in (None, sinks):
            z = x.double() * 0.5
            z = (z if softcap is None else softcap * torch.tanh(z / softcap)) + bias.double()
            extra = torch.full((16,), -torch.inf).double() if sink is None else sink.double()
            truth = torch.logaddexp(z.logsumexp(-1), extra)
            for precise, budget in ((True, 3e-7), (False, 3e-6)):
                lse, share = (torch.full((16,), torch.nan, device=DEVICE) for _ in range(2))
                given_sink = None if sink is None else sink.to(DEVICE)
                _sum[(1,)](
                    x.to(DEVICE), bias.to(DEVICE), given_sink, lse, share, 0.5, softcap, 64,
                    PRECISE=precise, BLOCK_T=16, BLOCK_S=16,
                )  # fmt: skip
                seen = (z.logsumexp(-1) - truth).exp().nan_to_num(0.0)
                torch.testing.assert_close(lse.cpu().double(), truth, rtol=budget, atol=budget * (softcap or 1))
                torch.testing.assert_close(share.cpu().double(), seen, rtol=1e-6, atol=1e-6 * (softcap or 1))
