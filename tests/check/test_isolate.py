"""A child that finishes, fails, crashes or hangs, and a parent that goes on."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
import torch

from foci.check import isolate
from foci.check.isolate import Died, aside, stream


def test_messages_arrive_in_order() -> None:
    assert list(stream(lambda send: [send(n) for n in range(5)], limit=10)) == [0, 1, 2, 3, 4]


def test_a_closure_and_tensors_work_in_the_child() -> None:
    x = torch.randn(200, 200)
    (found,) = stream(lambda send: send(float((x @ x).sum())), limit=10)
    assert found == pytest.approx(float((x @ x).sum()), rel=1e-3)


def test_backward_works_in_the_child_after_one_in_the_parent() -> None:
    torch.ones(3, requires_grad=True).sum().backward()

    def work(send) -> None:
        x = torch.ones(3, requires_grad=True)
        x.sum().backward()
        send(x.grad.tolist())

    assert list(stream(work, limit=10)) == [[1.0, 1.0, 1.0]]


def test_a_crash_is_the_last_message() -> None:
    def work(send) -> None:
        send("before")
        ctypes.string_at(0)

    first, last = stream(work, limit=10)
    assert first == "before" and last == Died("it killed the interpreter (SIGSEGV)")


def test_an_exit_is_no_success() -> None:
    assert list(stream(lambda send: os._exit(3), limit=10)) == [Died("it ended the interpreter (exit code 3)")]


def test_a_hang_is_stopped() -> None:
    start = time.monotonic()
    (last,) = stream(lambda send: time.sleep(60), limit=0.5)
    assert "no answer" in last.reason and time.monotonic() - start < 10


def test_past_its_end_nothing_is_waited_for_though_it_still_answers() -> None:
    """Its silence began anew with each answer: a check that had 50 s left waited 50 more behind the last."""

    def work(send) -> None:
        for n in range(100):
            send(n)
            time.sleep(0.2)

    start = time.monotonic()
    *answers, last = stream(work, limit=10, ends=start + 1)
    assert answers[:2] == [0, 1] and len(answers) < 8 and "no answer" in last.reason
    assert time.monotonic() - start < 10


def test_an_exception_of_ours_is_raised() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'x'"):
        list(stream(lambda send: {}["x"], limit=10))


def test_leaving_early_ends_the_child() -> None:
    messages = stream(lambda send: [send(os.getpid()), time.sleep(60)], limit=10)
    child = next(messages)
    messages.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_call_that_ends_its_child_has_no_answer_and_the_next_are_made() -> None:
    calls = [lambda: "first", lambda: os._exit(0), lambda: time.sleep(60), lambda: ctypes.string_at(0), lambda: "last"]
    start = time.monotonic()
    found = aside(lambda ask: (os.getpid(), [ask(call) for call in calls]), limit=1)
    assert found[0] != os.getpid() and found[1] == ["first", None, None, None, "last"]
    assert time.monotonic() - start < 10


def test_no_call_is_made_past_the_end() -> None:
    calls = [lambda: "in time", lambda: time.sleep(2), lambda: "late"]
    assert aside(lambda ask: [ask(call) for call in calls], limit=10, ends=time.monotonic() + 1) == [
        "in time", None, None,
    ]  # fmt: skip


def test_what_ends_the_child_between_calls_is_said() -> None:
    with pytest.raises(ValueError, match="before yours was called: it ended the interpreter"):
        aside(lambda ask: os._exit(3), limit=10)


def test_unfit(monkeypatch) -> None:
    assert isolate.why_unable("cpu") == ""
    with monkeypatch.context() as counted:
        counted.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        assert "has counted its GPUs" in isolate.why_unable("cuda") and isolate.why_unable("cpu") == ""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "has used CUDA" in isolate.why_unable("cuda") and isolate.why_unable("cpu") == ""
    monkeypatch.setattr(
        torch, "ones", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("Unable to handle threading"))
    )
    assert isolate.why_unable("cpu") == "Unable to handle threading"
    monkeypatch.setattr(isolate.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert isolate.why_unable("cpu") == "this platform cannot fork"
