"""Communication between ranks: collectives whose messages carry a failure status, and their differentiable forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from foci.core.errors import Disagreement, RankError
from foci.core.spec import accumulator
from foci.parallel.group import NO_FAILURE, RAISED, STATUS, Failure, Group

Result = TypeVar("Result")
Shape = Sequence[int]
_TAG = 8
_ALIGNED = 16  # bytes: alignment of tensors within a message, so that any dtype can view them


# The enclosing protocol, while its `compute` or `run_nested` runs: one started within takes over its failure.
_enclosing: ContextVar[Session | None] = ContextVar("enclosing", default=None)


class Session:
    """One protocol (sequence of exchanges) of a group: its operator, direction and step for errors; its first failure.

        with Session(group, "attention", "forward") as session:
            numbers = session.agree(facts, [T])
            for session.step in range(group.size):
                pending = shift([k, v], shapes, +1, session)          # the next block is on its way ...
                part = session.compute(attend, k, v)                     # ... while this one is computed
                k, v = pending.wait()

    If what `compute` runs raises, this rank still takes part in all remaining exchanges, with a failure status in its
    messages, so that no other rank deadlocks; so does every rank that receives the status. From then on `compute` gives
    None at once, and received tensors have the right shapes but arbitrary values. At the end of the block ranks
    exchange statuses, and all raise the same RankError, or each its own error if all failed alike. A group without a
    CPU backend has no status: an error is raised at once, and the others fail by the group's timeout.
    """

    def __init__(self, group: Group, operator: str, direction: str | None = None, nested: Sequence[Group] = ()) -> None:
        """`nested`: groups of protocols nested in this one (`run_nested`); if it fails before, it tells theirs."""
        self.group, self.operator, self.direction, self.nested = group, operator, direction, nested
        self.step: int | None = None
        around = _enclosing.get()
        self.failure: Failure | None = None if around is None else around.failure
        self.nests = False
        self.place: int | None = None if around is None or not around.nests else around.group.rank
        self.own_error: Exception | None = None
        self.lost_ranks: set[int] = set()
        self.messages: list[StorageWeakRef] = []  # received messages, which can be forwarded without a copy

    def agree(self, facts: Mapping[str, object], numbers: Sequence[int] = ()) -> list[list[int]]:
        """Group.agree, with this rank's failure so far; nested in others, ranks have one place in the group around."""
        if self.place is not None:
            facts = {**facts, "this rank's place in the group around": self.place}
        return self.group.agree(self.operator, facts, numbers, failure=self.failure, own=self.own_error)

    def compute(self, function: Callable[..., Result], *args: Any) -> Result | None:
        """`function(*args)`, or None once this protocol has failed here or elsewhere."""
        return None if self.failure is not None else self._run(function, *args)

    def run_nested(self, function: Callable[..., Result], *args: Any) -> Result | None:
        """`compute` that is itself a protocol: it runs also after a failure, so that its other ranks learn of it."""
        self.nested, self.nests = (), True
        return self._run(function, *args)

    def _run(self, function: Callable[..., Result], *args: Any) -> Result | None:
        before = _enclosing.set(self)
        try:
            return function(*args)
        except Exception as error:
            if not self.group.host:
                raise
            if self.failure is None:
                self.own_error, self.failure = error, self._failure(error)
            return None
        finally:
            _enclosing.reset(before)

    def record_failure(self, failure: Failure | None) -> None:
        """Record a failure; the first one counts."""
        if failure is not None and self.failure is None:
            step = self.step if failure.step is None else failure.step
            self.failure = failure._replace(step=step, direction=failure.direction or self.direction)

    def record_lost_rank(self, rank: int, error: RuntimeError) -> None:
        """Record that a rank of the group no longer answers: nothing more is sent to it or received from it."""
        self.lost_ranks.add(rank)
        if self.failure is None:
            self.record_failure(self.group.root_cause(rank, error, self.step, self.direction))

    @property
    def status(self) -> bytes:
        return self.failure.pack() if self.failure is not None else NO_FAILURE

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._settle()
            return
        if isinstance(error, Exception):
            for group in self.nested:
                group.send_failure(self.failure or self._failure(error))
        # Errors raised by `check_statuses`, also this rank's own, are known to all ranks; of others a note is left.
        if (
            isinstance(error, Exception)
            and error is not self.own_error
            and not isinstance(error, RankError | Disagreement)
        ):
            self.group.leave_note(self._failure(error))

    def _settle(self) -> None:
        if self.group.size == 1 or not self.group.host:
            if self.own_error is not None:
                raise self.own_error
            return
        slots = self.group.gather_bytes(self.status, known=self.failure)
        self.group.check_statuses(self.operator, [self._placed(each) for each in slots], self.own_error)

    def _placed(self, slot: bytes | Failure) -> bytes | Failure:
        """Add the step and direction to the Failure of a rank lost in the final exchange."""
        if isinstance(slot, Failure) and slot.step is None and slot.kind != RAISED:
            return slot._replace(step=self.step, direction=self.direction)
        return slot

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, RankError):  # of a group within
            return Failure(RAISED, error.rank, error.step, error.direction, error.reason)
        text = f"{type(error).__name__}: {error}".strip()
        return Failure(RAISED, self.group.ranks[self.group.rank], self.step, self.direction, text)


def checked(groups: Sequence[Group], operator: str, function: Callable[..., Result], *args: Any) -> Result:
    """`function(*args)`, after which the ranks of these groups begin a protocol, the first group's first.

    When it raises here they hear of it where they agree, and all raise as of any other work.
    """
    try:
        return function(*args)
    except Exception as error:
        if groups and groups[0].host:
            session = Session(groups[0], operator, "forward", groups[1:])
            session.own_error, session.failure = error, session._failure(error)
            with session:
                session.agree({})
        raise


def declining(groups: Sequence[Group], function: Callable[..., Result], *args: Any) -> Result:
    """`function(*args)`, in which ranks agree before these groups' do: who fails there declines to all of them."""
    try:
        return function(*args)
    except Exception as error:
        for group in groups:
            group.send_failure(Session(group, "")._failure(error))
        raise


def gather_counts(
    operator: str, groups: Sequence[Group], numbers: Sequence[int], facts: Mapping[str, object] | None = None
) -> list[list[int]]:
    """Check that facts are equal on all ranks of all groups, and gather their numbers, in the order of their shards."""
    rows = [list(numbers)]
    for place, group in enumerate(groups):
        flat = [number for row in rows for number in row]
        shared = {"counts": len(numbers), **(facts or {})}
        every = declining(groups[place + 1 :], group.agree, operator, shared, flat)
        told = [number for row in every for number in row]
        rows = [told[start : start + len(numbers)] for start in range(0, len(told), len(numbers))]
    return rows


class Pending:
    """A transfer in flight; `wait()` returns the received tensors."""

    def __init__(self, finish: Callable[[], list[list[Tensor]]]) -> None:
        self._finish = finish

    def wait(self) -> list[Tensor]:
        return self._finish()[0]


def shift(tensors: Sequence[Tensor], shapes: Sequence[Shape], by: int, session: Session) -> Pending:
    """Send tensors to rank (r + by) % size, and receive tensors of these shapes from rank (r - by) % size.

    Received tensors have the dtypes and devices of those sent. Both transfers are in flight until `.wait()`; do not
    write to the tensors before.
    """
    group = session.group
    if by % group.size == 0:
        return Pending(lambda: [list(tensors)])
    to, source = (group.rank + by) % group.size, (group.rank - by) % group.size
    return Pending(_start({to: tensors}, {source: shapes}, tensors, session))


def all_to_all(parts: Sequence[Tensor], shapes: Sequence[Shape], session: Session) -> list[Tensor]:
    """Send parts[r] to each rank r; return the parts received, by rank, of these shapes. The own part is not copied."""
    return [each[0] for each in exchange([[part] for part in parts], [[shape] for shape in shapes], session)]


def exchange(
    parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]], session: Session
) -> list[Sequence[Tensor]]:
    """all_to_all of several tensors in one message: parts[r] are sent to rank r, shapes[r] are received from it."""
    here = session.group.rank
    sent = {rank: each for rank, each in enumerate(parts) if rank != here}
    expected = {rank: each for rank, each in enumerate(shapes) if rank != here}
    arrived = dict(zip(expected, _start(sent, expected, parts[here], session)(), strict=True))
    return [parts[here] if rank == here else arrived[rank] for rank in range(session.group.size)]


def all_gather(tensor: Tensor, shapes: Sequence[Shape], session: Session) -> list[Tensor]:
    """Every rank's tensor, by rank: shapes[r] is the shape of rank r's, and may differ from rank to rank."""
    return all_to_all([tensor] * session.group.size, shapes, session)


def sum_scatter(parts: Sequence[Tensor], session: Session) -> Tensor:
    """Reduce-scatter: the sum over ranks of parts[this rank], in rank order and in float32 at least."""
    mine = parts[session.group.rank]
    arrived = all_to_all(parts, [mine.shape] * session.group.size, session)
    total = arrived[0].to(accumulator(mine.dtype), copy=True)
    for part in arrived[1:]:
        total += part
    return total.to(mine.dtype)


def all_reduce(tensor: Tensor, session: Session) -> Tensor:
    """The sum over ranks, bitwise equal on each; a rank sends 2 (n - 1) / n times its bytes. Not in place."""
    group = session.group
    if group.size == 1:
        return tensor.clone()
    flat = tensor.contiguous().flatten()
    sizes = [len(range(rank, flat.numel(), group.size)) for rank in range(group.size)]
    mine = sum_scatter(flat.split(sizes), session)
    return torch.cat(all_gather(mine, [[size] for size in sizes], session)).view(tensor.shape)


def swap(parts: Sequence[Tensor], shapes: Sequence[Shape], group: Group, operator: str) -> tuple[Tensor, ...]:
    """all_to_all, differentiable: the gradient of each part is sent back to its source rank."""
    swapped: tuple[Tensor, ...] = _Swap.apply(group, operator, "forward", [tuple(shape) for shape in shapes], *parts)
    return swapped


def gather(tensor: Tensor, shapes: Sequence[Shape], group: Group, operator: str) -> tuple[Tensor, ...]:
    """all_gather, differentiable: the gradient is summed over ranks."""
    return swap([tensor] * group.size, shapes, group, operator)


def sum_gradient(tensor: Tensor, group: Group, operator: str) -> Tensor:
    """Identity whose gradient is all-reduced: for a replicated tensor that each rank uses for its own tokens."""
    same: Tensor = _SumGradient.apply(tensor, group, operator)
    return same


def divide_gradient(tensor: Tensor, count: int) -> Tensor:
    """Identity whose gradient is divided by `count`: for where each of `count` ranks computes the same full gradient.

    No communication. The sum over ranks is then the full gradient, as it is for tensors used on a rank's own tokens.
    """
    same: Tensor = _DivideGradient.apply(tensor, count)
    return same


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Group, operator: str, direction: str, shapes: list[tuple[int, ...]], *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.operator = group, operator
        ctx.shapes = [part.shape for part in parts]
        with Session(group, operator, direction) as session:
            arrived = all_to_all(parts, shapes, session)
        arrived[group.rank] = arrived[group.rank].clone()  # an input may not be returned as it is
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, None, None, None, *_Swap.apply(ctx.group, ctx.operator, "backward", ctx.shapes, *grads)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, operator: str) -> Tensor:
        ctx.group, ctx.operator = group, operator
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _Summed.apply(grads[0], ctx.group, ctx.operator), None, None


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> Tensor:
        ctx.count = count
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0] / ctx.count, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, group: Group, operator: str) -> Tensor:
        ctx.group, ctx.operator = group, operator
        with Session(group, operator, "backward") as session:
            return all_reduce(grad, session)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _Summed.apply(grads[0], ctx.group, ctx.operator), None, None


def _start(
    sent: Mapping[int, Sequence[Tensor]],
    expected: Mapping[int, Sequence[Shape]],
    like: Sequence[Tensor],
    session: Session,
) -> Callable[[], list[list[Tensor]]]:
    """Start sends and receives; returns a function that waits for them and returns the received tensors."""
    group = session.group
    device = like[0].device
    for tensors in sent.values():
        group.traffic.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        group.traffic.messages += 1
    if device.type not in group.staged:
        return _start_on_device(sent, expected, like, session)
    works: list[tuple[int, Any]] = []
    buffers: dict[int, Tensor] = {}
    outgoing: dict[int, Tensor] = {}
    for source, shapes in expected.items():
        buffers[source] = torch.empty(_layout(shapes, like)[-1] + STATUS, dtype=torch.uint8, device="cpu")
        if source not in session.lost_ranks:
            _start_one(dist.irecv, buffers[source], {"group_src": source}, source, works, session)
    packed: dict[int, Tensor] = {}
    for to, tensors in sent.items():
        key = id(tensors[0]) if len(tensors) == 1 else to
        outgoing[to] = packed[key] = packed[key] if key in packed else _pack(tensors, session)
        group.traffic.control += STATUS
        if to not in session.lost_ranks:
            _start_one(dist.isend, outgoing[to], {"group_dst": to}, to, works, session)

    def finish() -> list[list[Tensor]]:
        for rank, work in works:
            if rank not in session.lost_ranks:
                try:
                    work.wait()
                except RuntimeError as error:
                    session.record_lost_rank(rank, error)
        outgoing.clear()
        packed.clear()
        session.messages = [message for message in session.messages if not message.expired()]
        session.messages += [StorageWeakRef(buffer.untyped_storage()) for buffer in buffers.values()]
        for rank, buffer in buffers.items():
            if rank not in session.lost_ranks:
                session.record_failure(Failure.unpack(buffer[-STATUS:].numpy().tobytes()))
        return [_unpack(buffers[rank], shapes, like) for rank, shapes in expected.items()]

    return finish


def _start_one(
    start: Any, buffer: Tensor, peer: dict[str, int], rank: int, works: list[tuple[int, Any]], session: Session
) -> None:
    try:
        works.append((rank, start(buffer, group=session.group.pg, tag=_TAG, **peer)))
    except RuntimeError as error:
        session.record_lost_rank(rank, error)


def _start_on_device(
    sent: Mapping[int, Sequence[Tensor]],
    expected: Mapping[int, Sequence[Shape]],
    like: Sequence[Tensor],
    session: Session,
) -> Callable[[], list[list[Tensor]]]:
    """The same by device-to-device transfers, tensor by tensor, without a status; empty tensors are not sent."""
    pg = session.group.pg
    arriving = {
        rank: [
            torch.empty(shape, dtype=each.dtype, device=each.device) for shape, each in zip(shapes, like, strict=True)
        ]
        for rank, shapes in expected.items()
    }
    operations = [
        dist.P2POp(dist.irecv, tensor, group=pg, group_peer=rank)
        for rank, tensors in arriving.items()
        for tensor in tensors
        if tensor.numel()
    ]
    operations += [
        dist.P2POp(dist.isend, tensor.contiguous(), group=pg, group_peer=rank)
        for rank, tensors in sent.items()
        for tensor in tensors
        if tensor.numel()
    ]
    works = dist.batch_isend_irecv(operations) if operations else []

    def finish() -> list[list[Tensor]]:
        for work in works:
            work.wait()
        operations.clear()
        return list(arriving.values())

    return finish


def zeros_in_message(shapes: Sequence[Shape], like: Sequence[Tensor], session: Session) -> list[Tensor]:
    """Zeros of these shapes, with dtypes and device of `like`, laid out as a message so that sending needs no copy."""
    if like[0].device.type != "cpu" or "cpu" not in session.group.staged:
        return [each.new_zeros(tuple(shape)) for shape, each in zip(shapes, like, strict=True)]
    message = torch.zeros(_layout(shapes, like)[-1] + STATUS, dtype=torch.uint8, device="cpu")
    session.messages.append(StorageWeakRef(message.untyped_storage()))
    return _unpack(message, shapes, like)


def _layout(shapes: Sequence[Shape], like: Sequence[Tensor]) -> list[int]:
    """The byte offset of each tensor in a message, and the end of the last."""
    places = [0]
    for shape, each in zip(shapes, like, strict=True):
        size = math.prod(shape) * each.element_size()
        places.append(places[-1] + -(-size // _ALIGNED) * _ALIGNED)
    return places


def _pack(tensors: Sequence[Tensor], session: Session) -> Tensor:
    """Tensors packed into one message; a received message whose tensors are forwarded unchanged is reused."""
    places = _layout([tensor.shape for tensor in tensors], tensors)
    storage = tensors[0].untyped_storage()
    reusable = storage.nbytes() == places[-1] + STATUS and all(
        tensor.is_contiguous()
        and tensor.untyped_storage()._cdata == storage._cdata
        and tensor.storage_offset() * tensor.element_size() == place
        for tensor, place in zip(tensors, places, strict=False)
    )
    # A weak reference keeps what it refers to from becoming another's, whether or not that is still alive.
    if reusable and any(message.cdata == storage._cdata for message in session.messages):
        message = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (places[-1] + STATUS,), (1,))
    else:
        message = torch.empty(places[-1] + STATUS, dtype=torch.uint8, device="cpu")
        for tensor, place in zip(tensors, places, strict=False):
            if tensor.numel():
                size = tensor.numel() * tensor.element_size()
                message[place : place + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    message[-STATUS:] = torch.frombuffer(bytearray(session.status), dtype=torch.uint8)
    return message


def _unpack(message: Tensor, shapes: Sequence[Shape], like: Sequence[Tensor]) -> list[Tensor]:
    found = []
    for shape, each, place in zip(shapes, like, _layout(shapes, like), strict=False):
        size = math.prod(shape) * each.element_size()
        found.append(message[place : place + size].view(each.dtype).view(tuple(shape)).to(each.device))
    return found
