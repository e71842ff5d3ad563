"""Laws about parts of a case: cut along its tokens, unpacked into its documents, split into batch entries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foci.check import compare
from foci.check.exam import Exam
from foci.check.laws import Finding, Findings, NotTested, label, law
from foci.core.spec import Case, Inputs, Outputs, Part, slices_of
from foci.merge.algebra import fold

MERGED = "what is merged from two parts is not the whole: split keys and ring attention would be wrong"
RESUMED = "a part that resumes from the state of the one before is not the whole: generation would drift from training"
MAPPED = "the parts' maps of the state, combined, are not the whole's: sequences split over devices would be wrong"


@law(4, "cut and merge")
def cut(exam: Exam) -> Findings:
    """Any cut along the tokens equals the whole: merged, or each part resumed from the state of the one before."""
    take = exam.spec.probes.cut
    if take is None:
        raise NotTested("the Spec offers no way to cut a case")
    if exam.names != exam.spec.output_names:
        raise NotTested(f"merging needs {' and '.join(exam.spec.output_names)}")
    for dtype in dict.fromkeys((torch.float64, *exam.dtypes[:1])):
        for case in exam.cases():
            parts = take(case, exam.fresh(case, dtype))
            found = _parts(exam, parts, dtype)
            if found is None:
                continue
            if not any(part.resumes for part in parts):
                merge = exam.spec.merge
                merged = () if merge is None else tuple(fold([merge(*outputs) for outputs in found]))
                yield from _same(exam, case, dtype, dict(zip(exam.names, merged, strict=False)), MERGED)
            elif (whole := exam.outputs_without_nan(case, dtype)) is not None:
                joined = _joined(exam, whole, parts, found)
                yield from _same(exam, case, dtype, dict(zip(exam.names, joined, strict=True)), RESUMED, whole)
                yield from _same(exam, case, dtype, _mapped(exam, dtype, parts), MAPPED, whole)


@law(5, "packed = separate")
def documents(exam: Exam) -> Findings:
    """Packed sequences, also of 0 and 1 tokens, give the same as alone."""
    yield from _pieces(exam, exam.spec.probes.documents, "a packed document differs from itself alone")


@law(7, "batch slot")
def rows(exam: Exam) -> Findings:
    """An entry of the batch gives the same as alone."""
    yield from _pieces(exam, exam.spec.probes.rows, "a row of the batch differs from itself alone")


Take = Callable[[Case, dict], tuple[Part, ...]]


def _pieces(exam: Exam, take: Take | None, sentence: str) -> Findings:
    if take is None:
        raise NotTested("the Spec offers no way to take a case apart")
    dtype = exam.dtype
    for case in exam.cases():
        whole = exam.outputs_without_nan(case, dtype)
        parts = take(case, exam.fresh(case, dtype))
        found = _parts(exam, parts, dtype)
        if whole is None or found is None:
            continue
        for name, got, alone in zip(exam.names, whole, _joined(exam, whole, parts, found), strict=True):
            error = exam.error(case, dtype, name, got, alone)
            if exam.spec.batch_bitwise and not torch.equal(got, alone):
                error = compare.changed(got, alone, bitwise=True)
            why = None if error.ok else f"{name}: {sentence}: {_whose(exam, case, dtype, name, got, alone)}"
            yield Finding(label(case, dtype), error, why)


def _whose(exam: Exam, case: Case, dtype: torch.dtype, name: str, got: Tensor, alone: Tensor) -> str:
    """What is wrong where a part is not what it is alone."""
    if exam.error(case, dtype, name, got, alone).ok:
        return "its last digits depend on what is beside it"
    return "alone it is wrong" if exam.error(case, dtype, name, got).ok else "tokens of others leak in"


def _parts(exam: Exam, parts: Sequence[Part], dtype: torch.dtype) -> list[Outputs] | None:
    """The candidate's outputs for every part; None if there are no parts or one of them fails."""
    if not parts or any(exam.candidate.refuses(part.case) for part in parts):
        return None
    found: list[Outputs] = []
    for part in parts:
        inputs = _inputs(exam, part, dtype)
        inputs |= {name: found[-1][exam.names.index(name)] for name in part.resumes}
        outputs = _called(exam, inputs)
        if outputs is None:
            return None
        found.append(outputs)
    return found


def _called(exam: Exam, inputs: Inputs) -> Outputs | None:
    """The outputs, in memory that the call of the next part does not write to."""
    outputs = exam.attempt(inputs).outputs
    return None if outputs is None else tuple(output.clone() for output in outputs)


def _inputs(exam: Exam, part: Part, dtype: torch.dtype) -> dict:
    return copy.deepcopy(part.case.make(dtype, exam.device, exam.seed))


def _joined(exam: Exam, base: Outputs, parts: Sequence[Part], found: Sequence[Outputs]) -> Outputs:
    """The outputs of the parts assembled into a whole; `base` where no part covers it."""
    joined = tuple(output.clone() for output in base)
    for part, outputs in zip(parts, found, strict=True):
        for name, target, got in zip(exam.names, joined, outputs, strict=True):
            if (place := slices_of(part.place, name)) is not None:
                target[place] = got
    return joined


def _mapped(exam: Exam, dtype: torch.dtype, parts: Sequence[Part]) -> dict[str, Tensor]:
    """The final state by combining the parts' affine maps of the state, each measured with two calls.

    Combined in float64, as other libraries keep states in float32 whatever the inputs' dtype.
    """
    ask, merge, name = exam.spec.probes.transition, exam.spec.merge, parts[-1].resumes[0]
    if ask is None or merge is None:
        return {}
    maps = []
    for part in parts:
        inputs = _inputs(exam, part, dtype)
        inputs.pop(name, None)
        offset, transition = _called(exam, inputs), _called(exam, ask(inputs))
        if offset is None or transition is None:
            return {}
        place = exam.names.index(name)
        maps.append(merge(transition[place].double(), offset[place].double()))
    whole = fold(maps)
    start: Tensor = _inputs(exam, parts[0], dtype).get(name, torch.zeros_like(whole.offset))
    return {name: whole.apply(start.double())}


def _same(
    exam: Exam, case: Case, dtype: torch.dtype, outputs: dict[str, Tensor], sentence: str, whole: Outputs | None = None
) -> Findings:
    """Compare outputs with the reference, or with the candidate's own `whole`, whose errors other laws report."""
    for name, got in outputs.items():
        error = exam.error(case, dtype, name, got, None if whole is None else whole[exam.names.index(name)])
        yield Finding(label(case, dtype), error, None if error.ok else sentence)
