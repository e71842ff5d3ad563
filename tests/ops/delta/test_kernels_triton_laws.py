"""Laws of the kernels in bfloat16, with gradients through one output alone: no GPU is needed to see them broken.

On a GPU they are asked of all cases (benchmarks/laws.py), of each through one output. Through the final state alone,
which the outputs drown in most gradients, identical keys with a beta of 2 once took 2.2 of the budget of gates, and
erase keys that are not the written ones 1.1 of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foci.check.exam import Exam
from foci.check.laws_graph import LAWS
from foci.check.run import run_law as law_of
from foci.cli_check import candidate_of
from foci.core.spec import Case
from foci.core.tune import interpreting
from foci.ops import FUNCTIONS
from foci.ops.delta.cases import Delta
from foci.ops.delta.spec import SPEC
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture

if not interpreting():
    pytest.skip("a GPU is asked by `foci check --device cuda`", allow_module_level=True)

CPU = torch.device("cpu")
HARD = ("identical keys", "identical keys, beta of 1", "identical keys, beta of 2", "everything")
GATED = ("decay per token", "no whole chunks", "gates as narrow as q", "erase", "extreme gates per token")


def steep(times: float) -> Case:
    """Gates like those of models, but so many times as steep."""
    return Delta(
        f"gates {times} times", B=1, T=130, H=2, K=8, decay="token",
        gates=lambda draw, *shape: times * draw.gates(*shape),
    ).case  # fmt: skip


def erased_by_its_keys() -> Case:
    """Erase keys that are the written ones: what telescopes without them has to here too."""
    case = Delta("erased by its keys", B=1, T=70, H=2, K=8, alike="identical", full=True).case

    def make(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
        made = case.make(dtype, device, seed)
        return made | {"erase": made["k"].clone()}

    return replace(case, make=make)


def never_forgotten() -> Case:
    """One key without gates: what rounding left of dS once took 1.2 of the budget of beta's gradient."""
    return Delta("never forgotten", B=1, T=512, H=1, K=64, alike="identical", beta=1.9, full=True).case


def unforgotten() -> Case:
    """One key, gates per channel of 0: with d as one bfloat16 gates' gradient took 2.3 of its budget."""
    return Delta(
        "unforgotten per channel", B=1, T=70, H=1, K=16, decay="channel", alike="identical", full=True,
        gates=lambda draw, *shape: 0.0 * draw.gates(*shape),
    ).case  # fmt: skip


def faint() -> Case:
    """Without gates, where beta's gradient is over beta: betas of 0, and such as leave next to nothing of dv."""
    case = Delta("faint betas", B=1, T=70, H=2, K=8, beta=2.0).case

    def make(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
        made = case.make(dtype, device, seed)
        made["beta"][:, ::3], made["beta"][:, 1::6], made["beta"][:, 4::6] = 0.0, 1e-30, 1e-12
        return made

    return replace(case, make=make)


def named(names: Iterable[str]) -> list[Case]:
    known = {case.name: case for case in SPEC.cases}
    return [known[name] for name in names]


def exam_of(*cases: Case) -> Exam:
    candidate = candidate_of(SPEC, FUNCTIONS["delta"], "triton", "cuda")
    return Exam(replace(SPEC, cases=cases, large=()), candidate, CPU, (torch.bfloat16,))


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("through", [("state",), ("out",)], ids="+".join)
@pytest.mark.parametrize(
    "case",
    [*named(HARD), erased_by_its_keys(), never_forgotten(), unforgotten(), faint(), *map(steep, (1, 4, 16))],
    ids=lambda case: case.name,
)
def test_gradients_through_one_output_alone_keep_the_budget(case: Case, through: tuple[str, ...]) -> None:
    exam = exam_of(case)
    found, truth = (ask(case, torch.bfloat16, through) for ask in (exam.gradients, exam.true_gradients))
    assert found.gradients is not None, found
    for leaf, right in truth.items():
        got = found.gradients[leaf]
        if right is None:
            assert got is None or not got.any(), leaf
        else:
            assert got is not None, leaf
            error = exam.gradient_error(case, torch.bfloat16, through, leaf, got, right)
            assert error.ok, (leaf, error)


@pytest.mark.usefixtures("halves")
def test_no_gate_of_a_prefix_knows_what_comes_later() -> None:
    """fall is the future's: which of two sums a gate's gradient takes may not hang on it where both should be 0."""
    (law,) = (law for law in LAWS if law.name == "causality")
    row = law_of(exam_of(*named(GATED)), law)
    assert row.cases == len(GATED) and not row.failures, row.failures


@pytest.mark.usefixtures("halves")
def test_a_gate_before_which_there_is_nothing_gets_nothing() -> None:
    """What v dv - d dv leaves there is rounding, and the gradient of a gate on a state of zeros is 0."""
    case = Delta("a first token", B=2, T=1, H=2, K=8, decay="token").case
    found = exam_of(case).gradients(case, torch.bfloat16, ("out", "state"))
    assert found.gradients is not None, found
    gate = found.gradients["log_decay"]
    assert gate is not None and not gate.any()
