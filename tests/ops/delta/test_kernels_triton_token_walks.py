"""The walk with its state turned over, both ways, where it takes the place of the other: bfloat16 on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.check import memory
from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta import pieces as maps
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from foci.ops.delta.spec import SPEC
from foci.ops.draw import Draw
from foci.ops.stretches import cut_into
from tests.ops.delta.test_kernels_triton_backward import CPU
from tests.ops.delta.test_kernels_triton_backward import apart as apart_backward
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, error, exact, unasked

from foci.ops.delta import kernels_triton_token_joins as joins  # isort: skip  after Triton's presence is known
from foci.ops.delta import kernels_triton_token_walks as token_walks  # isort: skip

MORE = [
    {"B": 2, "T": 128, "V": 128, "state": True},  # of whole chunks: by maps for TMA (tiles/maps.py)
    {"B": 2, "T": 150, "V": 128, "state": True},
    {"T": 150, "erase": True, "offsets": (0, 3, 3, 140, 150), "state": True},
    {"T": 70, "K": 128, "V": 96, "decay": "", "beta": 2.0},
    {"T": 129, "V": 40, "alike": "correlated", "beta": 2.0, "full": True, "decay": ""},
    {"T": 129, "alike": "identical", "beta": 1.9, "full": True, "decay": ""},
    {"B": 2, "T": 66, "decay": "head"},
    {"T": 130, "H": 2, "K": 256, "state": True},
    {"T": 70, "K": 256, "V": 96, "decay": "", "erase": True},
]


def problem(more: dict[str, Any]) -> dict[str, Any]:
    options = {"B": 1, "T": 70, "H": 4, "G": 2, "K": 64, "V": 64, "decay": "token"} | more
    return Delta("", **options).case.make(torch.bfloat16, CPU, 0)


@pytest.mark.usefixtures("halves")
class TestWithinBudget:
    @pytest.mark.parametrize("more", MORE)
    @pytest.mark.parametrize("keep", [False, True])
    def test_forward(self, more: dict[str, Any], keep: bool) -> None:
        inputs = problem(more)
        truth = delta_rule(**exact(inputs), return_state=True, backend="chunked")
        call = bind(**there(inputs))
        found = [x.cpu() for x in gpu.forward(call, keep)]
        errors = [error(x, wanted) for x, wanted in zip(found, truth, strict=False)]
        assert all(e <= BUDGET[torch.bfloat16] for e in errors), errors
        if keep:
            parts = gpu._parts(bind(**inputs), found[2])
            d = parts.errors[0].double() + parts.errors[1].double()
            assert d.isfinite().all() and parts.inverse.isfinite().all()

    @pytest.mark.parametrize("K", [128, 256])
    def test_what_is_kept_is_the_state_at_each_chunks_start(self, K: int) -> None:
        inputs = problem({"T": 200, "H": 2, "K": K, "V": 72, "state": True})
        kept = gpu._parts(bind(**inputs), gpu.forward(bind(**there(inputs)), True)[2].cpu()).states
        for slot in range(4):
            part = {n: x if n == "state" else x[:, : 64 * slot] for n, x in exact(inputs).items()}
            state = delta_rule(**part, return_state=True, backend="chunked")[1] if slot else part["state"]
            assert state is not None and error(kept[slot], state[0]) < BUDGET[torch.bfloat16]

    @pytest.mark.parametrize("keep", [False, True])
    def test_a_state_that_nobody_asks_for_is_not_stored(self, keep: bool) -> None:
        for more in MORE[:2]:
            unasked(SPEC, partial(gpu.forward, keep=keep), bind(**there(problem(more))))

    @pytest.mark.parametrize("more", MORE)
    def test_backward(self, more: dict[str, Any]) -> None:
        errors = apart_backward(problem(more))
        assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors


def all_of(gate: float) -> Callable[..., Tensor]:
    return lambda _, *shape: torch.full(shape, gate)


def halted(draw: Draw, *shape: int) -> Tensor:
    """Two tokens that forget all, else hardly anything."""
    gates = 0.01 * draw.gates(*shape)
    gates[:, [70, 250]] = -torch.inf
    return gates


AT_ONCE, IN_THREE, NEVER = all_of(-3.0), all_of(-0.6), all_of(-1e-3)  # chunks
IN_PIECES = [
    {"B": 2, "T": 384, "H": 2, "state": True},
    {"T": 448, "H": 2, "G": 2, "gates": NEVER},
    {"T": 390, "H": 2, "state": True},
    {"T": 330, "K": 128, "V": 96, "gates": AT_ONCE},
    {"T": 510, "gates": IN_THREE, "state": True},
    {"T": 385, "gates": NEVER, "state": True},
    {"T": 300, "gates": Draw.extremes},
    {"T": 400, "gates": halted, "alike": "correlated", "beta": 2.0, "state": True},
    {"T": 390, "gates": all_of(-2.0), "length": 1.5, "beta": 2.0},
    {"T": 640, "H": 2, "gates": IN_THREE, "offsets": (0, 0, 1, 6, 500, 500, 640), "state": True},
    {"B": 2, "T": 260, "H": 2, "G": 2, "decay": "head"},
]


WRONG = [
    *((name, 5, torch.nan) for name in ("q", "k", "v", "beta", "log_decay", "state")),
    *((name, 100, torch.nan) for name in ("k", "v")),
    *((name, 192, torch.nan) for name in ("q", "k", "v", "log_decay", "d_out", "d_final")),
    *((name, 5, torch.inf) for name in ("v", "state")),
    *((name, 192, torch.inf) for name in ("q", "d_out")),
]


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many of each sequence, whatever the rules say."""

    def into(pieces: int) -> None:
        monkeypatch.setattr(token_walks, "shares", lambda *_: pieces)

    monkeypatch.setattr(maps, "cut", lambda N, B, T, packed, *_: cut_into(0, N, T, packed))
    monkeypatch.setattr(token_walks, "suits", lambda *_: True)
    into(3)
    return into


@pytest.fixture(params=[False, True], ids=["warmed up", "by maps"])
def by_maps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether pieces with more than a chunk before them that is not forgotten are joined by maps."""
    monkeypatch.setattr(joins, "by_maps", lambda call, target, pieces: request.param and pieces > 1)
    monkeypatch.setattr(token_walks, "FAR", 1)
    return bool(request.param)


def whole_walk(inputs: dict[str, Any], d_out: Tensor, d_final: Tensor) -> dict[str, Tensor]:
    """All that a forward and a backward give, by name."""
    call = bind(**there(inputs))
    outputs = gpu.forward(call, True)
    needs = [isinstance(x, Tensor) for x in call[:7]]
    grads = gpu.backward(call, outputs, (d_out.to(call.v.device), d_final.to(call.v.device)), needs)
    parts = gpu._parts(call, outputs[2])
    found = {"out": outputs[0], "final": outputs[1], "states": parts.states, "errors": parts.errors}
    return {n: x.cpu() for n, x in (found | dict(zip(call._fields, grads, strict=False))).items() if x is not None}


def draws(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    draw, (_, _, H, V) = torch.Generator().manual_seed(1), inputs["v"].shape
    sequences = inputs["state"].shape[0] if "state" in inputs else inputs["v"].shape[0]
    d_final = torch.randn(sequences, H, inputs["q"].shape[3], V, generator=draw)
    return torch.randn(inputs["v"].shape, generator=draw).bfloat16(), d_final


def holds_before(start: int, inputs: dict[str, Any], d_out: Tensor, d_final: Tensor) -> None:
    """Other tokens from `start` on, none of which has a gradient, change no bit of those before."""
    d_out[:, start:], d_final[:] = 0, 0
    later = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    for name in ("q", "k", "v", "beta"):
        later[name][:, start:] *= -0.5
    later["log_decay"][:, start:] = -torch.inf
    found, wanted = (whole_walk(given, d_out, d_final) for given in (later, inputs))
    for name in ("out", "q", "k", "v", "beta", "log_decay"):
        assert found[name][:, :start].equal(wanted[name][:, :start]), name


def keeps_the_budget(inputs: dict[str, Any]) -> None:
    """Forward and every gradient; and the final state is not stored where nobody asks for it."""
    truth = delta_rule(**exact(inputs), return_state=True, backend="chunked")
    found = gpu.forward(bind(**there(inputs)), False)
    errors = [error(x.cpu(), wanted) for x, wanted in zip(found, truth, strict=True)]
    assert all(e <= BUDGET[torch.bfloat16] for e in errors), errors
    unasked(SPEC, gpu.forward, bind(**there(inputs)))
    backward = apart_backward(inputs)
    assert all(e <= BUDGET[torch.bfloat16] for e in backward.values()), backward


def never_forgotten(inputs: dict[str, Any], name: str, token: int, wrong: float, whole: Callable[[], None]) -> None:
    """What is no number is so where it is in one walk: in `whole` ones."""
    inputs |= dict(zip(("d_out", "d_final"), draws(inputs), strict=True))
    x = inputs[name]
    x[(0, 0, 3, 5) if name in ("state", "d_final") else (0, token, 0, 5)[: x.dim()]] = wrong
    into = [inputs.pop(n) for n in ("d_out", "d_final")]
    found = whole_walk(inputs, *into)
    whole()
    for n, wanted in whole_walk(inputs, *into).items():
        assert found[n].isfinite().equal(wanted.isfinite()), n


small = partial(dict, H=1, G=1)


@pytest.mark.usefixtures("halves", "by_maps")
class TestInPieces:
    @pytest.mark.parametrize("more", IN_PIECES)
    def test_within_the_budget(self, more: dict[str, Any], in_pieces: Callable[[int], None]) -> None:
        keeps_the_budget(problem(small() | more))

    def test_documents_with_fewer_chunks_than_pieces(self, in_pieces: Callable[[int], None]) -> None:
        """Some of a document's pieces are empty, before others that begin by maps."""
        in_pieces(6)
        keeps_the_budget(problem(small(T=330, gates=NEVER, offsets=(0, 200, 200, 201, 330), state=True)))

    @pytest.mark.parametrize("gates", [NEVER, AT_ONCE, halted], ids=["never", "at once", "halted"])
    @pytest.mark.parametrize("offsets", [(), (0, 3, 330)])
    def test_nothing_changes_where_all_is_remembered_or_nothing(
        self, gates: Any, offsets: tuple[int, ...], in_pieces: Callable[[int], None], by_maps: bool
    ) -> None:
        inputs = problem(small(T=330, gates=gates, state=True, offsets=offsets))
        into = draws(inputs)
        found = whole_walk(inputs, *into)
        in_pieces(1)
        wanted = whole_walk(inputs, *into)
        rounds = by_maps and gates is NEVER  # what maps join
        for name, x in found.items():
            assert x.equal(wanted[name]) != rounds or (rounds and name == "log_decay"), name

    @pytest.mark.parametrize(("name", "token", "wrong"), WRONG)
    @pytest.mark.parametrize("gates", [AT_ONCE, NEVER], ids=["at once", "never"])
    def test_what_is_no_number_is_never_forgotten(
        self, name: str, token: int, wrong: float, gates: Any, in_pieces: Callable[[int], None]
    ) -> None:
        inputs = problem(small(T=193, gates=gates, state=True))
        never_forgotten(inputs, name, token, wrong, partial(in_pieces, 1))

    @pytest.mark.parametrize(
        "more", [{"B": 2, "H": 2, "G": 1, "V": 72, "state": True}, {"H": 3, "G": 3, "K": 128, "V": 192}]
    )
    def test_what_values_lose_is_lost_to_all_that_is_kept_as_in_one_walk(
        self, more: dict[str, Any], in_pieces: Callable[[int], None]
    ) -> None:
        """In columns of every block, of heads and rows that are not the first; nothing else is."""
        inputs = problem({"T": 450, "gates": AT_ONCE} | more)
        inputs["v"][-1, 20, -1, -1], inputs["v"][0, 130, 0, 3] = torch.nan, torch.nan
        call, found = bind(**there(inputs)), []
        for pieces in (5, 1):
            in_pieces(pieces)
            out, final, buffer = gpu.forward(call, True)
            parts = gpu._parts(call, buffer)
            found.append([x.isfinite() for x in (out, final, parts.states, parts.errors)])
        assert all(x.equal(y) and not x.all() for x, y in zip(*found, strict=True))

    @pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
    def test_a_value_that_is_no_number_is_lost_to_its_own_column_and_document(
        self, wrong: float, in_pieces: Callable[[int], None]
    ) -> None:
        inputs = problem(small(T=400, gates=AT_ONCE, state=True, offsets=(0, 3, 3, 260, 400)))
        inputs["v"][0, 70, 0, 5] = wrong
        call = bind(**there(inputs))
        for keep in (False, True):
            out, final, *_ = (x.cpu() for x in gpu.forward(call, keep))
            lost = (~out[0, :, 0].isfinite()).nonzero().tolist()
            assert {c for _, c in lost} == {5} and {t for t, _ in lost} >= set(range(71, 260))
            assert all(67 <= t < 260 for t, _ in lost)
            assert final[2, 0, :, 5].isnan().all() and final.isfinite().sum() == final.numel() - final.shape[2]
            alone = gpu.forward(call._replace(return_state=False), keep)[0].cpu()
            assert alone.nan_to_num(7).equal(out.nan_to_num(7))

    def test_what_lies_before_a_piece_says_whether_it_is_slow(
        self, in_pieces: Callable[[int], None], by_maps: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Four pieces of 12 chunks, of which the first half forgets nothing: what is behind counts in the backward."""
        found: list[Any] = []
        real = joins.starts

        def starts(*given: Any) -> Any:
            found.append(real(*given))
            return found[-1]

        def half(_: Draw, *shape: int) -> Tensor:
            gates = torch.full(shape, -3.0)
            gates[:, : shape[1] // 2] = -1e-3
            return gates

        monkeypatch.setattr(joins, "starts", starts)
        in_pieces(4)
        inputs = problem(small(T=768, gates=half))
        whole_walk(inputs, *draws(inputs))
        flags = [None if slow is None else slow.flatten().tolist() for slow, *_ in found]
        assert flags == ([[0, 1, 1, 0], [0, 0, 0, 1]] if by_maps else [None, None])

    @pytest.mark.parametrize(
        ("gates", "T", "starts"), [(Draw.gates, 320, (300, 100)), (NEVER, 960, (700, 640, 540, 100))]
    )
    def test_what_comes_later_changes_no_bit(
        self,
        gates: Any,
        T: int,
        starts: tuple[int, ...],
        in_pieces: Callable[[int], None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Nor says it whether pieces of what comes before begin by maps, which round otherwise."""
        in_pieces(T // 160)
        monkeypatch.setattr(token_walks, "FAR", 4)
        inputs = problem(small(T=T, gates=gates))
        d_out, d_final = draws(inputs)
        for start in starts:
            holds_before(start, inputs, d_out, d_final)

    def test_a_map_of_what_has_no_gradient_is_nothing(
        self, in_pieces: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though it would be infinite, of keys that are alike and too long: 0 times it would be no number."""
        in_pieces(4)
        monkeypatch.setattr(token_walks, "FAR", 2)
        inputs = problem(small(T=1920, gates=NEVER, beta=1.9, alike="identical", full=True))
        d_out, d_final = draws(inputs)
        d_out[:, 768:], d_final[:] = 0, 0
        later = {**inputs, "k": inputs["k"].clone()}
        later["k"][:, 768:] *= 1.1
        found, wanted = (whole_walk(given, d_out, d_final) for given in (later, inputs))
        for name in ("q", "k", "v", "beta", "log_decay"):
            assert found[name][:, :768].equal(wanted[name][:, :768]), name

    @pytest.mark.parametrize("rows", [slice(0, 128), slice(0, 64)])
    def test_a_gradient_of_the_final_state_is_behind_all(
        self, rows: slice, in_pieces: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of some of its rows too, and as a view: no chunk is silent then."""
        in_pieces(6)
        monkeypatch.setattr(token_walks, "FAR", 4)
        inputs = problem(small(T=960, K=128, gates=NEVER))
        d_out, d_final = draws(inputs)
        d_out[:, 300:], kept = 0, d_final[:, :, rows].clone()
        d_final = torch.zeros(*d_final.shape[:2], d_final.shape[3], 128).transpose(2, 3)
        d_final[:, :, rows] = kept
        found = whole_walk(inputs, d_out, d_final)
        in_pieces(1)
        wanted = whole_walk(inputs, d_out, d_final)
        for name in ("q", "k", "v", "beta", "log_decay"):
            assert error(found[name], wanted[name].double()) <= BUDGET[torch.bfloat16], name

    def test_reach_bounds_what_is_left_of_a_state(self, in_pieces: Callable[[int], None]) -> None:
        inputs = problem(small(T=330, H=2, gates=Draw.extremes, length=1.5, beta=2.0))
        inputs["beta"][0, 200, 1] = torch.nan
        call = bind(**there(inputs))
        found = gpu._parts(call, gpu.forward(call, True)[2]).reach.cpu()
        g, beta, k = (inputs[name].double() for name in ("log_decay", "beta", "k"))
        grown = (1 - beta * (k * k).sum(3)).abs().clamp(min=1).log2()
        each = g.clamp(min=-104) / torch.tensor(2.0).double().log() + grown
        wanted = torch.stack([x.sum(0) for x in each[0].split(64)])
        assert found[3, 1] == torch.inf and found[3, 0].isfinite()
        wanted[3, 1] = torch.inf
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-3)


BY_MAPS = [
    {"B": 2, "T": 384, "H": 4, "state": True},
    {"B": 2, "T": 330, "state": True},
    {"T": 385, "K": 128, "V": 96, "decay": "", "beta": 2.0, "state": True},
    {"T": 130, "erase": True, "state": True},
    {"T": 300, "gates": Draw.extremes, "H": 2, "G": 1},
    {"T": 100, "decay": "head"},
    {"T": 385, "V": 40, "alike": "correlated", "beta": 2.0, "full": True, "decay": ""},
]


@pytest.fixture
def each_by_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pieces of each sequence, all of which begin by maps; as many as would warm up."""
    monkeypatch.setattr(token_walks, "shares", lambda *_: 3)
    monkeypatch.setattr(token_walks, "suits", lambda *_: False)
    monkeypatch.setattr(maps, "_turned", lambda *_: 3)


@pytest.mark.usefixtures("halves", "each_by_maps")
class TestByMaps:
    @pytest.mark.parametrize("more", BY_MAPS)
    def test_within_the_budget(self, more: dict[str, Any]) -> None:
        with memory.poisoned():
            keeps_the_budget(problem(small() | more))

    def test_what_is_kept_is_the_state_at_each_chunks_start(self) -> None:
        inputs = problem(small(T=330, state=True))
        kept = gpu._parts(bind(**inputs), gpu.forward(bind(**there(inputs)), True)[2].cpu()).states
        for slot in range(6):
            part = {n: x if n == "state" else x[:, : 64 * slot] for n, x in exact(inputs).items()}
            state = delta_rule(**part, return_state=True, backend="chunked")[1] if slot else part["state"]
            assert state is not None and error(kept[slot], state[0]) < BUDGET[torch.bfloat16]

    @pytest.mark.parametrize(("name", "token", "wrong"), WRONG)
    def test_what_is_no_number_is_never_forgotten(
        self, name: str, token: int, wrong: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = problem(small(T=193, gates=NEVER, state=True))
        never_forgotten(inputs, name, token, wrong, partial(monkeypatch.setattr, maps, "_turned", lambda *_: 1))

    def test_what_comes_later_changes_no_bit(self) -> None:
        inputs = problem(small(T=450, gates=NEVER))
        holds_before(300, inputs, *draws(inputs))

    def test_a_map_of_what_nobody_reads_may_be_infinite(self) -> None:
        """Of padding that is too long, without a gradient; and of a state that nothing was written to."""
        inputs = problem(small(T=1920, gates=NEVER, beta=1.9, alike="identical", full=True))
        d_out, d_final = draws(inputs)
        d_out[:, 640:], d_final[:] = 0, 0
        inputs["k"][:, 640:] *= 1.1
        found = whole_walk(inputs, d_out, d_final)
        for name in ("q", "k", "v", "beta", "log_decay"):
            assert found[name][:, :640].isfinite().all(), name
        inputs["v"][:] = 0
        assert not gpu.forward(bind(**there(inputs)))[0].any()

    def test_each_direction_takes_one_launch_more(self) -> None:
        call = bind(**there(problem(small(T=450))))
        with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
            outputs = gpu.forward(call, True)
            gpu.backward(call, outputs, (outputs[0], None), [True] * 5 + [False] * 2)
        names = [launch.kernel.fn.__name__ for launch in launches]
        assert names[:3] == ["token_chunks_kernel", "token_walk_kernel", "token_walk_kernel"]
        assert names[3:5] == ["token_walk_back_kernel"] * 2


def test_sequences_are_cut_where_gates_may_forget_and_processors_idle() -> None:
    target = tune.TARGETS["sm_90"]

    def shares(T: int = 8192, H: int = 32, K: int = 128, gates: int = 1, **more: Any) -> int:
        q, v = (torch.empty(1, T, H, n, dtype=torch.bfloat16, device="meta") for n in (K, 128))
        g = torch.empty(*((1, T) if gates else ()), H, *((gates,) if gates > 1 else ()), device="meta")
        beta = torch.empty(1, T, H, device="meta")
        call = bind(**{"q": q, "k": q, "v": v, "beta": beta, "log_decay": g} | more)
        return token_walks.shares(call, target)

    assert shares() == shares(gates=0) == shares(T=1280) == 2 and shares(H=16) == 4 and shares(H=16, T=1280) == 2
    assert shares(H=64) == shares(T=1279) == shares(offsets=torch.empty(5, dtype=torch.int64, device="meta")) == 1
    erase = torch.empty(1, 8192, 32, 128, dtype=torch.bfloat16, device="meta")
    assert shares(log_decay=None) == shares(gates=128) == shares(erase=erase) == shares(K=96) == shares(K=256) == 1


@pytest.mark.parametrize(
    ("K", "V", "N", "H", "columns"),
    [
        (128, 128, 1, 66, 64), (128, 128, 1, 67, 128), (64, 128, 2, 33, 64), (64, 128, 2, 34, 128), (64, 64, 1, 8, 64),
        (64, 64, 8, 32, 64), (128, 192, 8, 32, 64), (128, 128, 0, 32, 0), (256, 128, 1, 8, 128), (256, 64, 1, 8, 0),
        (64, 96, 1, 8, 0), (96, 128, 1, 8, 0),
    ],
)  # fmt: skip
def test_a_program_of_warps_has_64_columns_as_long_as_each_has_a_processor(
    K: int, V: int, N: int, H: int, columns: int
) -> None:
    target = tune.TARGETS["sm_90"]
    q, v = (torch.empty(1, 512, H, n, dtype=torch.bfloat16, device="meta") for n in (K, V))
    g = torch.empty(1, 512, H, device="meta")
    call = bind(q, q, v, g, log_decay=g, offsets=torch.empty(N + 1, dtype=torch.int64, device="meta"))
    assert token_walks.wide(call, target) == columns
    for other in ("sm_80", "sm_100", "gfx942"):
        assert not token_walks.wide(call, tune.TARGETS[other])
    for odd in ({"log_decay": None}, {"erase": q}, {"v": v.float()}, {"k": q.transpose(1, 3)}):
        assert not token_walks.wide(call._replace(**odd), target)


@pytest.mark.parametrize(("heads", "enough"), [(66, False), (67, True)])
def test_it_walks_where_its_programs_are_enough(heads: int, enough: bool) -> None:
    target = tune.TARGETS["sm_90"]
    call = bind(**there(Delta("", B=1, T=8, H=heads, K=64, V=64, decay="token").case.make(torch.bfloat16, CPU, 0)))
    with tune.record_launches(target) as launches:
        out, final, buffer = gpu.forward(call, True)
        gpu.backward(call, (out, final, buffer), (out, None), [True] * 5 + [False] * 2)
    names = [launch.kernel.fn.__name__ for launch in launches]
    walks = ["token_walk_kernel", "token_walk_back_kernel"] if enough else ["walk_kernel"] * 2
    assert [name for name in names if "walk" in name] == walks


@pytest.mark.parametrize("K", [64, 128, 256])
def test_it_takes_what_tma_reads_and_nothing_else(K: int) -> None:
    target = tune.TARGETS["sm_90"]
    x = torch.empty(1, 8, 2, K, dtype=torch.bfloat16)
    assert token_walks.suits(1000, K, 64, target, x, None)
    assert not token_walks.suits(1000, K, 32, target, x) and not token_walks.suits(1000, K, 100, target, x)
    assert not token_walks.suits(1000, 96, 64, target, x) and not token_walks.suits(1000, K, 64, target, x.float())
    assert not token_walks.suits(1000, K, 64, target, x.transpose(2, 3))
    assert not token_walks.suits(1000, K, 64, tune.TARGETS["sm_100"], x)
    assert token_walks.suits(1, K, 64, target, x) == (K == 256)


def test_stages_are_what_shared_memory_holds() -> None:
    target = tune.TARGETS["sm_90"]
    assert [token_walks.rule(K, tiles, target).stages for K in (64, 128, 256) for tiles in (2, 3)] == [3, 3, 3, 2, 2, 1]
