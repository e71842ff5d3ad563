"""What the GPU backend keeps for its backward, and which kernels walk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta.call import Call, bind
from foci.ops.gpu import chunks


def call(dtype: torch.dtype = torch.float32, K: int = 8, V: int = 5, **options: Any) -> Call:
    q = torch.zeros(1, 70, 3, K, dtype=dtype)
    return bind(q, q, torch.zeros(1, 70, 3, V, dtype=dtype), torch.zeros(1, 70, 3), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offsets", [None, (0, 1, 1, 70)])
@pytest.mark.parametrize("gates", [0, 1, 7])
def test_the_kept_buffer_has_room_for_its_parts_and_no_more(dtype: torch.dtype, offsets: Any, gates: int) -> None:
    pytest.importorskip("triton")
    g = torch.zeros(1, 70, 3, gates) if gates > 1 else torch.zeros(1, 70, 3) if gates else None
    one = call(dtype, 7, 5, offsets=None if offsets is None else torch.tensor(offsets), log_decay=g)
    buffer = gpu.kept(one).empty(one.v)
    parts = gpu._parts(one, buffer)
    slots = chunks(70, 1, one.offsets)
    assert parts.states.shape == (slots, 3, 7, 5) and parts.errors.shape[-4:] == (1, 70, 3, 5)
    assert parts.errors.shape[:-4] == ((2,) if dtype == torch.bfloat16 and gates < 2 else ())
    assert parts.states.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    wide = 128 if dtype == torch.bfloat16 else 64
    assert parts.inverse.shape == parts.products.shape == (1, 70, 3, wide)
    by_rows = dtype == torch.bfloat16 and gates < 2
    assert parts.rows.shape == (slots, 3, 2, 64) if by_rows else parts.rows is None
    forgets = by_rows and gates == 1
    assert parts.reach.shape == (slots, 3) if forgets else parts.reach is None
    parts = [part for part in parts if part is not None]
    assert len(parts) == (7 if gates == 1 else 4) + by_rows + forgets
    size = sum(part.numel() * part.element_size() for part in parts)
    assert 0 <= 4 * buffer.numel() - size < 16 * len(parts)
    starts = sorted(part.data_ptr() - buffer.data_ptr() for part in parts)
    assert starts[0] == 0 and all(start % 16 == 0 for start in starts)


@pytest.mark.parametrize(
    ("T", "K", "H", "by_triton", "trained"),
    [
        (8192, 128, 32, "token_walk_kernel", "wide_walk_kernel"),
        (8192, 64, 32, "token_walk_kernel", "wide_walk_kernel"),
        (8190, 128, 32, "token_walk_kernel", "token_walk_kernel"),  # no maps for TMA
        (8192, 256, 32, "token_walk_kernel", "token_walk_kernel"),
        (8192, 128, 2, "walk_kernel", "walk_kernel"),  # too few programs
    ],
)
def test_heads_are_walked_by_warps_of_their_own_on_hopper(
    T: int, K: int, H: int, by_triton: str, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from foci.ops.delta import kernels_triton_token_walks  # noqa: F401  Triton is there, and says which it is

    if not tune.with_gluon():
        pytest.skip("Gluon has no interpreter, and this Triton may be none that compiles the kernel")
    q = torch.empty(1, T, H, K, dtype=torch.bfloat16, device="meta")
    g = torch.empty(1, T, H, device="meta")
    one = bind(q, q, q, g, log_decay=g)

    def walks(target: str, keep: bool) -> str:
        with tune.record_launches(tune.TARGETS[target]) as launches:
            gpu.forward(one, keep)
        *_, name = (launch.kernel.fn.__name__ for launch in launches if "walk" in launch.kernel.fn.__name__)
        return str(name)  # the last one: what is launched before it makes maps

    assert walks("sm_90", False) == "wide_walk_kernel" and walks("sm_90", True) == trained
    assert walks("sm_80", False) == walks("sm_100", False) == "walk_kernel"
    monkeypatch.setattr(gpu, "with_gluon", lambda: False)
    assert walks("sm_90", False) == by_triton


@pytest.mark.parametrize(("T", "documents"), [(2048, 0), (2000, 0), (2048, 2)])
def test_warps_of_their_own_are_given_maps_of_whole_chunks(T: int, documents: int) -> None:
    pytest.importorskip("triton")
    q, g = torch.empty(1, T, 32, 128, dtype=torch.bfloat16, device="meta"), torch.empty(1, T, 32, device="meta")
    offsets = torch.empty(documents + 1, dtype=torch.int64, device="meta") if documents else None
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        gpu.forward(bind(q, q, q, g, log_decay=g, offsets=offsets))
    walk = next(launch for launch in launches if launch.kernel.fn.__name__ == "wide_walk_kernel")
    assert walk.meta["MAPS"] == (T % 64 == 0 and not documents)


@pytest.mark.parametrize(("T", "given"), [(16320, True), (16384, False), (16448, False)])
def test_no_map_is_given_of_more_bytes_than_a_launch_may_tell(
    T: int, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X of a call without gradients, whose walk makes A, is 256 bytes a token and head, more than all else."""
    pytest.importorskip("triton")
    from foci.ops.delta import kernels_gluon
    from foci.tiles import maps

    monkeypatch.setattr(maps.triton, "__version__", "3.7.1")
    monkeypatch.setattr(kernels_gluon, "launch", lambda *_, MAPS, **__: asked.append(MAPS))
    asked: list[bool] = []
    q, g = torch.empty(16, T, 32, 64, dtype=torch.bfloat16, device="meta"), torch.empty(16, T, 32, device="meta")
    with tune.record_launches(tune.TARGETS["sm_90"]):
        gpu.forward(bind(q, q, q, g, log_decay=g))
    assert asked == [given]


@pytest.mark.parametrize(("keep", "walks"), [(False, ["wide_walk_kernel"]), (True, ["token_walk_kernel"] * 2)])
def test_few_heads_of_short_sequences_begin_by_maps_in_training_alone(keep: bool, walks: list[str]) -> None:
    """So that gates that forget too little cost nothing there; in inference a walk is faster by models' gates."""
    pytest.importorskip("triton")
    q = torch.empty(1, 2048, 8, 128, dtype=torch.bfloat16, device="meta")
    g = torch.empty(1, 2048, 8, device="meta")
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        gpu.forward(bind(q, q, q, g, log_decay=g), keep)
    names = [launch.kernel.fn.__name__ for launch in launches]
    assert [name for name in names if "walk" in name] == walks


@pytest.mark.parametrize(
    ("documents", "T", "by_maps"),
    [
        (4, 8192, False), (5, 8192, False), (5, 40960, True), (4, 16384, False), (4, 16320, True), (4, 8256, True),
        (2, 4096, False), (2, 7000, True), (5, 10240, False), (5, 10304, True),
    ],
)  # fmt: skip
def test_long_documents_of_few_heads_begin_by_maps_where_pieces_are_not_told_of_slow_gates(
    documents: int, T: int, by_maps: bool
) -> None:
    """A piece might walk all before it."""
    pytest.importorskip("triton")
    q, g = torch.empty(1, T, 2, 128, dtype=torch.bfloat16, device="meta"), torch.empty(1, T, 2, device="meta")
    offsets = torch.empty(documents + 1, dtype=torch.int64, device="meta")
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        gpu.forward(bind(q, q, q, g, log_decay=g, offsets=offsets))
    first, *names = (launch.kernel.fn.__name__ for launch in launches)
    assert launches[0].meta["EXACT"] == (not by_maps) and first == "token_chunks_kernel"
    assert ("wide_walk_kernel" in names) != by_maps and (names[:2] == ["walk_kernel"] * 2) == by_maps


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize(
    ("T", "G", "H", "documents"),
    [
        *((T, G, H, 0) for T, G, H in ((8192, 16, 16), (32768, 2, 8), (2048, 2, 8), (1024, 4, 4), (512, 30, 30))),
        *((T, G, H, 0) for T, G, H in ((8192, 16, 32), (65536, 1, 1))),
        *((T, 4, 4, documents) for T, documents in ((32768, 2), (32768, 8), (8192, 2), (16384, 4))),
    ],
)
def test_gated_deltanet_is_three_launches_and_four_back(K: int, T: int, G: int, H: int, documents: int) -> None:
    """At most, on Hopper: of few heads that warm up, or are told to begin by maps, and of documents too."""
    pytest.importorskip("triton")
    if not tune.with_gluon():
        pytest.skip("this Triton may be none that compiles kernels in Gluon, without which there are five back")
    q = torch.empty(1, T, G, K, dtype=torch.bfloat16, device="meta")
    v, g = q.new_empty(1, T, H, K), torch.empty(1, T, H, device="meta")
    offsets = torch.empty(documents + 1, dtype=torch.int64, device="meta") if documents else None
    asked = bind(q, q, v, g, log_decay=g, offsets=offsets)
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        gpu.forward(asked)
        inference = len(launches)
        outputs = gpu.forward(asked, True)
        forward = len(launches) - inference
        gpu.backward(asked, outputs, (torch.empty_like(v), None), [True] * 5 + [False] * 2)
    assert max(inference, forward) <= 3 and len(launches) - inference - forward <= 4


def test_a_walk_that_is_turned_has_a_table_of_its_own() -> None:
    """A table that gave its columns to few heads, walked in pieces, would ask for more shared memory than there is."""
    pytest.importorskip("triton")
    named = {}
    for T, H in ((256, 64), (4096, 2)):
        q = torch.empty(1, T, H, 128, dtype=torch.bfloat16, device="meta")
        one = bind(q, q, q, torch.empty(1, T, H, device="meta"), log_decay=torch.empty(1, T, H, 128, device="meta"))
        with tune.record_launches(tune.TARGETS["sm_90"]) as launches, tune.override_configs({}) as asked:
            gpu.forward(one)
        walk = next(launch.kernel.__name__ for launch in launches if "walk" in launch.kernel.__name__)
        named[walk] = [place for place, _ in asked if "walk" in place]
    assert named == {"channel_walk_kernel": ["delta_walk_by_channel"], "walk_kernel": ["delta_walk"]}


@pytest.mark.parametrize(
    ("T", "H", "K", "forward", "backward"),
    [
        (512, 64, 128, ("channel_walk_kernel", 64, 2), ("channel_walk_back_kernel", 64, 2)),
        (512, 64, 64, ("channel_walk_kernel", 64, 3), ("channel_walk_back_kernel", 64, 3)),
        (512, 16, 64, ("walk_kernel", 16, 3), ("channel_walk_back_kernel", 64, 3)),  # forward, few heads are narrow
        (8192, 2, 64, ("walk_kernel", 16, 3), ("walk_kernel", 32, 2)),  # in pieces
        (8192, 2, 128, ("walk_kernel", 16, 2), ("walk_kernel", 16, 2)),
    ],
)
def test_walks_of_gates_per_channel_are_turned_but_for_few_heads(
    T: int, H: int, K: int, forward: tuple[str, int, int], backward: tuple[str, int, int]
) -> None:
    """Kernel, columns and stages on Hopper: as was fastest on an H100."""
    pytest.importorskip("triton")
    q = torch.empty(1, T, H, K, dtype=torch.bfloat16, device="meta")
    one = bind(q, q, q, torch.empty(1, T, H, device="meta"), log_decay=torch.empty(1, T, H, K, device="meta"))
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        gpu.backward(one, gpu.forward(one, True), (q, None), [True] * 5 + [False, False])
    walks = [
        (launch.kernel.fn.__name__, launch.meta["BLOCK_V"], launch.meta["num_stages"])
        for launch in launches
        if "walk" in launch.kernel.fn.__name__
    ]
    assert walks[0] == forward and walks[-1] == backward


@pytest.mark.parametrize(("K", "V"), [(48, 64), (64, 36), (64, 100), (96, 64), (128, 100)])
def test_what_cannot_be_turned_has_no_columns_of_what_is(K: int, V: int) -> None:
    """64 of them asked for more shared memory than there is, where rows of v are padded, or K is no power of 2."""
    pytest.importorskip("triton")
    from foci.ops.delta.kernels_triton_forward import walk_rule

    q, v = (torch.empty(2, 512, 64, 128, dtype=torch.bfloat16, device="meta")[..., :width] for width in (K, V))
    gates = torch.empty(2, 512, 64, K, device="meta")
    one = bind(q, q, v, torch.empty(2, 512, 64, device="meta"), log_decay=gates)
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        made = gpu.forward(one, True)
        gpu.forward(one)
        gpu.backward(one, made, (made[0], None), [True] * 5 + [False, False])
    *ahead, back = (launch for launch in launches if launch.kernel.fn.__name__ == "walk_kernel")
    plain = walk_rule(torch.bfloat16, K, V, 2 * 64, 4, 0, tune.TARGETS["sm_90"])
    assert len(ahead) == 2 and all(launch.meta.items() >= plain.meta.items() for launch in ahead)
    assert back.meta["BLOCK_V"] <= 32 and back.grid == (2 * 64 * -(-V // back.meta["BLOCK_V"]),)
