"""The judge of a benchmark: a part in float64 stands for the whole, and a wrong result is far outside its budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from foci.bench.sweep import Trial
from foci.cli_bench_truth import Truth, _Cut
from foci.core.spec import Candidate, Case
from foci.ops import FUNCTIONS, SPECS

CPU = torch.device("cpu")


def share(name: str, case: Case, dtype: torch.dtype = torch.float32, spoil: Callable[..., Any] | None = None) -> Any:
    """The part of the budget that foci's own answer uses, `spoil`ed on its way to the judge."""
    spec = SPECS[name]
    assert spec.adapt is not None
    ours = spec.adapt(partial(FUNCTIONS[name], backend="chunked"), name="ours")
    inputs = case.make(dtype, CPU, 0)
    trial = Trial(spec, ours, case, inputs)
    found = trial.found()
    return Truth(spec)(inputs, spoil(found) if spoil else found, trial.weights)


def cases(*wanted: str) -> list[Any]:
    chosen = []
    for name, spec in SPECS.items():
        for case in spec.cases:
            sizes = [x.numel() for x in case.make(torch.float32, CPU, 0).values() if isinstance(x, torch.Tensor)]
            if case.name in wanted and all(sizes):
                chosen.append(pytest.param(name, case, id=f"{name}, {case.name}"))
    return chosen


SOME = ("plain", "grouped heads", "decay per head", "decay per channel", "packed", "bonus", "bias", "sink")


@pytest.mark.parametrize(("name", "case"), cases(*SOME))
def test_a_right_answer_is_within_its_budget(name: str, case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert 0 < share(name, case, dtype) <= 1


@pytest.mark.parametrize(("name", "case"), cases("plain", "grouped heads"))
@pytest.mark.parametrize("which", ["out", "gradient"])
def test_a_wrong_answer_is_not(name: str, case: Case, which: str) -> None:
    leaf = "dx" if name in ("scan", "selective_scan") else "dk"

    def spoil(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        key = "out" if which == "out" else leaf
        return found | {key: found[key] * 1.001}

    assert share(name, case, spoil=spoil) > 10


def test_nan_is_wrong() -> None:
    case = SPECS["softmax"].cases[0]
    assert not share("softmax", case, spoil=lambda found: found | {"out": found["out"] * float("nan")}) <= 1


def test_the_part_is_the_last_key_head_of_the_first_row() -> None:
    case = next(case for case in SPECS["softmax"].cases if case.name == "grouped heads")
    inputs = case.make(torch.float32, CPU, 0)
    cut = _Cut(SPECS["softmax"], inputs)
    part = cut.inputs()
    assert [list(part[name].shape) for name in "qkv"] == [[1, 19, 3, 16], [1, 19, 1, 16], [1, 19, 1, 16]]
    assert torch.equal(part["q"], inputs["q"][:1, :, 3:])
    assert cut.whole("BSGK") and not cut.whole("HK") and not cut.whole("H")


def test_a_candidate_that_gives_less_is_judged_by_what_it_gives() -> None:
    spec, case = SPECS["softmax"], SPECS["softmax"].cases[0]
    inputs = case.make(torch.float32, CPU, 0)
    bare = Candidate("bare", lambda given: (FUNCTIONS["softmax"](**given)[0],), outputs=("out",))
    trial = Trial(spec, bare, case, inputs)
    assert Truth(spec)(inputs, trial.found(), trial.weights) <= 1
