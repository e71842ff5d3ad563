"""The backward's last products by warps on a GPU, beside Triton's and the equation.

Without a GPU: test_kernels_gluon_backward_threads.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from foci.core import tune
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from foci.ops.draw import Draw
from tests.ops.delta.in_parts import apart, by_warps_or_triton, drawn, played_again
from tests.ops.in_gluon import told

from foci.ops.delta import kernels_gluon_backward as by_warps  # isort: skip  after Triton's presence is known

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="Gluon has no interpreter, and this kernel is for Hopper")
SHAPES: list[dict[str, Any]] = [
    {"B": 2, "T": 2048, "H": 16, "state": True},
    {"T": 1024, "H": 4},
    {"T": 4096, "H": 32, "G": 16},
    {"B": 3, "T": 1111, "H": 12, "G": 3, "state": True},
    {"T": 2048, "H": 16, "G": 2},
    {"B": 2, "T": 1000, "H": 8, "decay": "head"},
    {"T": 2048, "H": 8, "fused": True},
    {"T": 2048, "H": 8, "gates": lambda draw, *shape: draw.gates(*shape) / 100, "alike": "correlated", "beta": 2.0},
    {"T": 2048, "H": 8, "gates": lambda draw, *shape: 30 * draw.gates(*shape)},
    {"T": 1500, "H": 8, "gates": Draw.extremes, "alike": "identical"},
    {"T": 9000, "H": 16, "offsets": (0, 0, 1, 6000, 6064, 9000, 9000), "state": True},
    {"T": 4096, "H": 8, "G": 4, "offsets": (0, *range(100, 4096, 300), 4096)},
    {"T": 2100, "H": 8, "G": 4, "offsets": (0, 2100)},
    {"T": 64, "H": 1},
    {"T": 1, "H": 200, "state": True},
    {"B": 4, "T": 1024, "H": 8, "K": 64, "V": 64, "state": True},
    {"B": 3, "T": 1111, "H": 12, "G": 3, "K": 64, "V": 64},
    {"T": 9000, "H": 16, "K": 64, "V": 64, "offsets": (0, 0, 1, 6000, 6064, 9000, 9000), "state": True},
    {"T": 2048, "H": 8, "K": 64, "V": 64, "gates": Draw.extremes, "alike": "correlated", "beta": 2.0},
]


def problem(device: str = "cuda", /, **options: Any) -> dict[str, Any]:
    made = Delta("", **{"B": 1, "G": options["H"], "K": 128, "V": 128, "decay": "token"} | options).case
    return made.make(torch.bfloat16, torch.device(device), 0)


gradients = partial(by_warps_or_triton, by_warps)


@on_hopper
@pytest.mark.parametrize("options", SHAPES, ids=told)
def test_the_budget_holds(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(**options)
    d_out, _ = drawn(inputs)
    found, beside = (gradients(inputs, (d_out, None), monkeypatch, warps) for warps in (True, False))
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
    leaves = {name: wide[name].requires_grad_() for name in found}
    out, _ = delta_rule(**wide | leaves, return_state=False, backend="chunked")
    truth = torch.autograd.grad(out, list(leaves.values()), d_out.double())
    for name, wanted in zip(found, truth, strict=True):
        x, y = found[name].view(wanted.shape), beside[name].view(wanted.shape)
        assert x.isfinite().all()
        assert apart(x, wanted) <= max(4.5e-3, 1.05 * apart(y, wanted)), name


@on_hopper
@pytest.mark.parametrize("K", [64, 128])
def test_it_is_the_same_again(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that is read before it is there, or after it has left, would give other bits now and then."""
    inputs = problem(B=2, T=4096, H=32, G=16, K=K, V=K)
    d_out, _ = drawn(inputs)
    wanted = gradients(inputs, (d_out, None), monkeypatch, True)
    for _ in range(20):
        for name, x in gradients(inputs, (d_out, None), monkeypatch, True).items():
            assert x.equal(wanted[name]), name


@on_hopper
@pytest.mark.parametrize("options", [{"T": 700, "B": 2}, {"T": 1400, "offsets": (0, 130, 700, 1400)}], ids=str)
@pytest.mark.parametrize("heads", [4, 8])
def test_no_number_of_one_sequence_is_seen_by_another(
    options: dict[str, Any], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a tile of its last tokens holds the first ones of what lies behind it."""
    inputs = problem(H=heads, G=4, **options)
    d_out, _ = drawn(inputs)
    wanted = gradients(inputs, (d_out, None), monkeypatch, True)
    own = (slice(0, 1), slice(0, 700)) if "B" in options else (slice(0, 1), slice(0, 130))
    spoilt = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    d_out = d_out.clone()
    for x in (*(spoilt[name] for name in ("q", "k", "v")), d_out):
        kept = x[own].clone()
        x.fill_(torch.nan)
        x[own] = kept
    for name, x in gradients(spoilt, (d_out, None), monkeypatch, True).items():
        assert x[own].equal(wanted[name][own]), name


@on_hopper
def test_it_is_played_again_and_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, run = [], by_warps.side_and_pairs
    monkeypatch.setattr(by_warps, "side_and_pairs", lambda *given: ran.append(1) or run(*given))
    played_again(problem(T=2048, H=16))
    assert ran


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, True),
        ({"T": 1000, "B": 2}, True),
        ({"H": 8, "G": 2}, True),
        ({"decay": "head"}, True),
        ({"fused": True}, True),
        ({"K": 64, "V": 64}, True),
        ({"K": 96, "V": 96}, False),
        ({"K": 64}, False),
        ({"V": 256}, False),
        ({"decay": None}, False),
        ({"erase": True}, False),
        ({"T": 512, "offsets": (0, 64, 512)}, True),
        ({"T": 511, "offsets": (0, 64, 511)}, False),
    ],
    ids=str,
)
def test_which_calls_it_takes(options: dict[str, Any], taken: bool) -> None:
    """Which needs no GPU to be told."""
    call = bind(**problem("cpu", **{"T": 256, "H": 2} | options))
    assert by_warps.takes(*asked(call, "sm_90")) == taken
    assert not by_warps.takes(*asked(call, "sm_100"))


@pytest.mark.parametrize("name", ["q", "k", "v", "d_out"])
def test_what_is_not_one_matrix_of_all_heads_is_left_to_triton(name: str) -> None:
    call = bind(**problem("cpu", B=2, T=256, H=2))
    given, d_out, dv = asked(call, "sm_90")
    heads_first = d_out.transpose(1, 2).contiguous().transpose(1, 2)
    if name == "d_out":
        d_out = heads_first
    else:
        given.call = call._replace(**{name: heads_first})
    assert not by_warps.takes(given, d_out, dv)


@pytest.mark.parametrize("missing", [0, 1])
def test_gradients_that_nobody_wants_are_left_to_triton(missing: int) -> None:
    given, d_out, dv = asked(bind(**problem("cpu", T=256, H=2)), "sm_90")
    given.found[missing] = None
    assert not by_warps.takes(given, d_out, dv)


def test_what_tma_cannot_read_or_count_is_left_to_triton() -> None:
    given, d_out, dv = asked(bind(**problem("cpu", T=256, H=2)), "sm_90")
    assert by_warps.takes(given, d_out, dv) and not by_warps.takes(given, d_out, dv[0])
    assert not by_warps.takes(given, d_out[:1, :1, :1, :1].expand(d_out.shape), dv)
    given.chunks = 1 << 23  # times 2 heads of 128 channels
    assert not by_warps.takes(given, d_out, dv)


@pytest.mark.parametrize(("T", "fused", "taken"), [(16320, False, True), (16384, False, False), (8192, True, False)])
def test_no_map_is_of_more_bytes_than_a_launch_may_tell(
    T: int, fused: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What d left is as much again as d; and q, k and v of one projection have each others' columns between."""
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    B, H, K = (12, 32, 128) if fused else (16, 32, 64)
    q, k, v = torch.empty(B, T, 3, H, K, dtype=torch.bfloat16, device="meta").unbind(2)
    if not fused:
        q, k, v = (torch.empty_like(v, memory_format=torch.contiguous_format) for _ in range(3))
    g = torch.empty(B, T, H, device="meta")
    given, d_out, dv = asked(bind(q, k, v, g, log_decay=g), "sm_90")
    given.chunks = B * T // 64
    assert by_warps.takes(given, d_out, dv) == taken


def asked(call: Any, target: str) -> tuple[Any, Tensor, tuple[Tensor, Tensor]]:
    """What a backward asks about its call."""
    found = [call.q, call.k, call.v, call.beta, call.log_decay, None, None]
    given = type("Problem", (), {})()
    given.call, given.found, given.g, given.chunks = call, found, call.log_decay, 8
    given.target = tune.TARGETS[target]
    return given, torch.empty_like(call.v), (call.v, call.v)
