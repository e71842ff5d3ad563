"""Locate and explain errors in a tensor joined from ranks: which ranks, positions and heads, and the likely cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foci.check.compare import HALF, difference, rms
from foci.check.exam import Exam, Gradients
from foci.check.orders import Places, format_positions
from foci.check.ranks import Ranks, format_ranks
from foci.core.spec import Case, Inputs, Outputs

Hypotheses = Callable[[Inputs], Iterator[tuple[str, Outputs]]]
NO_HYPOTHESES: Hypotheses = lambda inputs: iter(())  # noqa: E731

SHARE = 0.03  # a position counts as wrong from this share of the largest error of a position
FINE, COARSE = 1e-4, 5e-2  # how closely a hypothesis must match: relative RMS in float32, in half precision

OWN = "each rank holds only what its own queries owe: what the others' owe is never sent back"
SHARES = "each rank holds its own part alone, an all-reduce is missing (right only where you add them up afterwards)"
WRONG_WAY = "as if the blocks were rotated the wrong way in the backward"
LEFT = "as if the blocks were not rotated in the backward: what belongs to others stays where it was computed"
EARLY = "as if the blocks were left one rotation short of home in the backward"
CAST = "it holds only numbers of bfloat16: it was rounded on the way"
REVERSED = "the ranks hold each other's, in reverse rank order"
NEXT, BEFORE = "each rank holds what belongs to the next", "each rank holds what belongs to the one before"


@dataclass(frozen=True)
class Sharding:
    """A tensor's sharding: the dimension that is split, the positions each rank holds, those that all ranks hold."""

    dim: int
    parts: Places
    shared: Tensor

    @property
    def equal(self) -> bool:
        return len({len(part) for part in self.parts}) == 1


@dataclass
class FaultLocator:
    """Finds which ranks, positions and heads of a wrong tensor are wrong, and which hypothesis, a known bug with the
    values it would produce, matches them. `hypotheses` yields such pairs (sentence, outputs) for the inputs of a case.
    """

    ranks: Ranks
    hypotheses: Hypotheses = NO_HYPOTHESES
    _reported: dict[tuple[str, str], str] = field(default_factory=dict)

    def output(self, exam: Exam, case: Case, dtype: torch.dtype, name: str, got: Tensor) -> tuple[str, str]:
        """A sentence on the cause, "" if no hypothesis matches; and the place."""
        truth = exam.truth(case, dtype)[exam.names.index(name)]
        sharding = self._sharding(truth.shape[1], 1)
        wrong = _wrong(got, truth, dtype, sharding)
        place = self._place(wrong, sharding)

        def hypotheses() -> Iterator[tuple[str, Tensor]]:
            for sentence, outputs in self.hypotheses(exam.exact(case, dtype)):
                named = dict(zip(exam.spec.output_names, outputs, strict=True))
                yield sentence, named[name]
            yield from _between_ranks(truth, sharding)
            yield CAST, _rounded(got, truth)

        why = _match(got, truth, wrong, hypotheses(), dtype)
        return self._sentence(name, place, why), place

    def gradient(
        self, exam: Exam, case: Case, dtype: torch.dtype, through: tuple[str, ...], leaf: str, got: Tensor
    ) -> tuple[str, str]:
        """The same for a gradient."""
        truth = exam.true_gradients(case, dtype, through)[leaf]
        assert truth is not None
        dim = self._dimension(exam, case, dtype, leaf)
        if dim is None:
            return self._replicated_gradient(exam, case, dtype, through, leaf, got, truth)
        sharding = self._sharding(truth.shape[dim], dim)
        wrong = _wrong(got, truth, dtype, sharding)
        place = self._place(wrong, sharding)
        size = self.ranks.world.size

        def hypotheses() -> Iterator[tuple[str, Tensor]]:
            for share in (1.0, 1 / size):  # replicated outputs may enter each rank's loss in full or as 1 / size
                parts = [part[leaf] for part in self._contributions(exam, case, dtype, through, share)]
                contributions = [part for part in parts if part is not None]
                if len(contributions) == size:
                    yield from _shares(contributions, truth, sharding)
            if leaf in ("k", "v") and len(contributions) == size:
                yield from _travelled(contributions, truth, sharding)
            yield from _between_ranks(truth, sharding)
            yield CAST, _rounded(got, truth)

        why = _match(got, truth, wrong, hypotheses(), dtype)
        return self._sentence(f"d{leaf}", place, why), place

    def with_place(self, sentence: str, place: str) -> str:
        return self._reported.setdefault((sentence, ""), f"{sentence} ({place.strip()})" if place else sentence)

    def _sentence(self, name: str, place: str, why: str) -> str:
        """One sentence per cause, with the place of the first case, so that a report lists it once."""
        return self._reported.setdefault((name, why), f"{name} is wrong {place}: {why}") if why else ""

    def _sharding(self, length: int, dim: int) -> Sharding:
        words = self.ranks.text_tokens(length)
        parts = [part + words for part in self.ranks.places(length - words)]
        return Sharding(dim, parts, torch.arange(words, device="cpu"))

    def _dimension(self, exam: Exam, case: Case, dtype: torch.dtype, leaf: str) -> int | None:
        return self.ranks.roles.split_leaf(leaf, exam.leaves(exam.fresh(case, dtype))[leaf])

    def _place(self, wrong: Tensor, sharding: Sharding) -> str:
        """The ranks, positions and heads at which `wrong` is True, in words."""
        along = wrong.movedim(sharding.dim, 0).flatten(1).any(1)
        size = self.ranks.world.size
        ranks = [rank for rank, part in enumerate(sharding.parts) if bool(along[part].any())]
        where = "on every rank" if len(ranks) == size and size > 1 else f"on {format_ranks(ranks)}" if ranks else ""
        if len(sharding.shared) and bool(along[sharding.shared].any()):
            where = " and ".join(filter(None, (where, "in the text that all ranks share")))
        place = f"{where} at positions {format_positions(along.nonzero()[:, 0])}"
        heads = wrong.movedim(2, 0).flatten(1).any(1) if wrong.dim() >= 3 else torch.ones(1, device="cpu")
        if not bool(heads.all()):
            numbers = heads.nonzero()[:, 0]
            place += f", in head{'s' if len(numbers) > 1 else ''} {format_positions(numbers)} alone"
        return place

    def _replicated_gradient(
        self,
        exam: Exam,
        case: Case,
        dtype: torch.dtype,
        through: tuple[str, ...],
        leaf: str,
        got: Tensor,
        truth: Tensor,
    ) -> tuple[str, str]:
        """For the gradient of a replicated input: which ranks' copies are wrong, and if all are only their own part."""
        again = exam.attempt_gradients(case, dtype, through).gradients
        if again is None:
            return "", ""
        name = next((n for n, all_ in self.ranks.copies.items() if any(_same(c, again[leaf]) for c in all_)), "")
        copies = self.ranks.copies.get(name)
        if copies is None:
            return "", ""
        tolerance = (COARSE if dtype in HALF else FINE) * rms(truth)
        bad = [rank for rank, copy in enumerate(copies) if rms(copy.double() - truth) > tolerance]
        place = "on every rank" if len(bad) == len(copies) else f"on {format_ranks(bad)}"
        parts = [part[leaf] for part in self._contributions(exam, case, dtype, through)]
        own = all(
            part is not None and rms(copies[rank].double() - part) <= tolerance for rank, part in enumerate(parts)
        )
        why = SHARES if own else ""
        return self._sentence(f"d{leaf}", place, why), place

    def _contributions(
        self, exam: Exam, case: Case, dtype: torch.dtype, through: tuple[str, ...], share: float = 1.0
    ) -> list[Gradients]:
        """For each rank, full gradients of the loss on its rows of the outputs, with `share` of that on shared text."""
        cotangents = exam.cotangents(case, dtype)
        found = []
        for rank in range(self.ranks.world.size):
            kept = []
            for name, weight in zip(exam.names, cotangents, strict=True):
                sharding = self._sharding(weight.shape[1], 1)
                rows = torch.zeros(weight.shape[1], dtype=weight.dtype, device="cpu")
                rows[sharding.parts[rank]] = 1.0
                rows[sharding.shared] = share
                if name in through:
                    kept.append((name, weight * rows.view(1, -1, *[1] * (weight.dim() - 2)).to(weight)))
            found.append(exam.weighted(case, dtype, dict(kept)))
        return found


def _same(copy: Tensor, got: Tensor | None) -> bool:
    return got is not None and copy.shape == got.shape and torch.equal(copy, got)


def _wrong(got: Tensor, truth: Tensor, dtype: torch.dtype, sharding: Sharding) -> Tensor:
    """A mask of wrong elements, by position and head: where the RMS error is near the largest and above rounding."""
    error = difference(got, truth).nan_to_num(posinf=1e30)
    spare = [dim for dim in range(error.dim()) if dim not in (0, sharding.dim, 2)]
    size = error.square().mean(spare, keepdim=True).sqrt() if spare else error
    floor = (8e-3 if dtype in HALF else 1e-5) * rms(truth)
    return (size > max(floor, SHARE * float(size.max()))).expand_as(error)


def _match(
    got: Tensor, truth: Tensor, wrong: Tensor, hypotheses: Iterator[tuple[str, Tensor]], dtype: torch.dtype
) -> str:
    """The hypothesis that matches `got` wherever that is wrong, and the truth does not; the closest of several."""
    if not bool(wrong.any()):
        return ""
    got, right = got.double()[wrong], truth.double()[wrong]
    if not bool(got.isfinite().all()):
        return ""
    tolerance = (COARSE if dtype in HALF else FINE) * max(rms(right), rms(got))
    found: list[tuple[float, str]] = []
    for sentence, other in hypotheses:
        if other.shape != truth.shape:
            continue
        other = other.double()[wrong]
        far = rms(got - other)
        if far <= tolerance and rms(right - other) > 3 * far and bool(other.isfinite().all()):
            found.append((far, sentence))
    return min(found, key=lambda each: each[0])[1] if found else ""


def _rounded(got: Tensor, truth: Tensor) -> Tensor:
    """`got` if it is the truth rounded to bfloat16; else the truth, which `_match` never picks."""
    once = got.to(torch.bfloat16).to(got.dtype)
    near = rms(got.double() - truth) < 0.05 * rms(truth)
    return got if near and got.dtype in (torch.float32, torch.float64) and torch.equal(once, got) else truth


def _between_ranks(truth: Tensor, sharding: Sharding) -> Iterator[tuple[str, Tensor]]:
    """Hypotheses: right shards on the wrong ranks, or right up to a factor of the number of ranks."""
    size = len(sharding.parts)
    yield "it is counted once for every rank", truth * size
    yield "it is divided by the number of ranks", truth / size
    yield "it is zero: nothing was sent back", torch.zeros_like(truth)
    if size < 2 or not sharding.equal:
        return
    for sentence, source in (
        (REVERSED, [size - 1 - rank for rank in range(size)]),
        (NEXT, [(rank + 1) % size for rank in range(size)]),
        (BEFORE, [(rank - 1) % size for rank in range(size)]),
    ):
        shards = [truth.index_select(sharding.dim, sharding.parts[rank]) for rank in source]
        yield sentence, _assembled(shards, truth, sharding)


def _assembled(shards: list[Tensor], truth: Tensor, sharding: Sharding) -> Tensor:
    whole = truth.clone()
    for part, shard in zip(sharding.parts, shards, strict=True):
        whole.index_copy_(sharding.dim, part, shard.to(whole))
    return whole


def _shares(parts: list[Tensor], truth: Tensor, sharding: Sharding) -> Iterator[tuple[str, Tensor]]:
    """Hypotheses: the gradient of the shared text tokens is one rank's contribution alone (no all-reduce)."""
    if len(sharding.shared):
        for part in parts:
            own = truth.clone()
            own.index_copy_(sharding.dim, sharding.shared, part.index_select(sharding.dim, sharding.shared).to(own))
            yield SHARES, own


def _travelled(parts: list[Tensor], truth: Tensor, sharding: Sharding) -> Iterator[tuple[str, Tensor]]:
    """Hypotheses about ring attention's backward, where a dK/dV accumulator travels: parts[r] is rank r's contribution.

    At step s rank r works on the block of rank r - forth * s. The accumulator moves by `back` ranks each step, and once
    more at the end if `home`; correct is back == forth and home.
    """
    size = len(parts)

    def contribution(rank: int, block: int) -> Tensor:
        return parts[rank].index_select(sharding.dim, sharding.parts[block])

    yield OWN, _assembled([contribution(rank, rank) for rank in range(size)], truth, sharding)
    shards = [truth.index_select(sharding.dim, part) for part in sharding.parts]
    without = [shard - contribution(rank, rank) for rank, shard in enumerate(shards)]
    yield "what a rank's own queries owe is missing", _assembled(without, truth, sharding)
    if not sharding.equal:
        return
    for forth in (1, -1):
        for back, home, sentence in ((-forth, 1, WRONG_WAY), (-forth, 0, WRONG_WAY), (forth, 0, EARLY), (0, 0, LEFT)):
            shards = []
            for rank in range(size):
                shard = torch.zeros_like(contribution(rank, rank))
                for step in range(size):
                    there = rank - back * (size - 1 - step + home)
                    shard = shard + contribution(there % size, (there - forth * step) % size)
                shards.append(shard)
            yield sentence, _assembled(shards, truth, sharding)
