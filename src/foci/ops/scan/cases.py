"""The small problems on which the elementwise scan is proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Case
from foci.ops.chance import LONGEST, Chance, told, varied
from foci.ops.draw import Draw
from foci.ops.recurrent import UNEVEN

WIDEST = 8192  # drawn channels


def case(
    name: str,
    *features: str,
    B: int = 2,
    T: int = 19,
    D: int = 12,
    gates: Callable[..., Tensor] = Draw.gates,
    state: bool = False,
    offsets: tuple[int, ...] = (),
    fused: bool = False,
    by: type[Draw] = Draw,
) -> Case:
    """x and log_decay of these sizes; `offsets` pack documents into one row, `fused`: both are views of one tensor."""

    def make(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
        draw = by(dtype, device, seed)
        made: dict[str, Any] = {"x": draw.normal(B, T, D), "log_decay": gates(draw, B, T, D)}
        if fused:
            both = torch.cat([made["x"], made["log_decay"].to(dtype)], dim=-1)
            made = {"x": both[..., :D], "log_decay": both[..., D:]}
        if state:
            made["state"] = draw.state(len(offsets) - 1 if offsets else B, D)
        if offsets:
            made["offsets"] = torch.tensor(offsets, dtype=torch.int64, device=device)
        return made

    said = {"state": state, "packed": offsets, "strided": fused, "extreme": gates is not Draw.gates}
    return Case(name, frozenset({*features, *(feature for feature, present in said.items() if present)}), make)


CASES = (
    case("plain"),
    case("one token", T=1, state=True),
    case("one channel", B=1, T=40, D=1),
    case("no whole pieces", B=1, T=131, D=5, state=True),
    case("whole pieces", B=1, T=64, D=8),
    case("state", state=True),
    case("fused projection", fused=True),
    case("packed", B=1, offsets=(0, 0, 1, 8, 8, 19)),
    case("packed, long documents", B=1, T=150, offsets=(0, 70, 71, 150)),
    case("packed, states", B=1, T=83, offsets=(0, 1, 1, 70, 83), state=True),
    case("extreme gates", T=70, state=True, gates=Draw.extremes),
    case("extreme gates, packed", B=1, T=40, offsets=(0, 20, 20, 40), state=True, gates=Draw.extremes),
)
# For GPUs, which run other kernels in the sizes of models (Spec.large).
LARGE = (
    case("many channels", T=4000, D=2048),
    case("many channels, few tokens", T=100, D=2048),
    case("many channels, packed", B=1, T=UNEVEN[-1], D=2048, offsets=UNEVEN, state=True),
)


def drawn(name: str, room: int) -> Case:
    """A random problem (Spec.drawn)."""
    chance = Chance(name, room)
    T = chance.tokens(LONGEST)
    D = chance.size(min(WIDEST, room // T))
    B = chance.rows(room // (T * D))
    offsets = chance.packed(B, T)
    chosen: dict[str, Any] = {"state": chance.yes(), "offsets": offsets, "fused": chance.yes(0.3)}
    gates = chance.one(Draw.gates, Draw.gates, Draw.extremes)
    name = told(name, {"B": B, "T": T, "D": D, "gates": gates is not Draw.gates and gates} | chosen)
    made = case(name, B=B, T=T, D=D, gates=gates, **chosen)
    return varied(chance, made, narrow=("log_decay",) * (not chosen["fused"]) + ("state",) * chosen["state"])
