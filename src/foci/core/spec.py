"""Spec, Backend, Case: what an operator promises, as frozen data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foci.core.device import imported, installed

Inputs = Mapping[str, Any]
Outputs = tuple[Tensor, ...]
Ask = Callable[[Callable[[], Any]], Any]
Aside = Callable[[Callable[[Ask], Any]], Any]


def here(work: Callable[[Ask], Any]) -> Any:
    """What `work(ask)` gives, where the calls that it asks for are made in this process; check/isolate.py: elsewhere.

    There `ask(call)` is None where the call ended its process or hung.
    """
    return work(lambda call: call())


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
    without, it is differentiable torch code and autograd sees through it. With `kept(call) -> Output` beside it the op
    calls `forward(call, True)`, which gives one tensor more, for the backward alone: the last of its `outputs`.
    `prefers(call, single) -> str` names a later backend that is faster for a call which both can run, and of which the
    first output is all that is asked for where it is `single`. `alike(call)` gives forward and backward of flat calls
    like this one (core/plans.py: again), which hold no tensor and go through torch's dispatcher. Outputs are no views
    there, but of any strides, which either backward takes. `by_torch(call)` makes of the tensors of calls like this one
    a tuple of the first output alone, differentiable by torch, or is None.

    Of the packages that it stands on `needs` are all wanted, of `one_of` any.

    A backend of softmax may also add attention to a part of the keys to what other keys gave, in place:
    `forward_part(call, out, lse)` and `backward_part(call, rows, into)` (ops/softmax/call.py: Rows, Gradients).
    """

    name: str
    module: str
    note: str = ""
    needs: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Reasons why the module cannot even be imported here."""
        if self.one_of and not any(installed(package) for package in self.one_of):
            return [f"{' or '.join(self.one_of)} is not installed"]
        return [f"{package} is not installed" for package in self.needs if not installed(package)]

    def ready(self) -> Backend:
        """Itself, to be asked for reasons: what it needs is imported, as Triton says only then if it takes CPU tensors.

        Nothing else would import it for a call that it could run in Triton's interpreter.
        """
        for package in self.needs:
            imported(package)
        return self

    def load(self) -> ModuleType:
        return sys.modules.get(self.module) or importlib.import_module(self.module)

    def reasons(self, call: Any) -> list[str]:
        """Why this backend cannot run this call; empty when it can."""
        if (self.needs or self.one_of) and (missing := self.missing()):
            return missing
        found: list[str] = self.load().reasons(call)
        return found

    def prefers(self, call: Any, single: bool) -> str:
        """The backend that is faster for this call where it can run it, which this one could; "": none."""
        ask = getattr(self.load(), "prefers", None)
        return "" if ask is None else str(ask(call, single))


@dataclass(frozen=True)
class Case:
    """One small problem of an operator: `make(dtype, device, seed)` gives its arguments by name.

    `features` name what the case exercises ("causal", "gqa", "bias" ...), so that a candidate can refuse it by feature.
    """

    name: str
    features: frozenset[str]
    make: Callable[[torch.dtype, torch.device, int], dict[str, Any]]


Slices = tuple[slice, ...]
Place = Slices | Mapping[str, Slices]


def within(place: Place, output: str) -> Slices | None:
    """Where an output lies in that of the whole: one place for every output, or one by name and None for the others."""
    return place.get(output) if isinstance(place, Mapping) else place


@dataclass(frozen=True)
class Part:
    """A piece of a case that is a case of its own, and where its outputs lie within the outputs of the whole.

    `resumes`: arguments that go on from the outputs of that name of the part before.
    """

    case: Case
    place: Place = ()
    resumes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Future:
    """The inputs with every token from some time on replaced, and where the outputs lie that this may not touch."""

    inputs: dict[str, Any]
    place: Place


@dataclass(frozen=True)
class Bad:
    """Arguments no operator may answer with a number: `change` spoils those of a good call, `argument` is to blame.

    `strict`: peers do answer (they broadcast, or take another meaning), so only a strict candidate is asked.
    """

    name: str
    argument: str
    change: Callable[[dict[str, Any]], dict[str, Any]]
    strict: bool = False


@dataclass(frozen=True)
class Probes:
    """How a case of this operator becomes the question a law asks. What is absent makes its law "not tested".

    `sized(n)`: a plain case of n tokens; `simpler`: the same with less, for a candidate that refuses it. `cut`,
    `documents`, `rows` take a case and its inputs apart: along the keys, so that `Spec.merge` must put the outputs
    together again (or each part resumes where the one before ended), into the packed sequences, into the batch.
    `transition`: what to ask so that the state in the answer is the linear part of the map that these inputs are for a
    state; `Spec.merge` makes it and the answer from a state of 0 one map. `future`: see Future. `poison`: NaN in all
    that a mask excludes. Each gives nothing (or None) where it does not apply.
    """

    sized: Callable[[int], Case] | None = None
    cut: Callable[[Case, Inputs], tuple[Part, ...]] | None = None
    documents: Callable[[Case, Inputs], tuple[Part, ...]] | None = None
    rows: Callable[[Case, Inputs], tuple[Part, ...]] | None = None
    future: Callable[[Case, Inputs], Future | None] | None = None
    poison: Callable[[Case, Inputs], dict[str, Any] | None] | None = None
    bad: tuple[Bad, ...] = ()
    transition: Callable[[Inputs], dict[str, Any]] | None = None
    simpler: tuple[Callable[[int], Case], ...] = ()


NO_PROBES = Probes()


@dataclass(frozen=True)
class Mistake:
    """A wrong equation that people really implement. A candidate that matches it has its fault named.

    `compute(inputs)` gives the outputs such an implementation would return, or None where it equals the right one.
    `sentence` says what is wrong and what it would have done silently. With `fits`, it is `compute(inputs, amount)`,
    right at amount 0: the amount is fitted, and the sentence formats it.
    """

    name: str
    sentence: str
    compute: Callable[..., Outputs | None]
    fits: bool = False


@dataclass(frozen=True)
class Candidate:
    """Something that claims to be an operator: ours, a peer's or a user's, behind the operator's own argument names.

    `call(inputs)` gives the outputs named by `outputs` (None: all of the Spec's); `as_outputs` makes them from what a
    callable returned, or raises what is wrong with it. `refuses(case)` lists why a case does not apply (empty: run it);
    `not_tested` names what its signature does not offer. `strict`: its errors must name the argument, as foci's do.
    """

    name: str
    call: Callable[[Inputs], Outputs]
    refuses: Callable[[Case], list[str]] = lambda case: []
    not_tested: tuple[str, ...] = ()
    outputs: tuple[str, ...] | None = None
    strict: bool = False


class WrongReturn(TypeError):
    """A callable returned something else than its outputs; the message is the whole sentence."""


def as_outputs(result: Any, names: tuple[str, ...]) -> Outputs:
    """What a callable returned, as a tuple of outputs: a tensor where one is expected, else a tuple of that many."""
    if len(names) == 1:
        if isinstance(result, Tensor):
            return (result,)
        expected = "one tensor"
    else:
        tensors = isinstance(result, tuple | list) and all(isinstance(item, Tensor) for item in result)
        if tensors and len(result) == len(names):
            return tuple(result)
        expected = f"a tuple of {len(names)} tensors ({', '.join(names)})"
    if isinstance(result, tuple | list):
        got = f"a {type(result).__name__} of {len(result)}"
        silently = "; whoever unpacks or adds it takes the batch, or one output, for the whole"
    else:
        got, silently = f"{type(result).__name__}", ""
    raise WrongReturn(f"it returns {got} where {expected} is expected{silently}")


def equations(bind: Callable[..., Any], module: Any) -> dict[str, Any]:
    """`reference` and `plain` of a Spec from a module that has `forward(call)` and `equation(call, dtype)`."""

    def reference(*args: Any, **kwargs: Any) -> Outputs:
        outputs: Outputs = module.forward(bind(*args, **kwargs))
        return outputs

    def plain(*args: Any, **kwargs: Any) -> Outputs:
        call = bind(*args, **kwargs)
        outputs: Outputs = module.equation(call, call[0].dtype)
        return outputs

    return {"reference": reference, "plain": plain}


@dataclass(frozen=True)
class Work:
    """What one call costs at least: floating point operations and bytes moved.

    `backward`: how many times the operations of the forward its backward takes, by the field's convention.
    """

    flops: int
    bytes: int
    backward: float = 2.0


@dataclass(frozen=True)
class Spec:
    """An operator as a value: the dispatcher, the checker and the benchmark are functions of it.

    `call` is the operator's validated argument list, a NamedTuple whose annotations are the shapes of its tensors and
    the schema of its ops; `bind(*args, **kwargs)` makes one from a user's arguments or raises what is wrong with them.
    `shapes` are the problems that a benchmark times and a GPU is tuned for, as they occur in models. `large` are cases
    in whose sizes a GPU runs the kernels of models, each that docs/kernels.md has. A CPU is not asked them.
    `drawn(name, room)` is a case that nobody chose, the same for the same name, whose truth keeps about `room` numbers.
    `outputs(call)` declares shapes and dtypes; `logs` names outputs that are logarithms. `reference(**inputs)` is the
    equation, differentiable, and run in float64 it is the truth; `plain(**inputs)` is the same equation in the working
    dtype throughout, the yardstick of half precision.
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
    function: str = ""  # the public function, whose name begins the errors; the operator's own by default
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
    logs: tuple[str, ...] = ()
    probes: Probes = NO_PROBES
    shapes: tuple[Case, ...] = ()
    large: tuple[Case, ...] = ()
    drawn: Callable[[str, int], Case] | None = None

    def __post_init__(self) -> None:
        if not self.function:
            object.__setattr__(self, "function", self.name)

    def backend(self, name: str) -> Backend:
        for backend in self.backends:
            if backend.name == name:
                return backend
        names = ", ".join(repr(each.name) for each in self.backends)
        raise ValueError(f"{self.function}: unknown backend {name!r}; expected one of {names}")
