"""One function per law: it runs a candidate on cases and yields Findings."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foci.check import compare, diagnose, names
from foci.check.compare import Error
from foci.check.diagnose import Close
from foci.check.exam import Exam
from foci.core.spec import Case, Place, slices_of


class NotTested(Exception):
    """Raised with the reason why a law cannot be tested on a candidate."""


@dataclass(frozen=True)
class Finding:
    """One measurement: the case, the error with its budget, and a sentence if it failed."""

    case: str
    error: Error | None = None
    sentence: str | None = None


Findings = Iterator[Finding]


@dataclass(frozen=True)
class Law:
    """A law by its number in docs/check.md; parts of one law may be separate rows."""

    number: int
    name: str
    ask: Callable[[Exam], Findings]


LAWS: list[Law] = []


def law(number: int, name: str) -> Callable[[Callable[[Exam], Findings]], Callable[[Exam], Findings]]:
    def register(ask: Callable[[Exam], Findings]) -> Callable[[Exam], Findings]:
        LAWS.append(Law(number, name, ask))
        return ask

    return register


def label(case: Case, dtype: torch.dtype) -> str:
    return f"{case.name}, {str(dtype).removeprefix('torch.')}"


@law(2, "forward")
def forward(exam: Exam) -> Findings:
    """Outputs within budget of the float64 reference."""
    plain = [name for name in exam.names if name not in exam.spec.logs]
    for dtype in exam.dtypes:
        for output in plain:
            yield from _outputs(exam, output, dtype, faults=output == plain[0])


@law(2, "logarithm")
def logarithm(exam: Exam) -> Findings:
    """The log-sum-exp, whose absolute error shows a scale wrong by 0.1 % that the outputs hide."""
    if not exam.spec.logs:
        raise NotTested("the operator has no logarithmic output")
    logs = [name for name in exam.names if name in exam.spec.logs]
    if not logs:
        raise NotTested(f"it does not give {' or '.join(exam.spec.logs)}")
    for dtype in exam.dtypes:
        for output in logs:
            yield from _outputs(exam, output, dtype, faults=False)


def _outputs(exam: Exam, output: str, dtype: torch.dtype, faults: bool) -> Findings:
    """One output over all cases; `faults`: also yield calls that raised."""
    place = exam.names.index(output)
    wrong: dict[Case, tuple[Tensor, Error]] = {}
    right: list[Case] = []
    for case in exam.cases():
        found = exam.forward(case, dtype)
        if found.outputs is None:
            if faults and found.fault:
                yield Finding(label(case, dtype), None, found.fault)
            continue
        error = exam.error(case, dtype, output, found.outputs[place])
        if error.ok:
            right.append(case)
            yield Finding(label(case, dtype), error)
        else:
            wrong[case] = found.outputs[place], error
    named = names.name_mistakes(exam, output, list(wrong), right, dtype)
    for case, (got, error) in wrong.items():
        truth = exam.truth(case, dtype)[place]

        def close(other: Tensor, got: Tensor = got, case: Case = case) -> bool:
            return exam.error(case, dtype, output, got, other).ok

        def known(got: Tensor = got, truth: Tensor = truth, case: Case = case, close: Close = close) -> str:
            return named.get(case) or diagnose.output(output, got, truth, close)

        sentence = exam.explain(case, dtype, output, got, known)
        yield Finding(label(case, dtype), error, sentence)


@law(2, "gradients")
def gradients(exam: Exam) -> Findings:
    """Every gradient of a loss on the outputs that are not logarithms."""
    if not exam.spec.differentiable:
        raise NotTested("the operator declares nothing differentiable")
    through = tuple(name for name in exam.names if name not in exam.spec.logs)
    for dtype in exam.dtypes:
        for case in _right(exam, dtype, through):
            yield from _together(exam, case, dtype, through)
    if len(through) > 1:
        right = set(_right(exam, exam.dtype, through))
        for case in exam.covering_cases(right.__contains__):  # a loss on one output has no gradient through others
            for output in through:
                yield from _gradients(exam, case, exam.dtype, (output,))
    yield from _alone(exam, through)


def one_of(outputs: tuple[str, ...], case: Case) -> str:
    """One output per case, by a hash of its name, so independent of which other cases run."""
    return outputs[zlib.crc32(case.name.encode()) % len(outputs)]


def _alone(exam: Exam, through: tuple[str, ...]) -> Findings:
    """A gradient is the same if no other input requires one: some backwards look at q's alone. One case per leaf."""
    dtype, asked = exam.dtype, set[str]()
    for case in _right(exam, dtype, through):
        together = exam.gradients(case, dtype, through).gradients or {}
        for leaf in exam.spec.differentiable:
            old = together.get(leaf)
            if old is None or leaf in asked:
                continue
            asked.add(leaf)
            found = exam.attempt_gradients(case, dtype, through, alone=leaf)
            got = (found.gradients or {}).get(leaf)
            right = got is not None and exam.gradient_error(case, dtype, through, leaf, got, old).ok
            what = "is None" if got is None else "is another"
            told = found.fault or f"d{leaf} {what} when {leaf} alone wants one: with all else frozen it trains wrong"
            yield Finding(f"{case.name}, d{leaf} alone", None, None if right or found.refused else told)


@law(2, "gradients through the logarithm")
def gradients_through_logarithm(exam: Exam) -> Findings:
    """Every gradient of a loss on all outputs together."""
    if not any(name in exam.spec.logs for name in exam.names):
        raise NotTested("it gives no logarithmic output" if exam.spec.logs else "the operator has none")
    outputs = tuple(name for name in exam.names if name not in exam.spec.logs)
    for dtype in exam.dtypes:
        for case in _right(exam, dtype, exam.names):
            # Gradients that are wrong without the logarithm already failed in the row above.
            if all(finding.sentence is None for finding in _gradients(exam, case, dtype, outputs)):
                yield from _together(exam, case, dtype, exam.names, without=outputs)


def _right(exam: Exam, dtype: torch.dtype, outputs: tuple[str, ...]) -> Iterator[Case]:
    """Cases whose outputs are right: where they are wrong, gradients are wrong for the same reason.

    NotTested only if the first dtype has no such case; a further dtype without one is skipped.
    """
    any_case = False
    for case in exam.cases():
        found = exam.forward(case, dtype).outputs
        pairs = zip(exam.names, found or (), strict=False)
        if found is not None and all(exam.error(case, dtype, n, o).ok for n, o in pairs if n in outputs):
            any_case = True
            yield case
    if not any_case and dtype == exam.dtype:
        raise NotTested(f"in no case is {' and '.join(outputs)} right")


def _together(
    exam: Exam, case: Case, dtype: torch.dtype, through: tuple[str, ...], without: tuple[str, ...] = ()
) -> Findings:
    """Gradients of a loss on these outputs; if right, also of a loss on one of them, whose error others may mask."""
    found = list(_gradients(exam, case, dtype, through, without))
    yield from found
    if len(through) > 1 and not any(finding.sentence for finding in found):
        yield from _gradients(exam, case, dtype, (one_of(through, case),), zeros=True)


def _gradients(
    exam: Exam,
    case: Case,
    dtype: torch.dtype,
    through: tuple[str, ...],
    without: tuple[str, ...] = (),
    zeros: bool = False,
) -> Findings:
    found, truths = exam.gradients(case, dtype, through, zeros), exam.true_gradients(case, dtype, through)
    if found.gradients is None:
        if found.fault:
            yield Finding(label(case, dtype), None, found.fault)
        return
    missing = [leaf for leaf, truth in truths.items() if truth is not None and truth.numel()]
    if missing and all(found.gradients[leaf] is None for leaf in missing):
        yield Finding(label(case, dtype), None, diagnose.DETACHED)
        return
    for leaf in missing:
        got, truth = found.gradients[leaf], truths[leaf]
        assert truth is not None
        error = None
        if got is not None and got.shape == truth.shape:
            error = exam.gradient_error(case, dtype, through, leaf, got, truth)
            if error.ok:
                yield Finding(label(case, dtype), error)
                continue

        def close(other: Tensor, got: Tensor | None = got, leaf: str = leaf) -> bool:
            return got is not None and exam.gradient_error(case, dtype, through, leaf, got, other).ok

        dropped = exam.true_gradients(case, dtype, without)[leaf] if without else None
        if dropped is not None and close(dropped):
            logs = " and ".join(exam.spec.logs)
            sentence = (
                f"the gradient through {logs} is dropped (d{logs} never reaches d{leaf}): merged parts, as in ring "
                "attention, would silently train wrong"
            )
        else:

            def known(leaf: str = leaf, got: Tensor | None = got, close: Close = close) -> str:
                return diagnose.gradient(leaf, got, truths, close)

            fits = got is not None and got.shape == truth.shape
            sentence = exam.explain(case, dtype, leaf, got, known, through) if fits else known()
        yield Finding(label(case, dtype), error, f"{sentence} (of a loss on {through[0]} alone)" if zeros else sentence)


# The step and tolerances of torch.autograd.gradcheck, which itself would test every element after a failure.
STEP, ABSOLUTE, SHARE = 1e-6, 1e-5, 1e-3


@law(3, "gradcheck")
def gradcheck(exam: Exam) -> Findings:
    """Gradients in float64 against differences of the candidate itself, along random directions; the smallest cases."""
    dtype = torch.float64

    def able(case: Case) -> bool:
        runs = exam.size(case) <= 20_000 and exam.forward(case, dtype).outputs is not None
        return runs and exam.gradients(case, dtype, exam.names).gradients is not None

    cases = list(exam.covering_cases(able))
    for case in cases:
        gradients = exam.gradients(case, dtype, exam.names).gradients or {}
        checked = {leaf: _differences(exam, case, leaf, g) for leaf, g in gradients.items() if g is not None}
        wrong = [f"d{leaf}" for leaf, agree in checked.items() if agree is False]
        what = f"{', '.join(wrong)}: numerical and analytical gradients differ, its backward is not its forward's"
        if any(agree is not None for agree in checked.values()):
            yield Finding(case.name, None, what if wrong else None)
    if not cases:
        raise NotTested("no case runs forward and backward in float64")


def _differences(exam: Exam, case: Case, leaf: str, gradient: Tensor) -> bool | None:
    """Whether a gradient agrees with finite differences; None if these are rounding noise (float32 internally)."""
    if not gradient.numel():
        return None
    direction = torch.randn(
        gradient.shape, generator=torch.Generator().manual_seed(2), dtype=gradient.dtype, device="cpu"
    )
    direction = (direction / direction.norm()).to(gradient.device)
    once, twice = (_along(exam, case, leaf, step * direction) / step for step in (STEP, 2 * STEP))
    return _agree(float((gradient * direction).sum()), once) if _agree(twice, once) else None


def _agree(a: float, b: float) -> bool:
    return abs(a - b) <= ABSOLUTE + SHARE * abs(b)


def _along(exam: Exam, case: Case, leaf: str, move: Tensor) -> float:
    """The central difference (f(x + move) - f(x - move)) / 2 of the loss of `Exam.gradients`, in one leaf x."""
    ends = []
    for sign in (1, -1):
        inputs = exam.fresh(case, torch.float64)
        with torch.no_grad():
            exam.leaves(inputs)[leaf].add_(sign * move)
        outputs = [output.detach() for output in exam.run(exam.candidate.call, inputs)]  # of the call that is trained
        pairs = zip(exam.cotangents(case, torch.float64), outputs, strict=True)
        ends.append(sum(float((w * o.masked_fill(o == -torch.inf, 0)).sum()) for w, o in pairs))
    return (ends[0] - ends[1]) / 2


NOISE = 10  # how many times as far apart as results of equal calls others must be, where those are not equal


@law(6, "causality")
def causality(exam: Exam) -> Findings:
    """Another future changes no earlier output, and no gradient of a loss on them; nothing non-finite crosses."""
    take, dtype = exam.spec.probes.future, exam.dtype
    if take is None:
        raise NotTested("the Spec offers no way to change the future of a case")
    for case in exam.cases():
        future = take(case, exam.fresh(case, dtype))
        if future is None or exam.outputs_without_nan(case, dtype) is None:
            continue
        before, after = (_prefix(exam, inputs, future.place) for inputs in (exam.fresh(case, dtype), future.inputs))
        if before is None or after is None:
            continue
        pairs = {name: (old, after[name]) for name, old in before.items() if name in after}
        errors = {name: compare.changed(new, old, exam.spec.causal_bitwise) for name, (old, new) in pairs.items()}
        if not all(error.ok for error in errors.values()):
            noise = _noise(exam, case, dtype, future.place, before)
            errors = {name: replace(e, budget=max(e.budget, NOISE * noise[name])) for name, e in errors.items()}
        lost = ", ".join(name for name, pair in pairs.items() if bool((pair[0].isfinite() > pair[1].isfinite()).any()))
        leaks = ", ".join(name for name, error in errors.items() if not error.ok)
        what = f"future tokens leak into {leaks} of the prefix: it would train on what it must predict"
        if lost:
            what = f"future tokens turn {lost} of the prefix into NaN or infinity: one of them would end the training"
        yield Finding(case.name, max(errors.values(), key=lambda error: error.share), what if leaks else None)


def _noise(exam: Exam, case: Case, dtype: torch.dtype, place: Place, before: dict[str, Tensor]) -> dict[str, float]:
    """How far results of equal calls are from each other, at most, in a few; what is no number excuses nothing."""
    again = [_prefix(exam, exam.fresh(case, dtype), place) or {} for _ in range(3)]
    sizes = {
        name: [compare.changed(each[name], old, False).size for each in again if name in each]
        for name, old in before.items()
    }
    return {name: max(filter(math.isfinite, each), default=0.0) for name, each in sizes.items()}


def _prefix(exam: Exam, inputs: dict, place: Place) -> dict[str, Tensor] | None:
    """Outputs, restricted to a place, and the gradients of their sum, where the candidate has any."""
    leaves = exam.leaves(inputs)
    outputs = exam.attempt(inputs).outputs
    if outputs is None:
        outputs = exam.attempt({k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.items()}).outputs
    if outputs is None:
        return None
    places = {name: slices_of(place, name) for name in exam.names}
    kept = {n: o[places[n]] for n, o in zip(exam.names, outputs, strict=True) if places[n] is not None}
    loss = [output[output != -torch.inf].sum() for output in kept.values() if output.requires_grad]
    kept = {name: output.detach().clone() for name, output in kept.items()}
    if not loss or not leaves:
        return kept
    try:
        found = torch.autograd.grad(sum(loss, torch.zeros((), device="cpu")), list(leaves.values()), allow_unused=True)
    except Exception as error:
        exam.refused["causality of gradients"] = diagnose.first_line(error)
        return kept
    return kept | {f"d{leaf}": x for leaf, x in zip(leaves, found, strict=True) if x is not None}


@law(9, "same bits twice")
def deterministic(exam: Exam) -> Findings:
    """Run twice, same bits."""
    if not exam.spec.deterministic:
        raise NotTested("the Spec does not declare it deterministic")
    dtype = exam.dtype
    for case in exam.cases():
        first = exam.outputs_without_nan(case, dtype)
        again = None if first is None else exam.attempt(exam.fresh(case, dtype)).outputs
        if first is None or again is None:
            continue
        for name, one, two in zip(exam.names, first, again, strict=True):
            error = compare.changed(two, one, bitwise=True)
            what = f"{name} differs between two equal calls: no run could be repeated, no bug bisected"
            yield Finding(case.name, error, None if error.ok else what)


def sized(exam: Exam) -> Callable[[int], Case]:
    """A function from a length to a case: the first of the Spec's that the candidate does not refuse."""
    first = exam.spec.probes.sized
    if first is None:
        raise NotTested("the Spec offers no case of a chosen length")
    return next((make for make in (first, *exam.spec.probes.simpler) if not exam.candidate.refuses(make(1))), first)


LENGTHS = (0, 1, *(block + step for block in (16, 32, 64, 128) for step in (-1, 0, 1)), 200)
BACKWARD_LENGTHS = (0, 1, 63, 64, 65)


@law(10, "any length")
def lengths(exam: Exam) -> Findings:
    """T = 0, 1 and round every block length."""
    make, dtype = sized(exam), exam.dtype
    wrong: dict[str, dict[int, Error]] = {name: {} for name in exam.names}
    passed: dict[str, list[int]] = {name: [] for name in exam.names}
    for length in LENGTHS:
        for case in exam.cases([make(length)]):
            found = exam.forward(case, dtype)
            if found.outputs is None:
                if found.fault and (length or exam.candidate.strict):
                    yield Finding(f"T={length}", None, f"at some lengths: {found.fault}")
                elif found.fault:  # a non-strict candidate may raise on empty input: that is not silent
                    exam.refused["no tokens"] = found.fault
                continue
            for name, got in zip(exam.names, found.outputs, strict=True):
                error = exam.error(case, dtype, name, got)
                if error.ok:
                    passed[name].append(length)
                    yield Finding(f"T={length}", error)
                else:
                    wrong[name][length] = error
    for name, errors in wrong.items():
        where = _lengths_in_words([*errors], passed[name])
        for length, error in errors.items():
            yield Finding(f"T={length}", error, f"{name} is wrong at {where}")
    yield from _backward_lengths(exam, make)


def _lengths_in_words(wrong: list[int], passed: list[int]) -> str:
    """Where an output is wrong; a block is to blame if it divides no such length, and all longer ones that passed."""
    if all(length in wrong for length in LENGTHS[2:]):
        return "every length (see above)"
    block = math.gcd(*(length for length in passed if length > min(wrong, default=0)))
    if block > 1 and all(length % block for length in wrong):
        return "lengths that are no multiple of its block"
    return f"T={', '.join(map(str, wrong))}"


def _backward_lengths(exam: Exam, make: Callable[[int], Case]) -> Findings:
    """Gradients at some of the lengths; if wrong at all of them, law 2 reports it."""
    through = tuple(name for name in exam.names if name not in exam.spec.logs)
    found: dict[int, list[Finding]] = {}
    for length in BACKWARD_LENGTHS:
        for case in exam.cases([make(length)]):
            outputs = exam.forward(case, exam.dtype).outputs
            pairs = zip(exam.names, outputs or (), strict=False)
            if outputs is not None and all(exam.error(case, exam.dtype, name, got).ok for name, got in pairs):
                found[length] = [*_gradients(exam, case, exam.dtype, through)]
    if any(all(finding.sentence is None for finding in findings) for findings in found.values() if findings):
        for length, findings in found.items():
            for each in findings:
                yield Finding(f"T={length}", each.error, each.sentence and f"at some lengths: {each.sentence}")


@law(11, "extreme gates")
def extreme(exam: Exam) -> Findings:
    """Gates of 0, -1e-6, -20, -1e4 and -inf in one call: finite and right, gradients too."""
    cases = [case for case in exam.problems if "extreme" in case.features]
    if not cases:
        raise NotTested("no case has extreme gates")
    for case in exam.cases(cases):
        yield from _outputs_of(exam, case)


def _outputs_of(exam: Exam, case: Case) -> Findings:
    found = exam.forward(case, exam.dtype)
    if found.outputs is None:
        if found.fault:
            yield Finding(case.name, None, found.fault)
        return
    errors = {n: exam.error(case, exam.dtype, n, got) for n, got in zip(exam.names, found.outputs, strict=True)}
    for name, error in errors.items():
        yield Finding(case.name, error, None if error.ok else f"{name} is wrong or not finite under extreme gates")
    if all(error.ok for error in errors.values()):
        yield from _gradients(exam, case, exam.dtype, exam.names)


def as_plain(exam: Exam, case: Case, outputs: Iterable[Tensor], sentence: str) -> Findings:
    """The outputs equal, within budget, those of the plain call; the sentence has a place for an output's name."""
    plain = exam.outputs_without_nan(case, exam.dtype)
    for name, got, old in zip(exam.names, outputs, plain or (), strict=False):
        error = exam.error(case, exam.dtype, name, got, old)
        yield Finding(case.name, error, None if error.ok else sentence.format(name))


def worst(findings: Iterable[Finding]) -> Error | None:
    errors = [finding.error for finding in findings if finding.error is not None]
    return max(errors, key=lambda error: error.share if not math.isnan(error.share) else math.inf, default=None)
