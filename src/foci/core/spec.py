"""Spec, Backend, Case: what an operator promises, as frozen data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Any]
Outputs = tuple[Tensor, ...]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums, LSE and states are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Output:
    """One declared result: what the fake tensor of the operator and law 1 are made from. Results are contiguous."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, like: Tensor) -> Tensor:
        return like.new_empty(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class Backend:
    """One way to compute an operator: a module, found by name and imported when first considered.

    The module has `reasons(call) -> list[str]` (empty: it can run the call) and `forward(call) -> tuple`. With
    `backward(call, outputs, gradients, needs) -> tuple` it brings its own gradient and becomes an opaque op pair;
    without, it is differentiable torch code and autograd sees through it.
    """

    name: str
    module: str
    note: str = ""
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Reasons why the module cannot even be imported here."""
        return [f"{package} is not installed" for package in self.needs if find_spec(package) is None]

    def load(self) -> ModuleType:
        return sys.modules.get(self.module) or importlib.import_module(self.module)

    def reasons(self, call: Any) -> list[str]:
        """Why this backend cannot run this call; empty when it can."""
        if self.needs and (missing := self.missing()):
            return missing
        found: list[str] = self.load().reasons(call)
        return found


@dataclass(frozen=True)
class Case:
    """One small problem of an operator: `make(dtype, device, seed)` gives its arguments by name.

    `features` name what the case exercises ("causal", "gqa", "bias" ...), so that a candidate can refuse it by feature.
    """

    name: str
    features: frozenset[str]
    make: Callable[[torch.dtype, torch.device, int], dict[str, Any]]


@dataclass(frozen=True)
class Mistake:
    """A wrong equation that people really implement. A candidate that matches it has its fault named.

    `compute(inputs)` gives the outputs such an implementation would return, or None where it equals the right one.
    `sentence` says what is wrong and what it would have done silently.
    """

    name: str
    sentence: str
    compute: Callable[[Inputs], Outputs | None]


@dataclass(frozen=True)
class Candidate:
    """Something that claims to be an operator: ours, a peer's or a user's, behind the operator's own argument names.

    `refuses(case)` lists why a case does not apply (empty: run it); `not_tested` names what its signature does not
    offer.
    """

    name: str
    call: Callable[[Inputs], Outputs]
    refuses: Callable[[Case], list[str]] = lambda case: []
    not_tested: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """What one call costs at least: floating point operations and bytes moved."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Spec:
    """An operator as a value: the dispatcher, the checker and the benchmark are functions of it.

    `call` is the operator's validated argument list, a NamedTuple whose annotations are the shapes of its tensors and
    the schema of its ops; `bind(*args, **kwargs)` makes one from a user's arguments or raises what is wrong with them.
    `outputs(call)` declares shapes and dtypes. `reference(**inputs)` is the equation, differentiable, and run in
    float64 it is the truth; `plain(**inputs)` is the same equation in the working dtype throughout, the yardstick of
    half precision.
    """

    name: str
    equation: str
    paper: str
    reference: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    output_names: tuple[str, ...]
    differentiable: tuple[str, ...]
    cases: tuple[Case, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    call: type | None = None
    bind: Callable[..., Any] | None = None
    outputs: Callable[[Any], tuple[Output, ...]] | None = None
    backends: tuple[Backend, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    merge: type | None = None
    work: Callable[[Any], Work] | None = None
    adapt: Callable[..., Candidate] | None = None
    recurrent: bool = False
    deterministic: bool = True
    causal_bitwise: bool = False
    batch_bitwise: bool = False
    traits: Mapping[str, Any] = field(default_factory=dict)

    def backend(self, name: str) -> Backend:
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise ValueError(
            f"{self.name}: unknown backend {name!r}; expected one of {', '.join(repr(b.name) for b in self.backends)}"
        )
