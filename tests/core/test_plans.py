"""Calls played again: the same results as the call as written, whatever is like an earlier one and is not the same."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from foci.core import plans, replay, tune


def _floats(pointer: int, count: int) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * count).from_address(pointer)


class Adds:
    """A compiled kernel: out = a + amount * b, of `count` numbers."""

    function = packed_metadata = None
    pre_run_hooks = ()

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, a, b, out, count, amount):
        assert (x, y, z, stream) == (count, 1, 1, 7)
        first, second, into = (_floats(p, count) for p in (a, b, out))
        for i in range(count):
            into[i] = first[i] + amount * second[i]

    def __call__(self, a, b, out, amount=1.0):
        self.run(*(len(out), 1, 1, 7), *[None] * 5, *(x.data_ptr() for x in (a, b, out)), len(out), amount)
        if callback := tune.LAUNCH_CALLBACK.get():
            callback(self, self, (len(out), 1, 1), (a, b, out, len(out), amount))


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """CPU tensors pass for a GPU's, and Triton for one that nobody watches."""
    monkeypatch.setattr(plans, "_current_device", lambda: -1)
    monkeypatch.setattr(replay, "_stream", lambda device: 7)
    monkeypatch.setattr(plans, "_FUNCTION_PLANS", {})
    monkeypatch.setattr(plans, "_SEEN", set())
    monkeypatch.setattr(plans, "_GUARDED", {})
    runtime = SimpleNamespace(
        launch_enter_hook=None, launch_exit_hook=None, debug=False, add_stages_inspection_hook=None, interpret=False
    )
    knobs = SimpleNamespace(runtime=runtime, compilation=SimpleNamespace(instrumentation_mode=""))
    monkeypatch.setitem(plans.sys.modules, "triton", SimpleNamespace(knobs=knobs))
    return knobs


adds = Adds()


def twice(a, b, amount, needs):
    """a + 2 b, its half as a view, and nothing where nothing is wanted; something made is thrown away between."""
    torch.empty(3)
    between, out = torch.zeros(len(a)), a.new_empty(2, len(a))
    adds(a, b, between, amount)
    adds(between, b.view(-1), out[1], amount)
    return out, out[1, : len(a) // 2], (b if needs[0] else None)


def counted(run, monkeypatch=None):
    calls = []

    def wrapped(*values):
        calls.append(values)
        return run(*values)

    return wrapped, calls


def ask(run, *values):
    return plans.replay_or_run(twice, values, lambda: run(*values))


def test_the_third_call_of_a_kind_is_played_and_gives_what_the_call_gives() -> None:
    run, calls = counted(twice)
    for turn in range(5):
        a, b = torch.randn(8), torch.randn(8)
        out, half, same = ask(run, a, b, 1.0, [True])
        assert torch.allclose(out[1], a + 2 * b), turn
        assert torch.equal(half, out[1, :4]) and half.data_ptr() == out[1].data_ptr() and same is b
        assert len(calls) == min(turn + 1, 2)


@pytest.mark.parametrize(
    "other",
    [
        lambda a, b: (torch.randn(9), torch.randn(9), 1.0, [True]),
        lambda a, b: (a, b, 2.0, [True]),
        lambda a, b: (a, b, 1, [True]),
        lambda a, b: (a, b, 1.0, [False]),
        lambda a, b: (a, torch.randn(8, 2)[:, 0], 1.0, [True]),
        lambda a, b: (torch.randn(9)[1:], b, 1.0, [True]),
    ],
    ids=["size", "number", "type", "needs", "stride", "alignment"],
)
def test_a_call_of_another_kind_is_not(other) -> None:
    run, calls = counted(lambda *values: None)
    a, b = torch.randn(8), torch.randn(8)
    for _ in range(3):
        ask(counted(twice)[0], a, b, 1.0, [True])
    ask(run, *other(a, b))
    assert len(calls) == 1


def test_what_goes_before_the_first_call_of_a_kind_goes_before_no_other() -> None:
    done = []
    for size in (8, 8, 8, 9, 8):
        values = torch.randn(size), torch.randn(size), 1.0, [True]
        run = lambda values=values: done.append("run") or twice(*values)  # noqa: E731
        plans.replay_or_run(twice, values, run, lambda: done.append("first"))
    assert done == ["first", "run", "run", "first", "run"]


@pytest.mark.parametrize("guards", [True, False])
def test_plans_are_found_by_guards_and_by_keys_where_there_is_none(guards, monkeypatch) -> None:
    """Kinds that differ in the second tensor alone, more than get a guard."""
    monkeypatch.setattr(plans, "_from_dynamo", lambda name: getattr(torch._C._dynamo.guards, name) if guards else None)
    run, calls = counted(twice)
    for shape in ((8,), (1, 8), (8, 1), (2, 4), (4, 2), (2, 2, 2)) * 5:
        a, b = torch.randn(8), torch.randn(shape)
        assert torch.allclose(ask(run, a, b, 1.0, [False])[0][1], a + 2 * b.view(-1))
    assert len(calls) == 2 * 6
    assert [len(near) for near in plans._GUARDED.values()] == ([plans._MAX_GUARDS] if guards else [])


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a.clone(),
        lambda a: a.clone().requires_grad_(),
        lambda a: a.double(),
        lambda a: a.view(torch.int32),
        lambda a: a.half(),
        lambda a: torch.randn(4, 7),
        lambda a: torch.randn(6, 4).t(),
        lambda a: torch.randn(4, 12)[:, :6],
        lambda a: torch.randn(24),
        lambda a: torch.randn(4, 6, 1),
        lambda a: torch.randn(4, 1).expand(4, 6),
        lambda a: torch.view_as_complex(torch.randn(4, 6, 2)).conj().imag,
        lambda a: torch.randn(4, 6, dtype=torch.complex64).conj(),
        lambda a: torch._efficientzerotensor((4, 6)),
        lambda a: torch.randn(4, 6).as_subclass(Sub),
        lambda a: torch.nn.Parameter(torch.randn(4, 6)),
        lambda a: torch.randn(4, 6).to_sparse(),
    ],
)
@pytest.mark.parametrize("within", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_guard_passes_nothing_that_has_another_key(make, within) -> None:
    first, a = torch.randn(2), torch.randn(4, 6)
    for _ in range(4):
        plans.replay_or_run(twice, (first, a), lambda: (torch.empty(3),))
    ((key, plan),) = plans._FUNCTION_PLANS.items()
    assert plan is not None and plans._GUARDED
    with within():
        other = make(a)
        with suppress(RuntimeError):  # what has no memory that could be named
            told = plans._describe(twice, (first, other))
            found = told and plans._lookup(plans._FUNCTION_PLANS, told)[1]
            assert (found is plan) == (told is not None and plans._key(told) == key)
            assert (found is plan) == (type(other) is torch.Tensor and _facts(other) == _facts(a))


def _facts(x):
    plain = x.layout == torch.strided and not x.is_neg() and not x._is_zerotensor()
    return plain and (x.dtype, x.shape, x.stride())


def test_two_values_in_one_memory_keep_their_own_places() -> None:
    for _ in range(4):
        both = torch.randn(32)
        start = int(torch.randint(0, 3, ())) * 4  # 16 bytes each: as aligned as ever
        a, b = both[:8], both[8 + start : 16 + start]
        assert torch.allclose(ask(twice, a, b, 1.0, [False])[0][1], a + 2 * b)


@pytest.mark.parametrize(
    "also",
    [lambda a: a.item(), lambda a: a.clone(), lambda a: a.add_(0), lambda a: a[a > 0], lambda a: a.t().contiguous()],
    ids=["read", "copied", "changed", "chosen", "laid out anew"],
)
def test_what_does_more_than_take_memory_and_launch_runs_every_time(also) -> None:
    def more(a, b):
        also(a[0, 0] if also.__code__.co_names == ("item",) else a)
        out = torch.empty(4)
        adds(b, b, out)
        return (out,)

    run, calls = counted(more)
    for turn in range(4):
        a, b = torch.randn(2, 3), torch.randn(4)
        assert torch.allclose(plans.replay_or_run(more, (a, b), lambda a=a, b=b: run(a, b))[0], 2 * b)
        assert len(calls) == turn + 1


def test_a_launch_that_is_not_known_has_no_plan() -> None:
    def unknown(a):
        out = torch.empty(4)
        adds(a, a, out)
        if tune.LAUNCH_CALLBACK.get():
            tune.LAUNCH_CALLBACK.get()(adds, None, (1,), (a,))
        return (out,)

    run, calls = counted(unknown)
    for turn in range(4):
        a = torch.randn(4)
        plans.replay_or_run(unknown, (a,), lambda a=a: run(a))
        assert len(calls) == turn + 1


def test_where_launches_are_watched_or_chosen_everything_runs_as_written(here) -> None:
    run, calls = counted(twice)
    values = torch.randn(8), torch.randn(8), 1.0, [True]
    for _ in range(3):
        ask(run, *values)
    with tune.override_configs({}):
        ask(run, *values)
    here.runtime.launch_enter_hook = print
    ask(run, *values)
    assert len(calls) == 4


def test_a_hook_that_is_put_on_a_kernel_afterwards_is_heard(monkeypatch) -> None:
    """Triton's `pre_run_hooks`, which only a launch through it knows."""
    run, calls = counted(twice)
    values = torch.randn(8), torch.randn(8), 1.0, [True]
    for _ in range(4):
        ask(run, *values)
    assert len(calls) == 2
    monkeypatch.setattr(adds, "pre_run_hooks", [print], raising=False)
    ask(run, *values)
    assert len(calls) == 3
    monkeypatch.setattr(adds, "pre_run_hooks", [])
    ask(run, *values)
    assert len(calls) == 3


def test_an_error_leaves_no_plan_and_no_note() -> None:
    def fails(a):
        raise ValueError("no")

    a = torch.randn(4)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            plans.replay_or_run(fails, (a,), lambda: fails(a))
    assert tune.LAUNCH_CALLBACK.get() is None and not plans._FUNCTION_PLANS


def test_only_so_many_kinds_are_remembered(monkeypatch) -> None:
    monkeypatch.setattr(plans, "_MAX_KEYS", 2)
    for size in range(1, 9):
        for _ in range(3):
            a = torch.randn(size)
            assert torch.allclose(ask(twice, a, a, 1.0, [False])[0][1], 3 * a)
    assert len(plans._SEEN) <= 2 and len(plans._FUNCTION_PLANS) <= 2


def test_one_tensor_in_two_places_is_another_kind_than_two() -> None:
    for _ in range(4):
        a = torch.randn(8)
        assert torch.allclose(ask(twice, a, a, 1.0, [False])[0][1], 3 * a)
    for _ in range(4):
        a, b = torch.randn(8), torch.randn(8)
        assert torch.allclose(ask(twice, a, b, 1.0, [False])[0][1], a + 2 * b)


def test_a_part_of_what_was_given_is_no_result_that_can_be_played() -> None:
    def part(a):
        out = torch.empty(4)
        adds(a[:4], a[4:], out)
        return out, a[1:3]

    for turn in range(4):
        a = torch.randn(64)[16 * turn :][:8]
        assert torch.equal(plans.replay_or_run(part, (a,), lambda a=a: part(a))[1], a[1:3])


@pytest.mark.parametrize("first, other", [(0.0, -0.0), (1.0, True), (1, True), (0.0, float("nan")), (0, None)])
def test_values_that_are_merely_equal_are_of_two_kinds(first, other) -> None:
    run, calls = counted(lambda *values: None)
    a = torch.randn(8)
    for _ in range(3):
        plans.replay_or_run(twice, (a, first), lambda: None)
    plans.replay_or_run(twice, (a, other), lambda: run(a, other))
    assert len(calls) == 1


def test_a_nan_is_one_kind() -> None:
    run, calls = counted(twice)
    for _ in range(5):
        a = torch.randn(8)
        ask(run, a, a, float("nan"), [False])
    assert len(calls) == 2 and len(plans._SEEN) == 1


class Sub(torch.Tensor):
    """A subclass, which wants to see what happens to it."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8).as_subclass(Sub),
        lambda: torch.view_as_complex(torch.randn(8, 2)).conj().imag,
        lambda: torch.randn(8, dtype=torch.complex64).conj(),
        lambda: [1, 2],
        lambda: [True, 1.0],
        lambda: {"a": 1},
    ],
    ids=["subclass", "negated", "conjugated", "list of numbers", "mixed list", "something else"],
)
def test_what_a_plan_cannot_know_runs_every_time(make) -> None:
    run, calls = counted(lambda *values: None)
    for turn in range(4):
        a, odd = torch.randn(8), make()
        plans.replay_or_run(twice, (a, odd), lambda a=a, odd=odd: run(a, odd))
        assert len(calls) == turn + 1
    assert not plans._SEEN and not plans._FUNCTION_PLANS


def test_no_tensor_is_kept_alive() -> None:
    gone = []

    def frees(a):
        between, out = torch.empty(len(a)), torch.empty(len(a))
        adds(a, a, between)
        adds(between, a, out)
        there = weakref.ref(between)
        del between
        gone.append(there() is None)
        return (out,)

    for _ in range(4):
        a = torch.randn(8)
        (out,) = plans.replay_or_run(frees, (a,), lambda a=a: frees(a))
        assert torch.allclose(out, 3 * a)
        dead = weakref.ref(a), weakref.ref(out)
        del a, out
        gc.collect()
        assert [there() for there in dead] == [None, None]
    assert gone == [True, True]  # also while it was noted


def test_a_tensor_within_an_argument_has_no_plan() -> None:
    class Hides(Adds):
        """Takes its tensors in a tuple."""

        def __call__(self, a, b, out):
            super().run(*(len(out), 1, 1, 7), *[None] * 5, *(x.data_ptr() for x in (a, b, out)), len(out), 1.0)
            if callback := tune.LAUNCH_CALLBACK.get():
                callback(self, self, (len(out), 1, 1), (out, (a, b), len(out)))

    def hidden(a, b):
        out = torch.empty(8)
        Hides()(a, b, out)
        return (out,)

    for _ in range(4):
        a, b = torch.randn(8), torch.randn(8)
        assert torch.allclose(plans.replay_or_run(hidden, (a, b), lambda a=a, b=b: hidden(a, b))[0], a + b)


def test_memory_that_outlives_a_call_has_no_plan() -> None:
    kept = torch.ones(8)

    def borrows(a):
        out = torch.empty(8)
        adds(a, kept, out)
        return (out,)

    run, calls = counted(borrows)
    for turn in range(4):
        a = torch.randn(8)
        assert torch.allclose(plans.replay_or_run(borrows, (a,), lambda a=a: run(a))[0], a + 1)
        assert len(calls) == turn + 1


def test_a_new_tensor_with_the_identity_of_one_that_is_gone_is_not_taken_for_it() -> None:
    noted = replay.Recorder((torch.randn(8),))
    with noted:
        gone = torch.empty(8)
    place = id(gone)
    del gone
    other = torch.randn(8)
    noted.slots[id(other)] = noted.slots[place]
    assert noted._slot(other) is None


def test_memory_that_torch_fills_is_filled_in_a_played_call() -> None:
    def unwritten(a):
        return torch.empty(4), a

    torch._C._set_deterministic_algorithms(True)
    try:
        for _ in range(4):
            a = torch.randn(8)
            assert plans.replay_or_run(unwritten, (a,), lambda a=a: unwritten(a))[0].isnan().all()
    finally:
        torch._C._set_deterministic_algorithms(False)


@pytest.mark.parametrize("within", [torch.inference_mode, torch.no_grad])
def test_modes_of_autograd_are_those_of_the_call(within) -> None:
    for turn in range(5):
        a, b = torch.randn(8), torch.randn(8)
        with within() if turn % 2 else torch.enable_grad():
            out = ask(twice, a, b, 1.0, [False])[0]
        assert out.is_inference() == (turn % 2 == 1 and within is torch.inference_mode) and not out.requires_grad


def test_plans_that_another_thread_clears_are_made_again(monkeypatch) -> None:
    class Cleared(dict):
        def __contains__(self, key):
            return True  # as it was a moment ago

    monkeypatch.setattr(plans, "_FUNCTION_PLANS", Cleared())
    a, b = torch.randn(4), torch.randn(4)
    for got, right in zip(ask(twice, a, b, 1.0, [True]), twice(a, b, 1.0, [True]), strict=True):
        assert torch.equal(got[1:] if got.dim() == 2 else got, right[1:] if right.dim() == 2 else right)


def test_threads_play_and_note_beside_each_other() -> None:
    wrong: list[int] = []

    def work() -> None:
        for turn in range(200):
            a, b = torch.randn(1 + turn % 7), torch.randn(1 + turn % 7)
            if not torch.allclose(ask(twice, a, b, 1.0, [False])[0][1], a + 2 * b):
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sum(plan is not None for plan in plans._FUNCTION_PLANS.values()) == 7


def test_a_state_that_is_changed_in_place_is_the_one_that_was_given() -> None:
    def step(state, x):
        adds(state, x, state)
        return (torch.empty(4),)

    for _ in range(5):
        state, x = torch.randn(8), torch.randn(8)
        right = state + x
        plans.replay_or_run(step, (state, x), lambda state=state, x=x: step(state, x))
        assert torch.allclose(state, right)


def test_a_plan_is_found_at_once_by_what_is_said_and_a_guard_alone() -> None:
    """And by all values where one is of another kind, or nothing is said."""
    asked: list[object] = []

    def at_once(a, b, apart, amount=1.0):
        return plans.try_replay_function(twice, [a, b], apart, lambda: asked.append(apart) or (a, b, amount, [False]))

    a, b = torch.randn(8), torch.randn(8)
    assert at_once(a, b, "kind") is None and len(asked) == 1  # nothing was noted
    for _ in range(2):
        ask(twice, a, b, 1.0, [False])
    asked.clear()
    for _ in range(3):
        a, b = torch.randn(8), torch.randn(8)
        assert torch.allclose(at_once(a, b, "kind")[0][1], a + 2 * b)
    assert asked == ["kind"]
    assert torch.allclose(at_once(a, b, None)[0][1], a + 2 * b) and torch.allclose(
        at_once(a, b, None)[1], a[:4] + 2 * b[:4]
    )
    assert asked == ["kind", None, None]
    asked.clear()
    others = (a[:7], b[:7]), (torch.randn(8, 2)[:, 0], b), (torch.randn(9)[1:], b), (a.double(), b), (a, a)
    assert [at_once(*other, "kind") for other in others] == [None] * 5 and len(asked) == 5
    with torch.autograd.profiler.profile():
        assert at_once(a, b, "kind") is None


def test_on_amd_memory_that_is_large_is_another_kind(monkeypatch) -> None:
    """There kernels are compiled for small memory and for large."""
    a, large = torch.randn(8), torch.empty(2**31, dtype=torch.uint8)[:32].view(torch.float32)
    pointers = [a.data_ptr(), large.data_ptr()]
    assert plans._alignment([a, large], pointers) is True
    monkeypatch.setattr(plans, "_HIP", True)
    assert plans._alignment([a, large], pointers) == (True, 0, 1)
    assert plans._alignment([a[1:], a], [a.data_ptr() + 4, a.data_ptr()]) == ((4, 0), 0, 0)


def test_who_is_told_of_what_is_done() -> None:
    """Each alone; of tensors also by what they are: a subclass, one that is negated when read, zeros of no memory."""

    class Rows(torch.Tensor):
        pass

    x = torch.ones(2)
    negated = torch.ones(2, dtype=torch.complex64).conj().imag
    assert negated.is_neg() and plans.all_plain((x, None, True, 3, 0.5, "a", torch.nn.Parameter(x)))
    for odd in (x.as_subclass(Rows), negated, torch._efficientzerotensor(2), [1], torch.float32):
        assert not plans.all_plain((x, odd))
    assert plans.may_bypass_dispatch((x, None)) is tune.launches_normally() and not plans.may_bypass_dispatch(
        (x, x.as_subclass(Rows))
    )
    assert not plans.must_dispatch() and not plans.transformed()
    with TorchDispatchMode():
        assert plans.must_dispatch() and not plans.transformed() and not plans.may_bypass_dispatch((x,))
    with TorchFunctionMode():
        assert plans.must_dispatch() and not plans.may_bypass_dispatch((x,))
    with TorchDispatchMode(), TorchFunctionMode():
        assert plans.must_dispatch()
    with torch.autograd.profiler.profile():
        assert plans.must_dispatch() and not plans.may_bypass_dispatch((x,))
    with torch.autograd.forward_ad.dual_level():
        assert plans.must_dispatch() and plans.transformed() and not plans.may_bypass_dispatch((x,))
    seen = []
    torch.func.vmap(lambda each: seen.append((plans.must_dispatch(), plans.transformed())) or each)(x)
    assert seen == [(True, True)]


def test_a_gradient_is_wanted_of_a_tensor_that_asks_for_one_where_they_are_taken() -> None:
    x = torch.ones(2)
    assert not plans.wants_gradient((x, 3, None)) and plans.wants_gradient((x, 3, x.clone().requires_grad_()))
    with torch.no_grad():
        assert not plans.wants_gradient((x.clone().requires_grad_(),))
