"""Masks: materialize against a naive oracle, segments against materialize, composition, and every bad value."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foci import Causal, Dense, Lengths, Mask, Packed, ShapeError, Window
from foci.ops.masks import NOTHING_HIDDEN, Band, check_near, existing, live_keys, lower, materialize, segments
from tests.ops.oracle import joined, mask_parts, visible


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def from_segments(mask: Mask, B: int, T: int, S: int) -> Tensor:
    """The mask without its Dense part, painted segment by segment: [B, T, S]."""
    painted = torch.zeros(B, T, S, dtype=torch.bool)
    for segment in segments(lower(mask), B, T, S):
        i = torch.arange(segment.q_stop - segment.q_start)[:, None]
        j = torch.arange(segment.k_stop - segment.k_start)[None]
        open_ = torch.ones(len(i), j.shape[1], dtype=torch.bool)
        if segment.low is not None:
            open_ &= j >= i + segment.low
        if segment.high is not None:
            open_ &= j <= i + segment.high
        here = painted[segment.rows, segment.q_start : segment.q_stop, segment.k_start : segment.k_stop]
        assert not here.any(), "two segments meet"
        here |= open_
    return painted


def dense_free(parts: tuple[Mask, ...]) -> tuple[Mask, ...]:
    return tuple(part for part in parts if not isinstance(part, Dense))


NAMED = {
    "causal": ((Causal(),), 1),
    "causal top-left": ((Causal("top-left"),), 1),
    "both alignments": ((Causal(), Causal("top-left")), 1),
    "window": ((Window(2, 1),), 1),
    "window, left only": ((Window(2, None),), 1),
    "window, right only": ((Window(None, 0),), 1),
    "causal window": ((Causal(), Window(3, None)), 1),
    "packed": ((Packed(integers(0, 2, 2, 5)),), 1),
    "packed, causal": ((Packed(integers(0, 2, 2, 5)), Causal()), 1),
    "packed, both offsets, an empty document on either side, a tail": (
        (Packed(integers(0, 2, 2, 4, 4), integers(0, 1, 3, 3, 4)), Causal()),
        1,
    ),
    "packed, no document": ((Packed(integers(0)),), 1),
    "packed window": ((Packed(integers(0, 3, 5)), Window(1, 1)), 1),
    "lengths": ((Lengths(integers(5, 2, 0)),), 3),
    "lengths, causal": ((Lengths(integers(5, 2, 0)), Causal()), 3),
    "lengths, top-left": ((Lengths(integers(5, 2, 0)), Causal("top-left")), 3),
    "lengths, window": ((Lengths(integers(5, 2, 0)), Window(1, 0)), 3),
    "padded queries": ((Lengths(integers(5, 2, 3), integers(4, 2, 0)),), 3),
    "padded queries, causal": ((Lengths(integers(5, 2, 3), integers(1, 4, 3)), Causal()), 3),
    "band": ((Band(-1, 2),), 1),
    "band, open above": ((Band(1, None),), 1),
    "band, below the diagonal, that a row leaves": ((Band(None, -3), Causal()), 1),
    "band of each row": ((Band(integers(-1, 0, 2), integers(0, 9, 1)),), 3),
    "band and lengths": ((Lengths(integers(5, 2, 3)), Band(-2, integers(0, -1, 4)), Window(3, None)), 3),
    "band of each document": ((Packed(integers(0, 2, 2, 5)), Band(integers(0, 0, -1), integers(0, 1, 0))), 1),
    "band of documents with lengths": ((Packed(integers(0, 3, 5)), Lengths(integers(1, 2)), Band(None, 0)), 1),
    "packed with lengths": ((Packed(integers(0, 2, 5)), Lengths(integers(1, 3)), Causal()), 1),
    "packed with both lengths": ((Packed(integers(0, 2, 5)), Lengths(integers(1, 3), integers(2, 1)), Causal()), 1),
}


@pytest.mark.parametrize(("T", "S"), [(5, 5), (5, 9), (9, 5)])
@pytest.mark.parametrize("name", NAMED)
def test_materialize_is_the_docstring(name: str, T: int, S: int) -> None:
    parts, B = NAMED[name]
    mask = joined(parts)
    assert mask is not None
    found = mask.materialize(T, S)
    assert found.dtype == torch.bool
    assert torch.equal(found.expand(B, 2, T, S), visible(parts, B, 2, T, S))
    assert torch.equal(from_segments(mask, B, T, S), visible(parts, B, 1, T, S)[:, 0])


@pytest.mark.parametrize(("T", "S", "length"), [(3, 8, 8), (3, 8, 5), (3, 8, 2), (8, 8, 5), (8, 3, 2), (8, 3, 3)])
def test_lengths_put_the_last_query_at_the_last_key(T: int, S: int, length: int) -> None:
    """Query i of a row stands at key i + max(n - T, min(S - T, 0))."""
    seen = (Lengths(integers(length)) & Causal()).materialize(T, S)[0, 0]
    for i in range(T):
        last = i + max(length - T, min(S - T, 0))
        assert seen[i].nonzero()[:, 0].tolist() == list(range(min(last + 1, length)))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_random_masks_are_the_docstring(data: st.DataObject) -> None:
    B, T, S = data.draw(st.tuples(st.integers(1, 2), st.integers(0, 6), st.integers(0, 6)))
    parts = data.draw(mask_parts(B, 2, T, S))
    mask = joined(parts)
    if mask is None:
        return
    assert torch.equal(mask.materialize(T, S).expand(B, 2, T, S), visible(parts, B, 2, T, S))
    assert torch.equal(from_segments(mask, B, T, S), visible(dense_free(parts), B, 1, T, S)[:, 0])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_live_keys_hold_what_any_of_the_queries_sees(data: st.DataObject) -> None:
    B, T, S = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 6)))
    mask = joined(dense_free(data.draw(mask_parts(B, 1, T, S))))
    for segment in segments(lower(mask), B, T, S):
        painted = from_segments(Window(None, None) if mask is None else mask, B, T, S)[segment.rows]
        for start in range(segment.q_stop - segment.q_start):
            stop = min(start + 2, segment.q_stop - segment.q_start)
            first, last = live_keys(segment, start, stop)
            rows = painted[:, segment.q_start + start : segment.q_start + stop, segment.k_start : segment.k_stop]
            seen = rows.any(1).any(0).nonzero()[:, 0].tolist()
            assert set(seen) <= set(range(first, last))
            if segment.low is None and segment.high is not None:
                assert seen == list(range(first, last))


@pytest.mark.parametrize("wide", [2**62, sys.maxsize, 2**70])
def test_a_reach_as_wide_as_a_number_hides_nothing(wide: int) -> None:
    for mask in (Window(wide, wide), Window(3, wide), Window(None, wide), Band(-wide, wide), Band(None, wide)):
        assert mask.materialize(3, 3).all() and (mask & Lengths(torch.tensor([3, 3]))).materialize(3, 3).all(), mask


@pytest.mark.parametrize("wide", [2**31, 2**40, 2**63, 2**70])
def test_a_bound_wider_than_the_tensor_it_is_joined_with_hides_nothing(wide: int) -> None:
    for dtype in (torch.int32, torch.int64):
        low, high = torch.tensor([-1, 0, -9], dtype=dtype), torch.tensor([2, 0, 9], dtype=dtype)
        for both, alone in (
            (Band(low, high) & Band(-wide, wide), Band(low, high)),
            (Band(-wide, wide) & Band(low, high), Band(low, high)),
            (Band(low, None) & Band(wide, None), Band(wide, None)),
            (Band(None, high) & Band(None, -wide), Band(None, -wide)),
        ):
            assert torch.equal(both.materialize(4, 6), alone.materialize(4, 6).expand(3, 1, 4, 6))


def test_two_bands_hide_what_either_hides() -> None:
    low, high = integers(-3, 0, 1), integers(2, 0, 4)
    for first, second in (
        (Band(-2, 1), Band(-1, 3)),
        (Band(low, high), Band(-1, 1)),
        (Band(-1, 1), Band(low, high)),
        (Band(low, high), Band(low.flip(0), high.flip(0))),
        (Band(low, None), Band(None, high.long())),
    ):
        both = first.materialize(4, 6) & second.materialize(4, 6)
        assert torch.equal((first & second).materialize(4, 6), both)


def test_a_bound_as_low_as_a_number_leaves_a_side_open() -> None:
    most = torch.iinfo(torch.int64).max
    for first, last in ((-most - 1, most), (-most, most - 1)):
        band = Band(torch.tensor([first, 0]), torch.tensor([last, 0]))
        assert torch.equal(band.materialize(3, 3)[:, 0], torch.stack([torch.ones(3, 3), torch.eye(3)]) > 0)


def test_values_that_a_vmap_hides_are_checked_by_the_sizes_of_their_side() -> None:
    lengths = torch.tensor([[8], [5]])
    shown = torch.func.vmap(lambda n: Lengths(n).materialize(3, 8))(lengths)
    for row, n in zip(shown, lengths, strict=True):
        assert torch.equal(row, Lengths(n).materialize(3, 8))
    with pytest.raises(ValueError, match="kv_lengths must each be 0 to"):
        torch.func.vmap(lambda n: Lengths(n).materialize(8, 3))(lengths)


def test_no_rows_have_a_mask_too() -> None:
    assert (Lengths(torch.zeros(0, dtype=torch.int64)) & Band(0, None)).materialize(2, 2).shape == (0, 1, 2, 2)


def test_existing_is_what_packed_and_lengths_include() -> None:
    assert existing(NOTHING_HIDDEN, 5, 5, torch.device("cpu")) is None
    assert existing(lower(Causal() & Window(1, 1)), 5, 5, torch.device("cpu")) is None
    for parts, B in NAMED.values():
        kept = tuple(part for part in parts if isinstance(part, Packed | Lengths))
        if not kept:
            continue
        found = existing(lower(joined(parts)), 5, 5, torch.device("cpu"))
        assert found is not None
        queries, keys = (flags.expand(B, -1) for flags in found)
        seen = visible(kept, B, 1, 5, 5)[:, 0]
        # What sees or is seen exists; with q_lengths, nothing else does.
        assert not (seen & ~(queries[:, :, None] & keys[:, None])).any()
    padded = existing(lower(Lengths(integers(4, 0), integers(3, 1))), 5, 6, torch.device("cpu"))
    assert padded is not None
    assert [flags.sum(-1).tolist() for flags in padded] == [[3, 1], [4, 0]]


def test_composition_keeps_one_of_each_kind() -> None:
    assert Causal() & Causal() == Causal()
    assert Window(3, None) & Window(5, 2) == Window(3, 2)
    assert lower(Causal() & Window(1, 2) & Causal("top-left"))[5:] == (None, None, True, True, 1, 2)
    first, second = torch.rand(5, 5) < 0.5, torch.rand(2, 1, 5, 5) < 0.5
    both = Dense(first) & Dense(second)
    assert isinstance(both, Dense)
    assert torch.equal(both.allowed, first & second)
    left = (Causal() & Window(3, None)) & (Dense(first) & Window(1, 1))
    right = Dense(first) & Window(1, None) & Window(None, 1) & Causal()
    assert torch.equal(left.materialize(5, 5), right.materialize(5, 5))


def test_two_dense_masks_broadcast_from_their_last_dimension() -> None:
    row, column, each = torch.rand(5) < 0.5, torch.rand(4, 1) < 0.5, torch.rand(2, 1, 4, 5) < 0.5
    for first, second in ((row, column), (column, row), (row, each), (each, column)):
        both = Dense(first) & Dense(second)
        assert torch.equal(both.materialize(4, 5), (first & second).expand_as(both.materialize(4, 5)))


def test_no_mask_hides_nothing() -> None:
    assert lower(None) == NOTHING_HIDDEN
    assert materialize(NOTHING_HIDDEN, 2, 3).all()
    assert Window(None, None).materialize(2, 3).all()


def test_masks_know_no_tensor_equality() -> None:
    """A frozen dataclass with tensors in it would raise when compared; these compare by identity."""
    mask = Packed(integers(0, 5))
    assert mask == mask and mask != Packed(integers(0, 5))
    assert hash(mask) == hash(mask)


BAD = {
    "Causal: align must be 'bottom-right' or 'top-left', got 'right'": lambda: Causal("right"),
    "Window: left must be a non-negative int or None, got -1": lambda: Window(-1, 0),
    "Window: right must be a non-negative int or None, got 1.5": lambda: Window(0, 1.5),
    "Window: left must be a non-negative int or None, got True": lambda: Window(True, 0),
    "Packed: q_offsets must be a one-dimensional int32 or int64 tensor, got torch.float32 [2]": lambda: Packed(
        torch.tensor([0.0, 5.0])
    ),
    "Packed: q_offsets must be a one-dimensional int32 or int64 tensor, got [0, 5]": lambda: Packed([0, 5]),
    "Packed: kv_offsets must be a one-dimensional int32 or int64 tensor, got torch.int32 [1, 2]": lambda: Packed(
        integers(0, 5), integers(0, 5)[None]
    ),
    "Packed: kv_offsets has 3 entries, q_offsets has 2": lambda: Packed(integers(0, 5), integers(0, 2, 5)),
    "Packed: q_offsets is empty": lambda: Packed(integers()),
    "Lengths: kv_lengths must be a one-dimensional int32 or int64 tensor, got 5": lambda: Lengths(5),
    "Lengths: kv_lengths must be a one-dimensional int32 or int64 tensor, got None": lambda: Lengths(None),
    "Lengths: q_lengths has 2 rows, kv_lengths has 1": lambda: Lengths(integers(5), integers(5, 5)),
    "Dense: allowed must be a boolean tensor, got torch.float32; an additive mask is `bias=`": lambda: Dense(
        torch.zeros(5, 5)
    ),
    "Dense: allowed must be a boolean tensor, got list": lambda: Dense([[True]]),
    "Dense: allowed has 5 dimensions; expected at most 4": lambda: Dense(torch.ones(1, 1, 1, 5, 5).bool()),
    "Band: low must be an int, a tensor of ints or None, got 1.5": lambda: Band(1.5, None),
    "Band: high must be an int, a tensor of ints or None, got True": lambda: Band(None, True),
    "Band: high must be a one-dimensional int32 or int64 tensor, got torch.float32 [1]": lambda: Band(
        0, torch.tensor([1.0])
    ),
    "Band: low must be a one-dimensional int32 or int64 tensor, got torch.int64 []": lambda: Band(
        torch.tensor(1), None
    ),
    "mask: two Packed masks cannot be combined": lambda: Packed(integers(0, 5)) & Packed(integers(0, 5)),
    "mask: two Lengths masks cannot be combined": lambda: Lengths(integers(5)) & Causal() & Lengths(integers(5)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_masks_are_refused_when_made(message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BAD[message]()


BAD_VALUES = {
    "Packed: q_offsets must start at 0, got 1": Packed(integers(1, 5)),
    "Packed: q_offsets must never decrease, got 3 then 2 at entry 2": Packed(integers(0, 3, 2, 5)),
    "Packed: kv_offsets must never decrease, got 4 then 1 at entry 2": Packed(integers(0, 1, 5), integers(0, 4, 1)),
    "Packed: q_offsets ends at 6, past the 5 tokens there are (T=5)": Packed(integers(0, 6)),
    "Packed: kv_offsets ends at 6, past the 5 tokens there are (S=5)": Packed(integers(0, 5), integers(0, 6)),
    "Lengths: kv_lengths[1] is 6; expected 0 to 5": Lengths(integers(5, 6)),
    "Lengths: kv_lengths[0] is -1; expected 0 to 5": Lengths(integers(-1, 5)),
    "Lengths: q_lengths[0] is 9; expected 0 to 5": Lengths(integers(5, 5), integers(9, 5)),
    "Lengths: kv_lengths[1] is 4; expected 0 to 3": Packed(integers(0, 2, 5)) & Lengths(integers(2, 4)),
    "Band: low has 3 entries; expected 1 or 2": Lengths(integers(5, 5)) & Band(integers(0, 0, 0), None),
    "Lengths: kv_lengths has 2 entries; expected 1": Packed(integers(0, 5)) & Lengths(integers(2, 4)),
}


@pytest.mark.parametrize("message", BAD_VALUES)
def test_bad_values_are_refused_when_the_sizes_are_known(message: str) -> None:
    mask = BAD_VALUES[message]
    with pytest.raises(ValueError, match=re.escape(message)):
        segments(lower(mask), 2, 5, 5)
    with pytest.raises(ValueError, match=re.escape(message)):
        mask.materialize(5, 5)


def test_sizes_that_disagree_are_shape_errors() -> None:
    with pytest.raises(ShapeError):
        Lengths(integers(5), integers(5, 5))


@pytest.mark.parametrize("other", [None, True, torch.ones(5, 5).bool(), "causal", Causal])
def test_only_masks_combine(other: object) -> None:
    with pytest.raises(TypeError, match="expected another mask"):
        Causal() & other  # type: ignore[operator]
    with pytest.raises(TypeError, match="expected Causal, Window, Packed, Lengths or Dense"):
        lower(other) if other is not None else lower("causal")  # type: ignore[arg-type]


def test_and_in_place_of_ampersand_is_an_error() -> None:
    with pytest.raises(TypeError, match="join masks with `&`"):
        Causal() and Lengths(torch.tensor([3]))
    with pytest.raises(TypeError, match="join masks with `&`"):
        (Causal() & Window(1, 0)) or None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            torch.ones(2, 3, dtype=torch.bool),
            r"a bool tensor \[2, 3\] is no mask .* or Dense\(tensor\)",
        ),
        (torch.ones(2, 3), r"a float32 tensor \[2, 3\] .* or Dense \(an additive mask is `bias=`\)"),
        ([Causal()], r"\[Causal\(align='bottom-right'\)\] is no mask of foci; expected Causal, Window"),
    ],
)
def test_what_is_no_mask_is_named_in_one_line(given: object, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence) as error:
        lower(given)
    assert "\n" not in str(error.value)


def test_values_are_checked_where_they_lie_on_the_cpu_and_left_unread_elsewhere() -> None:
    wrong = Packed(integers(0, 999))
    with pytest.raises(ValueError, match="q_offsets"):
        check_near(lower(wrong), 1, 8, 8)
    check_near(lower(Packed(integers(0, 8))), 1, 8, 8)
    check_near(lower(Packed(torch.empty(2, dtype=torch.int32, device="meta"))), 1, 8, 8)
    check_near(NOTHING_HIDDEN, 1, 8, 8)


def test_what_does_not_fit_together_is_named() -> None:
    four, five = (torch.ones(n, n, dtype=torch.bool) for n in (4, 5))
    two, three = (torch.zeros(n, dtype=torch.int32) for n in (2, 3))
    for message, make in {
        r"Dense: allowed has shape \[4, 4\]; expected one that broadcasts to \[B, H, 5, 5\]": lambda: Dense(
            four
        ).materialize(5, 5),
        r"Dense: allowed has shape \[4, 4\]; .* \[B, H, 1, 4\]": lambda: Dense(four).materialize(1, 4),
        r"Dense: allowed has shape \[2, 1, 4, 4\]; .* \[3, H, 4, 4\]": lambda: (
            Dense(four.expand(2, 1, 4, 4)) & Lengths(three)
        ).materialize(4, 4),
        r"Dense: allowed of two masks joined by & has shapes \[4, 4\] and \[5, 5\]": lambda: Dense(four) & Dense(five),
        r"Dense: allowed of two masks joined by & has shapes \[4, 4\] and \[2, 4\]": lambda: (
            Dense(four) & Dense(four[:2])
        ),
        r"Band: low or high of two masks joined by & has shapes \[2\] and \[3\]": lambda: Band(two, 0) & Band(three, 0),
        "mask: T must be a non-negative int, got -1": lambda: Causal().materialize(-1, 3),
        "mask: S must be a non-negative int, got 2.5": lambda: Causal().materialize(3, 2.5),
    }.items():
        with pytest.raises(ValueError, match=message):
            make()
    assert Dense(four[:, :1]).materialize(4, 9).shape == (1, 1, 4, 9)
    assert (Dense(four.expand(2, 3, 4, 4)) & Band(two[:1], 0)).materialize(4, 4).shape == (2, 3, 4, 4)


def test_sizes_may_be_numbers_of_numpy_and_of_a_trace() -> None:
    assert Causal().materialize(np.int64(3), 4).shape == (1, 1, 3, 4)
    traced = torch.jit.trace(lambda x: Causal().materialize(x.shape[0], x.shape[1]), torch.ones(2, 3))
    assert torch.equal(traced(torch.ones(4, 4)), Causal().materialize(4, 4))
