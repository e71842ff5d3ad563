"""Split one model instance's tokens over ranks, with attention across ranks, and gather the output; undoable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from foci.core.errors import Unsupported
from foci.integrations.mesh import sequence_ranks
from foci.integrations.split_check import check
from foci.integrations.split_hooks import Hooked, hook
from foci.integrations.split_infer import infer
from foci.integrations.split_plan import PLANS, Kind, SplitPlan, plan_for
from foci.integrations.undoable import Undoable
from foci.ops.masks import Mask
from foci.ops.softmax.api import attention
from foci.parallel.balance import unshard
from foci.parallel.exchange import Session, all_reduce, divide_gradient, sum_gradient
from foci.parallel.group import Group, Traffic
from foci.parallel.joint import joint
from foci.parallel.ring import ring
from foci.parallel.ulysses import ulysses

__all__ = ["SplitHandle", "install"]


@dataclass
class SplitHandle(Undoable):
    """The handle of a model split over ranks: its `plan`, its groups, and `restore()` to undo it."""

    model: nn.Module
    plan: SplitPlan
    _hooked: Hooked = field(repr=False)
    _ranks: _Ranks = field(repr=False)

    @property
    def size(self) -> int:
        """How many ranks share the tokens."""
        return self._ranks.size

    @property
    def attention(self) -> Callable[..., Tensor]:
        """Attention over the tokens of all these ranks, with the signature of `foci.attention`."""
        return self._ranks.attention

    @property
    def sent(self) -> Traffic:
        """What this rank has sent to others since `install`."""
        traffic = [group.traffic for group in self._ranks.groups]
        return Traffic(*(sum(getattr(each, name) for each in traffic) for name in ("bytes", "messages", "control")))

    def sum_gradients(self) -> None:
        """All-reduce (sum) the parameters' gradients, which gives every rank those of one process.

        Each rank's gradient is a partial sum, for every parameter. Call it once per step, after the last backward that
        accumulates gradients, since a second call would sum again. Raises Disagreement if ranks have gradients of
        different parameters.
        """
        with_gradient = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for name, summed in self.sum_shares(with_gradient).items():
            with_gradient[name].copy_(summed)

    def sum_shares(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same for gradients of parameters returned by `torch.autograd.grad`, by name."""
        self._ranks.whole.agree("sum_shares", {"names": [*gradients]})
        summed: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(grad.dtype for grad in gradients.values()):
            some = {name: grad for name, grad in gradients.items() if grad.dtype == dtype}
            with Session(self._ranks.whole, "sum_shares", "backward") as session:
                flat = all_reduce(torch.cat([grad.flatten() for grad in some.values()]), session)
            parts = flat.split([grad.numel() for grad in some.values()])
            summed |= {name: part.view_as(grad) for (name, grad), part in zip(some.items(), parts, strict=True)}
        return summed

    def restore(self) -> None:
        """Remove all hooks, and restore every original processor object."""
        self._hooked.restore()


def install(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: SplitPlan | None = None,
    *,
    text: str = "auto",
    backend: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> SplitHandle:
    """Split a Diffusers model along its tokens over the dimensions "ulysses" and "ring" of a mesh (see `make_mesh`).

    Every rank calls the model with the same whole inputs and gets the same whole output; inside, each has its run of
    the tokens, and attention spans the ranks. A collective call. Only this instance is changed; a copy of it is not
    split. The gradients of inputs are complete; those of parameters are partial sums, which `sum_gradients()` adds up:
    then all are those of one process for the mean of the ranks' losses (the loss itself, if it is equal on all ranks).

    plan: where it is split; by default that of the model's class, or if there is none the one that `infer` finds with
    `inputs`. inputs: keyword arguments of one call, on which the plan is checked before it is used.
    text: in joint attention "split" (each rank has its run of it), "replicated" (each has all of it), or "auto": split
    if the plan supports it and the text is long enough for the model's code. backend: of every attention call; None
    lets foci choose.

    Raises SplitError naming the tensor that a plan left unsplit, Unsupported for a model without plan or with attention
    that cannot be routed, ValueError for a plan that does not fit; Disagreement for other weights on other ranks, and,
    when the model is called, for other inputs.
    """
    if plan is None and inputs is not None and not any(base.__name__ in PLANS for base in type(model).__mro__):
        plan = infer(model, inputs)
    plan = plan_for(model) if plan is None else plan
    ranks = _Ranks(mesh)
    if inputs is not None:
        check(model, inputs, plan, size=max(2, ranks.size), text=text)
    same = {"model": type(model).__name__, "plan": plan, "text": text, "backend": backend}
    ranks.whole.agree("split", same | {"weights": _weights(model)})
    return SplitHandle(model, plan, hook(model, plan, ranks, text, backend), ranks)


class _Ranks:
    """The ranks of a mesh (ulysses, ring) that share a sequence: sharded over the ring, then over Ulysses."""

    def __init__(self, mesh: DeviceMesh) -> None:
        sequence_ranks(mesh)  # raises where the mesh has no such dimensions
        self.ulysses, self.ring = Group.of(mesh["ulysses"]), Group.of(mesh["ring"])
        self.size = self.ulysses.size * self.ring.size
        self.rank = self.ring.rank * self.ulysses.size + self.ulysses.rank
        self.whole = self._all_of(mesh)
        self.groups = list(dict.fromkeys([self.ulysses, self.ring, self.whole]))
        over_ring: Callable[..., Tensor] = (
            ring(attention, self.ring, order="plain") if self.ring.size > 1 else attention
        )
        self.attention = ulysses(over_ring, self.ulysses) if self.ulysses.size > 1 else over_ring

    def _all_of(self, mesh: DeviceMesh) -> Group:
        """One group of all these ranks."""
        if self.ring.size == 1 or self.ulysses.size == 1:
            return self.ulysses if self.ring.size == 1 else self.ring
        if self.size == dist.get_world_size():
            return Group.of(dist.group.WORLD)
        # Never destroyed: torch would give the next such group the same name, and messages would be mixed up.
        return Group.of(dist.new_group(sequence_ranks(mesh), use_local_synchronization=True))

    def runs(self, tokens: int) -> list[tuple[int, int]]:
        found = []
        for first, stop in _runs(0, tokens, self.ring.size):
            found += _runs(first, stop, self.ulysses.size)
        return found

    def enter(self, arguments: dict[str, Any]) -> None:
        """Check that all ranks have the same inputs; an input that requires a gradient gets the sum over ranks."""
        self.whole.agree("split model", dict(_told(arguments)))
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
                arguments[name] = sum_gradient(value, self.whole, "split model")

    def gather(self, module: str, x: Tensor, dim: int, tokens: int) -> Tensor:
        for group in (self.ulysses, self.ring):
            if group.size > 1:
                x = unshard(x, group, "plain", dim)
        return self.share(x)

    def share(self, x: Tensor) -> Tensor:
        """x, with its gradient, which is complete on every rank, divided by the number of ranks."""
        if self.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        return divide_gradient(x, self.size)

    def attend(self, site: str, kind: Kind) -> Callable[..., Tensor]:
        if kind in ("cross", "whole"):
            return attention

        def over_ranks(q: Tensor, k: Tensor, v: Tensor, *, text: int | None = None, **options: Any) -> Tensor:
            if text is None or self.size == 1:
                return self.attention(q, k, v, **options)
            return self._joint(site, (q, k, v), "front" if kind == "front" else "back", text, **options)

        return over_ranks

    def _joint(
        self, site: str, qkv: Sequence[Tensor], where: Literal["front", "back"], text: int, *, mask: Mask | None,
        bias: Tensor | None, scale: float | None, dropout: float, backend: str | None,
    ) -> Tensor:  # fmt: skip
        """Joint attention: replicated text and this rank's image attend to all text and image."""
        refused = {"a bias": bias is not None, "dropout": dropout > 0, "a named backend": backend is not None}
        if reasons := [f"{name} with text='replicated' is not supported" for name, given in refused.items() if given]:
            raise Unsupported(f"split: {site}", reasons)
        cut = text if where == "front" else qkv[0].shape[1] - text
        parts = [x.split([cut, x.shape[1] - cut], 1) for x in qkv]
        texts, images = zip(*(pair if where == "front" else pair[::-1] for pair in parts), strict=True)
        across = joint(self.attention, where=where, text="replicated")
        out, text_out = across(*images, *map(self.share, texts), mask=mask, scale=scale)
        return torch.cat([text_out, out] if where == "front" else [out, text_out], 1)


def _weights(model: nn.Module) -> str:
    """A checksum of the parameters (integer sums of bits), which differs if ranks have different weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and not parameter.is_meta:  # sharded parameters differ between ranks
            words = parameter.detach().contiguous().flatten().view(torch.uint8)
            digest.update(f"{name} {words.sum(dtype=torch.int64).item()}".encode())
    return digest.hexdigest()


def _runs(first: int, stop: int, size: int) -> list[tuple[int, int]]:
    """first:stop split into `size` runs, the first ones longer by one if it does not divide evenly."""
    small, more = divmod(stop - first, size)
    return list(pairwise(first + rank * small + min(rank, more) for rank in range(size + 1)))


def _told(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments that ranks compare: tensors by value, and others whose text is the same on every rank."""
    for name, value in arguments.items():
        if isinstance(value, list | tuple):
            yield from _told({f"{name}[{place}]": part for place, part in enumerate(value)})
        elif isinstance(value, Mapping):
            yield from _told({f"{name}[{key!r}]": part for key, part in value.items()})
        elif isinstance(value, Tensor | bool | int | float | str | None):
            yield name, value
        else:
            yield name, type(value).__name__
