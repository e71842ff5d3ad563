"""The small problems on which the selective scan is proven."""

from __future__ import annotations

from typing import Any

import torch

from foci.core.spec import Case
from foci.ops.chance import FEW, LONGEST, Chance, told, varied
from foci.ops.draw import Draw
from foci.ops.recurrent import UNEVEN

WIDEST = 8192  # drawn channels


def case(
    name: str,
    *features: str,
    B: int = 2,
    T: int = 19,
    D: int = 12,
    K: int = 4,
    skip: bool = False,
    state: bool = False,
    offsets: tuple[int, ...] = (),
    fused: bool = False,
    by: type[Draw] = Draw,
) -> Case:
    """All tensors of these sizes; `offsets` pack documents into one row, `fused`: x, dt, B, C are views of one tensor.

    dt is between 0 and 1, and A about -1 .. -K; with the feature "extreme", from 0 to -inf.
    """

    def make(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
        draw = by(dtype, device, seed)
        dt = draw.uniform(B, T, D)
        tokens = {"x": draw.normal(B, T, D), "dt": dt, "B": draw.normal(B, T, K), "C": draw.normal(B, T, K)}
        if fused:
            views = torch.cat([*tokens.values()], dim=-1).split([D, D, K, K], dim=-1)
            tokens = dict(zip(tokens, views, strict=True))
        rates = -(1 + torch.arange(K, device=device, dtype=torch.float64)) * (0.5 + draw.uniform(D, K).double())
        made: dict[str, Any] = tokens | {"A": draw.extremes(D, K) if "extreme" in features else rates.to(dtype)}
        if skip:
            made["skip"] = draw.normal(D)
        if state:
            made["state"] = draw.state(len(offsets) - 1 if offsets else B, D, K)
        if offsets:
            made["offsets"] = torch.tensor(offsets, dtype=torch.int64, device=device)
        return made

    said = {"state": state, "packed": offsets, "strided": fused, "skip": skip}
    return Case(name, frozenset({*features, *(feature for feature, present in said.items() if present)}), make)


CASES = (
    case("plain"),
    case("one token", T=1, state=True),
    case("one channel", B=1, D=1, K=16),
    case("one key", K=1),
    case("no whole slabs", B=1, T=77, D=5, state=True),
    case("whole slabs", B=1, T=64, D=8),
    case("skip", skip=True),
    case("state", state=True),
    case("fused projection", fused=True),
    case("packed", B=1, offsets=(0, 0, 1, 8, 8, 19)),
    case("packed, other offsets", B=1, offsets=(0, 0, 3, 5, 8, 19), skip=True),
    case("packed, long documents", B=1, T=150, offsets=(0, 70, 71, 150)),
    case("packed, states", B=1, T=83, offsets=(0, 1, 1, 70, 83), state=True, skip=True),
    case("extreme rates", "extreme", T=40, state=True),
    case("extreme rates, packed", "extreme", B=1, T=40, offsets=(0, 20, 20, 40), state=True, skip=True),
)
# For GPUs, which run other kernels in the sizes of models (Spec.large).
LARGE = (
    case("many channels", T=3800, D=2048, K=16, skip=True),
    case("many channels, packed", B=1, T=UNEVEN[-1], D=2048, K=16, offsets=UNEVEN, state=True, skip=True),
)


def drawn(name: str, room: int) -> Case:
    """A problem that nobody chose (Spec.drawn). What a sum over all tokens gives few channels may cancel."""
    chance = Chance(name, room)
    T, K = chance.tokens(LONGEST), chance.one(16, chance.size(64))
    D = chance.size(min(WIDEST, room // (T * K)))
    B = chance.rows(room // (T * K * D))
    offsets = chance.packed(B, T)
    sizes: dict[str, Any] = {"B": B, "T": T, "D": D, "K": K, "offsets": offsets}
    chosen = sizes | {"skip": D >= FEW and chance.yes(), "state": chance.yes(), "fused": chance.yes(0.3)}
    features = ("extreme",) * chance.yes(0.2)
    wide = ("A", *("skip",) * chosen["skip"], *("dt", "B", "C") * (not chosen["fused"]))
    made = case(told(name, chosen, features), *features, **chosen)
    return varied(chance, made, wide, ("state",) * chosen["state"])
