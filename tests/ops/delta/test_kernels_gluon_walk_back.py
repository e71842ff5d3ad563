"""The walk backwards by warps on a GPU, beside Triton's. Without one: test_kernels_gluon_walk_back_threads.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from foci.ops.delta.pieces import Pieces, Way
from foci.ops.draw import Draw
from tests.ops.delta.in_parts import apart, by_warps_or_triton, drawn, played_again
from tests.ops.in_gluon import told

from foci.ops.delta import kernels_gluon_walk_back as by_warps  # isort: skip  after Triton's presence is known

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="Gluon has no interpreter, and this kernel is for Hopper")
SHAPES: list[dict[str, Any]] = [
    {"B": 8, "T": 1024, "H": 8, "K": 64, "V": 64, "state": True},
    {"B": 4, "T": 2048, "H": 16, "K": 64, "V": 64},
    {"B": 2, "T": 1024, "H": 8, "G": 4, "state": True},
    {"B": 4, "T": 2048, "H": 16},
    {"B": 2, "T": 512, "H": 40, "K": 64, "V": 192, "decay": "head"},
    {"B": 2, "T": 512, "H": 32, "V": 256, "fused": True},
    {"B": 8, "T": 512, "H": 8, "K": 64, "V": 64, "alike": "identical", "beta": 2.0},
    {"B": 8, "T": 512, "H": 8, "alike": "correlated", "beta": 2.0, "gates": Draw.extremes},
    {"B": 80, "T": 64, "H": 2, "K": 64, "V": 64, "state": True},
    {"B": 80, "T": 128, "H": 1, "K": 64, "V": 64},
]


def problem(device: str = "cuda", /, **options: Any) -> dict[str, Any]:
    made = Delta("", **{"B": 1, "G": options["H"], "K": 128, "V": 128, "decay": "token"} | options).case
    return made.make(torch.bfloat16, torch.device(device), 0)


gradients = partial(by_warps_or_triton, by_warps)


@on_hopper
@pytest.mark.parametrize("options", SHAPES, ids=told)
def test_it_is_as_near_the_truth_as_triton(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(**options)
    d_out, d_final = drawn(inputs)
    found, beside = (gradients(inputs, (d_out, d_final), monkeypatch, warps) for warps in (True, False))
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
    leaves = {name: wide[name].requires_grad_() for name in found}
    out, final = delta_rule(**wide | leaves, return_state=True, backend="chunked")
    outputs, given = [out], [d_out.double()]
    if d_final is not None:
        outputs, given = [out, final], [*given, d_final.double()]
    truth = torch.autograd.grad(outputs, list(leaves.values()), given)
    for name, wanted in zip(found, truth, strict=True):
        x, y = found[name].view(wanted.shape), beside[name].view(wanted.shape)
        assert x.isfinite().all()
        assert apart(x, wanted) <= max(4.5e-3, 1.05 * apart(y, wanted)), name
        assert apart(x, y) <= 1e-3, name


@on_hopper
@pytest.mark.parametrize("K", [64, 128])
def test_it_is_the_same_again(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that is read before it is there, or after it has left, would give other bits now and then."""
    inputs = problem(B=8, T=2048, H=16, G=8, K=K, V=K, state=True)
    grads = drawn(inputs)
    wanted = gradients(inputs, grads, monkeypatch, True)
    for _ in range(20):
        for name, x in gradients(inputs, grads, monkeypatch, True).items():
            assert x.equal(wanted[name]), name


@on_hopper
def test_it_is_played_again_and_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, run = [], by_warps.backward
    monkeypatch.setattr(by_warps, "backward", lambda *given: ran.append(1) or run(*given))
    played_again(problem(B=8, T=512, H=8, K=64, V=64))
    assert ran


WHOLE = Way(True, 1, False, Pieces(0, 1, 0, None, None))


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, True),
        ({"K": 64, "V": 192}, True),
        ({"decay": "head"}, True),
        ({"fused": True}, True),
        ({"K": 256, "V": 256}, False),
        ({"V": 96}, False),
        ({"decay": None}, False),
        ({"decay": "channel"}, False),
        ({"erase": True}, False),
        ({"T": 250}, False),
        ({"offsets": (0, 64, 256)}, False),
    ],
    ids=str,
)
def test_which_calls_it_takes(options: dict[str, Any], taken: bool) -> None:
    """Which needs no GPU to be told."""
    call = bind(**problem("cpu", **{"T": 256, "H": 2} | options))
    assert by_warps.takes(call, call.v, WHOLE) == taken


@pytest.mark.parametrize(
    ("by", "most"),
    [
        (WHOLE, 1 << 10),
        (WHOLE._replace(turned=False), 1 << 10),
        (WHOLE._replace(pieces=2), 48),
        (WHOLE._replace(pieces=2, maps=True), 16),
        (WHOLE._replace(pieces=3), 16),
        (WHOLE._replace(turned=False, pieces=3), 1 << 10),  # of which nobody asks where states are not turned
        (WHOLE._replace(turned=False, cut=Pieces(512, 2, 2, None, None)), 16),
    ],
)
def test_few_chunks_are_not_cut(by: Way, most: int) -> None:
    for chunks, taken in ((most, True), (most + 1, most == 1 << 10)):
        x = torch.empty(1, 64 * chunks, 2, 64, dtype=torch.bfloat16, device="meta")
        call = bind(x, x, x, x[..., 0], log_decay=x[..., 0])
        assert by_warps.takes(call, x, by) == taken


def test_a_gradient_that_is_no_matrix_of_all_heads_is_left_to_triton() -> None:
    call = bind(**problem("cpu", B=2, T=256, H=2))
    assert by_warps.takes(call, call.v, WHOLE)
    assert not by_warps.takes(call, call.v.transpose(1, 2).contiguous().transpose(1, 2), WHOLE)


def test_a_launch_has_one_program_for_64_columns_of_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a backward on Hopper is this one, the last products and gates' sums: three launches."""
    x = torch.empty(8, 1024, 8, 64, dtype=torch.bfloat16, device="meta")
    call = bind(x, x, x, x[..., 0], log_decay=x[..., 0].float())
    monkeypatch.setattr(gpu, "with_gluon", lambda: True)  # where nothing runs, by Triton's interpreter too
    with tune.record_launches(tune.TARGETS["sm_90"]) as seen:
        outputs = gpu.forward(call, True)
        before = len(seen)
        gpu.backward(call, outputs, (x, None), [True] * 5 + [False] * 2)
    names = [launch.kernel.fn.__name__ for launch in seen[before:]]
    assert names == ["wide_walk_back_kernel", "side_and_pairs_kernel", "gates_kernel"]
    assert seen[before].grid == (64,)
