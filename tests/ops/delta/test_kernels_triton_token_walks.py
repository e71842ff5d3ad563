"""The walk with its state turned over, both ways, where it takes the place of the other: bfloat16 on Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from tests.ops.delta.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.delta.test_kernels_triton_backward import CPU
from tests.ops.delta.test_kernels_triton_backward import apart as apart_backward
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, error, exact

from foci.ops.delta import kernels_triton_token_walks as token_walks  # isort: skip  after Triton's presence is known

MORE = [
    {"B": 2, "T": 150, "V": 128, "state": True},
    {"T": 150, "erase": True, "offsets": (0, 3, 3, 140, 150), "state": True},
    {"T": 70, "K": 128, "V": 96, "decay": "", "beta": 2.0},
    {"T": 129, "V": 40, "alike": "correlated", "beta": 2.0, "full": True, "decay": ""},
    {"T": 129, "alike": "identical", "beta": 1.9, "full": True, "decay": ""},
    {"B": 2, "T": 66, "decay": "head"},
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

    @pytest.mark.parametrize("more", MORE)
    def test_backward(self, more: dict[str, Any]) -> None:
        errors = apart_backward(problem(more))
        assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors


@pytest.mark.parametrize(("heads", "enough"), [(66, False), (67, True)])
def test_it_walks_where_its_programs_are_enough(heads: int, enough: bool) -> None:
    target = tune.TARGETS["sm_90"]
    call = bind(**there(Delta("", B=1, T=8, H=heads, K=64, V=64, decay="token").case.make(torch.bfloat16, CPU, 0)))
    with tune.recording(target) as launches:
        out, final, buffer = gpu.forward(call, True)
        gpu.backward(call, (out, final, buffer), (out, None), [True] * 5 + [False] * 2)
    names = [launch.kernel.fn.__name__ for launch in launches]
    walks = ["token_walk_kernel", "token_walk_back_kernel"] if enough else ["walk_kernel"] * 2
    assert [name for name in names if "walk" in name] == walks


@pytest.mark.parametrize("K", [64, 128])
def test_it_takes_what_tma_reads_and_nothing_else(K: int) -> None:
    target = tune.TARGETS["sm_90"]
    x = torch.empty(1, 8, 2, K, dtype=torch.bfloat16)
    assert token_walks.suits(1000, K, 64, target, x, None)
    assert not token_walks.suits(1000, K, 32, target, x) and not token_walks.suits(1000, K, 100, target, x)
    assert not token_walks.suits(1000, 96, 64, target, x) and not token_walks.suits(1000, K, 64, target, x.float())
    assert not token_walks.suits(1000, K, 64, target, x.transpose(2, 3))
    assert not token_walks.suits(1000, K, 64, tune.TARGETS["sm_100"], x)


def test_stages_are_what_shared_memory_holds() -> None:
    target = tune.TARGETS["sm_90"]
    assert [token_walks.rule(K, tiles, target).stages for K in (64, 128) for tiles in (2, 3)] == [3, 3, 3, 2]
