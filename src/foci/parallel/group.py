"""The ranks that share a sequence, as a value; what they agree on before the first exchange."""

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

STATUS = 512  # bytes of a status, which ends every message of a group that can speak by way of the host
_HEAD = struct.Struct("<BBiiH")
_NUMBERS = 60
_SLOT = STATUS + 16 + 8 + 8 * _NUMBERS  # what every rank brings to agree: status, hash, numbers
_MORE = 1000
_GRACE = 1.0  # seconds for a rank that lost its connections to say why
_DIRECTIONS = (None, "forward", "backward")
RAISED, GONE, SILENT = 1, 2, 3
_TAG = 7  # messages between two ranks arrive in the order sent: one tag for control, one for data


class Failure(NamedTuple):
    """Which rank of the world failed, how (RAISED, GONE or SILENT), where, and in what words."""

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


WELL = bytes(STATUS)


@dataclass
class Traffic:
    """What this rank has sent to others: bytes of tensors and the messages they went in; bytes of control beside it."""

    bytes: int = 0
    messages: int = 0
    control: int = 0


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that share a sequence: `Group.of(process group or one-dimensional DeviceMesh)`.

    `rank` is this rank's place in the group, `ranks` are their numbers in the world. `host`: it has a backend for CPU
    tensors (gloo), over which ranks agree and tell each other of failures. `traffic` counts what this value sent.
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
        """Every rank's `numbers`, by rank, once all ranks hold the same facts. One exchange of a kilobyte.

        `facts` are compared as text, tensors among them by their values; so is how many numbers there are. When they
        differ every rank raises the same Disagreement. When ranks come with a `failure`, or are gone, all raise the
        same RankError; where every rank failed by itself, each its `own` error. `device`: where a group without a CPU
        backend gathers, its GPU by default.
        """
        told = {name: _text(value) for name, value in facts.items()} | {"numbers given": str(len(numbers))}
        words = repr(sorted(told.items())).encode()
        digest = hashlib.blake2b(operator.encode() + words, digest_size=16).digest()
        slot = (failure.pack() if failure else WELL) + digest
        slot += struct.pack(f"<q{_NUMBERS}q", len(numbers), *([*numbers] + [0] * _NUMBERS)[:_NUMBERS])
        good = self.heard(operator, self.tell(slot, device, failure), own)
        if len({each[STATUS : STATUS + 16] for each in good}) > 1:
            raise self._disagreement(operator, told, device)
        self._take_back()
        found = [list(struct.unpack_from(f"<{min(len(numbers), _NUMBERS)}q", each, STATUS + 24)) for each in good]
        for first in range(_NUMBERS, len(numbers), _MORE):
            part = numbers[first : first + _MORE]
            message = WELL + struct.pack(f"<{len(part)}q", *part)
            for row, each in zip(found, self.heard(operator, self.tell(message, device)), strict=True):
                row.extend(struct.unpack_from(f"<{len(part)}q", each, STATUS))
        return found

    def decline(self, failure: Failure) -> None:
        """Answer ranks that come to agree, where this one cannot even ask: they raise, and so will it."""
        self.tell(failure.pack().ljust(_SLOT, b"\0"), known=failure)

    def heard(self, operator: str, slots: Sequence[bytes | Failure], own: Exception | None = None) -> list[bytes]:
        """Messages that begin with a status, when all ranks are well; else the error that all of them raise.

        Of several failures the first in this order: one that raised, one that is gone, one that is silent; the earliest
        step; the lowest rank. Where every rank failed by itself, each raises its own error.
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

    def tell(
        self, message: bytes, device: torch.device | None = None, known: Failure | None = None
    ) -> list[bytes | Failure]:
        """Every rank's message of the same length, by rank; where a rank is gone or silent, that Failure instead.

        `known`: the failure that this rank knows of already, to which further lost connections are due.
        """
        self.traffic.control += len(message) * (self.size - 1)
        if self.size == 1:
            return [message]
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if self.host:
            return self._tell_each(mine, known)
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

    def _tell_each(self, mine: Tensor, known: Failure | None) -> list[bytes | Failure]:
        """Each tells every other at once: half as long as a gather round all, and it is known who is dead."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        buffers = {rank: torch.empty_like(mine) for rank in others}
        found: list[bytes | Failure] = [mine.numpy().tobytes()] * self.size
        works: dict[int, list[Any]] = {rank: [] for rank in others}
        for rank in others:
            try:
                works[rank].append(dist.irecv(buffers[rank], group=self.pg, group_src=rank, tag=_TAG))
                works[rank].append(dist.isend(mine, group=self.pg, group_dst=rank, tag=_TAG))
            except RuntimeError as error:
                found[rank] = known = known or self.blame(rank, error)
        for rank in others:
            if isinstance(found[rank], Failure):
                continue
            try:
                for work in works[rank]:
                    # Once one is silent, all that wait for it give up within a moment of each other.
                    work.wait(timedelta(seconds=_GRACE)) if known and known.kind == SILENT else work.wait()
                found[rank] = buffers[rank].numpy().tobytes()
            except RuntimeError as error:
                found[rank] = known = known or self.blame(rank, error)
        return found

    def blame(self, rank: int, error: RuntimeError, step: int | None = None, direction: str | None = None) -> Failure:
        """Which failure a broken connection to a rank of this group is due to.

        A rank that waits in vain loses all its connections, and so do those that wait for it. Each therefore leaves a
        note in the store of the process group, of whom it waited for and where; whoever lost it reads on from there,
        until a rank that has left none: that one is dead or silent.
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
        except RuntimeError as broken:  # the store went with the rank that kept it
            return failure._replace(text=f"{failure.text}; the store cannot be asked: {_line(broken)}")
        return failure

    def leave_note(self, failure: Failure) -> None:
        """Say in the store that this rank leaves a protocol, for those who will wait for it."""
        store = _store()
        if store is not None and self.size > 1:
            self._notes.append(self._key(self.ranks[self.rank]))
            store.set(self._notes[-1], failure.pack().hex())

    def _take_back(self) -> None:
        """Once all ranks have come to agree again nobody waits for what an old note is about."""
        while self._notes and (store := _store()) is not None:
            store.delete_key(self._notes.pop())

    def _note(self, store: dist.Store, rank: int) -> Failure | None:
        """What a rank left behind, for which it has a second."""
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
        sizes = self.heard(operator, self.tell(WELL + struct.pack("<q", len(words)), device))
        longest = max(struct.unpack_from("<q", each, STATUS)[0] for each in sizes)
        texts = self.heard(operator, self.tell(WELL + words.ljust(longest), device))
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
    """The store of the process groups. torch has no public name for it; without it words are less exact, no more."""
    from torch.distributed import distributed_c10d

    find = getattr(distributed_c10d, "_get_default_store", None)
    return find() if find is not None and dist.is_initialized() else None


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
