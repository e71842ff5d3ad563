"""Work in a child process, so that what crashes or hangs ends the child and not the interpreter."""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from foci.core.spec import Ask


@dataclass(frozen=True)
class Died:
    """The last message of a child that did not finish."""

    reason: str


def stream(work: Callable[[Callable[[Any], None]], None], limit: float, ends: float = math.inf) -> Iterator[Any]:
    """Run `work(send)` in a forked child and yield what it sends; a Died at the end when it did not finish.

    `limit` is the longest silence in seconds, `ends` when nothing more is waited for (monotonic). The child is a fork,
    so that `work` may be any function; it runs on one thread, since a fork has none of its parent's.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(work, there))
    child.start()
    there.close()
    try:
        while True:
            patience = min(limit, max(0.0, ends - time.monotonic()))
            if not here.poll(patience):
                yield Died(f"it gave no answer for {patience:.0f} s and was stopped")
                return
            try:
                message = here.recv()
            except EOFError:
                child.join()
                yield Died(_cause(child.exitcode))
                return
            if message is _Finished:
                return
            if isinstance(message, BaseException):
                raise message
            yield message
    finally:
        child.kill()
        child.join()
        here.close()


def aside(work: Callable[[Ask], Any], limit: float, ends: float = math.inf) -> Any:
    """`work(ask)` in a child, where `ask(call)` returns the call's result; both results must pickle.

    `ask` returns None if the call killed the child or took longer than `limit` seconds: a new child then repeats `work`
    with the answers so far, so `work` must ask in the same order each time. After `ends` no call is made.
    """
    known: list[Any] = []

    def run(send: Callable[[Any], None]) -> None:
        told = iter(known)

        def ask(call: Callable[[], Any]) -> Any:
            answer = next(told, _Finished)
            if answer is _Finished:
                send(("asked", None))
                answer = None if time.monotonic() > ends else call()
                send(("answer", answer))
            return answer

        send(("all", work(ask)))

    while True:
        step = ""
        for message in stream(run, limit):
            if isinstance(message, Died) and step != "asked":
                raise ValueError(f"before yours was called: {message.reason}")
            step, value = ("answer", None) if isinstance(message, Died) else message
            if step == "all":
                return value
            if step == "answer":
                known.append(value)


def why_unable(device: str) -> str:
    """Why a forked child cannot run the work here; empty if it can. Tried in a child, since only there does it fail."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return "this platform cannot fork"
    on_gpu = device.startswith("cuda")
    if on_gpu and torch.cuda.is_initialized():
        return "this process has used CUDA, and a fork of it cannot"
    return str(next(iter(stream(partial(_differentiate, on_gpu), 60.0))))


def _differentiate(on_gpu: bool, send: Callable[[Any], None]) -> None:
    if on_gpu and torch.cuda._is_in_bad_fork():  # the parent initialised CUDA's runtime, if only by is_available()
        send("this process has counted its GPUs, and a fork of it cannot use them")
        return
    try:
        torch.ones(1, requires_grad=True, device="cpu").sum().backward()
    except RuntimeError as error:  # with a GPU, a backward in the parent started threads that a fork lacks
        send(str(error).splitlines()[0])
    else:
        send("")


class _Finished:
    """The child's last message if it finished: the class itself, which pickles by name."""


def _run(work: Callable[[Callable[[Any], None]], None], pipe: Connection) -> None:
    faulthandler.disable()  # the parent reports what happened
    torch.set_num_threads(1)
    try:
        work(pipe.send)
        pipe.send(_Finished)
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"it killed the interpreter ({signal.Signals(-code).name})"
    return f"it ended the interpreter (exit code {code})"
