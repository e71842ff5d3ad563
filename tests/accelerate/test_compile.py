"""Compilation: the break-even decides, blocks are found, what is compiled is eager again to the very attribute."""

from __future__ import annotations

import pytest
import torch

from foci.accelerate import zoo
from foci.accelerate.apply import apply, route
from foci.accelerate.compile import Compiled, _verdict, compile_if_it_pays, compile_parts, repeated_blocks
from foci.accelerate.plan import CompilePlan
from foci.accelerate.run import accelerate


def measured(**facts: object) -> CompilePlan:
    given = {"mode": "blocks", "calls": 100, "cost": 17.0, "call": 0.5, "compiled_call": 0.2, "break_even": 57}
    rest = {"graphs": 1, "breaks": 0, "error": 1e-7, "budget": 1e-5}
    return CompilePlan(**(given | rest | facts))


@pytest.mark.parametrize(
    ("facts", "mode", "kept", "sentence"),
    [
        ({}, "auto", "blocks", "17.0 s once, saves 300.0 ms a call: pays after 57 calls; you said 100 -> on"),
        ({"calls": 50}, "auto", "off", "pays after 57 calls; you said 50 -> off"),
        ({"calls": 50}, "on", "blocks", "you asked for it -> on"),
        ({"compiled_call": 0.6, "break_even": None}, "auto", "off", "a call is 100.0 ms slower for it: never pays"),
        ({"error": 1e-2}, "on", "off", "its result is off by 1.0e-02 of 1e-05"),
        ({"graphs_two_resolutions": 3}, "auto", "off", "a second resolution made 3 graphs"),
        ({"graphs_two_resolutions": 2}, "auto", "blocks", "on"),
    ],
)
def test_verdict(facts: dict, mode: str, kept: str, sentence: str) -> None:
    plan = _verdict(measured(**facts), mode)
    assert plan.mode == kept
    assert sentence in plan.sentence


def test_off_and_too_short_are_not_tried() -> None:
    subject = zoo.load("bert")
    run = lambda: subject.model(**subject.inputs)  # noqa: E731
    given = {"calls": 1, "other": None, "budget": 1e-5}
    assert compile_if_it_pays(subject.model, [], run, mode="off", **given)[0].sentence == "off: not asked for"
    plan, compiled = compile_if_it_pays(subject.model, [], run, mode="auto", **given)
    assert compiled is None and plan.mode == "off"
    assert "less than any compilation costs; not tried" in plan.sentence


@pytest.mark.parametrize(("name", "count"), [("flux", 5), ("pixart", 3), ("llama", 3), ("unet", 0)])
def test_repeated_blocks(name: str, count: int) -> None:
    model = zoo.load(name).model
    with route(model) as applied:
        blocks = repeated_blocks(model, applied.sites)
    assert len(blocks) == count
    assert all("Block" in type(block).__name__ or "Layer" in type(block).__name__ for block in blocks)


def test_compiled_in_place_and_back() -> None:
    model = zoo.load("pixart").model
    with route(model) as applied:
        compiled = compile_parts(model, "blocks", applied.sites)
        assert all("_compiled_call_impl" in vars(part) for part in compiled.parts)
        with compiled.paused():
            assert not any("_compiled_call_impl" in vars(part) for part in compiled.parts)
        assert all("_compiled_call_impl" in vars(part) for part in compiled.parts)
        compiled.restore()
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    assert isinstance(compiled, Compiled) and compiled.graphs == 0


@pytest.mark.slow
def test_compiled_for_real_equals_eager_and_two_resolutions_need_no_third_graph() -> None:
    subject = zoo.load("pixart")
    done = accelerate(subject.model, subject.inputs, other_inputs=subject.other, compile="on")
    decision = done.plan.compile
    assert decision.mode == "blocks", decision.sentence
    assert decision.cost > 0 and decision.error <= decision.budget
    assert decision.breaks == 0
    assert decision.graphs_two_resolutions <= 2 * decision.graphs
    with torch.no_grad():
        fast = done(**subject.inputs)[0]
        done.restore()
        torch.testing.assert_close(subject.model(**subject.inputs)[0], fast, rtol=1e-4, atol=1e-5)
    with apply(subject.model, done.plan) as applied:
        assert applied._compiled is not None
    assert not any("_compiled_call_impl" in vars(module) for module in subject.model.modules())
