"""Pieces that begin by maps: for which calls, and by which launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta.call import Call, bind
from tests.ops.in_triton import given

from foci.ops.delta import kernels_triton_token_joins as joins  # isort: skip  after Triton's presence is known

HOPPER = tune.TARGETS["sm_90"]
IN_PIECES = {"forward": ["token_walk_kernel", "token_walk_kernel"]}
IN_PIECES["backward"] = ["token_walk_back_kernel", "token_walk_back_kernel"]


def call_of(T: int, H: int, rows: int = 1, documents: int = 0, K: int = 128) -> Call:
    q = torch.empty(rows, T, 1, K, dtype=torch.bfloat16, device="meta")
    v, g = q.new_empty(rows, T, H, 128), torch.empty(rows, T, H, device="meta")
    offsets = torch.empty(documents + 1, dtype=torch.int64, device="meta") if documents else None
    return bind(q, q, v, g, log_decay=g, offsets=offsets)


@pytest.mark.parametrize(
    ("H", "rows", "documents", "pieces", "wanted"),
    [
        *((H, 1, 0, 4, H <= 16) for H in (1, 8, 16, 17, 32)),
        *((2, rows, 0, 2, rows <= 8) for rows in (8, 9)),
        (8, 1, 0, 1, False),
        *((1, 1, documents, 4, documents <= 4) for documents in (2, 4, 5)),
        *((H, 1, 2, 4, H <= 8) for H in (8, 9)),
    ],
)
def test_maps_are_made_where_whole_sequences_fill_a_quarter_of_the_gpu(
    H: int, rows: int, documents: int, pieces: int, wanted: bool
) -> None:
    assert joins.by_maps(call_of(32768, H, rows, documents), HOPPER, pieces) == wanted


@pytest.mark.parametrize(("T", "wanted"), [(2048, False), (2049, True)])
def test_none_are_made_where_no_piece_can_be_slow(T: int, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "with_gluon", lambda: False)  # where nothing runs, on Hopper too
    call = call_of(T, 16)
    assert joins.few(call, HOPPER, 4) and joins.by_maps(call, HOPPER, 4) == wanted
    with tune.record_launches(HOPPER) as launches:
        gpu.forward(call, True)
    names = [launch.kernel.fn.__name__ for launch in launches]
    assert names == ["token_chunks_kernel", *["token_walk_kernel"] * (1 + wanted)]


@pytest.mark.parametrize(
    ("T", "H", "documents", "by_maps"),
    [
        *((32768, 8, 0, True), (8192, 8, 0, True), (2048, 8, 0, False), (8192, 32, 0, False)),
        *((32768, 4, 2, True), (8192, 4, 2, True), (8191, 4, 2, False)),
    ],
)
def test_few_heads_of_long_sequences_are_joined_by_maps_in_both_directions(
    T: int, H: int, documents: int, by_maps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "with_gluon", lambda: False)
    call = call_of(T, H, 1, documents)
    with tune.record_launches(HOPPER) as launches:
        outputs = gpu.forward(call, True)
        gpu.backward(call, outputs, (outputs[0], None), [True] * 5 + [False] * 2)
    names = [launch.kernel.fn.__name__ for launch in launches]
    walks = [name for name in names if "walk" in name]
    assert by_maps or not documents or walks == ["walk_kernel"] * 4
    slow = [given(launch).get("slow_ptr") is not None for launch in launches if "walk" in launch.kernel.fn.__name__]
    assert (walks == [*IN_PIECES["forward"], *IN_PIECES["backward"]] and all(slow)) == by_maps, names


@pytest.mark.parametrize(
    ("T", "H", "rows", "documents", "pieces", "wanted"),
    [
        *((1024, H, 1, 0, 1, H <= 33) for H in (1, 33, 34)),
        *((T, 4, 1, 0, 1, T >= 640) for T in (64, 639, 640)),
        *((T, 4, 1, 0, 2, T < 2048) for T in (1280, 2047, 2048)),
        (1536, 4, 1, 0, 3, False),
        *((1024, 4, 1, documents, 1, documents == 1) for documents in (1, 2)),
        (1024, 4, 8, 0, 1, True),
        (1024, 4, 9, 0, 1, False),
    ],
)
def test_two_programs_walk_a_short_sequence_where_there_is_room_for_both(
    T: int, H: int, rows: int, documents: int, pieces: int, wanted: bool
) -> None:
    assert joins.twice(call_of(T, H, rows, documents), HOPPER, pieces, False) == wanted


@pytest.mark.parametrize(
    ("T", "H", "K", "documents", "keep", "wanted"),
    [
        *((T, 16, 128, 0, True, T >= 512) for T in (511, 512)),
        *((T, 1, 64, 0, False, T >= 512) for T in (511, 512)),
        *((T, 1, 64, 1, False, T >= 640) for T in (639, 640)),
        *((1024, H, 128, 0, True, H >= 14) for H in (13, 14)),  # else by maps
    ],
)
def test_it_pays(T: int, H: int, K: int, documents: int, keep: bool, wanted: bool) -> None:
    assert joins.twice(call_of(T, H, documents=documents, K=K), HOPPER, 1, keep) == wanted


@pytest.mark.parametrize(("T", "cut"), [(1024, False), (1536, True)])  # cut: in a backward
def test_two_programs_of_a_sequence_are_told_of_no_piece(T: int, cut: bool) -> None:
    if not tune.with_gluon():
        pytest.skip("Gluon has no interpreter, and this Triton may be none that compiles the kernel")
    for keep in (False, True):
        with tune.record_launches(HOPPER) as launches:
            gpu.forward(call_of(T, 30), keep)
        first, walk = launches
        reach = first.arguments[first.kernel.arg_names.index("reach_ptr")]
        assert (reach is not None) == (cut and keep)
        asked = dict(zip(walk.kernel.arg_names, walk.arguments, strict=False))
        assert walk.meta["TWICE"] and asked["pieces"] == 2 and asked["reach_ptr"] is asked["lost_ptr"] is None


def test_what_has_no_maps_has_no_states() -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    assert joins.starts(call_of(8192, 32), 2, never, False, False) == (None, None, None)
