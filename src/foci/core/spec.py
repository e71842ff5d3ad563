"""Spec, Backend, Case: what an operator promises, as frozen data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
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


def run_in_process(work: Callable[[Ask], Any]) -> Any:
    """`work(ask)`, where `ask(call)` runs the call in this process; check/isolate.py has the same with a child process.

    There `ask(call)` returns None where the call killed its process or hung.
    """
    return work(lambda call: call())


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums, LSE and states are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Output:
    """The declaration of one output, for the operator's fake and for law 1. Outputs are contiguous."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, like: Tensor) -> Tensor:
        return like.new_empty(self.shape, dtype=self.dtype)


def as_declared(outputs: Iterable[Tensor]) -> Outputs:
    """Saved outputs, contiguous as a backend's backward reads them: saved_tensors_hooks may unpack any strides."""
    return tuple(x.contiguous() for x in outputs)


@dataclass(frozen=True)
class Backend:
    """One way to compute an operator: a module, found by name and imported when first considered.

    The module has `reasons(call) -> list[str]` (empty: it can run the call) and `forward(call) -> tuple`. With
    `backward(call, outputs, gradients, needs) -> tuple` it brings its own gradient and becomes an opaque op pair;
    without, it is differentiable torch code and autograd sees through it. With `kept(call) -> Output` beside it the op
    calls `forward(call, True)`, which returns one tensor more, for the backward alone: the last of its `outputs`.
    `prefers(call, single) -> str` names a later backend that is faster for a call which both can run; with `single`,
    only the first output is wanted. `specialize(call)` returns a forward and a backward for all calls that share this
    one's cache key (core/plans.py); they hold no tensor and go through torch's dispatcher. Their outputs are no views,
    but may have any strides, and both backwards accept them. `torch_op(call)` returns a function from the tensors of
    such calls to a tuple of the first output alone, differentiable by torch, or None.

    `needs`: packages that must all be installed; `one_of`: packages of which one must be.

    A backend of softmax may also merge attention to a part of the keys into earlier results, in place:
    `forward_part(call, out, lse)` and `backward_part(call, rows, into)` (ops/softmax/call.py: Rows, Gradients).
    """

    name: str
    module: str
    note: str = ""
    needs: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Reasons why the module cannot be imported here: packages that are not installed."""
        if self.one_of and not any(installed(package) for package in self.one_of):
            return [f"{' or '.join(self.one_of)} is not installed"]
        return [f"{package} is not installed" for package in self.needs if not installed(package)]

    def ready(self) -> Backend:
        """Itself, with the packages it needs imported: only then does Triton say if its interpreter takes CPU tensors.

        For a call that only the interpreter could run, nothing else would import Triton.
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
        """A backend that would be faster for this call, which this one can run; "" for none."""
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


def slices_of(place: Place, output: str) -> Slices | None:
    """The slices of the whole output that this output is: the same for every output, or by name (None: not part)."""
    return place.get(output) if isinstance(place, Mapping) else place


@dataclass(frozen=True)
class Part:
    """A piece of a case that is a case of its own, and the slices of the whole's outputs that its outputs are.

    `resumes`: arguments that take the previous part's output of the same name.
    """

    case: Case
    place: Place = ()
    resumes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Future:
    """The inputs with all tokens from some time on replaced, and the slices of the outputs this must not change."""

    inputs: dict[str, Any]
    place: Place


@dataclass(frozen=True)
class Bad:
    """Arguments that an operator must reject: `change` makes those of a good call invalid, `argument` is at fault.

    `strict`: other libraries accept them (they broadcast, or define them otherwise): only strict candidates are tested.
    """

    name: str
    argument: str
    change: Callable[[dict[str, Any]], dict[str, Any]]
    strict: bool = False


@dataclass(frozen=True)
class Probes:
    """How the laws derive their tests from a case of this operator. A law whose probe is absent is "not tested".

    `sized(n)`: a plain case of n tokens; `simpler`: the same with fewer features, for a candidate that refuses it.
    `cut`, `documents`, `rows` split a case and its inputs: along the keys (`Spec.merge` must combine the outputs, or
    each part resumes from the one before), into its packed sequences, into batch entries. `transition`: inputs for
    which the output state is the transition A of the affine map S -> A S + B that the given inputs apply to a state;
    `Spec.merge` combines it with B, the output state from a zero state. `future`: see Future. `poison`: inputs with NaN
    in everything a mask excludes. Each returns nothing (or None) where it does not apply.
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
    """A wrong equation that people really implement: a candidate whose outputs match it gets this diagnosis.

    `compute(inputs)` returns the outputs of such an implementation, or None where they equal the right ones.
    `sentence` says what is wrong and what it would have done silently. With `fits` it is `compute(inputs, amount)`,
    right at amount 0: the amount is fitted to the candidate's outputs and formatted into the sentence.
    """

    name: str
    sentence: str
    compute: Callable[..., Outputs | None]
    fits: bool = False


@dataclass(frozen=True)
class Candidate:
    """Something that claims to be an operator: ours, a peer's or a user's, behind the operator's own argument names.

    `call(inputs)` returns the outputs named by `outputs` (None: all of the Spec's); `as_outputs` converts a callable's
    result to them, or raises WrongReturn. `refuses(case)` lists why a case does not apply (empty: run it); `not_tested`
    names features that its signature lacks. `strict`: its errors must name the argument, as foci's do.
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

    `backward`: how many times the operations of the forward its backward takes, by the field's convention. `counted`:
    operations for torch's flop counter (core/flops.py), where its convention makes them others than `flops`.
    """

    flops: int
    bytes: int
    backward: float = 2.0
    counted: int | None = None


@dataclass(frozen=True)
class Spec:
    """An operator as a value: the dispatcher, the checker and the benchmark are functions of it.

    `call` is the operator's validated argument list, a NamedTuple whose annotations are the shapes of its tensors and
    the schema of its ops; `bind(*args, **kwargs)` makes one from a user's arguments or raises what is wrong with them.
    `shapes` are problems as they occur in models, for benchmarks and tuning. `large` are cases of the sizes at which a
    GPU runs all kernels of models that docs/kernels.md lists; CPUs skip them. `drawn(name, room)` is a random case,
    seeded by its name, whose reference keeps about `room` numbers in memory. `outputs(call)` declares shapes and
    dtypes; `logs` names outputs that are logarithms. `reference(**inputs)` is the equation, differentiable; run in
    float64 it is the truth. `plain(**inputs)` is the same equation in the working dtype throughout, the yardstick of
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
