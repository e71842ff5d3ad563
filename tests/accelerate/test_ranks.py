"""foci.accelerate.ranks: proved equal to one process, measured by rank, and the model as it was afterwards."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from foci.accelerate import ranks, zoo
from foci.accelerate.apply import apply
from foci.accelerate.degrees import Degrees
from foci.accelerate.plan import Plan
from foci.accelerate.prove import Row
from foci.accelerate.ranks import accelerate_over_ranks
from foci.accelerate.report import Report
from foci.accelerate.run import Refused
from foci.core.errors import Unsupported
from foci.core.world import World

Worlds = Callable[[int], World]


def spread(name: str, degrees: Degrees) -> tuple[dict[str, Any], list[str], bool, bool]:
    """The plan, the phases told, whether the spread model computes the same, and whether it does so restored."""
    subject = zoo.load(name)
    with torch.no_grad():
        before = subject.model(**subject.inputs, return_dict=False)[0]
        told: list[str] = []
        done = accelerate_over_ranks(
            subject, degrees, progress=lambda phase, text, end: told.append(phase) if end else None
        )
        over = done(**subject.inputs, return_dict=False)[0]
        done.restore()
        after = subject.model(**subject.inputs, return_dict=False)[0]
    return done.plan.as_dict(), told, bool((over - before).norm() <= 1e-5 * before.norm()), torch.equal(after, before)


@pytest.fixture(scope="module")
def over_two(worlds: Worlds) -> list[tuple[dict[str, Any], list[str], bool, bool]]:
    return worlds(2).run(spread, "pixart", Degrees(ring=2))


def test_it_computes_the_same_and_is_undone(over_two: list[tuple[dict[str, Any], list[str], bool, bool]]) -> None:
    assert all(same and undone for _, _, same, undone in over_two)
    assert over_two[0][1] == ["find", "split", "prove", "time", "memory", "traffic"]
    assert over_two[1][1] == []


def test_the_proof_has_outputs_and_gradients(over_two: list[tuple[dict[str, Any], list[str], bool, bool]]) -> None:
    plan = over_two[0][0]
    assert [(row["what"], row["against"]) for row in plan["proof"]] == [
        ("output", "one process"), ("output", "float64"), ("gradients", "one process"), ("gradients", "float64"),
        ("output without gradients", "one process"), ("output without gradients", "float64"),
    ]  # fmt: skip
    assert all(row["error"] <= row["budget"] == 1e-5 for row in plan["proof"])


def test_memory_and_traffic_of_every_rank(over_two: list[tuple[dict[str, Any], list[str], bool, bool]]) -> None:
    plan = over_two[0][0]
    ranks = plan["ranks"]
    assert (ranks["world"], ranks["degrees"]["ring"], ranks["backend"]) == (2, 2, "gloo")
    assert [row["rank"] for row in ranks["each"]] == [0, 1]
    assert all(0 < row["memory"] < plan["memory"]["original"] and row["messages"] > 0 for row in ranks["each"])
    # A ring of two sends each of 3 self attentions' k and v, half of [2, 64, 64] in float32, once; then the gather.
    half = 2 * 32 * 64 * 4
    gathered = 2 * 32 * 32 * 4
    assert [row["bytes"] for row in ranks["each"]] == [3 * 2 * half + gathered] * 2


def test_the_report_and_the_plan(over_two: list[tuple[dict[str, Any], list[str], bool, bool]]) -> None:
    plan = Plan.load(json.loads(json.dumps(over_two[0][0])))
    page = str(Report(plan))
    assert "pixart gives the same results over 2 ranks" in page and "Across ranks" in page
    assert "split   pos_embed: output 0, dimension 1" in page and "Compilation" not in page
    with pytest.raises(ValueError, match="plan was made over 2 ranks; expected one of a single process"):
        apply(zoo.load("pixart").model, plan)


def test_guidance_on_two_halves_proves_outputs_only(worlds: Worlds) -> None:
    found = worlds(2).run(spread, "pixart", Degrees(data=2))
    assert all(same and undone for _, _, same, undone in found)
    assert {row["what"] for row in found[0][0]["proof"]} == {"output"}
    assert found[0][0]["ranks"]["split"] is None


def guided() -> dict[str, Any]:
    done = accelerate_over_ranks(zoo.load("pixart"), Degrees(cfg=2, ulysses=2))
    done.restore()
    return done.plan.as_dict()


def test_branches_and_tokens_in_one_mesh(worlds: Worlds) -> None:
    plan = worlds(4).run(guided)[0]
    assert [(row["what"], row["error"] <= 1e-5) for row in plan["proof"]] == [("output", True)] * 2
    assert plan["ranks"]["degrees"] == {"data": 1, "cfg": 2, "pipe": 1, "ulysses": 2, "ring": 1}


def test_a_refusal_reaches_another_process_whole() -> None:
    error = Refused("m", [Row("whole model", "output", "float64", 1.0, 1e-5)])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rows) == (str(error), error.rows)


def wrong_without_gradients(degrees: Degrees) -> list[str]:
    """What is refused of a model whose spreading makes one rank's outputs wrong where no gradient is needed."""
    subject, distribute = zoo.load("pixart"), ranks.install

    def wrongly(model: Any, *given: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            model.proj_out.register_forward_hook(lambda m, given, out: out if torch.is_grad_enabled() else 1.01 * out)
        return distribute(model, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "install", wrongly)
        with pytest.raises(Refused) as refused:
            accelerate_over_ranks(subject, degrees)
    return sorted({row.what for row in refused.value.rows if not row.ok})


@pytest.mark.parametrize(("way", "missed"), [("ring", "output without gradients"), ("data", "output")])
def test_outputs_without_gradients_are_proved_too(worlds: Worlds, way: str, missed: str) -> None:
    assert worlds(2).run(wrong_without_gradients, Degrees(**{way: 2})) == [[missed]] * 2


def refused(name: str) -> str:
    try:
        accelerate_over_ranks(zoo.load(name), Degrees())
    except (Unsupported, ValueError) as error:
        return str(error)
    return ""


def test_what_cannot_be_split_is_refused_on_every_rank(worlds: Worlds) -> None:
    for said in worlds(2).run(refused, "unet"):
        assert "UNet2DConditionModel is not understood" in said
