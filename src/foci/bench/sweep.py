"""Candidates against each other on an operator's shapes: first right, then timed, forward, backward and both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.bench.ceilings import Ceilings
from foci.bench.measure import Sample, Way, alone, clock_on, host_seconds, interleave
from foci.bench.memory import peak_memory
from foci.bench.record import STAGES, Record
from foci.core.errors import Unsupported
from foci.core.spec import Candidate, Case, Inputs, Outputs, Spec

_WRONG = "wrong"
_LONGEST = 600  # of an error that lists its reasons
_FAR = 10.0  # what takes so many times as long as the fastest gets three rounds
Found = Mapping[str, Tensor]
# (inputs, what the candidate gave: outputs by name and gradients as d<name>, weights of the outputs) ->
# the share of the error budget used, or None where nothing could be compared.
Judge = Callable[[Inputs, Found, Found], float | None]


class Options(NamedTuple):
    """How a sweep measures: every stage for at most `seconds` a candidate, in `rounds` at most."""

    dtype: torch.dtype
    device: torch.device
    rounds: int = 15
    seconds: float = 0.5
    stages: tuple[str, ...] = STAGES


class Trial:
    """One candidate on one problem: how it is called, differentiated and timed."""

    def __init__(self, spec: Spec, candidate: Candidate, case: Case, inputs: Inputs) -> None:
        names = candidate.outputs or spec.output_names
        # A gradient reaches only what a model would use: `out`, and what the problem is about.
        self.through = [n for n in names if n == "out" or n == spec.output_names[0] or f"d{n}" in case.features]
        self.candidate, self.names, self.inputs = candidate, names, inputs
        self.leaves = {
            name: x.detach().requires_grad_()
            for name, x in inputs.items()
            if name in spec.differentiable and isinstance(x, Tensor)
        }
        self.weights: dict[str, Tensor] = {}

    def outputs(self, inputs: Inputs) -> dict[str, Tensor]:
        given: Outputs = self.candidate.call(inputs)
        return dict(zip(self.names, given, strict=True))

    def forward(self) -> object:
        with torch.no_grad():
            return self.candidate.call(self.inputs)

    def both(self) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...]]:
        outputs = self.outputs({**self.inputs, **self.leaves})
        return outputs, self.gradients(outputs)

    def gradients(self, outputs: Found, keep: bool = False) -> tuple[Tensor | None, ...]:
        """By autograd.grad, which returns gradients and adds them to nothing; None where the candidate has none."""
        used = [outputs[name] for name in self.through]
        weights = [self._weight(name, outputs[name]) for name in self.through]
        leaves = list(self.leaves.values())
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            used, leaves, weights, retain_graph=keep, allow_unused=True
        )
        return found

    def found(self, stages: Sequence[str] = STAGES) -> dict[str, Tensor]:
        """Everything it computes in these stages, to be judged."""
        if tuple(stages) == ("forward",):
            with torch.no_grad():
                outputs = self.outputs(self.inputs)
            for name in self.through:
                self._weight(name, outputs[name])
            return outputs
        outputs, gradients = self.both()
        named = {name: x.detach() for name, x in outputs.items()}
        return named | {f"d{n}": x for n, x in zip(self.leaves, gradients, strict=True) if x is not None}

    def ways(self, stages: Sequence[str]) -> dict[str, Callable[[], object]]:
        ways: dict[str, Callable[[], object]] = {"forward": self.forward, "both": self.both}
        if "backward" in stages:
            held = self.outputs({**self.inputs, **self.leaves})
            ways["backward"] = lambda: self.gradients(held, keep=True)
        return {stage: ways[stage] for stage in stages}

    def _weight(self, name: str, output: Tensor) -> Tensor:
        """A fixed random direction, the same for every candidate of this problem."""
        if name not in self.weights:
            draw = torch.Generator(output.device).manual_seed(len(name))
            self.weights[name] = torch.randn(output.shape, generator=draw, device=output.device).to(output.dtype)
        return self.weights[name]


def sweep(
    spec: Spec,
    candidates: Sequence[Candidate],
    cases: Sequence[Case],
    options: Options,
    top: Ceilings,
    judge: Judge,
) -> Iterator[Record]:
    """One record for every case, candidate and stage. No speed is reported of a result outside its budget."""
    for case in cases:
        inputs = case.make(options.dtype, options.device, 0)
        blank = Record(
            spec.name, case.name, "", str(options.dtype).removeprefix("torch."), options.device.type, ""
        )  # fmt: skip
        right: list[_Right] = []
        for candidate in candidates:
            verdict, refused = _examined(Trial(spec, candidate, case, inputs), case, judge, options.stages)
            yield from (
                replace(blank, candidate=candidate.name, stage=s, **why._asdict()) for s, why in refused.items()
            )
            right.append(verdict)
        for stage in options.stages:
            yield from _timed(spec, [each for each in right if stage in each.stages], stage, options, top, blank)
        del right, inputs


class _Why(NamedTuple):
    """Why there is no time, as a record has it."""

    refused: str
    fault: str = ""


class _Right(NamedTuple):
    """What may be timed: these stages; `share` of the error budget is used, and no gradient given of `without`."""

    trial: Trial
    stages: tuple[str, ...]
    share: float | None = None
    without: str = ""


def _examined(trial: Trial, case: Case, judge: Judge, stages: tuple[str, ...]) -> tuple[_Right, dict[str, _Why]]:
    """The stages of a candidate that get a time, and why the others get none."""
    if reasons := trial.candidate.refuses(case):
        return _Right(trial, ()), dict.fromkeys(stages, _Why("; ".join(reasons)))
    verdict, refused = _judged(trial, judge, stages)
    if refused and refused.fault != _WRONG and "forward" in stages and len(stages) > 1:
        verdict, again = _judged(trial, judge, ("forward",))  # what cannot be differentiated can still run forward
        if verdict.stages:
            return verdict, {stage: refused for stage in stages if stage != "forward"}
        refused = again
    return verdict, dict.fromkeys(stages, refused) if refused else {}


def _judged(trial: Trial, judge: Judge, stages: tuple[str, ...]) -> tuple[_Right, _Why | None]:
    """The verdict on these stages together, and why they get no time; None: they do."""
    try:
        found = trial.found(stages)
        share = judge(trial.inputs, found, trial.weights)
    except Exception as error:  # somebody's code; its own words are the reason
        return _Right(trial, ()), _why(error)
    missing = [] if stages == ("forward",) else [name for name in trial.leaves if f"d{name}" not in found]
    if missing and (trial.candidate.strict or len(missing) == len(trial.leaves)):
        return _Right(trial, ()), _Why(f"{_WRONG}: it gives no gradient of {', '.join(missing)}", _WRONG)
    if share is not None and not share <= 1:
        return _Right(trial, (), share), _Why(f"{_WRONG}: {share:.3g} of the error budget", _WRONG)
    return _Right(trial, stages, share, ", ".join(missing)), None


def _runs(trial: Trial, stage: str) -> tuple[_Why | None, Callable[[], object]]:
    """A stage that ran once, or why it does not: a result can be right and its backward not run twice."""
    try:
        run = trial.ways((stage,))[stage]
        run()
    except Exception as error:  # somebody's code, as above
        return _why(error), trial.forward
    return None, run


def _why(error: Exception) -> _Why:
    """The first line of what went wrong, and _LONGEST letters of all where a list follows.

    After a fault of the GPU itself nothing that follows could be believed.
    """
    if "CUDA error" in str(error):
        raise error
    if isinstance(error, torch.OutOfMemoryError):
        return _Why("out of memory")
    if isinstance(error, Unsupported):
        return _Why("; ".join(error.reasons) or error.what)
    name, lines = type(error).__name__, [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else ""
    if said.endswith(":"):
        said = " ".join(lines)[:_LONGEST]
    return _Why(f"{name}: {said}", name)


def _timed(
    spec: Spec, right: Sequence[_Right], stage: str, options: Options, top: Ceilings, blank: Record
) -> Iterator[Record]:
    runs: dict[str, Callable[[], object]] = {}
    known = {each.trial.candidate.name: each for each in right}
    for name, each in known.items():
        refused, run = _runs(each.trial, stage)
        if refused:
            yield replace(blank, candidate=name, stage=stage, **refused._asdict())
        else:
            runs[name] = run
    ways = {name: Way(run) for name, run in runs.items()}
    taken = interleave(
        ways, rounds=options.rounds, seconds=options.seconds * len(ways), far=_FAR, clock=clock_on(options.device)
    ) if ways else {}  # fmt: skip
    hosts = {name: host_seconds(runs[name]) for name in ways} if options.device.type == "cuda" else {}
    gpu = alone(ways, hosts, options.device)
    for name, sample in taken.items():
        work = _work(spec, known[name].trial.inputs, stage)
        yield replace(
            blank,
            candidate=name,
            stage=stage,
            **_figures(sample),
            host=hosts.get(name),
            alone=gpu.get(name),
            peak=peak_memory(runs[name], options.device),
            error=known[name].share,
            without="" if stage == "forward" else known[name].without,
            flops=work[0],
            bytes=work[1],
            floor=top.floor(*work),
        )


def _figures(sample: Sample) -> dict[str, Any]:
    spread = {"fast": sample.quantile(0.2), "slow": sample.quantile(0.8)}
    return {"median": sample.median, **spread, "rounds": len(sample.seconds)}


def _work(spec: Spec, inputs: Mapping[str, Any], stage: str) -> tuple[float, float]:
    """Operations and bytes of a stage: the backward reads what the forward does and writes as much again."""
    assert spec.work is not None and spec.bind is not None
    work = spec.work(spec.bind(**inputs))
    times = {"forward": 1.0, "backward": work.backward, "both": 1.0 + work.backward}[stage]
    moved = {"forward": 1.0, "backward": 2.0, "both": 3.0}[stage]
    return work.flops * times, work.bytes * moved
