"""The rule of the cut: whole chunks, room for each piece, and not where it does not pay."""

from __future__ import annotations

import pytest

from foci.core.tune import TARGETS
from foci.ops.delta.pieces import cut
from foci.ops.gpu import CHUNK


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
@pytest.mark.parametrize("packed", [False, True])
def test_few_heads_are_cut_into_pieces_of_whole_chunks_that_fill_the_chip(target, packed: bool) -> None:
    for T in (2048, 5000, 131072):
        tokens, programs, slots = cut(1, 1, T, packed, 128, 128, target, 8)
        assert 0 < tokens < T and tokens % CHUNK == 0
        assert slots == (T // tokens + 1 if packed else -(-T // tokens)) and programs == slots + packed
        assert 3 <= slots <= 65 and 8 * slots <= 2 * target.processors


def test_what_fills_the_chip_or_is_short_or_wide_is_walked_whole() -> None:
    target = TARGETS["sm_90"]
    for N, T, K, programs in (
        (1, 8192, 128, 132),
        (1, 8192, 128, 64),
        (1, 256, 128, 4),
        (1, 8192, 256, 4),
        (4, 0, 8, 4),
    ):
        assert cut(N, N, T, False, K, K, target, programs) == (0, N, 0)
    assert cut(64, 1, 8192, True, 128, 128, target, 64 * 4).tokens == 0


def test_fewer_heads_make_more_pieces() -> None:
    slots = [cut(1, 1, 8192, False, 128, 128, TARGETS["sm_90"], 4 * heads).slots for heads in (1, 2, 4, 8)]
    assert slots == sorted(slots, reverse=True) and len(set(slots)) > 2
