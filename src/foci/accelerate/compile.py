"""Compile a routed model, as a whole or by its repeated blocks, if the measured break-even says it pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from foci.accelerate.plan import CompilePlan
from foci.accelerate.prove import max_error, tensors_of
from foci.bench.measure import Way, clock, interleave

Run = Callable[[], Any]
# Seconds: the least that compiling a real block has ever taken on a CPU; if all calls take less, nothing is measured.
_LEAST_COST = 3.0


@dataclass
class Compiled:
    """Modules compiled in place, and the counts of graphs and graph breaks."""

    parts: list[nn.Module]
    counter: _Counter = field(repr=False)

    def restore(self) -> None:
        """Back to eager: the compiled call is an attribute of each instance, so the class shows through again."""
        for part in self.parts:
            vars(part).pop("_compiled_call_impl", None)
        self.parts = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it the modules run eagerly; their compiled code is kept."""
        kept = [vars(part).pop("_compiled_call_impl") for part in self.parts]
        try:
            yield
        finally:
            for part, call in zip(self.parts, kept, strict=True):
                vars(part)["_compiled_call_impl"] = call

    @property
    def graphs(self) -> int:
        return self.counter.graphs

    @property
    def breaks(self) -> int:
        return self.counter.breaks()


class _Counter:
    """The inductor backend, counting the graphs it is given; breaks are read from dynamo's own counters."""

    def __init__(self) -> None:
        from torch._dynamo.utils import counters

        self.graphs = 0
        self._all = counters["graph_break"]
        self._before = sum(self._all.values())

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo import lookup_backend

        self.graphs += 1
        return lookup_backend("inductor")(graph, inputs)

    def breaks(self) -> int:
        return sum(self._all.values()) - self._before


def compile_parts(model: nn.Module, mode: str, sites: Sequence[str]) -> Compiled:
    """Compile in place: `whole` the model, `blocks` its repeated blocks that hold the sites."""
    counter = _Counter()
    parts = [model] if mode == "whole" else repeated_blocks(model, sites)
    for part in parts:
        part.compile(backend=counter)
    return Compiled(parts, counter)


def repeated_blocks(model: nn.Module, sites: Sequence[str]) -> list[nn.Module]:
    """Elements of the outermost ModuleLists whose class occurs repeatedly, if they contain every site; else []."""
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        holding = [
            child for key, child in module.named_children() if any(s.startswith(f"{name}.{key}.") for s in sites)
        ]
        again = [child for child in holding if sum(type(child) is type(other) for other in holding) > 1]
        inside = {id(part) for whole in found for part in whole.modules()}
        found += [child for child in again if id(child) not in inside]
    inside = {id(part) for whole in found for part in whole.modules()}
    return found if all(id(model.get_submodule(site)) in inside for site in sites) else []


def compile_if_it_pays(
    model: nn.Module, sites: Sequence[str], run: Run, *, mode: str, calls: int, other: Run | None, budget: float
) -> tuple[CompilePlan, Compiled | None]:
    """Measure what compiling the routed model costs and saves; keep it compiled only if it pays within `calls` calls.

    mode: auto decides by the measurement, on keeps it if it is correct, off does not compile. `run` and `other` run the
    model at two resolutions. It is correct if compiled equals eager within `budget`, and two resolutions need at most
    two graphs.
    """
    if mode == "off":
        return CompilePlan(sentence="off: not asked for", calls=calls), None
    with torch.no_grad():
        eager_output = tensors_of(run())
        call = min(clock(run) for _ in range(4))
        if mode == "auto" and calls * call < _LEAST_COST:
            sentence = (
                f"off: all {calls} calls together take {calls * call:.1f} s, less than any compilation costs; not tried"
            )
            return CompilePlan(sentence=sentence, calls=calls, call=call), None
        kind = "blocks" if repeated_blocks(model, sites) else "whole"
        compiled = compile_parts(model, kind, sites)
        try:
            plan = _measure(compiled, run, calls, kind, eager_output, budget)
            keep = mode == "on" or (plan.break_even is not None and plan.break_even <= calls)
            if keep and other is not None:
                plan = _two_resolutions(plan, compiled, run, other)
        except BaseException:
            compiled.restore()
            raise
        plan = _verdict(plan, mode)
        if plan.mode == "off":
            compiled.restore()
            return plan, None
        return plan, compiled


def _measure(
    compiled: Compiled, run: Run, calls: int, kind: str, eager: list[torch.Tensor], budget: float
) -> CompilePlan:
    first = clock(run)
    second = clock(run)  # the second call may still set things up: part of the cost
    output = tensors_of(run())
    # Interleaved minima: the machine's speed may have changed since the first measurement.
    samples = interleave({"compiled": Way(run), "eager": Way(run, compiled.paused)}, rounds=7, seconds=10.0)
    eager_call, after = (min(samples[name].seconds) for name in ("eager", "compiled"))
    cost = max(first + second - 2 * after, 0.0)
    saving = eager_call - after
    return CompilePlan(
        mode=kind,
        calls=calls,
        cost=cost,
        call=eager_call,
        compiled_call=after,
        break_even=math.ceil(cost / saving) if saving > 0 else None,
        graphs=compiled.graphs,
        breaks=compiled.breaks,
        error=max_error(output, eager),
        budget=budget,
    )


def _two_resolutions(plan: CompilePlan, compiled: Compiled, run: Run, other: Run) -> CompilePlan:
    first = compiled.graphs
    other()
    run()
    other()
    return replace(plan, graphs_two_resolutions=compiled.graphs, resolutions=[f"{first} graphs at the first"])


def _verdict(plan: CompilePlan, mode: str) -> CompilePlan:
    assert plan.cost is not None and plan.call is not None and plan.compiled_call is not None
    assert plan.error is not None and plan.budget is not None and plan.graphs is not None
    saving = plan.call - plan.compiled_call
    if plan.break_even is None:
        facts = f"{plan.cost:.1f} s once, and a call is {-saving * 1e3:.1f} ms slower for it: never pays"
    else:
        facts = f"{plan.cost:.1f} s once, saves {saving * 1e3:.1f} ms a call: pays after {plan.break_even} calls"
    graphs = f"{plan.graphs} graph{'s' * (plan.graphs != 1)}, {plan.breaks} breaks"
    pays = plan.break_even is not None and plan.break_even <= plan.calls
    right = plan.error <= plan.budget
    third = plan.graphs_two_resolutions is not None and plan.graphs_two_resolutions > 2 * plan.graphs
    if not right:
        keep, why = False, f"but its result is off by {plan.error:.1e} of {plan.budget:.0e} -> off"
    elif third:
        keep, why = False, f"but a second resolution made {plan.graphs_two_resolutions} graphs -> off"
    elif pays or mode == "on":
        keep, why = True, f"you said {plan.calls} -> on" if mode != "on" else "you asked for it -> on"
    else:
        keep, why = False, f"you said {plan.calls} -> off"
    if plan.graphs_two_resolutions is not None:
        graphs += f" ({plan.graphs_two_resolutions} with a second resolution)"
    equal = ", equal" if right else ""
    return replace(plan, mode=plan.mode if keep else "off", sentence=f"{facts}; {why}; {graphs}{equal}")
