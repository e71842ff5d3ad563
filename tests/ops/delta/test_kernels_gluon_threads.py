"""The walk by warps as threads on a CPU (tests/ops/in_gluon.py), behind a first launch by the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from foci.ops.draw import Draw
from foci.tiles import told
from tests.ops.delta.in_parts import held, kept
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_gluon import Gluon
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, error, exact

from foci.ops.delta import kernels_gluon  # isort: skip  after Triton's presence is known
from foci.ops.delta import kernels_triton_token_joins as joins  # isort: skip
from foci.ops.delta import kernels_triton_token_walks as token_walks  # isort: skip
from foci.ops.delta import kernels_triton_triangles as triangles  # isort: skip

pytestmark = [
    pytest.mark.usefixtures("halves"),
    pytest.mark.skipif(not tune.interpreting(), reason="on a GPU test_kernels_gluon.py asks the kernel itself"),
]
CPU = torch.device("cpu")


def problem(options: dict[str, Any]) -> dict[str, Any]:
    made = Delta("", **{"B": 1, "G": 1, "H": 2, "K": 128, "V": 128, "decay": "token"} | options).case
    return made.make(torch.bfloat16, CPU, 0)


def walked(
    inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, pieces: int = 1, return_state: bool = True,
    ahead: bool = False, columns: int = 0, keep: bool = False, alone: bool = True, late: int | None = None,
    twice: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Out and the final state, each sequence in so many `pieces`; `ahead`: the first program before the last.

    `columns` a program: as many as there are, of 128 and 64, if none are told. `keep`: and what a backward reads.
    `alone`: the walk by 64 columns makes A. `late`: of warps beside each other, those that begin last. `twice`: two
    programs walk each sequence by 64 columns.
    """
    columns = columns or (64 if inputs["v"].shape[3] % 128 else 128)

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, config: Any, **meta: Any) -> None:
        Gluon(kernels_gluon.gl, ahead, late).run(kernels_gluon, kernel, grid, arguments, **meta)

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "with_gluon", lambda: True)
        patch.setattr(kernels_gluon, "launch", launch)
        patch.setattr(token_walks, "wide", lambda *_: columns)
        patch.setattr(token_walks, "alone", lambda *_: alone)
        patch.setattr(token_walks, "suits", lambda *_: True)
        patch.setattr(token_walks, "shares", lambda *_: pieces)
        patch.setattr(joins, "twice", lambda *_: twice)
        return [x.cpu() for x in gpu.forward(bind(**there(inputs), return_state=return_state), keep)]


@pytest.mark.parametrize(("K", "columns"), [(64, 64), (128, 64), (64, 128), (128, 128), (256, 128)])
@pytest.mark.parametrize("keep", [False, True])
def test_shared_memory_holds_its_chunks_and_no_more(K: int, columns: int, keep: bool) -> None:
    def taken(stages: int) -> int:
        chunk = 2 * 64 * (2 * K + columns + 4 * 64) + 3 * 4 * 64
        return stages * chunk + 2 * columns * (K + 2 * 64) * keep + 16 * stages

    stages, there = kernels_gluon._stages(K, columns, keep), 227 * 1024
    if not (keep and K == 256):  # which Triton walks
        assert taken(stages) <= there - 512  # what warps are begun by
        assert stages == 3 or taken(3) > there


@pytest.mark.parametrize("alike", ["independent", "correlated", "identical"])
@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({"B": 2, "T": 256, "state": True}, 128),
        ({"B": 2, "T": 256, "state": True}, 64),
        ({"T": 201, "H": 1, "V": 256, "decay": "head"}, 128),
        ({"T": 193, "offsets": (0, 0, 1, 130, 193), "state": True}, 128),
        ({"T": 193, "offsets": (0, 0, 1, 130, 193), "state": True}, 64),
        ({"T": 130, "gates": Draw.extremes}, 128),
        ({"T": 201, "H": 1, "K": 256, "V": 256, "state": True}, 128),
        ({"T": 128, "G": 2, "H": 2, "K": 256, "V": 256, "state": True}, 128),
        ({"B": 2, "T": 128, "G": 2, "H": 4, "fused": True}, 128),
        ({"B": 2, "T": 256, "K": 64, "V": 64, "state": True}, 64),
        ({"T": 193, "K": 64, "V": 192, "offsets": (0, 0, 1, 130, 193), "state": True}, 64),
        ({"T": 201, "K": 64, "H": 1, "state": True}, 128),
        ({"T": 256, "H": 1, "V": 64, "gates": Draw.extremes}, 64),
    ],
    ids=str,
)
def test_the_budget_holds(options: dict[str, Any], columns: int, alike: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(options | {"alike": alike, "beta": 2.0 if alike == "identical" else 1.0})
    truth = delta_rule(**exact(inputs), return_state=True, backend="chunked")
    for found, wanted in zip(walked(inputs, monkeypatch, columns=columns), truth, strict=True):
        assert error(found, wanted) <= BUDGET[torch.bfloat16]


@pytest.mark.parametrize("alike", ["independent", "correlated", "identical"])
@pytest.mark.parametrize(
    "options", [{"B": 2, "T": 256}, {"T": 330, "K": 64, "V": 64, "offsets": (0, 0, 1, 130, 330)}], ids=str
)
def test_the_walk_makes_of_pairs_what_the_first_launch_makes(
    options: dict[str, Any], alike: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = problem(options | {"alike": alike, "beta": 2.0 if alike == "identical" else 1.0, "state": True})
    by_walk, by_launch = (walked(inputs, monkeypatch, columns=64, alone=alone) for alone in (True, False))
    for found, wanted in zip(by_walk, by_launch, strict=True):
        assert error(found, wanted) <= 1e-3  # a GPU's have the same bits; here sums are others


@pytest.mark.parametrize("columns", [64, 128])
def test_documents_may_have_pieces_without_a_chunk(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem({"T": 330, "H": 1, "offsets": (0, 1, 1, 70, 330), "state": True})
    truth = delta_rule(**exact(inputs), return_state=True, backend="chunked")
    for found, wanted in zip(walked(inputs, monkeypatch, 3, columns=columns), truth, strict=True):
        assert error(found, wanted) <= BUDGET[torch.bfloat16]


def test_of_two_heads_one_has_keys_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem({"B": 2, "T": 200, "G": 2, "beta": 2.0, "gates": lambda draw, *shape: draw.gates(*shape) / 100})
    for name in "q", "k":
        inputs[name][:, :, 1] = inputs["k"][:, :1, 1]
        inputs[name][0, 100:, 0] = inputs["k"][0, :1, 0]
    truth = delta_rule(**exact(inputs), return_state=True, backend="chunked")
    for found, wanted in zip(walked(inputs, monkeypatch), truth, strict=True):
        heads = 2 if found.dtype == torch.bfloat16 else 1
        for one, right in zip(found.unbind(heads), wanted.unbind(heads), strict=True):
            assert error(one, right) <= BUDGET[torch.bfloat16]


def test_those_that_make_products_may_be_late_in_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a barrier that is two turns further waits for ever."""
    inputs = problem({"T": 1024, "H": 1, "K": 64, "V": 64, "gates": lambda draw, *shape: torch.full(shape, -0.03)})
    pairs = 1  # behind those that walk
    for pieces, twice in ((2, False), (1, True)):
        late, right = (walked(inputs, monkeypatch, pieces, late=each, twice=twice) for each in (pairs, None))
        assert all(map(torch.equal, late, right))


@pytest.mark.parametrize(
    ("options", "pieces", "keep"),
    [
        ({"B": 2, "T": 320, "K": 64, "V": 64, "state": True, "alike": "correlated"}, 1, False),
        ({"T": 650, "H": 1, "K": 64, "V": 64, "offsets": (0, 0, 1, 130, 201, 650), "state": True}, 1, False),
        ({"T": 300, "H": 1, "state": True, "gates": Draw.extremes}, 2, False),
        ({"T": 256, "K": 64, "V": 64, "state": True}, 1, True),
        ({"T": 320, "H": 1, "state": True, "alike": "identical", "beta": 2.0}, 2, True),
    ],
    ids=str,
)
def test_two_programs_have_the_bits_of_one(
    options: dict[str, Any], pieces: int, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no program writes where another one does."""
    inputs = problem(options)
    call = bind(**there(inputs))
    once, found, ahead = (
        walked(inputs, monkeypatch, each, ahead=ahead, columns=64, keep=keep, twice=twice)
        for each, ahead, twice in ((1, False, False), (pieces, False, True), (pieces, True, True))
    )
    if keep:
        once, found, ahead = (list(kept(call, each)) for each in (once, found, ahead))
    for x, y, wanted in zip(found, ahead, once, strict=True):
        assert x.equal(wanted) and y.equal(wanted)


@pytest.mark.parametrize("alike", ["independent", "correlated"])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("columns", [64, 128])
def test_pieces_begin_as_one_walk_would(columns: int, slow: bool, alike: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After what is not forgotten, or, of one head, by maps: one bfloat16 of keys that are not alike (whole chunks)."""

    def gates(draw: Draw, *shape: int) -> Tensor:
        made = torch.full(shape, -1.2)
        made[..., 1] = -0.001 if slow else -1.2
        return made

    monkeypatch.setattr(joins, "by_maps", lambda call, target, pieces: slow and pieces > 1)
    monkeypatch.setattr(token_walks, "FAR", 2)
    inputs = problem({"T": 768 if alike == "independent" else 700, "state": True, "gates": gates, "alike": alike})
    in_pieces = walked(inputs, monkeypatch, 3, columns=columns)
    for found, wanted in zip(in_pieces, walked(inputs, monkeypatch), strict=True):
        assert error(found, wanted) <= BUDGET[torch.bfloat16]
    for found, wanted in zip(in_pieces, walked(inputs, monkeypatch, 3, ahead=True, columns=columns), strict=True):
        assert found.equal(wanted)  # a piece writes nothing where another one does


@triton.jit
def exactly(arrived_ptr, count):  # type: ignore[no-untyped-def]
    """`await_count` where programs come one by one: as many have come by now, or what they count is spoiled."""
    found = tl.atomic_add(arrived_ptr, 0)
    tl.store(arrived_ptr, tl.where(found == count, found, -1000))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({"B": 2, "T": 448, "G": 1, "K": 64, "V": 192, "state": True}, True),
        ({"T": 450, "G": 2, "V": 64, "offsets": (0, 0, 1, 6, 300, 450)}, False),
    ],
    ids=str,
)
def test_pieces_count_each_other_and_lose_what_one_walk_does(
    options: dict[str, Any], keep: bool, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow pieces wait for all maps before the last of them, no more and no less; the last program makes NaN spread."""
    pieces, made = 4, []
    real = triangles._gated

    def gated(*given: Any) -> Any:
        made.append(real(*given))
        return made[-1]

    def half(_: Draw, *shape: int) -> Tensor:
        gates = torch.full(shape, -3.0)
        gates[:, : shape[1] // 2] = -1e-3
        return gates

    monkeypatch.setattr(triangles, "_gated", gated)
    monkeypatch.setattr(told, "await_count", exactly)
    monkeypatch.setattr(joins, "by_maps", lambda call, target, pieces: pieces > 1)
    monkeypatch.setattr(token_walks, "FAR", 1)
    inputs = problem(options | {"gates": half})
    inputs["v"][-1, 20, -1, -1], inputs["v"][0, 130, 0, 3] = torch.nan, torch.nan
    call, found = bind(**there(inputs)), []
    for count in (pieces, 1):
        out, final, *buffer = walked(inputs, monkeypatch, count, columns=64, keep=keep, ahead=ahead and count > 1)
        kept = [gpu._parts(call, x) for x in buffer]
        found.append([x.isfinite() for x in (out, final, *(y for x in kept for y in (x.states, x.errors)))])
    assert all(x.equal(y) and not x.all() for x, y in zip(*found, strict=True))
    mapped, ended = made[0].arrived[..., 0], made[0].arrived[..., 1:]
    each, of_M = (call.v.shape[3] + call.k.shape[3]) // 64, call.k.shape[3] // 64
    assert {*mapped.flatten().tolist()} <= {0, *(piece * each - of_M for piece in range(1, pieces))} and mapped.any()
    assert bool((ended % (1 << 16) == pieces).all())


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"B": 2, "T": 192, "state": True}, 1),
        ({"T": 256, "H": 3, "G": 3, "alike": "correlated"}, 1),
        ({"T": 448, "gates": lambda draw, *shape: torch.full(shape, -1.2)}, 3),
        ({"B": 2, "T": 192, "K": 64, "V": 64, "alike": "identical", "beta": 2.0}, 1),
        ({"T": 256, "H": 4, "G": 2, "K": 64, "decay": "head"}, 1),
        ({"T": 192, "V": 192, "fused": True}, 1),
    ],
    ids=str,
)
def test_what_a_backward_reads_is_what_triton_keeps(
    options: dict[str, Any], pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = problem(options)
    call = bind(**there(inputs))
    made = walked(inputs, monkeypatch, pieces, columns=64, keep=True)
    by_triton = [x.cpu() for x in gpu.forward(call, True)]
    again = walked(inputs, monkeypatch, pieces, ahead=True, columns=64, keep=True)
    for x, y in zip(held(call, made, by_triton, error), kept(call, again), strict=True):
        assert x.equal(y)  # no piece writes where another one does
    found, wanted = (gpu._parts(call, each[2]) for each in (made, by_triton))
    for name in ("inverse", "products", "rows", "total"):
        assert getattr(found, name).equal(getattr(wanted, name)), name


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_state_that_nobody_asks_for_is_not_stored(pieces: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem({"T": 192 if keep else 200, "H": 1})
    (out, final, *_), (wanted, *_) = (
        walked(inputs, monkeypatch, pieces, asked, columns=64, keep=keep) for asked in (False, True)
    )
    assert out.equal(wanted) and final.shape == (0, 1, 128, 128)


@pytest.mark.parametrize("start", [64, 83, 127])
@pytest.mark.parametrize("alike", [False, True])
def test_what_comes_later_changes_no_bit(start: int, alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though keys that are alike have a whole chunk walked in another way."""
    inputs = problem({"T": 130, "H": 1, "alike": "identical" if alike else "independent", "beta": 2.0})
    later = dict(inputs) | {"k": inputs["k"].clone()}
    later["k"][:, start:] = 0.0 if alike else inputs["k"][:, :1]
    found, wanted = (walked(x, monkeypatch)[0][:, :start] for x in (later, inputs))
    assert found.equal(wanted)


@pytest.mark.parametrize("alike", ["correlated", "identical"])
@pytest.mark.parametrize("columns", [64, 128])  # by three and by two chunks in shared memory
def test_a_chunk_has_the_same_bits_in_every_place(alike: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a chunk that writes nothing, so that each is where the other one was."""
    inputs = problem({"T": 130, "H": 1, "alike": alike, "beta": 2.0})
    later = {name: torch.cat([torch.zeros_like(x[:, :64]), x], 1) for name, x in inputs.items()}
    out, final = walked(inputs, monkeypatch, columns=columns)
    behind, last = walked(later, monkeypatch, columns=columns)
    assert behind[:, 64:].equal(out) and last.equal(final)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "log_decay"])
def test_no_document_sees_what_is_no_number_in_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind a document's end in its last chunk is the next one's."""
    inputs = problem({"T": 200, "H": 1, "offsets": (0, 70, 75, 200), "alike": "correlated"})
    clean = walked(inputs, monkeypatch)
    inputs[name] = inputs[name].clone()
    inputs[name][:, 70:75] = torch.nan
    out, final = walked(inputs, monkeypatch)
    assert out[:, :70].equal(clean[0][:, :70]) and out[:, 75:].equal(clean[0][:, 75:])
    assert final[[0, 2]].equal(clean[1][[0, 2]])
    assert out[:, 70:75].isnan().any()


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "log_decay", "state"])
def test_what_is_no_number_is_never_forgotten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem({"T": 260, "H": 1, "state": True, "gates": lambda draw, *shape: 20 * draw.gates(*shape)})
    x = inputs[name]
    x[(0, 0, 5, 7) if name == "state" else (0, 70, 0, 5)[: x.dim()]] = torch.nan
    found = walked(inputs, monkeypatch, 2)
    for y, wanted in zip(found, walked(inputs, monkeypatch), strict=True):
        assert y.isfinite().equal(wanted.isfinite())
    assert not found[0].isfinite().all()
