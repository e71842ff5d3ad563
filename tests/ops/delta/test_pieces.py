"""The rule of the cut: whole chunks, room for each piece, and not where it does not pay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core.tune import TARGETS, record_launches
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


@pytest.mark.parametrize(
    "tokens, heads, K, back, before, measured",
    [
        (2048, 8, 128, False, 68, {4: 67, 5: 66, 6: 67, 8: 66}),
        (4096, 8, 128, False, 106, {3: 123, 4: 105, 5: 95, 6: 99, 8: 94}),
        (8192, 8, 128, False, 181, {4: 171, 5: 153, 6: 153, 8: 139}),
        (8192, 4, 128, False, 114, {4: 163, 6: 130, 8: 113, 9: 113, 10: 112, 12: 109, 16: 109}),
        (32768, 2, 128, False, 205, {10: 250, 12: 223, 16: 192, 18: 202, 20: 196}),
        (4096, 16, 128, False, 147, {2: 168, 3: 136, 4: 127, 5: 158}),
        (2048, 8, 128, True, 136, {2: 159, 3: 134, 4: 120, 5: 117, 6: 129, 8: 125}),
        (4096, 8, 128, True, 242, {3: 231, 4: 203, 5: 188, 6: 212, 8: 201}),
        (8192, 8, 128, True, 442, {4: 359, 5: 330, 6: 366, 8: 337}),
        (8192, 4, 128, True, 269, {6: 237, 8: 208, 9: 210, 10: 233, 12: 223, 16: 217}),
        (32768, 2, 128, True, 500, {10: 473, 12: 429, 16: 378, 18: 371, 20: 425}),
        (4096, 16, 128, True, 378, {2: 357, 3: 308, 4: 330, 5: 358}),
        (2048, 16, 128, True, 201, {2: 198, 3: 178, 4: 190, 5: 211}),
        (1536, 4, 128, False, 50, {5: 42, 6: 41}),
        (4096, 4, 128, False, 72, {7: 70, 8: 67}),  # gated, of which a forward here asks nothing
        (1536, 8, 128, False, 53, {5: 46}),
        (2048, 16, 128, False, 77, {3: 73, 4: 71}),
        (2048, 20, 128, False, 89, {3: 82}),
        (4096, 6, 128, False, 88, {7: 76}),
        (1024, 12, 128, False, 40, {3: 43, 4: 43}),
        (4096, 2, 128, False, 57, {8: 61}),
        (8192, 1, 128, False, 72, {13: 78}),
        (2048, 16, 64, False, 51, {6: 48, 8: 46}),
        (8192, 8, 64, False, 97, {8: 90, 16: 85}),
        (4096, 4, 64, False, 43, {8: 48, 12: 46}),
    ],
)
def test_turned_over_by_maps_where_that_took_less_on_an_h100(
    tokens: int, heads: int, K: int, back: bool, before: int, measured: dict[int, int]
) -> None:
    """Microseconds of all launches, DeltaNet: within 8 % of the least (docs/delta.md, docs/h200.md)."""
    known = {1: before} | measured
    assert known[_found(tokens, heads, K, back, gated=False)] <= 1.08 * min(known.values())


@pytest.mark.parametrize(
    "tokens, heads, K, before, measured",
    [
        (512, 4, 128, 58, {2: 71, 3: 69, 4: 67}),
        (768, 16, 128, 67, {3: 70, 4: 78}),
        (768, 32, 64, 88, {3: 84, 4: 89}),
        (1024, 8, 128, 64, {3: 64, 4: 60}),
        (2048, 8, 128, 101, {3: 106, 4: 95, 5: 94}),
        (4096, 4, 128, 114, {6: 113, 7: 110, 8: 104}),
        (2048, 8, 64, 71, {6: 70, 8: 65}),
    ],
)
def test_a_gated_backward_too(tokens: int, heads: int, K: int, before: int, measured: dict[int, int]) -> None:
    """The same of Gated DeltaNet, within 6 %."""
    known = {1: before} | measured
    assert known[_found(tokens, heads, K, True, gated=True)] <= 1.06 * min(known.values())


def _found(tokens: int, heads: int, K: int, back: bool, gated: bool) -> int:
    """Into how many pieces a call is cut that is turned over."""
    pytest.importorskip("triton")
    from foci.ops.delta.kernels_triton_forward import unturned

    q, g = (
        torch.empty(1, tokens, heads, K, dtype=torch.bfloat16, device="meta"),
        torch.empty(1, tokens, heads, device="meta"),
    )
    call = bind(q, q, q, g, log_decay=g if gated else None)
    with record_launches(TARGETS["sm_90"]):
        blocks, _ = unturned(call)
    return maps._turned(call, back, TARGETS["sm_90"], heads * blocks)


@pytest.mark.parametrize("back", [False, True])
def test_turned_over_no_two_share_a_processor_beside_erase_keys(back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Costs] = []

    def noted(chunks: int, programs: int, K: int, V: int, costs: Costs, processors: int) -> tuple[int, float]:
        asked.append(costs)
        return 3, float(len(asked))

    monkeypatch.setattr(maps, "_least", noted)
    q, beta = torch.empty(1, 2048, 8, 128, dtype=torch.bfloat16, device="meta"), torch.empty(1, 2048, 8, device="meta")
    for erase in (None, q):
        assert maps._turned(bind(q, q, q, beta, erase=erase), back, TARGETS["sm_90"], 32) in (1, 3)
    costs = maps.TURNED_BACK if back else maps.TURNED
    assert asked[::2] == [costs, costs._replace(shared=None)]


def test_documents_are_not_turned_over_by_maps() -> None:
    q, g = torch.empty(1, 8192, 8, 128, dtype=torch.bfloat16, device="meta"), torch.empty(1, 8192, 8, device="meta")
    call = bind(q, q, q, g, log_decay=g)
    assert maps._turned(call, True, TARGETS["sm_90"], 32) > 1
    for documents in (0, 1):
        offsets = torch.empty(documents + 1, dtype=torch.int64, device="meta")
        assert maps._turned(call._replace(offsets=offsets), True, TARGETS["sm_90"], 32) == 1


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
