"""What the laws make kernels launch, found without a GPU or a number, and compiled side by side into Triton's cache.

The laws themselves are asked, of a candidate that computes nothing: it notes what kernels would be launched for a call,
forward or backward, and answers zeros, as the reference does here too, so that each law goes its way to the end.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from kernels_compile import identity
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from foci.bench.tuning import META
from foci.check.exam import Exam
from foci.check.laws_graph import LAWS
from foci.check.run import run_law
from foci.cli_check import FUNCTIONS, candidate_of
from foci.cli_tune_ahead import Offline, each, gpu, launchable
from foci.core.ahead import to_meta
from foci.core.assembler import assembling
from foci.core.device import cores
from foci.core.spec import Case, Outputs, Spec
from foci.core.tune import Launch, Target, record_launches

DONE, FAILED = "done", "failed"
GRAPHS = 12  # the laws of graphs: they launch what others do, and would have the graphs' compiler at work
Noted = list[tuple[Target, Launch]]


def compile_ahead(
    specs: Sequence[Spec], dtype: torch.dtype, target: Target, until: float, tell: Callable[[str], object],
    launchers: bool = True,
) -> None:  # fmt: skip
    """Compile it in the laws' order, with `launchers` for this Python, and tell how much that was.

    For a process of its own: the laws differentiate, which takes threads that no fork of it would have.
    """
    began, kernels = time.monotonic(), dict[str, Launch]()
    rehearsed = (noted for spec in specs for noted in launched(spec, dtype, target))
    for _, launch in sorted(rehearsed, key=itemgetter(0)):
        kernels.setdefault(identity(launch, target), launch)
    found = time.monotonic() - began

    def work(launch: Launch) -> str:
        os.nice(10)  # behind the laws themselves
        return DONE if compiled(launch, target, launchers) else FAILED

    said = each(work, [*kernels.values()], workers=cores(), until=until, context="fork")  # launches cannot be sent
    took = time.monotonic() - began
    left = len(said) - said.count(DONE)  # those not begun too
    failed = {launch.kernel.__name__ for launch, word in zip(kernels.values(), said, strict=True) if word == FAILED}
    which = f", an error in {', '.join(sorted(failed))}" * bool(failed)
    tell(f"{len(kernels)} kernels, found in {found:.0f} s; after {took:.0f} s {left} not compiled{which}")


def compile_large(
    specs: Sequence[Spec], dtype: torch.dtype, target: Target, until: float, tell: Callable[[str], object],
    launchers: bool = True,
) -> None:  # fmt: skip
    """Compile what the laws ask beyond that of large cases, each in a process that finds it and compiles it.

    To find it takes as long for one as for all small ones. For a process that has differentiated nothing: its forks do.
    """
    began = time.monotonic()

    def work(task: tuple[Spec, Case]) -> str:
        os.nice(10)
        (spec, case), failed = task, 0
        try:
            known = {identity(launch, target) for _, launch in _of_shapes(spec, case, dtype, [target])}
            for _, launch in launched(replace(spec, cases=(case,), large=()), dtype, target):
                if (name := identity(launch, target)) not in known:
                    known.add(name)
                    failed += not compiled(launch, target, launchers)
        except Exception as error:  # it is told as a case that was not compiled
            return type(error).__name__
        return f"{failed} kernels" if failed else DONE

    tasks = [(spec, case) for spec in specs for case in spec.large]
    said = each(work, tasks, workers=cores(), until=until, limit=math.inf, context="fork")
    left, took = len(said) - said.count(DONE), time.monotonic() - began
    tell(f"{len(tasks)} large cases' other kernels: after {took:.0f} s {left} cases with some not compiled")


def compiled(launch: Launch, target: Target, launcher: bool = True) -> bool:
    """Whether it lies in Triton's cache now, its `launcher` too, for a GPU that this process does not use."""
    from triton.runtime import driver

    driver.set_active(Offline(gpu(target)))
    try:
        with assembling(target.arch):
            kernel = launch.compiled()
        if launcher:
            launchable(kernel)
    except Exception:  # the laws meet it again and say why
        return False
    return True


def launched(spec: Spec, dtype: torch.dtype, target: Target) -> Iterator[tuple[int, Launch]]:
    """What the laws make all cases launch on a GPU, with the place of the law; of large cases forward and backward."""
    return ((place, launch) for place, _, launch in launched_on(spec, dtype, [target]))


def launched_on(spec: Spec, dtype: torch.dtype, targets: Sequence[Target]) -> Iterator[tuple[int, Target, Launch]]:
    """The same for several GPUs: the laws, which are most of the work, go one way whatever is noted, and once."""
    for case in spec.large:  # whose numbers take seconds to draw
        yield from ((0, *noted) for noted in _of_shapes(spec, case, dtype, targets))
    found: Noted = []
    answer = partial(_answers(spec, targets), found)
    blank = replace(spec, reference=partial(answer, False), plain=partial(answer, False))
    noted = candidate_of(spec, FUNCTIONS[spec.name], "triton", "cuda")
    noted = replace(noted, call=lambda inputs: answer(True, **inputs))
    exam = Exam(blank, noted, torch.device("cpu"), (dtype,))
    for place, law in enumerate(LAWS):
        if law.number != GRAPHS:
            run_law(exam, law)
            yield from ((place, *each) for each in found)
            found.clear()


def _of_shapes(spec: Spec, case: Case, dtype: torch.dtype, targets: Sequence[Target]) -> Noted:
    """Forward as it is, forward that keeps, and backward from all outputs, and without logarithms, to all leaves."""
    assert spec.bind is not None and spec.outputs is not None
    module, call, found = spec.backend("triton").load(), spec.bind(**case.make(dtype, META, 0)), Noted()
    needs = [getattr(call, name) is not None for name in spec.differentiable]
    for target in targets:
        _note(found, target, lambda: module.forward(call))
        made = _note(found, target, lambda: module.forward(call, *_keeps(module)))
        grads = dict(zip(spec.output_names, map(torch.ones_like, made), strict=False))
        for left in dict.fromkeys(((), spec.logs)):
            given = tuple(None if name in left else grad for name, grad in grads.items())
            _note(found, target, partial(module.backward, call, made, given, needs))
    return found


def _answers(spec: Spec, targets: Sequence[Target]) -> Callable[..., Outputs]:
    """`answer(found, noting, **inputs)`: zeros, with zeros for gradients; `noting` what that launches, in `found`."""
    assert spec.bind is not None and spec.outputs is not None
    bind, outputs, module = spec.bind, spec.outputs, spec.backend("triton").load()

    class Answer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, found: Noted | None, call: Any, *leaves: Tensor | None) -> Outputs:
            ctx.found, ctx.call, ctx.leaves = found, call, leaves
            ctx.set_materialize_grads(False)
            if found is not None:
                trained = any(x is not None and x.requires_grad for x in leaves)
                there = to_meta(call)
                for target in targets:
                    _note(found, target, lambda: module.forward(there, *_keeps(module) * trained))
            return tuple(output.empty(call[0]).zero_() for output in outputs(call))

        @staticmethod
        @once_differentiable  # type: ignore[misc]  torch does not type it
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            needs = list(ctx.needs_input_grad[2:])
            if ctx.found is not None:
                call, given = to_meta(ctx.call), to_meta(grads)
                for target in targets:
                    made = _note([], target, lambda: module.forward(call, *_keeps(module)))
                    _note(ctx.found, target, partial(module.backward, call, made, given, needs))
            zeros = (torch.zeros_like(x) if need else None for x, need in zip(ctx.leaves, needs, strict=True))
            return None, None, *zeros

    def answer(found: Noted, noting: bool, **inputs: Any) -> Outputs:
        call = bind(**inputs)
        tensors = [x for x in call if isinstance(x, Tensor)]
        unlaunched = torch.float64 in (x.dtype for x in tensors) or any(isinstance(x, FakeTensor) for x in tensors)
        leaves = (getattr(call, name) for name in spec.differentiable)
        answered: Outputs = Answer.apply(found if noting and not unlaunched else None, call, *leaves)
        return answered

    return answer


def _note(found: Noted, target: Target, work: Callable[[], Outputs]) -> Outputs:
    """What it launches; an error is no finding: the laws meet it again and say so."""
    made: Outputs = ()
    with record_launches(target) as launches, suppress(Exception):
        made = work()
    found += ((target, launch) for launch in launches)
    return made


def _keeps(module: Any) -> tuple[bool, ...]:
    return (True,) * hasattr(module, "kept")
