"""What gates per channel make of each chunk, against ops/gates.py in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.check import memory
from foci.ops.decay.call import Call, bind
from foci.ops.decay.kernels_triton_pairs import CHUNK, Pairs, prepared
from foci.ops.draw import Draw
from foci.ops.gates import Gates
from tests.ops.decay.test_kernels_triton_forward import problem
from tests.ops.in_triton import there
from tests.ops.recurrences import error

BUDGET = {torch.float32: 1e-5, torch.float16: 1e-3}


def found(inputs: dict[str, Any], slots: int) -> tuple[Call, Pairs]:
    call = bind(**there(inputs))
    with memory.poisoned():
        pairs = prepared(call, slots, True)
    assert pairs is not None
    return call, pairs


def truth(call: Call, head: int, first: int, stop: int) -> dict[str, Tensor]:
    """Of one chunk and head: risen, fallen and pairs [tokens, ..], total [K]."""
    assert call.log_decay is not None
    group = head // (call.v.shape[2] // call.q.shape[2])
    g, q, k = (
        torch.nn.functional.pad(x[0, first:stop, h].cpu().double(), (0, 0, 0, CHUNK - stop + first))[None]
        for x, h in ((call.log_decay, head), (call.q, group), (call.k, group))
    )
    gates = Gates(g, call.bonus is None)
    A = gates.pairs(q[:, :, None], k)[0, :, 0]
    if call.bonus is not None:
        A += torch.diag((q * k * call.bonus[head].cpu().double())[0].sum(1))
    rows = slice(0, stop - first)
    return {
        "risen": gates.risen(q)[0, rows],
        "fallen": gates.fallen(k)[0, rows],
        "pairs": A[rows],
        "total": gates.total,
    }


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("bonus", [False, True])
def test_every_chunk_of_documents(dtype: torch.dtype, bonus: bool) -> None:
    more = {"bonus": torch.randn(4, 20, generator=torch.Generator().manual_seed(1))} if bonus else {}
    inputs = problem(150, H=4, K=20, decay="channel", offsets=torch.tensor((0, 70, 70, 150)), **more)
    inputs |= {"q": inputs["q"][:, :, :2].to(dtype), "k": inputs["k"][:, :, :2].to(dtype), "v": inputs["v"].to(dtype)}
    inputs["log_decay"][:, :80] = Draw(torch.float32, torch.device("cpu"), 0).extremes(1, 80, 4, 20)
    call, pairs = found(inputs, 5)
    for first, stop, slot in (0, 64, 0), (64, 70, 1), (70, 134, 3), (134, 150, 4):
        for h in range(4):
            expected = truth(call, h, first, stop)
            got = {name: getattr(pairs, name)[0, first:stop, h].cpu() for name in ("risen", "fallen", "pairs")}
            got["total"] = pairs.totals[slot, h].cpu()[None]
            apart = {name: error(got[name], expected[name]) for name in expected}
            assert max(apart.values()) < BUDGET[dtype], (first, h, apart)


def test_sums_are_there_where_a_backward_in_half_precision_wants_them() -> None:
    inputs = problem(70, decay="channel")
    assert found(inputs, 2)[1].sums is None
    _, pairs = found(inputs | {name: inputs[name].half() for name in "qkv"}, 2)
    assert pairs.sums is not None
    expected = torch.cat([part.cumsum(1) for part in inputs["log_decay"].split(CHUNK, 1)], 1)
    assert error(pairs.sums.cpu(), expected) < 1e-6


def test_gates_of_another_shape_have_none() -> None:
    for decay in ("none", "head", "token"):
        assert prepared(bind(**there(problem(70, decay=decay))), 2, True) is None
