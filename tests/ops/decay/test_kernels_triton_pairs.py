"""What gates per channel make of each chunk, against ops/gates.py in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.check import memory
from foci.core import tune
from foci.ops.decay.call import Call, bind
from foci.ops.decay.kernels_triton_pairs import CHUNK, WIDTHS, Pairs, prepared
from foci.ops.draw import Draw
from foci.ops.gates import Gates
from foci.ops.kernels_triton_packed import Rest
from tests.ops.decay.test_kernels_triton_forward import problem
from tests.ops.in_triton import there
from tests.ops.recurrences import error

BUDGET = {torch.float32: 1e-5, torch.float16: 1e-3}


def found(inputs: dict[str, Any], slots: int, summed: bool = True) -> tuple[Call, Pairs]:
    call = bind(**there(inputs))
    with memory.poisoned():
        pairs = prepared(call, slots, summed, Rest(call, []))
    assert pairs is not None
    return call, pairs


def test_flags_of_who_walks_next_are_cleared_also_where_no_document_is() -> None:
    """Half as many stretches as slots, of as many blocks as there may be; nothing behind them is touched."""
    call = bind(**there(documents(torch.float32, False)))
    buffer = torch.full((5 * 4 * 8 + 1,), 7, dtype=torch.int32, device=call.v.device)
    flags = buffer[:-1].view(5, 4, 8)
    assert prepared(call, 5, False, Rest(call, []), flags) is not None
    assert not flags.any() and buffer[-1] == 7


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


def documents(dtype: torch.dtype, bonus: bool, H: int = 4, K: int = 20, extreme: int = 80) -> dict[str, Any]:
    """Three, one of them empty; gates of every size in the first tokens."""
    more = {"bonus": torch.randn(H, K, generator=torch.Generator().manual_seed(1))} if bonus else {}
    inputs = problem(150, H=H, K=K, decay="channel", offsets=torch.tensor((0, 70, 70, 150)), **more)
    inputs |= {name: inputs[name][:, :, : H // 2].to(dtype) for name in ("q", "k")} | {"v": inputs["v"].to(dtype)}
    inputs["log_decay"][:, :extreme] = Draw(torch.float32, torch.device("cpu"), 0).extremes(1, extreme, H, K)
    return inputs


def held(call: Call, pairs: Pairs) -> None:
    for first, stop, slot in (0, 64, 0), (64, 70, 1), (70, 134, 3), (134, 150, 4):
        for h in range(call.v.shape[2]):
            expected = truth(call, h, first, stop)
            got = {name: getattr(pairs, name)[0, first:stop, h].cpu() for name in ("risen", "fallen", "pairs")}
            got["total"] = pairs.totals[slot, h].cpu()[None]
            apart = {name: error(got[name], expected[name]) for name in expected}
            assert max(apart.values()) < BUDGET[call.v.dtype], (first, h, apart)


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("bonus", [False, True])
def test_every_chunk_of_documents(dtype: torch.dtype, bonus: bool) -> None:
    held(*found(documents(dtype, bonus), 5))


@pytest.mark.parametrize("dtype, summed", [(torch.float32, False), (torch.float16, False), (torch.float16, True)])
@pytest.mark.parametrize("size", WIDTHS["BLOCK_K"])
def test_every_size_that_may_be_tuned_is_right_of_128_channels(size: int, dtype: torch.dtype, summed: bool) -> None:
    # Of 128 channels ten such gates more leave one total of 1e-30, which has no digits to hold, whatever the block.
    inputs = documents(dtype, False, H=2, K=128, extreme=70)
    key = "linear_pairs", f"{dtype},128,{summed}"
    with tune.override_configs({key: tune.Config({"BLOCK_K": size}, warps=8, stages=1)}) as asked:
        call, pairs = found(inputs, 5, summed)
    assert list(asked) == [key] and asked[key].vary == WIDTHS
    held(call, pairs)
    if pairs.sums is not None:
        assert error(pairs.sums[:, 70:134].cpu(), inputs["log_decay"][:, 70:134].cumsum(1)) < 1e-6


def test_sums_are_there_where_a_backward_in_half_precision_wants_them() -> None:
    inputs = problem(70, decay="channel")
    assert found(inputs, 2)[1].sums is None
    _, pairs = found(inputs | {name: inputs[name].half() for name in "qkv"}, 2)
    assert pairs.sums is not None
    expected = torch.cat([part.cumsum(1) for part in inputs["log_decay"].split(CHUNK, 1)], 1)
    assert error(pairs.sums.cpu(), expected) < 1e-6


def test_gates_of_another_shape_have_none() -> None:
    for decay in ("none", "head", "token"):
        assert prepared(bind(**there(problem(70, decay=decay))), 2, True, None) is None
