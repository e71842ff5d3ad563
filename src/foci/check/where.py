"""Where a tensor that came from several ranks is wrong, and what would make it so: ranks, positions, heads, a cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foci.check.compare import HALF, difference, rms
from foci.check.exam import Exam, Gradients
from foci.check.orders import Places, said
from foci.check.ranks import Ranks, ranks_said
from foci.core.spec import Case, Inputs, Outputs

Stories = Callable[[Inputs], Iterator[tuple[str, Outputs]]]
NOTHING: Stories = lambda inputs: iter(())  # noqa: E731

SHARE = 0.03  # of the worst error of a position, that another must reach to be told beside it
FINE, COARSE = 1e-4, 5e-2  # how closely a story must agree: relative RMS in float32, in half precision

OWN = "each rank holds only what its own queries owe: what the others' owe is never sent back"
SHARES = "each rank holds its own part alone, an all-reduce is missing (right only where you add them up afterwards)"
WRONG_WAY = "as if the blocks were rotated the wrong way in the backward"
LEFT = "as if the blocks were not rotated in the backward: what belongs to others stays where it was computed"
EARLY = "as if the blocks were left one rotation short of home in the backward"
CAST = "it holds only numbers of bfloat16: it was rounded on the way"
REVERSED = "the ranks hold each other's, in reverse rank order"
NEXT, BEFORE = "each rank holds what belongs to the next", "each rank holds what belongs to the one before"


@dataclass(frozen=True)
class Lies:
    """How a tensor lies over ranks: along which dimension it is cut, which positions each rank has, which all have."""

    dim: int
    parts: Places
    shared: Tensor

    @property
    def equal(self) -> bool:
        return len({len(part) for part in self.parts}) == 1


@dataclass
class Detective:
    """Tells of a wrong tensor which ranks, positions and heads are wrong, and which of the known ways of going wrong
    gives just those numbers. `stories`: wrong outputs, by a sentence, for the inputs of a case.
    """

    ranks: Ranks
    stories: Stories = NOTHING
    _told: dict[tuple[str, str], str] = field(default_factory=dict)

    def output(self, exam: Exam, case: Case, dtype: torch.dtype, name: str, got: Tensor) -> tuple[str, str]:
        """The whole sentence, and where no cause is known "" with the place."""
        truth = exam.truth(case, dtype)[exam.names.index(name)]
        lies = self._lies(truth.shape[1], 1)
        wrong = _wrong(got, truth, dtype, lies)
        place = self._place(wrong, lies)

        def told() -> Iterator[tuple[str, Tensor]]:
            for sentence, outputs in self.stories(exam.exact(case, dtype)):
                named = dict(zip(exam.spec.output_names, outputs, strict=True))
                yield sentence, named[name]
            yield from _between(truth, lies)
            yield CAST, _rounded(got, truth)

        why = _best(got, truth, wrong, told(), dtype)
        return self._sentence(name, place, why), place

    def gradient(
        self, exam: Exam, case: Case, dtype: torch.dtype, through: tuple[str, ...], leaf: str, got: Tensor
    ) -> tuple[str, str]:
        """The same of a gradient."""
        truth = exam.true_gradients(case, dtype, through)[leaf]
        assert truth is not None
        dim = self._dimension(exam, case, dtype, leaf)
        if dim is None:
            return self._copies(exam, case, dtype, through, leaf, got, truth)
        lies = self._lies(truth.shape[dim], dim)
        wrong = _wrong(got, truth, dtype, lies)
        place = self._place(wrong, lies)
        size = self.ranks.world.size

        def told() -> Iterator[tuple[str, Tensor]]:
            for share in (1.0, 1 / size):  # what all ranks compute alike, each may count whole or its share of
                parts = [part[leaf] for part in self._contributions(exam, case, dtype, through, share)]
                owed = [part for part in parts if part is not None]
                if len(owed) == size:
                    yield from _shares(owed, truth, lies)
            if leaf in ("k", "v") and len(owed) == size:
                yield from _travelled(owed, truth, lies)
            yield from _between(truth, lies)
            yield CAST, _rounded(got, truth)

        why = _best(got, truth, wrong, told(), dtype)
        return self._sentence(f"d{leaf}", place, why), place

    def placed(self, sentence: str, place: str) -> str:
        return self._told.setdefault((sentence, ""), f"{sentence} ({place.strip()})" if place else sentence)

    def _sentence(self, name: str, place: str, why: str) -> str:
        """One sentence for one cause: that of the first case that shows it, so that a report names it once."""
        return self._told.setdefault((name, why), f"{name} is wrong {place}: {why}") if why else ""

    def _lies(self, length: int, dim: int) -> Lies:
        words = self.ranks.words(length)
        parts = [part + words for part in self.ranks.places(length - words)]
        return Lies(dim, parts, torch.arange(words, device="cpu"))

    def _dimension(self, exam: Exam, case: Case, dtype: torch.dtype, leaf: str) -> int | None:
        return self.ranks.roles.lies(leaf, exam.leaves(exam.fresh(case, dtype))[leaf])

    def _place(self, wrong: Tensor, lies: Lies) -> str:
        """On which ranks, at which positions, in which heads."""
        along = wrong.movedim(lies.dim, 0).flatten(1).any(1)
        size = self.ranks.world.size
        ranks = [rank for rank, part in enumerate(lies.parts) if bool(along[part].any())]
        where = "on every rank" if len(ranks) == size and size > 1 else f"on {ranks_said(ranks)}" if ranks else ""
        if len(lies.shared) and bool(along[lies.shared].any()):
            where = " and ".join(filter(None, (where, "in the text that all ranks share")))
        place = f"{where} at positions {said(along.nonzero()[:, 0])}"
        heads = wrong.movedim(2, 0).flatten(1).any(1) if wrong.dim() >= 3 else torch.ones(1, device="cpu")
        if not bool(heads.all()):
            numbers = heads.nonzero()[:, 0]
            place += f", in head{'s' if len(numbers) > 1 else ''} {said(numbers)} alone"
        return place

    def _copies(
        self,
        exam: Exam,
        case: Case,
        dtype: torch.dtype,
        through: tuple[str, ...],
        leaf: str,
        got: Tensor,
        truth: Tensor,
    ) -> tuple[str, str]:
        """Of a gradient that every rank must hold whole: which ranks' is wrong, and whether it is their own part."""
        again = exam.attempt_gradients(case, dtype, through).gradients
        if again is None:
            return "", ""
        name = next((n for n, all_ in self.ranks.copies.items() if any(_same(c, again[leaf]) for c in all_)), "")
        copies = self.ranks.copies.get(name)
        if copies is None:
            return "", ""
        tolerance = (COARSE if dtype in HALF else FINE) * rms(truth)
        bad = [rank for rank, copy in enumerate(copies) if rms(copy.double() - truth) > tolerance]
        place = "on every rank" if len(bad) == len(copies) else f"on {ranks_said(bad)}"
        parts = [part[leaf] for part in self._contributions(exam, case, dtype, through)]
        own = all(
            part is not None and rms(copies[rank].double() - part) <= tolerance for rank, part in enumerate(parts)
        )
        why = SHARES if own else ""
        return self._sentence(f"d{leaf}", place, why), place

    def _contributions(
        self, exam: Exam, case: Case, dtype: torch.dtype, through: tuple[str, ...], share: float = 1.0
    ) -> list[Gradients]:
        """What the loss on each rank's rows of the outputs gives to every leaf, whole; on each a share of text's."""
        cotangents = exam.cotangents(case, dtype)
        found = []
        for rank in range(self.ranks.world.size):
            kept = []
            for name, weight in zip(exam.names, cotangents, strict=True):
                lies = self._lies(weight.shape[1], 1)
                rows = torch.zeros(weight.shape[1], dtype=weight.dtype, device="cpu")
                rows[lies.parts[rank]] = 1.0
                rows[lies.shared] = share
                if name in through:
                    kept.append((name, weight * rows.view(1, -1, *[1] * (weight.dim() - 2)).to(weight)))
            found.append(exam.weighted(case, dtype, dict(kept)))
        return found


def _same(copy: Tensor, got: Tensor | None) -> bool:
    return got is not None and copy.shape == got.shape and torch.equal(copy, got)


def _wrong(got: Tensor, truth: Tensor, dtype: torch.dtype, lies: Lies) -> Tensor:
    """Which elements are wrong: all of a position and head of which a good part is."""
    error = difference(got, truth).nan_to_num(posinf=1e30)
    spare = [dim for dim in range(error.dim()) if dim not in (0, lies.dim, 2)]
    size = error.square().mean(spare, keepdim=True).sqrt() if spare else error
    floor = (8e-3 if dtype in HALF else 1e-5) * rms(truth)
    return (size > max(floor, SHARE * float(size.max()))).expand_as(error)


def _best(got: Tensor, truth: Tensor, wrong: Tensor, told: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> str:
    """The story that gives what was got wherever that is wrong; the closest of several."""
    if not bool(wrong.any()):
        return ""
    got, right = got.double()[wrong], truth.double()[wrong]
    if not bool(got.isfinite().all()):
        return ""
    tolerance = (COARSE if dtype in HALF else FINE) * max(rms(right), rms(got))
    found: list[tuple[float, str]] = []
    for sentence, other in told:
        if other.shape != truth.shape:
            continue
        other = other.double()[wrong]
        far = rms(got - other)
        if far <= tolerance and rms(right - other) > 3 * far and bool(other.isfinite().all()):
            found.append((far, sentence))
    return min(found, key=lambda each: each[0])[1] if found else ""


def _rounded(got: Tensor, truth: Tensor) -> Tensor:
    """What was got, if it is a rounded form of the truth; else the truth, which explains nothing."""
    once = got.to(torch.bfloat16).to(got.dtype)
    near = rms(got.double() - truth) < 0.05 * rms(truth)
    return got if near and got.dtype in (torch.float32, torch.float64) and torch.equal(once, got) else truth


def _between(truth: Tensor, lies: Lies) -> Iterator[tuple[str, Tensor]]:
    """What is right, on other ranks; or right but for a factor of the ranks."""
    size = len(lies.parts)
    yield "it is counted once for every rank", truth * size
    yield "it is divided by the number of ranks", truth / size
    yield "it is zero: nothing was sent back", torch.zeros_like(truth)
    if size < 2 or not lies.equal:
        return
    for sentence, source in (
        (REVERSED, [size - 1 - rank for rank in range(size)]),
        (NEXT, [(rank + 1) % size for rank in range(size)]),
        (BEFORE, [(rank - 1) % size for rank in range(size)]),
    ):
        yield sentence, _placed([truth.index_select(lies.dim, lies.parts[rank]) for rank in source], truth, lies)


def _placed(shards: list[Tensor], truth: Tensor, lies: Lies) -> Tensor:
    whole = truth.clone()
    for part, shard in zip(lies.parts, shards, strict=True):
        whole.index_copy_(lies.dim, part, shard.to(whole))
    return whole


def _shares(parts: list[Tensor], truth: Tensor, lies: Lies) -> Iterator[tuple[str, Tensor]]:
    """Text that every rank has, with the gradient of one rank alone."""
    if len(lies.shared):
        for part in parts:
            own = truth.clone()
            own.index_copy_(lies.dim, lies.shared, part.index_select(lies.dim, lies.shared).to(own))
            yield SHARES, own


def _travelled(parts: list[Tensor], truth: Tensor, lies: Lies) -> Iterator[tuple[str, Tensor]]:
    """Gradients of keys or values gathered by an accumulator that travels: parts[r] is what rank r's queries owe.

    At step s rank r works on the block of rank r - forth s. The accumulator moves by `back` each step, and once more at
    the end where it goes `home`; right is back == forth, home.
    """
    size = len(parts)

    def owed(rank: int, block: int) -> Tensor:
        return parts[rank].index_select(lies.dim, lies.parts[block])

    yield OWN, _placed([owed(rank, rank) for rank in range(size)], truth, lies)
    without = [truth.index_select(lies.dim, part) - owed(rank, rank) for rank, part in enumerate(lies.parts)]
    yield "what a rank's own queries owe is missing", _placed(without, truth, lies)
    if not lies.equal:
        return
    for forth in (1, -1):
        for back, home, sentence in ((-forth, 1, WRONG_WAY), (-forth, 0, WRONG_WAY), (forth, 0, EARLY), (0, 0, LEFT)):
            shards = []
            for rank in range(size):
                shard = torch.zeros_like(owed(rank, rank))
                for step in range(size):
                    there = rank - back * (size - 1 - step + home)
                    shard = shard + owed(there % size, (there - forth * step) % size)
                shards.append(shard)
            yield sentence, _placed(shards, truth, lies)
