"""The law of memory: results depend on no uninitialised memory, strides, default dtype, or values masked out."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from foci.check import memory
from foci.check.exam import Backward, Exam, Gradients, Layout
from foci.check.laws import Finding, Findings, as_plain, law
from foci.core.spec import Case


@law(8, "unwritten memory, strides, excluded NaN")
def memory_does_not_matter(exam: Exam) -> Findings:
    """No dependence on uninitialised memory or strides.

    A strict candidate must not depend on the default dtype either, nor on NaN in keys and values that a mask excludes.
    """
    dtype, poison = exam.dtype, exam.spec.probes.poison
    within = [(memory.poisoned, memory.UNWRITTEN)]
    within += [(memory.another_default, memory.DEFAULT)] * exam.candidate.strict
    for case in exam.cases():
        if exam.outputs_without_nan(case, dtype) is None:
            continue
        for context, sentence in within:
            inputs = exam.fresh(case, dtype)
            with context():
                findings = [*_unchanged(exam, case, inputs, sentence)]
                findings += _unchanged_gradients(exam, case, dict, sentence)
            yield from findings
        for layout in (memory.strided, memory.turned):
            yield from _unchanged(exam, case, layout(exam.fresh(case, dtype)), memory.STRIDES)
            yield from _unchanged_gradients(exam, case, layout, memory.BACKWARD_STRIDES)
        spoiled = poison(case, exam.fresh(case, dtype)) if poison else None
        if spoiled is not None and exam.candidate.strict:
            yield from _unchanged(exam, case, spoiled, memory.EXCLUDED)
    through = tuple(name for name in exam.names if name not in exam.spec.logs)
    for case in exam.covering_cases(lambda case: exam.gradients(case, dtype, through).gradients is not None):
        yield from _expanded(exam, case, through)


def _expanded(exam: Exam, case: Case, through: tuple[str, ...]) -> Findings:
    """The gradients of a sum, whose own gradient is one number that is seen everywhere, and of the same in memory."""

    def seen(values: dict[str, Any]) -> dict[str, Any]:
        given = values.keys() <= set(exam.names)  # gradients of outputs; else inputs
        return {name: x.new_ones(()).expand(x.shape) for name, x in values.items()} if given else values

    def written(values: dict[str, Any]) -> dict[str, Any]:
        return {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in seen(values).items()}

    before = exam.attempt_gradients(case, exam.dtype, through, written).gradients
    found = exam.attempt_gradients(case, exam.dtype, through, seen)
    yield from _as_before(exam, case, through, before, found, memory.EXPANDED)


def _unchanged(exam: Exam, case: Case, inputs: dict[str, Any], sentence: str) -> Findings:
    """The outputs equal, within budget, those on the ordinary inputs."""
    found = exam.check_shapes(case, exam.dtype, exam.attempt(inputs))
    if found.outputs is None:
        if found.fault:
            yield Finding(case.name, None, f"{sentence} ({found.fault})")
        return
    yield from as_plain(exam, case, found.outputs, sentence)


def _unchanged_gradients(exam: Exam, case: Case, layout: Layout, sentence: str) -> Findings:
    before = exam.gradients(case, exam.dtype, exam.names).gradients
    if before is None:
        return
    found = exam.attempt_gradients(case, exam.dtype, exam.names, layout)
    yield from _as_before(exam, case, exam.names, before, found, sentence)


def _as_before(
    exam: Exam, case: Case, through: tuple[str, ...], before: Gradients | None, found: Backward, sentence: str
) -> Findings:
    if found.fault and not _raises_anyway(exam, through, found.fault):
        yield Finding(case.name, None, f"{sentence} ({found.fault})")
    for leaf, new in (found.gradients or {}).items():
        old = (before or {}).get(leaf)
        if old is None or not torch.isfinite(old).all():
            continue
        right = new is not None and exam.gradient_error(case, exam.dtype, through, leaf, new, old).ok
        yield Finding(case.name, None, None if right else f"d{leaf}: {sentence}")


def _raises_anyway(exam: Exam, through: tuple[str, ...], fault: str) -> bool:
    """Whether the plain backward of some case raises so too, but for the numbers told: then law 2 says it."""

    def opening(text: str) -> str:
        return re.split(r"[\d\[]", text)[0]

    plain = (exam.gradients(case, exam.dtype, through).fault for case in exam.cases())
    return any(opening(told) == opening(fault) for told in plain if told)
