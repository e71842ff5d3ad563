"""Group: the ranks that share a sequence; how they check that their calls match, and report failures."""

from __future__ import annotations

import ast
import hashlib
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from foci.core.errors import Disagreement, RankError

STATUS = 512  # bytes of a status (a packed Failure or zeros), at the end of every message that goes over the host
_HEAD = struct.Struct("<BBiiH")
_NUMBERS = 60
_SLOT = STATUS + 16 + 8 + 8 * _NUMBERS  # bytes of a rank's message in `agree`: status, hash, count, numbers
_MORE = 1000  # further numbers per message
_GRACE = 1.0  # seconds for a rank that lost its connections to write its note
_DIRECTIONS = (None, "forward", "backward")
RAISED, GONE, SILENT = 1, 2, 3
_TAG = 7  # messages between two ranks arrive in the order sent: one tag for control, one for data


class Failure(NamedTuple):
    """Which global rank failed, how (RAISED, GONE or SILENT), in which step and direction, and the error's text."""

    kind: int
    rank: int
    step: int | None
    direction: str | None
    text: str

    def pack(self) -> bytes:
        words = self.text.encode()[: STATUS - _HEAD.size].decode(errors="ignore").encode()
        step = -1 if self.step is None else self.step
        head = _HEAD.pack(self.kind, _DIRECTIONS.index(self.direction), self.rank, step, len(words))
        return (head + words).ljust(STATUS, b"\0")

    @staticmethod
    def unpack(message: bytes) -> Failure | None:
        kind, direction, rank, step, count = _HEAD.unpack_from(message)
        if not kind:
            return None
        text = message[_HEAD.size : _HEAD.size + count].decode()
        return Failure(kind, rank, None if step < 0 else step, _DIRECTIONS[direction], text)

    def error(self, operator: str) -> RankError:
        return RankError(operator, self.rank, self.text, step=self.step, direction=self.direction)


NO_FAILURE = bytes(STATUS)  # the status of a rank without a failure


@dataclass
class Traffic:
    """What this rank has sent: bytes of tensors, the number of their messages, and bytes of control messages."""

    bytes: int = 0
    messages: int = 0
    control: int = 0


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that share a sequence: `Group.of(process group or one-dimensional DeviceMesh)`.

    `rank` is this rank's index in the group, `ranks` are the members' global ranks. `host`: it has a backend for CPU
    tensors (gloo), over which ranks exchange control messages. `staged`: device types whose tensors are sent through
    host memory. `traffic` counts what was sent.
    """

    pg: dist.ProcessGroup
    size: int
    rank: int
    ranks: tuple[int, ...]
    host: bool
    staged: frozenset[str]
    traffic: Traffic = field(default_factory=Traffic)
    _notes: list[str] = field(default_factory=list, repr=False)  # keys in the store that this value has set

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Itself: a copy of a model talks to the same ranks."""
        return self

    @staticmethod
    def of(group: Any) -> Group:
        """A Group from a ProcessGroup, a one-dimensional DeviceMesh or a Group (itself). Raises for anything else."""
        if isinstance(group, Group):
            return group
        if isinstance(group, dist.DeviceMesh):
            if group.ndim != 1:
                axis = (group.mesh_dim_names or ("name",))[0]
                raise ValueError(f"group: {group} has {group.ndim} dimensions; expected one, such as mesh[{axis!r}]")
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            member = "" if group != dist.GroupMember.NON_GROUP_MEMBER else ": this rank is no member of that group"
            raise TypeError(f"group must be a ProcessGroup or a one-dimensional DeviceMesh, got {group!r}{member}")
        ranks = tuple(dist.get_process_group_ranks(group))
        backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        staged = frozenset(device for device, backend in backends.items() if backend == "gloo" or device == "cpu")
        return Group(group, len(ranks), dist.get_rank(group), ranks, "cpu" in backends, staged)

    @staticmethod
    def of_mesh(mesh: Any) -> tuple[Group, Group]:
        """The groups of this rank along both dimensions of a two-dimensional DeviceMesh with names.

        torch sorts the ranks of each: a mesh is a grid of them if rows are in one order, and so are columns.
        """
        for dim in range(2):
            order = mesh.mesh.argsort(dim)
            if bool((order != order.narrow(1 - dim, 0, 1)).any()):
                raise ValueError(
                    f"mesh has ranks {mesh.mesh.tolist()}; expected its rows in one order of ranks, and its columns: "
                    "torch sorts the ranks of each"
                )
        outer, inner = mesh.mesh_dim_names
        return Group.of(mesh[outer]), Group.of(mesh[inner])

    def agree(
        self,
        operator: str,
        facts: Mapping[str, object],
        numbers: Sequence[int] = (),
        *,
        device: torch.device | None = None,
        failure: Failure | None = None,
        own: Exception | None = None,
    ) -> list[list[int]]:
        """Check that `facts` are equal on all ranks, and gather every rank's `numbers`, by rank. One kilobyte per rank.

        `facts` are compared as text, tensors among them by their values; so is the count of numbers. When they differ,
        every rank raises the same Disagreement. When a rank passes a `failure`, or is gone, all raise the same
        RankError; when every rank failed by itself, each raises its `own` error. `device`: where a group without a CPU
        backend gathers, its GPU by default.
        """
        texts = {name: _text(value) for name, value in facts.items()} | {"numbers given": str(len(numbers))}
        words = repr(sorted(texts.items())).encode()
        digest = hashlib.blake2b(operator.encode() + words, digest_size=16).digest()
        slot = (failure.pack() if failure else NO_FAILURE) + digest
        slot += struct.pack(f"<q{_NUMBERS}q", len(numbers), *([*numbers] + [0] * _NUMBERS)[:_NUMBERS])
        good = self.check_statuses(operator, self.gather_bytes(slot, device, failure), own)
        if len({each[STATUS : STATUS + 16] for each in good}) > 1:
            raise self._disagreement(operator, texts, device)
        self._delete_notes()
        found = [list(struct.unpack_from(f"<{min(len(numbers), _NUMBERS)}q", each, STATUS + 24)) for each in good]
        for first in range(_NUMBERS, len(numbers), _MORE):
            part = numbers[first : first + _MORE]
            message = NO_FAILURE + struct.pack(f"<{len(part)}q", *part)
            messages = self.check_statuses(operator, self.gather_bytes(message, device))
            for row, each in zip(found, messages, strict=True):
                row.extend(struct.unpack_from(f"<{len(part)}q", each, STATUS))
        return found

    def send_failure(self, failure: Failure) -> None:
        """Take part in the other ranks' `agree` with a failure only, so that they raise instead of waiting."""
        self.gather_bytes(failure.pack().ljust(_SLOT, b"\0"), known=failure)

    def check_statuses(
        self, operator: str, slots: Sequence[bytes | Failure], own: Exception | None = None
    ) -> list[bytes]:
        """The messages, which begin with a status, if no rank failed; else raise the error that all ranks raise.

        Of several failures the first in this order: RAISED, GONE, SILENT; then the earliest step; then the lowest rank.
        When every rank failed by itself, each raises its own error.
        """
        found = [each if isinstance(each, Failure) else Failure.unpack(each) for each in slots]
        known = [each for each in found if each]
        if not known:
            return [each for each in slots if isinstance(each, bytes)]
        if own is not None and all(
            f and f.kind == RAISED and f.rank == rank for f, rank in zip(found, self.ranks, strict=True)
        ):
            raise own
        worst = min(known, key=lambda f: (f.kind, f.step is None, f.step or 0, f.rank))
        raise worst.error(operator) from own

    def gather_bytes(
        self, message: bytes, device: torch.device | None = None, known: Failure | None = None
    ) -> list[bytes | Failure]:
        """All-gather messages of equal length, by rank; for a rank that is gone or silent, that Failure instead.

        `known`: a failure that this rank knows of already, taken as the cause of further lost connections.
        """
        self.traffic.control += len(message) * (self.size - 1)
        if self.size == 1:
            return [message]
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if self.host:
            return self._gather_pairwise(mine, known)
        mine = mine.to(device or torch.device("cuda", torch.cuda.current_device()))
        all_of_them = mine.new_empty(self.size * mine.numel())
        try:
            dist.all_gather_into_tensor(all_of_them, mine, group=self.pg)
        except RuntimeError as error:
            here = Failure(
                GONE, self.ranks[self.rank], None, None, f"its exchange with all others broke: {_line(error)}"
            )
            return [known or here] * self.size
        return [bytes(each.tolist()) for each in all_of_them.cpu().view(self.size, -1)]

    def _gather_pairwise(self, mine: Tensor, known: Failure | None) -> list[bytes | Failure]:
        """All-gather by pairwise sends: half the time of a ring all-gather, and it shows which rank is dead."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        buffers = {rank: torch.empty_like(mine) for rank in others}
        found: list[bytes | Failure] = [mine.numpy().tobytes()] * self.size
        works: dict[int, list[Any]] = {rank: [] for rank in others}
        for rank in others:
            try:
                works[rank].append(dist.irecv(buffers[rank], group=self.pg, group_src=rank, tag=_TAG))
                works[rank].append(dist.isend(mine, group=self.pg, group_dst=rank, tag=_TAG))
            except RuntimeError as error:
                found[rank] = known = known or self.root_cause(rank, error)
        for rank in others:
            if isinstance(found[rank], Failure):
                continue
            try:
                for work in works[rank]:
                    # Once one rank is silent, all that wait for it time out at nearly the same moment.
                    work.wait(timedelta(seconds=_GRACE)) if known and known.kind == SILENT else work.wait()
                found[rank] = buffers[rank].numpy().tobytes()
            except RuntimeError as error:
                found[rank] = known = known or self.root_cause(rank, error)
        return found

    def root_cause(
        self, rank: int, error: RuntimeError, step: int | None = None, direction: str | None = None
    ) -> Failure:
        """The root cause of a broken connection to a rank of this group.

        A rank whose wait times out loses all its connections, so the ranks that wait for it fail too. Each therefore
        writes a note to the process group's store: for whom it waited, and in which step. Following the notes ends at a
        rank that has written none: that one is dead or silent.
        """
        silent = "imed out" in str(error)
        text = "it did not answer within the group's timeout" if silent else "it is gone (its connection closed)"
        failure = Failure(SILENT if silent else GONE, self.ranks[rank], step, direction, text)
        store = _store()
        if store is None:
            return failure
        try:
            store.set(self._key(self.ranks[self.rank]), failure.pack().hex())
            passed = {self.ranks[self.rank]}
            while failure.kind != RAISED and failure.rank not in passed:
                passed.add(failure.rank)
                note = self._note(store, failure.rank)
                if note is None:
                    break
                failure = note
        except RuntimeError as broken:  # the store was in a rank that died
            return failure._replace(text=f"{failure.text}; the store cannot be asked: {_line(broken)}")
        return failure

    def leave_note(self, failure: Failure) -> None:
        """Write to the store that this rank leaves a protocol, for ranks that will wait for it."""
        store = _store()
        if store is not None and self.size > 1:
            self._notes.append(self._key(self.ranks[self.rank]))
            store.set(self._notes[-1], failure.pack().hex())

    def _delete_notes(self) -> None:
        """Delete this rank's notes: after a successful `agree` no rank waits in an earlier protocol."""
        while self._notes and (store := _store()) is not None:
            store.delete_key(self._notes.pop())

    def _note(self, store: dist.Store, rank: int) -> Failure | None:
        """The note of a rank, which has a second to write it; None if there is none."""
        deadline = time.monotonic() + _GRACE
        while not store.check([self._key(rank)]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return Failure.unpack(bytes.fromhex(store.get(self._key(rank)).decode()))

    def _key(self, rank: int) -> str:
        return f"foci/{self.pg.group_name}/{rank}"

    def _disagreement(self, operator: str, told: Mapping[str, str], device: torch.device | None) -> Disagreement:
        words = repr((operator, dict(told))).encode()
        sizes = self.check_statuses(operator, self.gather_bytes(NO_FAILURE + struct.pack("<q", len(words)), device))
        longest = max(struct.unpack_from("<q", each, STATUS)[0] for each in sizes)
        texts = self.check_statuses(operator, self.gather_bytes(NO_FAILURE + words.ljust(longest), device))
        said = [ast.literal_eval(each[STATUS:].decode().strip()) for each in texts]
        facts: dict[str, dict[int, str]] = {}
        if len({name for name, _ in said}) > 1:
            facts["operator"] = {rank: name for rank, (name, _) in zip(self.ranks, said, strict=True)}
        names = dict.fromkeys(name for _, values in said for name in values)
        for name in names:
            values = {rank: each.get(name, "absent") for rank, (_, each) in zip(self.ranks, said, strict=True)}
            if len(set(values.values())) > 1:
                facts[name] = values
        return Disagreement(said[0][0], facts)


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        # A copy: contiguous() leaves one expanded element its stride of 0, which no view as bytes takes.
        flat = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        content = hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes())
        return f"{value.dtype} {list(value.shape)} of values {content.hexdigest()[:16]}"
    return str(value)


def _store() -> dist.Store | None:
    """The default store. torch has no public function for it; without it only error messages are less precise."""
    from torch.distributed import distributed_c10d

    find = getattr(distributed_c10d, "_get_default_store", None)
    return find() if find is not None and dist.is_initialized() else None


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
