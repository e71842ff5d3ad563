"""Ranks on this machine: processes that share a gloo group and run functions, or say which rank failed and how."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from foci.core.errors import Disagreement, RankError

_STARTING = 120.0  # seconds until every rank has imported torch and met the others, on a machine under load


@dataclass(frozen=True)
class Raised:
    """The outcome of a rank whose function raised."""

    error: Exception
    trace: str
    at: float = 0.0  # time.monotonic(), which all processes of a machine share


@dataclass(frozen=True)
class Lost:
    """The outcome of a rank that died, or that gave no answer in time and was stopped."""

    reason: str
    died: bool = True


class World:
    """`size` single-threaded processes, the ranks of a gloo group, which run the functions they are given until closed.

        with World(4) as world:
            results = world.run(function, *args)       # function(*args) on every rank; results by rank

    Inside, `torch.distributed` is initialised and the default generator is seeded with 0 before each function. A
    function is pickled by name, its arguments by value, so it must be defined at the top level of a module. `timeout`
    (seconds) is the process group's. `limit` (seconds) is for one function on all ranks. A rank exits after an error
    that the others do not share, and the next call restarts all ranks.

    `preload`: modules that the server behind the ranks imports once, so that a rank starts in a few milliseconds.
    """

    def __init__(
        self, size: int, *, timeout: float = 60.0, limit: float = 300.0, preload: Sequence[str] = ("foci",)
    ) -> None:
        if size < 1:
            raise ValueError(f"World: size must be at least 1, got {size}")
        self.size, self.timeout, self.limit, self.preload = size, timeout, limit, tuple(preload)
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._store: dist.TCPStore | None = None
        weakref.finalize(self, _stop, self._ranks)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(*args)` returned on each rank. Raises what a rank raised, with its traceback as a note.

        Of several failures, it raises a rank's death (a RankError), else the earliest that does not itself report the
        failure of another rank.
        """
        outcomes = self.outcomes(function, *args)
        raised = [(rank, each) for rank, each in enumerate(outcomes) if isinstance(each, Raised)]
        lost = [(rank, each) for rank, each in enumerate(outcomes) if isinstance(each, Lost)]
        said = [f"on rank {rank} of {self.size}:\n{each.trace}" for rank, each in raised]
        if lost and (
            any(each.died for _, each in lost) or all(isinstance(each.error, RankError) for _, each in raised)
        ):
            rank, last = min(lost, key=lambda pair: not pair[1].died)
            error: Exception = RankError(getattr(function, "__name__", "function"), rank, last.reason)
            for note in said:
                error.add_note(note)
            raise error
        if raised:
            place = min(range(len(raised)), key=lambda i: (isinstance(raised[i][1].error, RankError), raised[i][1].at))
            error = raised[place][1].error
            error.add_note(said[place])
            raise error
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned, or its Raised or Lost; failures of ranks are not raised here."""
        message = pickle.dumps((function, args))
        if not all(child.is_alive() for child, _ in self._ranks):
            self.close()
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send_bytes(message)
        outcomes = self._collect(self.limit)
        if not _in_step(outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """End the ranks. A later call starts new ones."""
        _stop(self._ranks)
        self._store = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", *self.preload])
        # The store is in this process, not in a rank, so that it outlives a rank that dies.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            here, there = context.Pipe()
            arguments = (there, rank, self.size, self._store.port, self.timeout)
            child = context.Process(target=_serve, args=arguments, daemon=True, name=f"foci rank {rank}")
            child.start()
            there.close()
            self._ranks.append((child, here))
        for rank, outcome in enumerate(self._collect(_STARTING)):
            if isinstance(outcome, Raised | Lost):
                self.close()
                said = outcome.reason if isinstance(outcome, Lost) else outcome.trace
                raise RankError("World", rank, f"it did not start: {said}")

    def _collect(self, limit: float) -> list[Any]:
        """One message from every rank. Once a rank is lost, the others have the group's timeout to report it."""
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while len(outcomes) < self.size:
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in outcomes}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in pipes.values():
                    outcomes[rank] = Lost(f"it gave no answer for {limit:.0f} s and was stopped", died=False)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes[pipe]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    child = self._ranks[rank][0]
                    child.join(5)
                    outcomes[rank] = Lost(_exit_reason(child.exitcode))
                    # Twice, since a rank may start to wait for the lost one only after waiting for another rank.
                    limit = min(limit, 2 * self.timeout + 10)
                    deadline = min(deadline, time.monotonic() + limit)
        return [outcomes[rank] for rank in range(self.size)]


def _in_step(outcomes: list[Any]) -> bool:
    """Whether the ranks are in step and can run the next function: all returned, or all raised the same error."""
    said = {str(each.error) if isinstance(each, Raised) and _shared(each.error) else "" for each in outcomes}
    ended = any(isinstance(each, Lost) or (isinstance(each, Raised) and not _shared(each.error)) for each in outcomes)
    return not ended and len(said) == 1


def _shared(error: Exception) -> bool:
    """Whether all ranks raise this error together. After any other a rank exits, so that the others notice soon."""
    return isinstance(error, Disagreement | RankError)


def _stop(ranks: list[tuple[BaseProcess, Connection]]) -> None:
    for child, pipe in ranks:
        pipe.close()
        child.kill()
    for child, _ in ranks:
        child.join()
    ranks.clear()


def _serve(pipe: Connection, rank: int, size: int, port: int, timeout: float) -> None:
    """The main loop of a rank: receive a function and its arguments, run it, send back its outcome."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_STARTING))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    except Exception as error:
        pipe.send_bytes(_pickled(Raised(error, traceback.format_exc())))
        return
    pipe.send_bytes(_pickled(None))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            function, args = pickle.loads(message)
            outcome = function(*args)
        except Exception as error:
            pipe.send_bytes(_pickled(Raised(error, traceback.format_exc(), time.monotonic())))
            if not _shared(error):
                return
        else:
            pipe.send_bytes(_pickled(outcome))


def _pickled(outcome: Any) -> bytes:
    """Plain pickle, tensors by value: torch.multiprocessing would share memory that is gone once a rank exits."""
    try:
        message = pickle.dumps(outcome)
        if isinstance(outcome, Raised):
            pickle.loads(message)  # an exception may pickle and yet not come back
        return message
    except Exception as problem:
        if isinstance(outcome, Raised):
            said = RuntimeError(f"{type(outcome.error).__name__}: {outcome.error}")
            return pickle.dumps(Raised(said, outcome.trace, outcome.at))
        said = RuntimeError(f"its result cannot be pickled: {problem}")
        return pickle.dumps(Raised(said, traceback.format_exc()))


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"it was killed ({signal.Signals(-code).name})"
    return f"its process ended (exit code {code})"
