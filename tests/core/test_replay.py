"""Steps of a call: made and launched again on other tensors, whatever memory they take and whoever launches them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core import replay, tensor_maps, tune
from foci.core.replay import Plan, Recorder, replay_plan, tuple_getter

N = 8


class CudaLauncher:
    """Triton's, but for what it launches: out = a + amount * b. A kernel with memory of its own leaves a mark there."""

    __module__ = "triton.backends.nvidia.driver"
    num_ctas, launch_cooperative_grid, launch_pdl, profile_scratch_size = 1, False, True, 0
    arg_annotations, kernel_signature = ("annotations",), b"signature"

    def __init__(self, version: str, scratch: int) -> None:
        self.version, self.global_scratch_size, self.streams = version, scratch, []

    def launch(self, *given: Any) -> None:
        if self.version == "3.6.":
            x, y, z, stream, function, together, early, scratch, profile, packed, *hooks = given[:13]
            arguments = given[13:]
        else:
            x, y, z, stream, function, together, early, packed, *hooks, scratch, profile, notes, kinds, arguments = (
                given
            )
            assert (notes, kinds) == (self.arg_annotations, self.kernel_signature)
        assert (x, y, z, function, packed) == (N, 1, 1, 5, (4, 1, 99)) and hooks == [None] * 3
        assert (together, early, profile) == (False, True, None) and bool(scratch) is bool(self.global_scratch_size)
        if scratch:
            _numbers(scratch, self.global_scratch_size * N // 4)[:] = [7.0] * (self.global_scratch_size * N // 4)
        a, b, out, count, amount, nothing, strides = arguments
        assert nothing is None and strides == (count, 1)
        first, second = list(_numbers(a, count)), list(_numbers(b, count))
        _numbers(out, count)[:] = [p + amount * q for p, q in zip(first, second, strict=True)]
        self.streams.append(stream)


class Kernel:
    """What Triton compiled, and what it was compiled from."""

    function, packed_metadata, pre_run_hooks = 5, (4, 1, 99), ()

    def __init__(self, version: str = "3.7.", scratch: int = 0) -> None:
        self.run = CudaLauncher(version, scratch)

    def add(self, recorder: Recorder, a: Tensor, b: Tensor, out: Tensor, amount: float) -> None:
        recorder.launched(self, self, (N, 1, 1), (a, b, out, N, amount, None, (N, 1)))


def _numbers(pointer: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(pointer)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_stream", lambda device: 11)


def noted(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Of a call that gives a + 2 b + 4 a, that sum's first half, a + 2 b, and nothing; all the rest is its own."""
    monkeypatch.setitem(tune.sys.modules, "triton", SimpleNamespace(__version__=kernel.run.version + "1"))
    a, b = torch.randn(N), torch.randn(N)
    with Recorder([a, b]) as recorder:
        torch.empty(1000)  # and this nobody ever sees
        rows = torch.empty(3, N)
        between, whole = rows[1], torch.empty(2, N)
        kernel.add(recorder, a, b, between, 2.0)
        zeros, parts = torch.zeros(N), torch.empty(N)
        kernel.add(recorder, zeros, between, parts, 1.0)
        kernel.add(recorder, parts, a, whole[1], 4.0)
        plan = recorder.plan((whole, whole[1, : N // 2], parts, None))
    assert plan is not None
    return plan


@pytest.mark.parametrize("scratch", [0, 64])
@pytest.mark.parametrize("version", ["3.6.", "3.7."])
@pytest.mark.parametrize("little", [0, 1 << 22])
def test_a_call_is_played_on_other_tensors(
    little: int, version: str, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_SCRATCH_LIMIT", little)
    kernel = Kernel(version, scratch)
    plan = noted(kernel, monkeypatch)
    for _ in range(2):
        a, b = torch.randn(N), torch.randn(N)
        room = [a, b]
        whole, half, parts, none = replay_plan(plan, room, [a.data_ptr(), b.data_ptr()])
        assert whole is not None and half is not None and parts is not None and none is None
        torch.testing.assert_close(parts, a + 2 * b)
        torch.testing.assert_close(whole[1], a + 2 * b + 4 * a)
        assert torch.equal(half, whole[1, : N // 2]) and half.data_ptr() == whole[1].data_ptr()
        assert len({x.untyped_storage().data_ptr() for x in (whole, parts)}) == 2
    assert kernel.run.streams == 6 * [11]


def test_little_that_nobody_else_sees_is_taken_at_once_and_much_when_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = noted(Kernel(), monkeypatch)
    assert [len(step.allocations) for step in at_once.steps] == [4, 0, 0, 0]  # whole, zeros, parts, one for the rest
    assert at_once.steps[0].allocations[-1].bytes == 512
    assert [step.frees for step in at_once.steps] == [(), (3, 5), (), ()]
    monkeypatch.setattr(replay, "_SCRATCH_LIMIT", 0)
    much = noted(Kernel(scratch=64), monkeypatch)
    assert [[each.bytes for each in step.allocations] for step in much.steps] == [
        [96, 64, 512], [32, 32, 512], [512], []
    ]  # fmt: skip
    assert [step.frees for step in much.steps] == [(4,), (2, 5, 7), (8,), ()]


@pytest.mark.parametrize("little", [0, 1 << 22])
def test_maps_are_made_of_where_tensors_lie_now(little: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was given, of what is made, of a part of it; each by its own way, as many times as it is played."""
    descriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
    monkeypatch.setattr(replay, "_SCRATCH_LIMIT", little)
    told: list[tuple[Any, ...]] = []
    kernel = SimpleNamespace(run=lambda *given: told.append(given[9:]), function=0, packed_metadata=0, pre_run_hooks=())
    made = iter("abc")
    ways = [[lambda address, name=next(made): (name, address) for _ in range(n)] for n in (2, 1)]  # type: ignore[misc]
    monkeypatch.setattr(tensor_maps, "makers", lambda *_: list(ways.pop(0)))
    monkeypatch.setattr(tensor_maps, "c_launcher", lambda launch: (launch, ()))
    x = torch.zeros(16, 64, dtype=torch.bfloat16)

    def of(tensor: Tensor) -> Any:
        return descriptor(tensor, [16, 64], [64, 1], [8, 64])

    with Recorder([x]) as recorder:
        out = torch.empty(2, 16, 64, dtype=torch.bfloat16)
        recorder.launched(kernel, kernel, (1, 1, 1), (of(x), 7, of(out[1]), out))
        recorder.launched(kernel, kernel, (1, 1, 1), (of(out), x))
        plan = recorder.plan((out,))
    assert plan is not None
    for _ in range(2):
        told.clear()
        other = torch.zeros(16, 64, dtype=torch.bfloat16)
        (given,) = replay_plan(plan, [other], [other.data_ptr()])
        assert given is not None
        here, there = other.data_ptr(), given.data_ptr()
        assert told[0] == (("a", here), 16, 64, 64, 1, 7, ("b", there + 2048), 16, 64, 64, 1, there)
        assert told[1] == (("c", there), 16, 64, 64, 1, here)


def test_a_launch_whose_maps_nobody_can_make_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
    kernel = SimpleNamespace(run=print, function=0, packed_metadata=0, pre_run_hooks=())
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    with Recorder([x]) as recorder:
        recorder.launched(kernel, kernel, (1, 1, 1), (descriptor(x, [16, 64], [64, 1], [8, 64]),))
        assert recorder.plan((x,)) is None


def test_numbers_that_are_merely_equal_are_told_apart() -> None:
    told = []
    kernel = SimpleNamespace(run=lambda *given: told.append(given[9:]), function=0, packed_metadata=0, pre_run_hooks=())
    with Recorder([torch.zeros(1)]) as recorder:
        recorder.launched(kernel, kernel, (1, 1, 1), (1, True, 1.0, 0, False, 0.0, -0.0, None, "1", torch.float16))
    plan = recorder.plan(())
    assert plan is not None and replay_plan(plan, [], []) == ()
    assert [repr(x) for x in told[0]] == [
        "1",
        "True",
        "1.0",
        "0",
        "False",
        "0.0",
        "-0.0",
        "None",
        "'1'",
        "torch.float16",
    ]


def test_a_choice_is_a_tuple_of_however_many() -> None:
    assert [tuple_getter(places)("abc") for places in ([], [1], [2, 0])] == [(), ("b",), ("c", "a")]


def test_what_torch_fills_is_filled_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `torch.use_deterministic_algorithms`: rows that no kernel writes are NaN."""
    plan = noted(Kernel(), monkeypatch)
    torch._C._set_deterministic_algorithms(True)
    try:
        a, b = torch.randn(N), torch.randn(N)
        whole = replay_plan(plan, [a, b], [a.data_ptr(), b.data_ptr()])[0]
    finally:
        torch._C._set_deterministic_algorithms(False)
    assert whole is not None and whole[0].isnan().all()


@pytest.mark.parametrize(
    "does",
    [
        lambda x: x.add_(1),
        lambda x: x + 1,
        lambda x: x.clone(),
        lambda x: torch.empty(2).fill_(0),
        lambda x: x.sum().item(),
        lambda x: torch.empty(2, device="meta"),
        lambda x: torch.cat([x[:1], x[1:]]),
    ],
)
def test_a_call_that_computes_on_the_way_has_no_plan(does: Any) -> None:
    x = torch.ones(4)
    recorder = Recorder([x])
    with recorder:
        does(x)
    assert recorder.plan((x,)) is None


def test_views_and_memory_are_no_computation_but_a_part_of_what_was_given_is_no_result() -> None:
    x = torch.ones(4, 2)
    recorder = Recorder([x])
    with recorder:
        part, made = x[1:].T.detach(), torch.empty(6)
        some = made[2:].view(2, 2)
    assert recorder.replayable and recorder.plan([x]) is None and recorder.plan((part,)) is None
    plan = recorder.plan((x, some, None, made))
    assert plan is not None and not plan.fresh and plan.views == (None, ((2, 2), (2, 1), 2), None, None)
    assert recorder.plan((made,)).fresh and recorder.plan((some.view(torch.int32),)) is None  # type: ignore[union-attr]
