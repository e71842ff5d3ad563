"""The law of effects: a call changes nothing but its results, and its backward nothing but gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foci.check import compare, diagnose, memory
from foci.check.exam import Exam, Gradients
from foci.check.laws import Finding, Findings, as_plain, law
from foci.core.spec import Case, Inputs, Outputs

BETWEEN = "another call before the backward changes it: two layers that share the function would train wrong"
TRAINING = "{} is another when gradients are wanted: it is trained by other numbers than it gives afterwards"
INFERENCE = "{} is another %s: inference would not be what was trained"
REUSED = "{} lies in memory that the next call writes to: right until then"
SEEDED = "it seeds the generator of random numbers: whatever the program draws afterwards repeats, in every run"
SEED = 0x5EED_0F0C  # that nobody seeds with
OVERWRITTEN = "{} is overwritten: whoever uses it afterwards (a residual, the compiler) gets other numbers"


@law(15, "inputs untouched")
def inputs_untouched(exam: Exam) -> Findings:
    """No input is written to, no output is a view of one, no global setting of torch is changed; nor by a backward.

    A backward also depends on no call in between and on no backward before it, and leaves the gradient it is given.
    """
    dtype = exam.dtype
    for case in exam.cases():
        inputs = exam.fresh(case, dtype)
        seeded: list[str] = []
        with memory.default_settings() as changed:
            outputs = exam.attempt(inputs, partial(_drawing, exam, seeded)).outputs
        yield from (Finding(case.name, None, sentence) for sentence in changed + seeded)
        if outputs is None:
            continue
        yield from _unwritten(exam, case, inputs, outputs)
    through = tuple(name for name in exam.names if name not in exam.spec.logs)
    trained = [*exam.covering_cases(lambda case: exam.gradients(case, dtype, through).gradients is not None)]
    for case in exam.covering_cases(lambda case: exam.outputs_without_nan(case, dtype) is not None):
        yield from _untrained_effects(exam, case)
    for case in trained:  # found before, as calls without gradients may break those with
        yield from _backward_effects(exam, case, through)


def _unwritten(exam: Exam, case: Case, inputs: Inputs, outputs: Outputs) -> Findings:
    """Inputs are what they were, and no output is a view of one."""
    for (name, given), (_, value) in zip(_tensors(inputs), _tensors(exam.inputs(case, exam.dtype)), strict=True):
        yield _same(case, OVERWRITTEN.format(name), given, value)
        store = given.untyped_storage().data_ptr()
        if store and any(o.untyped_storage().data_ptr() == store for o in outputs):
            yield Finding(
                case.name, None, f"an output shares the memory of {name}: writing to one would change the other"
            )


def _drawing(exam: Exam, told: list[str], inputs: Inputs) -> Outputs:
    """The candidate, from a seed that nobody else gives; `told` whether it is another one afterwards."""
    generator = exam.generator()
    generator.manual_seed(SEED)
    outputs = exam.candidate.call(inputs)
    told += [SEEDED] * (generator.initial_seed() != SEED)
    return outputs


# Modes in which nobody wants a gradient; the first is that of `Exam.forward`, and "same bits twice" compares its calls.
MODES = {
    "called again": nullcontext,
    "under torch.no_grad": torch.no_grad,
    "under torch.inference_mode": torch.inference_mode,
}


def _untrained_effects(exam: Exam, case: Case) -> Findings:
    """Where nobody wants a gradient, outputs are those of the plain call, and no later call writes to them."""
    for where, mode in MODES.items():
        inputs = exam.fresh(case, exam.dtype)
        others = _other_numbers(exam, case, inputs)
        with mode():
            found = exam.check_shapes(case, exam.dtype, exam.attempt(inputs))
            before = _copies(found.outputs)
            exam.attempt(others)
        yield from _unwritten(exam, case, inputs, found.outputs or ())
        if found.fault:
            yield Finding(case.name, None, f"{where}: {found.fault}")
        yield from _reused(exam, case, found.outputs or (), before)
        another = [] if mode is nullcontext else [*as_plain(exam, case, before, INFERENCE % where)]
        yield from another
        if found.fault or any(finding.sentence for finding in another):
            return  # the next mode would say the same


def _copies(outputs: Outputs | None) -> Outputs:
    return tuple(output.detach().clone() for output in outputs or ())


def _reused(exam: Exam, case: Case, outputs: Outputs, before: Outputs) -> Findings:
    """Whether outputs are what they were before another call."""
    for name, output, old in zip(exam.names, outputs, before, strict=False):
        yield _same(case, REUSED.format(name), output.detach(), old)


def _backward_effects(exam: Exam, case: Case, through: tuple[str, ...]) -> Findings:
    """What a training step leaves behind, and what it depends on."""
    dtype, inputs = exam.dtype, exam.fresh(case, exam.dtype)
    leaves, others = exam.leaves(inputs), _other_numbers(exam, case, inputs)
    exam.leaves(others)
    first = exam.attempt(inputs)
    outputs, before = first.outputs, _copies(first.outputs)
    other = exam.attempt(others)
    if first.fault:
        yield Finding(case.name, None, f"after calls without gradients: {first.fault}")
    elif other.fault:
        yield Finding(case.name, None, f"a second call before the backward of the first: {other.fault}")
    if outputs is None or other.outputs is None:
        return
    yield from as_plain(exam, case, before, TRAINING)
    yield from _reused(exam, case, outputs, before)
    between = _copies(outputs)
    weights = dict(zip(exam.names, exam.cotangents(case, dtype), strict=True))
    asked = [n for n, output in zip(exam.names, outputs, strict=True) if n in through and output.requires_grad]
    roots = [output for name, output in zip(exam.names, outputs, strict=True) if name in asked]
    given = [weights[name].to(root.dtype) for name, root in zip(asked, roots, strict=True)]
    handed = [weight.clone() for weight in given]
    try:
        found = _differentiate(roots, leaves, handed)
    except Exception as error:
        yield Finding(case.name, None, f"{BETWEEN} ({diagnose.first_line(error)})")
        return
    yield from _same_gradients(exam, case, through, found, exam.gradients(case, dtype, through).gradients, BETWEEN)
    for (name, now), (_, value) in zip(_tensors(inputs), _tensors(exam.inputs(case, dtype)), strict=True):
        yield _same(case, f"in its backward, {OVERWRITTEN.format(name)}", now.detach(), value)
    for name, now, value in zip(asked, handed, given, strict=True):
        yield _same(case, f"in its backward, {OVERWRITTEN.format(f'the gradient of {name}')}", now, value)
    for name, output, old in zip(exam.names, outputs, between, strict=True):
        yield _same(case, f"in its backward, {OVERWRITTEN.format(name)}", output.detach(), old)
    try:
        again = _differentiate(roots, leaves, [weight.clone() for weight in given])
    except RuntimeError:  # it says so: that is not silent
        return
    what = "a second backward of the same call (retain_graph) gives another gradient"
    yield from _same_gradients(exam, case, through, again, found, what)


def _other_numbers(exam: Exam, case: Case, inputs: Inputs) -> dict[str, Any]:
    """Inputs of the same shapes; of a layer, the same layer."""
    layers = {name: value for name, value in inputs.items() if isinstance(value, torch.nn.Module)}
    return case.make(exam.dtype, exam.device, exam.seed + 1) | layers


def _differentiate(roots: list[Tensor], leaves: Mapping[str, Tensor], weights: list[Tensor]) -> Gradients:
    found = torch.autograd.grad(roots, list(leaves.values()), weights, retain_graph=True, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def _same_gradients(
    exam: Exam, case: Case, through: tuple[str, ...], found: Gradients, before: Gradients | None, sentence: str
) -> Findings:
    finite = {leaf: old for leaf, old in (before or {}).items() if old is not None and bool(old.isfinite().all())}

    def right(leaf: str, got: Tensor | None) -> bool:
        return got is not None and exam.gradient_error(case, exam.dtype, through, leaf, got, finite[leaf]).ok

    wrong = ", ".join(f"d{leaf}" for leaf in finite if not right(leaf, found[leaf]))
    if finite:
        yield Finding(case.name, None, f"{wrong}: {sentence}" if wrong else None)


def _same(case: Case, sentence: str, now: Tensor, before: Tensor) -> Finding:
    alike = now.isnan() & before.isnan()  # one NaN is another's equal, whatever its bits
    error = compare.changed(now.masked_fill(alike, 0), before.masked_fill(alike, 0), bitwise=True)
    return Finding(case.name, error, None if error.ok else sentence)


def _tensors(inputs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor among the inputs with its argument's name, including those inside masks and tuples."""
    for name, value in inputs.items():
        parts = [value]
        while parts:
            part = parts.pop()
            if isinstance(part, Tensor):
                yield name, part
            elif isinstance(part, tuple | list):
                parts += part
            elif is_dataclass(part):
                parts += [getattr(part, each.name) for each in fields(part)]
