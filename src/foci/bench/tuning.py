"""Measure launch configurations on this GPU: candidates against the rule of thumb, and the table that comes of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.bench.measure import Sample, Way, interleave, ratio
from foci.core.spec import Case, Spec
from foci.core.tune import Config, Target, candidates, file_name, override_configs, record_launches, target_of

Clock = Callable[[Callable[[], object]], float]
Place = tuple[str, str]  # a kernel and its key
Chosen = Mapping[Place, Config]
Results = Mapping[str, Tensor]

FINALISTS = 3
TRIES = 3  # problems that a kernel is tried on when one of them does not run here
GAIN = 0.98  # a candidate must take less than this share of the rule's time, in three rounds of four
# How far a candidate's results may be from the rule's: the budget of the recurrences (relative RMS).
BUDGET = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
META = torch.device("meta")


class Attempt(NamedTuple):
    """One configuration of a kernel in one pass of one problem; no configuration: as the rules say."""

    case: Case
    stage: str
    place: Place
    config: Config | None = None


# Compiles attempts before they are timed and gives for each why it can be left out; empty: it is worth a try.
Ahead = Callable[[Sequence[Attempt]], Sequence[str]]


class Row(NamedTuple):
    """What was measured to be better than the rule, on which problem; times of the whole pass, in milliseconds."""

    config: Config
    ms: float
    rule_ms: float
    problem: str

    def as_dict(self) -> dict[str, Any]:
        blocks, warps, stages = dict(self.config.blocks), self.config.warps, self.config.stages
        return {
            "blocks": blocks, "warps": warps, "stages": stages, "ms": self.ms, "rule_ms": self.rule_ms,
            "problem": self.problem,
        }  # fmt: skip


@dataclass
class Problem:
    """One call of a backend, forward and backward, called directly: autograd would run them in threads of its own."""

    spec: Spec
    module: ModuleType
    call: Any

    def forward(self) -> tuple[Tensor, ...]:
        keeps = (True,) if hasattr(self.module, "kept") else ()
        found: tuple[Tensor, ...] = self.module.forward(self.call, *keeps)
        return found

    def outputs(self) -> Results:
        """What is promised; what is kept for the backward alone may have parts that nobody writes."""
        assert self.spec.outputs is not None
        names = [output.name for output in self.spec.outputs(self.call)]
        return dict(zip(names, self.forward(), strict=False))

    def passes(self) -> dict[str, Callable[[], Results]]:
        assert self.spec.outputs is not None
        outputs = self.forward()
        grads = [torch.ones_like(outputs[0]), *([None] * (len(self.spec.outputs(self.call)) - 1))]
        needs = [getattr(self.call, name) is not None for name in self.spec.differentiable]

        def backward() -> Results:
            found = self.module.backward(self.call, outputs, grads, needs)
            return {f"d{name}": x for name, x in zip(self.spec.differentiable, found, strict=False) if x is not None}

        return {"forward": self.outputs, "backward": backward}


class Job(NamedTuple):
    """One kernel with one key, and the passes of problems that launch it so."""

    place: Place
    uses: list[tuple[Case, str]]


def jobs(
    spec: Spec, module: ModuleType, cases: Sequence[Case], dtype: torch.dtype, target: Target,
    tell: Callable[[str], None],
) -> list[Job]:  # fmt: skip
    """What the problems launch, without a GPU; what most of them share comes first, since it is worth most."""
    assert spec.bind is not None
    uses: dict[Place, list[tuple[Case, str]]] = {}
    for case in cases:
        try:
            with record_launches(target):
                for stage, run in Problem(spec, module, spec.bind(**case.make(dtype, META, 0))).passes().items():
                    with override_configs({}) as asked:
                        run()
                    for place in asked:
                        uses.setdefault(place, []).append((case, stage))
        except Exception as error:  # one problem that cannot be had must not end the others
            tell(f"{spec.name} {case.name}: {_words(error)}")
    return sorted((Job(*pair) for pair in uses.items()), key=lambda job: -len(job.uses))


@dataclass
class Search:
    """Looks for better configurations, kernel by kernel; what is decided holds for what follows."""

    spec: Spec
    module: ModuleType
    dtype: torch.dtype
    device: torch.device
    clock: Clock
    tell: Callable[[str], None]
    ahead: Ahead
    until: float
    rows: dict[Place, Row] = field(default_factory=dict)

    def late(self) -> bool:
        return time.monotonic() > self.until

    def over(self, job: Job) -> Row | None:
        """The best configuration of one kernel, on the first of its problems that runs here."""
        for case, stage in job.uses[:TRIES]:
            try:
                found = self._passes(case)
                if not found:
                    continue
                row = self._best(job.place, case, stage, found[stage])
            except Exception as error:
                self._survive(error)
                self.tell(f"{job.place[0]}[{job.place[1]}], {case.name} {stage}: the rule's choice: {_words(error)}")
                continue
            late = row is None and self.late()
            self.tell(_line(job.place, row, f"{case.name} {stage}") + (" (not measured to the end)" if late else ""))
            return row
        return None

    def _passes(self, case: Case) -> dict[str, Callable[[], Results]]:
        assert self.spec.bind is not None
        call = self.spec.bind(**case.make(self.dtype, self.device, 0))
        if reasons := self.module.reasons(call):
            self.tell(f"{self.spec.name} {case.name}: {'; '.join(reasons)}")
            return {}
        with override_configs(self._decided()):
            return Problem(self.spec, self.module, call).passes()

    def _decided(self) -> dict[Place, Config]:
        return {place: row.config for place, row in self.rows.items()}

    def _best(self, place: Place, case: Case, stage: str, run: Callable[[], Results]) -> Row | None:
        with override_configs(self._decided()) as there:
            truth = run()
        asked = there[place]
        every = candidates(asked)[1:]
        # Blocks and warps first, then the stages of the best of them: all at once would be three times as many.
        quick = self._tried(place, case, stage, run, truth, [c for c in every if c.stages == asked.rule.stages])
        best = [asked.rule, *_fastest(quick)]
        more = [c for c in every if any((c.blocks, c.warps) == (b.blocks, b.warps) for b in best) and c not in best]
        quick += self._tried(place, case, stage, run, truth, more)
        taken = self._race(place, run, finals := {"rule": asked.rule, **{_name(c): c for c in _fastest(quick)}})
        name = min(taken, key=lambda each: taken[each].median)
        if name == "rule" or ratio(taken[name], taken["rule"]).high >= GAIN:
            return None
        return Row(finals[name], _ms(taken[name]), _ms(taken["rule"]), f"{case.name} {stage}")

    def _tried(
        self, place: Place, case: Case, stage: str, run: Callable[[], Results], truth: Results, configs: list[Config]
    ) -> list[tuple[Config, float]]:
        """Those that run and give what the rule gives, with their seconds."""
        if self.late():
            return []
        found = []
        refusals = self.ahead([Attempt(case, stage, place, config) for config in configs])
        for config, refused in zip(configs, refusals, strict=True):
            if self.late():
                break
            with override_configs({**self._decided(), place: config}):
                refused = refused or self._unfit(run, truth)
                if refused:
                    self.tell(f"  {_name(config)}: {refused}")
                else:
                    found.append((config, min(self.clock(run) for _ in range(3))))
        return found

    def _race(self, place: Place, run: Callable[[], Any], finals: Mapping[str, Config]) -> dict[str, Sample]:
        ways = {
            name: Way(run, lambda config=config: override_configs({**self._decided(), place: config}))  # type: ignore[misc]
            for name, config in finals.items()
        }
        return interleave(ways, clock=self.clock)

    def _unfit(self, run: Callable[[], Results], truth: Results) -> str:
        """Why a candidate is none: it cannot be launched, or it does not give what the rule gives."""
        try:
            found = run()
            far = {name: _apart(found[name], true) for name, true in truth.items()}
        except Exception as error:  # Triton's own words
            self._survive(error)
            return f"refused: {_words(error)}"
        wrong = [f"{name} by {share:.2g}" for name, share in far.items() if not share <= BUDGET[self.dtype]]
        return f"other numbers than the rule's: {', '.join(wrong)}" if wrong else ""

    def _survive(self, error: Exception) -> None:
        """After a fault of the GPU itself nothing that follows could be believed."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except Exception:
                raise error from None


def search(
    spec: Spec, module: ModuleType, cases: Sequence[Case], dtype: torch.dtype, device: torch.device, *,
    clock: Clock, tell: Callable[[str], None], ahead: Ahead = lambda attempts: [""] * len(attempts),
    until: float = math.inf,
) -> Iterator[tuple[Place, Row]]:  # fmt: skip
    """What is better than the rule, by (kernel, key), as it is found; no kernel begins after `until` (monotonic)."""
    found = Search(spec, module, dtype, device, clock, tell, ahead, until)
    todo = jobs(spec, module, cases, dtype, target_of(device), tell)
    tell(f"{spec.name}: {len(todo)} kernels to measure")
    if todo and not found.late():
        firsts = {(job.uses[0][0].name, job.uses[0][1]): job for job in todo}
        ahead([Attempt(*job.uses[0], job.place) for job in firsts.values()])
    for place, job in enumerate(todo):
        if found.late():
            left = ", ".join(f"{kernel}[{key}]" for (kernel, key), _ in todo[place:])
            tell(f"{spec.name}: the limit of time was reached; not measured: {left}")
            return
        row = found.over(job)
        if row is not None:
            found.rows[job.place] = row
            yield job.place, row


def _fastest(quick: Sequence[tuple[Config, float]]) -> list[Config]:
    return [config for config, _ in sorted(quick, key=lambda pair: pair[1])[:FINALISTS]]


def write(folder: Path, rows: Mapping[Place, Row], target: Target, versions: Mapping[str, str], date: str) -> Path:
    """The table of this GPU in the folder, these rows in place of what it had for the same kernels and keys.

    Each says when and with which versions it was measured; the table, which architecture the GPU has: what it chooses
    is compiled where there is no such GPU.
    """
    path = folder / f"{file_name(target.name)}.json"
    kernels = kernels_of(path)
    for (kernel, key), row in rows.items():
        kernels.setdefault(kernel, {})[key] = row.as_dict() | {"date": date, "versions": dict(versions)}
    folder.mkdir(parents=True, exist_ok=True)
    table = {"gpu": target.name, "target": target.architecture, "kernels": kernels}
    path.write_text(json.dumps(table, indent=1) + "\n")
    return path


def kernels_of(path: Path) -> dict[str, dict[str, Any]]:
    """What a table has, by kernel and key; nothing where there is no file, and a sentence where it is no table."""
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no table of foci tune: {error}") from error
    kernels = table.get("kernels") if isinstance(table, dict) else None
    if not isinstance(kernels, dict) or not all(isinstance(rows, dict) for rows in kernels.values()):
        raise ValueError(f"{path}: no table of foci tune: expected 'kernels', and rows of each, by its keys")
    if not all(isinstance(row, dict) and "date" in row for rows in kernels.values() for row in rows.values()):
        raise ValueError(f"{path}: no table of foci tune: expected the date of each row")
    return kernels


def _apart(x: Tensor, true: Tensor) -> float:
    """Relative RMS difference; -inf is -inf, and where anything else is not finite it is no number and fits nothing."""
    if x.shape != true.shape:
        return math.inf
    x, true = x.double(), true.double()
    apart = torch.where(x == true, 0.0, x - true).norm()
    norm = float(torch.where(true.isfinite(), true, 0.0).norm())
    return float(apart) / (norm or 1.0)


def _words(error: Exception) -> str:
    """An error in a line. Triton's begins with a place in the source and ends with what is wrong there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def _name(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in config.meta.items())


def _ms(sample: Sample) -> float:
    return round(sample.median * 1e3, 5)


def _line(place: Place, row: Row | None, problem: str) -> str:
    head = f"{place[0]}[{place[1]}], {problem}: "
    if row is None:
        return f"{head}the rule's choice stays"
    return f"{head}{_name(row.config)}: {row.ms:.3f} ms for {row.rule_ms:.3f}"
