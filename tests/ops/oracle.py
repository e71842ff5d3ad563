"""Masks as their docstrings put them, pair by pair in plain Python, and random ones; shares no code with the source."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from foci import Causal, Dense, Lengths, Mask, Packed, Window
from foci.ops.masks import Band


def visible(parts: tuple[Mask, ...], B: int, H: int, T: int, S: int) -> Tensor:
    """The boolean [B, H, T, S] of several masks at once, one pair after another."""
    allowed = torch.zeros(B, H, T, S, dtype=torch.bool)
    for b in range(B):
        for t in range(T):
            for s in range(S):
                if _sees(parts, b, t, s, T, S):
                    allowed[b, :, t, s] = True
    for part in parts:
        if isinstance(part, Dense):
            allowed &= part.allowed
    return allowed


def _sees(parts: tuple[Mask, ...], b: int, t: int, s: int, T: int, S: int) -> bool:
    queries, keys, place = T, S, b
    for part in parts:
        if isinstance(part, Packed):
            q_offsets = part.q_offsets.tolist()
            kv_offsets = q_offsets if part.kv_offsets is None else part.kv_offsets.tolist()
            for n in range(len(q_offsets) - 1):
                if q_offsets[n] <= t < q_offsets[n + 1] and kv_offsets[n] <= s < kv_offsets[n + 1]:
                    queries, keys = q_offsets[n + 1] - q_offsets[n], kv_offsets[n + 1] - kv_offsets[n]
                    t, s, place = t - q_offsets[n], s - kv_offsets[n], n
                    break
            else:
                return False
    position = t + keys - queries
    for part in parts:
        if isinstance(part, Lengths):
            real = int(part.kv_lengths[place])
            if s >= real:
                return False
            if part.q_lengths is None:
                position = t + max(real - queries, min(keys - queries, 0))
            else:
                if t >= int(part.q_lengths[place]):
                    return False
                position = t + real - int(part.q_lengths[place])
    for part in parts:
        if isinstance(part, Band):
            low, high = (_own(bound, place) for bound in (part.low, part.high))
            if (low is not None and s < t + low) or (high is not None and s > t + high):
                return False
        if isinstance(part, Causal) and s > (position if part.align == "bottom-right" else t):
            return False
        if isinstance(part, Window) and part.left is not None and s < position - part.left:
            return False
        if isinstance(part, Window) and part.right is not None and s > position + part.right:
            return False
    return True


def _own(bound: int | Tensor | None, place: int) -> int | None:
    """The bound of one row or document."""
    if not isinstance(bound, Tensor):
        return bound
    return int(bound[place] if bound.numel() > 1 else bound[0])


def joined(parts: tuple[Mask, ...]) -> Mask | None:
    """The parts composed with `&`."""
    mask: Mask | None = None
    for part in parts:
        mask = part if mask is None else mask & part
    return mask


@st.composite
def offsets(draw: st.DrawFn, size: int, documents: int) -> Tensor:
    """[N+1] from 0, never decreasing: empty documents and a tail behind the last one among them."""
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=documents, max_size=documents)))
    return torch.tensor([0, *inner], dtype=draw(st.sampled_from((torch.int32, torch.int64))))


@st.composite
def mask_parts(draw: st.DrawFn, B: int, H: int, T: int, S: int) -> tuple[Mask, ...]:
    """Up to one mask of each kind (two Causal, one of each alignment), in any order."""
    parts: list[Mask] = []
    rows, q_limits, kv_limits = B, [T] * B, [S] * B
    if B == 1 and draw(st.booleans()):
        rows = draw(st.integers(0, 3))
        q_offsets = draw(offsets(T, rows))
        kv_offsets = draw(offsets(S, rows)) if T != S or draw(st.booleans()) else None
        parts.append(Packed(q_offsets, kv_offsets))
        q_limits = q_offsets.diff().tolist()
        kv_limits = q_limits if kv_offsets is None else kv_offsets.diff().tolist()
    if draw(st.booleans()):
        lengths = [[draw(st.integers(0, n)) for n in limits] for limits in (kv_limits, q_limits)]
        kv, q = (torch.tensor(values, dtype=torch.int64) for values in lengths)
        parts.append(Lengths(kv, q if draw(st.booleans()) else None))
    if draw(st.booleans()):
        parts.append(Causal())
    if draw(st.integers(0, 4)) == 0:
        parts.append(Causal("top-left"))
    if draw(st.integers(0, 2)) == 0:
        reach: Any = st.none() | st.integers(0, 6)
        parts.append(Window(draw(reach), draw(reach)))
    if draw(st.integers(0, 2)) == 0:
        one = st.none() | st.integers(-6, 6)
        each = st.builds(torch.tensor, st.lists(st.integers(-6, 6), min_size=rows, max_size=rows))
        parts.append(Band(*(draw(each if rows and draw(st.booleans()) else one) for _ in range(2))))
    if draw(st.integers(0, 3)) == 0:
        shape = [draw(st.sampled_from((1, n))) for n in (B, H, T, S)][draw(st.integers(0, 3)) :]
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        parts.append(Dense(torch.rand(shape, generator=generator) < 0.7))
    return tuple(draw(st.permutations(parts)))
