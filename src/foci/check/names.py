"""Match a candidate's wrong outputs to the Spec's known mistakes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foci.check.exam import Exam
from foci.core.spec import Case, Mistake, Outputs

STEPS, NUDGE = 8, 1e-4


def name_mistakes(
    exam: Exam, output: str, wrong: Sequence[Case], right: Sequence[Case], dtype: torch.dtype
) -> dict[Case, str]:
    """The sentence of the mistake that each wrong case shows; cases that no mistake explains are absent.

    A mistake matches if it reproduces the wrong output within the budget and itself differs from the truth. Of several,
    the one preferred predicts fewer errors in cases where the candidate is right.
    """
    matches: list[tuple[int, dict[Case, str]]] = []
    for mistake in exam.spec.mistakes:
        shown = {case: sentence for case in wrong if (sentence := _shows(exam, mistake, output, case, dtype))}
        if shown:
            denied = sum(_differs(exam, mistake, output, case, dtype) for case in right)
            matches.append((denied, shown))
    named: dict[Case, str] = {}
    while matches:
        matches.sort(key=lambda match: (match[0], -len(match[1].keys() - named.keys())))
        _, shown = matches.pop(0)
        for case, sentence in shown.items():
            named.setdefault(case, sentence)
    return named


def _shows(exam: Exam, mistake: Mistake, output: str, case: Case, dtype: torch.dtype) -> str | None:
    outputs = exam.forward(case, dtype).outputs
    if outputs is None:
        return None
    got = outputs[exam.names.index(output)]
    amount = _fit(exam, mistake, output, case, dtype, got) if mistake.fits else None
    expected = _predicted(exam, mistake, output, case, dtype, amount)
    if expected is None or expected.shape != got.shape or exam.error(case, dtype, output, expected).ok:
        return None
    if not exam.error(case, dtype, output, got, expected).ok:
        return None
    return mistake.sentence if amount is None else mistake.sentence.format(amount)


def _differs(exam: Exam, mistake: Mistake, output: str, case: Case, dtype: torch.dtype) -> bool:
    if mistake.fits:
        return False
    expected = _predicted(exam, mistake, output, case, dtype, None)
    truth = exam.truth(case, dtype)[exam.names.index(output)]
    return expected is not None and (expected.shape != truth.shape or not exam.error(case, dtype, output, expected).ok)


def _fit(exam: Exam, mistake: Mistake, output: str, case: Case, dtype: torch.dtype, got: Tensor) -> float:
    """The amount of a mistake that fits best, by Gauss-Newton in one variable."""
    amount = 0.0
    for _ in range(STEPS):
        here = _predicted(exam, mistake, output, case, dtype, amount)
        there = _predicted(exam, mistake, output, case, dtype, amount + NUDGE)
        if here is None or there is None or here.shape != got.shape:
            return amount
        finite = torch.isfinite(here) & torch.isfinite(there) & torch.isfinite(got)
        slope = ((there - here) / NUDGE)[finite]
        square = float((slope * slope).sum())
        if square == 0:
            return amount
        amount += max(-0.5, min(0.5, float((slope * (got[finite].double() - here[finite])).sum()) / square))
    return amount


def _predicted(
    exam: Exam, mistake: Mistake, output: str, case: Case, dtype: torch.dtype, amount: float | None
) -> Tensor | None:
    inputs = exam.exact(case, dtype)
    try:
        outputs: Outputs | None = mistake.compute(inputs) if amount is None else mistake.compute(inputs, amount)
    except torch.OutOfMemoryError:  # the error is still reported, without this diagnosis
        return None
    return None if outputs is None else outputs[exam.spec.output_names.index(output)]
