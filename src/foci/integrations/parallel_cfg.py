"""Compute the two branches of classifier-free guidance on two ranks, whether in one call or in two."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from foci.core.errors import Unsupported, require
from foci.integrations import parallel_rows
from foci.integrations.overrides import Overrides, require_evaluating, require_sampling
from foci.integrations.undoable import Undoable
from foci.parallel.exchange import Session, all_gather
from foci.parallel.group import Group

__all__ = ["GuidanceHandle", "install"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DIMS = 6


@dataclass
class GuidanceHandle(Undoable):
    """What `install` did, and how the calls since were split."""

    branches: _Branches = field(repr=False)
    _overrides: Overrides = field(repr=False)

    def facts(self) -> dict[str, Any]:
        """Figures for a report: calls with both branches in one batch, pairs of calls, and unpaired calls."""
        mine = self.branches
        return {"ranks": mine.group.size, "batched": mine.split.calls, "pairs": mine.pairs, "alone": mine.alone}

    def forget(self) -> None:
        """Drop a pending (deferred) answer: after an error the other rank may not take part in its exchange."""
        self.branches.waiting = None

    def restore(self) -> None:
        """Restore the model's original objects; a pending answer is fetched first, on all ranks."""
        self.branches.settle()
        self._overrides.restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.forget()
        self.restore()


def install(model: nn.Module, group: Any) -> GuidanceHandle:
    """Split a denoiser's guidance over the two ranks of `group`. All ranks run the same pipeline and get all answers.

    Both branches in one call (the two halves of the latents are equal): rank 0 computes the first half of the rows,
    rank 1 the second. One call per branch: rank 0 computes the first, rank 1 the second, and both answers are exchanged
    after the second call; until then the first is a deferred tensor, fetched at its first use. So two calls take the
    time of one, and a pipeline that uses the first answer before the second call, or makes no second call, still gets
    the right one, at the speed of one process.

    Raises ValueError for a group of more than two ranks, in training mode, and where a gradient would be asked for.
    """
    group = Group.of(group)
    if group.size > 2:
        raise ValueError(f"install: group has {group.size} ranks; guidance has two branches, expected 2 (or 1)")
    require_evaluating("parallel_cfg.install", model)
    overrides = Overrides()
    branches = _Branches(model, group)
    inner = overrides.put(model, lambda *args, **kwargs: branches.run(inner, args, kwargs))
    return GuidanceHandle(branches, overrides)


class _Branches:
    def __init__(self, model: nn.Module, group: Group) -> None:
        self.model, self.group = model, group
        self.split = parallel_rows.split_of(group)
        self.waiting: _First | None = None
        self.pairs = self.alone = 0

    def run(self, inner: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        bound = inspect.signature(inner).bind(*args, **kwargs)
        bound.apply_defaults()
        require_sampling("parallel_cfg", self.model, bound.arguments.values())
        if self.group.size == 1:
            return inner(*args, **kwargs)
        if _both_branches(bound.arguments):
            self.settle()
            return self.split.run(self.model, inner, args, kwargs)
        first, self.waiting = self.waiting, None
        keyed = bound.arguments.get("return_dict", True)
        if first is None:
            self.waiting = _First(self, inner, args, kwargs)
            return _answer(_Deferred(self.waiting.fetch), keyed)
        self.pairs += 1
        mine = first.session.compute(self.one, inner, args, kwargs) if self.group.rank == 1 else first.mine
        first.value, second = self.exchange(mine, first.session)
        return _answer(second, keyed)

    def one(self, inner: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
        """The tensor that a call returns."""
        found = parallel_rows.tensors_of(self.model, inner(*args, **kwargs))
        if len(found) != 1:
            raise Unsupported(
                f"parallel_cfg: {type(self.model).__name__} cannot be split by calls",
                [f"it returned {len(found)} tensors; expected one"],
            )
        return found[0]

    def settle(self) -> None:
        """Fetch a pending first answer, as the next call does not pair with it."""
        if self.waiting is not None:
            self.waiting.fetch()

    def exchange(self, mine: Tensor | None, session: Session) -> list[Tensor]:
        """All-gather tensors; empty for a rank that has none."""
        numbers = [0] * (_DIMS + 2)
        if mine is not None:
            numbers = [_DTYPES.index(mine.dtype), mine.dim(), *mine.shape, *[0] * (_DIMS - mine.dim())]
        said = session.agree({}, numbers)  # raises on all ranks if one failed, which has no tensor
        shapes = [row[2 : 2 + row[1]] if row[1] else [0] for row in said]
        kinds = {row[0] for row in said if row[1]}
        if len(kinds) > 1:
            raise ValueError(f"parallel_cfg: the branches are of {[str(_DTYPES[kind]) for kind in sorted(kinds)]}")
        if mine is None:
            mine = torch.empty(0, dtype=_DTYPES[kinds.pop()], device=next(self.model.parameters()).device)
        return all_gather(mine.contiguous(), shapes, session)


class _First:
    """The answer of a first call: computed by rank 0, known to rank 1 only after an exchange."""

    def __init__(self, branches: _Branches, inner: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        self.branches, self.session = branches, Session(branches.group, "parallel_cfg")
        self.mine = self.session.compute(branches.one, inner, args, kwargs) if branches.group.rank == 0 else None
        self.value: Tensor | None = None

    def fetch(self) -> Tensor:
        """The answer, exchanged if no second call came: all ranks fetch it, as they run the same pipeline."""
        if self.value is None:
            self.branches.waiting = None
            self.branches.alone += 1
            self.value = self.branches.exchange(self.mine, self.session)[0]
        return self.value


class _Deferred:
    """A deferred tensor, fetched when a torch function or an attribute needs it; slicing stays deferred."""

    def __init__(self, fetch: Callable[[], Tensor]) -> None:
        self._fetch = fetch

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(_fetched, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetch(), name)

    def __getitem__(self, index: Any) -> _Deferred:
        return _Deferred(lambda: self._fetch()[index])


def _fetched(value: Any) -> Any:
    return value._fetch() if isinstance(value, _Deferred) else value


def _through(name: str) -> Callable[..., Any]:
    def method(self: _Deferred, *others: Any) -> Any:
        return getattr(self._fetch(), name)(*map(_fetched, others))

    return method


_OPERATORS = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv pow rpow matmul rmatmul neg abs
    lt le gt ge eq ne len iter setitem bool float int
"""
for _name in _OPERATORS.split():  # looked up on the class, never through __getattr__
    setattr(_Deferred, f"__{_name}__", _through(f"__{_name}__"))


def _both_branches(given: dict[str, Any]) -> bool:
    """Whether the batch holds the same latents twice, once for each branch."""
    first = next(iter(given.values()))
    if not isinstance(first, Tensor) or first.dim() < 2 or first.shape[0] % 2:
        return False
    one, other = first.chunk(2)
    return torch.equal(one, other)


def _answer(tensor: Any, keyed: bool) -> Any:
    if not keyed:
        return (tensor,)
    output = require("diffusers.models.modeling_outputs", extra="diffusers").Transformer2DModelOutput
    return output(sample=tensor)
