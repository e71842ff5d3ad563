"""Pairs are those that a mask shows, counted without making any; what is not known is counted in full."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from foci import Causal, Dense, Lengths, Mask, Packed, Window
from foci.ops.masks import NOTHING_HIDDEN, Band, lower
from foci.ops.pairs import pairs, without_causal
from tests.ops.oracle import joined, mask_parts, visible


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_pairs_are_those_of_the_docstring(data: st.DataObject) -> None:
    B, T, S = data.draw(st.tuples(st.integers(1, 2), st.integers(0, 6), st.integers(0, 6)))
    parts = tuple(part for part in data.draw(mask_parts(B, 1, T, S)) if not isinstance(part, Dense))
    assert pairs(lower(joined(parts)), B, T, S) == int(visible(parts, B, 1, T, S).sum())


def test_pairs_of_long_sequences_are_exact_and_hide_nothing_by_a_dense_part() -> None:
    n = 1 << 20
    assert pairs(NOTHING_HIDDEN, 3, n, n) == 3 * n * n
    assert pairs(lower(Causal()), 3, n, n) == 3 * n * (n + 1) // 2
    assert pairs(lower(Window(9, 0)), 1, n, n) == 10 * n - 45
    assert pairs(lower(Dense(torch.zeros(4, 4, dtype=torch.bool))), 1, 4, 4) == 16


OFFSETS = [0, 3, 3, 8]


@pytest.mark.parametrize(
    ("mask", "counted"),
    [
        (None, 64),
        (Causal(), 64),
        (Causal("top-left"), 64),
        (Causal() & Packed(torch.tensor(OFFSETS)), 9 + 25),
        (Causal() & Lengths(torch.tensor([5])), 8 * 5),
        (Causal() & Window(1, None), 8 + 7),
        (Causal() & Band(-1, None), 8 + 7),
        (Causal() & Window(None, 2), 36),
        (Causal() & Band(None, 2), 36),
    ],
)
def test_torch_counts_a_causal_mask_in_full_but_nothing_else(mask: Mask | None, counted: int) -> None:
    assert pairs(without_causal(lower(mask)), 1, 8, 8) == counted


def test_what_is_not_known_is_counted_in_full() -> None:
    on_meta = Causal() & Packed(torch.tensor(OFFSETS, device="meta"))
    assert pairs(lower(on_meta), 1, 8, 8) == 64
    with FakeTensorMode():
        faked = Causal() & Packed(torch.tensor(OFFSETS))
        assert pairs(lower(faked), 1, 8, 8) == 64
        assert pairs(lower(Causal()), 1, 8, 8) == 36  # known without any values


def test_offsets_under_vmap_are_not_known() -> None:
    counted: list[int] = []

    def count(offsets: torch.Tensor) -> torch.Tensor:
        counted.append(pairs(lower(Causal() & Packed(offsets)), 1, 8, 8))
        return offsets

    torch.func.vmap(count)(torch.tensor([OFFSETS, OFFSETS]))
    assert counted == [64]


def test_symbolic_sizes_are_counted_in_full_and_stay_symbolic() -> None:
    real, any_size = torch.empty(8), StatelessSymbolicContext([DimDynamic.DYNAMIC])
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        (n,) = mode.from_tensor(real, symbolic_context=any_size).shape
        counted = pairs(lower(Causal()), 1, n, n)
        assert isinstance(counted, torch.SymInt) and str(counted) == str(n * n)
        assert mode.shape_env is not None and not mode.shape_env.guards
