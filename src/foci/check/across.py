"""Check a parallel function as a Candidate: which laws apply to it, and what is reported of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from foci.check.laws import Law
from foci.check.ranks import Ranks
from foci.check.run import Report, examine
from foci.check.where import NO_HYPOTHESES, FaultLocator, Hypotheses
from foci.core.spec import Candidate, Spec

LAWS = (
    "shapes and dtypes", "forward", "logarithm", "gradients", "gradients through the logarithm",
    "cut and merge", "packed = separate", "causality", "batch slot", "same bits twice", "any length", "extreme gates",
    "inputs untouched",
)  # fmt: skip
LEFT_OUT = (
    "gradcheck: gradients are compared with the true ones; fake tensors, memory, custom ops, compiled, autocast, bad "
    "input: these laws look into one process, ask them of what each rank computes, without --world"
)


def examine_ranks(
    spec: Spec,
    ranks: Ranks,
    candidate: Candidate,
    *,
    hypotheses: Hypotheses = NO_HYPOTHESES,
    dtypes: tuple[torch.dtype, ...] | None = None,
    only: Iterable[str] | None = None,
    more: Sequence[Law] = (),
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """Test a parallel function, as a candidate that calls `ranks`, against the laws that need only whole tensors.

    Ranks are separate processes that are restarted after a crash or hang, so the laws run in this process.
    `hypotheses`: known bugs with the outputs they produce (where.py). `more`: laws added to LAWS; `only` may name any.
    """
    candidate = replace(candidate, not_tested=(*candidate.not_tested, LEFT_OUT))
    locator = FaultLocator(ranks, hypotheses)
    wanted = [*LAWS, *(law.name for law in more)] if only is None else only
    return examine(
        spec, candidate, dtypes=dtypes, only=wanted, isolated=False, progress=progress, locator=locator, more=more
    )
