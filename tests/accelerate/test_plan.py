"""A plan decides by measurement, is saved whole, read back, and refused where it is damaged or another model's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foci.accelerate import plan as plans
from foci.accelerate import zoo
from foci.accelerate.calls import signature
from foci.accelerate.plan import Plan, choose_backend, identify, write_atomically
from foci.accelerate.run import Accelerated
from foci.accelerate.sites import Site
from foci.ops.softmax.call import bind


def site(**given: object) -> Site:
    q = torch.randn(1, 8, 2, 4)
    return Site("a.0.attn", "Attention", "Block", "softmax", ((bind(q, q, q, **given), 3),))


def test_the_specs_order_holds_unless_a_measurement_clearly_says_otherwise() -> None:
    one = site()
    key = signature(one.calls[0][0])
    own = choose_backend(one, {key: {"aten": 1.0, "chunked": 0.9}})
    assert own.backend == "aten" and not own.fixed
    decision = choose_backend(one, {key: {"aten": 1.0, "chunked": 0.5}})
    assert decision.backend == "chunked" and decision.fixed
    assert decision.others["aten"] == ["2.00 x the time here"]
    assert "T x S" in decision.others["reference"][0]
    assert decision.calls[0]["count"] == 3 and decision.calls[0]["milliseconds"] == {"aten": 1000.0, "chunked": 500.0}


def test_a_backend_that_cannot_is_not_measured_and_gives_its_reasons() -> None:
    measured: dict = {}
    decision = choose_backend(site(softcap=5.0), measured)
    assert decision.backend == "chunked"
    assert "softcap" in decision.others["aten"][0]
    assert all("aten" not in times for times in measured.values())


def test_saved_and_loaded_is_equal(bert: Accelerated, tmp_path: Path) -> None:
    path = bert.plan.save(tmp_path / "plan.json")
    assert Plan.load(path) == bert.plan
    assert Plan.load(json.loads(path.read_text())) == bert.plan
    assert json.loads(path.read_text())["schema"] == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda plan: plan | {"schema": 99}, "has schema 99; this foci reads schema 1"),
        (lambda plan: {"a": 1}, "is not a plan of foci"),
        (lambda plan: {k: v for k, v in plan.items() if k != "sites"}, "is damaged"),
        (lambda plan: plan | {"surprise": 1}, "is damaged"),
        (lambda plan: plan | {"sites": [plan["sites"][0] | {"backend": "magic"}]}, "the backend 'magic'"),
        (lambda plan: plan | {"fingerprint": "0"}, "its fingerprint does not fit"),
    ],
)
def test_damaged_plan_is_refused(bert: Accelerated, tmp_path: Path, change: object, sentence: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(change(bert.plan.as_dict())))
    with pytest.raises(ValueError, match=sentence):
        Plan.load(path)


def test_unreadable_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"schema": 1, "sites": [')
    with pytest.raises(ValueError, match="is not JSON"):
        Plan.load(tmp_path / "half.json")


def test_what_is_no_plan_is_named() -> None:
    for wrong in (None, 3, b"plan.json"):
        with pytest.raises(TypeError, match=r"^plan must be a Plan, its content or the path of its file, got"):
            Plan.load(wrong)  # type: ignore[arg-type]


def test_foreign_model_is_named(bert: Accelerated) -> None:
    with pytest.raises(ValueError, match=r"another model than this LlamaForCausalLM: its class is BertModel"):
        bert.plan.require_same_model(identify(zoo.load("llama").model))
    mine = bert.plan.identity
    other = replace(mine, config=mine.config | {"num_hidden_layers": 4})
    with pytest.raises(ValueError, match=r"config.num_hidden_layers is 3 in the plan and 4 here"):
        bert.plan.require_same_model(other)
    with pytest.raises(ValueError, match=r"has weights"):
        bert.plan.require_same_model(replace(mine, modules={}))
    bert.plan.require_same_model(identify(zoo.load("bert").model))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomically(tmp_path / "plan.json", "old")

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plans.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
