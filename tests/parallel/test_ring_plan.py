"""The plan of a ring, painted pair by pair, is the mask: any mask, order, lengths and number of ranks."""

from __future__ import annotations

import random
from typing import cast, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foci import Causal, Dense, Lengths, Mask, Packed, Window
from foci.ops.masks import NOTHING_HIDDEN, Band, Segment, lower, segments
from foci.ops.masks import materialize as painted
from foci.parallel.balance import Order, Piece, length, pieces
from foci.parallel.ring_plan import any_visible, distances, pairs
from tests.ops.oracle import joined, mask_parts, visible

ORDERS = get_args(Order)


def paint(
    whole: list[Segment], B: int, T: int, S: int, q: list[list[Piece]], k: list[list[Piece]], apart: bool
) -> Tensor:
    """How often each query meets each key over all ranks: [B, T, S] counts."""
    seen = torch.zeros(B, T, S, dtype=torch.int64)
    for mine in q:
        rows = torch.tensor([place for piece in mine for place in piece.positions], dtype=torch.int64)
        for theirs in k:
            columns = torch.tensor([place for piece in theirs for place in piece.positions], dtype=torch.int64)
            for pair in pairs(whole, mine, theirs, q_apart=apart, k_apart=apart):
                here, there = rows[pair.queries], columns[pair.keys]
                for piece, places in ((pair.q_piece, here), (pair.k_piece, there)):
                    assert piece is None or list(piece.positions) == places.tolist()
                    assert piece is not None or not apart
                allowed = painted(pair.visible, len(here), len(there))[:, 0].expand(B, -1, -1)
                assert allowed.any(), "a pair that sees nothing"
                assert allowed.any(0).any(1)[[0, -1]].all() and allowed.any(0).any(0)[[0, -1]].all(), "untrimmed"
                seen[:, here[:, None], there[None]] += allowed.long()
    return seen


def check(mask: Mask | None, truth: Tensor, order: Order, size: int, sizes: tuple[int, int, int]) -> None:
    B, T, S = sizes
    whole = segments(lower(mask), B, T, S)
    q, k = ([pieces(order, n, size, rank) for rank in range(size)] for n in (T, S))
    for apart in (False, True):
        assert torch.equal(paint(whole, B, T, S, q, k, apart), truth.expand(B, T, S).long())
    used = distances(whole, q, k)
    assert used[0] == 0
    for r in range(size):
        for d in range(size):
            assert d in used or not any_visible(whole, q[r], k[(r - d) % size])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_random_masks_are_met_once_and_exactly(data: st.DataObject) -> None:
    B, T, S = data.draw(st.tuples(st.integers(1, 3), st.integers(0, 13), st.integers(0, 13)))
    if data.draw(st.booleans()):
        S = T
    parts = tuple(part for part in data.draw(mask_parts(B, 1, T, S)) if not isinstance(part, Dense))
    order, size = data.draw(st.sampled_from(ORDERS)), data.draw(st.integers(1, 5))
    check(joined(parts), visible(parts, B, 1, T, S)[:, 0], order, size, (B, T, S))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_any_runs_will_do(data: st.DataObject) -> None:
    """Plain order takes shards of any length, those of queries unlike those of keys."""
    B, size = 1, data.draw(st.integers(1, 4))
    lengths = [[data.draw(st.integers(0, 5)) for _ in range(size)] for _ in range(2)]
    T, S = map(sum, lengths)
    runs = []
    for each in lengths:
        starts = [sum(each[:rank]) for rank in range(size)]
        runs.append([[Piece(start, 1, count)] if count else [] for start, count in zip(starts, each, strict=True)])
    parts = tuple(part for part in data.draw(mask_parts(B, 1, T, S)) if not isinstance(part, Dense))
    seen = paint(segments(lower(joined(parts)), B, T, S), B, T, S, *runs, apart=False)
    assert torch.equal(seen, visible(parts, B, 1, T, S)[:, 0].long())


def _documents(draw: random.Random, T: int, S: int) -> tuple[Mask, ...]:
    """Up to five documents of any lengths, and what may hide more of them."""

    def some(*values: int | Tensor) -> int | Tensor | None:
        return draw.choice([None, *values])

    N = draw.randint(1, 5)
    q, k = (torch.tensor([0, *sorted(draw.randint(0, n) for _ in range(N))]) for n in (T, S))
    k = q if T == S and draw.random() < 0.5 else k
    parts: list[Mask] = [Packed(q, k)]
    if draw.random() < 0.4:
        kept = [torch.tensor([draw.randint(0, n) for n in each.diff().tolist()]) for each in (k, q)]
        parts.append(Lengths(kept[0], draw.choice([None, kept[1]])))
    parts += [mask for mask in (Causal(), Causal("top-left")) if draw.random() < 0.3]
    if draw.random() < 0.3:
        parts.append(Window(some(*range(5)), some(*range(5))))
    if draw.random() < 0.3:
        each = [torch.tensor([draw.randint(-5, 5) for _ in range(N)]) for _ in range(2)]
        parts.append(Band(*(some(draw.randint(-5, 5), bounds) for bounds in each)))
    return tuple(parts)


def test_random_documents_are_met_once_and_exactly() -> None:
    """Many to a piece, with gaps and bounds of their own, which two hundred random masks of any kind never held."""
    draw = random.Random(0)
    for _ in range(60):
        T, size = draw.randint(0, 16), draw.randint(1, 4)
        S = draw.choice([T, draw.randint(0, 16)])
        parts = _documents(draw, T, S)
        check(joined(parts), visible(parts, 1, 1, T, S)[:, 0], draw.choice(ORDERS), size, (1, T, S))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["causal", "a window of all", "rows of one length"])
def test_causal_pairs_are_plain_causal_or_open(order: str, size: int, kind: str) -> None:
    """So that fused kernels can take every one of them."""
    T = 16 * size
    held = [pieces(cast(Order, order), T, size, rank) for rank in range(size)]
    mask = Window(T - 1, 0) if kind == "a window of all" else Causal()
    if kind == "rows of one length":
        mask &= Lengths(torch.tensor([T, T]))
    whole = segments(lower(mask), 2, T, T)
    for mine in held:
        for theirs in held:
            for pair in pairs(whole, mine, theirs, q_apart=False, k_apart=False):
                assert pair.visible == NOTHING_HIDDEN or (
                    pair.visible == NOTHING_HIDDEN._replace(causal_start=True)
                    and pair.queries.stop - pair.queries.start == pair.keys.stop - pair.keys.start
                )


@pytest.mark.parametrize(
    ("q", "k"), [([0, 1, 3], [0, 3, 5]), ([0, 2, 3], [0, 3, 13]), ([0, 2, 4], [0, 2, 7]), ([0, 1, 5], [0, 9, 10])]
)
@pytest.mark.parametrize("mask", [Causal(), Window(None, 0), Window(1, None), Window(2, 0)], ids=str)
def test_a_document_that_hides_nothing_beside_one_that_does(q: list[int], k: list[int], mask: Mask) -> None:
    """As one query sees all keys of its own: plain causality or the other's bound would hide most of them."""
    parts = (Packed(torch.tensor(q), torch.tensor(k)), mask)
    for size in (1, 2):
        check(joined(parts), visible(parts, 1, 1, q[-1], k[-1])[:, 0], "plain", size, (1, q[-1], k[-1]))


def test_documents_that_are_causal_are_plainly_so() -> None:
    """With one of a single token among them, whose bound was dropped; lengths only where some tokens are nobody's."""
    mine = pieces("plain", 12, 1, 0)
    for lengths, ends, gaps in (([5, 1, 6], [0, 5, 6, 12], False), ([4, 1, 6], [0, 5, 6, 12], True)):
        mask = Packed(torch.tensor(ends)) & Lengths(torch.tensor(lengths), torch.tensor(lengths)) & Causal()
        (pair,) = pairs(segments(lower(mask), 1, 12, 12), mine, mine, q_apart=False, k_apart=False)
        assert pair.visible.causal_start and pair.visible.band_low is None and pair.visible.band_high is None
        assert pair.visible.q_offsets is pair.visible.kv_offsets
        found = [each for each in (pair.visible.kv_lengths, pair.visible.q_lengths) if each is not None]
        assert [each.tolist() for each in found] == [lengths, lengths] * gaps


def test_rows_have_only_the_bounds_that_hide_something() -> None:
    mine = pieces("plain", 6, 1, 0)
    for mask, names in (
        (Lengths(torch.tensor([6, 4])), {"kv_lengths"}),
        (Lengths(torch.tensor([6, 4])) & Window(5, 5), {"kv_lengths"}),
        (Lengths(torch.tensor([6, 4])) & Window(4, None), {"kv_lengths", "band_low"}),
        (Lengths(torch.tensor([6, 4])) & Causal("top-left"), {"kv_lengths", "band_high"}),
        (Lengths(torch.tensor([6, 4]), torch.tensor([6, 5])), {"kv_lengths", "q_lengths"}),
    ):
        (pair,) = pairs(segments(lower(mask), 2, 6, 6), mine, mine, q_apart=False, k_apart=False)
        assert {name for name, x in pair.visible._asdict().items() if isinstance(x, Tensor)} == names, mask


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_without_a_mask_a_block_is_one_pair(size: int) -> None:
    for order in ORDERS:
        held = [pieces(order, 40, size, rank) for rank in range(size)]
        found = pairs(segments(NOTHING_HIDDEN, 1, 40, 40), held[0], held[1], q_apart=False, k_apart=False)
        assert [(pair.queries, pair.keys) for pair in found] == [(slice(0, length(held[0])), slice(0, length(held[1])))]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("order", ["zigzag", "stripe"])
def test_causal_work_is_even_in_the_balanced_orders(order: str, size: int) -> None:
    T = 32 * size
    held = [pieces(cast(Order, order), T, size, rank) for rank in range(size)]
    work = [sum(place + 1 for piece in mine for place in piece.positions) for mine in held]
    assert max(work) <= (1.05 if order == "zigzag" else 1.06) * T * (T + 1) / 2 / size


def test_a_window_needs_its_neighbours_only() -> None:
    held = [pieces("plain", 64, 8, rank) for rank in range(8)]
    for mask, used in (
        (Window(8, 0), [0, 1]),
        (Causal() & Window(9, None), [0, 1, 2]),
        (Window(3, 3), [0, 1, 7]),
        (Causal(), list(range(8))),
        (Packed(torch.tensor([0, 16, 32, 64])) & Causal(), [0, 1, 2, 3]),
        (Lengths(torch.tensor([8, 5])), list(range(8))),
    ):
        assert distances(segments(lower(mask), 2 if isinstance(mask, Lengths) else 1, 64, 64), held, held) == used


def test_many_documents_are_found_by_search() -> None:
    offsets = torch.arange(0, 40001, 4)
    whole = segments(lower(Packed(offsets) & Causal()), 1, 40000, 40000)
    held = [pieces("plain", 40000, 4, rank) for rank in range(4)]
    assert len(pairs(whole, held[2], held[2], q_apart=False, k_apart=False)) == 1
    assert not any_visible(whole, held[1], held[0])
