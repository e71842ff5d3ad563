"""Accelerate a model: find its attention, plan, prove, time, compile if it pays, and keep the record."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from foci.accelerate.apply import Applied, denoiser, library_of, route
from foci.accelerate.calls import dims, letters
from foci.accelerate.compile import compile_if_it_pays
from foci.accelerate.plan import REFERENCE, CompilePlan, Plan, choose_backend, identify
from foci.accelerate.prove import Problem, Row, evaluating, prove_model, prove_site, relative_rms, worst
from foci.accelerate.shown import Shown
from foci.accelerate.sites import FoundSites, find_sites
from foci.bench.measure import Sample, Way, interleave, ratio
from foci.bench.memory import peak_memory
from foci.core.device import machine, own_version
from foci.core.errors import Unsupported

if TYPE_CHECKING:
    from foci.accelerate.report import Report

Progress = Callable[[str, str, bool], None]
Show = Callable[[Callable[[str], None]], Shown]


class Refused(Unsupported):
    """The plan exceeds the error budget; the model was restored. `rows` has every comparison."""

    def __init__(self, name: str, rows: list[Row]) -> None:
        self.name, self.rows = name, rows
        bad = [f"{row.where}: {row.what} is {row.error:.1e} from {row.against}, budget {row.budget:.0e}{row.excluded}"
               for row in rows if not row.ok]  # fmt: skip
        super().__init__(f"accelerate: the plan for {name} is refused and the model restored", bad)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.rows)  # so that it can be sent from another rank


@dataclass
class Accelerated:
    """A model routed to foci. `plan` has every decision and figure; calling it calls the model."""

    model: Any
    plan: Plan
    before: Shown | None = field(default=None, repr=False)
    after: Shown | None = field(default=None, repr=False)
    _applied: Applied | None = field(default=None, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def restore(self) -> None:
        """Restore the model's original objects."""
        if self._applied is not None:
            self._applied.restore()

    @property
    def report(self) -> Report:
        """The report as a page: `str(report)` is its HTML."""
        from foci.accelerate.report import Report

        return Report(self.plan, self.before, self.after)

    def save(self, folder: str | Path) -> list[Path]:
        """Write plan.json, report.html and the pictures into a folder, each atomically; it is made if need be.

        Raises TypeError or ValueError for what cannot be a folder.
        """
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"save: folder must be a path, got {folder!r:.200}")
        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"save: folder {folder} cannot be made: {error.strerror}") from error
        return [*self.report.save(place), self.plan.save(place / "plan.json")]


def accelerate(
    model: Any,
    example_inputs: Any,
    *,
    other_inputs: Mapping[str, Any] | None = None,
    compile: Literal["auto", "on", "off"] = "auto",
    calls: int = 100,
    name: str = "",
    note: str = "",
    show: Show | None = None,
    progress: Progress | None = None,
) -> Accelerated:
    """Route the attention of a model through foci, after a proof. For a Diffusers pipeline, that of its denoiser.

    example_inputs: keyword arguments of the call (a mapping), or its positional ones (a tuple or one tensor).
    other_inputs: the same call at another resolution; compiled code is then also tried on it.
    compile: auto compiles if the measured break-even is at most `calls` calls; on always; off never.
    show(progress): a demonstration with the model for the report, run before and after.
    progress(phase, text, finished) is called as phases proceed.

    The model stays accelerated until `.restore()`. Raises Refused, with the model restored, where an output or a
    gradient misses its error budget; Unsupported for a model without attention that foci can route; ValueError or
    TypeError for arguments that do not fit.
    """
    _check_options(compile, calls, other_inputs, {"name": name, "note": note})
    tell = progress or (lambda phase, text, finished: None)
    whole = model
    model, inputs, beside = _denoiser(model, example_inputs)
    _require_eager(model)
    problem = Problem(model, inputs)
    name = name or type(whole).__name__
    with evaluating(model):
        found = _find(problem, tell)
        plan = _plan(problem, found, name, note, beside, tell)
        rows = _prove(problem, found, plan, tell)
        before, after = _show(model, plan, show, tell)
        timing, memory = _time(problem, plan, tell)
    applied = route(model, plan.sites)
    try:
        budget = max(row.budget for row in rows if row.where == "whole model" and row.against == "original")
        decision = _compile(problem, plan, applied, compile, calls, other_inputs, budget, tell)
    except BaseException:
        applied.restore()
        raise
    plan = dataclasses.replace(
        plan,
        proof=[dataclasses.asdict(row) for row in rows],
        timing=timing,
        memory=memory,
        compile=decision,
        demo=compare_shown(before, after),
    )
    return Accelerated(whole, plan, before, after, applied)


def _check_options(compile: object, calls: object, other_inputs: object, texts: Mapping[str, object]) -> None:
    """Before minutes of work, and whether or not they will be used."""
    if compile not in ("auto", "on", "off"):
        raise ValueError(f"accelerate: compile must be 'auto', 'on' or 'off', got {compile!r}")
    if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
        raise ValueError(f"accelerate: calls must be a whole number from 1 up, got {calls!r}")
    if other_inputs is not None and not isinstance(other_inputs, Mapping):
        raise TypeError(
            f"accelerate: other_inputs must be a mapping of keyword arguments, or None, got {other_inputs!r:.200}"
        )
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"accelerate: {name} must be a text, got {text!r:.200}")


def _require_eager(model: nn.Module) -> None:
    # Hooks see only the outside of a compiled module, and its graphs would keep the code they traced.
    if hasattr(model, "_orig_mod") or any("_compiled_call_impl" in vars(module) for module in model.modules()):
        raise ValueError(f"accelerate: {type(model).__name__} is compiled already; pass the model before torch.compile")


def _denoiser(model: Any, given: Any) -> tuple[nn.Module, dict[str, Any], list[list[str]]]:
    """The module to accelerate, keyword arguments of a call of it, and a pipeline's other modules, with the reason."""
    part, module = denoiser(model, "accelerate")
    if module is model:
        return module, _keywords(module, given), []
    seen: list[dict[str, Any]] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not seen:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
            seen.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in bound.arguments.items()})

    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**given) if isinstance(given, Mapping) else model(*(given if isinstance(given, tuple) else (given,)))
    finally:
        hook.remove()
    if not seen:
        raise ValueError(f"accelerate: {type(model).__name__} did not call its {part} with these example_inputs")
    others = [[k, f"beside the {part}, which is what runs at every step; accelerate it by itself"]
              for k, v in model.components.items() if isinstance(v, nn.Module) and k != part]  # fmt: skip
    return module, seen[0], others


def _keywords(model: nn.Module, given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    args = given if isinstance(given, tuple | list) else (given,)
    try:
        return dict(inspect.signature(model.forward).bind(*args).arguments)
    except TypeError as error:
        raise ValueError(f"accelerate: example_inputs do not fit {type(model).__name__}.forward: {error}") from error


def _find(problem: Problem, tell: Progress) -> FoundSites:
    tell("find", "running the model", False)
    model = problem.model
    found = find_sites(model, problem.run, lambda: route(model))
    if not found.sites:
        raise Unsupported(
            f"accelerate: no attention of {type(model).__name__} runs through foci",
            [f"{where}: {why}" for where, why in found.skipped] or ["no attention call was seen in a run"],
        )
    parents = {site.name.rpartition(".")[0] for site in found.sites}
    shapes = dict.fromkeys(dims(letters(call)) for site in found.sites for call, _ in site.calls)
    sizes = ", ".join(list(shapes)[:2]) + (f" and {len(shapes) - 2} more shapes" if len(shapes) > 2 else "")
    many, blocks = len(found.sites), len(parents)
    skipped = f", {len(found.skipped)} left" if found.skipped else ""
    tell(
        "find", f"{many} attention site{'s' * (many > 1)} in {blocks} block{'s' * (blocks > 1)}, {sizes}{skipped}", True
    )
    return found


def _plan(problem: Problem, found: FoundSites, name: str, note: str, beside: list[list[str]], tell: Progress) -> Plan:
    tell("plan", "measuring each backend on each shape", False)
    measured: dict[Any, dict[str, float]] = {}
    sites = [choose_backend(site, measured) for site in found.sites]
    model = problem.model
    weight = next(model.parameters())
    facts = {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "note": note,
        "library": library_of(model),
    }
    plan = Plan(
        name,
        identify(model),
        str(weight.device),
        str(weight.dtype).removeprefix("torch."),
        sites,
        [[where, why] for where, why in found.skipped] + beside,
        facts=facts,
        versions=versions(),
    )
    chosen: dict[tuple[str, str], list[Any]] = {}
    for site in sites:
        chosen.setdefault((site.operator, site.backend), []).append(site)
    parts = []
    for (operator, backend), its in chosen.items():
        others = "; ".join(f"{name}: {why[0]}" for name, why in its[0].others.items() if name != REFERENCE)
        parts.append(f"{len(its)} x {operator} -> {backend}" + (f" ({others})" if others else ""))
    tell("plan", ", ".join(parts), True)
    return plan


def versions() -> dict[str, Any]:
    """Versions and machine that a plan was made with."""
    here = machine()
    packages = {name: version for name, version in here.packages.items() if version}
    return {
        "foci": own_version(),
        "python": here.python,
        "torch": here.torch,
        **packages,
        "system": here.system,
        "cpu": here.cpu,
        "instructions": " ".join(here.isa),
        "threads": here.threads,
        "gpu": ", ".join(gpu.name for gpu in here.gpus) or "none",
    }


def _prove(problem: Problem, found: FoundSites, plan: Plan, tell: Progress) -> list[Row]:
    rows: list[Row] = []
    for place, site in enumerate(found.sites):
        tell("prove", f"site {place + 1} of {len(found.sites)} against float64", False)
        rows += prove_site(site, plan.backends[site.name])
    tell("prove", "whole model, outputs and gradients, against itself in float64", False)
    rows += prove_model(problem, lambda: route(problem.model, plan.sites))
    if not all(row.ok for row in rows):
        raise Refused(plan.model, rows)
    parts = []
    sites = [row for row in rows if row.where != "whole model"]
    whole = [row for row in rows if row.where == "whole model"]
    for title, some, prefix in (
        ("forward", sites, "out"),
        ("gradients", sites, "gradient"),
        ("whole model", whole, "output"),
        ("its gradients", whole, "gradients"),
    ):
        row = worst(some, prefix)
        if row is not None:
            parts.append(f"{title} {row.text}")
    tell("prove", "   ".join([*parts, "ok"]), True)
    return rows


def _show(model: nn.Module, plan: Plan, show: Show | None, tell: Progress) -> tuple[Shown | None, Shown | None]:
    if show is None:
        return None, None
    before = show(lambda text: tell("show", f"before: {text}", False))
    with route(model, plan.sites):
        after = show(lambda text: tell("show", f"after: {text}", False))
    tell("show", compare_shown(before, after)["sentence"], True)
    return before, after


def compare_shown(before: Shown | None, after: Shown | None) -> dict[str, Any]:
    """The facts of both demonstrations, and their difference."""
    if before is None or after is None:
        return {}
    facts: dict[str, Any] = {"kind": before.kind, "before": dict(before.facts), "after": dict(after.facts)}
    if before.lines:
        facts |= {"lines_before": list(before.lines), "lines_after": list(after.lines)}
    a, b = before.values, after.values
    if a is not None and b is not None and a.shape == b.shape:
        facts["difference"] = (a.double() - b.double()).abs().max().item()
        facts["relative"] = relative_rms(b, a)
    facts["sentence"] = _sentence(before, after, facts)
    return facts


def _sentence(before: Shown, after: Shown, facts: Mapping[str, Any]) -> str:
    if "right" in before.facts:
        total = before.facts["samples"]
        shares = [f"{100 * shown.facts['right'] / total:.1f} %" for shown in (before, after)]
        largest = facts["difference"]
        pixels = f"pixels differ by at most {largest:.0e} of 2" if largest else "every pixel equal to the last bit"
        return f"{total} digits from the same noise: {shares[0]} read right before, {shares[1]} after, {pixels}"
    if "tokens" in before.facts:
        same = "the same" if before.lines == after.lines else "NOT the same"
        remark = f"; {after.facts['remark']}" if "remark" in after.facts else ""
        return f"{before.facts['tokens']} greedy tokens, {same} before and after{remark}"
    apart = f"apart by at most {facts['difference']:.0e}" if facts["difference"] else "equal to the last bit"
    return f"{len(before.lines)} sentences, embeddings {apart}"


def _time(problem: Problem, plan: Plan, tell: Progress) -> tuple[dict[str, Any], dict[str, int]]:
    tell("time", "original and foci in turn", False)

    def routed() -> Applied:
        return route(problem.model, plan.sites)

    with torch.no_grad():
        ways = {"original": Way(problem.run), "changed": Way(problem.run, routed)}
        timing = record(interleave(ways, rounds=11, seconds=20.0))
        device = torch.device(plan.device)
        memory = {"original": peak_memory(problem.run, device)}
        with routed():
            memory["foci"] = peak_memory(problem.run, device)
    spread = f"{timing['ratio_low']:.2f} .. {timing['ratio_high']:.2f}, {timing['pairs']} interleaved pairs"
    tell(
        "time",
        f"original {seconds_text(timing['original_median'])}   foci {seconds_text(timing['changed_median'])}   "
        f"{timing['ratio']:.2f} x ({spread})",
        True,
    )
    return timing, memory


def record(samples: Mapping[str, Sample]) -> dict[str, Any]:
    """The times as plan.json keeps them; the ratio is original / changed, with the middle half of the rounds."""
    original, changed = samples["original"], samples["changed"]
    gain = ratio(original, changed)
    return {
        "original": list(original.seconds),
        "changed": list(changed.seconds),
        "original_median": original.median,
        "changed_median": changed.median,
        "ratio": gain.median,
        "ratio_low": gain.low,
        "ratio_high": gain.high,
        "pairs": len(original.seconds),
        "threads": torch.get_num_threads(),
    }


def seconds_text(seconds: float) -> str:
    """A time for people: 2.41 s, 57.3 ms."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _compile(
    problem: Problem,
    plan: Plan,
    applied: Applied,
    mode: str,
    calls: int,
    other: Mapping[str, Any] | None,
    budget: float,
    tell: Progress,
) -> CompilePlan:
    tell("compile", "measuring what it costs and saves", False)
    with evaluating(problem.model):
        decision, compiled = compile_if_it_pays(
            problem.model,
            plan.names,
            problem.run,
            mode=mode,
            calls=calls,
            other=None if other is None else (lambda: problem.run(inputs=other)),
            budget=budget,
        )
    applied._compiled = compiled
    tell("compile", decision.sentence, True)
    return decision
