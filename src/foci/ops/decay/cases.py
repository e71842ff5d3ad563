"""The small problems on which linear attention is proven."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from foci.core.spec import Case
from foci.ops.chance import Chance
from foci.ops.draw import Draw
from foci.ops.recurrent import UNEVEN, Problem, closed


@dataclass(frozen=True)
class Linear(Problem):
    """A problem of linear attention: may have a bonus [H,K], or be non-causal."""

    bonus: bool = False
    causal: bool = True

    def features(self) -> set[str]:
        said = {"bonus": self.bonus, "not causal": not self.causal}
        return super().features() | {feature for feature, present in said.items() if present}

    def more(self, draw: Draw) -> dict[str, Any]:
        bonus = {"bonus": draw.normal(self.H, self.K)} if self.bonus else {}
        return bonus if self.causal else bonus | {"causal": False}


PROBLEMS = (
    Linear("plain"),
    Linear("one token", T=1, decay="channel", state=True),
    Linear("decay per head", decay="head"),
    Linear("decay per token", decay="token"),
    Linear("decay per channel", decay="channel"),
    Linear("gates as narrow as q", decay="token", narrow=True),
    Linear("one chunk", B=1, T=64, H=2, K=8, decay="token", state=True),
    Linear("no whole chunks", B=1, T=131, H=2, K=24, decay="token"),
    Linear("no whole chunks, per channel", B=1, T=150, H=2, K=8, V=12, decay="channel", state=True),
    Linear("grouped heads", H=6, G=2, decay="token"),
    Linear("grouped heads, per head, state", H=6, G=2, decay="head", state=True, scale=0.3),
    Linear("one key head", G=1, decay="channel"),
    Linear("value width", V=24),
    Linear("odd widths", K=7, V=5, decay="channel"),
    Linear("scale", scale=0.3, decay="head"),
    Linear("scale of 0", T=7, scale=0.0),  # `scale or K**-0.5` would use the default
    Linear("negative scale", T=7, scale=-0.3),
    Linear("state", state=True, decay="token"),
    Linear("state, no decay", state=True),
    Linear("fused projection", fused=True, decay="token"),
    Linear("bonus", bonus=True, decay="channel"),
    Linear("bonus without decay", bonus=True, T=7),
    Linear("bonus, grouped heads", B=1, T=70, H=4, G=2, K=8, V=5, bonus=True, decay="token", state=True),
    Linear("not causal", causal=False),
    Linear("not causal, grouped heads", causal=False, H=4, G=2, V=24, state=True),
    Linear("not causal, packed", B=1, causal=False, offsets=(0, 0, 1, 8, 8, 19)),
    Linear("packed", B=1, offsets=(0, 0, 1, 8, 8, 19), decay="token"),
    # as many documents and tokens: what is kept by their number is another call's
    Linear("packed, other offsets", B=1, offsets=(0, 0, 3, 5, 8, 19), decay="token"),
    Linear("packed, long documents", B=1, T=150, H=2, K=8, offsets=(0, 70, 71, 150), decay="token"),
    Linear("packed, whole chunks", B=1, T=83, H=2, K=8, offsets=(0, 16, 80, 83), decay="token", state=True),
    Linear("packed, per head", B=1, offsets=(0, 6, 7, 19), decay="head"),
    Linear("packed, per channel", B=1, T=83, H=2, K=8, offsets=(0, 1, 1, 70, 83), decay="channel", state=True),
    Linear("packed, bonus", B=1, offsets=(0, 1, 8, 19, 19), decay="channel", state=True, bonus=True),
    Linear("extreme gates per head", H=5, decay="head", gates=Draw.extremes),
    Linear("extreme gates per token", T=70, H=2, K=8, decay="token", gates=Draw.extremes),
    Linear("extreme gates per channel", T=70, H=2, K=8, decay="channel", state=True, gates=Draw.extremes),
    Linear("extreme gates, bonus", T=21, K=8, decay="channel", bonus=True, gates=Draw.extremes),
    Linear("all gates at -20, per token", B=1, T=70, H=2, K=8, decay="token", gates=closed),
    Linear("all gates at -20, per channel", B=1, T=70, H=2, K=8, decay="channel", state=True, gates=closed),
    Linear(
        "everything", B=1, T=90, H=6, G=2, K=7, V=12, decay="channel", state=True, offsets=(0, 65, 65, 66, 90),
        bonus=True, scale=0.5,
    ),
)  # fmt: skip
# For GPUs, which run other kernels in the sizes of models (Spec.large).
LARGE_PROBLEMS = (
    Linear("width 128", T=256, K=128),
    Linear("width 128, per head", T=2112, H=4, K=128, decay="head"),  # four: an RMS of one number is none
    Linear("width 128, per token", T=256, K=128, decay="token"),
    Linear("width 256", T=128, H=16, K=256),
    Linear("width 256, per token", T=130, H=2, K=256, decay="token"),
    Linear("width 256, 16 heads, per token", T=130, H=16, K=256, decay="token"),
    Linear("width 256, per channel", T=130, H=16, K=256, decay="channel"),
    Linear("width 128, per channel", T=256, H=16, K=128, decay="channel"),
    Linear("width 64, bonus", T=2112, H=2, K=64, decay="channel", bonus=True),
    Linear("width 64, bonus, per token", T=256, H=36, K=64, decay="token", bonus=True),
    Linear("width 64, bonus, no gates", B=3, T=8, H=2, K=64, state=True, bonus=True),
    Linear("width 64, bonus, one head", B=1, T=4096, H=1, K=64, decay="channel", bonus=True),
    Linear("width 128, packed", B=1, T=UNEVEN[-1], H=16, K=128, offsets=UNEVEN, decay="token", state=True),
    Linear(
        "width 128, packed, few heads, per channel", B=1, T=4096, H=2, K=128, offsets=(0, 3, 3, 2100, 4090, 4096),
        decay="channel", state=True,
    ),
    Linear("width 128, one head", B=1, T=4096, H=1, K=128, decay="token"),
    Linear("width 128, one head, per channel", B=1, T=4096, H=1, K=128, decay="channel", state=True),
    Linear("width 128, 32 heads", B=1, T=4096, H=32, K=128),
    Linear("width 128, 32 heads, per head", B=1, T=4096, H=32, K=128, decay="head"),
    Linear("width 128, 24 heads, per token", B=1, T=4096, H=24, K=128, decay="token"),
    Linear("width 128, 24 heads, no whole chunks", B=1, T=4090, H=24, K=128, decay="token"),
    Linear("width 128, 24 heads, per channel", B=1, T=4096, H=24, K=128, decay="channel"),
    Linear("width 64, bonus, 60 heads", B=1, T=4096, H=60, K=64, decay="channel", bonus=True),
)  # fmt: skip
CASES, LARGE = (tuple(problem.case for problem in problems) for problems in (PROBLEMS, LARGE_PROBLEMS))


def drawn(name: str, room: int) -> Case:
    """A random problem (Spec.drawn). Non-causal ones have no decay."""
    chance = Chance(name, room)
    drawn, bonus = Linear.drawn(chance, name), chance.yes(0.3)
    causal = bonus or drawn.decay != "" or chance.yes()
    return replace(drawn, bonus=bonus, causal=causal).varied(chance, *("bonus",) * bonus)
