"""The walk by warps on a GPU, beside Triton's and the equation. Without one: test_kernels_gluon_threads.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta, every_other_slow
from foci.ops.draw import Draw
from tests.ops.delta.in_parts import apart, held, kept
from tests.ops.in_gluon import told

from foci.ops.delta import kernels_triton_token_joins as joins  # isort: skip  after Triton's presence is known
from foci.ops.delta import kernels_triton_token_walks as token_walks  # isort: skip

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="Gluon has no interpreter, and this kernel is for Hopper")
both = pytest.mark.parametrize("columns", [64, 128])
SHAPES: list[dict[str, Any]] = [
    {"T": 8192, "H": 32, "G": 16},
    {"T": 8155, "H": 32, "G": 16, "state": True},
    {"T": 4096, "H": 16, "V": 256, "state": True},
    {"B": 4, "T": 2100, "H": 16, "decay": "head"},
    {"T": 9000, "H": 32, "G": 16, "offsets": (0, 0, 1, 6000, 6064, 9000, 9000), "state": True},
    {"T": 16384, "H": 16, "offsets": (0, 1, 1, 16384), "state": True},
    {"T": 16384, "H": 8, "offsets": (0, 1, 1, 16384)},
    {"T": 8200, "H": 32, "fused": True},
    {"T": 8192, "H": 32, "gates": lambda draw, *shape: draw.gates(*shape) / 100},
    {"T": 8192, "H": 32, "gates": lambda draw, *shape: 30 * draw.gates(*shape)},
    {"T": 3000, "H": 32, "gates": Draw.extremes, "alike": "correlated", "beta": 2.0},
    {"B": 2, "T": 2048, "H": 32, "K": 256, "V": 256, "state": True},
    {"T": 1100, "H": 66, "K": 256, "offsets": (0, 0, 1, 600, 1100), "alike": "correlated", "beta": 2.0},
    {"T": 64, "H": 200},
    {"T": 1, "H": 200, "state": True},
    {"B": 3, "T": 1024, "H": 8, "K": 64, "state": True},
    {"T": 1155, "H": 16, "G": 8, "K": 64, "offsets": (0, 0, 1, 600, 1155), "alike": "correlated", "beta": 2.0},
]
NARROW: list[dict[str, Any]] = [
    {"B": 8, "T": 1024, "H": 8, "K": 64, "V": 64},
    {"B": 2, "T": 2100, "H": 32, "K": 64, "V": 64, "fused": True, "state": True},
    {"T": 5000, "H": 16, "K": 64, "V": 64, "offsets": (0, 0, 1, 2000, 2064, 5000, 5000), "state": True},
    {"T": 1000, "H": 4, "V": 192, "gates": Draw.extremes},
    {"T": 2048, "H": 8, "K": 64, "V": 64, "alike": "identical", "beta": 2.0},
]
BY_MAPS: list[dict[str, Any]] = [
    {"T": 32768, "H": 8, "G": 2},
    {"T": 16001, "H": 4, "V": 256},
    {"T": 20000, "H": 4, "offsets": (0, 0, 1, 6000, 20000)},
]


def problem(device: str = "cuda", /, **options: Any) -> dict[str, Any]:
    made = Delta("", **{"B": 1, "G": options["H"], "K": 128, "V": 128, "decay": "token"} | options).case
    return made.make(torch.bfloat16, torch.device(device), 0)


TWICE: list[dict[str, Any]] = [
    {"B": 8, "T": 1024, "H": 8, "K": 64, "V": 64, "state": True},
    {"B": 2, "T": 640, "H": 16, "alike": "correlated"},
    {"T": 1536, "H": 32, "gates": every_other_slow},
    {"T": 576, "H": 4, "K": 64, "V": 64, "alike": "identical", "beta": 2.0},
    {"T": 3000, "H": 8, "K": 64, "V": 64, "offsets": (0, 1, 1, 1500, 3000), "state": True},
]
KEPT: list[dict[str, Any]] = [
    {"B": 4, "T": 2048, "H": 16, "state": True},
    {"B": 2, "T": 1024, "H": 80, "G": 40, "alike": "identical", "beta": 2.0},
    {"T": 8192, "H": 8, "G": 2},
    {"T": 4096, "H": 8, "gates": every_other_slow},
    {"B": 8, "T": 1024, "H": 10, "K": 64, "V": 64, "state": True},
    {"B": 3, "T": 512, "H": 16, "K": 64, "V": 128, "fused": True},
    {"T": 640, "H": 30, "V": 192, "decay": "head"},
]


def walked(
    inputs: dict[str, Any], columns: int, monkeypatch: pytest.MonkeyPatch, keep: bool = False, twice: bool = False
) -> list[Tensor]:
    """By warps, so many columns a program; of 0 by Triton. `keep`: and what a backward reads."""
    with monkeypatch.context() as patch:
        patch.setattr(token_walks, "wide", lambda *_: columns)
        patch.setattr(joins, "twice", lambda *_: twice)
        patch.setattr(token_walks, "suits", lambda *_: True)
        return [*gpu.forward(bind(**inputs), keep)]


@on_hopper
@pytest.mark.parametrize(
    ("options", "columns"),
    [(options, columns) for options in SHAPES for columns in ((128,) if options.get("K") == 256 else (64, 128))]
    + [(options, 64) for options in NARROW],
    ids=lambda x: told(x) if isinstance(x, dict) else f"by {x}",
)
def test_the_budget_holds(options: dict[str, Any], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(**options)
    found, beside = (walked(inputs, each, monkeypatch) for each in (columns, 0))
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
    for x, y, wanted in zip(found, beside, delta_rule(**wide, return_state=True, backend="chunked"), strict=True):
        assert wanted is not None and apart(x, wanted) <= 4.5e-3 and apart(x, y) <= 5e-3


@on_hopper
@pytest.mark.parametrize("alike", ["independent", "identical"])
@pytest.mark.parametrize(
    "options",
    [
        {"B": 8, "T": 1024, "H": 8, "K": 64, "V": 64, "state": True},
        {"B": 4, "T": 2048, "H": 16, "K": 64, "V": 128},
        {"T": 2048, "H": 16, "G": 8},
        {"T": 3000, "H": 8, "K": 64, "V": 64, "offsets": (0, 1, 1, 1000, 3000)},
    ],
    ids=told,
)
def test_the_walk_makes_the_same_bits_of_pairs(
    options: dict[str, Any], alike: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = problem(**options, alike=alike, beta=2.0 if alike == "identical" else 1.0)
    monkeypatch.setattr(token_walks, "alone", lambda *_: False)
    wanted = walked(inputs, 64, monkeypatch)
    monkeypatch.setattr(token_walks, "alone", lambda *_: True)
    for _ in range(10):
        for x, y in zip(walked(inputs, 64, monkeypatch), wanted, strict=True):
            assert x.equal(y)


@on_hopper
@pytest.mark.parametrize("options", TWICE, ids=told)
def test_two_programs_have_the_bits_of_one(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(**options)
    call = bind(**inputs)
    with tune.record_launches(tune.target_of(call.v.device)) as launches:
        gpu.forward(call)
    assert launches[-1].meta["TWICE"]
    for keep in (False, True)[: 1 if "offsets" in options else 2]:
        once = walked(inputs, 64, monkeypatch, keep)
        once = [*kept(call, once)] if keep else once
        for _ in range(10):
            found = walked(inputs, 64, monkeypatch, keep, True)
            for x, y in zip(kept(call, found) if keep else found, once, strict=True):
                assert x.equal(y)


@on_hopper
@both
def test_where_keys_are_alike_it_is_as_exact_as_the_other(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one bfloat16 of each number out misses the budget (as threads: 6.9e-3)."""
    inputs = problem(T=8192, H=32, G=16, alike="identical", beta=2.0, state=True)
    beside = walked(inputs, 0, monkeypatch)
    found = walked(inputs, columns, monkeypatch)
    for x, y in zip(found, beside, strict=True):
        assert apart(x, y) <= 3e-3


@on_hopper
@pytest.mark.parametrize("options", KEPT, ids=told)
def test_what_a_backward_reads_is_what_triton_keeps(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(**options)
    call = bind(**inputs)
    columns = token_walks.wide(call, tune.target_of(inputs["v"].device), True)
    assert columns == 64
    found = held(call, *(walked(inputs, each, monkeypatch, True) for each in (columns, 0)), apart)
    for _ in range(10):
        for x, y in zip(found, kept(call, walked(inputs, columns, monkeypatch, True)), strict=True):
            assert x.equal(y)


@on_hopper
@both
@pytest.mark.parametrize("start", [3, 35, 64])
@pytest.mark.parametrize("alike", [False, True])
def test_what_comes_later_changes_no_bit(
    start: int, alike: bool, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though keys that are alike have a whole chunk walked in another way."""
    inputs = problem(T=8192, H=32, G=16, alike="identical" if alike else "independent", beta=2.0)
    later, start = dict(inputs), 20 * gpu.CHUNK + start
    later["k"] = inputs["k"].clone()
    later["k"][:, start:] = 0.0 if alike else inputs["k"][:, :1]
    found, wanted = (walked(x, columns, monkeypatch)[0][:, :start] for x in (later, inputs))
    assert found.equal(wanted)


@on_hopper
@both
@pytest.mark.parametrize("options", BY_MAPS, ids=told)
def test_it_begins_by_maps_too(options: dict[str, Any], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where some heads forget too slowly; near what one walk of the whole sequence finds."""
    inputs = problem(**{"gates": every_other_slow, "state": True} | options)
    monkeypatch.setattr(joins, "by_maps", lambda call, target, pieces: pieces > 1)
    monkeypatch.setattr(token_walks, "shares", lambda *_: 9)
    found = walked(inputs, columns, monkeypatch)
    monkeypatch.setattr(token_walks, "shares", lambda *_: 1)
    for x, z in zip(found, walked(inputs, 0, monkeypatch), strict=True):
        assert x.isfinite().all() and apart(x, z) <= 5e-3


def test_some_shapes_have_pieces_without_a_chunk() -> None:
    """Which needs no GPU to be seen: the warps of such a program have nothing to do."""
    target, empty = tune.TARGETS["sm_90"], []
    for options in (options for options in SHAPES if "offsets" in options):
        x, offsets = torch.empty(1, options["T"], options["H"], 128, device="meta").bfloat16(), options["offsets"]
        call = bind(x, x, x, x[..., 0], log_decay=x[..., 0], offsets=torch.tensor(offsets, device="meta"))
        shares = token_walks.shares(call, target)
        empty.append(shares > 1 and any(b - a <= gpu.CHUNK for a, b in pairwise(offsets)))
    assert any(empty)


@on_hopper
def test_it_is_played_again_and_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the public function, whose third call asks nothing of Triton (core/plans.py)."""
    inputs = problem(T=8200, H=32, G=16, state=True)
    assert token_walks.wide(bind(**inputs), tune.target_of(inputs["v"].device)) == 64
    wanted, graph = walked(inputs, 64, monkeypatch), torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(4):
            found = delta_rule(**inputs, return_state=True, backend="triton")
            assert all(x is not None and x.equal(y) for x, y in zip(found, wanted, strict=True))
        with torch.cuda.graph(graph):
            captured = delta_rule(**inputs, return_state=True, backend="triton")
    inputs["v"].mul_(2)
    graph.replay()
    for x, y in zip(captured, walked(inputs, 64, monkeypatch), strict=True):
        assert x is not None and x.equal(y)


@on_hopper
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "log_decay", "state"])
@both
def test_what_is_no_number_is_never_forgotten(
    name: str, wrong: float, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = problem(T=8192, H=32, G=16, state=True, gates=lambda draw, *shape: 5 * draw.gates(*shape))
    x = inputs[name]
    x[(0, 3, 5, 7) if name == "state" else (0, 100, 3, 5)[: x.dim()]] = wrong
    found = walked(inputs, columns, monkeypatch)
    monkeypatch.setattr(token_walks, "shares", lambda *_: 1)
    for y, wanted in zip(found, walked(inputs, 0, monkeypatch), strict=True):
        assert y.isfinite().equal(wanted.isfinite())


@pytest.mark.parametrize(
    ("version", "known"), [("3.6.0", True), ("3.7.1", True), ("3.9.0", True), ("3.5.1", False), ("3.8.0", False)]
)
def test_it_is_asked_of_tritons_that_compile_it_and_not_of_the_interpreter(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    for interprets in (False, True):
        monkeypatch.setattr(tune, "interpreting", lambda interprets=interprets: interprets)
        assert tune.with_gluon() == (known and not interprets)
