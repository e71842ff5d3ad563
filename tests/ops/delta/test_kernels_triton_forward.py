"""The delta rule's forward in Triton: every case of the Spec, and what it must hold beyond them; both ways for some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.check.memory import poisoned, strided
from foci.core import tune
from foci.core.tune import interpreting
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import Call, bind
from foci.ops.delta.cases import PROBLEMS, Delta
from foci.ops.delta.spec import SPEC
from foci.ops.draw import Draw
from tests.ops.delta.in_pieces import in_pieces  # noqa: F401  a fixture
from tests.ops.in_triton import DTYPES, InTriton, there
from tests.ops.recurrences import BUDGET, error, exact, inputs_of

from foci.ops.delta import kernels_triton_forward as kernels  # isort: skip  after Triton's presence is known

CPU = torch.device("cpu")


# The interpreter takes seconds for a case. It runs each here without gradients, in test_kernels_triton_backward.py with
# nothing else, and these both ways through the operator. A GPU runs all.
BOTH_WAYS = (
    "one chunk",
    "no whole chunks, per channel",
    "identical keys, beta of 2",
    "packed, per head",
    "erase without decay",
)


class TestInTriton(InTriton):
    spec, function, module = SPEC, staticmethod(delta_rule), gpu
    if interpreting():
        spec = replace(SPEC, cases=tuple(case for case in SPEC.cases if case.name in BOTH_WAYS))


def forward(inputs: dict[str, Any], keep: bool = False) -> tuple[Tensor, ...]:
    return tuple(x.cpu() for x in gpu.forward(bind(**there(inputs)), keep))


def apart(inputs: dict[str, Any], dtype: torch.dtype) -> None:
    truth = delta_rule(**exact(inputs), return_state=True, backend="chunked")
    for found, wanted in zip(forward(inputs), truth, strict=True):
        assert found.isfinite().all() and error(found, wanted) <= BUDGET[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case_without_gradients(dtype: torch.dtype) -> None:
    for case in SPEC.cases:
        apart(case.make(dtype, CPU, 0), dtype)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 129])
def test_any_length_and_widths_that_are_no_power_of_two(T: int) -> None:
    decay = ("", "token", "channel")[T % 3]
    problem = Delta("", B=1, T=T, H=2, G=1, K=20, V=12, decay=decay, state=True, erase=T % 2 == 0)
    apart(problem.case.make(torch.float32, CPU, T), torch.float32)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_heads_wider_than_a_block(decay: str) -> None:
    problem = Delta("", B=1, T=33, H=1, K=130, V=130, decay=decay, beta=2.0)
    apart(problem.case.make(torch.float32, CPU, 0), torch.float32)


def test_identical_keys_and_extreme_gates_for_longer() -> None:
    problem = Delta(
        "", B=1, T=200, H=1, K=8, alike="identical", beta=2.0, full=True, decay="token", gates=Draw.extremes
    )
    apart(problem.case.make(torch.float16, CPU, 0), torch.float16)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_documents_without_tokens_and_offsets_of_any_kind(decay: str) -> None:
    problem = Delta("", B=1, T=83, H=1, K=8, decay=decay, offsets=(0, 0, 1, 1, 70, 83, 83), state=True)
    inputs = problem.case.make(torch.float32, CPU, 0)
    apart(inputs, torch.float32)
    spread = torch.stack([inputs["offsets"].int()] * 2, 1)[:, 0]
    assert not spread.is_contiguous()
    for one, other in zip(forward(inputs), forward(inputs | {"offsets": spread}), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("name", ["extreme gates per channel", "identical keys, beta of 2"])
def test_what_comes_later_changes_no_bit(name: str) -> None:
    case = next(case for case in SPEC.cases if case.name == name)
    inputs = inputs_of(SPEC, name, torch.float32)
    assert SPEC.probes.future is not None
    future = SPEC.probes.future(case, inputs)
    assert future is not None and isinstance(future.place, dict)
    place = future.place["out"]
    assert forward(inputs)[0][place].equal(forward(future.inputs)[0][place])


SMALL = (
    Delta("token", B=1, T=67, H=1, K=8, V=5, decay="token", state=True, erase=True),
    Delta("channel", B=1, T=20, H=1, K=7, V=5, decay="channel", state=True, offsets=(0, 3, 3, 20)),
)


@pytest.mark.parametrize("problem", SMALL, ids=lambda problem: problem.name)
def test_unwritten_memory_and_strides_do_not_matter_and_all_that_is_kept_is_written(problem: Delta) -> None:
    inputs = problem.case.make(torch.float16, CPU, 0)
    call: Call = bind(**there(strided(inputs)))
    with poisoned():
        *outputs, buffer = gpu.forward(call, True)
    assert all(one.equal(other) for one, other in zip(forward(inputs), outputs, strict=True))
    declared = gpu.kept(call)
    assert (tuple(buffer.shape), buffer.dtype) == (declared.shape, declared.dtype)
    parts = gpu._parts(call, buffer)
    assert all(part.isfinite().all() for part in (parts.errors, parts.inverse, parts.products))
    slots = parts.states.isfinite().flatten(1)
    assert slots.any() and (slots.all(1) | ~slots.any(1)).all()  # a slot is whole, or no chunk's


@pytest.mark.parametrize("keep", [False, True])
def test_two_launches_and_one_for_documents(keep: bool) -> None:
    for name, rest in (("plain", []), ("everything", ["rest_kernel"])):
        call = bind(**there(inputs_of(SPEC, name, torch.float32)))
        with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
            gpu.forward(call, keep)
        assert [launch.kernel.fn.__name__ for launch in launches] == ["chunks_kernel", *rest, "walk_kernel"]


@pytest.mark.usefixtures("in_pieces")
class TestInPieces:
    """What few heads of long sequences are: each chunk a piece of its own."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_case(self, dtype: torch.dtype) -> None:
        longer = [problem for problem in PROBLEMS if problem.T > 64]
        for problem in longer:
            apart(problem.case.make(dtype, CPU, 0), dtype)

    @pytest.mark.parametrize("name", ["no whole chunks, per channel", "everything"])
    def test_both_ways(self, name: str) -> None:
        errors = TestInTriton().apart(inputs_of(SPEC, name, torch.float32))
        assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors

    # One key, each time reflected by a beta of exactly 2, forgets no rounding: whole or cut, chunks are at the edge of
    # the budget there, on either side of it by the order in which a processor adds (docs/delta.md).
    @pytest.mark.parametrize(("alike", "beta"), [("identical", 1.9), ("correlated", 2.0)])
    def test_alike_keys_through_four_pieces(self, alike: str, beta: float) -> None:
        problem = Delta("", B=1, T=200, H=1, K=20, V=12, alike=alike, beta=beta, full=True, decay="head", state=True)
        apart(problem.case.make(torch.float32, CPU, 0), torch.float32)

    def test_keys_wider_than_a_block(self) -> None:
        problem = Delta("", B=1, T=140, H=1, K=40, V=24, decay="token", beta=2.0, state=True)
        apart(problem.case.make(torch.float32, CPU, 0), torch.float32)

    @pytest.mark.parametrize("decay", ["token", "channel"])
    def test_documents_with_and_without_tokens(self, decay: str) -> None:
        problem = Delta("", B=1, T=200, H=1, K=8, decay=decay, offsets=(0, 0, 1, 140, 140, 200), state=True)
        apart(problem.case.make(torch.float32, CPU, 0), torch.float32)

    def test_what_comes_later_changes_no_bit(self) -> None:
        inputs = Delta("", B=1, T=200, H=1, K=8, decay="token").case.make(torch.float32, CPU, 0)
        later = {n: x.clone() for n, x in inputs.items()}
        for name in ("q", "k", "v", "beta"):
            later[name][:, 150:] *= -0.5
        later["log_decay"][:, 150:] = -torch.inf
        assert forward(inputs)[0][:, :150].equal(forward(later)[0][:, :150])

    def test_unwritten_memory_does_not_matter(self) -> None:
        inputs = Delta("", B=1, T=150, H=1, K=8, V=5, decay="token", erase=True).case.make(torch.float32, CPU, 0)
        with poisoned():
            *outputs, buffer = gpu.forward(bind(**there(inputs)), True)
        assert all(one.cpu().equal(other) for one, other in zip(outputs, forward(inputs), strict=True))
        parts = gpu._parts(bind(**inputs), buffer)
        assert all(part.isfinite().all() for part in parts if part is not None)


def test_few_heads_of_many_tokens_take_one_launch_more() -> None:
    call = bind(**there(Delta("", B=1, T=4096, H=1, K=8, V=5, decay="token").case.make(torch.float32, CPU, 0)))
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        gpu.forward(call)
    assert [launch.kernel.fn.__name__ for launch in launches] == ["chunks_kernel", "walk_kernel", "walk_kernel"]


@pytest.mark.parametrize("target", tune.TARGETS.values(), ids=list(tune.TARGETS))
def test_a_rule_gives_blocks_that_hold_the_head(target: tune.Target) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for K in (1, 64, 100, 128, 256, 512):
            config = kernels.walk_rule(dtype, K, K, 16, 2, 64, target)
            assert config["BLOCK_V"] >= 16 and config["BLOCK_K"] in (16, 32, 64, 128, 256, 512)
            assert config["BLOCK_K"] * config["BLOCK_V"] <= 4096
    few = kernels.walk_rule(torch.bfloat16, 64, 64, 1, 2, 64, target)
    assert few["BLOCK_V"] <= kernels.walk_rule(torch.bfloat16, 64, 64, 1000, 2, 64, target)["BLOCK_V"]
