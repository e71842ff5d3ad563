"""Parts are cases of their own and make the whole; the future does not matter; bad input is refused by name."""

from __future__ import annotations

import pytest
import torch

from foci.ops.scan.cases import CASES
from foci.ops.scan.probes import PROBES, sized
from foci.ops.scan.spec import SPEC
from tests.ops.recurrences import CPU

F64 = torch.float64
IDS = {"ids": lambda case: case.name}


@pytest.mark.parametrize("case", CASES, **IDS)
def test_parts_make_the_whole(case) -> None:
    inputs = case.make(F64, CPU, 0)
    whole, state = dict(zip(SPEC.output_names, SPEC.reference(**inputs), strict=True)), None
    for take in (PROBES.cut, PROBES.documents, PROBES.rows):
        for part in take(case, inputs):
            resumed = dict.fromkeys(part.resumes, state)
            found = SPEC.reference(**part.case.make(F64, CPU, 0) | resumed)
            state = found[1]
            for name, got in zip(SPEC.output_names, found, strict=True):
                place = part.place.get(name) if isinstance(part.place, dict) else part.place
                if place is not None:
                    torch.testing.assert_close(got, whole[name][place])


def test_they_apply_where_they_should() -> None:
    counts = {}
    for case in CASES:
        inputs = case.make(F64, CPU, 0)
        counts[case.name] = [len(take(case, inputs)) for take in (PROBES.cut, PROBES.documents, PROBES.rows)]
    assert counts["plain"] == [3, 0, 2] and counts["packed"] == [3, 3, 0] and counts["one token"] == [0, 0, 2]


@pytest.mark.parametrize("case", CASES, **IDS)
def test_the_future_is_changed_and_does_not_matter(case) -> None:
    inputs = case.make(F64, CPU, 0)
    future = PROBES.future(case, inputs)
    if future is None:
        assert inputs["x"].shape[1] == 1
        return
    assert not torch.equal(future.inputs["x"], inputs["x"])
    place = future.place["out"]
    assert torch.equal(SPEC.reference(**future.inputs)[0][place], SPEC.reference(**inputs)[0][place])


@pytest.mark.parametrize("bad", PROBES.bad, ids=lambda bad: bad.name)
def test_bad_input_is_refused_by_name(bad) -> None:
    with pytest.raises((ValueError, TypeError), match=bad.argument):
        SPEC.reference(**bad.change(CASES[0].make(F64, CPU, 0)))


def test_sized() -> None:
    for n in (0, 1, 33):
        assert sized(n).make(torch.float32, CPU, 0)["x"].shape == (1, n, 4)
