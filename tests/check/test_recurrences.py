"""Every planted fault of a recurrence is caught by the law it breaks, and named; what is right passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foci.check.run import LAWS, Report, examine
from foci.core.spec import Spec
from foci.ops import SPECS
from tests.check.recurrences import GALLERY, Plant, right_delta, right_linear


def told(report: Report) -> str:
    return "\n".join(f"{row.law}: {f.sentence} {f.cases[:3]}" for row in report.rows for f in row.failures)


def short(name: str) -> Spec:
    """The operator on its cases of a few tokens, which name every fault too."""
    spec = SPECS[name]
    made = {case: case.make(torch.float32, torch.device("cpu"), 0)["v"].shape[1] for case in spec.cases}
    return replace(spec, cases=tuple(case for case, T in made.items() if T < 22 or "extreme" in case.features))


@pytest.mark.parametrize("plant", GALLERY, ids=lambda plant: plant.name)
def test_fault_is_caught_and_named(plant: Plant) -> None:
    spec = short(plant.operator)
    report = examine(spec, spec.adapt(plant.function), only=[plant.law], dtypes=(torch.float32,), isolated=False)
    assert not report.ok and report.exit_code == 1
    assert any(plant.words in failure.sentence for failure in report.failures), told(report)


@pytest.mark.parametrize("function", [right_linear, right_delta], ids=["linear", "delta"])
def test_a_plain_loop_passes(function) -> None:
    spec = short(function.__name__.removeprefix("right_"))
    traced = {"fake tensors", "compiled = eager", "graphs over six lengths"}  # of a loop, minutes
    report = examine(spec, spec.adapt(function), only={law.name for law in LAWS} - traced, isolated=False)
    assert report.ok, told(report)
    assert {row.law for row in report.rows if row.verdict == "not tested"} == {
        "logarithm", "gradients through the logarithm", "custom ops"
    }  # fmt: skip


def test_a_loop_compiles_anew_for_every_length() -> None:
    spec = short("linear")
    report = examine(spec, spec.adapt(right_linear), only=["graphs over six lengths"], isolated=False)
    assert "3 graphs over 3 lengths" in told(report)
