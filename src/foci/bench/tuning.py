"""Measure launch configurations on this GPU: candidates against the rule of thumb, and the table that comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.bench.measure import Sample, Way, interleave, ratio
from foci.core.spec import Case, Spec
from foci.core.tune import Asked, Config, candidates, choosing, file_name

Clock = Callable[[Callable[[], object]], float]
Place = tuple[str, str]  # a kernel and its key
Chosen = Mapping[Place, Config]

FINALISTS = 3
GAIN = 0.98  # a candidate must take less than this share of the rule's time, in three rounds of four
# How far a candidate's results may be from the rule's: the budget of the recurrences (relative RMS).
BUDGET = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


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

    def passes(self) -> dict[str, Callable[[], tuple[Tensor | None, ...]]]:
        assert self.spec.outputs is not None
        outputs = self.forward()
        grads = [torch.ones_like(outputs[0]), *([None] * (len(self.spec.outputs(self.call)) - 1))]
        needs = [getattr(self.call, name) is not None for name in self.spec.differentiable]
        return {
            "forward": self.forward,
            "backward": lambda: self.module.backward(self.call, outputs, grads, needs),
        }


@dataclass
class Search:
    """Looks for better configurations, pass by pass and kernel by kernel; what is decided holds for what follows."""

    clock: Clock
    tell: Callable[[str], None]
    rows: dict[Place, Row]
    seen: set[Place]

    def over(self, problem: Problem, name: str, budget: float) -> None:
        """Every kernel that the problem launches and that no problem before it did."""
        for stage, run in problem.passes().items():
            with choosing(self._decided()) as asked:
                truth = run()
            for place in [place for place in asked if place not in self.seen]:
                self.seen.add(place)
                row = self._best(place, asked[place], run, truth, budget, f"{name} {stage}")
                self.tell(_line(place, row, f"{name} {stage}"))
                if row is not None:
                    self.rows[place] = row

    def _decided(self) -> dict[Place, Config]:
        return {place: row.config for place, row in self.rows.items()}

    def _best(
        self, place: Place, asked: Asked, run: Callable[[], Any], truth: Sequence[Tensor | None], budget: float,
        problem: str,
    ) -> Row | None:  # fmt: skip
        rule, *others = candidates(asked)
        quick = {}
        for config in others:
            with choosing({**self._decided(), place: config}):
                if self._fits(run, truth, budget):
                    quick[_name(config)] = config, min(self.clock(run) for _ in range(3))
        best = sorted(quick.values(), key=lambda pair: pair[1])[:FINALISTS]
        finals = {"rule": rule, **{_name(config): config for config, _ in best}}
        taken = self._race(place, run, finals)
        name = min(taken, key=lambda each: taken[each].median)
        if name == "rule" or ratio(taken[name], taken["rule"]).high >= GAIN:
            return None
        return Row(finals[name], _ms(taken[name]), _ms(taken["rule"]), problem)

    def _race(self, place: Place, run: Callable[[], Any], finals: Mapping[str, Config]) -> dict[str, Sample]:
        ways = {
            name: Way(run, lambda config=config: choosing({**self._decided(), place: config}))  # type: ignore[misc]
            for name, config in finals.items()
        }
        return interleave(ways, clock=self.clock)

    def _fits(self, run: Callable[[], Any], truth: Sequence[Tensor | None], budget: float) -> bool:
        """Whether a candidate runs at all (its memory fits the GPU) and gives what the rule gives."""
        try:
            found = run()
        except Exception as error:  # Triton's own words; a candidate that cannot be launched is none
            self.tell(f"  refused: {(str(error).strip() or repr(error)).splitlines()[0]}")
            return False
        return all(
            _apart(x, true) <= budget
            for x, true in zip(found, truth, strict=True)
            if x is not None and true is not None
        )


def search(
    spec: Spec, module: ModuleType, cases: Sequence[Case], dtype: torch.dtype, device: torch.device, *,
    clock: Clock, tell: Callable[[str], None],
) -> dict[Place, Row]:  # fmt: skip
    """What is better than the rule, by (kernel, key). A key that several problems share is measured on the first."""
    assert spec.bind is not None
    found = Search(clock, tell, {}, set())
    for case in cases:
        call = spec.bind(**case.make(dtype, device, 0))
        if reasons := module.reasons(call):
            tell(f"{spec.name} {case.name}: {'; '.join(reasons)}")
        else:
            found.over(Problem(spec, module, call), case.name, BUDGET[dtype])
    return found.rows


def write(folder: Path, rows: Mapping[Place, Row], gpu: str, versions: Mapping[str, str], date: str) -> Path:
    """The table of this GPU in the folder, these rows in place of what it had for the same kernels and keys."""
    path = folder / f"{file_name(gpu)}.json"
    kernels: dict[str, dict[str, Any]] = json.loads(path.read_text())["kernels"] if path.exists() else {}
    for (kernel, key), row in rows.items():
        kernels.setdefault(kernel, {})[key] = row.as_dict()
    table = {"gpu": gpu, "date": date, "versions": dict(versions), "kernels": kernels}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    return path


def _apart(x: Tensor, true: Tensor) -> float:
    """Relative RMS difference; where anything is not finite it is no number, and fits nothing."""
    norm = float(true.double().norm())
    return float((x.double() - true.double()).norm()) / norm if norm else float(x.double().norm())


def _name(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in config.meta.items())


def _ms(sample: Sample) -> float:
    return round(sample.median * 1e3, 5)


def _line(place: Place, row: Row | None, problem: str) -> str:
    head = f"{place[0]}[{place[1]}], {problem}: "
    if row is None:
        return f"{head}the rule's choice stays"
    return f"{head}{_name(row.config)}: {row.ms:.3f} ms for {row.rule_ms:.3f}"


def lines(table: Mapping[str, Any]) -> Iterator[str]:
    """A table in words."""
    count = sum(map(len, table["kernels"].values()))
    versions = ", ".join(f"{name} {version}" for name, version in table["versions"].items())
    yield f"{table['gpu']}: {count} configurations measured {table['date']} with {versions}"
