"""A candidate's answers beside the truth, each computed once."""

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
Lay = Callable[[dict[str, Any]], dict[str, Any]]
ROOM = 10 << 30  # bytes of a GPU that the truth of a large case, its inputs and its answer take at most
UNROOMY = "their truth takes up to"  # how the reason begins for which large cases are left out
_UNASKED = torch.zeros(1, device="cpu")  # a yardstick where the budget is none of a plain computation
Answer = TypeVar("Answer")


class NoRoom(Exception):
    """The truth takes more memory than there is: of a case, which can be asked nothing while others can, or of all."""

    def __init__(self, case: Case | None = None) -> None:
        super().__init__("their truth takes more memory than is free")
        self.case = case


@dataclass(frozen=True)
class Forward:
    """What a call gave: outputs, or the sentence that says what is wrong, or why it honestly refused."""

    outputs: Outputs | None = None
    fault: str | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Backward:
    """The gradients of one loss by leaf, or what went wrong, or why they were refused."""

    gradients: Gradients | None = None
    fault: str | None = None
    refused: str | None = None


class Detective(Protocol):
    """Knows more of a wrong tensor than its numbers say: where it came from."""

    def output(self, exam: Exam, case: Case, dtype: torch.dtype, name: str, got: Tensor) -> tuple[str, str]:
        """The whole sentence, "" where the cause is unknown; and where the tensor is wrong."""

    def gradient(
        self, exam: Exam, case: Case, dtype: torch.dtype, through: tuple[str, ...], leaf: str, got: Tensor
    ) -> tuple[str, str]:
        """The same of the gradient of a leaf."""

    def placed(self, sentence: str, place: str) -> str:
        """Another sentence with the place."""


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Every floating tensor in a value in another dtype; modules are changed in place, so give it a copy."""
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
    """One candidate for one Spec on one device: what every law asks, kept so that nothing is computed twice."""

    spec: Spec
    candidate: Candidate
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    seed: int = 0
    news: Callable[[str], None] = lambda step: None
    refused: dict[str, str] = field(default_factory=dict)
    detective: Detective | None = None
    roomless: set[str] = field(default_factory=set)
    _kept: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The outputs that the candidate gives."""
        return self.candidate.outputs or self.spec.output_names

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the laws that one dtype settles."""
        return self.dtypes[0]

    @property
    def problems(self) -> tuple[Case, ...]:
        """The Spec's cases, on a GPU the large ones too; without room for their truth they are kept with the reason."""
        if self.device.type != "cuda":
            return self.spec.cases
        return self._once(("problems",), lambda: self.spec.cases + self._large(torch.cuda.mem_get_info(self.device)[0]))

    def _large(self, free: int) -> tuple[Case, ...]:
        if free >= ROOM:
            return self.spec.large
        reason = f"{UNROOMY} {ROOM >> 30} GiB of the GPU, of which {free / 2**30:.1f} are free"
        self.refused |= {case.name: reason for case in self.spec.large}
        return ()

    def cases(self, cases: Iterable[Case] | None = None) -> Iterator[Case]:
        """The cases that the candidate takes and whose truth has room; the others are kept with the reason."""
        for case in self.problems if cases is None else cases:
            if case.name in self.roomless:
                continue
            reasons = self._once(("reasons", case), partial(self.candidate.refuses, case))
            if reasons:
                self.refused[case.name] = reasons[0]
            else:
                self.news(case.name)
                yield case

    def leave(self, error: NoRoom) -> bool:
        """Ask its case no more; False where that has been said, and it was asked all the same, or there is none."""
        if error.case is None:
            return False
        name = error.case.name
        known = name in self.roomless
        self.roomless.add(name)
        self.refused[name] = str(error)
        return not known

    def few(self, able: Callable[[Case], bool]) -> Iterator[Case]:
        """The smallest able cases that together show every feature, for what need not be asked of all."""
        seen: set[str] = set()
        first = True
        for case in sorted(self.cases(), key=lambda case: (self.longest(case), self.size(case))):
            if (first or case.features - seen) and able(case):
                first = False
                seen |= case.features
                yield case

    def size(self, case: Case) -> int:
        """How many numbers its inputs hold."""
        return sum(x.numel() for x in self.inputs(case, torch.float64).values() if isinstance(x, Tensor))

    def longest(self, case: Case) -> int:
        """The largest size of any dimension: what a loop goes over."""
        return max(max(x.shape, default=0) for x in self.inputs(case, torch.float64).values() if isinstance(x, Tensor))

    def inputs(self, case: Case, dtype: torch.dtype) -> dict[str, Any]:
        return self._once(("inputs", case, dtype), lambda: case.make(dtype, self.device, self.seed))

    def fresh(self, case: Case, dtype: torch.dtype) -> dict[str, Any]:
        """A copy of the inputs that a call may spoil."""
        return copy.deepcopy(self.inputs(case, dtype))

    def truth(self, case: Case, dtype: torch.dtype) -> Outputs:
        """The reference in float64 on inputs that were rounded to `dtype`."""
        return self._once(("truth", case, dtype), lambda: self.run(self._reference, self.exact(case, dtype)))

    def exact(self, case: Case, dtype: torch.dtype) -> dict[str, Any]:
        return cast(self.fresh(case, dtype), torch.float64)

    def plain(self, case: Case, dtype: torch.dtype) -> Outputs:
        """The same equation in `dtype` throughout: the yardstick of half precision."""
        return self._once(("plain", case, dtype), lambda: self.run(self._plain, self.fresh(case, dtype)))

    def declared(self, case: Case, dtype: torch.dtype) -> Outputs:
        """The reference on the very inputs: its shapes and dtypes are the promise."""
        return self._once(("declared", case, dtype), lambda: self.run(self._reference, self.fresh(case, dtype)))

    def forward(self, case: Case, dtype: torch.dtype) -> Forward:
        return self._once(
            ("forward", case, dtype), lambda: self.judge(case, dtype, self.attempt(self.fresh(case, dtype)))
        )

    def sound(self, case: Case, dtype: torch.dtype) -> Outputs | None:
        """The outputs, unless they hold NaN: that is told as a wrong forward, and NaN equals nothing, not itself."""
        outputs = self.forward(case, dtype).outputs
        return None if outputs is None or any(bool(output.isnan().any()) for output in outputs) else outputs

    def judge(self, case: Case, dtype: torch.dtype, found: Forward) -> Forward:
        """The same answer, with a fault when its shapes are not those of the truth."""
        if found.outputs is not None:
            for name, got, truth in zip(self.names, found.outputs, self.truth(case, dtype), strict=True):
                if got.shape != truth.shape:
                    return replace(found, outputs=None, fault=diagnose.shape(name, got, truth))
        if found.refused:
            self.refused[case.name] = found.refused
        return found

    def attempt(self, inputs: Inputs, call: Call | None = None) -> Forward:
        """The candidate (or a compiled form of it) on these inputs, whatever comes of it."""
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
        return self._once(
            ("true gradients", case, dtype, through),
            lambda: self.differentiate(self._reference, case, dtype, through, exact=True),
        )

    def plain_gradients(self, case: Case, dtype: torch.dtype, through: tuple[str, ...]) -> Gradients:
        return self._once(
            ("plain gradients", case, dtype, through),
            lambda: self.differentiate(self._plain, case, dtype, through, exact=False),
        )

    def gradients(self, case: Case, dtype: torch.dtype, through: tuple[str, ...], zeros: bool = False) -> Backward:
        """The candidate's gradients of a fixed random combination of the outputs named in `through`.

        `zeros`: the other outputs have gradients too, of zeros.
        """
        ask = partial(self.attempt_gradients, case, dtype, through, zeros=zeros)
        return self._once(("gradients", case, dtype, through, zeros), ask)

    def attempt_gradients(
        self,
        case: Case,
        dtype: torch.dtype,
        through: tuple[str, ...],
        lay: Lay = dict,
        alone: str = "",
        zeros: bool = False,
    ) -> Backward:
        """The same anew; `lay` and `alone` as in `differentiate`. Memory for the loss is not the candidate's affair."""
        self.cotangents(case, dtype)
        try:
            return Backward(self.differentiate(self.candidate.call, case, dtype, through, False, lay, alone, zeros))
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
        yardstick = difference(self.plain(case, dtype)[place], right) if self._by_yardstick(dtype) else _UNASKED
        return compare(
            got, right if truth is None else truth, yardstick, dtype,
            log=name in self.spec.logs, recurrent=self.spec.recurrent,
        )  # fmt: skip

    def gradient_error(
        self, case: Case, dtype: torch.dtype, through: tuple[str, ...], leaf: str, got: Tensor, truth: Tensor
    ) -> Error:
        """A gradient against a tensor that takes the truth's place, by the budget of the truth."""
        truths, yardstick = self.true_gradients(case, dtype, through), _UNASKED
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
        if self.detective is None or got is None:
            return otherwise()
        ask = self.detective
        found = (
            ask.gradient(self, case, dtype, through, name, got) if through else ask.output(self, case, dtype, name, got)
        )
        return found[0] or ask.placed(otherwise(), found[1])

    def weighted(self, case: Case, dtype: torch.dtype, weights: Mapping[str, Tensor]) -> Gradients:
        """The true gradients of another loss: its weights by output."""
        inputs = self.exact(case, dtype)
        leaves, outputs = self.leaves(inputs), self.run(self._reference, inputs)
        pairs = [(o, weights[n]) for n, o in zip(self.names, outputs, strict=True) if n in weights and o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in pairs], list(leaves.values()), [w for _, w in pairs], allow_unused=True
        )
        return dict(zip(leaves, found, strict=True))

    def _by_yardstick(self, dtype: torch.dtype) -> bool:
        """Whether the budget is the error of a plain computation: half precision, but of recurrences."""
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

        They are numbers of `dtype`: an output that comes in it, and the truth, are given the very same ones.
        """
        return self._once(("cotangents", case, dtype), partial(self._cotangents, case, dtype))

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
        lay: Lay = dict,
        alone: str = "",
        zeros: bool = False,
    ) -> Gradients:
        """Gradients by leaf. `lay`: how inputs and cotangents lie in memory; `alone`: the only leaf that wants one.

        `zeros`: what is not in `through` is differentiated too, with a gradient of zeros.
        """
        inputs = lay(self.exact(case, dtype) if exact else self.fresh(case, dtype))
        leaves = self.leaves(inputs)
        for leaf in [leaf for leaf in leaves if alone not in ("", leaf)]:
            leaves.pop(leaf).requires_grad_(False)
        outputs = self.run(call, inputs)
        pairs = zip(self.names, self.cotangents(case, dtype), outputs, strict=True)
        weights = lay({name: weight.to(output.dtype) * (name in through) for name, weight, output in pairs})
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
        """A call from the same state of torch's generator as every other; the generator is put back."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._generator().manual_seed(self.seed)
            outputs = call(inputs)
        if len(outputs) != len(self.names):
            raise WrongReturn(f"it gives {len(outputs)} outputs where {len(self.names)} are expected")
        return outputs

    def _generator(self) -> torch.Generator:
        """The default one of the device. torch.manual_seed would visit every kind of device, at 0.3 ms a call."""
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator

    def _reference(self, inputs: Inputs) -> Outputs:
        return self._chosen(self.spec.reference(**inputs))

    def _plain(self, inputs: Inputs) -> Outputs:
        return self._chosen(self.spec.plain(**inputs))

    def _chosen(self, outputs: Outputs) -> Outputs:
        return tuple(o for name, o in zip(self.spec.output_names, outputs, strict=True) if name in self.names)

    def _once(self, key: tuple[Any, ...], make: Callable[[], Answer]) -> Answer:
        """By a word and what it is asked of, a case first. The candidate's own memory is its own affair (attempt)."""
        if key not in self._kept:
            try:
                self._kept[key] = make()
            except torch.OutOfMemoryError:
                raise NoRoom(key[1]) if len(key) > 1 else NoRoom() from None
        found: Answer = self._kept[key]
        return found
