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
    """The last thing a child that did not finish has to say."""

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
    """What `work(ask)` gives in a child, `ask(call)` there being what a call gives; both must pickle.

    It is None where the call ended the child or was silent for `limit` seconds: another child is then told the answers
    so far, for which `work` must ask in the same order, and goes on. Past `ends` no call is made.
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


def unfit(device: str) -> str:
    """Why no child can do this work here; empty when one can. Asked of a child: only there does it show."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return "this platform cannot fork"
    on_gpu = device.startswith("cuda")
    if on_gpu and torch.cuda.is_initialized():
        return "this process has used CUDA, and a fork of it cannot"
    return str(next(iter(stream(partial(_differentiate, on_gpu), 60.0))))


def _differentiate(on_gpu: bool, send: Callable[[Any], None]) -> None:
    if on_gpu and torch.cuda._is_in_bad_fork():  # torch.cuda.is_available() asks CUDA
        send("this process has counted its GPUs, and a fork of it cannot use them")
        return
    try:
        torch.ones(1, requires_grad=True, device="cpu").sum().backward()
    except RuntimeError as error:  # where there is a GPU, one backward in the parent starts threads that no fork has
        send(str(error).splitlines()[0])
    else:
        send("")


class _Finished:
    """The child's last message; the class itself, which pickles by name."""


def _run(work: Callable[[Callable[[Any], None]], None], pipe: Connection) -> None:
    faulthandler.disable()  # the parent says what happened
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
