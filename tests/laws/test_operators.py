"""Every operator in SPECS has a page, cases and a reference, and every backend it names exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foci.core.spec import Backend, Spec
from foci.ops import SPECS
from tests.laws._tree import ROOT


def faults(spec: Spec, root: Path = ROOT) -> Iterator[str]:
    """What a Spec promises and does not keep."""
    if not (root / "docs" / f"{spec.name}.md").is_file():
        yield f"docs/{spec.name}.md is missing"
    if not spec.cases:
        yield "no cases"
    if not spec.equation or not spec.paper:
        yield "no equation or paper"
    if not spec.backends:
        yield "no backends"
    for backend in spec.backends:
        if backend.missing():
            continue
        try:
            module = backend.load()
        except ModuleNotFoundError as error:
            yield f"backend {backend.name}: {error}"
            continue
        yield from (f"backend {backend.name}: no {f}()" for f in ("reasons", "forward") if not hasattr(module, f))


@pytest.mark.parametrize("name", SPECS)
def test_spec_keeps_its_promises(name: str) -> None:
    assert SPECS[name].name == name
    assert list(faults(SPECS[name])) == []


@pytest.mark.parametrize("name", SPECS)
def test_cases_are_named_once_and_make_what_the_reference_takes(name: str) -> None:
    spec = SPECS[name]
    assert len({case.name for case in spec.cases + spec.large}) == len(spec.cases + spec.large)
    assert spec.bind is not None
    for case in spec.large:
        spec.bind(**case.make(torch.float64, torch.device("meta"), 0))
    for case in spec.cases:
        inputs = case.make(torch.float64, torch.device("cpu"), 0)
        assert len(spec.reference(**inputs)) == len(spec.output_names), case.name


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"cases": ()}, "no cases"),
        ({"name": "unheard-of"}, "docs/unheard-of.md"),
        ({"paper": ""}, "paper"),
        ({"backends": ()}, "no backends"),
        ({"backends": (Backend("ghost", "foci.ops.softmax.ghost"),)}, "backend ghost"),
        ({"backends": (Backend("wrong", "foci.ops.masks"),)}, "no forward"),
    ],
)
def test_faults_are_found(change: dict, fault: str) -> None:
    assert any(fault in found for found in faults(replace(SPECS["softmax"], **change)))
