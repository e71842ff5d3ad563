"""ShapeError, Unsupported with its list of reasons, MissingExtra; RankError and Disagreement, the same on all ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any


class ShapeError(ValueError):
    """Tensors whose sizes do not fit together, or an argument of the wrong size: it names both."""


class Unsupported(NotImplementedError):
    """A correct call that a backend cannot run.

    `what` begins the sentence ("attention: backend 'cudnn' cannot run this call"), `reasons` says why, one clause each,
    and `hint` what would work instead. The reasons stay a list, so that a program can read them.
    """

    def __init__(self, what: str, reasons: Sequence[str] = (), hint: str = "") -> None:
        self.what = what
        self.reasons = list(reasons)
        self.hint = hint
        lines = [what + ":" * bool(reasons), *(f"  - {reason}" for reason in self.reasons)]
        super().__init__("\n".join([*lines, f"  {hint}"] if hint else lines))

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, list[str], str]]:
        # Otherwise exceptions pickle as their printed text, and a subprocess would lose the reasons.
        return type(self), (self.what, self.reasons, self.hint)


class MissingExtra(ImportError):
    """A package that foci needs only for this, and that is not installed: it names the extra to install."""


class RankError(RuntimeError):
    """A rank failed, so all ranks of its group raise this, with that `rank` (its global rank), step and direction.

    "attention: rank 2 failed in step 1 of the forward: ValueError: no such key", or "... it is gone", or "... it did
    not answer".
    """

    def __init__(
        self, operator: str, rank: int, reason: str, *, step: int | None = None, direction: str | None = None
    ) -> None:
        self.operator, self.rank, self.reason, self.step, self.direction = operator, rank, reason, step, direction
        place = [f"step {step}"] * (step is not None) + [f"the {direction}"] * bool(direction)
        where = f" in {' of '.join(place)}" if place else ""
        super().__init__(f"{operator}: rank {rank} failed{where}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), step=self.step, direction=self.direction), (self.operator, self.rank, self.reason)


class Disagreement(ValueError):
    """Ranks were called with arguments that do not match: the same message on every rank.

    `facts` maps each name to the value on each rank: {"dtype": {0: "torch.float32", 1: "torch.bfloat16"}}.
    """

    def __init__(self, operator: str, facts: Mapping[str, Mapping[int, str]]) -> None:
        self.operator = operator
        self.facts = {name: dict(said) for name, said in facts.items()}
        lines = [f"{operator}: ranks disagree, so none of them began:"]
        for name, said in self.facts.items():
            ranks: dict[str, list[int]] = {}
            for rank, value in said.items():
                ranks.setdefault(value, []).append(rank)
            told = "; ".join(f"{value} on {_listed(where)}" for value, where in ranks.items())
            lines.append(f"  - {name}: {told}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.operator, self.facts)


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def a_type(value: object) -> str:
    """Its type for a message: "an int", "a Tensor"."""
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'aeioAEIO')} {name}"  # a UNet2DModel, not an


def require(package: str, extra: str) -> ModuleType:
    """Import and return `package` (a dotted name will do), or raise MissingExtra naming `pip install 'foci[extra]'`.

    A package that is there but fails to import raises its own error: that one is not about a missing extra.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        root = package.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != root:
            raise
        message = f"this needs {root}, which is not installed: pip install 'foci[{extra}]'"
        raise MissingExtra(message, name=root) from error
