"""The backward's last products as threads on a CPU (tests/ops/in_gluon.py), behind walks by the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from foci.ops.draw import Draw
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_gluon import Gluon
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, error, exact

from foci.ops.delta import kernels_gluon_backward as by_warps  # isort: skip  after Triton's presence is known
from foci.ops.delta import kernels_gluon_walk_back as walk_back  # isort: skip

pytestmark = [
    pytest.mark.usefixtures("halves"),
    pytest.mark.skipif(
        not tune.interpreting(), reason="on a GPU test_kernels_gluon_backward.py asks the kernel itself"
    ),
]
INPUTS = ("q", "k", "v", "beta", "log_decay", "erase", "state")


def problem(options: dict[str, Any]) -> dict[str, Any]:
    made = Delta("", **{"B": 1, "G": 1, "H": 2, "K": 128, "V": 128, "decay": "token"} | options).case
    return made.make(torch.bfloat16, torch.device("cpu"), 0)


def gradients(
    inputs: dict[str, Any], d_out: Tensor, monkeypatch: pytest.MonkeyPatch, programs: int, ahead: bool = False
) -> Sequence[Any]:
    """By `programs` of them, or by Triton without any; `ahead`: what was asked for last comes first."""
    ran: list[int] = []

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, config: Any, **meta: Any) -> None:
        gluon = Gluon(by_warps.gl, ahead)
        gluon.run(by_warps, kernel, (min(programs, *grid),), arguments, **meta)
        ran.append(gluon.parts)

    call = bind(**there(inputs))
    with monkeypatch.context() as patch:
        outputs = gpu.forward(call, True)
        if programs:
            patch.setattr(gpu, "with_gluon", lambda: True)
            patch.setattr(by_warps, "launch", launch)
            patch.setattr(by_warps, "takes", lambda *_: True)
            patch.setattr(walk_back, "takes", lambda *_: False)
        needs = [getattr(call, name) is not None for name in INPUTS]
        found = gpu.backward(call, outputs, (d_out, None), needs)
    apart = call.q.shape[2] == call.v.shape[2] and call.v.shape[3] == 64  # P_A and P_E
    assert ran == ([5 if apart else 4] if programs else [])
    return [None if x is None else x.cpu() for x in found]


@pytest.mark.parametrize("options", [{"T": 70, "B": 2}, {"T": 140, "offsets": (0, 70, 140)}], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(1, 128), (2, 128), (1, 64)])
def test_no_number_of_one_sequence_is_seen_by_another(
    options: dict[str, Any], heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a tile of its last tokens holds the first ones of what lies behind it."""
    inputs = problem({"H": heads, "K": width, "V": width} | options)
    d_out = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted, own = gradients(inputs, d_out, monkeypatch, 2), (slice(0, 1), slice(0, 70))
    for x in (inputs["q"], inputs["k"], inputs["v"], d_out):
        kept = x[own].clone()
        x.fill_(torch.nan)
        x[own] = kept
    for found, known in zip(gradients(inputs, d_out, monkeypatch, 2), wanted, strict=True):
        assert known is None or found[own].equal(known[own])


@pytest.mark.parametrize("options", [{"H": 2, "G": 2, "K": 64, "V": 64}, {"H": 2}], ids=str)
def test_no_tile_is_read_before_it_is_there(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what was asked for last comes first."""
    inputs = problem({"T": 192} | options)
    d_out = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = gradients(inputs, d_out, monkeypatch, 2)
    for found, known in zip(gradients(inputs, d_out, monkeypatch, 2, ahead=True), wanted, strict=True):
        assert known is None or found.equal(known)


@pytest.mark.parametrize("alike", ["independent", "correlated", "identical"])
@pytest.mark.parametrize(
    "options",
    [
        {"B": 2, "T": 192, "state": True},
        {"B": 2, "T": 201, "H": 3, "G": 3},
        {"T": 130, "decay": "head"},
        {"T": 130, "gates": Draw.extremes, "beta": 2.0},
        {"T": 330, "offsets": (0, 0, 1, 130, 193, 330), "state": True},
        {"T": 100, "offsets": (0, 100), "H": 3, "G": 3},
        {"B": 2, "T": 192, "K": 64, "V": 64, "state": True},
        {"T": 201, "K": 64, "V": 64, "H": 3, "G": 3},
        {"T": 330, "K": 64, "V": 64, "offsets": (0, 0, 1, 130, 193, 330)},
        {"B": 2, "T": 192, "K": 64, "V": 64, "G": 2},
        {"T": 330, "K": 64, "V": 64, "G": 2, "offsets": (0, 0, 1, 130, 193, 330)},
    ],
    ids=str,
)
def test_the_budget_holds(options: dict[str, Any], alike: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what Triton's two kernels are off by, which miss it by constant gates whose terms cancel."""
    inputs = problem(options | {"alike": alike})
    d_out = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = gradients(inputs, d_out, monkeypatch, 2)
    beside = gradients(inputs, d_out, monkeypatch, 0)
    wide = {
        n: x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in exact(inputs).items()
    }
    out, _ = delta_rule(**wide, return_state=False, backend="chunked")
    names = [name for name, x in zip(INPUTS, found, strict=True) if x is not None]
    truths = dict(zip(names, torch.autograd.grad(out, [wide[n] for n in names], d_out.double()), strict=True))
    for name, x, y in zip(INPUTS, found, beside, strict=True):
        if x is not None:
            truth = truths[name]
            x, y = x.view(truth.shape), y.view(truth.shape)
            assert error(x, truth) <= max(BUDGET[torch.bfloat16], 1.1 * error(y, truth)), name
