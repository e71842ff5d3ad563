"""Every planted fault is caught by the law it breaks, and named; what is right passes without a false alarm."""

from __future__ import annotations

from functools import partial

import pytest
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from foci.check.memory import default_settings
from foci.check.run import LAWS, Report, examine
from foci.ops.softmax.api import attention_with_lse
from foci.ops.softmax.conventions import adapt
from foci.ops.softmax.spec import SPEC
from tests.check import effects_gallery  # noqa: F401  its plants are in the gallery
from tests.check.gallery import GALLERY, Plant, right


def told(report: Report) -> str:
    return "\n".join(f"{row.law}: {f.sentence} {f.cases[:3]}" for row in report.rows for f in row.failures)


@pytest.mark.parametrize("plant", GALLERY, ids=lambda plant: plant.name)
def test_fault_is_caught_and_named(plant: Plant) -> None:
    with default_settings():  # which some change
        report = examine(SPEC, adapt(plant.function), only=[plant.law], **plant.options)
    assert not report.ok and report.exit_code == 1
    assert any(plant.words in failure.sentence for failure in report.failures), told(report)


def test_every_law_that_softmax_has_can_fail() -> None:
    asked = {plant.law for plant in GALLERY} | {"cut and merge", "packed = separate"}  # those two: test_laws.py
    assert {law.name for law in LAWS} - asked == {"extreme gates"}


@pytest.mark.parametrize("backend", [each.name for each in SPEC.backends if each.name not in ("flash", "triton")])
def test_ours_pass(backend: str) -> None:
    """Those that run on a CPU; the kernels are asked by tests/ops/softmax/test_kernels_triton_*."""
    report = examine(SPEC, adapt(partial(attention_with_lse, backend=backend)))
    assert report.ok, told(report)
    assert {row.law for row in report.rows if row.verdict == "not tested"} <= {"extreme gates", "custom ops"}


def test_plain_torch_passes() -> None:
    report = examine(SPEC, adapt(right))
    assert report.ok, told(report)


def test_torch_attention_passes() -> None:
    report = examine(SPEC, adapt(F.scaled_dot_product_attention))
    assert report.ok, told(report)
    assert any("softcap" in reason for reason in report.not_tested)


@pytest.mark.slow
def test_flex_passes_where_it_claims_support() -> None:
    report = examine(SPEC, adapt(flex_attention))
    assert report.ok, told(report)
    assert any("backward on CPU" in reason for reason in report.not_tested)
