"""The rule of the cut: whole chunks, room for each piece, and not where it does not pay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core.tune import TARGETS
from foci.ops.delta import pieces as maps
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from foci.ops.delta.pieces import BACKWARD, FORWARD, Costs, cut
from foci.ops.gpu import CHUNK
from foci.ops.stretches import Cut, cut_into


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
@pytest.mark.parametrize("packed", [False, True])
def test_few_heads_are_cut_into_pieces_of_whole_chunks_that_fill_the_chip(target, packed: bool) -> None:
    for T in (2048, 5000, 131072):
        tokens, programs, slots = cut(1, 1, T, packed, 128, 128, FORWARD, target, 8)
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
        assert cut(N, N, T, False, K, K, FORWARD, target, programs) == (0, N, 0)
    assert cut(64, 1, 8192, True, 128, 128, FORWARD, target, 64 * 4).tokens == 0


def test_fewer_heads_make_more_pieces() -> None:
    slots = [cut(1, 1, 32768, False, 128, 128, FORWARD, TARGETS["sm_90"], 4 * heads).slots for heads in (1, 4, 8, 24)]
    assert slots == sorted(slots, reverse=True) and len(set(slots)) > 2


ALONE = BACKWARD._replace(shared=None)  # of 128 channels


@pytest.mark.parametrize(
    "tokens, K, programs, costs, measured",
    [
        (8192, 128, 32, FORWARD, {1: 217, 2: 195, 3: 160, 4: 145, 6: 201, 8: 169, 12: 200, 16: 244}),
        (8192, 128, 32, ALONE, {1: 377, 2: 388, 3: 265, 4: 297, 6: 336, 8: 324, 12: 355, 16: 405}),
        (2048, 128, 32, FORWARD, {1: 61, 2: 62, 3: 54, 4: 54, 6: 77, 8: 77}),
        (2048, 128, 32, ALONE, {1: 83, 2: 93, 3: 72, 4: 85, 6: 104, 8: 116}),
        (2048, 128, 64, FORWARD, {1: 61, 2: 69, 3: 89, 4: 95, 6: 119, 8: 144}),
        (2048, 128, 64, ALONE, {1: 106, 2: 114, 3: 155, 4: 159, 6: 195, 8: 231}),
        (32768, 128, 16, FORWARD, {1: 837, 2: 737, 3: 496, 4: 424, 6: 352, 8: 282, 12: 382, 16: 322}),
        (8192, 64, 16, BACKWARD, {1: 341, 2: 334, 3: 228, 4: 181, 6: 140, 8: 115, 12: 130, 16: 120}),
        (32768, 128, 16, ALONE, {1: 1486, 2: 1437, 3: 963, 4: 731, 6: 738, 8: 572, 12: 649, 16: 612}),
    ],
)
def test_pieces_are_those_that_took_least_on_an_h100(
    tokens: int, K: int, programs: int, costs: Costs, measured: dict[int, int]
) -> None:
    """Microseconds of both launches, DeltaNet and Gated DeltaNet (docs/delta.md)."""
    found = cut(1, 1, tokens, False, K, K, costs, TARGETS["sm_90"], programs).slots or 1
    assert measured[found] <= 1.02 * min(measured.values())


def test_maps_of_wide_keys_cost_more_than_those_of_wide_values() -> None:
    """A map has the K columns of the unit matrix beside its V."""
    few, many = (cut(1, 1, 8192, False, K, V, FORWARD, TARGETS["sm_90"], 24).slots for K, V in ((128, 32), (32, 128)))
    assert 0 < few < many


@pytest.mark.parametrize(
    ("back", "decay", "erase", "K", "shared"),
    [
        (False, "token", False, 128, True), (False, "channel", False, 128, False), (False, "token", True, 128, False),
        (False, "channel", False, 64, True), (True, "token", False, 128, False), (True, "token", False, 64, True),
        (True, "token", True, 64, False),
    ],
)  # fmt: skip
def test_two_programs_share_a_processor_where_their_tiles_have_room(
    back: bool, decay: str, erase: bool, K: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Costs] = []

    def noted(N: int, B: int, T: int, packed: bool, *rest: Any) -> Cut:
        asked.append(rest[2])
        return cut_into(0, N, T, packed)

    monkeypatch.setattr(maps, "cut", noted)
    for dtype in (torch.bfloat16, torch.float16):
        made = Delta("", B=1, T=100, H=2, K=K, V=K, decay=decay, erase=erase).case.make(dtype, torch.device("cpu"), 0)
        maps.pieces(bind(**made), back, TARGETS["sm_90"], 8)
    costs = BACKWARD if back else FORWARD
    assert asked == [costs if shared else costs._replace(shared=None), costs._replace(shared=None)]
