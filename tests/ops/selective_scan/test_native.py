"""The compiled scan against the equation in float64: every case, any length and number of channels, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import foci
from foci.core.errors import Unsupported
from foci.ops.selective_scan import native
from foci.ops.selective_scan.api import selective_scan
from foci.ops.selective_scan.call import bind
from foci.ops.selective_scan.spec import SPEC
from tests.ops.in_native import BUILT
from tests.ops.recurrences import BUDGET, answers, error, exact, inputs_of

pytestmark = BUILT


def problem(T: int, D: int, K: int = 5, B: int = 2) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(T)
    inputs = {n: torch.randn(B, T, s, generator=draw) for n, s in (("x", D), ("dt", D), ("B", K), ("C", K))}
    inputs["dt"] = torch.nn.functional.softplus(inputs["dt"])
    rest = {"A": -torch.rand(D, K, generator=draw), "skip": torch.randn(D, generator=draw)}
    return inputs | rest | {"state": torch.randn(B, D, K, generator=draw)}


@pytest.mark.parametrize("name", [case.name for case in SPEC.cases])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_equation_or_is_refused(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(SPEC, name, dtype)
    if native.reasons(bind(**inputs)):
        assert foci.explain("selective_scan", **inputs).chosen == "chunked"
        return
    found, truth = (
        answers(selective_scan, SPEC, inputs, "native"),
        answers(selective_scan, SPEC, exact(inputs), "reference"),
    )
    errors = {n: error(found[n], truth[n]) for n in truth if truth[n].numel()}
    assert all(e <= BUDGET[dtype] for e in errors.values()), errors


@pytest.mark.parametrize("D", [1, 8, 15, 16, 17, 40])
@pytest.mark.parametrize("T", [1, 2, 33])
def test_any_length_and_number_of_channels(T: int, D: int) -> None:
    inputs = problem(T, D)
    found, truth = (
        answers(selective_scan, SPEC, inputs, "native"),
        answers(selective_scan, SPEC, exact(inputs), "chunked"),
    )
    assert max(error(found[n], truth[n]) for n in truth) < BUDGET[torch.float32]


def test_steps_of_float32_are_not_rounded_to_the_inputs_dtype() -> None:
    inputs = problem(40, 20) | {"state": None}
    inputs["x"] = inputs["x"].bfloat16()
    found, wanted = (selective_scan(**inputs, return_state=True, backend=b)[1] for b in ("native", "chunked"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_refusals_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(4, 8)
    assert native.reasons(bind(**problem(2, 2, K=1024, B=1))) == []
    with monkeypatch.context() as without:
        without.setattr(native.native, "unavailable", lambda: ["no c++"])
        assert native.reasons(bind(**inputs)) == ["no c++"]
    with pytest.raises(Unsupported, match="float64 is not supported"):
        selective_scan(**exact(inputs), backend="native")
    with pytest.raises(Unsupported, match="K=1025 is above 1024"):
        selective_scan(**problem(2, 2, K=1025, B=1), backend="native")
