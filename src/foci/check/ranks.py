"""Call a parallel function like an ordinary one: inputs are sharded over ranks, outputs and gradients joined."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
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
IMPORT_SECONDS = 60.0  # seconds by which ranks may differ in importing a callable
RAISE_SECONDS = 3.0  # seconds that a rank which raised waits for the others to raise too
MAX_LOSSES = 2  # how often ranks may be lost before the check stops restarting them


class Fatal(RuntimeError):
    """Ranks died, hung or deadlocked; the message is a complete sentence for the report."""

    sentence = True


@dataclass(frozen=True)
class Named:
    """A callable by module and name, which every rank imports; `folder` is put on sys.path for that."""

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

    def signature_source(self) -> Callable[..., Any]:
        """The callable whose signature is read."""
        return self.load()


@dataclass(frozen=True)
class Given:
    """A callable that pickles by its name."""

    function: Callable[..., Any]

    def load(self) -> Callable[..., Any]:
        return self.function

    def signature_source(self) -> Callable[..., Any]:
        return self.function


class Target(Protocol):
    """A picklable reference to the callable that ranks run."""

    def load(self) -> Callable[..., Any]: ...

    def signature_source(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class Roles:
    """How the tensors of a function are sharded.

    `split(parameter, tensor)`: the dimension along which an argument is split; None: replicated. `joined(number, shard,
    tokens)`: the dimension along which the shards of output `number` are joined, where each rank has `tokens` local
    tokens; None: replicated. `split_leaf(leaf, tensor)`: as `split`, for the operator's arguments in its own layout.
    `tokens`: the sequence dimension of q. `share(value, places)`: what each rank gets of an argument that is not a
    tensor; None: all get the value itself.
    """

    split: Callable[[str, Tensor], int | None]
    joined: Callable[[int, Tensor, int], int | None]
    split_leaf: Callable[[str, Tensor], int | None]
    tokens: int = 1
    share: Callable[[Any, Callable[[int], Places]], list[Any] | None] = lambda value, places: None


class Job(NamedTuple):
    """One call on all ranks: shards by parameter and rank, other arguments, and gradients of the outputs by rank.

    `recorded`: whether gradients are recorded, as where the call was made.
    """

    target: Target
    order: str
    shards: Mapping[str, list[Tensor]]
    plain: Mapping[str, Any]
    shared: Mapping[str, list[Any]]
    wants: frozenset[str]
    grads: list[list[Tensor | None]] | None
    recorded: bool


class Answer(NamedTuple):
    """A rank's result: outputs, whether each requires grad, whether it was one tensor, gradients, modified inputs."""

    outputs: list[Tensor]
    differentiable: list[bool]
    single: bool
    gradients: dict[str, Tensor | None]
    changed: dict[str, Tensor]


@dataclass(frozen=True)
class Refused:
    """The error of a rank when all other ranks raised too: none is left waiting, so all can continue."""

    error: Exception


def prepare(target: Target) -> None:
    """Import the callable on all ranks before any waits for another, and create the group that `_all_raised` uses."""
    target.load()
    dist.monitored_barrier(timeout=timedelta(seconds=IMPORT_SECONDS))
    _second_group()


def run_job(job: Job) -> Answer | Refused:
    """A rank's part of a call, and of its backward where gradients of the outputs are given."""
    try:
        return _run_function(job)
    except Exception as error:
        if is_consequence(error) or not _all_raised():
            raise
        return Refused(_portable(error))


@cache
def _second_group() -> dist.ProcessGroup | None:
    """A second group of all ranks, in which no collective of the function can be pending."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=IMPORT_SECONDS))


def _all_raised() -> bool:
    """Whether every rank reaches this barrier within RAISE_SECONDS."""
    try:
        dist.monitored_barrier(_second_group(), timeout=timedelta(seconds=RAISE_SECONDS))
    except RuntimeError as error:
        return not str(error)
    return True


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as problem:
        return RuntimeError(f"{type(error).__name__}: {error} (not pickled: {problem})")
    return error


def _run_function(job: Job) -> Answer:
    rank = dist.get_rank()
    function = job.target.load()
    tensors = {name: shards[rank].clone() for name, shards in job.shards.items()}
    for name in job.wants:
        tensors[name].requires_grad_()
    with nullcontext() if job.recorded else torch.no_grad():
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
    """Arguments that are no tensors, and the process group or mesh under the function's name for it."""
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

    `places(length)`: the positions each rank holds; `order`: that sharding's name. Gradients of sharded inputs are
    joined from the shards. Gradients of replicated inputs must be the full gradient on every rank; if they differ, the
    one farthest from the others is returned. `copies` keeps those of the last backward. `must_support_uneven`:
    an error with uneven shards is a fault and not a refusal.
    """

    world: World
    target: Target
    roles: Roles
    places: Callable[[int], Places]
    order: str = "plain"
    must_support_uneven: bool = False
    copies: dict[str, list[Tensor]] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    uneven_failure: str = ""
    prepared: bool = False

    def __post_init__(self) -> None:
        self.func = self.target.signature_source()  # where its annotations are
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
        """Pass the first tokens as text, replicated on every rank; its output goes in front of the others'."""
        dim = self.roles.tokens
        assert self.text is not None
        first = list(given)[:3]
        length = self.text_tokens(given[first[0]].shape[dim])
        for name, text in zip(first, self.text, strict=True):
            whole = given[name]
            given[text] = whole.narrow(dim, 0, length)
            given[name] = whole.narrow(dim, length, whole.shape[dim] - length)
        result = self._run(given)
        if isinstance(result, tuple) and len(result) == 2:
            return torch.cat([result[1], result[0]], dim)
        return result

    def text_tokens(self, length: int) -> int:
        """How many tokens of a joint sequence are text: up to two per rank, if as many others remain."""
        return min(2 * self.world.size, max(length - 2 * self.world.size, 0)) if self.text else 0

    def _run(self, given: dict[str, Any]) -> Any:
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in given.items() if name not in tensors}
        call = _Call(self, tuple(tensors), plain)
        outputs = _Across.apply(call, *tensors.values())
        return outputs[0] if call.single else outputs

    def dimension(self, name: str, tensor: Tensor) -> int | None:
        """The dimension along which an argument is split; None for text, which is replicated."""
        return None if self.text and name in self.text else self.roles.split(name, tensor)

    def ask(self, job: Job) -> list[Answer]:
        """Every rank's answer. Raises the error if all ranks raised; Fatal if only some did, or a rank died or hung."""
        uneven = any(len({shard.shape for shard in shards}) > 1 for shards in job.shards.values())
        if uneven and self.uneven_failure:
            raise Fatal(self.uneven_failure)
        if len(self.losses) >= MAX_LOSSES:
            raise Fatal(self.losses[-1])
        if not self.prepared:
            self.world.run(prepare, self.target)
        outcomes = self.world.outcomes(run_job, job)
        self.prepared = not any(isinstance(each, Raised | Lost) for each in outcomes)
        refused = [each.error for each in outcomes if isinstance(each, Refused)]
        if len(refused) == len(outcomes):
            if uneven and not self.must_support_uneven:
                reason = f"lengths that the ranks do not share equally: it raises {type(refused[0]).__name__}"
                raise NotImplementedError(reason) from refused[0]
            raise refused[0]
        failed = {rank: each for rank, each in enumerate(outcomes) if isinstance(each, Raised | Lost)}
        if not failed:
            return outcomes
        sentence = _fatal(failed, self.world)
        if uneven:
            self.uneven_failure = f"where a length is no multiple of the ranks, {sentence}"
            raise Fatal(self.uneven_failure)
        self.losses.append(sentence)
        raise Fatal(sentence)


def _fatal(failed: Mapping[int, Raised | Lost], world: World) -> str:
    """One sentence on ranks that died, hung, or raised while others did not."""
    died = {rank: each.reason for rank, each in failed.items() if isinstance(each, Lost) and each.died}
    silent = {rank: each.reason for rank, each in failed.items() if isinstance(each, Lost) and not each.died}
    raised = {rank: each.error for rank, each in failed.items() if isinstance(each, Raised)}
    own = {rank: error for rank, error in raised.items() if not is_consequence(error)}
    if died:
        rank, reason = next(iter(died.items()))
        return f"rank {rank} died: {reason}; the whole job would be gone"
    if own:
        rank, error = next(iter(own.items()))
        others = format_ranks([each for each in range(world.size) if each not in own])
        waiting = f", while {others} waited for it until the group's timeout: a hang" if len(own) < world.size else ""
        return f"rank {rank} raised {type(error).__name__}: {diagnose.first_line(error)}{waiting}"
    if silent:
        return f"it hangs: {'; '.join(f'rank {rank}: {reason}' for rank, reason in silent.items())}"
    stuck, idle = sorted(failed), [rank for rank in range(world.size) if rank not in failed]
    whom = f"for {format_ranks(idle)}, which had finished," if idle else "for each other"
    return f"it hangs: {format_ranks(stuck)} waited {whom} until {world.timeout:.0f} s were over"


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as people say them."""
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def is_consequence(error: Exception) -> bool:
    """Whether an exception is only the consequence of another rank's failure: a timeout or a closed connection."""
    text = str(error).lower()
    kinds = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "socket closed")
    return any(kind in text for kind in kinds)


@dataclass
class _Call:
    """One call of `Ranks`, kept for its backward."""

    ranks: Ranks
    names: tuple[str, ...]
    plain: dict[str, Any]
    single: bool = True
    recorded: bool = field(default_factory=torch.is_grad_enabled)

    def job(
        self, tensors: tuple[Tensor, ...], wants: frozenset[str], grads: list[list[Tensor | None]] | None = None
    ) -> Job:
        ranks, shards = self.ranks, {}
        for name, tensor in zip(self.names, tensors, strict=True):
            shards[name] = self.cut(tensor, ranks.dimension(name, tensor))
        shared = {name: ranks.roles.share(value, ranks.places) for name, value in self.plain.items()}
        own = {name: values for name, values in shared.items() if values is not None}
        return Job(ranks.target, ranks.order, shards, self.plain, own, wants, grads, self.recorded)

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
    """Joined outputs of all ranks; the backward runs the ranks' forward again, and their backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        wants = frozenset(name for name, need in zip(call.names, ctx.needs_input_grad[1:], strict=True) if need)
        answers = call.ranks.ask(call.job(tensors, wants))
        call.single = answers[0].single
        _copy_mutations(call, tensors, answers)
        first = call.job(tensors, wants).shards[call.names[0]]
        ctx.dims = [
            call.ranks.roles.joined(number, shard, first[0].shape[call.ranks.roles.tokens])
            for number, shard in enumerate(answers[0].outputs)
        ]
        if call.ranks.text and len(ctx.dims) == 2:
            ctx.dims[1] = None
        outputs = [call.join([a.outputs[i] for a in answers], dim) for i, dim in enumerate(ctx.dims)]
        can = [any(a.differentiable[i] for a in answers) for i in range(len(outputs))]
        ctx.mark_non_differentiable(*(o for o, able in zip(outputs, can, strict=True) if not able))
        ctx.call, ctx.wants = call, wants
        ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, tensors = ctx.call, ctx.saved_tensors
        size = call.ranks.world.size
        none = [None] * size
        # A replicated output enters the loss of every rank: each gets 1 / size, so that the sum counts it once.
        cuts = [
            none if g is None else call.cut(g / size if dim is None else g, dim)
            for g, dim in zip(grads, ctx.dims, strict=True)
        ]
        by_rank: list[list[Tensor | None]] = [list(each) for each in zip(*cuts, strict=True)]
        answers = call.ranks.ask(call.job(tensors, ctx.wants, by_rank))
        found: list[Tensor | None] = []
        call.ranks.copies.clear()
        for name, tensor in zip(call.names, tensors, strict=True):
            mine = [answer.gradients.get(name) for answer in answers]
            if name not in ctx.wants or all(g is None for g in mine):
                found.append(None)
                continue
            shards = call.job(tensors, ctx.wants).shards[name]
            filled = [torch.zeros_like(s) if g is None else g for g, s in zip(mine, shards, strict=True)]
            found.append(call.join(filled, call.ranks.dimension(name, tensor), name))
        return None, *found


def _copy_mutations(call: _Call, tensors: tuple[Tensor, ...], answers: list[Answer]) -> None:
    """Copy to an input what a rank has written to its shard of it."""
    for name, tensor in zip(call.names, tensors, strict=True):
        if any(name in answer.changed for answer in answers):
            dim = call.ranks.dimension(name, tensor)
            shards = call.cut(tensor, dim)
            shards = [answer.changed.get(name, shard) for answer, shard in zip(answers, shards, strict=True)]
            with torch.no_grad():
                tensor.copy_(call.join(shards, dim))
