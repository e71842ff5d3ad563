"""The small problems on which the delta rule is proven."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Case
from foci.ops.chance import FEW, Chance
from foci.ops.draw import Draw
from foci.ops.recurrent import UNEVEN, Problem, closed

COSINE = 0.9  # of correlated keys: there the triangle of a chunk is badly conditioned


@dataclass(frozen=True)
class Delta(Problem):
    """A problem of the delta rule; keys are "independent", "correlated" or "identical", and of length 1 in layers.

    beta is drawn between 0 and `beta`, or all equal to it where `full`. `erase`: another key is read than is written.
    """

    alike: str = "independent"
    length: float = 1.0
    beta: float = 1.0
    full: bool = False
    erase: bool = False

    def features(self) -> set[str]:
        said = {
            "erase": self.erase,
            "negative eigenvalues": self.beta > 1,
            f"{self.alike} keys": self.alike != "independent",
        }
        return super().features() | {feature for feature, present in said.items() if present}

    def keys(self, draw: Draw) -> Tensor:
        shape = (self.B, self.T, self.heads, self.K)
        if self.alike == "independent":
            return self.length * draw.unit(*shape)
        common = draw.unit(self.B, 1, self.heads, self.K).expand(shape)
        if self.alike == "identical":
            return self.length * common.contiguous()
        # Two keys a c + b d_i with independent d_i meet at the cosine a^2 / (a^2 + b^2).
        mixed = COSINE**0.5 * common.double() + (1 - COSINE) ** 0.5 * draw.unit(*shape).double()
        return self.length * torch.nn.functional.normalize(mixed, dim=-1).to(draw.dtype)

    def more(self, draw: Draw) -> dict[str, Any]:
        beta = draw.uniform(self.B, self.T, self.H, most=self.beta)
        made = {"beta": torch.full_like(beta, self.beta) if self.full else beta}
        return made | ({"erase": draw.unit(self.B, self.T, self.heads, self.K)} if self.erase else {})


def every_other_slow(draw: Draw, *shape: int) -> Tensor:
    """Of every other head gates that forget hardly anything."""
    gates = draw.gates(*shape)
    gates[..., 1::2] /= 1000
    return gates


PROBLEMS = (
    Delta("plain"),
    Delta("one token", T=1, decay="channel", state=True),
    Delta("decay per head", decay="head"),
    Delta("decay per token", decay="token"),
    Delta("decay per channel", decay="channel"),
    Delta("gates as narrow as q", decay="token", narrow=True),
    Delta("one chunk", B=1, T=64, H=2, K=8, decay="token", state=True),
    Delta("no whole chunks", B=1, T=131, H=2, K=24, decay="token"),
    Delta("no whole chunks, per channel", B=1, T=150, H=2, K=8, V=12, decay="channel", state=True),
    Delta("grouped heads", H=6, G=2, decay="token"),
    Delta("grouped heads, per head, state", H=6, G=2, decay="head", state=True, scale=0.3),
    Delta("one key head", G=1, decay="channel"),
    Delta("value width", V=24),
    Delta("odd widths", K=7, V=5, decay="channel"),
    Delta("shorter keys", length=0.5, decay="token"),
    Delta("scale", scale=0.3, decay="head"),
    Delta("scale of 0", T=7, scale=0.0),  # `scale or K**-0.5` takes it for none
    Delta("negative scale", T=7, scale=-0.3),
    Delta("state", state=True, decay="token"),
    Delta("fused projection", fused=True, decay="token"),
    Delta("erase", erase=True, decay="token"),
    Delta("erase without decay", erase=True, T=7),
    Delta("erase, grouped heads", B=1, T=70, H=4, G=2, K=8, V=5, erase=True, decay="channel", state=True),
    Delta("negative eigenvalues", beta=2.0, decay="token"),
    Delta("beta of 2", T=70, H=2, K=8, beta=2.0, full=True),
    Delta("identical keys", B=1, T=70, H=2, alike="identical"),
    Delta("identical keys, beta of 1", B=1, T=70, H=2, K=8, alike="identical", full=True),
    Delta("identical keys, beta of 2", B=1, T=70, H=2, K=8, alike="identical", beta=2.0, full=True, decay="token"),
    Delta("identical keys, per channel", B=1, T=130, H=1, K=64, alike="identical", full=True, decay="channel"),
    Delta("correlated keys", B=1, T=131, H=2, alike="correlated"),
    Delta("correlated keys, beta of 2", B=1, T=70, H=2, alike="correlated", beta=2.0, full=True, decay="channel"),
    Delta("packed", B=1, offsets=(0, 0, 1, 8, 8, 19), decay="token"),
    # as many documents and tokens: what is kept by their number is another call's
    Delta("packed, other offsets", B=1, H=6, G=2, offsets=(0, 0, 3, 5, 8, 19), decay="token"),
    Delta("packed, long documents", B=1, T=150, H=2, K=8, offsets=(0, 70, 71, 150), decay="token"),
    Delta("packed, whole chunks", B=1, T=83, H=2, K=8, offsets=(0, 16, 80, 83), state=True),
    Delta("packed, per head", B=1, offsets=(0, 6, 7, 19), decay="head"),
    Delta("packed, per channel", B=1, T=83, H=2, K=8, offsets=(0, 1, 1, 70, 83), decay="channel", state=True),
    Delta("extreme gates per head", H=5, decay="head", gates=Draw.extremes),
    Delta("extreme gates per token", T=70, H=2, K=8, decay="token", gates=Draw.extremes),
    Delta("extreme gates per channel", T=70, H=2, K=8, decay="channel", state=True, gates=Draw.extremes),
    Delta("all gates at -20, per token", B=1, T=70, H=2, K=8, decay="token", gates=closed),
    Delta("all gates at -20, per channel", B=1, T=70, H=2, K=8, decay="channel", state=True, gates=closed),
    Delta(
        "everything", B=1, T=90, H=6, G=2, K=7, V=12, decay="channel", state=True, offsets=(0, 65, 65, 66, 90),
        erase=True, beta=2.0, scale=0.5,
    ),
)  # fmt: skip
# For GPUs, which run other kernels in the sizes of models (Spec.large).
LARGE_PROBLEMS = (
    Delta("width 128", T=256, H=16, K=128),
    Delta("width 128, a key a head", T=640, H=16, K=128, decay="token"),
    Delta("width 128, per head", T=256, H=16, K=128, decay="head"),
    Delta("width 128, per token", T=256, G=16, H=32, K=128, decay="token"),
    Delta("width 128, many heads", B=3, T=256, G=16, H=32, K=128, decay="token"),
    Delta("width 128, per channel", T=256, H=16, K=128, decay="channel"),
    Delta("width 128, per channel, many heads", T=256, H=32, K=128, decay="channel"),
    Delta("width 128, per channel, more heads than at once", B=3, T=256, H=32, K=128, decay="channel"),
    Delta("width 128, few heads", T=4096, G=1, H=2, K=128, decay="token"),
    Delta("width 128, two heads", B=1, T=4096, G=1, H=2, K=128, decay="token"),
    Delta("width 128, few heads, no gates", B=1, T=4096, G=4, H=8, K=128),
    Delta("width 128, few heads, per channel", T=4096, G=1, H=2, K=128, decay="channel"),
    Delta("width 128, in pieces by gates or maps", B=1, T=7680, G=2, H=8, K=128, decay="token", gates=every_other_slow),
    Delta(
        "width 128, documents in pieces by gates or maps",
        B=1,
        T=8300,
        H=2,
        K=128,
        offsets=(0, 5100, 8300),
        decay="token",
        gates=every_other_slow,
    ),
    Delta("width 64, in pieces by its gates", B=1, T=3072, G=11, H=33, K=64, V=72, decay="token"),
    Delta("width 64, some heads", T=512, H=32, K=64, decay="token"),
    Delta("width 64, many heads", B=3, T=256, H=32, K=64, decay="token"),
    Delta("width 64, in pieces by gates or maps", B=1, T=3072, H=16, K=64, decay="token", gates=every_other_slow),
    Delta("width 256", T=256, H=2, K=256),
    Delta("width 256, no whole chunks", T=130, H=2, K=256, decay="token"),
    Delta("width 256, per token", T=256, H=2, K=256, decay="token"),
    Delta("width 128, packed", B=1, T=UNEVEN[-1], H=16, K=128, offsets=UNEVEN, decay="token", state=True),
    Delta("width 128, two documents", B=1, T=600, H=16, K=128, offsets=(0, 290, 600), decay="token"),
    Delta(
        "width 128, two documents, grouped heads", B=1, T=600, G=8, H=16, K=128, offsets=(0, 290, 600), decay="token"
    ),
)
CASES, LARGE = (tuple(problem.case for problem in problems) for problems in (PROBLEMS, LARGE_PROBLEMS))


def drawn(name: str, room: int) -> Case:
    """A problem that nobody chose (Spec.drawn).

    What is nearly nothing is lost in the roundings of a sum, and what never fades gathers them: so few tokens come
    after a state or are written twice each, none along one key, and constant gates have independent keys. Along one key
    gates of few heads get sums that cancel. What is read by another key than it is written by may grow: tokens are few.
    """
    chance = Chance(name, room)
    drawn = Delta.drawn(chance, name)
    few = drawn.T <= 2 * drawn.K
    kinds = ("independent", "independent", "correlated", *("identical",) * (drawn.B * drawn.H >= FEW))
    alike = "independent" if drawn.decay == "head" else chance.one(*kinds)
    erase = few and chance.yes(0.3)
    return replace(
        drawn,
        state=drawn.state and few,
        length=chance.one(1.0, 0.5),
        beta=1.0 if alike == "identical" else chance.one(1.0, 2.0),
        full=few and chance.yes(0.2),
        alike=alike,
        erase=erase,
    ).varied(chance, "beta")
