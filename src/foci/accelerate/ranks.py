"""Accelerate a model over ranks: split it, prove it equal to one process, measure time, memory and traffic."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foci.accelerate.apply import Applied, route
from foci.accelerate.calls import dims, letters, mask_text, spec_of
from foci.accelerate.degrees import Degrees
from foci.accelerate.plan import Plan, SitePlan, identify
from foci.accelerate.prove import Expected, Problem, Result, Row, evaluating, expected
from foci.accelerate.run import Accelerated, Progress, Refused, compare_shown, record, seconds_text, versions
from foci.accelerate.shown import Shown
from foci.accelerate.sites import find_sites
from foci.accelerate.zoo import Subject
from foci.bench.measure import Sample, clock
from foci.bench.memory import peak_memory
from foci.core.errors import Unsupported
from foci.core.select import explain
from foci.integrations.mesh import make_mesh
from foci.integrations.parallel_pipeline import Spread, install
from foci.integrations.split import SplitHandle
from foci.integrations.split_check import check
from foci.integrations.split_infer import infer
from foci.integrations.split_plan import SplitPlan, plan_for

_MOST_ROUNDS, _SECONDS = 9, 20.0


def accelerate_over_ranks(subject: Subject, degrees: Degrees, *, progress: Progress | None = None) -> Accelerated:
    """Distribute a model over all ranks of the process group, and prove it equal to one process.

    A collective call: every rank makes it, with the same model. Demonstration and measurements are in the plan's
    `ranks`, on every rank; only rank 0 calls `progress`. The model stays distributed until `.restore()` on all ranks.

    Raises Refused on all ranks, with the model restored, where an output or a gradient misses its budget; SplitError,
    Unsupported and ValueError as `foci.integrations.split.install`.
    """
    tell = progress if progress is not None and dist.get_rank() == 0 else lambda phase, text, finished: None
    model, problem = subject.model, Problem(subject.model, _inputs(subject, degrees))
    with evaluating(model):
        plan, heads = _find(subject, problem, tell)
        degrees = degrees.fill_world(dist.get_world_size(), heads)
        split = _plan(subject, degrees, tell)
        alone = copy.deepcopy(model) if dist.get_rank() == 0 else None
        # Other ways than of tokens are for sampling.
        trained = all(size == 1 for way, size in degrees.by_name.items() if way not in ("ulysses", "ring"))
        whole = expected(problem, trained=trained)
        before = _on_rank_0(lambda: _shown(subject, tell, "one process"))
        spread = _distribute(model, degrees, split)
        try:
            rows = _prove(whole, spread, plan.model, tell)
            after = _shown(subject, tell, str(degrees))
            demo = _compare(before, after, degrees, tell)
            timing, memory, ranks = _measure(problem, alone, spread, tell)
        except BaseException:
            spread.restore()
            raise
    facts = {
        "world": dist.get_world_size(), "degrees": degrees.by_name, "backend": dist.get_backend(), "text": degrees.text,
        "split": None if split is None else split.as_dict(), "lines": str(split or "").splitlines()[1:],
        "each": ranks, "parts": spread.facts(),
    }  # fmt: skip
    proof = [dataclasses.asdict(row) for row in rows]
    done = dataclasses.replace(plan, proof=proof, timing=timing, memory=memory, demo=demo, ranks=facts)
    return Accelerated(model, done, before, after, Applied(tuple(plan.names), (), spread))


def _find(subject: Subject, problem: Problem, tell: Progress) -> tuple[Plan, int]:
    """A plan of the attention sites with foci's choice of backend in one process; the smallest number of heads."""
    model = problem.model
    found = find_sites(model, problem.run, lambda: route(model))
    if not found.sites:
        reasons = [f"{where}: {why}" for where, why in found.skipped]
        raise Unsupported(f"accelerate: no attention of {type(model).__name__} runs through foci", reasons)
    sites = []
    for site in found.sites:
        spec, call = spec_of(site.calls[0][0]), site.calls[0][0]
        told = explain(spec, call)
        calls = [
            {"sizes": letters(each), "dtype": str(each[0].dtype).removeprefix("torch."), "mask": mask_text(each),
             "count": count, "milliseconds": {}}
            for each, count in site.calls
        ]  # fmt: skip
        chosen = told.chosen or spec.backends[0].name
        sites.append(
            SitePlan(site.name, site.kind, site.caller, site.via, chosen, False, calls, told.refused, spec.name)
        )
    weight = next(model.parameters())
    facts = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters()),
             "note": subject.note, "library": "diffusers"}  # fmt: skip
    dtype = str(weight.dtype).removeprefix("torch.")
    skipped = [[where, why] for where, why in found.skipped]
    shapes = list(dict.fromkeys(dims(letters(call)) for site in found.sites for call, _ in site.calls))
    tell("find", f"{len(sites)} attention sites, {', '.join(shapes[:2])}", True)
    plan = Plan(
        subject.name, identify(model), str(weight.device), dtype, sites, skipped, facts=facts, versions=versions()
    )
    return plan, min(letters(call)["H"] for site in found.sites for call, _ in site.calls)


def _plan(subject: Subject, degrees: Degrees, tell: Progress) -> SplitPlan | None:
    """The SplitPlan of the tokens: rank 0 finds and checks it, and broadcasts it."""
    size = degrees.by_name["ulysses"] * degrees.by_name["ring"]
    if size == 1:
        tell("split", f"{degrees}: the tokens stay together", True)
        return None
    known = True
    tell("split", "checking each tensor of every rank", False)

    def made() -> SplitPlan:
        nonlocal known
        model, inputs = subject.model, _smaller(subject)
        try:
            plan = plan_for(model)
        except Unsupported:
            known = False
            return infer(model, inputs, size=size)
        check(model, inputs, plan, size=size, text=degrees.text)
        return plan

    plan: SplitPlan = _on_rank_0(made, share=True)
    cuts = [cut for cut in plan.cuts if cut.module or cut.tensor in subject.inputs]
    cut = ", ".join(f"{c.module or 'the model'} ({c.tensor if isinstance(c.tensor, str) else 'output'})" for c in cuts)
    joined = ", ".join(gather.module for gather in plan.gathers)
    tell("split", f"{degrees}: at {cut}; gathered at {joined}; {'checked' if known else 'inferred and checked'} "
                  f"for every rank of {size}", True)  # fmt: skip
    return plan


def _inputs(subject: Subject, degrees: Degrees) -> Mapping[str, Any]:
    """The example inputs; with cfg, both halves of the batch get the same latents and timestep, as in guidance."""
    if degrees.by_name["cfg"] == 1:
        return subject.inputs
    return {
        name: torch.cat([value[: len(value) // 2]] * 2)
        if name in ("hidden_states", "sample", "timestep") and isinstance(value, torch.Tensor) and len(value) % 2 == 0
        else value
        for name, value in subject.inputs.items()
    }


def _smaller(subject: Subject) -> Mapping[str, Any]:
    """The smaller of the two inputs, as the check keeps every tensor of a run."""
    if subject.other is None:
        return subject.inputs

    def numbers(inputs: Mapping[str, Any]) -> int:
        return sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))

    return min(subject.inputs, subject.other, key=numbers)


def _distribute(model: nn.Module, degrees: Degrees, split: SplitPlan | None) -> Spread:
    mesh = make_mesh(**degrees.by_name, device=next(model.parameters()).device.type)
    return install(
        model, mesh, plan=split, text=degrees.text, patches=degrees.patches,
        warmup=1 if degrees.warmup is None else degrees.warmup,
    )  # fmt: skip


def _prove(whole: Expected, spread: Spread, name: str, tell: Progress) -> list[Row]:
    """The worst row over ranks, of outputs, and of gradients where one process found them."""
    tell("prove", "whole model, outputs and gradients, against one process", False)
    mine = whole.rows("one process", lambda ours: _summed(ours, spread))
    rows = [max(each, key=lambda row: _nan_as_inf(row.error)) for each in zip(*_all_gathered(mine), strict=True)]
    if not all(row.ok for row in rows):
        raise Refused(name, rows)
    parts = [f"{row.what} {row.text} from {row.against}" for row in rows]
    without = "" if True in whole.found else "   (gradients are not for cfg, data and pipe)"
    tell("prove", "   ".join([*parts, "ok"]) + without, True)
    return rows


def _nan_as_inf(error: float) -> float:
    return error if error == error else math.inf


def _summed(ours: Result, spread: Spread) -> Result:
    """Sum the parameters' gradients over ranks; inputs' gradients are complete already."""
    handle = next((each for each in spread.handles.values() if isinstance(each, SplitHandle)), None)
    if handle is None:
        return ours
    shares = {n: g for n, g in ours.gradients.items() if g is not None and not n.startswith("input ")}
    return Result(ours.outputs, {**ours.gradients, **handle.sum_shares(shares)})


def _shown(subject: Subject, tell: Progress, where: str) -> Shown | None:
    return None if subject.show is None else subject.show(lambda text: tell("show", f"{where}: {text}", False))


def _compare(before: Shown | None, after: Shown | None, degrees: Degrees, tell: Progress) -> dict[str, Any]:
    if before is None or after is None:
        return {}
    demo = compare_shown(before, after)
    if before.pictures is not None and after.pictures is not None:
        error = (after.pictures.double() - before.pictures.double()).square().mean().item()
        # Values are in [-1, 1]. JSON has no infinity.
        demo["psnr"] = 10 * math.log10(4 / error) if error else None
        if degrees.by_name["pipe"] > 1:
            words = "none: equal to the last bit" if not error else f"{demo['psnr']:.1f} dB"
            demo["sentence"] += f"; PSNR against one process {words}"
    tell("show", demo["sentence"], True)
    return demo


def _measure(
    problem: Problem, alone: nn.Module | None, spread: Spread, tell: Progress
) -> tuple[dict[str, Any], dict[str, int], list[dict[str, Any]]]:
    """Times of one process (rank 0, the others wait) and of all ranks, interleaved; memory and traffic by rank."""
    tell("time", "one process and all ranks in turn", False)
    device = next(problem.model.parameters()).device

    def one() -> Any:
        return problem.run(alone)

    with torch.no_grad():
        _collective_seconds(problem.run)
        sent = spread.sent
        peak = peak_memory(problem.run, device)
        now = spread.sent
        first = _on_rank_0(lambda: (one(), clock(one))[1], share=True)
        rounds = max(3, min(_MOST_ROUNDS, int(_SECONDS / (2 * first + 1e-9))))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            times[0].append(_on_rank_0(lambda: clock(one), share=True))
            times[1].append(_collective_seconds(problem.run))
        original = _on_rank_0(lambda: peak_memory(one, device), share=True)
    mine = {"rank": dist.get_rank(), "memory": peak, "bytes": now.bytes - sent.bytes,
            "messages": now.messages - sent.messages, "control": now.control - sent.control}  # fmt: skip
    each = _all_gathered(mine)
    timing = record({"original": Sample(tuple(times[0])), "changed": Sample(tuple(times[1]))})
    memory = {"original": original, "foci": max(row["memory"] for row in each)}
    spread_text = f"{timing['ratio_low']:.2f} .. {timing['ratio_high']:.2f}, {timing['pairs']} interleaved pairs"
    took = [seconds_text(timing[name]) for name in ("original_median", "changed_median")]
    tell("time", f"one process {took[0]}   {len(each)} ranks {took[1]}   {timing['ratio']:.2f} x ({spread_text})", True)
    mib = [f"{row['memory'] / 2**20:.1f}" for row in each]
    tell("memory", f"one process {original / 2**20:.1f} MiB   by rank {', '.join(mib)} MiB", True)
    sizes = ", ".join(f"{row['bytes'] / 2**20:.2f}" for row in each)
    tell("traffic", f"sent in one call, by rank: {sizes} MiB in {each[0]['messages']} messages", True)
    return timing, memory, each


def _collective_seconds(run: Callable[[], Any]) -> float:
    """Seconds of a run on all ranks, until the last has finished."""
    dist.barrier()
    start = time.perf_counter()
    clock(run)
    dist.barrier()
    return time.perf_counter() - start


def _on_rank_0(make: Callable[[], Any], *, share: bool = False) -> Any:
    """`make()` on rank 0 while the others wait; with `share` it is broadcast. Its error is raised on all ranks."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = make()
        except Exception as error:
            outcome[1] = error
    sent = [outcome[0] if share else None, outcome[1]]
    dist.broadcast_object_list(sent)
    if sent[1] is not None:
        raise sent[1]
    return sent[0] if share else outcome[0]


def _all_gathered(value: Any) -> list[Any]:
    """All-gather a value: every rank's, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
