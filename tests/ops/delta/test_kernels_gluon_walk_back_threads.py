"""The walk backwards by warps as threads on a CPU (tests/ops/in_gluon.py), behind a forward by the interpreter."""

from __future__ import annotations

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
from tests.ops.delta.in_parts import drawn
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_gluon import Gluon, told
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, error, exact

from foci.ops.delta import kernels_gluon_backward as last_products  # isort: skip  after Triton's presence is known
from foci.ops.delta import kernels_gluon_walk_back as by_warps  # isort: skip
from foci.ops.delta import kernels_triton_token_walks as token_walks  # isort: skip

pytestmark = [
    pytest.mark.usefixtures("halves"),
    pytest.mark.skipif(
        not tune.interpreting(), reason="on a GPU test_kernels_gluon_walk_back.py asks the kernel itself"
    ),
]
INPUTS = ("q", "k", "v", "beta", "log_decay", "erase", "state")
OPTIONS: list[dict[str, Any]] = [
    {"B": 2, "T": 256, "state": True},
    {"B": 2, "T": 320, "K": 64, "V": 64, "state": True},
    {"T": 192, "H": 4, "G": 2, "K": 64, "V": 128},
    {"T": 128, "V": 192, "decay": "head"},
    {"T": 192, "H": 1, "fused": True},
    {"T": 64, "K": 64, "V": 64, "gates": Draw.extremes},
]


def problem(options: dict[str, Any]) -> dict[str, Any]:
    made = Delta("", **{"B": 1, "G": 1, "H": 2, "K": 128, "V": 128, "decay": "token"} | options).case
    return made.make(torch.bfloat16, torch.device("cpu"), 0)


def gradients(
    inputs: dict[str, Any], grads: tuple[Tensor, Tensor | None], monkeypatch: pytest.MonkeyPatch, warps: bool = True,
    ahead: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Of all inputs, whose walk is by warps or by Triton; `ahead`: the first program before the last."""
    ran = []

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, config: Any, **meta: Any) -> None:
        ran.append(kernel)
        Gluon(by_warps.gl, ahead).run(by_warps, kernel, grid, arguments, **meta)

    call = bind(**there(inputs))
    with monkeypatch.context() as patch:
        outputs = gpu.forward(call, True)
        patch.setattr(last_products, "takes", lambda *_: False)
        patch.setattr(token_walks, "fits", lambda *_: True)
        patch.setattr(token_walks, "suits", lambda *_: True)
        if warps:
            patch.setattr(gpu, "with_gluon", lambda: True)
            patch.setattr(by_warps, "launch", launch)
        needs = [getattr(call, name) is not None for name in INPUTS]
        found = gpu.backward(call, outputs, grads, needs)
    assert len(ran) == warps
    return {name: x.cpu() for name, x in zip(INPUTS, found, strict=True) if x is not None}


@pytest.mark.parametrize("alike", ["independent", "correlated", "identical"])
@pytest.mark.parametrize("options", OPTIONS, ids=told)
def test_the_budget_holds(options: dict[str, Any], alike: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what Triton's walk is off by, which misses it by constant gates whose terms cancel; and it is near that."""
    inputs = problem(options | {"alike": alike, "beta": 2.0 if alike == "identical" else 1.0})
    grads = drawn(inputs)
    found, beside = (gradients(inputs, grads, monkeypatch, warps) for warps in (True, False))
    wide = {
        n: x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in exact(inputs).items()
    }
    out, final = delta_rule(**wide, return_state=True, backend="chunked")
    outputs, given = ([out], [grads[0].double()])
    if grads[1] is not None:
        outputs, given = [out, final], [*given, grads[1].double()]
    truth = torch.autograd.grad(outputs, [wide[name] for name in found], given)
    for name, wanted in zip(found, truth, strict=True):
        x, y = (each[name].view(wanted.shape) for each in (found, beside))
        assert error(x, wanted) <= max(BUDGET[torch.bfloat16], 1.1 * error(y, wanted)), name
        assert error(x, y) <= 3e-4, name  # of products without what roundings left it is more


@pytest.mark.parametrize("options", OPTIONS[:2], ids=told)
def test_no_program_writes_where_another_one_does(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(options)
    grads = drawn(inputs)
    found, wanted = (gradients(inputs, grads, monkeypatch, ahead=ahead) for ahead in (True, False))
    assert all(x.equal(wanted[name]) for name, x in found.items())


@pytest.mark.parametrize("expanded", [False, True])
def test_a_states_gradient_may_lie_in_any_way(expanded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one number for all, of a sum, or one for each of all, by channels or by values."""
    inputs = problem(OPTIONS[1])
    d_out, last = drawn(inputs)
    assert last is not None and not last.is_contiguous()
    given = last[:1, :1, :1, :1].expand(last.shape) if expanded else last
    wanted = gradients(inputs, (d_out, given.contiguous()), monkeypatch)
    for name, x in gradients(inputs, (d_out, given), monkeypatch).items():
        assert x.equal(wanted[name]), name


@pytest.mark.parametrize("K", [64, 128])  # by three and by two chunks in shared memory
def test_a_chunk_has_the_same_bits_in_every_place(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a chunk that nothing is read of, so that each is where the other one was."""
    inputs = problem({"T": 256, "H": 1, "K": K, "V": K})
    d_out, _ = drawn(inputs)
    later = {name: torch.cat([x, torch.zeros_like(x[:, :64])], 1) for name, x in inputs.items()}
    found = gradients(later, (torch.cat([d_out, torch.zeros_like(d_out[:, :64])], 1), None), monkeypatch)
    for name, x in gradients(inputs, (d_out, None), monkeypatch).items():
        assert found[name][:, :256].equal(x), name
