"""A parallel function as an ordinary one: whole tensors in, a share for every rank, and what comes back is joined."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from foci.check import diagnose
from foci.check.orders import Places, cut, join
from foci.core.world import Lost, Raised, World

GROUPS = ("group", "process_group", "pg", "cp_group", "sp_group", "ring_group", "ulysses_group")
MESHES = ("mesh", "device_mesh", "cp_mesh")
ORDER = "order"
TEXTS = (("text_q", "text_k", "text_v"), ("joint_query", "joint_key", "joint_value"))
IMPORTING = 60.0  # seconds that ranks may differ in importing a callable
ALONE = 3.0  # seconds after which a rank that raised takes it that it alone has
PATIENCE = 2  # times that ranks may be lost before no more are started


class Fatal(RuntimeError):
    """Ranks that died, hung or left each other waiting; the message is the whole sentence."""

    sentence = True


@dataclass(frozen=True)
class Named:
    """A callable by its module and name, as every rank can import it, and the folder in which it was named."""

    module: str
    name: str
    folder: str = ""

    def load(self) -> Callable[..., Any]:
        if self.folder and self.module not in sys.modules and self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        called: Callable[..., Any] = found
        return called

    def face(self) -> Callable[..., Any]:
        """What shows the signature."""
        return self.load()


@dataclass(frozen=True)
class Given:
    """A callable that pickles by its name."""

    function: Callable[..., Any]

    def load(self) -> Callable[..., Any]:
        return self.function

    def face(self) -> Callable[..., Any]:
        return self.function


class Target(Protocol):
    """How ranks come to a callable."""

    def load(self) -> Callable[..., Any]: ...

    def face(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class Roles:
    """How the tensors of a function lie over ranks.

    `split(parameter, tensor)`: the dimension of an argument that is cut, None for one that every rank gets whole.
    `joined(number, shard, tokens)`: the dimension along which the shards of an output of so many local tokens are
    joined, None for one that is the same on every rank. `lies(leaf, tensor)`: as `split`, of the operator's own
    arguments in the operator's own layout. `tokens`: the dimension of a sequence in q. `share(value, places)`: what
    each rank gets of an argument that is no tensor, None where all get it as it is.
    """

    split: Callable[[str, Tensor], int | None]
    joined: Callable[[int, Tensor, int], int | None]
    lies: Callable[[str, Tensor], int | None]
    tokens: int = 1
    share: Callable[[Any, Callable[[int], Places]], list[Any] | None] = lambda value, places: None


class Job(NamedTuple):
    """One call of every rank: arguments by parameter, by rank where they are cut, and gradients of the outputs."""

    target: Target
    order: str
    shards: Mapping[str, list[Tensor]]
    plain: Mapping[str, Any]
    shared: Mapping[str, list[Any]]
    wants: frozenset[str]
    grads: list[list[Tensor | None]] | None


class Answer(NamedTuple):
    """What a rank gave: outputs, whether each can have a gradient, whether it was one tensor, gradients, changes."""

    outputs: list[Tensor]
    differentiable: list[bool]
    single: bool
    gradients: dict[str, Tensor | None]
    changed: dict[str, Tensor]


@dataclass(frozen=True)
class Refused:
    """What a rank raised while all others raised too: nobody waits for anybody, and all can go on."""

    error: Exception


def prepare(target: Target) -> None:
    """Import what a rank will call, before anybody waits for it, and open the way on which ranks say they raised."""
    target.load()
    dist.monitored_barrier(timeout=timedelta(seconds=IMPORTING))
    _aside()


def work(job: Job) -> Answer | Refused:
    """A rank's part of a call, and of its backward where gradients of the outputs are given."""
    try:
        return _work(job)
    except Exception as error:
        if waited(error) or not _together():
            raise
        return Refused(_portable(error))


@cache
def _aside() -> dist.ProcessGroup | None:
    """A group of all ranks beside theirs, on which nothing of the function's is under way."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=IMPORTING))


def _together() -> bool:
    """Whether every rank comes here within ALONE seconds."""
    try:
        dist.monitored_barrier(_aside(), timeout=timedelta(seconds=ALONE))
    except RuntimeError as error:
        return not str(error)
    return True


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as problem:
        return RuntimeError(f"{type(error).__name__}: {error} (not pickled: {problem})")
    return error


def _work(job: Job) -> Answer:
    rank = dist.get_rank()
    function = job.target.load()
    tensors = {name: shards[rank].clone() for name, shards in job.shards.items()}
    for name in job.wants:
        tensors[name].requires_grad_()
    result = function(**_arguments(function, job), **tensors)
    single = isinstance(result, Tensor)
    outputs = [result] if single else list(result) if isinstance(result, tuple | list) else [result]
    if not all(isinstance(output, Tensor) for output in outputs):
        kinds = ", ".join(type(output).__name__ for output in outputs)
        raise TypeError(
            f"it returns {type(result).__name__} ({kinds}) where a tensor or a tuple of tensors is expected"
        )
    gradients = {} if job.grads is None else _backward(outputs, job.grads[rank], tensors, job.wants)
    changed = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if not torch.equal(tensor.detach().nan_to_num(), job.shards[name][rank].nan_to_num())
    }
    can = [output.requires_grad for output in outputs]
    return Answer([output.detach() for output in outputs], can, single, gradients, changed)


def _arguments(function: Callable[..., Any], job: Job) -> dict[str, Any]:
    """What every rank gets alike: settings, and the group under the name that the function has for it."""
    given = dict(job.plain) | {name: values[dist.get_rank()] for name, values in job.shared.items()}
    for name in parameters(function):
        if name in GROUPS:
            given[name] = dist.group.WORLD
        elif name in MESHES:
            given[name] = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        elif name == ORDER:
            given[name] = job.order
    return given


def _backward(
    outputs: list[Tensor], grads: list[Tensor | None], tensors: dict[str, Tensor], wants: frozenset[str]
) -> dict[str, Tensor | None]:
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad and g is not None]
    names = sorted(wants)
    if not pairs or not names:
        return dict.fromkeys(names)
    roots, weights = [root for root, _ in pairs], [weight.to(root.dtype) for root, weight in pairs]
    with diagnose.inherited(roots):
        found = torch.autograd.grad(roots, [tensors[name] for name in names], weights, allow_unused=True)
    return dict(zip(names, found, strict=True))


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    if isinstance(function, torch.nn.Module):
        function = function.forward
    return inspect.signature(function).parameters


@dataclass
class Ranks:
    """A function of whole tensors that runs `target` on the ranks of a world, differentiable as a whole.

    `places(length)`: which positions each rank holds; `order`: how that is called. Whatever is cut over ranks gets the
    gradient of its shard, joined; what every rank gets whole must come back with the same, whole gradient on each, and
    where the ranks differ the one that is farthest from the others is taken. `copies` keeps those of the last backward.
    `ours`: what raises where shards are not alike has not honestly refused.
    """

    world: World
    target: Target
    roles: Roles
    places: Callable[[int], Places]
    order: str = "plain"
    ours: bool = False
    copies: dict[str, list[Tensor]] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    uneven: str = ""
    ready: bool = False

    def __post_init__(self) -> None:
        self.func = self.target.face()  # where its annotations are
        found = parameters(self.func)
        self.__name__ = getattr(self.func, "__name__", type(self.func).__name__)
        self.text = next((names for names in TEXTS if all(name in found for name in names)), None)
        hidden = {*GROUPS, *MESHES, ORDER, *(self.text or ())}
        shown = [parameter for name, parameter in found.items() if name not in hidden]
        self.__signature__ = inspect.Signature(shown)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = list(self.__signature__.parameters)[: len(args)]
        given = dict(zip(names, args, strict=True)) | kwargs
        return self._joint(given) if self.text else self._run(given)

    def _joint(self, given: dict[str, Any]) -> Any:
        """The first tokens as text, which every rank gets whole; the text's output in front of the others'."""
        dim = self.roles.tokens
        assert self.text is not None
        first = list(given)[:3]
        length = self.words(given[first[0]].shape[dim])
        for name, text in zip(first, self.text, strict=True):
            whole = given[name]
            given[text] = whole.narrow(dim, 0, length)
            given[name] = whole.narrow(dim, length, whole.shape[dim] - length)
        result = self._run(given)
        if isinstance(result, tuple) and len(result) == 2:
            return torch.cat([result[1], result[0]], dim)
        return result

    def words(self, length: int) -> int:
        """How many tokens of a joint sequence are text: two for each rank, where as many are left."""
        return min(2 * self.world.size, max(length - 2 * self.world.size, 0)) if self.text else 0

    def _run(self, given: dict[str, Any]) -> Any:
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in given.items() if name not in tensors}
        frame = _Frame(self, tuple(tensors), plain)
        outputs = _Across.apply(frame, *tensors.values())
        return outputs[0] if frame.single else outputs

    def dimension(self, name: str, tensor: Tensor) -> int | None:
        """Where a tensor is cut; text is not."""
        return None if self.text and name in self.text else self.roles.split(name, tensor)

    def ask(self, job: Job) -> list[Answer]:
        """Every rank's answer. Raises what all raised, or Fatal where only some did, or a rank died or hung."""
        uneven = any(len({shard.shape for shard in shards}) > 1 for shards in job.shards.values())
        if uneven and self.uneven:
            raise Fatal(self.uneven)
        if len(self.losses) >= PATIENCE:
            raise Fatal(self.losses[-1])
        if not self.ready:
            self.world.run(prepare, self.target)
        outcomes = self.world.outcomes(work, job)
        self.ready = not any(isinstance(each, Raised | Lost) for each in outcomes)
        refused = [each.error for each in outcomes if isinstance(each, Refused)]
        if len(refused) == len(outcomes):
            if uneven and not self.ours:
                reason = f"lengths that the ranks do not share equally: it raises {type(refused[0]).__name__}"
                raise NotImplementedError(reason) from refused[0]
            raise refused[0]
        failed = {rank: each for rank, each in enumerate(outcomes) if isinstance(each, Raised | Lost)}
        if not failed:
            return outcomes
        sentence = _fatal(failed, self.world)
        if uneven:
            self.uneven = f"where a length is no multiple of the ranks, {sentence}"
            raise Fatal(self.uneven)
        self.losses.append(sentence)
        raise Fatal(sentence)


def _fatal(failed: Mapping[int, Raised | Lost], world: World) -> str:
    """One sentence for ranks that did not answer together."""
    died = {rank: each.reason for rank, each in failed.items() if isinstance(each, Lost) and each.died}
    silent = {rank: each.reason for rank, each in failed.items() if isinstance(each, Lost) and not each.died}
    own = {rank: each.error for rank, each in failed.items() if isinstance(each, Raised) and not waited(each.error)}
    if died:
        rank, reason = next(iter(died.items()))
        return f"rank {rank} died: {reason}; the whole job would be gone"
    if own:
        rank, error = next(iter(own.items()))
        others = ranks_said([each for each in range(world.size) if each not in own])
        waiting = f", while {others} waited for it until the group's timeout: a hang" if len(own) < world.size else ""
        return f"rank {rank} raised {type(error).__name__}: {diagnose.first_line(error)}{waiting}"
    if silent:
        return f"it hangs: {'; '.join(f'rank {rank}: {reason}' for rank, reason in silent.items())}"
    stuck, idle = sorted(failed), [rank for rank in range(world.size) if rank not in failed]
    whom = f"for {ranks_said(idle)}, which had finished," if idle else "for each other"
    return f"it hangs: {ranks_said(stuck)} waited {whom} until {world.timeout:.0f} s were over"


def ranks_said(ranks: Iterable[int]) -> str:
    """Ranks as people say them."""
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def waited(error: Exception) -> bool:
    """Whether an exception is what the other ranks left this one with: a timeout or a closed connection."""
    text = str(error).lower()
    kinds = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "socket closed")
    return any(kind in text for kind in kinds)


@dataclass
class _Frame:
    """One call as its backward needs it."""

    ranks: Ranks
    names: tuple[str, ...]
    plain: dict[str, Any]
    single: bool = True

    def job(
        self, tensors: tuple[Tensor, ...], wants: frozenset[str], grads: list[list[Tensor | None]] | None = None
    ) -> Job:
        ranks, shards = self.ranks, {}
        for name, tensor in zip(self.names, tensors, strict=True):
            shards[name] = self.cut(tensor, ranks.dimension(name, tensor))
        shared = {name: ranks.roles.share(value, ranks.places) for name, value in self.plain.items()}
        own = {name: values for name, values in shared.items() if values is not None}
        return Job(ranks.target, ranks.order, shards, self.plain, own, wants, grads)

    def cut(self, tensor: Tensor, dim: int | None) -> list[Tensor]:
        whole = tensor.detach()
        if dim is None:
            return [whole.clone()] * self.ranks.world.size
        return cut(whole, dim, self.ranks.places(whole.shape[dim]))

    def join(self, shards: list[Tensor], dim: int | None, name: str = "") -> Tensor:
        if dim is None:
            if name:
                self.ranks.copies[name] = shards
            return farthest(shards)
        total = sum(shard.shape[dim] for shard in shards)
        return join(shards, dim, self.ranks.places(total))


def farthest(copies: list[Tensor]) -> Tensor:
    """The copy that is farthest from the others; where all are equally far, the last."""
    if any(copy.shape != copies[0].shape for copy in copies):
        return copies[-1]
    stack = torch.stack([copy.double().nan_to_num() for copy in copies])
    distance = (stack - stack.median(0).values).flatten(1).norm(dim=1)
    return copies[len(copies) - 1 - int(distance.flip(0).argmax())] if bool(distance.any()) else copies[0]


class _Across(torch.autograd.Function):
    """The outputs of all ranks, joined; its backward asks the ranks again, forward and backward."""

    @staticmethod
    def forward(ctx: Any, frame: _Frame, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        wants = frozenset(name for name, need in zip(frame.names, ctx.needs_input_grad[1:], strict=True) if need)
        answers = frame.ranks.ask(frame.job(tensors, wants))
        frame.single = answers[0].single
        _spoil(frame, tensors, answers)
        first = frame.job(tensors, wants).shards[frame.names[0]]
        ctx.dims = [
            frame.ranks.roles.joined(number, shard, first[0].shape[frame.ranks.roles.tokens])
            for number, shard in enumerate(answers[0].outputs)
        ]
        if frame.ranks.text and len(ctx.dims) == 2:
            ctx.dims[1] = None
        outputs = [frame.join([a.outputs[i] for a in answers], dim) for i, dim in enumerate(ctx.dims)]
        can = [any(a.differentiable[i] for a in answers) for i in range(len(outputs))]
        ctx.mark_non_differentiable(*(o for o, able in zip(outputs, can, strict=True) if not able))
        ctx.frame, ctx.wants = frame, wants
        ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        frame, tensors = ctx.frame, ctx.saved_tensors
        size = frame.ranks.world.size
        none = [None] * size
        # What all ranks hold alike is in the loss of each: an equal share, so that their sum counts it once.
        cuts = [
            none if g is None else frame.cut(g / size if dim is None else g, dim)
            for g, dim in zip(grads, ctx.dims, strict=True)
        ]
        by_rank: list[list[Tensor | None]] = [list(each) for each in zip(*cuts, strict=True)]
        answers = frame.ranks.ask(frame.job(tensors, ctx.wants, by_rank))
        found: list[Tensor | None] = []
        frame.ranks.copies.clear()
        for name, tensor in zip(frame.names, tensors, strict=True):
            mine = [answer.gradients.get(name) for answer in answers]
            if name not in ctx.wants or all(g is None for g in mine):
                found.append(None)
                continue
            shards = frame.job(tensors, ctx.wants).shards[name]
            filled = [torch.zeros_like(s) if g is None else g for g, s in zip(mine, shards, strict=True)]
            found.append(frame.join(filled, frame.ranks.dimension(name, tensor), name))
        return None, *found


def _spoil(frame: _Frame, tensors: tuple[Tensor, ...], answers: list[Answer]) -> None:
    """Write to an input what a rank has written to its share of it."""
    for name, tensor in zip(frame.names, tensors, strict=True):
        if any(name in answer.changed for answer in answers):
            dim = frame.ranks.dimension(name, tensor)
            shards = frame.cut(tensor, dim)
            shards = [answer.changed.get(name, shard) for answer, shard in zip(answers, shards, strict=True)]
            with torch.no_grad():
                tensor.copy_(frame.join(shards, dim))
