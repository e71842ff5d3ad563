"""The ranks that share a sequence, as a value; what they agree on before the first exchange."""

from __future__ import annotations

import ast
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from foci.core.errors import Disagreement, RankError

STATUS = 512  # bytes of a status, which ends every message of a group that can speak by way of the host
_HEAD = struct.Struct("<BBiiH")
_NUMBERS = 60
_SLOT = STATUS + 16 + 8 + 8 * _NUMBERS
_DIRECTIONS = (None, "forward", "backward")
RAISED, GONE, SILENT = 1, 2, 3
_TAG = 7  # messages between two ranks arrive in the order sent: one tag for control, one for data
_DIRECT = 16  # up to so many ranks each tells every other at once, which tells a dead rank from a silent one


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
    ) -> list[list[int]]:
        """Every rank's `numbers`, by rank, once all ranks hold the same facts. One exchange of a kilobyte.

        `facts` are compared as text, tensors among them by their values; so is how many numbers there are. When they
        differ every rank raises the same Disagreement; when a rank comes with a failure, or is gone, a RankError.
        `device`: where a group without a CPU backend gathers, its GPU by default.
        """
        told = {name: _text(value) for name, value in facts.items()} | {"numbers given": str(len(numbers))}
        words = repr(sorted(told.items())).encode()
        digest = hashlib.blake2b(operator.encode() + words, digest_size=16).digest()
        slot = (failure.pack() if failure else WELL) + digest
        slot += struct.pack(f"<q{_NUMBERS}q", len(numbers), *([*numbers] + [0] * _NUMBERS)[:_NUMBERS])
        slots = self.tell(slot, device)
        self.raise_worst(operator, [each if isinstance(each, Failure) else Failure.unpack(each) for each in slots])
        good = [each for each in slots if isinstance(each, bytes)]
        if len({each[STATUS : STATUS + 16] for each in good}) > 1:
            raise self._disagreement(operator, told, device)
        found = [list(struct.unpack_from(f"<{min(len(numbers), _NUMBERS)}q", each, STATUS + 24)) for each in good]
        for first in range(_NUMBERS, len(numbers), _SLOT // 8):
            part = numbers[first : first + _SLOT // 8]
            more = self.tell(struct.pack(f"<{len(part)}q", *part).ljust(_SLOT, b"\0"), device)
            self.raise_worst(operator, [each if isinstance(each, Failure) else None for each in more])
            for row, each in zip(found, more, strict=True):
                assert isinstance(each, bytes)
                row.extend(struct.unpack_from(f"<{len(part)}q", each))
        return found

    def raise_worst(self, operator: str, failures: Sequence[Failure | None]) -> None:
        """Raise the first of these failures, the same on all ranks that know the same: what raised before what left."""
        known = [failure for failure in failures if failure]
        if known:
            raise min(known, key=lambda f: (f.kind, f.step is None, f.step or 0, f.rank)).error(operator)

    def tell(self, message: bytes, device: torch.device | None = None) -> list[bytes | Failure]:
        """Every rank's message of the same length, by rank; where a rank is gone or silent, that Failure instead."""
        self.traffic.control += len(message) * (self.size - 1)
        if self.size == 1:
            return [message]
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if self.host and self.size <= _DIRECT:
            return self._tell_each(mine)
        if not self.host:
            mine = mine.to(device or torch.device("cuda", torch.cuda.current_device()))
        all_of_them = mine.new_empty(self.size * mine.numel())
        try:
            dist.all_gather_into_tensor(all_of_them, mine, group=self.pg)
        except RuntimeError as error:
            unknown = self.blame(self.rank, error)._replace(text=f"the group broke: {_line(error)}")
            return [unknown] * self.size
        return [bytes(each.tolist()) for each in all_of_them.cpu().view(self.size, -1)]

    def _tell_each(self, mine: Tensor) -> list[bytes | Failure]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        buffers = {rank: torch.empty_like(mine) for rank in others}
        found: list[bytes | Failure] = [mine.numpy().tobytes()] * self.size
        works = {}
        for rank in others:
            try:
                incoming = dist.irecv(buffers[rank], group=self.pg, group_src=rank, tag=_TAG)
                works[rank] = (incoming, dist.isend(mine, group=self.pg, group_dst=rank, tag=_TAG))
            except RuntimeError as error:
                found[rank] = self.blame(rank, error)
        for rank, pair in works.items():
            try:
                for work in pair:
                    assert work is not None
                    work.wait()
                found[rank] = buffers[rank].numpy().tobytes()
            except RuntimeError as error:
                found[rank] = self.blame(rank, error)
        return found

    def blame(self, rank: int, error: RuntimeError) -> Failure:
        """What an error of the transport says of a rank of this group."""
        if "imed out" in str(error):
            return Failure(SILENT, self.ranks[rank], None, None, "it did not answer within the group's timeout")
        return Failure(GONE, self.ranks[rank], None, None, "it is gone (its connection closed)")

    def _disagreement(self, operator: str, told: Mapping[str, str], device: torch.device | None) -> Disagreement:
        words = repr((operator, dict(told))).encode()
        sizes = self.tell(struct.pack("<q", len(words)), device)
        self.raise_worst(operator, [each if isinstance(each, Failure) else None for each in sizes])
        longest = max(struct.unpack("<q", each)[0] for each in sizes if isinstance(each, bytes))
        texts = self.tell(words.ljust(longest), device)
        self.raise_worst(operator, [each if isinstance(each, Failure) else None for each in texts])
        said = [ast.literal_eval(each.decode().strip()) for each in texts if isinstance(each, bytes)]
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
        content = hashlib.blake2b(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return f"{value.dtype} {list(value.shape)} of values {content.hexdigest()[:16]}"
    return str(value)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
