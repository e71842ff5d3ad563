"""The law of dropout over ranks: the dropout mask, read from one call, compared between ranks and with one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foci.check.exam import Exam
from foci.check.laws import Finding, Findings, Law, NotTested
from foci.check.orders import Places
from foci.core.spec import Candidate, Case

NAME = "dropout over ranks"
CHANCE = 0.5


def dropout_law(case: Callable[[float], Case], places: Callable[[int], Places], alone: Callable[[], Candidate]) -> Law:
    """The law, from `case(p)`: a case with dropout p whose output [B,T,H,S] is the attention probabilities themselves.

    `alone`: the same function as a candidate on one rank.
    """

    def ask(exam: Exam) -> Findings:
        shown = case(CHANCE)
        found = _kept(exam, shown, exam.candidate)
        if isinstance(found, str):
            raise NotTested(found)
        weights, kept = found
        right = ((weights - 1 / (weights.shape[-1] * (1 - CHANCE))).abs() < 1e-4) | (weights == 0)
        what = "what dropout keeps is not weighed by 1 / (1 - p), or p is applied to something else than probabilities"
        yield Finding(shown.name, None, None if bool(right.all()) else what)
        share = float(kept.double().mean())
        what = f"dropout of {CHANCE} drops {1 - share:.2f} of the probabilities"
        yield Finding(shown.name, None, None if 0.35 < share < 0.65 else what)
        alike = _repeated(kept, places(kept.shape[1]), places(kept.shape[3]))
        yield Finding(shown.name, None, alike)
        if alike or not bool(right.all()):
            return
        single = _kept(exam, shown, alone())
        size = len(places(kept.shape[1]))
        if not isinstance(single, str) and not torch.equal(single[1], kept):
            what = (
                f"the same seed drops other probabilities at 1 rank and at {size} (rank-dependent dropout): no run "
                "could be repeated at another number of ranks"
            )
            yield Finding(shown.name, None, what)

    return Law(16, NAME, ask)


def _kept(exam: Exam, case: Case, candidate: Candidate) -> tuple[Tensor, Tensor] | str:
    """The probabilities after dropout, and the mask of those kept [B,T,H,S]; or why the call failed."""
    found = exam.attempt(case.make(torch.float32, exam.device, exam.seed), candidate.call)
    if found.outputs is None:
        return found.refused or found.fault or ""
    weights = found.outputs[0].detach()
    return weights, weights != 0


def _repeated(kept: Tensor, queries: Places, keys: Places) -> str | None:
    """A sentence if two heads, ranks or blocks have the same dropout mask, where each must draw its own."""
    for h in range(1, kept.shape[2]):
        if any(torch.equal(kept[:, :, h], kept[:, :, other]) for other in range(h)):
            return f"head {h} drops what another head drops: heads drop alike, which dropout must not"
    rows = [kept[:, part] for part in queries]
    for a in range(len(rows)):
        for b in range(a):
            if rows[a].shape == rows[b].shape and torch.equal(rows[a], rows[b]):
                return f"ranks {b} and {a} drop alike: every rank draws the same, so far tokens share their noise"
    blocks = [(q, k, rows[q][..., part]) for q in range(len(rows)) for k, part in enumerate(keys)]
    for i, (q, k, block) in enumerate(blocks):
        for q2, k2, other in blocks[:i]:
            if block.shape == other.shape and torch.equal(block, other):
                return f"rank {q} drops of rank {k}'s keys what rank {q2} drops of rank {k2}'s: blocks drop alike"
    return None
