"""A sweep: right before fast, tuples differentiated through what counts, nothing accumulated, refusals with reasons."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foci.bench.ceilings import Ceilings
from foci.bench.record import STAGES
from foci.bench.sweep import Options, Trial, sweep
from foci.core.errors import Unsupported
from foci.core.spec import Candidate, Case
from foci.ops.softmax.api import attention_with_lse
from foci.ops.softmax.cases import case
from foci.ops.softmax.spec import SPEC

TOP = Ceilings(1e12, 1e11)
QUICK = Options(torch.float32, torch.device("cpu"), rounds=3, seconds=0.01)
CASE = case("plain", B=1, T=8, H=2, K=8)
OURS = Candidate("ours", lambda given: attention_with_lse(**given))


def always(inputs: object, found: object, weights: object) -> float:
    return 0.5


def run(candidates: list[Candidate], judge: object = always, options: Options = QUICK, problem: Case = CASE) -> list:
    return list(sweep(SPEC, candidates, [problem], options, TOP, judge))  # type: ignore[arg-type]


def test_every_stage_of_every_candidate_is_recorded() -> None:
    records = run([OURS, replace(OURS, name="again")])
    assert [(r.stage, r.candidate) for r in records] == [(s, c) for s in STAGES for c in ("ours", "again")]
    for record in records:
        assert record.median and record.fast and record.slow and record.fast <= record.median <= record.slow
        assert record.rounds == 3 and record.error == 0.5 and record.floor and record.peak and not record.refused


def test_the_work_of_a_stage() -> None:
    forward, backward, both = (r.flops for r in run([OURS]))
    assert backward == 2.5 * forward and both == 3.5 * forward


def test_no_speed_is_reported_of_a_wrong_result() -> None:
    records = run([OURS], judge=lambda *rest: 1.01)
    assert len(records) == 3
    assert all(r.median is None and r.refused == "wrong: 1.01 of the error budget" for r in records)
    assert all(r.median is None for r in run([OURS], judge=lambda *rest: float("nan")))


def test_what_cannot_run_says_why() -> None:
    def fails(given: object) -> tuple[Tensor, ...]:
        raise RuntimeError("no kernel\nat all")

    def unable(given: object) -> tuple[Tensor, ...]:
        raise Unsupported("attention: backend 'x' cannot run this call", ["no window", "no sink"], "try another")

    def lists(given: object) -> tuple[Tensor, ...]:
        raise NotImplementedError("\nno operator for:\n    query\n    key\n" + "too long " * 100)

    refusing = replace(OURS, name="refusing", refuses=lambda case: ["it is Tuesday"])
    unsupported, listing = replace(OURS, name="unable", call=unable), replace(OURS, name="listing", call=lists)
    records = run([refusing, replace(OURS, name="failing", call=fails), unsupported, listing, OURS])
    said = {r.candidate: r.refused for r in records}
    listed = said.pop("listing")
    assert listed.startswith("NotImplementedError: no operator for: query key too long too")
    assert len(listed) < 650
    assert said == {
        "refusing": "it is Tuesday", "failing": "RuntimeError: no kernel", "unable": "no window; no sink", "ours": "",
    }  # fmt: skip


def test_what_has_no_backward_is_timed_forward() -> None:
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("incorrect results on this GPU")

    def call(given):
        out, lse = attention_with_lse(**given)
        return Refusing.apply(out), lse

    asked: list[set[str]] = []

    def judge(inputs, found, weights) -> float:
        asked.append(set(found) | set(weights))
        return 0.5

    records = run([replace(OURS, call=call)], judge=judge)
    assert {r.stage: (r.refused, bool(r.median)) for r in records} == {
        "forward": ("", True),
        "backward": ("RuntimeError: incorrect results on this GPU", False),
        "both": ("RuntimeError: incorrect results on this GPU", False),
    }
    assert asked == [{"out", "lse"}]


def test_a_gradient_that_a_candidate_does_not_give_is_told_of_a_peer_and_wrong_of_ours() -> None:
    def call(given):
        return attention_with_lse(given["q"], given["k"], given["v"].detach())

    loose, strict = replace(OURS, call=call), replace(OURS, call=call, strict=True)
    assert {(r.stage, r.without) for r in run([loose])} == {("forward", ""), ("backward", "v"), ("both", "v")}
    assert {r.refused for r in run([strict])} == {"wrong: it gives no gradient of v"}


def test_gradients_do_not_accumulate_and_reach_what_counts() -> None:
    inputs = CASE.make(torch.float32, torch.device("cpu"), 0)
    trial = Trial(SPEC, OURS, CASE, inputs)
    assert trial.through == ["out"]
    first, second = trial.both()[1], trial.both()[1]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(leaf.grad is None for leaf in trial.leaves.values())
    with_lse = Trial(SPEC, OURS, replace(CASE, features=frozenset({"dlse"})), inputs)
    assert with_lse.through == ["out", "lse"]
    assert not torch.equal(with_lse.both()[1][0], first[0])


def test_the_backward_alone_gives_the_same_gradients_twice() -> None:
    trial = Trial(SPEC, OURS, CASE, CASE.make(torch.float32, torch.device("cpu"), 0))
    back = trial.ways(("backward",))["backward"]
    once, twice = back(), back()
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))  # type: ignore[call-overload]
