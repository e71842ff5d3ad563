"""A candidate's results and the reference's on each case, computed once and cached."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from foci.check import diagnose
from foci.check.compare import HALF, Error, compare, difference, extent
from foci.core.spec import Candidate, Case, Inputs, Outputs, Spec, WrongReturn

Call = Callable[[Inputs], Outputs]
Gradients = dict[str, Tensor | None]
Layout = Callable[[dict[str, Any]], dict[str, Any]]
LARGE_CASE_BYTES = 10 << 30  # bytes of GPU memory that reference, inputs and results of a large case need at most
NO_MEMORY = "their truth takes up to"  # how the reason begins for which large cases are left out
_UNUSED = torch.zeros(1, device="cpu")  # the yardstick where the budget does not depend on one
Answer = TypeVar("Answer")


class ReferenceTooLarge(Exception):
    """The reference does not fit in memory: for one case, which is then left out, or (None) for no particular one."""

    def __init__(self, case: Case | None = None) -> None:
        super().__init__("their truth takes more memory than is free")
        self.case = case


@dataclass(frozen=True)
class Forward:
    """The result of a call: outputs, or a sentence on what is wrong, or the reason of a NotImplementedError."""

    outputs: Outputs | None = None
    fault: str | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Backward:
    """The gradients of one loss by leaf, or a sentence on what is wrong, or the reason of a NotImplementedError."""

    gradients: Gradients | None = None
    fault: str | None = None
    refused: str | None = None


class FaultLocator(Protocol):
    """Locates and explains the errors of a wrong tensor, such as one joined from the shards of ranks."""

    def output(self, exam: Exam, case: Case, dtype: torch.dtype, name: str, got: Tensor) -> tuple[str, str]:
        """A sentence on the cause, "" if it is unknown; and the place where the tensor is wrong."""

    def gradient(
        self, exam: Exam, case: Case, dtype: torch.dtype, through: tuple[str, ...], leaf: str, got: Tensor
    ) -> tuple[str, str]:
        """The same for the gradient of a leaf."""

    def with_place(self, sentence: str, place: str) -> str:
        """Another sentence, extended by the place."""


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The value with all floating-point tensors in another dtype; modules are changed in place, so pass a copy."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, nn.Module):
        return value.to(dtype)
    if isinstance(value, tuple | list):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return value


@dataclass
class Exam:
    """One candidate for one Spec on one device, and a cache of every result that laws ask for.

    `progress` is called with the name of each case that starts; `refused` collects cases left out, with the reason;
    `too_large` names cases whose reference does not fit in memory.
    """

    spec: Spec
    candidate: Candidate
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    seed: int = 0
    progress: Callable[[str], None] = lambda step: None
    refused: dict[str, str] = field(default_factory=dict)
    locator: FaultLocator | None = None
    too_large: set[str] = field(default_factory=set)
    _kept: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs that the candidate returns."""
        return self.candidate.outputs or self.spec.output_names

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of laws that are tested in one dtype only."""
        return self.dtypes[0]

    @property
    def problems(self) -> tuple[Case, ...]:
        """The Spec's cases, on a GPU also the large ones; if these do not fit, they go to `refused`."""
        if self.device.type != "cuda":
            return self.spec.cases
        large = lambda: self._large(torch.cuda.mem_get_info(self.device)[0])  # noqa: E731
        return self._cached(("problems",), lambda: self.spec.cases + large())

    def _large(self, free: int) -> tuple[Case, ...]:
        if free >= LARGE_CASE_BYTES:
            return self.spec.large
        reason = f"{NO_MEMORY} {LARGE_CASE_BYTES >> 30} GiB of the GPU, of which {free / 2**30:.1f} are free"
        self.refused |= {case.name: reason for case in self.spec.large}
        return ()

    def cases(self, cases: Iterable[Case] | None = None) -> Iterator[Case]:
        """The cases that the candidate takes and whose reference fits in memory; the others go to `refused`."""
        for case in self.problems if cases is None else cases:
            if case.name in self.too_large:
                continue
            reasons = self._cached(("reasons", case), partial(self.candidate.refuses, case))
            if reasons:
                self.refused[case.name] = reasons[0]
            else:
                self.progress(case.name)
                yield case

    def leave_out(self, error: ReferenceTooLarge) -> bool:
        """Leave out the error's case from now on; False if it has none, or it was left out already."""
        if error.case is None:
            return False
        name = error.case.name
        known = name in self.too_large
        self.too_large.add(name)
        self.refused[name] = str(error)
        return not known

    def covering_cases(self, able: Callable[[Case], bool]) -> Iterator[Case]:
        """The smallest cases that pass `able` and together cover every feature, for laws that need not test all."""
        seen: set[str] = set()
        first = True
        for case in sorted(self.cases(), key=lambda case: (self.longest(case), self.size(case))):
            if (first or case.features - seen) and able(case):
                first = False
                seen |= case.features
                yield case

    def size(self, case: Case) -> int:
        """The number of elements of its inputs."""
        return sum(x.numel() for x in self.inputs(case, torch.float64).values() if isinstance(x, Tensor))

    def longest(self, case: Case) -> int:
        """The largest size of any dimension, which bounds loops over tokens."""
        return max(max(x.shape, default=0) for x in self.inputs(case, torch.float64).values() if isinstance(x, Tensor))

    def inputs(self, case: Case, dtype: torch.dtype) -> dict[str, Any]:
        return self._cached(("inputs", case, dtype), lambda: case.make(dtype, self.device, self.seed))

    def fresh(self, case: Case, dtype: torch.dtype) -> dict[str, Any]:
        """A deep copy of the inputs, which a call may modify."""
        return copy.deepcopy(self.inputs(case, dtype))

    def truth(self, case: Case, dtype: torch.dtype) -> Outputs:
        """The reference in float64 on inputs that were rounded to `dtype`."""
        return self._cached(("truth", case, dtype), lambda: self.run(self._reference, self.exact(case, dtype)))

    def exact(self, case: Case, dtype: torch.dtype) -> dict[str, Any]:
        return cast(self.fresh(case, dtype), torch.float64)

    def plain(self, case: Case, dtype: torch.dtype) -> Outputs:
        """The same equation in `dtype` throughout: the yardstick of half precision."""
        return self._cached(("plain", case, dtype), lambda: self.run(self._plain, self.fresh(case, dtype)))

    def declared(self, case: Case, dtype: torch.dtype) -> Outputs:
        """The reference on inputs in `dtype`: its output shapes and dtypes are those expected."""
        return self._cached(("declared", case, dtype), lambda: self.run(self._reference, self.fresh(case, dtype)))

    def forward(self, case: Case, dtype: torch.dtype) -> Forward:
        """The plain call, of which nobody wants a gradient; its outputs are copies, which no later call writes to."""
        return self._cached(("forward", case, dtype), partial(self._forward, case, dtype))

    def _forward(self, case: Case, dtype: torch.dtype) -> Forward:
        found = self.check_shapes(case, dtype, self.attempt(self.fresh(case, dtype)))
        if found.outputs is None:
            return found
        return Forward(copy.deepcopy(tuple(output.detach() for output in found.outputs)))

    def outputs_without_nan(self, case: Case, dtype: torch.dtype) -> Outputs | None:
        """The outputs, or None if they contain NaN: the law "forward" reports that, and NaN cannot be compared."""
        outputs = self.forward(case, dtype).outputs
        return None if outputs is None or any(bool(output.isnan().any()) for output in outputs) else outputs

    def check_shapes(self, case: Case, dtype: torch.dtype, found: Forward) -> Forward:
        """The result, turned into a fault if its shapes are not those of the truth."""
        if found.outputs is not None:
            for name, got, truth in zip(self.names, found.outputs, self.truth(case, dtype), strict=True):
                if got.shape != truth.shape:
                    return replace(found, outputs=None, fault=diagnose.shape(name, got, truth))
        if found.refused:
            self.refused[case.name] = found.refused
        return found

    def attempt(self, inputs: Inputs, call: Call | None = None) -> Forward:
        """Run the candidate (or a compiled form of it) on these inputs; exceptions become a refusal or a fault."""
        try:
            outputs = self.run(call or self.candidate.call, inputs)
        except NotImplementedError as error:
            return Forward(refused=diagnose.refusal(error))
        except WrongReturn as error:
            return Forward(fault=str(error))
        except Exception as error:
            return Forward(fault=diagnose.exception(error, "forward"))
        return Forward(outputs)

    def true_gradients(self, case: Case, dtype: torch.dtype, through: tuple[str, ...]) -> Gradients:
        return self._cached(
            ("true gradients", case, dtype, through),
            lambda: self.differentiate(self._reference, case, dtype, through, exact=True),
        )

    def plain_gradients(self, case: Case, dtype: torch.dtype, through: tuple[str, ...]) -> Gradients:
        return self._cached(
            ("plain gradients", case, dtype, through),
            lambda: self.differentiate(self._plain, case, dtype, through, exact=False),
        )

    def gradients(self, case: Case, dtype: torch.dtype, through: tuple[str, ...], zeros: bool = False) -> Backward:
        """The candidate's gradients of a fixed random combination of the outputs named in `through`.

        `zeros`: the other outputs get gradients of zeros instead of None.
        """
        ask = partial(self.attempt_gradients, case, dtype, through, zeros=zeros)
        return self._cached(("gradients", case, dtype, through, zeros), ask)

    def attempt_gradients(
        self,
        case: Case,
        dtype: torch.dtype,
        through: tuple[str, ...],
        layout: Layout = dict,
        alone: str = "",
        zeros: bool = False,
    ) -> Backward:
        """The same without the cache; `layout` and `alone` as in `differentiate`."""
        self.cotangents(case, dtype)  # outside `try`: if these do not fit in memory, it is not the candidate's fault
        try:
            return Backward(self.differentiate(self.candidate.call, case, dtype, through, False, layout, alone, zeros))
        except NotImplementedError as error:
            if case.name not in self.refused:
                self.refused[f"gradients of {case.name}"] = diagnose.refusal(error)
            return Backward(refused=diagnose.refusal(error))
        except Exception as error:
            return Backward(fault=diagnose.exception(error, "backward"))

    def error(self, case: Case, dtype: torch.dtype, name: str, got: Tensor, truth: Tensor | None = None) -> Error:
        """An output against the truth, or against another tensor by the same budget."""
        place = self.names.index(name)
        right = self.truth(case, dtype)[place]
        yardstick = difference(self.plain(case, dtype)[place], right) if self._by_yardstick(dtype) else _UNUSED
        return compare(
            got, right if truth is None else truth, yardstick, dtype,
            log=name in self.spec.logs, recurrent=self.spec.recurrent,
        )  # fmt: skip

    def gradient_error(
        self, case: Case, dtype: torch.dtype, through: tuple[str, ...], leaf: str, got: Tensor, truth: Tensor
    ) -> Error:
        """A gradient against `truth`, which may be another tensor than the true gradient, by the latter's budget."""
        truths, yardstick = self.true_gradients(case, dtype, through), _UNUSED
        if self._by_yardstick(dtype):
            plain, right = self.plain_gradients(case, dtype, through)[leaf], truths[leaf]
            yardstick = difference(plain, right) if plain is not None and right is not None else yardstick
        siblings = max((extent(g[g != 0]) for g in truths.values() if g is not None), default=0.0)
        return compare(got, truth, yardstick, dtype, recurrent=self.spec.recurrent, siblings=siblings)

    def explain(
        self,
        case: Case,
        dtype: torch.dtype,
        name: str,
        got: Tensor | None,
        otherwise: Callable[[], str],
        through: tuple[str, ...] = (),
    ) -> str:
        """What is wrong with an output, or with the gradient of a leaf where `through` is given, in one sentence."""
        if self.locator is None or got is None:
            return otherwise()
        ask = self.locator
        found = (
            ask.gradient(self, case, dtype, through, name, got) if through else ask.output(self, case, dtype, name, got)
        )
        return found[0] or ask.with_place(otherwise(), found[1])

    def weighted(self, case: Case, dtype: torch.dtype, weights: Mapping[str, Tensor]) -> Gradients:
        """The true gradients of the loss sum(weight * output), with weights by output name."""
        inputs = self.exact(case, dtype)
        leaves, outputs = self.leaves(inputs), self.run(self._reference, inputs)
        pairs = [(o, weights[n]) for n, o in zip(self.names, outputs, strict=True) if n in weights and o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in pairs], list(leaves.values()), [w for _, w in pairs], allow_unused=True
        )
        return dict(zip(leaves, found, strict=True))

    def _by_yardstick(self, dtype: torch.dtype) -> bool:
        """Whether the budget is the error of a plain computation: half precision, except recurrent operators."""
        return dtype in HALF and not self.spec.recurrent

    def leaves(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """What is differentiated: the differentiable tensors, and the parameters of modules among the inputs."""
        found: dict[str, Tensor] = {}
        for name, value in inputs.items():
            if isinstance(value, nn.Module):
                found |= {f"{name}.{leaf}": p for leaf, p in value.named_parameters() if p.requires_grad}
            elif name in self.spec.differentiable and isinstance(value, Tensor):
                found[name] = value.requires_grad_()
        return found

    def cotangents(self, case: Case, dtype: torch.dtype) -> Outputs:
        """Fixed random gradients of the outputs, 0 where the truth is -inf.

        Rounded to `dtype`, so that an output in that dtype and the float64 reference get the same values.
        """
        return self._cached(("cotangents", case, dtype), partial(self._cotangents, case, dtype))

    def _cotangents(self, case: Case, dtype: torch.dtype) -> Outputs:
        generator = torch.Generator().manual_seed(self.seed + 1)
        drawn = (
            torch.randn(o.shape, generator=generator, dtype=torch.float64, device="cpu")
            for o in self.truth(case, dtype)
        )
        return tuple(
            weight.to(dtype).to(o.device, torch.float64).masked_fill(o == -torch.inf, 0)
            for weight, o in zip(drawn, self.truth(case, dtype), strict=True)
        )

    def differentiate(
        self,
        call: Call,
        case: Case,
        dtype: torch.dtype,
        through: tuple[str, ...],
        exact: bool,
        layout: Layout = dict,
        alone: str = "",
        zeros: bool = False,
    ) -> Gradients:
        """Gradients by leaf. `layout` changes the layout of inputs and cotangents; `alone`: the only leaf with grad.

        `zeros`: outputs not in `through` are differentiated too, with a gradient of zeros.
        """
        inputs = layout(self.exact(case, dtype) if exact else self.fresh(case, dtype))
        leaves = self.leaves(inputs)
        for leaf in [leaf for leaf in leaves if alone not in ("", leaf)]:
            leaves.pop(leaf).requires_grad_(False)
        outputs = self.run(call, inputs)
        pairs = zip(self.names, self.cotangents(case, dtype), outputs, strict=True)
        weights = layout({name: weight.to(output.dtype) * (name in through) for name, weight, output in pairs})
        asked = self.names if zeros else through
        chosen = [(o, weights[n]) for n, o in zip(self.names, outputs, strict=True) if n in asked and o.requires_grad]
        if not chosen or not leaves:
            return dict.fromkeys(leaves)
        with diagnose.inherited([o for o, _ in chosen]):
            found = torch.autograd.grad(
                [o for o, _ in chosen], list(leaves.values()), [w for _, w in chosen], allow_unused=True
            )
        return dict(zip(leaves, found, strict=True))

    def run(self, call: Call, inputs: Inputs) -> Outputs:
        """Run a call with torch's generator seeded the same every time; its state is restored afterwards."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self.generator().manual_seed(self.seed)
            outputs = call(inputs)
        if len(outputs) != len(self.names):
            raise WrongReturn(f"it gives {len(outputs)} outputs where {len(self.names)} are expected")
        return outputs

    def generator(self) -> torch.Generator:
        """The device's default generator. torch.manual_seed would seed every device type, which takes 0.3 ms."""
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator

    def _reference(self, inputs: Inputs) -> Outputs:
        return self._selected(self.spec.reference(**inputs))

    def _plain(self, inputs: Inputs) -> Outputs:
        return self._selected(self.spec.plain(**inputs))

    def _selected(self, outputs: Outputs) -> Outputs:
        return tuple(o for name, o in zip(self.spec.output_names, outputs, strict=True) if name in self.names)

    def _cached(self, key: tuple[Any, ...], make: Callable[[], Answer]) -> Answer:
        """`make()`, cached by key: a word, then the arguments, a case first.

        Out of memory raises ReferenceTooLarge for the case. A candidate's own out-of-memory error does not get here:
        `attempt` makes it a fault.
        """
        if key not in self._kept:
            try:
                self._kept[key] = make()
            except torch.OutOfMemoryError:
                raise ReferenceTooLarge(key[1]) if len(key) > 1 else ReferenceTooLarge() from None
        found: Answer = self._kept[key]
        return found
