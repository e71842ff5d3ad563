"""Which split of a sequence over ranks to take: a forecast of time, bytes and memory for each, and the reasons."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foci.core.spec import accumulator
from foci.parallel.links import Compute, Links
from foci.parallel.split import Split, splits
from foci.parallel.wire_bytes import Wire, distances, pairs, sent
from foci.parallel.workload import Shape

# To estimate the share of pairs that a mask allows: samples of a rank's tokens, and ranks sampled.
SAMPLES, RANKS = 32, 8
TIE = 1.01  # times this close are taken for equal
CHUNK = 64  # tokens of a chunk of the recurrences


@dataclass(frozen=True)
class Forecast:
    """The cost of one split: seconds of a whole run by term, bytes a rank sends, peak memory of a rank."""

    split: Split
    terms: dict[str, float]
    sent: int
    memory: float

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    def __str__(self) -> str:
        shown = sorted(self.terms.items(), key=lambda term: -term[1])
        parts = ", ".join(f"{name} {time(value)}" for name, value in shown if value >= 0.005 * self.seconds)
        return f"{time(self.seconds)}: {parts}"


@dataclass(frozen=True)
class Plan:
    """The recommendation of `plan_parallel`, and the alternatives: print it.

    `best` is the fastest split that fits, `others` the other ones by time, `refused` those that are impossible with the
    reason, `alone` one rank's time for the same work (whether or not it fits there).
    """

    shape: Shape
    world: int
    best: Forecast
    others: tuple[Forecast, ...]
    refused: tuple[tuple[Split, str], ...]
    alone: Forecast
    links: Links
    compute: Compute

    @property
    def split(self) -> Split:
        return self.best.split

    @property
    def gain(self) -> float:
        """How many times faster than one rank."""
        return self.alone.seconds / self.best.seconds

    def __str__(self) -> str:
        best = self.best
        ranks = "rank" if self.world == 1 else "ranks"
        lines = [
            ("plan", str(best.split)),
            ("for", str(self.shape)),
            ("forecast", str(best)),
            ("gain", f"{self.gain:.1f} x one rank on {self.world} {ranks} ({self.gain / self.world:.0%} of ideal)"),
            ("memory", f"{size(best.memory)} of {size(self.compute.memory)} a rank"),
            ("wire", f"{size(best.sent)} sent by a rank in all"),
            *(("because", words) for words in self.why()),
            *(
                ("instead", f"{other.split}: {other.seconds / best.seconds:.2f} x the time")
                for other in self.others[:4]
            ),
            *(("refused", f"{split}: {reason}") for split, reason in self.refused[:6]),
        ]
        if len(self.refused) > 6:
            lines.append(("", f"and {len(self.refused) - 6} more, see .refused"))
        sources = dict.fromkeys(source for source in (self.links.source, self.compute.source) if source)
        lines += [("figures", source) for source in sources]
        return "\n".join(f"{head:<9}{words}" for head, words in lines)

    def why(self) -> list[str]:
        """The reasons: this split's largest overhead, and that of the best split of each other kind."""
        said = []
        costs = {name: value for name, value in self.best.terms.items() if name not in WORK and value > 0}
        if costs:
            name = max(costs, key=lambda each: costs[each])
            said.append(
                f"{name} is the largest loss, {costs[name] / self.best.seconds:.0%} of the time: {LOSSES[name]}"
            )
        for kind, kin in KINDS.items():
            rivals = [each for each in self.others if each.split.kind == kind]
            if kind != self.split.kind and rivals:
                more = {name: rivals[0].terms.get(name, 0.0) - self.best.terms.get(name, 0.0) for name in LOSSES}
                worst = max(more, key=lambda each: more[each])
                if more[worst] > 0:
                    said.append(f"{kin} alone would lose {time(more[worst])} more to {worst}")
        return said


WORK = ("attention", "model", "fixed")
LOSSES = {
    "idle": "some ranks have less to do than the busiest",
    "agree": "ranks make sure that they do the same",
    "calls": "calls of the operator too small to fill a rank",
    "merge": "parts of the answer are joined in float32 at each step of the ring",
    "swap": "heads are exchanged for tokens before and after each call",
    "ring": "keys and values arrive later than they are needed",
    "handoff": "states go from rank to rank",
}
KINDS = {"ulysses": "Ulysses", "ring": "a ring", "handoff": "handing states on"}


def plan_parallel(shape: Shape, world: int, links: Links, compute: Compute) -> Plan:
    """The fastest split of this work over `world` ranks that fits in their memory, with its forecast and its reasons.

    Every split is weighed: Ulysses x ring = `world` (or half of it twice, for the branches of guidance), each order of
    the ring, and which of the two lies among neighbours; for recurrences Ulysses x handoff. Of those within a hundredth
    the simplest is taken. `links` and `compute` are measured (`measure_links`, `measure_compute`) or a datasheet's
    (`preset`). Raises ValueError, with every reason, where no split of this world will do.
    """
    for name, value, expected in (("shape", shape, Shape), ("links", links, Links), ("compute", compute, Compute)):
        if not isinstance(value, expected):
            raise TypeError(f"plan_parallel: {name} must be a {expected.__name__}, got {value!r}")
    if type(world) is not int or world < 1:
        raise ValueError(f"plan_parallel: world must be an int of at least 1, got {world!r}")
    fits, refused = [], []
    for split in splits(shape, world):
        reason = refusal(shape, split)
        if reason is None:
            told = forecast(shape, split, links, compute)
            if told.memory <= compute.memory:
                fits.append(told)
                continue
            reason = f"a rank would hold {size(told.memory)} of {size(compute.memory)}"
        refused.append((split, reason))
    if not fits:
        reasons = "\n".join(f"  {split}: {reason}" for split, reason in refused)
        raise ValueError(f"plan_parallel: no split of {world} ranks will do:\n{reasons}")
    fits.sort(key=lambda each: each.seconds)
    # Less than the model can tell apart is no reason for a second kind of split.
    best = min((each for each in fits if each.seconds <= TIE * fits[0].seconds), key=lambda each: each.split.plainness)
    fits.remove(best)
    alone = forecast(shape, Split(), links, compute)
    return Plan(shape, world, best, tuple(fits), tuple(refused), alone, links, compute)


def refusal(shape: Shape, split: Split) -> str | None:
    """Why this split makes no sense for this shape, or None."""
    if split.ulysses > shape.H:
        idle = split.ulysses - shape.H
        return f"{shape.H} heads over {split.ulysses} ranks leave {idle} with nothing to do"
    if split.ring * split.ulysses > shape.T:
        return f"T={shape.T} tokens over {split.ring * split.ulysses} ranks leave some without a token"
    return None


def forecast(shape: Shape, split: Split, links: Links, compute: Compute) -> Forecast:
    """Seconds, bytes sent and bytes held, of the busiest rank, for one split."""
    rest, ranks = shape.rest, split.ulysses * split.ring
    branches = (2 if rest.guidance else 1) / split.cfg
    calls = rest.layers * rest.steps * branches
    passes = (False, True) if shape.backward else (False,)
    terms = dict.fromkeys(("attention", *LOSSES), 0.0)
    total = 0.0
    for backward in passes:
        wire = first = sent(shape, split, backward=backward)
        if split.handoff:  # rank 0 sends most in the forward, one of the last two in the backward; a ring's are equal
            last = (sent(shape, split, (0, split.ring - n), backward=backward) for n in (1, 2))
            wire = max(first, *last, key=lambda each: each.states)
        total += calls * first.total
        for name, seconds in _pass(shape, split, links, compute, wire, backward).items():
            terms[name] += calls * seconds
    dense = rest.steps * branches * rest.flops * shape.B * shape.T / compute.dense / ranks
    terms["model"] = dense * (3 if shape.backward else 1)
    terms["fixed"] = rest.seconds
    return Forecast(split, terms, round(total), memory(shape, split))


def _pass(shape: Shape, split: Split, links: Links, compute: Compute, wire: Wire, backward: bool) -> dict[str, float]:
    """Seconds of one pass (forward or backward) of one call of the operator, by term."""
    factor = compute.backward if backward else 1.0
    even = factor * shape.flops / compute.rate / (split.ulysses * split.ring)
    heads = math.ceil(shape.H / split.ulysses) / (shape.H / split.ulysses)
    # Ranks agree before the forward and tell each other how it went after each pass, once for each wrapper.
    terms = {
        "attention": even,
        "agree": (1 if backward else 2) * links.agree * ((split.ulysses > 1) + (split.ring > 1)),
    }
    if split.ulysses > 1:
        halves = wire.swap_in, wire.swap_out
        terms["swap"] = sum(links.swapping(each, split.ulysses, split.strides[0]) for each in halves)
    if shape.recurrent:
        return terms | _handoff(shape, split, links, compute, wire, even, heads, backward)
    return terms | _ring(shape, split, links, compute, wire, even, heads, backward)


def _ring(
    shape: Shape, split: Split, links: Links, compute: Compute, wire: Wire, even: float, heads: float, backward: bool
) -> dict[str, float]:
    """Softmax: a block of keys each step, the next one on its way meanwhile."""
    steps = distances(shape, split.order, split.ring)
    shares = live_shares(shape, split.order, split.ring)
    busy = [heads * even * shares[d] / (split.ring * shape.live) for d in steps]
    each = compute.call * (2 if backward else 1)
    least = [each * count for count in pairs(shape, split.order, split.ring)]
    small = [max(0.0, floor - seconds) for floor, seconds in zip(least, busy, strict=True)]
    terms = {"idle": max(0.0, sum(busy) - even), "calls": sum(small)}
    if split.ring == 1:
        return terms
    stream = merged(shape, split, backward) / compute.stream
    blocks, grads = (
        [links.shifting(each, split.ring, split.strides[1]) for each in hops] for hops in (wire.blocks, wire.grads)
    )
    busy = [seconds + more for seconds, more in zip(busy, small, strict=True)]
    if not backward:
        work, beside, seen = busy, [*blocks, 0.0], 0.0
    else:
        # The own block is computed last, while the last gradients travel; nothing hides the first block's way.
        work, seen = [*busy[1:], busy[0]], sum(blocks[:1])
        beside = [a + b for a, b in zip([*blocks[1:], 0.0, 0.0], [0.0, *grads], strict=True)]
    for seconds, hop in zip(work, beside, strict=True):
        own = seconds + stream
        seen += max(hop - links.overlap * own, (1 - links.overlap) * hop)
    return terms | {"merge": stream * len(steps), "ring": seen}


def _handoff(
    shape: Shape, split: Split, links: Links, compute: Compute, wire: Wire, even: float, heads: float, backward: bool
) -> dict[str, float]:
    """Recurrences: summarise the own run as a map of the state, send it, then compute the run from its state."""
    least = compute.call * (2 if backward else 1)
    terms = {"idle": (heads - 1) * even, "calls": max(0.0, least - heads * even)}
    if split.ring > 1:
        stride = split.strides[1]
        moved = links.swapping(wire.states, split.ring, stride) + 2 * links.swapping(wire.sums / 2, split.ring, stride)
        terms["handoff"] = heads * even * summary(shape) + moved
    return terms


def summary(shape: Shape) -> float:
    """The cost of a run's map of the state, relative to the operator itself, which computes the same products.

    Above 1 for the delta rule with wide heads, whose transition [K,K] the operator never forms.
    """
    K, V = shape.K, shape.values
    if shape.operator == "linear_attention":
        each = 2 * K * V
    elif shape.operator == "delta_rule":
        each = CHUNK * (4 * K + V) + 4 * K * (K + V)
    else:
        return 1.0
    return each * shape.B * shape.T * shape.H / shape.flops


def memory(shape: Shape, split: Split) -> float:
    """Peak bytes on the busiest rank: the model's, tensors saved for the backward, and one call's own.

    A backend's scratch memory (some MiB) is not counted.
    """
    rest, ranks = shape.rest, split.ulysses * split.ring
    branches = (2 if rest.guidance else 1) / split.cfg
    element, wide = shape.dtype.itemsize, accumulator(shape.dtype).itemsize
    rows, keys = shape.B * math.ceil(shape.T / ranks), shape.B * math.ceil(shape.keys / ranks)
    q, out = rows * shape.H * shape.K, rows * shape.H * shape.values
    block = keys * shape.heads * (shape.K + shape.values)
    own = (q + out + block) * element + rows * shape.H * wide  # q, k, v, out and lse
    half = element < wide
    saved, call = own, 0.0
    if split.ulysses > 1:  # all tokens of some heads beside some tokens of all, and messages on their way
        saved += own
        call += (own if shape.backward else (q + block) * element) * (split.ulysses - 1) / split.ulysses
    if split.ring > 1 and not shape.recurrent:
        saved += out * wide * half
        call += 2 * block * element + (q + block) * wide * half  # in work and arriving; a part in float32
        if shape.backward:
            call += (q + 2 * block + out * half) * wide  # dq, the sums of dk and dv that come and go, dout
    if shape.backward:
        call += own * (2 if split.ulysses > 1 else 1)  # the gradients of all of these
        if shape.recurrent:
            call += (q + out + block) * wide
        saved *= rest.layers
    return rest.weights + rest.kept * shape.B * shape.T / ranks * branches + saved + call


def merged(shape: Shape, split: Split, backward: bool) -> float:
    """Bytes read and written by one step's float32 sums: of out, or of dq, dk and dv."""
    ranks, wide = split.ulysses * split.ring, accumulator(shape.dtype).itemsize
    rows, keys = shape.B * shape.T / ranks, shape.B * shape.keys / ranks
    if not backward:
        return 3 * wide * rows * shape.H * shape.values
    return 3 * wide * (rows * shape.H * shape.K + keys * shape.heads * (shape.K + shape.values))


@functools.lru_cache(maxsize=1024)
def live_shares(shape: Shape, order: str, ring: int) -> tuple[float, ...]:
    """For each step of a ring, the share of the busiest rank's pairs that the mask allows.

    Estimated from `SAMPLES` positions of each of `RANKS` ranks. In step d rank r has the keys of rank r - d.
    """
    if not shape.causal:
        return (1.0,) * ring
    ranks = torch.linspace(0, ring - 1, min(ring, RANKS), device="cpu").round().long()
    rows = _places(ranks, order, ring) * shape.T + (shape.keys - shape.T)
    found = []
    for step in range(ring):
        ago = rows[:, :, None] - _places((ranks - step) % ring, order, ring)[:, None, :] * shape.keys
        seen = (ago > 0).double() + 0.5 * (ago == 0)
        if shape.window is not None:
            seen *= ago <= shape.window + 0.5
        found.append(seen.mean((1, 2)).max().item())
    return tuple(found)


def _places(ranks: Tensor, order: str, ring: int) -> Tensor:
    """The positions of sampled tokens of these ranks, relative to the sequence (0 to 1): [ranks, SAMPLES]."""
    middle = (torch.arange(SAMPLES, dtype=torch.float64, device="cpu") + 0.5) / SAMPLES
    own = ranks.double()[:, None]
    if order == "plain":
        return (own + middle) / ring
    if order == "stripe":
        return middle + 0 * own
    half = (torch.arange(SAMPLES // 2, dtype=torch.float64, device="cpu") + 0.5) / (SAMPLES // 2)
    return torch.cat([own + half, 2 * ring - 1 - own + half], 1) / (2 * ring)


def time(seconds: float) -> str:
    """Three digits and a unit that suits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def size(count: float) -> str:
    """Bytes in a unit that suits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"
